"""The proxy's index: which shards of an object are on which nodes, in flat arrays, and which object is evicted next.

Shards from which nothing will be read any more become tombstones: they are to be deleted when their node is written to
next, which is soon enough, and wakes no node.

Objects are placed and let go whole, on distinct nodes chosen at random (A. Wang et al., "InfiniCache" (FAST 2020),
sections 3.2 and 3.3). Eviction is CLOCK over objects (F. J. Corbató, "A Paging Experiment with the Multics
System", MIT Project MAC M-384, 1968): an object that was found since the hand last passed is left, once.

An object is a row. A cell of a row is the node of one shard: none, a node that is being written to (a reservation), or
a node that is believed to hold it. Nodes are numbers from 0. What an object weighs follows from its name, so that the
account can never disagree with the rows.
"""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Set
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker._cache.index import is_name, size_of
from stoker.errors import ConfigError
from stoker_warm._erasure import ErasureCode
from stoker_warm._shard import SHARD_OVERHEAD_BYTES, ShardId

_RESERVED_BIT = 0x8000
"""Marks a cell whose node is being written to. A cell of no node is marked, too, so one comparison tells both."""
_NO_NODE = 0xFFFF
MAX_NODES = _RESERVED_BIT - 1


class Placement(NamedTuple):
    """Where an object's shards are to be put.

    Attributes:
        nodes: position → node, for the shards that are neither anywhere nor on their way.
        evicted: objects that went for it.
    """

    nodes: dict[int, int]
    evicted: int


class ShardDirectory:
    """Rows, cells and the account of each node. It decides and never waits; not thread-safe.

    Invariants: the shards of a row are on distinct nodes; :meth:`used_bytes` of a node is what its cells weigh, and a
    placement never lifts it over the node's limit. Only what a node itself reports to hold may.

    Args:
        nodes: how many there are.
        code: how objects are cut.
        limit_bytes: of each node, for payloads and :data:`~stoker_warm._shard.SHARD_OVERHEAD_BYTES` a shard.
        max_objects: rows, at most: bounds the directory's own memory, about 160 bytes each with 12 shards.

    Raises:
        ConfigError: there is no node or too many, or the code needs more nodes to be read than there are.
    """

    def __init__(self, nodes: int, code: ErasureCode, *, limit_bytes: int, max_objects: int = 1_000_000) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise ConfigError(f"there are 1 to {MAX_NODES} nodes, not {nodes}")
        if code.data > nodes:
            raise ConfigError(f"objects cut by {code} cannot be read from {nodes} nodes; take more nodes")
        if limit_bytes < 0 or max_objects < 1:
            raise ConfigError(f"limit_bytes is at least 0 and max_objects 1, not {limit_bytes} and {max_objects}")
        self._code, self._shards_per_object, self._max_objects = code, code.shards, max_objects
        self._node_limits = [limit_bytes] * nodes
        self._node_bytes = [0] * nodes
        self._live_nodes = set(range(nodes))
        self._rows: dict[int, int] = {}
        self._keys: list[int] = []  # -1: a free row
        self._cells = array("H")
        self._reference_bits = bytearray()
        self._free_rows: list[int] = []
        self._clock_hand = 0
        self._tombstones = defaultdict[int, set[ShardId]](set)

    def __len__(self) -> int:
        """Objects of which anything is anywhere, or on its way."""
        return len(self._rows)

    def used_bytes(self, node: int) -> int:
        """Return what a node is believed to hold or is being sent."""
        return self._node_bytes[node]

    def set_limit(self, node: int, limit_bytes: int, *, is_gone: bool = False) -> None:
        """Set what a node may hold; nothing is placed on one that is gone, until it is back.

        What is there stays; nothing is added to a node that is over its limit.
        """
        self._node_limits[node] = limit_bytes
        self._live_nodes = self._live_nodes - {node} if is_gone else self._live_nodes | {node}

    def find(self, name: str, *, is_use: bool = True) -> list[int] | None:
        """Return which node is believed to hold each shard of an object, by position, -1 if none is.

        Counts this as a use, if it ``is_use``. None if too few are believed for the object to be read.
        """
        row = self._rows.get(int(name, 16))
        if row is None:
            return None
        nodes = [cell if cell < _RESERVED_BIT else -1 for cell in self._row_cells(row)]
        if self._shards_per_object - nodes.count(-1) < self._code.data:
            return None
        self._reference_bits[row] |= is_use
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
            What to write where; None if there are too few nodes on which it could be read, or it is larger than they
            are, and then nothing changed.
        """
        if not is_name(name):
            return None  # an object of 4 GiB has one digit more
        row, shard_bytes = self._rows.get(int(name, 16)), self._shard_cost_bytes(name)
        cells = [_NO_NODE] * self._shards_per_object if row is None else self._row_cells(row)
        missing = [position for position, cell in enumerate(cells) if cell == _NO_NODE]
        have = {cell & ~_RESERVED_BIT for cell in cells if cell != _NO_NODE}
        able = {node for node in self._live_nodes if node not in have and self._node_limits[node] >= shard_bytes}
        wanted, objects = min(len(missing), len(able)), len(self._rows)
        if len(have) + wanted < self._code.data:
            return None
        chosen = self._choose_nodes(able, wanted, shard_bytes, row, rng)
        if row is None and len(self._rows) >= self._max_objects:
            self._evict()
        evicted = objects - len(self._rows)
        if row is None:  # one that was just freed, if any: the hand comes to it last
            row = self._new_row(int(name, 16))
        nodes = dict(zip(missing, chosen, strict=False))
        for position, node in nodes.items():
            self._cells[row * self._shards_per_object + position] = node | _RESERVED_BIT
            self._node_bytes[node] += shard_bytes
        return Placement(nodes, evicted)

    def commit_shard(self, node: int, shard: ShardId) -> bool:
        """A node has put a shard away that was placed there.

        Returns:
            Whether it belongs there; else its object went meanwhile, or was placed elsewhere: it is to be deleted.
        """
        at = self._find_cell(node, shard)
        if at is None:
            self._tombstones[node].add(shard)
            return False
        self._cells[at] = node
        return True

    def remove_shard(self, node: int, shard: ShardId) -> None:
        """A node says that it let a shard go. The last shard takes the row with it."""
        at = self._find_cell(node, shard)
        if at is not None:
            self._clear_cell(at)

    def mark_missing(self, node: int, shard: ShardId) -> None:
        """A node lacks a shard, or has a wrong one, which must not be found there again: it is to be deleted."""
        at = self._find_cell(node, shard)
        if at is not None:
            self._clear_cell(at)
            self._tombstones[node].add(shard)

    def cancel_reservation(self, node: int, shard: ShardId) -> None:
        """Nothing is on its way any more: give back the place of a shard that the node did not take."""
        at = self._find_cell(node, shard)
        if at is not None and self._cells[at] != node:
            self._clear_cell(at)

    def clear_node(self, node: int, *, kept: Set[ShardId] = frozenset()) -> None:
        """A node lost all that it held, but for some shards.

        What is on its way to it stays reserved until its writer reports. What is to be deleted there remains to be,
        lest an instance that was only away brings it back.
        """
        places: NDArray[np.int64] = np.flatnonzero(np.frombuffer(self._cells, np.uint16) == node)
        for at in places.tolist():
            row, position = divmod(at, self._shards_per_object)
            if not (kept and self._create_shard_id(self._row_name(row), position) in kept):
                self._clear_cell(at)

    def reconcile(self, node: int, shards: Collection[ShardId], *, is_trusted: bool = True) -> None:
        """Believe that a node holds what it lists and nothing else; without trust, only what was placed there.

        To be deleted are shards that nothing will be read from: tombstones, those cut by another code, of an object
        that has the shard elsewhere or another one on this node, or of more objects than there are rows for.
        """
        tombstones = self._tombstones.pop(node, set())
        believed = [shard for shard in shards if shard not in tombstones]
        self.clear_node(node, kept=frozenset(believed))
        self._tombstones[node] = tombstones.intersection(shards)
        for shard in believed:
            if not (is_trusted and self._add_reported(node, shard)):
                self.commit_shard(node, shard)

    def remove_object(self, name: str) -> None:
        """Let an object go: its shards are to be deleted."""
        row = self._rows.get(int(name, 16))
        if row is not None:
            self._remove_row(row)

    def list_tombstones(self, node: int, max_count: int) -> list[ShardId]:
        """Return shards that are to be deleted at a node."""
        return list(islice(self._tombstones.get(node, ()), max_count))

    def clear_tombstones(self, node: int, shards: Iterable[ShardId]) -> None:
        """A node has deleted what was to be deleted there."""
        self._tombstones[node].difference_update(shards)

    def _add_reported(self, node: int, shard: ShardId) -> bool:
        """Believe that a node holds a shard that was not placed there, if that can be."""
        key = int(shard.object, 16)
        row = self._rows.get(key)
        if shard.code != self._code or (row is None and len(self._rows) >= self._max_objects):
            return False
        row = self._new_row(key) if row is None else row
        cells = self._row_cells(row)
        if cells[shard.position] != _NO_NODE or node in {other & ~_RESERVED_BIT for other in cells}:
            return False
        self._cells[row * self._shards_per_object + shard.position] = node
        self._node_bytes[node] += self._shard_cost_bytes(shard.object)
        return True

    def _choose_nodes(
        self, eligible: set[int], count: int, shard_bytes: int, row: int | None, rng: random.Random
    ) -> list[int]:
        """Let objects go until as many nodes as wanted have room for a shard, and choose among those that have."""
        roomy = {node for node in eligible if self._has_room(node, shard_bytes)}
        while len(roomy) < count:
            roomy |= {node for node in eligible.intersection(self._evict(row)) if self._has_room(node, shard_bytes)}
        if row is None:
            return rng.sample(sorted(roomy), count)
        return nsmallest(count, sorted(roomy), key=lambda node: self._node_bytes[node] - self._node_limits[node])

    def _has_room(self, node: int, shard_bytes: int) -> bool:
        return self._node_bytes[node] + shard_bytes <= self._node_limits[node]

    def _evict(self, protected_row: int | None = None) -> list[int]:
        """Move the hand on to an object that was not used, and let it go; return the nodes that had shards of it."""
        while True:
            row, self._clock_hand = self._clock_hand, (self._clock_hand + 1) % len(self._keys)
            if self._keys[row] >= 0 and row != protected_row:
                if not self._reference_bits[row]:
                    return self._remove_row(row)
                self._reference_bits[row] = 0

    def _remove_row(self, row: int) -> list[int]:
        name, nodes = self._row_name(row), list[int]()
        for position, cell in enumerate(self._row_cells(row)):
            if cell != _NO_NODE:
                nodes.append(cell & ~_RESERVED_BIT)
                self._tombstones[nodes[-1]].add(self._create_shard_id(name, position))
                self._clear_cell(row * self._shards_per_object + position)
        return nodes

    def _new_row(self, key: int) -> int:
        if self._free_rows:
            row = self._free_rows.pop()
            self._keys[row] = key
        else:
            row = len(self._keys)
            self._keys.append(key)
            self._reference_bits.append(0)
            self._cells.extend([_NO_NODE] * self._shards_per_object)
        self._rows[key] = row
        return row

    def _clear_cell(self, cell: int) -> None:
        """Empty a cell, and free the row of which nothing is anywhere any more."""
        row = cell // self._shards_per_object
        self._node_bytes[self._cells[cell] & ~_RESERVED_BIT] -= self._shard_cost_bytes(self._row_name(row))
        self._cells[cell] = _NO_NODE
        if min(self._row_cells(row)) == _NO_NODE:
            del self._rows[self._keys[row]]
            self._keys[row], self._reference_bits[row] = -1, 0
            self._free_rows.append(row)

    def _find_cell(self, node: int, shard: ShardId) -> int | None:
        """Return which cell says that a shard is on a node, or on its way there; None if none does."""
        row = self._rows.get(int(shard.object, 16)) if shard.code == self._code else None
        if row is None:
            return None
        at = row * self._shards_per_object + shard.position
        return at if self._cells[at] in (node, node | _RESERVED_BIT) else None

    def _row_cells(self, row: int) -> list[int]:
        start = row * self._shards_per_object
        return self._cells[start : start + self._shards_per_object].tolist()

    def _row_name(self, row: int) -> str:
        return f"{self._keys[row]:032x}"

    def _create_shard_id(self, name: str, position: int) -> ShardId:
        return ShardId(name, self._code.data, self._code.parity, position)

    def _shard_cost_bytes(self, name: str) -> int:
        """Return what each shard of an object is counted as: the longest."""
        return self._code.shard_bytes(size_of(name)) + SHARD_OVERHEAD_BYTES
