"""The directory against a model that is too simple to be wrong: a dictionary of dictionaries, summed up each time."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stoker._cache.keeper import size_of
from stoker_warm._directory import Directory, Held
from stoker_warm._erasure import Code
from stoker_warm._shard import OVERHEAD_BYTES, ShardId

CODES = (Code(3, 2), Code(2, 1))
STRANGE = Code(1, 1)
NAMES = [
    f"{number:08x}{size_bytes:08x}{number:016x}" for number, size_bytes in enumerate([0, 7, 900, 3000, 3001, 9000])
]
EVERY = [ShardId(name, c.data, c.parity, at) for name in NAMES for c in (*CODES, STRANGE) for at in range(c.shards)]
OBJECTS = st.sampled_from(NAMES)
NODES = st.integers(0, 6)


def taken_bytes(name: str, code: Code) -> int:
    return code.shard_bytes(size_of(name)) + OVERHEAD_BYTES


class DirectoryMachine(RuleBasedStateMachine):
    @initialize(
        nodes=st.integers(4, 7),
        limit_bytes=st.integers(0, 12_000),
        most=st.integers(1, 8),
        code=st.sampled_from(CODES),
    )
    def make(self, nodes: int, limit_bytes: int, most: int, code: Code) -> None:
        self.code = code
        self.directory = Directory(nodes, code, limit_bytes=limit_bytes, max_objects=most)
        self.limits = dict.fromkeys(range(nodes), limit_bytes)
        self.live = set(self.limits)
        self.most = most
        self.rows: dict[tuple[str, Code], dict[int, tuple[int, bool]]] = {}
        """Object and code → position → node, and whether it is believed to hold the shard."""

    def used(self) -> Counter[int]:
        used: Counter[int] = Counter()
        for (name, code), row in self.rows.items():
            for node, _ in row.values():
                used[node] += taken_bytes(name, code)
        return used

    def readable(self, key: tuple[str, Code]) -> bool:
        return sum(is_believed for _, is_believed in self.rows.get(key, {}).values()) >= key[1].data

    def held(self, key: tuple[str, Code]) -> set[Held]:
        name, code = key
        return {
            Held(node, ShardId(name, code.data, code.parity, position))
            for position, (node, _) in self.rows.get(key, {}).items()
        }

    def take_out(self, freed: list[Held]) -> set[tuple[str, Code]]:
        """Drop whole objects from the model; what was freed must be exactly their shards."""
        keys = {(held.shard.object, held.shard.code) for held in freed}
        expected = set().union(*(self.held(key) for key in keys))
        assert (set(freed), len(freed)) == (expected, len(expected))
        for key in keys:
            del self.rows[key]
        return keys

    @rule(name=OBJECTS, seed=st.integers(0, 99))
    def place(self, name: str, seed: int) -> None:
        code = self.code
        key, before = (name, code), self.used()
        row = dict(self.rows.get(key, {}))
        missing = [position for position in range(code.shards) if position not in row]
        size = taken_bytes(name, code)
        able = {node for node in self.live if self.limits[node] >= size} - {node for node, _ in row.values()}
        roomy = {node for node in able if before[node] + size <= self.limits[node]}
        placed = self.directory.place(name, random.Random(seed))
        if placed is None:
            assert len(row) + min(len(missing), len(able)) < code.data
            return
        gone = self.take_out(placed.evicted)
        assert key not in gone
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
    def a_node_says_that_it_stored(self, name: str, code: Code, position: int, node: int) -> None:
        shard = ShardId(name, code.data, code.parity, position % code.shards)
        is_placed = Held(node, shard) in self.held((name, code))
        assert self.directory.stored(node, shard) == is_placed
        if is_placed:
            self.rows[name, code][shard.position] = (node, True)

    @rule(name=OBJECTS)
    def all_nodes_store_what_they_are_sent(self, name: str) -> None:
        for held in self.held((name, self.code)):
            self.a_node_says_that_it_stored(name, self.code, held.shard.position, held.node)

    @rule(name=OBJECTS, code=st.sampled_from([*CODES, STRANGE]), position=st.integers(0, 4), node=NODES)
    def a_node_lacks(self, name: str, code: Code, position: int, node: int) -> None:
        shard = ShardId(name, code.data, code.parity, position % code.shards)
        is_placed = Held(node, shard) in self.held((name, code))
        assert self.directory.dropped(node, shard) == is_placed
        if is_placed:
            self.drop((name, code), shard.position)

    def drop(self, key: tuple[str, Code], position: int) -> None:
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
        self.directory.lost(node)
        self.lose(node, set())

    @rule(data=st.data(), node=NODES, is_trusted=st.booleans())
    def a_node_lists_what_it_has(self, data: st.DataObject, node: int, is_trusted: bool) -> None:
        if node not in self.limits:
            return
        known = [held.shard for key in self.rows for held in self.held(key) if held.node == node]
        listed = list(dict.fromkeys([*data.draw(st.lists(st.sampled_from(EVERY), max_size=6)), *known[::2]]))
        strays = self.directory.listed(node, listed, is_trusted=is_trusted)
        self.lose(node, set(listed))
        expected = []
        for shard in listed:
            key = (shard.object, shard.code)
            row = self.rows.get(key, {})
            holder, _ = row.get(shard.position, (node, True))
            others = {other for position, (other, _) in row.items() if position != shard.position}
            has_room = key in self.rows or len(self.rows) < self.most
            is_placed = holder == node and shard.position in row
            can_be = shard.code == self.code and holder == node and node not in others and has_room
            if not (can_be if is_trusted else is_placed):
                expected.append(shard)
            else:
                self.rows.setdefault(key, {})[shard.position] = (node, True)
        assert strays == expected

    @rule(name=OBJECTS)
    def forget(self, name: str) -> None:
        freed = self.directory.forget(name)
        assert {other for other, _ in self.take_out(freed)} <= {name}
        assert not [key for key in self.rows if key[0] == name]

    @rule(node=NODES, is_gone=st.booleans())
    def avoid(self, node: int, is_gone: bool) -> None:
        if node in self.limits:
            self.directory.avoid(node, is_gone=is_gone)
            self.live = self.live - {node} if is_gone else self.live | {node}

    @rule(node=NODES, limit_bytes=st.integers(0, 12_000))
    def limit(self, node: int, limit_bytes: int) -> None:
        if node in self.limits:
            self.directory.limit(node, limit_bytes)
            self.limits[node] = limit_bytes

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
