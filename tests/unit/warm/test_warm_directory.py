from __future__ import annotations

import random
from collections import Counter

import pytest

from stoker.errors import ConfigError
from stoker_warm._directory import MAX_NODES, ShardDirectory
from stoker_warm._erasure import ErasureCode
from stoker_warm._shard import SHARD_OVERHEAD_BYTES, ShardId
from support.memory import ROUNDS, Memory

CODE = ErasureCode(2, 1)
SIZE = 2000
TAKEN = SIZE // 2 + SHARD_OVERHEAD_BYTES


def named(number: int, size_bytes: int = SIZE) -> str:
    return f"{number:08x}{size_bytes:08x}{number:016x}"


def shard_of(name: str, position: int, code: ErasureCode = CODE) -> ShardId:
    return ShardId(name, code.data, code.parity, position)


def create_directory(nodes: int = 6, *, objects_a_node: int = 100, max_objects: int = 1000) -> ShardDirectory:
    return ShardDirectory(nodes, CODE, limit_bytes=objects_a_node * TAKEN, max_objects=max_objects)


def put(directory: ShardDirectory, name: str, seed: int = 1) -> dict[int, int]:
    """Place an object, store all of it, and return where its shards are."""
    placed = directory.place(name, random.Random(seed))
    assert placed is not None
    for position, node in placed.nodes.items():
        assert directory.commit_shard(node, shard_of(name, position))
    return placed.nodes


def doomed(directory: ShardDirectory) -> list[tuple[int, ShardId]]:
    """Return node and shard of all that is to be deleted, and have it deleted."""
    found = [(node, shard) for node in range(20) for shard in directory.list_tombstones(node, 1000)]
    for node, shard in found:
        directory.clear_tombstones(node, [shard])
    return found


def forgotten(directory: ShardDirectory, *numbers: int) -> list[int]:
    """Forget objects; return how many shards of each are to be deleted for it."""
    counts = []
    for number in numbers:
        directory.remove_object(named(number))
        counts.append(len(doomed(directory)))
    return counts


def is_there(directory: ShardDirectory, name: str) -> bool:
    return directory.find(name) is not None


def test_an_object_is_found_when_enough_shards_of_it_are_stored() -> None:
    directory, name = create_directory(), named(1)
    placed = directory.place(name, random.Random(1))
    assert placed is not None
    nodes = placed.nodes
    assert len(set(nodes.values())) == 3
    assert directory.find(name) is None
    assert directory.commit_shard(nodes[2], shard_of(name, 2))
    assert directory.find(name) is None
    assert directory.commit_shard(nodes[0], shard_of(name, 0))
    found = directory.find(name)
    assert found == [nodes[0], -1, nodes[2]]
    assert directory.commit_shard(nodes[1], shard_of(name, 1))
    assert directory.find(name) == [nodes[0], nodes[1], nodes[2]]


def test_what_is_on_its_way_is_placed_no_second_time() -> None:
    directory, name = create_directory(), named(1)
    directory.place(name, random.Random(1))
    again = directory.place(name, random.Random(2))
    assert again == ({}, 0)


def test_a_shard_that_could_not_be_sent_is_placed_elsewhere() -> None:
    directory, name = create_directory(nodes=4), named(1)
    placed = directory.place(name, random.Random(1))
    assert placed is not None
    directory.set_limit(placed.nodes[1], 0, is_gone=True)
    directory.cancel_reservation(placed.nodes[1], shard_of(name, 1))
    again = directory.place(name, random.Random(2))
    assert again is not None
    assert list(again.nodes) == [1]
    assert again.nodes[1] not in placed.nodes.values()
    assert not directory.commit_shard(placed.nodes[1], shard_of(name, 1))
    assert doomed(directory) == [(placed.nodes[1], shard_of(name, 1))]


def test_nodes_are_chosen_evenly_also_when_some_are_gone_or_full() -> None:
    directory, rng = create_directory(nodes=8, objects_a_node=10_000, max_objects=10_000), random.Random(7)
    directory.set_limit(0, 0, is_gone=True)
    directory.set_limit(1, 0)
    for number in range(4000):
        placed = directory.place(named(number), rng)
        assert placed is not None
        assert not placed.evicted
    counts = Counter({node: directory.used_bytes(node) // TAKEN for node in range(8)})
    assert counts[0] == counts[1] == 0
    assert all(1900 < counts[node] < 2100 for node in range(2, 8))


def test_with_too_few_nodes_for_all_shards_the_last_ones_wait_for_nodes_to_come_back() -> None:
    directory, name = create_directory(nodes=3), named(1)
    directory.set_limit(1, 0, is_gone=True)
    assert sorted(put(directory, name)) == [0, 1]
    assert is_there(directory, name)
    directory.set_limit(1, 10 * TAKEN)
    assert put(directory, name) == {2: 1}
    directory.set_limit(0, 0, is_gone=True)
    directory.set_limit(2, 0, is_gone=True)
    assert directory.place(named(2), random.Random(1)) is None


def test_an_object_larger_than_the_nodes_is_not_placed_and_evicts_nothing() -> None:
    directory = create_directory(objects_a_node=2)
    put(directory, named(1))
    assert directory.place(named(2, 4 * SIZE), random.Random(1)) is None
    assert directory.place("1" + named(3), random.Random(1)) is None  # 4 GiB and more
    assert is_there(directory, named(1))


def test_what_was_used_since_the_hand_passed_stays_once() -> None:
    directory = create_directory(nodes=3, objects_a_node=3)
    for number in range(3):
        put(directory, named(number))
    assert is_there(directory, named(0))
    placed = directory.place(named(3), random.Random(1))
    assert placed is not None
    assert placed.evicted == 1
    assert [shard.object for _, shard in doomed(directory)] == [named(1)] * 3
    put(directory, named(4))
    put(directory, named(5))
    doomed(directory)
    assert forgotten(directory, *range(6)) == [0, 0, 0, 3, 3, 3]


def test_objects_are_let_go_whole_and_no_more_than_are_needed() -> None:
    directory, rng = create_directory(nodes=5, objects_a_node=20, max_objects=10_000), random.Random(3)
    kept: set[str] = set()
    for number in range(500):
        placed = directory.place(named(number), rng)
        assert placed is not None
        deleted = doomed(directory)
        gone = {shard.object for _, shard in deleted}
        assert len(deleted) == 3 * len(gone) == 3 * placed.evicted
        kept = (kept | {named(number)}) - gone
        assert len(directory) == len(kept)
        if gone:  # three nodes with room, of five: all but a few shards' room is used
            assert sum(directory.used_bytes(node) for node in range(5)) >= (5 * 20 - 9) * TAKEN


def test_rows_are_bounded_and_used_again() -> None:
    directory = create_directory(max_objects=10)
    evicted = 0
    for number in range(100):
        placed = directory.place(named(number, 0), random.Random(number))
        assert placed is not None
        evicted += placed.evicted
    assert len(directory) == 10
    assert evicted == 90


def test_a_node_that_lost_its_memory_degrades_objects_or_takes_them() -> None:
    directory = create_directory(nodes=3)
    for number in range(2):
        put(directory, named(number))
    directory.clear_node(0)
    assert [is_there(directory, named(number)) for number in range(2)] == [True, True]
    directory.clear_node(1)
    assert [is_there(directory, named(number)) for number in range(2)] == [False, False]
    directory.clear_node(2)
    assert len(directory) == 0


def test_a_degraded_object_gets_back_what_it_lost_and_nothing_else() -> None:
    directory, name = create_directory(nodes=3), named(1)
    nodes = put(directory, name)
    directory.clear_node(nodes[2])
    assert put(directory, name) == {2: nodes[2]}


def test_what_a_node_lost_goes_back_to_it_until_it_has_as_much_as_others() -> None:
    directory = create_directory(nodes=20)
    for number in range(60):
        put(directory, named(number), seed=number)
    directory.clear_node(7)
    found = {named(number): directory.find(named(number)) for number in range(60)}
    lost = [name for name, where in found.items() if where is not None and -1 in where]
    least = min(directory.used_bytes(node) for node in range(20) if node != 7) // TAKEN
    back = [node for name in lost for node in put(directory, name).values()]
    assert len(lost) >= least > 3
    assert back[:least] == [7] * least


def test_what_is_on_its_way_to_a_node_that_lost_everything_may_still_arrive() -> None:
    directory, name = create_directory(nodes=3), named(1)
    placed = directory.place(name, random.Random(1))
    assert placed is not None
    for node in range(3):
        directory.clear_node(node)
    for position, node in placed.nodes.items():
        assert directory.commit_shard(node, shard_of(name, position))
    assert is_there(directory, name)


def test_a_directory_that_knows_nothing_learns_from_lists() -> None:
    before, after = create_directory(), create_directory()
    names = [named(number) for number in range(50)]
    for name in names:
        put(before, name, seed=int(name[:8], 16))
    for node in range(6):
        mine = [shard_of(name, at) for name in names for at in range(3) if before.find(name)[at] == node]  # type: ignore[index]
        after.reconcile(node, mine)
    assert doomed(after) == []
    assert [after.find(name) for name in names] == [before.find(name) for name in names]
    assert [after.used_bytes(node) for node in range(6)] == [before.used_bytes(node) for node in range(6)]


def test_of_a_shard_that_two_nodes_list_the_second_is_a_stray() -> None:
    directory, name = create_directory(), named(1)
    directory.reconcile(0, [shard_of(name, 0)])
    assert doomed(directory) == []
    directory.reconcile(1, [shard_of(name, 0)])
    assert doomed(directory) == [(1, shard_of(name, 0))]
    directory.reconcile(0, [shard_of(name, 0), shard_of(name, 1)])
    assert doomed(directory) == [(0, shard_of(name, 1))]


def test_shards_of_an_unused_code_are_strays() -> None:
    directory = create_directory()
    strange = shard_of(named(1), 0, ErasureCode(5, 5))
    directory.reconcile(0, [strange])
    assert doomed(directory) == [(0, strange)]
    assert not directory.commit_shard(0, strange)
    assert doomed(directory) == [(0, strange)]
    directory.remove_shard(0, strange)
    directory.mark_missing(0, strange)
    assert (len(directory), doomed(directory)) == (0, [])


def test_an_object_that_is_forgotten_leaves_its_shards_to_be_deleted() -> None:
    directory, name = create_directory(), named(1)
    nodes = put(directory, name)
    directory.remove_object(name)
    assert doomed(directory) == sorted((node, shard_of(name, at)) for at, node in nodes.items())
    directory.remove_object(name)
    assert doomed(directory) == []
    assert not directory.commit_shard(nodes[0], shard_of(name, 0))


def test_what_is_to_be_deleted_is_given_out_page_by_page_and_not_believed_if_it_is_listed() -> None:
    directory, names = create_directory(nodes=3), [named(number) for number in range(5)]
    for name in names:
        put(directory, name)
        directory.remove_object(name)
    first = directory.list_tombstones(0, 2)
    assert len(first) == 2
    directory.clear_tombstones(0, first)
    rest = directory.list_tombstones(0, 10)
    assert len(rest) == 3
    assert not set(first) & set(rest)
    directory.reconcile(0, rest[:2])
    assert set(directory.list_tombstones(0, 10)) == set(rest[:2]), "the node has not what it does not list"
    assert len(directory) == 0
    directory.clear_node(0)
    assert set(directory.list_tombstones(0, 10)) == set(rest[:2]), "an instance may come again that was only away"


def test_of_what_a_distrusted_node_lists_only_what_was_placed_there_is_believed() -> None:
    directory, name = create_directory(nodes=3), named(1)
    placed = directory.place(name, random.Random(1))
    assert placed is not None
    mine, other = shard_of(name, 0), shard_of(named(2), 0)
    directory.reconcile(placed.nodes[0], [mine, other], is_trusted=False)
    assert doomed(directory) == [(placed.nodes[0], other)]
    assert len(directory) == 1
    for at in (1, 2):
        directory.cancel_reservation(placed.nodes[at], shard_of(name, at))
    directory.reconcile(placed.nodes[0], [], is_trusted=False)
    assert len(directory) == 0


def test_a_node_that_lists_more_than_its_limit_is_believed_and_gets_no_more() -> None:
    directory = create_directory(nodes=4, objects_a_node=1)
    names = [named(number) for number in range(5)]
    directory.reconcile(0, [shard_of(name, 0) for name in names])
    assert doomed(directory) == []
    assert directory.used_bytes(0) == 5 * TAKEN
    assert 0 not in put(directory, named(9)).values()


def test_an_entry_takes_at_most_the_documented_memory() -> None:
    rng = random.Random(1)
    names = [f"{rng.getrandbits(32):08x}{8 << 20:08x}{rng.getrandbits(64):016x}" for _ in range(3000)]
    memory = Memory()
    for _ in range(ROUNDS):
        directory = ShardDirectory(400, ErasureCode(10, 2), limit_bytes=1 << 40)
        with memory.round():
            for name in names:
                directory.place(name, rng)
    assert memory.held_bytes / len(names) < 250


@pytest.mark.parametrize(
    ("nodes", "code", "limit_bytes", "max_objects"),
    [(0, CODE, 1, 1), (MAX_NODES + 1, CODE, 1, 1), (2, ErasureCode(3, 1), 1, 1), (5, CODE, -1, 1), (5, CODE, 1, 0)],
)
def test_figures_that_make_no_sense_are_refused(
    nodes: int, code: ErasureCode, limit_bytes: int, max_objects: int
) -> None:
    with pytest.raises(ConfigError):
        ShardDirectory(nodes, code, limit_bytes=limit_bytes, max_objects=max_objects)


def test_the_last_of_the_most_nodes_can_be_used() -> None:
    directory = ShardDirectory(MAX_NODES, CODE, limit_bytes=1 << 20)
    name = named(1)
    directory.reconcile(MAX_NODES - 1, [shard_of(name, 0)])
    directory.reconcile(MAX_NODES - 2, [shard_of(name, 1)])
    found = directory.find(name)
    assert found is not None
    assert found == [MAX_NODES - 1, MAX_NODES - 2, -1]
    directory.clear_node(MAX_NODES - 1)
    assert directory.find(name) is None


def test_a_newcomer_does_not_count_as_used_because_the_object_before_it_in_its_row_was() -> None:
    directory = create_directory(nodes=3, objects_a_node=2)
    put(directory, named(0))
    assert is_there(directory, named(0))
    assert forgotten(directory, 0) == [3]
    put(directory, named(1))
    put(directory, named(2))
    assert is_there(directory, named(2))
    put(directory, named(3))
    doomed(directory)
    assert forgotten(directory, *range(4)) == [0, 0, 3, 3]
