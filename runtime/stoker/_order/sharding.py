"""Sharding: the division of an epoch's positions into steps, over ranks and worker processes.

:class:`RankSharding` divides each step over the ranks. A step takes the next ``batch_size · world_size`` positions,
groups them by lane, and gives rank ``r`` the ``r``-th of ``world_size`` equal slices (sizes differ by at most 1). If
the lanes are a multiple of the ranks and the global batch is a multiple of the lanes, each rank always reads the same
lanes. Any world size and batch size can resume from any position: the delivered samples of all ranks are a prefix of
the epoch.

:class:`WorkerSharding` assigns whole lanes to the worker processes of all ranks. Worker ``w`` of rank ``r`` is number
``t = r + R w`` of the ``T = R W`` workers of ``R`` ranks with ``W`` workers each. It alone reads the lanes ``t, t + T,
t + 2 T`` and so on, so two workers fetch the same super-sample only if a border between lanes cuts it. It delivers the
rest of its lanes in order of the epoch's positions: the lane that is farthest behind first, ties by lane number. If all
lanes have progressed equally, its samples are the positions ``t, t + T, t + 2 T`` and so on. The sample counts of
workers differ by at most one, and between ranks for one worker number only: there the ranks with one sample less repeat
their last one, so that collective operations do not deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from stoker._base.computed import cached_property
from stoker.errors import ConfigError

_MAX_ENUMERATED_LANES = 1024


@dataclass(frozen=True, slots=True)
class LaneSlice:
    """Places ``[start, end)`` of one lane."""

    lane: int
    start: int
    end: int

    def positions(self, lanes: int) -> NDArray[np.int64]:
        """Return the positions of these places in an epoch with ``lanes`` lanes, ``int64 [end-start]``."""
        return np.arange(self.start, self.end) * lanes + self.lane


@dataclass(frozen=True, slots=True)
class RankStep:
    """The samples of one rank in one step.

    Attributes:
        end: position behind the step, as its sharding counts: for a partition, in the epoch over all ranks.
        slices: slices of lanes in order of delivery, by ascending lane; repeated places come last.
        repeated: number of samples delivered a second time, for a partition by all ranks together.
        is_partial: whether this is a short step, which is cut differently and may read lanes of other ranks.
    """

    end: int
    slices: tuple[LaneSlice, ...]
    repeated: int = 0
    is_partial: bool = False

    @property
    def samples(self) -> int:
        """Number of samples that the rank delivers."""
        return sum(part.end - part.start for part in self.slices)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The part of an epoch that one reader delivers: a rank, or one worker of a rank.

    Attributes:
        samples: number of samples of the epoch, over all readers.
        lanes: number of lanes of the order; default 1.
        batch_size: maximum number of samples of a step.
        rank: rank of this reader, from 0 (default).
        world_size: number of ranks; default 1.
        drop_last: whether to drop samples at the end that cannot be divided evenly; default False.
        evaluation: whether to deliver every sample once, so that ranks may differ in length; default False.
        worker: worker number within the rank, from 0 (default), if workers read whole lanes.
        workers: number of workers per rank; default 1.
        chunks: whether a worker's steps are only units of reading, not batches; default False.
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
            raise ConfigError(f"batch_size must be at least 1, not {self.batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank must be in [0, world_size={self.world_size}), not {self.rank}")
        if self.drop_last and self.evaluation:
            raise ConfigError("evaluation cannot be combined with drop_last, because it delivers every sample")

    @property
    def readers(self) -> int:
        """Number of readers of the epoch: ranks, or workers of all ranks."""
        return self.world_size * self.workers

    def count_steps(self, position: int = 0) -> int:
        """Return the number of steps from a position to the end of the epoch."""
        raise NotImplementedError

    def _step(self, position: int) -> RankStep:
        """Return the step that starts at a position before the end."""
        raise NotImplementedError

    def steps(self, position: int) -> Iterator[tuple[RankStep, bool]]:
        """Yield the steps from a position to the end of the epoch, each with a flag for the last."""
        for left in range(self.count_steps(position) - 1, -1, -1):
            step = self._step(position)
            yield step, not left
            position = step.end

    @cached_property
    def own_lanes(self) -> NDArray[np.int64]:
        """The lanes that this reader reads in an epoch, ascending; a short step may read others."""
        raise NotImplementedError

    def max_open_lanes(self) -> int:
        """Return the maximum number of lanes that are read concurrently, from any position."""
        return len(self.own_lanes)

    def positions_of(self, lane: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of a lane's places, in this sharding's count; approximate for a worker."""
        return places * self.lanes + lane

    def from_start(self) -> Self:
        """Return the same sharding for an epoch without delivered samples."""
        return self


@dataclass(frozen=True, kw_only=True)
class RankSharding(Sharding):
    """The part of an epoch that one rank delivers.

    Without ``drop_last``, a short last global batch is divided evenly; if it has fewer samples than there are ranks,
    samples are repeated so that each rank has one. In ``evaluation`` ranks may differ by one step.
    """

    @property
    def global_batch(self) -> int:
        """Number of samples per step, over all ranks."""
        return self.batch_size * self.world_size

    def count_steps(self, position: int = 0) -> int:
        """Return the number of steps of this rank from a position of the epoch to its end."""
        full, rest = divmod(max(0, self.samples - position), self.global_batch)
        if not rest or self.drop_last or (self.evaluation and self.rank >= rest):
            return full
        return full + 1

    def _step(self, position: int) -> RankStep:
        end = min(position + self.global_batch, self.samples)
        count = end - position
        is_stray = count < self.global_batch
        if count >= self.world_size:
            first = self.rank * count // self.world_size
            last = (self.rank + 1) * count // self.world_size
            return RankStep(end, self._slices(position, end, first, last), is_partial=is_stray)
        first = self.rank % count
        repeated = 0 if self.evaluation else self.world_size - count
        return RankStep(end, self._slices(position, end, first, first + 1), repeated, is_stray)

    def _slices(self, position: int, end: int, first: int, last: int) -> tuple[LaneSlice, ...]:
        """Return items ``[first, last)`` of the positions ``[position, end)`` after these are grouped by lane."""
        rows, rest = divmod(end - position, self.lanes)
        if rows and not rest and not position % self.lanes:  # the usual case: all lanes have the same places
            lane_position = position // self.lanes
            return tuple(
                LaneSlice(
                    lane, lane_position + max(0, first - lane * rows), lane_position + min(rows, last - lane * rows)
                )
                for lane in range(first // rows, -(-last // rows))
            )
        lanes = np.arange(self.lanes)
        starts = -((lanes - position) // self.lanes)  # the first place of each lane at or after `position`
        ends = -((lanes - end) // self.lanes)
        borders = np.concatenate([[0], np.cumsum(ends - starts)])
        low = int(np.searchsorted(borders, first, "right")) - 1
        high = int(np.searchsorted(borders, last, "left"))
        slices = []
        for lane in range(low, high):
            offset = int(starts[lane]) - int(borders[lane])
            begin = max(first, int(borders[lane]))
            stop = min(last, int(borders[lane + 1]))
            if begin < stop:
                slices.append(LaneSlice(lane, begin + offset, stop + offset))
        return tuple(slices)

    @cached_property
    def own_lanes(self) -> NDArray[np.int64]:
        """The lanes that this rank reads in an epoch, ascending; a short last step may read others."""
        period = self.lanes // math.gcd(self.global_batch, self.lanes)
        if self.world_size == 1 or period > _MAX_ENUMERATED_LANES:
            return np.arange(self.lanes)
        first, last = self.rank * self.batch_size, (self.rank + 1) * self.batch_size
        starts = range(0, period * self.global_batch, self.global_batch)
        slices = (self._slices(start, start + self.global_batch, first, last) for start in starts)
        return np.array(sorted({part.lane for slice_parts in slices for part in slice_parts}), np.int64)

    def max_open_lanes(self) -> int:
        """Return the maximum number of lanes that this rank reads concurrently, from any starting position.

        A step's slice depends on its position modulo the lanes, and steps visit the positions of one class modulo
        gcd(global batch, lanes). A short last step does not count: its lanes are read one after the other.
        """
        if self.world_size == 1 or self.lanes > _MAX_ENUMERATED_LANES:
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


class LaneInterleaving:
    """The remaining places of some lanes, in the order of (place, lane).

    Args:
        starts: first remaining place of each lane, ``int64 [lanes]``.
        ends: place behind the last of each lane, at least its start, ``int64 [lanes]``.
    """

    def __init__(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        self._starts, self._ends = starts, ends
        # The number of lanes that have a given place: constant between the starts and ends of lanes.
        self._borders = np.unique(np.concatenate([starts, ends]))
        self._open = np.searchsorted(np.sort(starts), self._borders, "right") - np.searchsorted(
            np.sort(ends), self._borders, "right"
        )
        self._before = np.concatenate([[0], np.cumsum(self._open[:-1] * np.diff(self._borders))])
        self.total = int(self._before[-1])

    def first_places_after(self, count: int) -> NDArray[np.int64]:
        """Return the first remaining place of each lane after ``count`` samples, ``int64 [lanes]``."""
        if count >= self.total:
            return self._ends
        interval = int(np.searchsorted(self._before, count, "right")) - 1
        rounds, rest = divmod(count - int(self._before[interval]), int(self._open[interval]))
        place = int(self._borders[interval]) + rounds
        takes_turn = (self._starts <= place) & (place < self._ends)
        reached = place + (takes_turn & (np.cumsum(takes_turn) <= rest))
        left: NDArray[np.int64] = np.clip(reached, self._starts, self._ends)
        return left


@dataclass(frozen=True, kw_only=True)
class WorkerSharding(Sharding):
    """The part of an epoch that one worker of one rank delivers: whole lanes.

    Positions count the samples of this worker, from 0 after those in ``delivered``. With ``drop_last``, ranks with one
    sample more drop it, and an incomplete last step is dropped unless steps are ``chunks``; otherwise the other ranks
    repeat their last sample. In ``evaluation`` ranks may differ by one sample.

    Attributes:
        delivered: number of places already delivered, by lane. A missing lane of this rank counts as 0; a missing lane
            of another rank counts as the lane of the same worker of this rank.
        repeated: number of samples that this worker has already repeated.

    Raises:
        ConfigError: the lanes are not a multiple of all workers, or there are fewer samples than workers.
    """

    delivered: Mapping[int, int] = field(default_factory=dict)
    repeated: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lanes % self.readers:
            nearest = max(1, round(self.lanes / self.readers)) * self.readers
            raise ConfigError(
                f"lanes must be a multiple of {self.readers} (world_size={self.world_size}, workers={self.workers}), "
                f"not {self.lanes}; give lanes={nearest}, or another multiple of {self.readers}"
            )
        if self.samples < self.readers and self.world_size > 1 and not (self.drop_last or self.evaluation):
            raise ConfigError(
                f"{self.samples} samples are too few for {self.workers} workers on each of {self.world_size} ranks, "
                "which must have the same number of batches; give fewer workers, drop_last or evaluation"
            )

    @cached_property
    def own_lanes(self) -> NDArray[np.int64]:
        """This worker's lanes, ascending."""
        return np.arange(self.rank + self.world_size * self.worker, self.lanes, self.readers)

    def _sizes_of(self, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(0, self.samples - lanes + self.lanes - 1) // self.lanes

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        return self._sizes_of(self.own_lanes)

    @cached_property
    def _rest(self) -> LaneInterleaving:
        return LaneInterleaving(self._starts_of(self.rank), self._sizes)

    def _starts_of(self, rank: int) -> NDArray[np.int64]:
        """Return the number of delivered places in each lane of the same worker of a rank, ``int64 [lanes]``."""
        lanes = self.own_lanes + (rank - self.rank)
        known = [self.delivered.get(lane, self.delivered.get(lane + self.rank - rank, 0)) for lane in lanes.tolist()]
        return np.minimum(np.array(known, np.int64), self._sizes_of(lanes))

    @cached_property
    def count(self) -> int:
        """Number of samples that this worker delivers, including repeated ones."""
        if self.evaluation:
            return self._rest.total
        ranks = range(self.world_size) if self.delivered else (0, self.world_size - 1)  # never rising by rank
        rests = [self._count_left(rank) for rank in ranks]
        return min(rests) if self.drop_last else max(self._rest.total, max(rests) - self.repeated)

    def _count_left(self, rank: int) -> int:
        lanes = self.own_lanes + (rank - self.rank)
        return int((self._sizes_of(lanes) - self._starts_of(rank)).sum())

    def resume_at(self, delivered: Mapping[int, int], repeated: int) -> WorkerSharding:
        """Return the remaining part after the given places of lanes were delivered and samples repeated."""
        return replace(self, delivered=delivered, repeated=repeated)

    def from_start(self) -> Self:
        """Return the same sharding for an epoch without delivered samples."""
        return replace(self, delivered={}, repeated=0) if self.delivered or self.repeated else self

    def count_steps(self, position: int = 0) -> int:
        """Return the number of steps from a position to the end."""
        left = max(0, self.count - position)
        return left // self.batch_size if self.drop_last and not self.chunks else -(-left // self.batch_size)

    def _step(self, position: int) -> RankStep:
        end = min(position + self.batch_size, self.count)
        return RankStep(end, self.slices(position, end), max(0, end - max(position, self._rest.total)))

    def slices(self, start: int, end: int) -> tuple[LaneSlice, ...]:
        """Return the places at positions ``[start, end)``, by ascending lane, followed by repeated ones."""
        places = self._rest.first_places_after(start), self._rest.first_places_after(end)
        slices = [
            LaneSlice(lane, first, behind)
            for lane, first, behind in zip(self.own_lanes.tolist(), *(each.tolist() for each in places), strict=True)
            if first < behind
        ]
        slices += [self._last] * (end - max(start, self._rest.total))
        return tuple(slices)

    @cached_property
    def _last(self) -> LaneSlice:
        """The place of this worker's last sample."""
        longest = int(np.flatnonzero(self._sizes == self._sizes.max())[-1])
        return LaneSlice(int(self.own_lanes[longest]), int(self._sizes[longest]) - 1, int(self._sizes[longest]))

    def delivery_order(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the order in which the samples of :meth:`slices` are delivered, as indices, ``int64 [end-start]``."""
        positions = [part.positions(self.lanes) for part in self.slices(start, end)]
        return np.argsort(np.concatenate(positions), kind="stable")

    def progress(self, position: int) -> tuple[dict[int, int], int]:
        """Return the delivered places at a position, by lane, and the number of repeated samples."""
        places = dict(zip(self.own_lanes.tolist(), self._rest.first_places_after(position).tolist(), strict=True))
        return places, self.repeated + max(0, position - self._rest.total)

    def positions_of(self, lane: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the approximate positions of a lane's places, as if lanes took turns."""
        turn = int(np.searchsorted(self.own_lanes, lane))
        return (places - self.delivered.get(lane, 0)) * len(self.own_lanes) + turn
