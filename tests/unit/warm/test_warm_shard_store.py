"""A node's store: its budget, who goes first, its digest, its pages."""

from __future__ import annotations

from itertools import chain

import pytest

from stoker.errors import ConfigError
from stoker_warm._shard import SHARD_OVERHEAD_BYTES, Shard, ShardId, ShardStore, StoreVersion
from support.memory import memory_of

PAYLOAD = b"x" * 100
MAC, OTHER_MAC = "07" * 28, "08" * 28
TAKEN_BYTES = len(PAYLOAD) + SHARD_OVERHEAD_BYTES


def shard_id(number: int) -> ShardId:
    return ShardId(f"{number:032x}", 10, 2, number % 12)


A, B, C, D, E = (shard_id(number) for number in range(5))


def shelf_with(*ids: ShardId, room: int) -> ShardStore:
    """Return a store with room for a number of shards, and put shards with some ids there in turn."""
    store = ShardStore(room * TAKEN_BYTES)
    for each in ids:
        assert store.set(each, MAC, PAYLOAD) == []
    return store


def test_a_shard_comes_back_as_it_was_put_there() -> None:
    store = ShardStore(10_000)
    payload = bytearray(b"payload")
    assert store.set(A, MAC, payload) == []
    found = store.get(A)
    assert found == Shard(A, MAC, payload)
    assert found.payload is payload


def test_what_is_not_there_is_none() -> None:
    store = shelf_with(A, room=2)
    assert store.get(B) is None
    assert B not in store
    assert not store.delete(B)


def test_what_was_deleted_is_gone_and_so_are_its_bytes() -> None:
    store = shelf_with(A, B, room=2)
    assert store.delete(A)
    assert store.get(A) is None
    assert (len(store), store.held_bytes) == (1, TAKEN_BYTES)


def test_the_budget_counts_payloads_and_what_each_shard_takes_besides() -> None:
    store = ShardStore(10_000)
    store.set(A, MAC, b"")
    store.set(B, MAC, b"12345")
    assert store.held_bytes == 2 * SHARD_OVERHEAD_BYTES + 5


@pytest.mark.parametrize("shards", [30, 1000, 22_000])
def test_a_shard_takes_no_more_besides_its_payload_than_is_counted_for_it(shards: int) -> None:
    # 22,000: the tables have just grown.
    def filled() -> ShardStore:
        store = ShardStore(1 << 40)
        for number in range(shards):
            each = ShardId.parse(f"{number:032x}.10+2.{number % 12}")
            store.set(each, f"{number:056x}", bytearray(8))
            store.get(each)
        return store

    assert SHARD_OVERHEAD_BYTES / 2 < memory_of(filled).held_bytes / shards <= SHARD_OVERHEAD_BYTES + 8


def test_a_shard_larger_than_the_limit_is_refused_and_evicts_nothing() -> None:
    store = shelf_with(A, B, room=2)
    digest = store.version
    assert store.set(C, MAC, bytes(2 * TAKEN_BYTES - SHARD_OVERHEAD_BYTES + 1)) is None
    assert (store.list_ids(), store.version, store.held_bytes) == ([A, B], digest, 2 * TAKEN_BYTES)


def test_a_shard_as_large_as_the_limit_evicts_all_others() -> None:
    store = shelf_with(A, B, room=2)
    assert store.set(C, MAC, bytes(2 * TAKEN_BYTES - SHARD_OVERHEAD_BYTES)) == [A, B]
    assert (store.list_ids(), store.held_bytes) == ([C], store.limit_bytes)


def test_a_replacement_that_is_too_large_leaves_what_is_there() -> None:
    store = shelf_with(A, room=1)
    assert store.set(A, OTHER_MAC, bytes(TAKEN_BYTES)) is None
    assert store.get(A) == Shard(A, MAC, PAYLOAD)


def test_a_shard_takes_the_place_of_the_one_with_its_id() -> None:
    store = shelf_with(A, B, room=2)
    assert store.set(A, OTHER_MAC, b"short") == []
    assert store.get(A) == Shard(A, OTHER_MAC, b"short")
    assert store.held_bytes == TAKEN_BYTES + SHARD_OVERHEAD_BYTES + 5


def test_a_growing_shard_is_not_reported_as_evicted() -> None:
    store = shelf_with(A, B, C, room=3)
    assert store.set(A, OTHER_MAC, PAYLOAD + b"y") == [B]
    assert store.list_ids() == [A, C]


def test_without_uses_the_oldest_goes_first() -> None:
    store = shelf_with(A, B, C, room=3)
    assert [store.set(each, MAC, PAYLOAD) for each in (D, E)] == [[A], [B]]


def test_one_that_was_used_goes_behind_those_that_were_not() -> None:
    store = shelf_with(A, B, C, room=3)
    store.get(A)
    assert store.set(D, MAC, PAYLOAD) == [B]
    assert store.set(E, MAC, PAYLOAD) == [C]
    assert store.set(B, MAC, PAYLOAD) == [A]


def test_if_all_were_used_the_one_goes_that_was_so_longest_ago() -> None:
    store = shelf_with(A, B, C, room=3)
    for each in (C, B, A):
        store.get(each)
    assert store.set(D, MAC, PAYLOAD) == [C]
    assert store.set(E, MAC, PAYLOAD) == [B]


def test_a_use_ends_with_the_shard() -> None:
    store = shelf_with(A, B, room=2)
    store.get(A)
    store.delete(A)
    store.set(A, MAC, PAYLOAD)
    assert store.set(C, MAC, PAYLOAD) == [B]
    assert store.set(D, MAC, PAYLOAD) == [A]


def test_looking_at_ids_is_no_use() -> None:
    store = shelf_with(A, B, room=2)
    assert A in store
    assert store.list_ids() == [A, B]
    assert store.set(C, MAC, PAYLOAD) == [A]


def test_a_shelf_without_room_refuses_everything() -> None:
    assert ShardStore(0).set(A, MAC, b"") is None


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 0 bytes, not -1"):
        ShardStore(-1)


def test_a_fresh_shelf_has_a_digest_that_no_other_has() -> None:
    fresh, emptied = ShardStore(10_000), shelf_with(A, room=1)
    emptied.delete(A)
    assert fresh.version == StoreVersion(0, 0)
    assert emptied.version == StoreVersion(2, 0)


def test_the_hash_has_64_bits_and_each_shard_its_own() -> None:
    hashes = {shelf_with(shard_id(number), room=1).version.hash for number in range(1000)}
    assert len(hashes) == 1000
    assert 1 << 63 < max(hashes) < 1 << 64
    assert min(hashes) >= 0


def test_another_checksum_is_another_hash() -> None:
    first, second = ShardStore(10_000), ShardStore(10_000)
    first.set(A, MAC, PAYLOAD)
    second.set(A, OTHER_MAC, PAYLOAD)
    assert first.version.hash != second.version.hash


def test_equal_contents_have_equal_hashes_whatever_way_they_came() -> None:
    straight = shelf_with(A, B, room=2)
    winding = shelf_with(C, B, room=2)
    assert winding.set(D, MAC, PAYLOAD) == [C]
    winding.set(B, OTHER_MAC, PAYLOAD)
    winding.set(B, MAC, PAYLOAD)
    assert winding.set(A, MAC, PAYLOAD) == [D]
    assert straight.list_ids() == winding.list_ids()
    assert straight.version.hash == winding.version.hash
    assert straight.version.change_count < winding.version.change_count


def test_a_peer_that_missed_changes_has_another_digest_even_with_as_many() -> None:
    current, peer = shelf_with(A, B, room=4), shelf_with(A, room=4)
    assert current.version.change_count > peer.version.change_count
    peer.set(C, MAC, PAYLOAD)
    assert current.version.change_count == peer.version.change_count
    assert current.version != peer.version


def test_uses_and_refusals_do_not_change_the_digest() -> None:
    store = shelf_with(A, room=1)
    digest = store.version
    store.get(A)
    store.get(B)
    store.delete(B)
    store.set(B, MAC, bytes(TAKEN_BYTES))
    assert store.version == digest


def test_pages_have_every_shard_once_in_order() -> None:
    ids = [shard_id(number) for number in range(25)]
    store = shelf_with(*reversed(ids), room=25)
    pages, after = [], None
    while page := store.list_ids(after, 10):
        pages.append(page)
        after = page[-1]
    assert [len(page) for page in pages] == [10, 10, 5]
    assert list(chain(*pages)) == store.list_ids() == ids


def test_pages_continue_behind_an_id_that_has_gone() -> None:
    store = shelf_with(A, B, D, room=4)
    store.delete(B)
    store.set(C, MAC, PAYLOAD)
    assert store.list_ids(B, 10) == [C, D]


def test_an_evicted_payload_stays_unchanged_while_it_is_sent() -> None:
    store = ShardStore(TAKEN_BYTES)
    store.set(A, MAC, bytearray(PAYLOAD))
    found = store.get(A)
    assert found is not None
    view = memoryview(found.payload)
    store.set(B, MAC, bytearray(100))
    store.set(C, MAC, bytearray(100))
    assert view == PAYLOAD
    assert store.held_bytes == TAKEN_BYTES
