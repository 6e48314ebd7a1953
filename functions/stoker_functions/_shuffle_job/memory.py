"""How the memory of one task is spent, and the least that works: pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from stoker._base.sizes import format_bytes
from stoker.errors import BudgetError

__all__ = ["HEADER_BYTES", "TaskMemory", "held_bytes", "usable_bytes"]

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

    def group_bytes(self, *, heads_bytes: int, sample_bytes: int) -> int:
        """Return how large a group of samples may be that is read by ranges: three of them, and all heads, are held.

        Args:
            heads_bytes: of all super-samples.
            sample_bytes: the most that one sample may have.

        Raises:
            BudgetError: there is no room; names the figure that fits.
        """
        group_bytes = min(_MOST_GROUP_BYTES, (self.values_bytes - heads_bytes) // 3)
        least_bytes = max(2 * sample_bytes, 1)
        if group_bytes < least_bytes:
            raise BudgetError(
                f"to read by ranges takes the heads of all super-samples, {format_bytes(heads_bytes)}, and three "
                f"groups of samples, {format_bytes(3 * least_bytes)}: more than the {format_bytes(self.values_bytes)} "
                "there are; give more memory, or another way"
            )
        return group_bytes
