"""One budget in bytes: how it becomes ring slots or serves random access, and the least that works.

The budget of a rank covers the manifest and the ring; the ring's slots hold the window, what is in flight and a reserve
for hedges. Window, lanes and order never bend to the budget: only the look-ahead derives from it.

Worker processes of a rank divide its budget: each plans with its part, and an error names the rank's figure.

``full`` would have to hold everything. Where that does not fit, its samples are read in groups: the budget then covers
the heads of all super-samples, a few large slots, and small buffers for hedges.

Random access has no ring: it borrows bytes for heads and for values, and waits in line where there are none left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np

from stoker._base.sizes import format_bytes
from stoker._base.task_group import Limiter
from stoker._format.manifest import Manifest
from stoker._format.schema import Column, Schema
from stoker._format.supersample import is_small
from stoker._memory.ring import ALIGNMENT_BYTES
from stoker._order.order import OrderConfig
from stoker._order.sharding import Dealing
from stoker.errors import BudgetError

_HEDGE_SHARE = 16
"""One slot in so many is kept for hedges, at least one."""
_GROUP_SLOTS = 4
"""One is used and the next is there while two arrive. With more, smaller ones fewer gaps are bridged; with fewer, the
end of each is waited for."""
_HEDGE_BUFFER_SHARE = 16
"""A group's hedge buffer is this part of a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """How a memory budget is spent.

    Attributes:
        slots: of the ring, in all.
        slot_bytes: of one: the size of the largest super-sample, or what fits where they hold groups of samples.
        window_slots: that the order needs at a time.
        hedge_slots: kept for hedged requests.
        manifest_bytes: of the manifest in memory.
        head_bytes: of the heads in memory, where slots hold groups.
        hedge_buffers: for hedges that need no slot, where slots hold groups.
        hedge_buffer_bytes: of one.
    """

    slots: int
    slot_bytes: int
    window_slots: int
    hedge_slots: int
    manifest_bytes: int
    head_bytes: int = 0
    hedge_buffers: int = 0
    hedge_buffer_bytes: int = 0

    @property
    def holds_groups(self) -> bool:
        """Whether slots hold groups of samples, not super-samples."""
        return self.head_bytes > 0

    @property
    def size_bytes(self) -> int:
        """What all of it takes."""
        buffer_bytes = self.hedge_buffers * self.hedge_buffer_bytes
        return self.slots * self.slot_bytes + buffer_bytes + self.head_bytes + self.manifest_bytes


def window_slots(super_samples: int, order: OrderConfig, partition: Dealing) -> int:
    """Return how many super-samples a rank must hold at a time for this order.

    A lane holds its window, ``block`` twice that so that the next group arrives while one is delivered, ``none`` one;
    ``full`` holds everything.
    """
    if order.shuffle == "full":
        return super_samples
    lane = {"none": 1, "window": order.window, "block": 2 * order.window}[order.shuffle]
    return partition.lanes_touched() * min(lane, super_samples)


def plan_slots(
    manifest: Manifest,
    manifest_bytes: int,
    order: OrderConfig,
    partition: Dealing,
    memory_bytes: int,
    sharers: int = 1,
) -> SlotPlan:
    """Return how one of the ``sharers`` of ``memory_bytes`` spends its part.

    No more slots are taken than one epoch of this rank can fill besides its window: looking farther ahead than that
    would fetch epochs that may never be asked for.

    Raises:
        BudgetError: the budget is too small; names the figure that fits.
    """
    slot_bytes = -(-manifest.largest_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    needed = window_slots(len(manifest), order, partition)
    minimum = needed + 2  # one in flight, one for its hedge
    slots = (memory_bytes // sharers - manifest_bytes) // slot_bytes
    if slots < minimum:
        figure = (minimum * slot_bytes + manifest_bytes) * sharers
        raise BudgetError(
            f"{_too_small(memory_bytes, sharers)}: shuffle {order.shuffle!r} holds {needed} super-samples "
            f"at a time, and 2 more are in flight, of up to {format_bytes(slot_bytes)} each, beside a manifest of "
            f"{format_bytes(manifest_bytes)}; give memory={figure} ({format_bytes(figure)}) or a smaller window"
        )
    epoch_items = -(-len(manifest) // partition.takers) + partition.lanes_touched()
    hedge_slots = max(1, min(min(slots, needed + epoch_items) // _HEDGE_SHARE, slots - needed - 1))
    return SlotPlan(
        slots=min(slots, needed + epoch_items + hedge_slots),
        slot_bytes=slot_bytes,
        window_slots=needed,
        hedge_slots=hedge_slots,
        manifest_bytes=manifest_bytes,
    )


def plan_group_slots(
    *, manifest_bytes: int, head_bytes: int, sample_bytes: int, hedge_buffers: int, memory_bytes: int, sharers: int = 1
) -> SlotPlan:
    """Return how ``memory_bytes`` are spent where slots hold groups of samples.

    Args:
        manifest_bytes: of the manifest in memory.
        head_bytes: of all heads in memory.
        sample_bytes: the most that one sample may have to be read of it: no slot is smaller.
        hedge_buffers: how many hedges may be under way without a slot.
        memory_bytes: the budget.
        sharers: how many divide it.

    Raises:
        BudgetError: the budget is too small; names the figure that fits.
    """
    shares = _GROUP_SLOTS * _HEDGE_BUFFER_SHARE + hedge_buffers
    least_buffer_bytes = -(-max(1, sample_bytes) // (_HEDGE_BUFFER_SHARE * ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
    left_bytes = memory_bytes // sharers - manifest_bytes - head_bytes
    buffer_bytes = left_bytes // shares // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    if buffer_bytes < least_buffer_bytes:
        figure = (shares * least_buffer_bytes + manifest_bytes + head_bytes) * sharers
        raise BudgetError(
            f"{_too_small(memory_bytes, sharers)}: shuffle 'full' keeps the heads of all super-samples, "
            f"{format_bytes(head_bytes)}, beside {_GROUP_SLOTS} groups of samples, each large enough for a sample of "
            f"{format_bytes(sample_bytes)}, and a manifest of {format_bytes(manifest_bytes)}; give memory={figure} "
            f"({format_bytes(figure)}) or another shuffle"
        )
    return SlotPlan(
        slots=_GROUP_SLOTS,
        slot_bytes=_HEDGE_BUFFER_SHARE * buffer_bytes,
        window_slots=1,
        hedge_slots=0,
        manifest_bytes=manifest_bytes,
        head_bytes=head_bytes,
        hedge_buffers=hedge_buffers,
        hedge_buffer_bytes=buffer_bytes,
    )


def _too_small(memory_bytes: int, sharers: int) -> str:
    divided = f", divided by {sharers} workers," if sharers > 1 else ""
    return f"memory {format_bytes(memory_bytes)}{divided} is too small"


def most_sample_bytes(manifest: Manifest, columns: Mapping[str, Column]) -> int:
    """Return the most that must be read, beside the head, of one sample's values of ``columns``.

    It is exact where these are of fixed size; ragged values may be all that their super-sample has room for.
    """
    fixed = {name: c.element_bytes for name, c in manifest.schema.items() if c.is_fixed and not is_small(c)}
    wanted_bytes = sum(fixed[name] for name in columns if name in fixed)
    if all(column.is_fixed for column in columns.values()):
        return wanted_bytes
    rows = manifest.rows
    bodies = rows.size_bytes.astype(np.int64) - rows.head_bytes
    return wanted_bytes + max(0, int((bodies - rows.samples.astype(np.int64) * sum(fixed.values())).max()))


_HEAD_OBJECT_BYTES = 1536
_TENSOR_OBJECT_BYTES = 256
"""What an open head takes besides its bytes: measured, and rounded up. It knows where each of its tensors starts."""


def head_bytes_held(schema: Schema, head_bytes: int) -> int:
    """Return what a head of ``head_bytes`` takes when it is open."""
    tensors = 1 + len(schema) + sum(not column.is_fixed for column in schema.values())
    return head_bytes + _HEAD_OBJECT_BYTES + _TENSOR_OBJECT_BYTES * tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMemory:
    """What random access may hold at a time, beside what it returns.

    Attributes:
        manifest_bytes: of the manifest and the index of its rows.
        hedge_slots: for hedged requests.
        slot_bytes: of one: the size of the largest super-sample.
        head_bytes: of heads, those in use and those that are kept.
        value_bytes: of values on their way.
    """

    manifest_bytes: int
    hedge_slots: int
    slot_bytes: int
    head_bytes: int
    value_bytes: int

    @classmethod
    def plan(cls, manifest: Manifest, hedge_slots: int, memory_bytes: int) -> Self:
        """Return how ``memory_bytes`` are spent: up to half of what is free on heads, the rest on values.

        Raises:
            BudgetError: one head, one super-sample and the hedges do not fit; names the figure that does.
        """
        manifest_bytes = manifest.file_bytes + 8 * (len(manifest) + 1)
        slot_bytes = manifest.largest_bytes
        largest_head_bytes = head_bytes_held(manifest.schema, int(manifest.rows.head_bytes.max()))
        free_bytes = memory_bytes - manifest_bytes - hedge_slots * slot_bytes
        if free_bytes < largest_head_bytes + slot_bytes:
            figure = memory_bytes - free_bytes + largest_head_bytes + slot_bytes
            raise BudgetError(
                f"memory {format_bytes(memory_bytes)} is too small for random access: a manifest of "
                f"{format_bytes(manifest_bytes)}, a super-sample of up to {format_bytes(slot_bytes)}, its head and "
                f"{hedge_slots} hedges must fit; give memory={figure} ({format_bytes(figure)})"
            )
        heads_bytes = head_bytes_held(manifest.schema, 0) * len(manifest) + int(
            manifest.rows.head_bytes.sum(dtype="i8")
        )
        head_bytes = max(largest_head_bytes, min(heads_bytes, free_bytes // 2, free_bytes - slot_bytes))
        return cls(
            manifest_bytes=manifest_bytes,
            hedge_slots=hedge_slots,
            slot_bytes=slot_bytes,
            head_bytes=head_bytes,
            value_bytes=free_bytes - head_bytes,
        )


class ByteBudget(Limiter):
    """Lends out bytes."""

    @asynccontextmanager
    async def hold(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold bytes for a while, after waiting for them.

        Raises:
            BudgetError: there are never so many.
        """
        await self.acquire(size_bytes)
        try:
            yield
        finally:
            self.release(size_bytes)

    async def acquire(self, units: int = 1, *, urgent: bool = False) -> None:
        """Wait for bytes and hold them until they are released. A wait that is cancelled leaves none behind.

        Raises:
            BudgetError: there are never so many.
        """
        if units > self.limit:
            raise BudgetError(f"{units} bytes are more than the {self.limit} there are; give more memory")
        await super().acquire(units, urgent=urgent)
