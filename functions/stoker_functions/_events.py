"""The events of functions other than pack, each checked where it comes in; what is wrong names its field."""

from __future__ import annotations

from dataclasses import dataclass

from stoker._base.fields import Fields
from stoker._format.supersample import MAX_SUPER_SAMPLE_BYTES
from stoker._pack.merge import Job
from stoker.errors import EventError

__all__ = ["CommitEvent", "CompactEvent"]

_ID = "[0-9a-f]{16}"
_MAX_RUNS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitEvent:
    """Which runs to commit.

    Attributes:
        dataset: URL of the data set.
        job: whose runs, which the event then names; None for all that belong to no job.
    """

    dataset: str
    job: Job | None = None

    @classmethod
    def from_json(cls, event: object) -> CommitEvent:
        """Return what an event says.

        Raises:
            EventError: it is no commit event.
        """
        fields = Fields(event, "commit event")
        dataset = fields.text("dataset")
        job = fields.text("job", pattern=f"({_ID})?", default="")
        if not job:
            if "runs" in fields or "mode" in fields:
                raise EventError("the commit event has 'runs' or a 'mode', and no 'job' that they are of")
            fields.end()
            return cls(dataset=dataset)
        runs = fields.array("runs", most=_MAX_RUNS)
        creates = fields.choice("mode", ("create", "append"), default="append") == "create"
        fields.end()
        checked = tuple(Fields({"run": run}, "commit event").text("run", pattern=_ID) for run in runs)
        if not checked or len(set(checked)) < len(checked):
            raise EventError("the commit event's 'runs' are none, or have one twice; name each run of the job once")
        return cls(dataset=dataset, job=Job(id=job, runs=checked, creates=creates))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactEvent:
    """What to compact.

    Attributes:
        dataset: URL of the data set.
        super_sample_bytes: how large a super-sample should be.
    """

    dataset: str
    super_sample_bytes: int

    @classmethod
    def from_json(cls, event: object) -> CompactEvent:
        """Return what an event says.

        Raises:
            EventError: it is no compact event.
        """
        fields = Fields(event, "compact event")
        found = cls(
            dataset=fields.text("dataset"),
            super_sample_bytes=fields.integer(
                "super_sample_bytes", least=1, most=MAX_SUPER_SAMPLE_BYTES, default=8 << 20
            ),
        )
        fields.end()
        return found
