"""Objects whose lost shards are put back from a bucket as soon as the loss is noticed: what is lost all the same.

Played shard by shard, as :mod:`stoker_warm._put_back` and :mod:`stoker_warm._directory` have it. Objects that have lost
shards wait in the order in which they did. So many at a time are made whole, and when all of a batch are, those that
wait are the next. A data shard is a range of its object, for parity the whole of it is read. Shards go to the nodes
that have most room, which are those that lost some.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker_sim._warm_fleet import HOUR_SECONDS, NodeLife, check_durations
from stoker_warm._code import Code
from stoker_warm._put_back import NAMES_AT_ONCE, takes_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBackModel:
    """How lost shards get back.

    Attributes:
        at_once: objects.
        start_seconds: until an instance that is new has said that it is empty.
        first_byte_seconds: of a GET.
        connection_bytes_per_second: of each.
        node_bytes_per_second: that a node takes, shard after shard.
        wake_seconds: until a node that sleeps begins to take one.
        linger_seconds: that a node stays after the last one.
    """

    at_once: int
    start_seconds: float = 0.3
    first_byte_seconds: float = 0.02
    connection_bytes_per_second: float = 90e6
    node_bytes_per_second: float = 75e6
    wake_seconds: float = 0.025
    linger_seconds: float = 0.05

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise ConfigError(f"at_once must be at least 1 object, not {self.at_once}")
        check_durations(self, "start_seconds", "first_byte_seconds", "wake_seconds", "linger_seconds")
        for name in ("connection_bytes_per_second", "node_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}")


@dataclass(slots=True, kw_only=True)
class PutBackTally:
    """What was lost all the same, and what it took.

    Attributes:
        outages: ``float64 [outages, 3]``: an object, from when too many of its shards were lost, and until when.
        shards: that were put back.
        requests: GETs for them.
        read_bytes: that these brought.
        calls: of nodes that had gone to sleep before a shard came; one that has just said that it is empty has not.
        write_seconds: that nodes were busy with shards, waiting for the next included, lingering at the end not.
        notice_seconds: the mean time from a node's loss until the proxy knows; NaN if there was none.
        back_seconds: the mean time from the notice until a shard was back; NaN if none was.
    """

    outages: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 3)))
    shards: int = 0
    requests: int = 0
    read_bytes: int = 0
    calls: int = 0
    write_seconds: float = 0.0
    notice_seconds: float = math.nan
    back_seconds: float = math.nan

    def lost_objects(self, hours: int) -> NDArray[np.int64]:
        """Return ``int64 [hours]``: how many objects could not be restored at some time in each hour."""
        lost = {
            (hour, row)
            for row, begin, end in self.outages.tolist()
            for hour in range(int(begin // HOUR_SECONDS), int(min(end // HOUR_SECONDS, hours - 1)) + 1)
        }
        counts: NDArray[np.int64] = np.bincount(np.array([hour for hour, _ in lost], np.int64), minlength=hours)
        return counts

    @property
    def lost_seconds(self) -> float:
        """For how long objects could not be restored, all together."""
        return float((self.outages[:, 2] - self.outages[:, 1]).sum())


def put_back(
    model: PutBackModel,
    code: Code,
    places: NDArray[np.int64],
    lives: Sequence[NodeLife],
    size_bytes: int,
    seconds: float,
) -> PutBackTally:
    """Return what becomes of objects of one size.

    Args:
        model: how shards get back.
        code: of the objects.
        places: ``int64 [objects, shards]``, the node of each shard; those of an object differ.
        lives: of the nodes: when each one lost its memory, and when a call found that its instance is gone.
        size_bytes: of an object.
        seconds: that are looked at.
    """
    played = _Played(model, code, places, len(lives), size_bytes)
    losses = [(lost, called, node) for node, life in enumerate(lives) for lost, called in life.losses]
    events = [(lost, played.lost, node) for lost, _, node in losses]
    events += [(called + model.start_seconds, played.noticed, node) for _, called, node in losses]
    for at_seconds, happens, node in sorted(events, key=itemgetter(0)):
        if at_seconds < seconds:
            played.run_until(at_seconds)
            happens(node, at_seconds)
    played.run_until(seconds)
    return played.tally(seconds, [called + model.start_seconds - lost for lost, called, _ in losses])


class _Played:
    """What is where, and what is wanted. A cell is a shard, by object and position."""

    def __init__(self, model: PutBackModel, code: Code, places: NDArray[np.int64], nodes: int, size_bytes: int) -> None:
        self._model, self._code, self._size_bytes = model, code, size_bytes
        self._shard_bytes = code.shard_bytes(size_bytes)
        self._nodes_of = places.tolist()
        self._there = np.zeros(places.shape)  # from when a shard is; inf: it is lost
        self._cells: list[list[int]] = [[] for _ in range(nodes)]
        for cell, node in enumerate(places.reshape(-1).tolist()):
            self._cells[node].append(cell)
        self._lost = dict[int, list[int]]()  # node → cells, until that is noticed
        self._used = [len(cells) for cells in self._cells]  # as the proxy believes
        self._emptiest = [(used, node) for node, used in enumerate(self._used)]  # a heap, with what was true once
        heapq.heapify(self._emptiest)
        self._wanted = dict[int, tuple[float, list[int]]]()  # object → when it was first missed, and positions
        self._batch: list[int] = []  # in reverse
        self._free: list[float] = []  # when who puts back is, a heap
        self._batch_end = 0.0
        self._written = [-math.inf] * nodes  # when the last shard was
        self._since = np.full(len(places), np.inf)  # from when an object cannot be restored
        self._outages: list[tuple[float, float, float]] = []
        self._counted = PutBackTally(back_seconds=0.0)  # of all shards together, until it is handed out

    def lost(self, node: int, seconds: float) -> None:
        """A node loses its memory. What is on its way is written to whoever is there then."""
        cells = np.array(self._cells[node], np.int64)
        is_here = self._there.reshape(-1)[cells] <= seconds
        gone = cells[is_here]
        self._there.reshape(-1)[gone] = np.inf
        self._cells[node] = cells[~is_here].tolist()
        self._lost.setdefault(node, []).extend(gone.tolist())
        rows = gone // self._code.shards
        rows = rows[(self._there[rows] > seconds).sum(axis=1) > self._code.parity]
        self._since[rows] = np.minimum(self._since[rows], seconds)

    def noticed(self, node: int, seconds: float) -> None:
        """The proxy hears of it, from whoever is there instead."""
        cells = self._lost.pop(node, [])  # none, if it was lost again before it was heard of
        self._written[node] = max(self._written[node], seconds)
        self._use(node, -len(cells))
        for cell in cells:
            row, position = divmod(cell, self._code.shards)
            self._nodes_of[row][position] = -1
            self._wanted.setdefault(row, (seconds, []))[1].append(position)

    def run_until(self, seconds: float) -> None:
        """Begin with the objects whose turn comes before then."""
        while self._batch or self._wanted:
            if not self._batch:
                begin_seconds = max(self._batch_end, next(iter(self._wanted.values()))[0])
                if begin_seconds >= seconds:
                    return
                self._batch = list(islice(self._wanted, NAMES_AT_ONCE))[::-1]
                self._free = [begin_seconds] * self._model.at_once
            if self._free[0] >= seconds:
                return
            end_seconds = self._put_back(self._batch.pop(), self._free[0])
            heapq.heapreplace(self._free, end_seconds)
            self._batch_end = max(self._batch_end, end_seconds)

    def _put_back(self, row: int, begin_seconds: float) -> float:
        """Read what an object has lost, and write it; return when that is done."""
        noticed_seconds, positions = self._wanted.pop(row)
        is_whole = takes_whole(self._code, positions)
        read_bytes = self._size_bytes if is_whole else self._shard_bytes  # ranges are read side by side
        requests = 1 if is_whole else len(positions)
        self._counted.shards += len(positions)
        self._counted.requests += requests
        self._counted.read_bytes += requests * read_bytes
        come_seconds = begin_seconds + self._model.first_byte_seconds
        come_seconds += read_bytes / self._model.connection_bytes_per_second
        end_seconds = max([self._write(row, position, come_seconds) for position in positions])
        self._counted.back_seconds += len(positions) * (end_seconds - noticed_seconds)
        if self._since[row] < math.inf and np.isinf(self._there[row]).sum() <= self._code.parity:
            self._outages.append((row, float(self._since[row]), end_seconds))
            self._since[row] = math.inf
        return end_seconds

    def _write(self, row: int, position: int, come_seconds: float) -> float:
        node = self._roomiest(self._nodes_of[row])
        self._nodes_of[row][position] = node
        self._cells[node].append(row * self._code.shards + position)
        self._use(node, 1)
        write_seconds = self._shard_bytes / self._model.node_bytes_per_second
        last_seconds = self._written[node]
        if come_seconds > last_seconds + self._model.linger_seconds:
            self._counted.calls += 1
            self._counted.write_seconds += write_seconds
            end_seconds = come_seconds + self._model.wake_seconds + write_seconds
        else:
            end_seconds = max(come_seconds, last_seconds) + write_seconds
            self._counted.write_seconds += end_seconds - last_seconds
        self._written[node] = self._there[row, position] = end_seconds
        return end_seconds

    def _use(self, node: int, shards: int) -> None:
        self._used[node] += shards
        heapq.heappush(self._emptiest, (self._used[node], node))

    def _roomiest(self, others: Sequence[int]) -> int:
        """Return the node that holds least, of those that the object has nothing on."""
        passed: list[tuple[int, int]] = []
        while True:
            used, node = self._emptiest[0]
            if used == self._used[node]:
                if node not in others:
                    break
                passed.append((used, node))
            heapq.heappop(self._emptiest)
        for entry in passed:
            heapq.heappush(self._emptiest, entry)
        return node

    def tally(self, seconds: float, notice_seconds: Sequence[float]) -> PutBackTally:
        """Return what came of it until then."""
        still = [(float(row), float(self._since[row]), seconds) for row in np.flatnonzero(self._since < math.inf)]
        shards = self._counted.shards
        return replace(
            self._counted,
            outages=np.array([*self._outages, *still]).reshape(-1, 3),
            notice_seconds=float(np.mean(notice_seconds)) if notice_seconds else math.nan,
            back_seconds=self._counted.back_seconds / shards if shards else math.nan,
        )
