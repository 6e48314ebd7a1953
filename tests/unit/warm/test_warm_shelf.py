"""A node's shelf: its budget, who goes first, its digest, its pages."""

from __future__ import annotations

from itertools import chain

import pytest

from stoker.errors import ConfigError
from stoker_warm._shard import OVERHEAD_BYTES, Digest, Shard, ShardId, Shelf
from support.memory import memory_of

PAYLOAD = b"x" * 100
TAKEN_BYTES = len(PAYLOAD) + OVERHEAD_BYTES


def shard_id(number: int) -> ShardId:
    return ShardId(f"{number:032x}", 10, 2, number % 12)


A, B, C, D, E = (shard_id(number) for number in range(5))


def shelf_with(*ids: ShardId, room: int) -> Shelf:
    """Return a shelf with room for so many shards, those of some ids put there in turn."""
    shelf = Shelf(room * TAKEN_BYTES)
    for each in ids:
        assert shelf.set(each, 7, PAYLOAD) == []
    return shelf


def test_a_shard_comes_back_as_it_was_put_there() -> None:
    shelf = Shelf(10_000)
    payload = bytearray(b"payload")
    assert shelf.set(A, 0xDEADBEEF, payload) == []
    found = shelf.get(A)
    assert found == Shard(A, 0xDEADBEEF, payload)
    assert found.payload is payload


def test_what_is_not_there_is_none() -> None:
    shelf = shelf_with(A, room=2)
    assert shelf.get(B) is None
    assert B not in shelf
    assert not shelf.delete(B)


def test_what_was_deleted_is_gone_and_so_are_its_bytes() -> None:
    shelf = shelf_with(A, B, room=2)
    assert shelf.delete(A)
    assert shelf.get(A) is None
    assert (len(shelf), shelf.held_bytes) == (1, TAKEN_BYTES)


def test_the_budget_counts_payloads_and_what_each_shard_takes_besides() -> None:
    shelf = Shelf(10_000)
    shelf.set(A, 7, b"")
    shelf.set(B, 7, b"12345")
    assert shelf.held_bytes == 2 * OVERHEAD_BYTES + 5


@pytest.mark.parametrize("shards", [30, 1000, 22_000])
def test_a_shard_takes_no_more_besides_its_payload_than_is_counted_for_it(shards: int) -> None:
    # 22,000: the tables have just grown.
    def filled() -> Shelf:
        shelf = Shelf(1 << 40)
        for number in range(shards):
            each = ShardId.parse(f"{number:032x}.10+2.{number % 12}")
            shelf.set(each, (1 << 32) - 1 - number, bytearray(8))
            shelf.get(each)
        return shelf

    assert OVERHEAD_BYTES / 2 < memory_of(filled).kept_bytes / shards <= OVERHEAD_BYTES + 8


def test_a_shard_larger_than_the_limit_is_refused_and_nobody_goes() -> None:
    shelf = shelf_with(A, B, room=2)
    digest = shelf.digest
    assert shelf.set(C, 7, bytes(2 * TAKEN_BYTES - OVERHEAD_BYTES + 1)) is None
    assert (shelf.ids(), shelf.digest, shelf.held_bytes) == ([A, B], digest, 2 * TAKEN_BYTES)


def test_a_shard_as_large_as_the_limit_makes_everybody_go() -> None:
    shelf = shelf_with(A, B, room=2)
    assert shelf.set(C, 7, bytes(2 * TAKEN_BYTES - OVERHEAD_BYTES)) == [A, B]
    assert (shelf.ids(), shelf.held_bytes) == ([C], shelf.limit_bytes)


def test_a_replacement_that_is_too_large_leaves_what_is_there() -> None:
    shelf = shelf_with(A, room=1)
    assert shelf.set(A, 8, bytes(TAKEN_BYTES)) is None
    assert shelf.get(A) == Shard(A, 7, PAYLOAD)


def test_a_shard_takes_the_place_of_the_one_with_its_id() -> None:
    shelf = shelf_with(A, B, room=2)
    assert shelf.set(A, 8, b"short") == []
    assert shelf.get(A) == Shard(A, 8, b"short")
    assert shelf.held_bytes == TAKEN_BYTES + OVERHEAD_BYTES + 5


def test_a_shard_that_grows_is_not_told_to_have_gone() -> None:
    shelf = shelf_with(A, B, C, room=3)
    assert shelf.set(A, 8, PAYLOAD + b"y") == [B]
    assert shelf.ids() == [A, C]


def test_without_uses_the_oldest_goes_first() -> None:
    shelf = shelf_with(A, B, C, room=3)
    assert [shelf.set(each, 7, PAYLOAD) for each in (D, E)] == [[A], [B]]


def test_one_that_was_used_is_left_once() -> None:
    shelf = shelf_with(A, B, C, room=3)
    shelf.get(A)
    assert shelf.set(D, 7, PAYLOAD) == [B]
    assert shelf.set(E, 7, PAYLOAD) == [C]
    assert shelf.set(B, 7, PAYLOAD) == [A]


def test_if_all_were_used_the_first_goes() -> None:
    shelf = shelf_with(A, B, C, room=3)
    for each in (C, B, A):
        shelf.get(each)
    assert shelf.set(D, 7, PAYLOAD) == [A]
    assert shelf.set(E, 7, PAYLOAD) == [B]


def test_a_use_ends_with_the_shard() -> None:
    shelf = shelf_with(A, B, room=2)
    shelf.get(A)
    shelf.delete(A)
    shelf.set(A, 7, PAYLOAD)
    assert shelf.set(C, 7, PAYLOAD) == [B]
    assert shelf.set(D, 7, PAYLOAD) == [A]


def test_looking_at_ids_is_no_use() -> None:
    shelf = shelf_with(A, B, room=2)
    assert A in shelf
    assert shelf.ids() == [A, B]
    assert shelf.set(C, 7, PAYLOAD) == [A]


def test_a_shelf_without_room_refuses_everything() -> None:
    assert Shelf(0).set(A, 7, b"") is None


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 0 bytes, not -1"):
        Shelf(-1)


def test_a_fresh_shelf_has_a_digest_that_no_other_has() -> None:
    fresh, emptied = Shelf(10_000), shelf_with(A, room=1)
    emptied.delete(A)
    assert fresh.digest == Digest(0, 0)
    assert emptied.digest == Digest(2, 0)


def test_the_hash_has_64_bits_and_each_shard_its_own() -> None:
    hashes = {shelf_with(shard_id(number), room=1).digest.hash for number in range(1000)}
    assert len(hashes) == 1000
    assert 1 << 63 < max(hashes) < 1 << 64
    assert min(hashes) >= 0


def test_another_checksum_is_another_hash() -> None:
    first, second = Shelf(10_000), Shelf(10_000)
    first.set(A, 7, PAYLOAD)
    second.set(A, 8, PAYLOAD)
    assert first.digest.hash != second.digest.hash


def test_equal_contents_have_equal_hashes_whatever_way_they_came() -> None:
    straight = shelf_with(A, B, room=2)
    winding = shelf_with(C, B, room=2)
    assert winding.set(D, 7, PAYLOAD) == [C]
    winding.set(B, 8, PAYLOAD)
    winding.set(B, 7, PAYLOAD)
    assert winding.set(A, 7, PAYLOAD) == [D]
    assert straight.ids() == winding.ids()
    assert straight.digest.hash == winding.digest.hash
    assert straight.digest.term < winding.digest.term


def test_a_peer_that_missed_changes_has_another_digest_even_with_as_many() -> None:
    current, peer = shelf_with(A, B, room=4), shelf_with(A, room=4)
    assert current.digest.term > peer.digest.term
    peer.set(C, 7, PAYLOAD)
    assert current.digest.term == peer.digest.term
    assert current.digest != peer.digest


def test_uses_and_refusals_do_not_change_the_digest() -> None:
    shelf = shelf_with(A, room=1)
    digest = shelf.digest
    shelf.get(A)
    shelf.get(B)
    shelf.delete(B)
    shelf.set(B, 7, bytes(TAKEN_BYTES))
    assert shelf.digest == digest


def test_pages_have_every_shard_once_in_order() -> None:
    ids = [shard_id(number) for number in range(25)]
    shelf = shelf_with(*reversed(ids), room=25)
    pages, after = [], None
    while page := shelf.ids(after, 10):
        pages.append(page)
        after = page[-1]
    assert [len(page) for page in pages] == [10, 10, 5]
    assert list(chain(*pages)) == shelf.ids() == ids


def test_pages_go_on_behind_an_id_that_has_gone() -> None:
    shelf = shelf_with(A, B, D, room=4)
    shelf.delete(B)
    shelf.set(C, 7, PAYLOAD)
    assert shelf.ids(B, 10) == [C, D]


def test_an_evicted_payload_stays_as_it_is_for_who_sends_it() -> None:
    shelf = Shelf(TAKEN_BYTES)
    shelf.set(A, 7, bytearray(PAYLOAD))
    found = shelf.get(A)
    assert found is not None
    view = memoryview(found.payload)
    shelf.set(B, 7, bytearray(100))
    shelf.set(C, 7, bytearray(100))
    assert view == PAYLOAD
    assert shelf.held_bytes == TAKEN_BYTES
