"""One pack run in memory: its cutter, its record, and the rules that hold between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker._format.manifest import Manifest, PackRun, Rows
from stoker._format.schema import Schema
from stoker._format.supersample import Packed
from stoker._pack.catalog import RunJournal
from stoker._pack.cutter import Cutter
from stoker._pack.record import PackRecord, record_growth
from stoker.errors import PackError

__all__ = ["PackRunner", "RunConfig", "source_changed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a run makes of samples.

    Attributes:
        dataset: id of the data set.
        schema: the columns of every sample.
        super_sample_bytes: limit of a super-sample's data.
    """

    dataset: str
    schema: Schema
    super_sample_bytes: int


class PackRunner:
    """The run that a packer carries out: its cutter, its record, and the rules that hold between them.

    Args:
        config: what it makes of samples.
        record: with which it begins; its prefix is durable.
        journal: takes what it comes to.
    """

    def __init__(self, config: RunConfig, record: PackRecord, journal: RunJournal) -> None:
        self.record = record
        self._config = config
        self._journal = journal
        self.cutter = Cutter(config.schema, config.super_sample_bytes, dataset=config.dataset, run=record.run)
        prefix = record.prefix
        self.durable = [] if prefix is None else [prefix.rows.packed(row, row) for row in range(len(prefix))]

    def replayed(self, packed: Packed) -> Packed:
        """Return the durable super-sample that ``packed`` is again.

        Raises:
            PackError: it is another one.
        """
        durable = self.durable[packed.ordinal]
        if replace(packed, tag=durable.tag) != durable:
            where = f"super-sample {packed.ordinal}, before sample {self.cutter.samples}"
            raise source_changed(self.record.run, f"{where}, differs")
        return durable

    def check_open(self) -> None:
        """Raise PackError if the run had come to the end of its source: then there is nothing to add to it."""
        if self.record.state != "packing":
            raise source_changed(self.record.run, f"it has more than its {self.record.samples} samples")

    def check_reached(self, objects: int) -> None:
        """Raise PackError if the source ended before the durable prefix did."""
        if objects < len(self.durable):
            ended, packed = self.cutter.samples, self.record.samples
            raise source_changed(self.record.run, f"it ended after {ended} samples, but {packed} were packed before")

    def is_record_due(self, objects: int) -> bool:
        """Return whether the durable prefix has grown enough to be recorded."""
        recorded = 0 if self._journal.recorded is None else len(self._journal.recorded)
        return objects - recorded >= record_growth(recorded)

    async def save(self, packed: list[Packed], state: str, version: int = 0) -> None:
        """Record that the run has come this far."""
        prefix = self.manifest(packed) if packed else None
        await self._journal.save(replace(self.record, state=state, version=version, prefix=prefix))

    def manifest(self, packed: list[Packed]) -> Manifest:
        """Return a manifest of the run's first super-samples alone.

        Raises:
            PackError: they are not numbered from 0 without gaps or repeats, so it would name other objects than theirs.
        """
        run = self.record.run
        for number, each in enumerate(packed):
            if each.ordinal != number:
                raise PackError(
                    f"run {run} has super-sample {each.ordinal} where {number} belongs, so a sample would be lost or "
                    f"doubled; nothing was committed: give the run up with stoker gc --abandoned {run} --delete, and "
                    "pack again"
                )
        return Manifest(
            dataset=self._config.dataset,
            version=1,
            schema=self._config.schema,
            rows=Rows.of(packed),
            runs=(PackRun(run, 0, len(packed)),),
        )


def source_changed(run: str, what: str) -> PackError:
    """Return the error that says how a source differs from the one that the run began with."""
    return PackError(
        f"the source is not the one that the unfinished pack began with: {what}; pack the original again to resume, "
        f"or give this one its own name with source=, or give the unfinished pack up with: stoker gc --abandoned {run} "
        "--delete"
    )
