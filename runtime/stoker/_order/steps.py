"""The steps of a rank: the super-samples that each batch needs, and for how long, planned just ahead of use.

:class:`SuperSampleSteps` iterates over the rank's part of the order, for all epochs of the run, and gives each
super-sample that the rank must hold an **item** number, in order of first use. A step consists of **segments**, each
the part of one delivery block in the batch. A segment has the items that it needs, and the items that can be released
after it. The plan uses only the borders of blocks; the rows of a block are computed when the batch is gathered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker._order.order import Lane, Order, OrderConfig
from stoker._order.sharding import LaneSlice, Sharding
from stoker._order.units import Units

Ref = TypeVar("Ref")
RowIndices = tuple[NDArray[np.int64], NDArray[np.int64]]
OrderSource = Callable[[NDArray[np.integer] | Units, OrderConfig, int], Order]
"""Function from samples per super-sample or unit, config and epoch to the order of the epoch."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive samples of a batch that are read from one set of items.

    Attributes:
        items: numbers of the items that the segment needs.
        row_indices: function that computes ``(which, rows)``, ``int64 [samples]`` each: index into ``items``, and row.
        released_before: numbers of items that can be released before the segment, because other ranks read the rest of
            them.
        released_after: numbers of items that can be released after the segment.
    """

    items: tuple[int, ...]
    row_indices: Callable[[], RowIndices]
    released_before: tuple[int, ...] = ()
    released_after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedStep(Generic[Ref]):
    """One batch of this rank.

    Attributes:
        number: number of the step in the run, from 0.
        epoch: epoch of the step.
        end: position of the epoch behind the step, over all ranks.
        is_last: whether this is the rank's last step of the epoch.
        segments: segments in order of delivery.
        repeated: number of samples that all ranks together repeat in this step.
        first_uses: ``(item, reference)`` of every item that this step is the first to use, in order.
    """

    number: int
    epoch: int
    end: int
    is_last: bool
    segments: tuple[Segment, ...]
    repeated: int
    first_uses: tuple[tuple[int, Ref], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionRange:
    """A range of a rank's order: from a position of an epoch to the end of another epoch.

    Attributes:
        order: seed, shuffle, window, lanes and unit.
        sharding: the rank's part of the first epoch.
        epoch: first epoch; default 0.
        position: start position in the first epoch, as ``sharding`` counts; default 0.
        end_epoch: epoch before which to stop; None, the default, never stops.
    """

    order: OrderConfig
    sharding: Sharding
    epoch: int = 0
    position: int = 0
    end_epoch: int | None = None

    def epochs(self) -> Iterator[tuple[int, Sharding, int]]:
        """Yield each epoch with its sharding and its start position; none if an epoch has no step."""
        sharding, position = self.sharding, self.position
        following = sharding.from_start()
        for epoch in count(self.epoch) if self.end_epoch is None else range(self.epoch, self.end_epoch):
            if not following.count_steps(0):
                return
            yield epoch, sharding, position
            sharding, position = following, 0


class StepSource(ABC, Generic[Ref]):
    """The steps of one rank, epoch after epoch, planned just ahead of use.

    Args:
        samples: number of samples in each super-sample, integer ``[super-samples]``, or the units of the order.
        positions: range of the rank's order.
        order: function that returns the order of an epoch. Callers that plan for many ranks pass a cached one.
    """

    def __init__(
        self, samples: NDArray[np.integer] | Units, positions: PositionRange, order: OrderSource = Order
    ) -> None:
        self._next_item = 0
        self._numbers = count()
        self._steps = self._iter_epochs(samples, positions, order)

    def next(self) -> PlannedStep[Ref] | None:
        """Return the next step, or None after the last."""
        return next(self._steps, None)

    def _iter_epochs(
        self, samples: NDArray[np.integer] | Units, positions: PositionRange, order: OrderSource
    ) -> Iterator[PlannedStep[Ref]]:
        for epoch, sharding, position in positions.epochs():
            yield from self._iter_steps(order(samples, positions.order, epoch), sharding, position)

    @abstractmethod
    def _iter_steps(self, order: Order, sharding: Sharding, position: int) -> Iterator[PlannedStep[Ref]]:
        """Yield the steps of one epoch from a position on, numbered by ``self._numbers``."""


class _Block(NamedTuple):
    """A delivery block of a lane: its number, its places ``[start, end)``, and the pieces with samples in it."""

    number: int
    start: int
    end: int
    pieces: list[int]


_NO_BLOCK = _Block(-1, 0, 0, [])


@dataclass(slots=True)
class _LaneItems:
    """The items of one lane that are held at present: item number by piece; and the block that was read last."""

    lane: Lane
    held: dict[int, int] = field(default_factory=dict)
    block: _Block = _NO_BLOCK

    def block_at(self, place: int) -> _Block:
        """Return the block that contains a place; steps that are smaller than a block find it once."""
        if not self.block.start <= place < self.block.end:
            number, ends = self.lane.block_of(place), self.lane.block_ends
            start = int(ends[number - 1]) if number else 0
            self.block = _Block(number, start, int(ends[number]), self.lane.used_pieces(number).tolist())
        return self.block

    def drop_before(self, piece: int) -> list[int]:
        return [self.held.pop(old) for old in [old for old in self.held if old < piece]]


def resident_item(super_sample: int) -> int:
    """Return the negative item number of a super-sample that is not read; the function is its own inverse."""
    return -1 - super_sample


class SuperSampleSteps(StepSource[int]):
    """A :class:`StepSource` whose items are super-samples, by manifest row, or units, by number.

    Args:
        samples: number of samples in each super-sample, as in :class:`StepSource`.
        positions: range of the rank's order.
        order: function that returns the order of an epoch.
        is_resident: function that returns whether the consumer has a super-sample itself. It then has the item number
            :func:`resident_item` instead of the next one, and no first use. Default: it has none.
    """

    def __init__(
        self,
        samples: NDArray[np.integer] | Units,
        positions: PositionRange,
        order: OrderSource = Order,
        is_resident: Callable[[int], bool] | None = None,
    ) -> None:
        super().__init__(samples, positions, order)
        self._is_resident = is_resident
        self._first_uses: list[tuple[int, int]] = []

    def _iter_steps(self, order: Order, sharding: Sharding, position: int) -> Iterator[PlannedStep[int]]:
        iterate = self._iter_full_steps if order.config.shuffle == "full" else self._iter_lane_steps
        return iterate(order, sharding, position)

    def _new_item(self, super_sample: int) -> int:
        if self._is_resident is not None and self._is_resident(super_sample):
            return resident_item(super_sample)
        item, self._next_item = self._next_item, self._next_item + 1
        self._first_uses.append((item, super_sample))
        return item

    def _take_first_uses(self) -> tuple[tuple[int, int], ...]:
        first_uses, self._first_uses = tuple(self._first_uses), []
        return first_uses

    def _iter_lane_steps(self, order: Order, sharding: Sharding, position: int) -> Iterator[PlannedStep[int]]:
        lanes: dict[int, _LaneItems] = {}
        for step, is_last in sharding.steps(position):
            segments: list[Segment] = []
            for part in step.slices:
                held = lanes.setdefault(part.lane, _LaneItems(order.lane(part.lane)))
                others = _drop_others(lanes, part.lane) if step.is_partial else []
                segments.extend(self._segments(held, part, others))
            if is_last:
                segments[-1] = replace(
                    segments[-1], released_after=(*segments[-1].released_after, *_drop_others(lanes))
                )
            number, first_uses = next(self._numbers), self._take_first_uses()
            yield PlannedStep(number, order.epoch, step.end, is_last, tuple(segments), step.repeated, first_uses)

    def _segments(self, held: _LaneItems, part: LaneSlice, others: list[int]) -> Iterator[Segment]:
        """Cut a slice of a lane at block borders; the first segment releases ``others``, the items of other lanes."""
        lane, place = held.lane, part.start
        while place < part.end:
            block, block_start, block_end, pieces = held.block_at(place)
            end = min(part.end, block_end)
            released_before = (*others, *held.drop_before(lane.pieces_of(block).start))
            for piece in pieces:
                if piece not in held.held:
                    held.held[piece] = self._new_item(int(lane.super_samples[piece]))
            items = tuple(held.held[piece] for piece in pieces)
            released_after = held.drop_before(lane.pieces_of(block + 1).start) if end == block_end else []
            row_indices = partial(lane.row_indices, block, place - block_start, end - block_start)
            yield Segment(
                items=items,
                row_indices=row_indices,
                released_before=released_before,
                released_after=tuple(released_after),
            )
            others, place = [], end

    def _iter_full_steps(self, order: Order, sharding: Sharding, position: int) -> Iterator[PlannedStep[int]]:
        """Yield the steps of ``full``, which holds every super-sample to the end of the epoch."""
        permuted = order.feistel()
        held: dict[int, int] = {}
        for step, is_last in sharding.steps(position):
            positions = np.concatenate([part.positions(sharding.lanes) for part in step.slices])
            super_samples, rows = order.locate(permuted(positions))
            items, first, inverse = np.unique(super_samples, return_index=True, return_inverse=True)
            for super_sample in items[np.argsort(first)].tolist():
                if super_sample not in held:
                    held[super_sample] = self._new_item(super_sample)
            segment = Segment(
                items=tuple(held[super_sample] for super_sample in items.tolist()),
                row_indices=partial(_return_rows, (inverse, rows)),
                released_after=tuple(held.values()) if is_last else (),
            )
            number, first_uses = next(self._numbers), self._take_first_uses()
            yield PlannedStep(number, order.epoch, step.end, is_last, (segment,), step.repeated, first_uses)


def _drop_others(lanes: dict[int, _LaneItems], kept: int | None = None) -> list[int]:
    """Drop the held items of all lanes except ``kept``, and return them.

    A short step is cut differently and may read other lanes. It reads one lane at a time, so that it needs no more
    memory than other steps; an item that is dropped too early is fetched again.
    """
    return [item for lane, held in lanes.items() if lane != kept for item in held.drop_before(len(held.lane))]


def _return_rows(rows: RowIndices) -> RowIndices:
    return rows
