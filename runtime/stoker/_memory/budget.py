"""Plans for the memory budget of a rank, in bytes: ring slots, or random access.

The budget covers the manifest and the ring, whose slots hold the window, the objects in flight and a reserve for
hedges. The budget determines only the look-ahead, never window, lanes or order. If the super-samples have nearly one
size, each takes one slot. Otherwise slots are smaller, and each takes as many as it needs.

Worker processes divide the budget of their rank: each plans its part, and an error names the rank's total.

``full`` needs the whole data set in memory. If it does not fit, samples are read in groups: the budget then covers the
heads of all super-samples, a few large slots, and small buffers for hedges.

If a ``window`` order has units, the budget covers the heads of all super-samples, units instead of super-samples, and
small buffers for hedges.

Random access has no ring: it borrows bytes for heads and values, and waits if none are left.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from stoker._base.sizes import format_bytes
from stoker._base.task_group import Limiter
from stoker._format.manifest import Manifest
from stoker._format.schema import Column, Schema
from stoker._format.supersample import is_small
from stoker._memory.ring import ALIGNMENT_BYTES
from stoker._order.order import OrderConfig
from stoker._order.sharding import Sharding
from stoker._order.units import Units
from stoker.errors import MemoryBudgetError

_MAX_WASTE = 0.25
"""Maximum fraction of the super-samples' bytes that may be added to fill whole slots. Large slots are used again as
they are; small ones waste less, but objects of other sizes leave gaps between them."""
_SLOT_DIVISORS = 1, 2, 4, 8, 16
_SLOTS_PER_HEDGE_SLOT = 16
"""Slots per slot that is reserved for hedges; at least one is."""
_GROUP_SLOTS = 4
"""One slot is in use, one is ready, and two are being filled. More and smaller slots would merge fewer ranges; with
fewer, the training loop would wait for the end of each."""
_HEDGE_BUFFER_SHARE = 16
"""Size of a slot divided by the size of a group's hedge buffer."""


UNIT_GAP_SHARE = 16
"""Size of a unit's values divided by that of the gaps between them that may be read with them."""
_UNIT_SLACK = 1.25
"""Memory of a window of units of varying sizes, divided by its expected size: the sum of hundreds varies little, and
what is released leaves gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """The division of a memory budget.

    Attributes:
        slots: total number of ring slots.
        slot_bytes: size of a slot: that of the largest super-sample, or a fraction of it if the super-samples' sizes
            differ much, or what fits if slots hold groups of samples, or the expected size of the largest unit.
        window_slots: number of slots of the super-samples or units that the order needs at a time, at most.
        hedge_slots: number of slots reserved for hedges.
        item_slots: mean number of slots of a super-sample or group.
        manifest_bytes: memory of the manifest.
        head_bytes: memory of all heads, and of super-samples on their way to a cache process, if slots hold groups or
            units; otherwise 0.
        hedge_buffers: number of hedge buffers beside the slots, if slots hold groups or units; otherwise 0.
        hedge_buffer_bytes: size of a hedge buffer.
        granule_bytes: multiple to which the sizes of units are rounded up, if slots hold units; otherwise 0.
    """

    slots: int
    slot_bytes: int
    window_slots: int
    hedge_slots: int
    manifest_bytes: int
    head_bytes: int = 0
    hedge_buffers: int = 0
    hedge_buffer_bytes: int = 0
    item_slots: float = 1.0
    granule_bytes: int = 0

    @property
    def holds_groups(self) -> bool:
        """Whether slots hold groups of samples, such as units, instead of super-samples."""
        return self.head_bytes > 0

    @property
    def holds_units(self) -> bool:
        """Whether slots hold units."""
        return self.granule_bytes > 0

    @property
    def size_bytes(self) -> int:
        """Total memory of the plan."""
        buffer_bytes = self.hedge_buffers * self.hedge_buffer_bytes
        return self.slots * self.slot_bytes + buffer_bytes + self.head_bytes + self.manifest_bytes


def window_items(super_samples: int, order: OrderConfig, sharding: Sharding) -> int:
    """Return the number of super-samples, or of units, that a rank must hold at a time, out of ``super_samples``.

    Per lane this is one for ``none``, the window for ``window``, and twice the window for ``block``, so that the next
    group arrives while one is delivered. ``full`` holds all super-samples.
    """
    if order.shuffle == "full":
        return super_samples
    lane = {"none": 1, "window": order.window, "block": 2 * order.window}[order.shuffle]
    return sharding.max_open_lanes() * min(lane, super_samples)


def plan_slots(
    manifest: Manifest,
    manifest_bytes: int,
    order: OrderConfig,
    sharding: Sharding,
    memory_bytes: int,
    workers: int = 1,
    *,
    max_request_bytes: int | None = None,
) -> SlotPlan:
    """Return the plan of one of the ``workers`` processes that divide ``memory_bytes``.

    Besides the window there are at most as many slots as one epoch of this rank fills: a longer look-ahead would fetch
    epochs that may never be needed. ``max_request_bytes`` is the size of the largest request, and so of its hedge; by
    default that of the largest super-sample.

    Raises:
        MemoryBudgetError: the budget is too small; the message names the smallest that works.
    """
    room_bytes = memory_bytes // workers - manifest_bytes
    request_bytes = min(manifest.largest_bytes, max_request_bytes or manifest.largest_bytes)
    items = window_items(len(manifest), order, sharding)
    divisions = _divide_into_slots(manifest), _divide_into_slots(manifest, max_waste=math.inf)
    needs = [_SlotNeeds.of(manifest, sharding, items, request_bytes, *division) for division in divisions]
    if (need := next((each for each in needs if each.size_bytes <= room_bytes), None)) is None:
        figure = (min(each.size_bytes for each in needs) + manifest_bytes) * workers
        raise MemoryBudgetError(
            f"{_describe_shortage(memory_bytes, workers)}: shuffle {order.shuffle!r} needs room for the {items + 1} "
            f"largest super-samples, one of them in flight, of up to {format_bytes(manifest.largest_bytes)} each, for "
            f"a hedged request and for a manifest of {format_bytes(manifest_bytes)}; give memory={figure} "
            f"({format_bytes(figure)}) or a smaller window"
        )
    slots = room_bytes // need.slot_bytes
    most = need.window_slots + need.epoch_slots
    hedge_slots = max(need.hedge_slots, min(min(slots, most) // _SLOTS_PER_HEDGE_SLOT, slots - need.item_slots))
    return SlotPlan(
        slots=min(slots, most + hedge_slots),
        slot_bytes=need.slot_bytes,
        window_slots=need.window_slots,
        hedge_slots=hedge_slots,
        manifest_bytes=manifest_bytes,
        item_slots=need.mean_slots,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlotNeeds:
    """Numbers of slots of one size that a rank needs.

    Attributes:
        slot_bytes: size of a slot.
        window_slots: number of slots of the super-samples that the order needs at a time, at most.
        item_slots: the same with the next super-sample, which is in flight.
        hedge_slots: number of slots of a hedge.
        epoch_slots: number of slots of the super-samples that the rank reads in an epoch, at most.
        mean_slots: mean number of slots of a super-sample.
    """

    slot_bytes: int
    window_slots: int
    item_slots: int
    hedge_slots: int
    epoch_slots: int
    mean_slots: float

    @property
    def size_bytes(self) -> int:
        """Smallest memory that works."""
        return (self.item_slots + self.hedge_slots) * self.slot_bytes

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        sharding: Sharding,
        items: int,
        request_bytes: int,
        slot_bytes: int,
        counts: NDArray[np.int64],
    ) -> Self:
        """Return the needs for ``items`` super-samples at a time, which take ``counts`` slots each."""
        lanes = sharding.max_open_lanes()
        needed, with_next = _sum_largest(counts, manifest.rows.samples, lanes, items)
        return cls(
            slot_bytes=slot_bytes,
            window_slots=needed,
            item_slots=with_next,
            hedge_slots=-(-request_bytes // slot_bytes),
            epoch_slots=-(-int(counts.sum()) // sharding.readers) + lanes * int(counts.max()),
            mean_slots=float(counts.mean()),
        )


def _divide_into_slots(manifest: Manifest, max_waste: float = _MAX_WASTE) -> tuple[int, NDArray[np.int64]]:
    """Return the size of a slot, and the number of slots of each super-sample, ``int64 [super-samples]``.

    A slot has the size of the largest super-sample, unless that wastes too much: then about the median size, or a
    fraction of it.
    """
    sizes = manifest.rows.size_bytes.astype(np.int64)
    largest_bytes = int(sizes.max())
    medians = max(1, largest_bytes // int(np.median(sizes)))
    for parts in (1, *(medians * divisor for divisor in _SLOT_DIVISORS)):
        slot_bytes = -(-largest_bytes // (parts * ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        counts = -(-sizes // slot_bytes)
        if int(counts.sum()) * slot_bytes <= (1.0 + max_waste) * int(sizes.sum()):
            break
    return slot_bytes, counts


def _sum_largest(counts: NDArray[np.int64], samples: NDArray[np.integer], lanes: int, items: int) -> tuple[int, int]:
    """Return the number of slots of the ``items`` largest super-samples, and that with the next largest one.

    The border between two lanes may divide a super-sample of several samples, so that both lanes hold it.
    """
    largest = np.argpartition(-counts, min(items, len(counts) - 1))[: items + 1]
    largest = largest[np.argsort(-counts[largest], kind="stable")]
    held = np.repeat(counts[largest], np.minimum(samples[largest].astype(np.int64), lanes))
    needed = int(held[:items].sum())
    following = held[items] if len(held) > items else counts.max()  # the largest one of the next epoch
    return needed, needed + int(following)


def plan_group_slots(
    *,
    manifest_bytes: int,
    head_bytes: int,
    sample_bytes: int,
    hedge_buffers: int,
    memory_bytes: int,
    workers: int = 1,
    staged_bytes: int = 0,
) -> SlotPlan:
    """Return the plan of one process for slots that hold groups of samples.

    Args:
        manifest_bytes: memory of the manifest.
        head_bytes: memory of all heads.
        sample_bytes: maximum bytes to read of one sample; the minimum size of a slot.
        hedge_buffers: maximum number of concurrent hedges without a slot.
        memory_bytes: budget of the rank.
        workers: number of processes that divide the budget; default 1.
        staged_bytes: memory of whole super-samples on their way to a cache process; default 0.

    Raises:
        MemoryBudgetError: the budget is too small; the message names the smallest that works.
    """
    head_bytes += staged_bytes
    shares = _GROUP_SLOTS * _HEDGE_BUFFER_SHARE + hedge_buffers
    least_buffer_bytes = -(-max(1, sample_bytes) // (_HEDGE_BUFFER_SHARE * ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
    left_bytes = memory_bytes // workers - manifest_bytes - head_bytes
    buffer_bytes = left_bytes // shares // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    if buffer_bytes < least_buffer_bytes:
        figure = (shares * least_buffer_bytes + manifest_bytes + head_bytes) * workers
        raise MemoryBudgetError(
            f"{_describe_shortage(memory_bytes, workers)}: shuffle 'full' keeps "
            f"{_describe_heads(head_bytes, staged_bytes)}, beside {_GROUP_SLOTS} groups of samples, each large enough "
            f"for a sample of {format_bytes(sample_bytes)}, and a manifest of {format_bytes(manifest_bytes)}; give "
            f"memory={figure} ({format_bytes(figure)}) or another shuffle"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSizes:
    """The sizes of a data set's units, without the columns in the head.

    Attributes:
        expected_bytes: expected size of the largest unit, with gaps, a multiple of 64.
        max_bytes: maximum size of a unit; equal to ``expected_bytes`` if all columns are fixed.
    """

    expected_bytes: int
    max_bytes: int

    @classmethod
    def of(cls, manifest: Manifest, columns: Mapping[str, Column], units: Units) -> UnitSizes:
        """Return the sizes of units with some columns: exact for fixed ones, else bounded by the super-sample."""
        fixed = {name: c.element_bytes for name, c in manifest.schema.items() if c.is_fixed and not is_small(c)}
        wanted_bytes = sum(fixed[name] for name in columns if name in fixed)
        counts, unit_rows = manifest.rows.samples.astype(np.int64), units.rows_per_unit.astype(np.int64)
        unit_rows = np.minimum(unit_rows, counts)
        ragged_bytes = (
            manifest.rows.size_bytes.astype(np.int64) - manifest.rows.head_bytes - counts * sum(fixed.values())
        )
        if all(column.is_fixed for column in columns.values()):
            ragged_bytes = np.zeros_like(counts)
        expected = unit_rows * wanted_bytes + np.maximum(0, ragged_bytes) * unit_rows // np.maximum(1, counts)
        largest = unit_rows * wanted_bytes + np.maximum(0, ragged_bytes)
        return cls(expected_bytes=_with_gaps(expected), max_bytes=_with_gaps(largest))


def _with_gaps(sizes: NDArray[np.int64]) -> int:
    largest = max(1, int(sizes.max(initial=0)))
    return -(-(largest + largest // UNIT_GAP_SHARE) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def plan_unit_slots(
    *,
    units: int,
    sizes: UnitSizes,
    order: OrderConfig,
    sharding: Sharding,
    manifest_bytes: int,
    head_bytes: int,
    hedge_buffers: int,
    memory_bytes: int,
    workers: int = 1,
    staged_bytes: int = 0,
) -> SlotPlan:
    """Return the plan of one process for slots that hold units.

    Units of varying sizes need a quarter more than their expected size, and room for the largest one possible.

    Args:
        units: number of units of the data set.
        sizes: sizes of the units.
        order: order of the units.
        sharding: part of an epoch of this process.
        manifest_bytes: memory of the manifest.
        head_bytes: memory of all heads.
        hedge_buffers: maximum number of concurrent hedges.
        memory_bytes: budget of the rank.
        workers: number of processes that divide the budget; default 1.
        staged_bytes: memory of whole super-samples on their way to a cache process; default 0.

    Raises:
        MemoryBudgetError: the budget is too small; the message names the smallest that works.
    """
    head_bytes += staged_bytes
    slot_bytes, needed = sizes.expected_bytes, window_items(units, order, sharding)
    minimum = needed + 2
    if sizes.max_bytes > slot_bytes:
        minimum = math.ceil(needed * _UNIT_SLACK) + 1 + -(-sizes.max_bytes // slot_bytes)
    fixed_bytes = manifest_bytes + head_bytes + hedge_buffers * 2 * slot_bytes
    slots = (memory_bytes // workers - fixed_bytes) // slot_bytes
    if slots < minimum:
        figure = (minimum * slot_bytes + fixed_bytes) * workers
        raise MemoryBudgetError(
            f"{_describe_shortage(memory_bytes, workers)}: a window of {needed} units needs room for {minimum} of "
            f"{format_bytes(slot_bytes)} each, for {_describe_heads(head_bytes, staged_bytes)}, and for "
            f"a manifest of {format_bytes(manifest_bytes)}; give memory={figure} ({format_bytes(figure)}), a smaller "
            "window or smaller units"
        )
    epoch_units = -(-units // sharding.readers) + sharding.max_open_lanes()
    return SlotPlan(
        slots=min(slots, minimum + epoch_units),
        slot_bytes=slot_bytes,
        window_slots=needed,
        hedge_slots=0,
        manifest_bytes=manifest_bytes,
        head_bytes=head_bytes,
        hedge_buffers=hedge_buffers,
        hedge_buffer_bytes=2 * slot_bytes,
        granule_bytes=slot_bytes if sizes.max_bytes == slot_bytes else max(ALIGNMENT_BYTES, slot_bytes // 1024 * 64),
    )


def _describe_heads(head_bytes: int, staged_bytes: int) -> str:
    staged = " and some that are on their way to the cache of cluster=" if staged_bytes else ""
    return f"the heads of all super-samples{staged}, {format_bytes(head_bytes)}"


def _describe_shortage(memory_bytes: int, sharers: int) -> str:
    divided = f", divided by {sharers} workers," if sharers > 1 else ""
    return f"memory of {format_bytes(memory_bytes)}{divided} is too small"


def max_sample_bytes(manifest: Manifest, columns: Mapping[str, Column]) -> int:
    """Return the maximum bytes to read, besides the head, of one sample's values of ``columns``.

    Exact for fixed columns; the bound for ragged values is the rest of their super-sample.
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
"""Memory of a parsed head besides its bytes, with one entry per tensor: measured, and rounded up."""


def open_head_bytes(schema: Schema, head_bytes: int) -> int:
    """Return the memory of a parsed head of ``head_bytes`` bytes."""
    tensors = 1 + len(schema) + sum(not column.is_fixed for column in schema.values())
    return head_bytes + _HEAD_OBJECT_BYTES + _TENSOR_OBJECT_BYTES * tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMemory:
    """The memory plan of random access, without the samples that it returns.

    Attributes:
        manifest_bytes: memory of the manifest and the index of its rows.
        hedge_slots: number of buffers for hedges.
        slot_bytes: size of a hedge buffer: that of the largest request.
        head_bytes: memory of heads, those in use and those in the cache.
        value_bytes: memory of values in flight.
    """

    manifest_bytes: int
    hedge_slots: int
    slot_bytes: int
    head_bytes: int
    value_bytes: int

    @classmethod
    def plan(
        cls, manifest: Manifest, hedge_slots: int, memory_bytes: int, *, max_request_bytes: int | None = None
    ) -> Self:
        """Divide ``memory_bytes``: up to half of the free memory for heads, the rest for values.

        ``max_request_bytes`` is the size of the largest request; by default that of the largest super-sample.

        Raises:
            MemoryBudgetError: one head, one super-sample and the hedges do not fit; the message names the smallest size
                that works.
        """
        manifest_bytes = manifest.file_bytes + 8 * (len(manifest) + 1)
        object_bytes = manifest.largest_bytes
        slot_bytes = min(object_bytes, max_request_bytes or object_bytes)
        largest_head_bytes = open_head_bytes(manifest.schema, int(manifest.rows.head_bytes.max()))
        free_bytes = memory_bytes - manifest_bytes - hedge_slots * slot_bytes
        if free_bytes < largest_head_bytes + object_bytes:
            figure = memory_bytes - free_bytes + largest_head_bytes + object_bytes
            raise MemoryBudgetError(
                f"memory of {format_bytes(memory_bytes)} is too small for random access: a manifest of "
                f"{format_bytes(manifest_bytes)}, a super-sample of up to {format_bytes(object_bytes)}, its head and "
                f"{hedge_slots} hedges must fit; give memory={figure} ({format_bytes(figure)})"
            )
        heads_bytes = open_head_bytes(manifest.schema, 0) * len(manifest) + int(
            manifest.rows.head_bytes.sum(dtype="i8")
        )
        head_bytes = max(largest_head_bytes, min(heads_bytes, free_bytes // 2, free_bytes - object_bytes))
        return cls(
            manifest_bytes=manifest_bytes,
            hedge_slots=hedge_slots,
            slot_bytes=slot_bytes,
            head_bytes=head_bytes,
            value_bytes=free_bytes - head_bytes,
        )


class ByteBudget(Limiter):
    """A limiter of bytes that are in use at a time."""

    @asynccontextmanager
    async def reserve(self, size_bytes: int) -> AsyncIterator[None]:
        """Wait for bytes, and hold them during the block.

        Raises:
            MemoryBudgetError: ``size_bytes`` exceeds the limit.
        """
        await self.acquire(size_bytes)
        try:
            yield
        finally:
            self.release(size_bytes)

    async def acquire(self, units: int = 1, *, urgent: bool = False) -> None:
        """Wait for bytes, and hold them until :meth:`release`. A cancelled call holds none.

        Raises:
            MemoryBudgetError: ``units`` exceeds the limit.
        """
        if units > self.limit:
            raise MemoryBudgetError(f"{units} bytes exceed the limit of {self.limit}; give more memory")
        await super().acquire(units, urgent=urgent)
