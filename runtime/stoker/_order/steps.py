"""The steps of a rank: which super-samples each batch needs, from when to when, worked out just ahead of use.

:class:`Steps` walks the order through the partition, over as many epochs as the run has, and gives every super-sample
that the rank must hold an **item** number, in order of first use. A step is a few **segments**, each the part of one
delivery block that falls into the batch; a segment names the items it needs, and those that nobody needs behind it.
Only borders of blocks are looked at here; which rows a block holds is computed when the batch is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker._order.order import Lane, Order, OrderConfig
from stoker._order.sharding import Dealing, LaneSlice

Ref = TypeVar("Ref")
Rows = tuple[NDArray[np.int64], NDArray[np.int64]]
OrderSource = Callable[[NDArray[np.integer], OrderConfig, int], Order]
"""Gives the order of an epoch."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive samples of a batch that come from one set of items.

    Attributes:
        items: numbers of the items it needs.
        picks: computes ``(which, rows)``, ``int64 [samples]`` each: each sample's index into ``items``, and row.
        passed: numbers of items of earlier segments that other ranks' slices have passed by: free to go at once.
        done: numbers of the items that no later segment needs.
    """

    items: tuple[int, ...]
    picks: Callable[[], Rows]
    passed: tuple[int, ...] = ()
    done: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedStep(Generic[Ref]):
    """One batch of this rank.

    Attributes:
        number: of the step in the run, from 0.
        epoch: it belongs to.
        end: position of the epoch behind it, over all ranks.
        is_last: whether the rank's epoch ends with it.
        segments: in order.
        repeated: samples that all ranks together repeat in it.
        first_uses: ``(item, what it is)`` of every item that is first needed here, in order.
    """

    number: int
    epoch: int
    end: int
    is_last: bool
    segments: tuple[Segment, ...]
    repeated: int
    first_uses: tuple[tuple[int, Ref], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A stretch of a rank's order.

    Attributes:
        order: seed, shuffle, window and lanes.
        partition: how the first epoch is dealt to the rank.
        epoch: the first.
        position: where in that epoch to start, as the partition counts.
        end_epoch: the epoch to stop before; None goes on forever.
    """

    order: OrderConfig
    partition: Dealing
    epoch: int = 0
    position: int = 0
    end_epoch: int | None = None


class StepSource(ABC, Generic[Ref]):
    """The steps of one rank, one epoch after the other, planned just ahead of their use.

    Args:
        samples: ``[super-samples]``, samples of each.
        stretch: what to walk.
        order: gives the order of an epoch; who walks for many ranks has each made once.
    """

    def __init__(self, samples: NDArray[np.integer], stretch: Stretch, order: OrderSource = Order) -> None:
        self._next_item = 0
        self._steps = self._walk_epochs(samples, stretch, order)

    def next(self) -> PlannedStep[Ref] | None:
        """Return the next step, or None behind the last."""
        return next(self._steps, None)

    def _walk_epochs(
        self, samples: NDArray[np.integer], stretch: Stretch, order: OrderSource
    ) -> Iterator[PlannedStep[Ref]]:
        number, epoch, position = 0, stretch.epoch, stretch.position
        dealing, whole = stretch.partition, stretch.partition.from_start()
        while (stretch.end_epoch is None or epoch < stretch.end_epoch) and whole.steps_from(0):
            for step in self._walk(order(samples, stretch.order, epoch), dealing, position):
                yield replace(step, number=number)
                number += 1
            epoch, dealing, position = epoch + 1, whole, 0

    @abstractmethod
    def _walk(self, order: Order, dealing: Dealing, position: int) -> Iterator[PlannedStep[Ref]]:
        """Yield the steps of one epoch from a position on, not numbered yet."""


@dataclass(slots=True)
class _LaneItems:
    """The items of one lane that are held now: piece → item number."""

    lane: Lane
    held: dict[int, int] = field(default_factory=dict)

    def drop_before(self, piece: int) -> list[int]:
        return [self.held.pop(old) for old in [old for old in self.held if old < piece]]


class Steps(StepSource[int]):
    """A :class:`StepSource` whose items are super-samples, by manifest row."""

    def __init__(self, samples: NDArray[np.integer], stretch: Stretch, order: OrderSource = Order) -> None:
        super().__init__(samples, stretch, order)
        self._first_uses: list[tuple[int, int]] = []

    def _walk(self, order: Order, dealing: Dealing, position: int) -> Iterator[PlannedStep[int]]:
        walk = self._walk_full if order.config.shuffle == "full" else self._walk_lanes
        return walk(order, dealing, position)

    def _new_item(self, super_sample: int) -> int:
        item, self._next_item = self._next_item, self._next_item + 1
        self._first_uses.append((item, super_sample))
        return item

    def _take_first_uses(self) -> tuple[tuple[int, int], ...]:
        taken, self._first_uses = tuple(self._first_uses), []
        return taken

    def _walk_lanes(self, order: Order, dealing: Dealing, position: int) -> Iterator[PlannedStep[int]]:
        lanes: dict[int, _LaneItems] = {}
        for step, is_last in dealing.walk(position):
            segments: list[Segment] = []
            for part in step.slices:
                held = lanes.setdefault(part.lane, _LaneItems(order.lane(part.lane)))
                others = _drop_others(lanes, part.lane) if step.is_stray else []
                segments.extend(self._segments(held, part, others))
            if is_last:
                segments[-1] = replace(segments[-1], done=(*segments[-1].done, *_drop_others(lanes)))
            yield PlannedStep(
                0, order.epoch, step.end, is_last, tuple(segments), step.repeated, self._take_first_uses()
            )

    def _segments(self, held: _LaneItems, part: LaneSlice, others: list[int]) -> Iterator[Segment]:
        """Cut a slice of a lane at the borders of its blocks; the items of others go with the first segment."""
        lane, place = held.lane, part.start
        while place < part.end:
            block = lane.block_of(place)
            block_end = int(lane.block_ends[block])
            block_start = int(lane.block_ends[block - 1]) if block else 0
            end = min(part.end, block_end)
            pieces = lane.pieces_of(block)
            passed = (*others, *held.drop_before(pieces.start))
            for piece in pieces:
                if piece not in held.held:
                    held.held[piece] = self._new_item(int(lane.super_samples[piece]))
            items = tuple(held.held[piece] for piece in pieces)
            done = held.drop_before(lane.pieces_of(block + 1).start) if end == block_end else []
            picks = partial(lane.picks, block, place - block_start, end - block_start)
            yield Segment(items=items, picks=picks, passed=passed, done=tuple(done))
            others, place = [], end

    def _walk_full(self, order: Order, dealing: Dealing, position: int) -> Iterator[PlannedStep[int]]:
        """Walk ``full`` with every super-sample held to the end of the epoch."""
        permuted = order.feistel()
        held: dict[int, int] = {}
        for step, is_last in dealing.walk(position):
            positions = np.concatenate([part.positions(dealing.lanes) for part in step.slices])
            super_samples, rows = order.locate(permuted(positions))
            found, first, which = np.unique(super_samples, return_index=True, return_inverse=True)
            for super_sample in found[np.argsort(first)].tolist():
                if super_sample not in held:
                    held[super_sample] = self._new_item(super_sample)
            segment = Segment(
                items=tuple(held[super_sample] for super_sample in found.tolist()),
                picks=partial(_known, (which, rows)),
                done=tuple(held.values()) if is_last else (),
            )
            yield PlannedStep(0, order.epoch, step.end, is_last, (segment,), step.repeated, self._take_first_uses())


def _drop_others(lanes: dict[int, _LaneItems], kept: int | None = None) -> list[int]:
    """Drop what is held of all lanes but one, and return the items.

    A step that is stray is not cut where the others are and may touch other lanes. It is walked one lane at a
    time, so that it needs no more memory than they; the little that is dropped too early is fetched again.
    """
    return [item for lane, held in lanes.items() if lane != kept for item in held.drop_before(len(held.lane))]


def _known(rows: Rows) -> Rows:
    return rows
