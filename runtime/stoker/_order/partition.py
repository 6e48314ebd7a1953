"""Who delivers what: how the positions of an epoch fall to steps and ranks.

A step takes the next ``batch_size · world_size`` positions, groups them by lane, and gives rank ``r`` the ``r``-th of
``world_size`` equal slices (sizes differ by at most 1). Where the lanes are a multiple of the ranks and the global
batch a multiple of the lanes, a rank keeps to lanes of its own. Any world size and batch size may go on from any
position: what was delivered is a prefix of the epoch, whoever delivered it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError

__all__ = ["Dealing", "LaneSlice", "Partition", "Step"]

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


class Dealing(Protocol):
    """How the positions of an epoch are dealt to one of those who take from it."""

    @property
    def samples(self) -> int:
        """How many the epoch has, for all takers together."""
        ...

    @property
    def lanes(self) -> int:
        """Into how many parts the order is cut."""
        ...

    @property
    def batch_size(self) -> int:
        """The most samples that a step has."""
        ...

    @property
    def takers(self) -> int:
        """How many share the epoch: ranks, or the workers of all ranks."""
        ...

    def steps_from(self, position: int = 0) -> int:
        """Return how many steps there are from a position to the end of the epoch."""
        ...

    def walk(self, position: int) -> Iterator[tuple[Step, bool]]:
        """Yield the steps from a position to the end of the epoch, each with whether it is the last."""
        ...

    def lanes_touched(self) -> int:
        """Return how many lanes may be under way at a time, from whatever position."""
        ...

    def lanes_taken(self) -> NDArray[np.int64]:
        """Return which lanes the taker takes from in an epoch, rising; a stray step may touch others."""
        ...

    def positions_of(self, lane: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return at which of this dealing's positions places of a lane come; a taker's share tells it roughly."""
        ...

    def from_start(self) -> Self:
        """Return the dealing of an epoch of which nothing was delivered before position 0."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """How an epoch is dealt to one rank.

    Attributes:
        samples: of the epoch.
        lanes: into how many parts the order is cut.
        batch_size: samples a step and rank.
        rank: this rank.
        world_size: how many ranks there are.
        drop_last: leave out the last global batch if it is not full; else it is divided evenly, and if it has fewer
            samples than there are ranks, samples are repeated so that each rank has one.
        evaluation: never drop and never repeat; ranks may then differ by one step.
    """

    samples: int
    lanes: int = 1
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    evaluation: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size {self.batch_size} is not at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is not in [0, world_size={self.world_size})")
        if self.drop_last and self.evaluation:
            raise ConfigError("evaluation delivers every sample: it cannot be combined with drop_last")

    @property
    def takers(self) -> int:
        """How many share the epoch: the ranks."""
        return self.world_size

    def from_start(self) -> Self:
        """Return itself: positions count from the start of the epoch."""
        return self

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

    def step(self, position: int) -> Step | None:
        """Return the step that starts at a position, or None if this rank's epoch ends there."""
        if not self.steps_from(position):
            return None
        end = min(position + self.global_batch, self.samples)
        count = end - position
        is_stray = count < self.global_batch
        if count >= self.world_size:
            first, last = self.rank * count // self.world_size, (self.rank + 1) * count // self.world_size
            return Step(end, self._slices(position, end, first, last), is_stray=is_stray)
        first = self.rank % count
        repeated = 0 if self.evaluation else self.world_size - count
        return Step(end, self._slices(position, end, first, first + 1), repeated, is_stray)

    def walk(self, position: int) -> Iterator[tuple[Step, bool]]:
        """Yield this rank's steps from a position to the end of the epoch, each with whether it is the last."""
        for left in range(self.steps_from(position) - 1, -1, -1):
            step = self.step(position)
            assert step is not None  # noqa: S101 - steps_from counts what step gives
            yield step, not left
            position = step.end

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

    def lanes_taken(self) -> NDArray[np.int64]:
        """Return which lanes this rank takes from in an epoch, rising; a short last step may touch others."""
        period = self.lanes // math.gcd(self.global_batch, self.lanes)
        if self.world_size == 1 or period > _MOST_ENUMERATED_LANES:
            return np.arange(self.lanes)
        first, last = self.rank * self.batch_size, (self.rank + 1) * self.batch_size
        starts = range(0, period * self.global_batch, self.global_batch)
        slices = (self._slices(start, start + self.global_batch, first, last) for start in starts)
        return np.array(sorted({part.lane for found in slices for part in found}), np.int64)

    def positions_of(self, lane: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return at which positions of the epoch places of a lane come."""
        return places * self.lanes + lane

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
