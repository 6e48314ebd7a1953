"""The proxy's index: which node holds each shard of an object, in flat arrays, and which object is evicted next.

A shard that will never be read again becomes a tombstone: it is deleted at the next write to its node, without a wake.

Objects are placed and evicted whole, on distinct nodes chosen at random (A. Wang et al., "InfiniCache" (FAST 2020),
sections 3.2 and 3.3). Eviction is CLOCK over objects (F. J. Corbató, "A Paging Experiment with the Multics
System", MIT Project MAC M-384, 1968): the hand spares an object once if it was found since the hand's last pass.

An object is a row. A cell of a row is the node of one shard: none, a node that is being written to (a reservation), or
a node that is believed to hold the shard. Nodes are numbered from 0. Its name gives an object's size.
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
"""Bit of a cell whose node is being written to. It is also set in an empty cell, so one comparison tests for both."""
_NO_NODE = 0xFFFF
MAX_NODES = _RESERVED_BIT - 1


class Placement(NamedTuple):
    """Nodes reserved for an object's shards.

    Attributes:
        nodes: Position → node, for the shards that no node holds and that are not being written.
        evicted: Number of objects evicted to make room.
    """

    nodes: dict[int, int]
    evicted: int


class ShardDirectory:
    """Index of objects, and used bytes of each node. It does no I/O and never waits; not thread-safe.

    Invariants: the shards of a row are on distinct nodes; :meth:`used_bytes` of a node is the sum over its cells, and a
    placement never raises it above the node's limit. Only shards that the node itself reports may do so.

    Args:
        nodes: Number of nodes.
        code: Erasure code of objects.
        limit_bytes: Initial limit of each node, including :data:`~stoker_warm._shard.SHARD_OVERHEAD_BYTES` per shard.
        max_objects: Maximum number of rows; a row takes about 160 bytes with 12 shards.

    Raises:
        ConfigError: The number of nodes is 0, too large, or smaller than the number of data shards.
    """

    def __init__(self, nodes: int, code: ErasureCode, *, limit_bytes: int, max_objects: int = 1_000_000) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise ConfigError(f"the number of nodes must be 1 to {MAX_NODES}, not {nodes}")
        if code.data > nodes:
            raise ConfigError(f"objects cut by {code} cannot be read from {nodes} nodes; use more nodes")
        if limit_bytes < 0 or max_objects < 1:
            raise ConfigError(f"limit_bytes must be at least 0 and max_objects 1, not {limit_bytes} and {max_objects}")
        self._code, self._shards_per_object, self._max_objects = code, code.shards, max_objects
        self._node_limits = [limit_bytes] * nodes
        self._node_bytes = [0] * nodes
        self._live_nodes = set(range(nodes))
        self._rows: dict[int, int] = {}
        self._keys: list[int] = []  # name of each row's object; -1 in a free row
        self._cells = array("H")
        self._reference_bits = bytearray()
        self._free_rows: list[int] = []
        self._clock_hand = 0
        self._tombstones = defaultdict[int, set[ShardId]](set)

    def __len__(self) -> int:
        """Number of objects with at least one shard on a node or being written."""
        return len(self._rows)

    def used_bytes(self, node: int) -> int:
        """Return the bytes that a node is believed to hold or that are being written to it."""
        return self._node_bytes[node]

    def set_limit(self, node: int, limit_bytes: int, *, is_gone: bool = False) -> None:
        """Set a node's limit in bytes; shards above it stay. Nothing is placed on a node while it ``is_gone``."""
        self._node_limits[node] = limit_bytes
        self._live_nodes = self._live_nodes - {node} if is_gone else self._live_nodes | {node}

    def find(self, name: str, *, is_use: bool = True) -> list[int] | None:
        """Return the node that is believed to hold each shard of an object, by position; -1 for no node.

        None if too few shards are left to read the object. With ``is_use``, this counts as a use for eviction.
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
        """Reserve a node for each shard of an object that no node holds and that is not being written.

        All shards of an absent object are placed on random nodes. Lost shards are placed on the nodes with most room:
        these are the nodes that lost shards, so that many shards go to one awake node, and few nodes are called. With
        too few live nodes, the last shards are not placed.

        Args:
            name: Name of the object.
            rng: Random generator that chooses among the nodes with room, with equal probability, for an absent object.

        Returns:
            The reserved nodes; None, with nothing changed, if too few nodes can hold its shards to read the object.
        """
        if not is_name(name):
            return None  # the name of an object of 4 GiB or more is one digit longer
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
        if row is None:  # a row that was just freed, if any: the hand reaches it last
            row = self._new_row(int(name, 16))
        nodes = dict(zip(missing, chosen, strict=False))
        for position, node in nodes.items():
            self._cells[row * self._shards_per_object + position] = node | _RESERVED_BIT
            self._node_bytes[node] += shard_bytes
        return Placement(nodes, evicted)

    def commit_shard(self, node: int, shard: ShardId) -> bool:
        """Record that a node has stored a shard.

        Returns:
            False, and the shard is a tombstone, if it is not placed there: evicted meanwhile, or placed elsewhere.
        """
        at = self._find_cell(node, shard)
        if at is None:
            self._tombstones[node].add(shard)
            return False
        self._cells[at] = node
        return True

    def remove_shard(self, node: int, shard: ShardId) -> None:
        """Record that a node has evicted a shard; removing an object's last shard frees its row."""
        at = self._find_cell(node, shard)
        if at is not None:
            self._clear_cell(at)

    def mark_missing(self, node: int, shard: ShardId) -> None:
        """Record that a node lacks a shard or has a wrong one; it becomes a tombstone, and is not found there again."""
        at = self._find_cell(node, shard)
        if at is not None:
            self._clear_cell(at)
            self._tombstones[node].add(shard)

    def cancel_reservation(self, node: int, shard: ShardId) -> None:
        """Cancel the reservation of a shard that the node has not stored; no effect on a stored shard."""
        at = self._find_cell(node, shard)
        if at is not None and self._cells[at] != node:
            self._clear_cell(at)

    def clear_node(self, node: int, *, kept_shards: Set[ShardId] = frozenset()) -> None:
        """Record that a node lost its shards except ``kept_shards``. Reservations and tombstones stay."""
        places: NDArray[np.int64] = np.flatnonzero(np.frombuffer(self._cells, np.uint16) == node)
        for at in places.tolist():
            row, position = divmod(at, self._shards_per_object)
            if not (kept_shards and self._create_shard_id(self._row_name(row), position) in kept_shards):
                self._clear_cell(at)

    def reconcile(self, node: int, shards: Collection[ShardId], *, is_trusted: bool = True) -> None:
        """Set a node's contents to the shards that it lists; unless ``is_trusted``, only to those placed there.

        These become tombstones: listed tombstones, shards of another code, of an object that has the shard on another
        node or another shard on this node, and of objects for which there is no row left.
        """
        tombstones = self._tombstones.pop(node, set())
        believed = [shard for shard in shards if shard not in tombstones]
        self.clear_node(node, kept_shards=frozenset(believed))
        self._tombstones[node] = tombstones.intersection(shards)
        for shard in believed:
            if not (is_trusted and self._add_reported(node, shard)):
                self.commit_shard(node, shard)

    def remove_object(self, name: str) -> None:
        """Remove an object; its shards become tombstones."""
        row = self._rows.get(int(name, 16))
        if row is not None:
            self._remove_row(row)

    def list_tombstones(self, node: int, max_count: int) -> list[ShardId]:
        """Return up to ``max_count`` tombstones of a node."""
        return list(islice(self._tombstones.get(node, ()), max_count))

    def clear_tombstones(self, node: int, shards: Iterable[ShardId]) -> None:
        """Record that a node has deleted these tombstones."""
        self._tombstones[node].difference_update(shards)

    def _add_reported(self, node: int, shard: ShardId) -> bool:
        """Add a shard that a node reports and that was not placed there; return whether that was possible."""
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
        """Evict objects until ``count`` of the ``eligible`` nodes have room for a shard, and choose among those."""
        roomy = {node for node in eligible if self._has_room(node, shard_bytes)}
        while len(roomy) < count:
            roomy |= {node for node in eligible.intersection(self._evict(row)) if self._has_room(node, shard_bytes)}
        if row is None:
            return rng.sample(sorted(roomy), count)
        return nsmallest(count, sorted(roomy), key=lambda node: self._node_bytes[node] - self._node_limits[node])

    def _has_room(self, node: int, shard_bytes: int) -> bool:
        return self._node_bytes[node] + shard_bytes <= self._node_limits[node]

    def _evict(self, protected_row: int | None = None) -> list[int]:
        """Advance the hand to the next unused object, and evict it; return the nodes that had its shards."""
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
        """Empty a cell, and free its row if all cells of the row are empty."""
        row = cell // self._shards_per_object
        self._node_bytes[self._cells[cell] & ~_RESERVED_BIT] -= self._shard_cost_bytes(self._row_name(row))
        self._cells[cell] = _NO_NODE
        if min(self._row_cells(row)) == _NO_NODE:
            del self._rows[self._keys[row]]
            self._keys[row], self._reference_bits[row] = -1, 0
            self._free_rows.append(row)

    def _find_cell(self, node: int, shard: ShardId) -> int | None:
        """Return the index of the cell that has a shard on a node, stored or reserved; None if there is none."""
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
        """Return the bytes counted for each shard of an object: those of the longest one."""
        return self._code.shard_bytes(size_of(name)) + SHARD_OVERHEAD_BYTES
