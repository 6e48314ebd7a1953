"""Whole lanes for everyone: how the positions of an epoch fall to the worker processes of all ranks.

Worker ``w`` of rank ``r`` is number ``t = r + R w`` of the ``T = R W`` takers, ``R`` ranks and ``W`` workers each. It
has the lanes ``t, t + T, t + 2 T`` and so on, and nobody else has them, so no super-sample is fetched by two but those
that a border between lanes cuts. It delivers what is left of its lanes in the order of the epoch's positions: of the
lane that is farthest behind first, ties by the lane's number. Where all lanes have come equally far, its samples are
the positions ``t, t + T, t + 2 T`` and so on. The samples of the takers differ by one at most, and as ranks only for
one worker number: there the ranks that have one less deliver their last one twice, so that collective operations do
not wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stoker._order.partition import LaneSlice, Step
from stoker.errors import ConfigError

__all__ = ["Interleaving", "LaneShare"]


class Interleaving:
    """What is left of some lanes, in the order of (place, lane).

    Args:
        starts: ``int64 [lanes]``, the first place left of each.
        ends: ``int64 [lanes]``, the place behind its last; not before its start.
    """

    def __init__(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        self._starts, self._ends = starts, ends
        # How many lanes have a place: it changes only where one starts or ends, and is constant between.
        self._borders = np.unique(np.concatenate([starts, ends]))
        self._open = np.searchsorted(np.sort(starts), self._borders, "right") - np.searchsorted(
            np.sort(ends), self._borders, "right"
        )
        self._before = np.concatenate([[0], np.cumsum(self._open[:-1] * np.diff(self._borders))])
        self.total = int(self._before[-1])

    def after(self, count: int) -> NDArray[np.int64]:
        """Return the first place left of each lane once so many samples are delivered, ``int64 [lanes]``."""
        if count >= self.total:
            return self._ends
        stretch = int(np.searchsorted(self._before, count, "right")) - 1
        rounds, rest = divmod(count - int(self._before[stretch]), int(self._open[stretch]))
        place = int(self._borders[stretch]) + rounds
        takes_turn = (self._starts <= place) & (place < self._ends)
        reached = place + (takes_turn & (np.cumsum(takes_turn) <= rest))
        left: NDArray[np.int64] = np.clip(reached, self._starts, self._ends)
        return left


@dataclass(frozen=True, kw_only=True)
class LaneShare:
    """What one worker of one rank delivers of an epoch: a :class:`~stoker._order.partition.Dealing` of whole lanes.

    Its positions count the samples that it delivers, from 0 where ``delivered`` left off.

    Attributes:
        samples: of the epoch, over all ranks.
        lanes: into how many parts the order is cut: a multiple of all ranks' workers.
        batch_size: samples a step.
        rank: this rank.
        world_size: how many ranks there are.
        worker: this worker of the rank.
        workers: how many each rank has.
        drop_last: where ranks differ, leave out the last sample of those that have one more; else the others repeat
            their last one. Also leave out a last step that is not full, unless steps are ``chunks``.
        evaluation: neither, so that ranks may differ by one sample.
        chunks: whether steps are only how samples are read, not batches.
        delivered: lane → places of it that were delivered before; 0 where it is not named, but what is named for this
            worker's lanes counts for the same worker of other ranks where nothing else is known of these.
        repeated: how many samples this worker repeated before.

    Raises:
        ConfigError: the lanes cannot be dealt evenly, or there is no sample for every worker.
    """

    samples: int
    lanes: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1
    drop_last: bool = False
    evaluation: bool = False
    chunks: bool = False
    delivered: Mapping[int, int] = field(default_factory=dict)
    repeated: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is not in [0, world_size={self.world_size})")
        if self.drop_last and self.evaluation:
            raise ConfigError("evaluation delivers every sample: it cannot be combined with drop_last")
        if self.lanes % self.takers:
            nearest = max(1, round(self.lanes / self.takers)) * self.takers
            raise ConfigError(
                f"lanes {self.lanes} cannot be dealt evenly to {self.workers} workers on each of {self.world_size} "
                f"ranks: give lanes={nearest}, or another multiple of {self.takers}"
            )
        if self.samples < self.takers and self.world_size > 1 and not (self.drop_last or self.evaluation):
            raise ConfigError(
                f"{self.samples} samples are too few for {self.workers} workers on each of {self.world_size} ranks, "
                "which have to make equally many batches; give fewer workers, drop_last or evaluation"
            )

    @property
    def takers(self) -> int:
        """How many share the epoch: the workers of all ranks."""
        return self.world_size * self.workers

    @cached_property
    def own_lanes(self) -> NDArray[np.int64]:
        """This worker's lanes, rising."""
        return np.arange(self.rank + self.world_size * self.worker, self.lanes, self.takers)

    def _sizes_of(self, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(0, self.samples - lanes + self.lanes - 1) // self.lanes

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        return self._sizes_of(self.own_lanes)

    @cached_property
    def _rest(self) -> Interleaving:
        return Interleaving(self._starts_of(self.rank), self._sizes)

    def _starts_of(self, rank: int) -> NDArray[np.int64]:
        """Return how many places were delivered of the lanes of the same worker of a rank."""
        lanes = self.own_lanes + (rank - self.rank)
        known = [self.delivered.get(lane, self.delivered.get(own, 0)) for lane, own in self._pairs(lanes)]
        return np.minimum(np.array(known, np.int64), self._sizes_of(lanes))

    def _pairs(self, lanes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        return zip(lanes.tolist(), self.own_lanes.tolist(), strict=True)

    @cached_property
    def count(self) -> int:
        """How many samples this worker delivers, with those that it repeats."""
        if self.evaluation:
            return self._rest.total
        ranks = range(self.world_size) if self.delivered else (0, self.world_size - 1)  # they fall from the first on
        rests = [self._left_of(rank) for rank in ranks]
        return min(rests) if self.drop_last else max(self._rest.total, max(rests) - self.repeated)

    def _left_of(self, rank: int) -> int:
        lanes = self.own_lanes + (rank - self.rank)
        return int((self._sizes_of(lanes) - self._starts_of(rank)).sum())

    def resumed(self, delivered: Mapping[int, int], repeated: int) -> LaneShare:
        """Return what is left where so many places of lanes were delivered, and samples repeated."""
        return replace(self, delivered=delivered, repeated=repeated)

    def from_start(self) -> LaneShare:
        """Return the share of an epoch of which nothing was delivered."""
        return replace(self, delivered={}, repeated=0) if self.delivered or self.repeated else self

    def steps_from(self, position: int = 0) -> int:
        """Return how many steps there are from a position to the end."""
        left = max(0, self.count - position)
        return left // self.batch_size if self.drop_last and not self.chunks else -(-left // self.batch_size)

    def walk(self, position: int) -> Iterator[tuple[Step, bool]]:
        """Yield the steps from a position to the end, each with whether it is the last."""
        for left in range(self.steps_from(position) - 1, -1, -1):
            end = min(position + self.batch_size, self.count)
            slices = self.slices(position, end)
            yield Step(end, slices, max(0, end - max(position, self._rest.total))), not left
            position = end

    def slices(self, start: int, end: int) -> tuple[LaneSlice, ...]:
        """Return what is delivered from a position to another: places of lanes that rise, and then repeated ones."""
        places = self._rest.after(start), self._rest.after(end)
        slices = [
            LaneSlice(lane, first, behind)
            for lane, first, behind in zip(self.own_lanes.tolist(), *(each.tolist() for each in places), strict=True)
            if first < behind
        ]
        slices += [self._last] * (end - max(start, self._rest.total))
        return tuple(slices)

    @cached_property
    def _last(self) -> LaneSlice:
        """The last of this worker's samples."""
        longest = int(np.flatnonzero(self._sizes == self._sizes.max())[-1])
        return LaneSlice(int(self.own_lanes[longest]), int(self._sizes[longest]) - 1, int(self._sizes[longest]))

    def turns(self, start: int, end: int) -> NDArray[np.int64]:
        """Return in which order the samples of :meth:`slices` come in the epoch, ``int64 [end-start]``."""
        positions = [part.positions(self.lanes) for part in self.slices(start, end)]
        return np.argsort(np.concatenate(positions), kind="stable")

    def progress(self, position: int) -> tuple[dict[int, int], int]:
        """Return how many places of each of its lanes are delivered at a position, and how many samples repeated."""
        places = dict(zip(self.own_lanes.tolist(), self._rest.after(position).tolist(), strict=True))
        return places, self.repeated + max(0, position - self._rest.total)

    def lanes_taken(self) -> NDArray[np.int64]:
        """Return this worker's lanes, rising."""
        return self.own_lanes

    def positions_of(self, lane: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return about which of the share's positions places of one of its lanes are: as if lanes took turns."""
        turn = int(np.searchsorted(self.own_lanes, lane))
        return (places - self.delivered.get(lane, 0)) * len(self.own_lanes) + turn

    def lanes_touched(self) -> int:
        """Return how many lanes may be under way at a time."""
        return len(self.own_lanes)
