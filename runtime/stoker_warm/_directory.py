"""The proxy's index: which shards of an object are on which nodes, in flat arrays, and which object is evicted next.

Objects are placed and let go whole, on distinct nodes chosen at random (A. Wang et al., "InfiniCache" (FAST 2020),
sections 3.2 and 3.3). Eviction is CLOCK over objects (F. J. Corbató, "A Paging Experiment with the Multics
System", MIT Project MAC M-384, 1968): an object that was found since the hand last passed is left, once.

An object is a row. A cell of a row is the node of one shard: none, a node that is being written to (a reservation), or
a node that is believed to hold it. Nodes are numbers from 0. What an object weighs follows from its name, so that the
account can never disagree with the rows.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections.abc import Collection, Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker._cache.keeper import is_name, size_of
from stoker.errors import ConfigError
from stoker_warm._erasure import Code
from stoker_warm._shard import OVERHEAD_BYTES, ShardId

_RESERVED = 0x8000
"""Marks a cell whose node is being written to. A cell of no node is marked, too, so one comparison tells both."""
_NOWHERE = 0xFFFF
MAX_NODES = _RESERVED - 1


class Held(NamedTuple):
    """A shard and the node that has it, or is being sent it."""

    node: int
    shard: ShardId


class Placement(NamedTuple):
    """Where an object's shards are to be put.

    Attributes:
        nodes: position → node, for the shards that are neither anywhere nor on their way.
        evicted: shards to delete, of objects that went for it.
    """

    nodes: dict[int, int]
    evicted: list[Held]


class Directory:
    """Rows, cells and the account of each node. It decides and never waits; not thread-safe.

    Invariants: the shards of a row are on distinct nodes; :meth:`used_bytes` of a node is what its cells weigh, and a
    placement never lifts it over the node's limit. Only what a node itself reports to hold may.

    Args:
        nodes: how many there are.
        code: how objects are cut.
        limit_bytes: of each node, for payloads and :data:`~stoker_warm._shard.OVERHEAD_BYTES` a shard.
        max_objects: rows, at most: bounds the directory's own memory, about 160 bytes each with 12 shards.

    Raises:
        ConfigError: there is no node or too many, or the code needs more nodes to be read than there are.
    """

    def __init__(self, nodes: int, code: Code, *, limit_bytes: int, max_objects: int = 1_000_000) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise ConfigError(f"there are 1 to {MAX_NODES} nodes, not {nodes}")
        if code.data > nodes:
            raise ConfigError(f"objects cut by {code} cannot be read from {nodes} nodes; take more nodes")
        if limit_bytes < 0 or max_objects < 1:
            raise ConfigError(f"limit_bytes is at least 0 and max_objects 1, not {limit_bytes} and {max_objects}")
        self._code, self._width, self._max_objects = code, code.shards, max_objects
        self._limits = [limit_bytes] * nodes
        self._used = [0] * nodes
        self._live = list(range(nodes))
        self._rows: dict[int, int] = {}
        self._keys: list[int] = []  # -1: a free row
        self._cells = array("H")
        self._is_used = bytearray()
        self._free: list[int] = []
        self._hand = 0

    def __len__(self) -> int:
        """Objects of which anything is anywhere, or on its way."""
        return len(self._rows)

    def used_bytes(self, node: int) -> int:
        """Return what a node is believed to hold or is being sent."""
        return self._used[node]

    def limit(self, node: int, limit_bytes: int) -> None:
        """Set what a node may hold. What is there stays; nothing is added to a node that is over its limit."""
        self._limits[node] = limit_bytes

    def avoid(self, node: int, *, is_gone: bool) -> None:
        """Place nothing on a node that is gone, until it is back. What it is believed to hold is another matter."""
        live = set(self._live) - {node} if is_gone else {*self._live, node}
        self._live = sorted(live)

    def find(self, name: str, *, is_use: bool = True) -> list[int] | None:
        """Return which node is believed to hold each shard of an object, by position, -1 if none is.

        Counts this as a use, if it ``is_use``. None if too few are believed for the object to be read.
        """
        row = self._rows.get(int(name, 16))
        if row is None:
            return None
        nodes = [cell if cell < _RESERVED else -1 for cell in self._cells_of(row)]
        if self._width - nodes.count(-1) < self._code.data:
            return None
        self._is_used[row] |= is_use
        return nodes

    def place(self, name: str, rng: random.Random) -> Placement | None:
        """Reserve a node for each shard of an object that is neither anywhere nor on its way.

        For an object that is not there that is every shard, on nodes at random. For one that has lost some it is those,
        on the nodes with most room: which is where they were lost, so many go to one node that is awake and not each to
        one that is called for it. With too few nodes alive for all, the last shards get none.

        Args:
            name: of the object.
            rng: chooses among the nodes with room, all equally likely, for an object that is not there.

        Returns:
            What to write where, and what to delete; None if there are too few nodes on which it could be read, or it
            is larger than they are, and then nothing changed.
        """
        if not is_name(name):
            return None  # an object of 4 GiB has one digit more
        row, shard_bytes = self._rows.get(int(name, 16)), self._taken_bytes(name)
        cells = [_NOWHERE] * self._width if row is None else self._cells_of(row)
        missing = [position for position, cell in enumerate(cells) if cell == _NOWHERE]
        have = {cell & ~_RESERVED for cell in cells if cell != _NOWHERE}
        if row is None:
            chosen = self._guess(len(missing), shard_bytes, rng)
        else:
            chosen = self._roomiest(len(missing), have, shard_bytes)
        evicted: list[Held] = []
        if not chosen:
            able = self._able(have, shard_bytes)
            if len(have) + min(len(missing), len(able)) < self._code.data:
                return None
            chosen, evicted = self._choose(able, len(missing), shard_bytes, rng, -1 if row is None else row)
        if row is None:  # one that was just freed, if any: the hand comes to it last
            evicted += self._evict() if len(self._rows) >= self._max_objects else []
            row = self._new_row(int(name, 16))
        nodes = dict(zip(missing, chosen, strict=False))
        for position, node in nodes.items():
            self._cells[row * self._width + position] = node | _RESERVED
            self._used[node] += shard_bytes
        return Placement(nodes, evicted)

    def _able(self, have: Collection[int], shard_bytes: int) -> list[int]:
        """Return the nodes alive that have no shard of the object, and whose limit is not smaller than one."""
        return [node for node in self._live if node not in have and self._limits[node] >= shard_bytes]

    def stored(self, node: int, shard: ShardId) -> bool:
        """A node has put a shard away that was placed there.

        Returns:
            Whether it belongs there; if not, it is to be deleted: its object went, or was placed elsewhere meanwhile.
        """
        at = self._cell_of(shard)
        if at is None or self._cells[at] not in (node, node | _RESERVED):
            return False
        self._cells[at] = node
        return True

    def dropped(self, node: int, shard: ShardId) -> bool:
        """A node does not have a shard: it let it go, lacks it, or could not be sent it. Return whether that is news.

        The last shard takes the row with it.
        """
        at = self._cell_of(shard)
        if at is None or self._cells[at] not in (node, node | _RESERVED):
            return False
        self._clear(at, self._taken_bytes(shard.object))
        self._tidy(at // self._width)
        return True

    def lost(self, node: int) -> None:
        """A node lost all that it held. What is on its way to it stays reserved until its writer reports."""
        self._disbelieve(node, frozenset())

    def listed(self, node: int, shards: Collection[ShardId], *, is_trusted: bool = True) -> list[ShardId]:
        """Believe that a node holds what it lists and nothing else; without trust, only what was placed there.

        Returns:
            The shards that nothing will be read from, which are to be deleted there: cut by another code, of an object
            that has the shard elsewhere or another one on this node, or of more objects than there are rows for.
        """
        self._disbelieve(node, frozenset(shards))
        believe = self._believe if is_trusted else self.stored
        return [shard for shard in shards if not believe(node, shard)]

    def forget(self, name: str) -> list[Held]:
        """Let an object go; return its shards, which are to be deleted."""
        row = self._rows.get(int(name, 16))
        return [] if row is None else self._let_go(row)

    def _disbelieve(self, node: int, but: Set[ShardId]) -> None:
        places: NDArray[np.int64] = np.flatnonzero(np.frombuffer(self._cells, np.uint16) == node)
        for at in places.tolist():
            row, position = divmod(at, self._width)
            name = self._name_of(row)
            if not (but and self._shard(name, position) in but):
                self._clear(at, self._taken_bytes(name))
                self._tidy(row)

    def _believe(self, node: int, shard: ShardId) -> bool:
        if shard.code != self._code:
            return False
        key = int(shard.object, 16)
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= self._max_objects:
                return False
            row = self._new_row(key)
        cells = self._cells_of(row)
        cell, at = cells[shard.position], row * self._width + shard.position
        if cell == _NOWHERE and node not in {other & ~_RESERVED for other in cells}:
            self._used[node] += self._taken_bytes(shard.object)
        elif cell not in (node, node | _RESERVED):
            return False
        self._cells[at] = node
        return True

    def _guess(self, wanted: int, shard_bytes: int, rng: random.Random) -> list[int]:
        """Return distinct nodes with room, drawn from all that are alive; none if one that was drawn will not do.

        While there is room this is as good as to look at all, and does not take longer with more nodes.
        """
        chosen = rng.sample(self._live, wanted) if wanted <= len(self._live) else []
        if all(self._used[node] + shard_bytes <= self._limits[node] for node in chosen):
            return chosen
        return []

    def _roomiest(self, wanted: int, have: Set[int], shard_bytes: int) -> list[int]:
        """Return the distinct nodes with most room; none if one of them has not enough."""
        others = [node for node in self._live if node not in have]
        chosen = heapq.nsmallest(wanted, others, key=lambda node: self._used[node] - self._limits[node])
        has_room = len(chosen) == wanted and all(self._used[at] + shard_bytes <= self._limits[at] for at in chosen)
        return chosen if has_room else []

    def _choose(
        self, able: list[int], wanted: int, shard_bytes: int, rng: random.Random, keep: int
    ) -> tuple[list[int], list[Held]]:
        """Return distinct nodes with room, as many as wanted or able, and the shards that make it."""
        wanted, possible = min(wanted, len(able)), set(able)
        roomy = {node for node in able if self._used[node] + shard_bytes <= self._limits[node]}
        evicted: list[Held] = []
        while len(roomy) < wanted:
            freed = self._evict(keep)
            evicted += freed
            touched = possible.intersection(held.node for held in freed)
            roomy |= {node for node in touched if self._used[node] + shard_bytes <= self._limits[node]}
        return rng.sample(sorted(roomy), wanted), evicted

    def _evict(self, keep: int = -1) -> list[Held]:
        """Move the hand on to an object that was not used, and let it go."""
        while True:
            row, self._hand = self._hand, (self._hand + 1) % len(self._keys)
            if self._keys[row] >= 0 and row != keep:
                if not self._is_used[row]:
                    return self._let_go(row)
                self._is_used[row] = 0

    def _let_go(self, row: int) -> list[Held]:
        name, start, freed = self._name_of(row), row * self._width, list[Held]()
        shard_bytes = self._taken_bytes(name)
        for position, cell in enumerate(self._cells_of(row)):
            if cell != _NOWHERE:
                freed.append(Held(cell & ~_RESERVED, self._shard(name, position)))
                self._clear(start + position, shard_bytes)
        self._remove(row)
        return freed

    def _new_row(self, key: int) -> int:
        if self._free:
            row = self._free.pop()
            self._keys[row] = key
        else:
            row = len(self._keys)
            self._keys.append(key)
            self._is_used.append(0)
            self._cells.extend([_NOWHERE] * self._width)
        self._rows[key] = row
        return row

    def _remove(self, row: int) -> None:
        del self._rows[self._keys[row]]
        self._keys[row], self._is_used[row] = -1, 0
        self._free.append(row)

    def _tidy(self, row: int) -> None:
        """Remove a row of which nothing is anywhere."""
        if min(self._cells_of(row)) == _NOWHERE:
            self._remove(row)

    def _clear(self, at: int, shard_bytes: int) -> None:
        self._used[self._cells[at] & ~_RESERVED] -= shard_bytes
        self._cells[at] = _NOWHERE

    def _cell_of(self, shard: ShardId) -> int | None:
        row = self._rows.get(int(shard.object, 16)) if shard.code == self._code else None
        return None if row is None else row * self._width + shard.position

    def _cells_of(self, row: int) -> list[int]:
        start = row * self._width
        return self._cells[start : start + self._width].tolist()

    def _name_of(self, row: int) -> str:
        return f"{self._keys[row]:032x}"

    def _shard(self, name: str, position: int) -> ShardId:
        return ShardId(name, self._code.data, self._code.parity, position)

    def _taken_bytes(self, name: str) -> int:
        """Return what each shard of an object is counted as: the longest."""
        return self._code.shard_bytes(size_of(name)) + OVERHEAD_BYTES
