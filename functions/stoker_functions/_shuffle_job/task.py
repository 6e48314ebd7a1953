"""The tasks of which a materialized epoch is made, as events that a function takes; and the memory of one: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

from stoker._base.fields import Fields
from stoker._base.sizes import format_bytes
from stoker._fetch.groups import HeadMemory
from stoker._format.manifest import Manifest
from stoker._format.supersample import MAX_SUPER_SAMPLE_BYTES
from stoker._memory.budget import most_sample_bytes
from stoker._order.order import MAX_EPOCH, MAX_LANES, MAX_SLICES
from stoker.errors import BudgetError, ConfigError

Step = Literal["scatter", "slice", "commit"]
Way = Literal["ranged", "streamed", "scattered"]
_PROGRAM_BYTES = 160 << 20
"""Of an instance: the interpreter, libraries and connections."""
_SAMPLE_BYTES = 192
"""What is known of a sample in memory besides its values: measured, and rounded up."""
_COLUMN_BYTES = 16
"""Of it, for each column: a length and a checksum."""
HEADER_BYTES = 64 << 10
"""More than the header of a super-sample has, unless there are hundreds of columns."""
_MOST_READS, _MOST_UPLOADS = 16, 8
_LEAST = 2
_HEDGES = 2
_SHARE = 8
"""Objects on their way, there or back, take up to so much of the memory: one part in this many."""
_MOST_GROUP_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleTask:
    """One task. Whoever carries it out, how often, and at the same time as whom, makes no difference to its result.

    Attributes:
        dataset: URL of the data set.
        version: of its manifest.
        seed: of the order.
        epoch: from 0.
        lanes: into how many parts the epoch is cut.
        way: how a slice reads: by ranges, all super-samples streamed past, or what was scattered before.
        slices: into how many parts the epoch is cut to be written.
        scatters: into how many parts the super-samples are cut to be scattered; 0 but for the way ``scattered``.
        object_bytes: limit of a super-sample's data that is written.
        step: ``scatter`` some super-samples to slices, write a ``slice``, or ``commit`` what all slices have written.
        part: which scatter or slice; 0 for a commit.
        keep: commits keep so many epochs of the run before this one, and delete older ones; by default they keep all.

    Raises:
        ConfigError: values do not go together.
    """

    dataset: str
    version: int
    seed: int
    epoch: int
    lanes: int
    way: Way
    slices: int
    scatters: int
    object_bytes: int
    step: Step
    part: int
    keep: int = MAX_EPOCH

    def __post_init__(self) -> None:
        if (self.way == "scattered") != (self.scatters > 0):
            raise ConfigError(f"the way {self.way!r} does not go with {self.scatters} scatters")
        parts = {"scatter": self.scatters, "slice": self.slices, "commit": 1}[self.step]
        if not 0 <= self.part < parts:
            raise ConfigError(f"part {self.part} is not in [0, {parts}), of which a {self.step} is one")

    def to_event(self) -> dict[str, Any]:
        """Return the task as a JSON object."""
        return asdict(self)

    @classmethod
    def from_event(cls, event: object) -> ShuffleTask:
        """Return the task that an event asks for.

        Raises:
            EventError: it is not one; names the field.
            ConfigError: its values do not go together.
        """
        fields = Fields(event, "shuffle event")
        values: Mapping[str, Any] = {
            "dataset": fields.text("dataset"),
            "version": fields.integer("version", least=1),
            "seed": fields.integer("seed", most=(1 << 64) - 1),
            "epoch": fields.integer("epoch", most=MAX_EPOCH),
            "lanes": fields.integer("lanes", least=1, most=MAX_LANES),
            "way": fields.choice("way", get_args(Way)),
            "slices": fields.integer("slices", least=1, most=MAX_SLICES),
            "scatters": fields.integer("scatters", most=MAX_SLICES, default=0),
            "object_bytes": fields.integer("object_bytes", least=1, most=MAX_SUPER_SAMPLE_BYTES),
            "step": fields.choice("step", get_args(Step)),
            "part": fields.integer("part", most=MAX_SLICES, default=0),
            "keep": fields.integer("keep", most=MAX_EPOCH, default=MAX_EPOCH),
        }
        fields.end()
        return cls(**values)


def usable_bytes(instance_bytes: int) -> int:
    """Return what a task may use of the memory of an instance."""
    return max(0, instance_bytes - _PROGRAM_BYTES)


def held_bytes(columns: int, samples: float, size_bytes: float) -> float:
    """Return what samples take whose values have ``size_bytes`` in all."""
    return size_bytes + samples * (_SAMPLE_BYTES + _COLUMN_BYTES * columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMemory:
    """The memory of one task.

    Attributes:
        reads: objects on their way here.
        hedges: more of them, for late requests.
        uploads: objects on their way to the store; two more are under construction.
        values_bytes: of samples that are held, and what is known of them.
    """

    reads: int
    hedges: int
    uploads: int
    values_bytes: int

    @classmethod
    def plan(cls, memory_bytes: int, *, largest_bytes: int, object_bytes: int) -> Self:
        """Return how ``memory_bytes`` are spent.

        Args:
            memory_bytes: the budget.
            largest_bytes: of an object that is read.
            object_bytes: limit of the data of an object that is written.

        Raises:
            BudgetError: it is too small; names the figure that fits.
        """
        written_bytes = object_bytes + HEADER_BYTES
        reads = max(_LEAST, min(_MOST_READS, memory_bytes // _SHARE // largest_bytes))
        uploads = max(_LEAST, min(_MOST_UPLOADS, memory_bytes // _SHARE // written_bytes))
        passing_bytes = (reads + _HEDGES) * largest_bytes + (uploads + 2) * written_bytes
        if memory_bytes < 2 * passing_bytes:
            raise BudgetError(
                f"{format_bytes(memory_bytes)} of memory beside the program are too small to shuffle super-samples of "
                f"up to {format_bytes(largest_bytes)}: give {format_bytes(2 * passing_bytes + _PROGRAM_BYTES)} in all "
                "or more"
            )
        return cls(reads=reads, hedges=_HEDGES, uploads=uploads, values_bytes=memory_bytes - passing_bytes)

    def group_bytes(self, manifest: Manifest) -> int:
        """Return how large a group of samples may be that is read by ranges: three of them, and all heads, are held.

        Raises:
            BudgetError: there is no room; names the figure that fits.
        """
        heads_bytes = HeadMemory.size_bytes(manifest, manifest.schema)
        group_bytes = min(_MOST_GROUP_BYTES, (self.values_bytes - heads_bytes) // 3)
        least_bytes = max(2 * most_sample_bytes(manifest, manifest.schema), 1)
        if group_bytes < least_bytes:
            raise BudgetError(
                f"to read by ranges takes the heads of all super-samples, {format_bytes(heads_bytes)}, and three "
                f"groups of samples, {format_bytes(3 * least_bytes)}: more than the {format_bytes(self.values_bytes)} "
                "there are; give more memory, or another way"
            )
        return group_bytes
