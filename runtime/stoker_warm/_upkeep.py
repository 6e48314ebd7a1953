"""When which node is due for a call that keeps it warm, or for a back-up.

A. Wang et al., "InfiniCache" (FAST 2020), section 4.2: every node is called once a minute unless traffic did, and is
backed up every five. Back-ups of different nodes fall at different times, evenly spread, so that they load neither the
proxy nor the platform all at once.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

from stoker.errors import ConfigError, StateError
from stoker_warm._wake import Task


class Errand(NamedTuple):
    """A call that is due: ``Task.WARM`` or ``Task.BACKUP``."""

    node: int
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepConfig:
    """How often nodes are called.

    Attributes:
        warm_seconds: a node is called this long after the last contact with it; None never.
        backup_seconds: a node is looked at this often, whether it is to be backed up; None never.
        peer_seconds: the instance that has the back-up, which nothing else calls, is called at least this often even
            if there is nothing to copy, but no oftener than the node has its turn; None never.
        at_once: errands under way, at most.

    Raises:
        ConfigError: an interval is not more than 0, or nothing may be under way.
    """

    warm_seconds: float | None = 60.0
    backup_seconds: float | None = 300.0
    peer_seconds: float | None = 300.0
    at_once: int = 16

    def __post_init__(self) -> None:
        for name in ("warm_seconds", "backup_seconds", "peer_seconds"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be more than 0, or None, not {value}")
        if self.at_once < 1:
            raise ConfigError(f"at_once must be at least 1, not {self.at_once}")


class Upkeep:
    """The schedule of all nodes, numbers from 0. It decides and never waits; not thread-safe.

    Invariants: no more than ``at_once`` errands are under way and none twice for a node; a node that is contacted does
    not come up for a warming call before the interval has passed since.

    Asking and telling take O(log nodes), amortised: a contact only notes a time, and an entry of the heap that comes
    up too early because of one goes back with the right time.

    Args:
        nodes: how many there are.
        config: how often they are called.
        now_seconds: of the clock that all times are of. The first calls are spread over the first intervals.
    """

    def __init__(self, nodes: int, config: UpkeepConfig, now_seconds: float) -> None:
        if nodes < 1:
            raise ConfigError(f"there must be at least 1 node, not {nodes}")
        self._config = config
        self._start_seconds = now_seconds
        self._nodes = nodes
        self._warm_due = [now_seconds + (config.warm_seconds or 0.0) * (node + 1) / nodes for node in range(nodes)]
        self._is_changed = bytearray(nodes)
        self._peer_called: list[float | None] = [None] * nodes
        self._busy: dict[int, Task] = {}
        self._missed: set[int] = set()
        self._heap: list[tuple[float, int, Task]] = []
        for node in range(nodes):
            self._queue_warm(node)
            self._queue_backup(node, now_seconds)
        heapq.heapify(self._heap)

    @property
    def under_way(self) -> int:
        """Errands that were given out and are not done."""
        return len(self._busy)

    def contacted(self, node: int, now_seconds: float) -> None:
        """A node was called, or had a word with the proxy: that keeps it warm."""
        if self._config.warm_seconds is not None:
            self._warm_due[node] = max(self._warm_due[node], now_seconds + self._config.warm_seconds)

    def changed(self, node: int) -> None:
        """What a node holds has changed since it was backed up."""
        self._is_changed[node] = 1

    def lost_peer(self, node: int) -> None:
        """A node's back-up is gone, or serves in its place: at its next turn it gets one, if it has anything."""
        self._peer_called[node] = None
        self._is_changed[node] = 1

    def next_due(self) -> float | None:
        """Return when to ask :meth:`due` next, which may be for nothing; None: after the next :meth:`done`."""
        if not self._heap or len(self._busy) >= self._config.at_once:
            return None
        return self._heap[0][0]

    def due(self, now_seconds: float) -> list[Errand]:
        """Return the errands to run, longest due first; each is under way until :meth:`done`."""
        errands = list[Errand]()
        while self._heap and self._heap[0][0] <= now_seconds and len(self._busy) < self._config.at_once:
            _, node, task = heapq.heappop(self._heap)
            if node in self._busy and task is Task.BACKUP:
                self._missed.add(node)
            else:
                if self._is_needed(node, task, now_seconds):
                    errands.append(Errand(node, task))
                    self._begin(node, task, now_seconds)
                self._queue_next(node, task, now_seconds)
        return errands

    def done(self, node: int, now_seconds: float, *, is_well: bool = True) -> None:
        """An errand has ended. A back-up that failed is due again at the node's next turn.

        Raises:
            StateError: the node has no errand under way.
        """
        task = self._busy.pop(node, None)
        if task is None:
            raise StateError(f"no errand of node {node} is under way")
        if is_well:
            self.contacted(node, now_seconds)
        elif task is Task.BACKUP:
            self.lost_peer(node)
        if node in self._missed:
            self._missed.remove(node)
            heapq.heappush(self._heap, (now_seconds, node, Task.BACKUP))

    def _is_needed(self, node: int, task: Task, now_seconds: float) -> bool:
        if task is Task.WARM:
            return node not in self._busy and self._warm_due[node] <= now_seconds
        if self._is_changed[node]:
            return True
        called_seconds, peer_seconds = self._peer_called[node], self._config.peer_seconds
        if called_seconds is None or peer_seconds is None or self._config.backup_seconds is None:
            return False
        return now_seconds + self._config.backup_seconds - called_seconds > peer_seconds  # the next turn is too late

    def _begin(self, node: int, task: Task, now_seconds: float) -> None:
        self._busy[node] = task
        self.contacted(node, now_seconds)
        if task is Task.BACKUP:
            self._is_changed[node] = 0  # what changes while it is copied may be in the copy or not
            self._peer_called[node] = now_seconds

    def _queue_next(self, node: int, task: Task, now_seconds: float) -> None:
        if task is Task.BACKUP:
            self._queue_backup(node, now_seconds)
            return
        if node in self._busy:
            self.contacted(node, now_seconds)
        self._queue_warm(node)

    def _queue_warm(self, node: int) -> None:
        if self._config.warm_seconds is not None:
            heapq.heappush(self._heap, (self._warm_due[node], node, Task.WARM))

    def _queue_backup(self, node: int, now_seconds: float) -> None:
        """Enter a node's next turn: turns are fixed, so they stay spread however long back-ups take."""
        if (every_seconds := self._config.backup_seconds) is not None:
            first_seconds = self._start_seconds + every_seconds * (node + 1) / self._nodes
            turns = max(0, math.floor((now_seconds - first_seconds) / every_seconds) + 1)
            due_seconds = first_seconds + turns * every_seconds
            if due_seconds <= now_seconds:  # by rounding
                due_seconds += every_seconds
            heapq.heappush(self._heap, (due_seconds, node, Task.BACKUP))
