"""Sharding: how the positions of an epoch fall to steps, ranks and worker processes.

:class:`Partition` deals steps to ranks. A step takes the next ``batch_size · world_size`` positions, groups them by
lane, and gives rank ``r`` the ``r``-th of ``world_size`` equal slices (sizes differ by at most 1). Where the lanes are
a multiple of the ranks and the global batch a multiple of the lanes, a rank keeps to lanes of its own. Any world size
and batch size may go on from any position: what was delivered is a prefix of the epoch, whichever rank delivered it.

:class:`LaneShare` deals whole lanes to the worker processes of all ranks. Worker ``w`` of rank ``r`` is number
``t = r + R w`` of the ``T = R W`` workers, ``R`` ranks and ``W`` workers each. It has the lanes ``t, t + T, t + 2 T``
and so on, and no other worker has them, so no super-sample is fetched by two but those that a border between lanes
cuts. It delivers what is left of its lanes in the order of the epoch's positions: of the lane that is farthest behind
first, ties by the lane's number. Where all lanes have come equally far, its samples are the positions ``t, t + T,
t + 2 T`` and so on. The samples of the workers differ by one at most, and as ranks only for one worker number: there
the ranks that have one less deliver their last one twice, so that collective operations do not wait forever.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError

_MOST_ENUMERATED_LANES = 1024


@dataclass(frozen=True, slots=True)
class LaneSlice:
    """Places ``[start, end)`` of one lane."""

    lane: int
    start: int
    end: int

    def positions(self, lanes: int) -> NDArray[np.int64]:
        """Return the positions of the epoch that these places of one of so many lanes are, ``int64 [end-start]``."""
        return np.arange(self.start, self.end) * lanes + self.lane


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank delivers in one step.

    Attributes:
        end: the position behind the step, as its dealing counts: of the epoch over all ranks, for a partition.
        slices: in order of delivery; the lanes rise, but for places that are repeated, which come last.
        repeated: how many samples are delivered a second time: in a partition by all ranks together, to give each one.
        is_stray: whether it is not cut where the others are and may touch lanes that are otherwise others'.
    """

    end: int
    slices: tuple[LaneSlice, ...]
    repeated: int = 0
    is_stray: bool = False

    @property
    def samples(self) -> int:
        """How many samples the rank delivers."""
        return sum(part.end - part.start for part in self.slices)


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """How the positions of an epoch are dealt to one of those who take from it: a rank, or one worker of it.

    Attributes:
        samples: of the epoch, for all takers together.
        lanes: into how many parts the order is cut.
        batch_size: the most samples that a step has.
        rank: this rank.
        world_size: how many ranks there are.
        drop_last: leave out what cannot be dealt evenly at the end.
        evaluation: never drop and never repeat; ranks may then differ.
        worker: this worker of the rank, where whole lanes are dealt to workers.
        workers: how many each rank has.
        chunks: whether a worker's steps are only how samples are read, not batches.
    """

    samples: int
    lanes: int = 1
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    evaluation: bool = False
    worker: int = 0
    workers: int = 1
    chunks: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size {self.batch_size} is not at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is not in [0, world_size={self.world_size})")
        if self.drop_last and self.evaluation:
            raise ConfigError("evaluation delivers every sample: it cannot be combined with drop_last")

    @property
    def takers(self) -> int:
        """How many share the epoch: ranks, or the workers of all ranks."""
        return self.world_size * self.workers

    def steps_from(self, position: int = 0) -> int:
        """Return how many steps there are from a position to the end of the epoch."""
        raise NotImplementedError

    def _step(self, position: int) -> Step:
        """Return the step that starts at a position, where there is one."""
        raise NotImplementedError

    def walk(self, position: int) -> Iterator[tuple[Step, bool]]:
        """Yield the steps from a position to the end of the epoch, each with whether it is the last."""
        for left in range(self.steps_from(position) - 1, -1, -1):
            step = self._step(position)
            yield step, not left
            position = step.end

    @cached_property
    def own_lanes(self) -> NDArray[np.int64]:
        """The lanes that the taker takes from in an epoch, rising; a stray step may touch others."""
        raise NotImplementedError

    def lanes_touched(self) -> int:
        """Return how many lanes may be under way at a time, from whatever position."""
        return len(self.own_lanes)

    def positions_of(self, lane: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return at which of this dealing's positions places of a lane come; a worker's share tells it roughly."""
        return places * self.lanes + lane

    def from_start(self) -> Self:
        """Return the dealing of an epoch of which nothing was delivered before position 0."""
        return self


@dataclass(frozen=True, kw_only=True)
class Partition(Dealing):
    """How an epoch is dealt to one rank.

    Without ``drop_last``, the last global batch, if it is not full, is divided evenly; if it has fewer samples than
    there are ranks, samples are repeated so that each rank has one. In ``evaluation`` ranks may differ by one step.
    """

    @property
    def global_batch(self) -> int:
        """Samples a step over all ranks."""
        return self.batch_size * self.world_size

    def steps_from(self, position: int = 0) -> int:
        """Return how many steps this rank has from a position of the epoch to its end."""
        full, rest = divmod(max(0, self.samples - position), self.global_batch)
        if not rest or self.drop_last or (self.evaluation and self.rank >= rest):
            return full
        return full + 1

    def _step(self, position: int) -> Step:
        end = min(position + self.global_batch, self.samples)
        count = end - position
        is_stray = count < self.global_batch
        if count >= self.world_size:
            first, last = self.rank * count // self.world_size, (self.rank + 1) * count // self.world_size
            return Step(end, self._slices(position, end, first, last), is_stray=is_stray)
        first = self.rank % count
        repeated = 0 if self.evaluation else self.world_size - count
        return Step(end, self._slices(position, end, first, first + 1), repeated, is_stray)

    def _slices(self, position: int, end: int, first: int, last: int) -> tuple[LaneSlice, ...]:
        """Return places ``[first, last)`` of the positions ``[position, end)`` once these are grouped by lane."""
        rows, rest = divmod(end - position, self.lanes)
        if rows and not rest and not position % self.lanes:  # as mostly: every lane has as many, from one place on
            place = position // self.lanes
            return tuple(
                LaneSlice(lane, place + max(0, first - lane * rows), place + min(rows, last - lane * rows))
                for lane in range(first // rows, -(-last // rows))
            )
        lanes = np.arange(self.lanes)
        starts = -((lanes - position) // self.lanes)  # the first place of each lane at or behind `position`
        ends = -((lanes - end) // self.lanes)
        borders = np.concatenate([[0], np.cumsum(ends - starts)])
        low = int(np.searchsorted(borders, first, "right")) - 1
        high = int(np.searchsorted(borders, last, "left"))
        slices = []
        for lane in range(low, high):
            offset = int(starts[lane]) - int(borders[lane])
            begin, stop = max(first, int(borders[lane])), min(last, int(borders[lane + 1]))
            if begin < stop:
                slices.append(LaneSlice(lane, begin + offset, stop + offset))
        return tuple(slices)

    @cached_property
    def own_lanes(self) -> NDArray[np.int64]:
        """The lanes that this rank takes from in an epoch, rising; a short last step may touch others."""
        period = self.lanes // math.gcd(self.global_batch, self.lanes)
        if self.world_size == 1 or period > _MOST_ENUMERATED_LANES:
            return np.arange(self.lanes)
        first, last = self.rank * self.batch_size, (self.rank + 1) * self.batch_size
        starts = range(0, period * self.global_batch, self.global_batch)
        slices = (self._slices(start, start + self.global_batch, first, last) for start in starts)
        return np.array(sorted({part.lane for found in slices for part in found}), np.int64)

    def lanes_touched(self) -> int:
        """Return how many lanes this rank may have under way at a time, from whatever position it starts.

        A step's slice depends on its position modulo the lanes, and steps visit the positions of one class modulo
        gcd(global batch, lanes). A short last step is not counted: it is walked one lane at a time.
        """
        if self.world_size == 1 or self.lanes > _MOST_ENUMERATED_LANES:
            return self.lanes
        if self.lanes % self.world_size == 0 and self.global_batch % self.lanes == 0:
            return self.lanes // self.world_size
        classes: dict[int, set[int]] = {}
        divisor = math.gcd(self.global_batch, self.lanes)
        first, last = self.rank * self.batch_size, (self.rank + 1) * self.batch_size
        for position in range(self.lanes):
            touched = classes.setdefault(position % divisor, set())
            touched.update(part.lane for part in self._slices(position, position + self.global_batch, first, last))
        return max(map(len, classes.values()))


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
class LaneShare(Dealing):
    """What one worker of one rank delivers of an epoch: whole lanes, a multiple of all ranks' workers.

    Its positions count the samples that it delivers, from 0 where ``delivered`` left off. With ``drop_last``, ranks
    that have one sample more leave it out, and a last step that is not full goes, unless steps are ``chunks``; else the
    others repeat their last sample. In ``evaluation`` ranks may differ by one sample.

    Attributes:
        delivered: lane → places of it that were delivered before; 0 where it is not named, but what is named for this
            worker's lanes counts for the same worker of other ranks where nothing else is known of these.
        repeated: how many samples this worker repeated before.

    Raises:
        ConfigError: the lanes cannot be dealt evenly, or there is no sample for every worker.
    """

    delivered: Mapping[int, int] = field(default_factory=dict)
    repeated: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
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
        known = [self.delivered.get(lane, self.delivered.get(lane + self.rank - rank, 0)) for lane in lanes.tolist()]
        return np.minimum(np.array(known, np.int64), self._sizes_of(lanes))

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

    def from_start(self) -> Self:
        """Return the share of an epoch of which nothing was delivered."""
        return replace(self, delivered={}, repeated=0) if self.delivered or self.repeated else self

    def steps_from(self, position: int = 0) -> int:
        """Return how many steps there are from a position to the end."""
        left = max(0, self.count - position)
        return left // self.batch_size if self.drop_last and not self.chunks else -(-left // self.batch_size)

    def _step(self, position: int) -> Step:
        end = min(position + self.batch_size, self.count)
        return Step(end, self.slices(position, end), max(0, end - max(position, self._rest.total)))

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

    def positions_of(self, lane: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return about which of the share's positions places of one of its lanes are: as if lanes took turns."""
        turn = int(np.searchsorted(self.own_lanes, lane))
        return (places - self.delivered.get(lane, 0)) * len(self.own_lanes) + turn
