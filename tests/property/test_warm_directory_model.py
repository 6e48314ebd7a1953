"""The directory against a model that is too simple to be wrong: a dictionary of dictionaries, summed up each time."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stoker._cache.index import size_of
from stoker_warm._directory import ShardDirectory
from stoker_warm._erasure import ErasureCode
from stoker_warm._shard import SHARD_OVERHEAD_BYTES, ShardId

CODES = (ErasureCode(3, 2), ErasureCode(2, 1))
STRANGE = ErasureCode(1, 1)
NAMES = [
    f"{number:08x}{size_bytes:08x}{number:016x}" for number, size_bytes in enumerate([0, 7, 900, 3000, 3001, 9000])
]
EVERY = [ShardId(name, c.data, c.parity, at) for name in NAMES for c in (*CODES, STRANGE) for at in range(c.shards)]
OBJECTS = st.sampled_from(NAMES)
NODES = st.integers(0, 6)


def occupied_bytes(name: str, code: ErasureCode) -> int:
    return code.shard_bytes(size_of(name)) + SHARD_OVERHEAD_BYTES


class DirectoryMachine(RuleBasedStateMachine):
    @initialize(
        nodes=st.integers(4, 7),
        limit_bytes=st.integers(0, 12_000),
        most=st.integers(1, 8),
        code=st.sampled_from(CODES),
    )
    def make(self, nodes: int, limit_bytes: int, most: int, code: ErasureCode) -> None:
        self.code = code
        self.directory = ShardDirectory(nodes, code, limit_bytes=limit_bytes, max_objects=most)
        self.limits = dict.fromkeys(range(nodes), limit_bytes)
        self.live = set(self.limits)
        self.most = most
        self.rows: dict[tuple[str, ErasureCode], dict[int, tuple[int, bool]]] = {}
        """Object and code → position → node, and whether it is believed to hold the shard."""
        self.doomed: dict[int, set[ShardId]] = {node: set() for node in range(7)}
        """Node → what is to be deleted there."""

    def used(self) -> Counter[int]:
        used: Counter[int] = Counter()
        for (name, code), row in self.rows.items():
            for node, _ in row.values():
                used[node] += occupied_bytes(name, code)
        return used

    def readable(self, key: tuple[str, ErasureCode]) -> bool:
        return sum(is_believed for _, is_believed in self.rows.get(key, {}).values()) >= key[1].data

    def held(self, key: tuple[str, ErasureCode]) -> set[tuple[int, ShardId]]:
        name, code = key
        return {
            (node, ShardId(name, code.data, code.parity, position))
            for position, (node, _) in self.rows.get(key, {}).items()
        }

    def take_out(self, keys: set[tuple[str, ErasureCode]]) -> None:
        """Drop whole objects from the model: their shards are to be deleted."""
        for key in keys:
            for node, shard in self.held(key):
                self.doomed[node].add(shard)
            self.rows.pop(key, None)

    @rule(name=OBJECTS, seed=st.integers(0, 99))
    def place(self, name: str, seed: int) -> None:
        code = self.code
        key, before = (name, code), self.used()
        row = dict(self.rows.get(key, {}))
        missing = [position for position in range(code.shards) if position not in row]
        size = occupied_bytes(name, code)
        able = {node for node in self.live if self.limits[node] >= size} - {node for node, _ in row.values()}
        roomy = {node for node in able if before[node] + size <= self.limits[node]}
        placed = self.directory.place(name, random.Random(seed))
        if placed is None:
            assert len(row) + min(len(missing), len(able)) < code.data
            return
        gone = {
            each
            for each in self.rows
            if each != key and all(self.directory._find_cell(*held) is None for held in self.held(each))
        }
        self.take_out(gone)
        assert len(gone) == placed.evicted
        is_full = key not in self.rows and len(self.rows) + len(gone) >= self.most
        if len(roomy) >= len(missing) and not is_full:
            assert not gone
        nodes = list(placed.nodes.values())
        assert len(set(nodes)) == len(nodes) == min(len(missing), len(able))
        assert set(nodes) <= able
        assert list(placed.nodes) == missing[: len(nodes)]
        self.rows[key] = row | {position: (node, False) for position, node in placed.nodes.items()}
        after = self.used()
        assert all(after[node] <= self.limits[node] for node in nodes)

    @rule(name=OBJECTS, code=st.sampled_from([*CODES, STRANGE]), position=st.integers(0, 4), node=NODES)
    def a_node_says_that_it_stored(self, name: str, code: ErasureCode, position: int, node: int) -> None:
        shard = ShardId(name, code.data, code.parity, position % code.shards)
        is_placed = (node, shard) in self.held((name, code))
        assert self.directory.commit_shard(node, shard) == is_placed
        if is_placed:
            self.rows[name, code][shard.position] = (node, True)
        else:
            self.doomed[node].add(shard)

    @rule(name=OBJECTS)
    def all_nodes_store_what_they_are_sent(self, name: str) -> None:
        for node, shard in self.held((name, self.code)):
            self.a_node_says_that_it_stored(name, self.code, shard.position, node)

    @rule(
        name=OBJECTS,
        code=st.sampled_from([*CODES, STRANGE]),
        position=st.integers(0, 4),
        node=NODES,
        how=st.sampled_from(["remove_shard", "mark_missing", "cancel_reservation"]),
    )
    def a_node_does_not_have(self, name: str, code: ErasureCode, position: int, node: int, how: str) -> None:
        shard = ShardId(name, code.data, code.parity, position % code.shards)
        getattr(self.directory, how)(node, shard)
        if (node, shard) not in self.held((name, code)):
            return
        _, is_believed = self.rows[name, code][shard.position]
        if how != "cancel_reservation" or not is_believed:
            self.drop((name, code), shard.position)
        if how == "mark_missing":
            self.doomed[node].add(shard)

    @rule(node=NODES, most=st.integers(1, 5))
    def a_node_deletes_what_it_is_told_to(self, node: int, most: int) -> None:
        page = self.directory.list_tombstones(node, most)
        assert len(page) == min(most, len(self.doomed[node]))
        self.directory.clear_tombstones(node, page)
        self.doomed[node] -= set(page)

    def drop(self, key: tuple[str, ErasureCode], position: int) -> None:
        del self.rows[key][position]
        if not self.rows[key]:
            del self.rows[key]

    def lose(self, node: int, but: set[ShardId]) -> None:
        """Take from the model what a node lost."""
        for key in list(self.rows):
            name, code = key
            for position, (holder, is_believed) in list(self.rows[key].items()):
                if holder == node and is_believed and ShardId(name, code.data, code.parity, position) not in but:
                    self.drop(key, position)

    @rule(node=NODES)
    def a_node_loses_everything(self, node: int) -> None:
        self.directory.clear_node(node)
        self.lose(node, set())

    @rule(data=st.data(), node=NODES, is_trusted=st.booleans())
    def a_node_lists_what_it_has(self, data: st.DataObject, node: int, is_trusted: bool) -> None:
        if node not in self.limits:
            return
        known = [shard for key in self.rows for holder, shard in self.held(key) if holder == node]
        listed = list(dict.fromkeys([*data.draw(st.lists(st.sampled_from(EVERY), max_size=6)), *known[::2]]))
        self.directory.reconcile(node, listed, is_trusted=is_trusted)
        self.doomed[node] &= set(listed)
        believed = [shard for shard in listed if shard not in self.doomed[node]]
        self.lose(node, set(believed))
        for shard in believed:
            key = (shard.object, shard.code)
            row = self.rows.get(key, {})
            holder, _ = row.get(shard.position, (node, True))
            others = {other for position, (other, _) in row.items() if position != shard.position}
            has_room = key in self.rows or len(self.rows) < self.most
            is_placed = holder == node and shard.position in row
            can_be = shard.code == self.code and holder == node and node not in others and has_room
            if not (can_be if is_trusted else is_placed):
                self.doomed[node].add(shard)
            else:
                self.rows.setdefault(key, {})[shard.position] = (node, True)

    @rule(name=OBJECTS)
    def forget(self, name: str) -> None:
        self.directory.remove_object(name)
        self.take_out({(name, self.code)})

    @rule(node=NODES, limit_bytes=st.integers(0, 12_000), is_gone=st.booleans())
    def limit(self, node: int, limit_bytes: int, is_gone: bool) -> None:
        if node in self.limits:
            self.directory.set_limit(node, limit_bytes, is_gone=is_gone)
            self.limits[node] = limit_bytes
            self.live = self.live - {node} if is_gone else self.live | {node}

    @invariant()
    def what_is_found_is_what_is_believed(self) -> None:
        for name in NAMES:
            found = self.directory.find(name)
            if not self.readable((name, self.code)):
                assert found is None
                continue
            row = self.rows[name, self.code]
            believed = [row.get(position, (-1, False)) for position in range(self.code.shards)]
            assert found == [node if is_believed else -1 for node, is_believed in believed]

    @invariant()
    def what_is_to_be_deleted_is_what_nothing_is_read_from(self) -> None:
        assert {node: set(self.directory.list_tombstones(node, 1000)) for node in self.doomed} == self.doomed

    @invariant()
    def the_account_is_the_sum_of_the_shards(self) -> None:
        used = self.used()
        assert [self.directory.used_bytes(node) for node in self.limits] == [used[node] for node in self.limits]
        assert len(self.directory) == len(self.rows) <= self.most

    @invariant()
    def the_shards_of_an_object_are_on_distinct_nodes(self) -> None:
        for row in self.rows.values():
            assert len({node for node, _ in row.values()}) == len(row)


TestDirectoryAgainstModel = DirectoryMachine.TestCase
TestDirectoryAgainstModel.settings = settings(max_examples=150, stateful_step_count=40)
