"""Names of shards, and which shards are what their names say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from stoker._base.checksum import crc32c
from stoker._cache.keeper import name_of
from stoker.abc import ObjectRef
from stoker.errors import ConfigError, WireError
from stoker_warm._shard import Shard, ShardId

NAME = name_of(ObjectRef(key="data/0123/7", size_bytes=1001, crc32c=0xDEADBEEF))
FIRST = ShardId(NAME, 10, 2, 0)


def shard(position: int, object_name: str = NAME) -> Shard:
    shard_id = ShardId(object_name, 10, 2, position)
    payload = bytes([position]) * shard_id.size_bytes
    return Shard(shard_id, shard_id.checksum(payload), payload)


def test_a_name_reads_as_object_code_and_position() -> None:
    assert ShardId(NAME, 10, 2, 7).to_text() == f"{NAME}.10+2.7"


@pytest.mark.parametrize(("data", "parity"), [(1, 0), (1, 1), (10, 2), (128, 128), (255, 1)])
def test_every_name_is_read_as_it_was_written(data: int, parity: int) -> None:
    for position in range(data + parity):
        shard_id = ShardId(NAME, data, parity, position)
        assert ShardId.parse(shard_id.to_text()) == shard_id


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"{NAME}.10+2",
        f"{NAME}.10+2.",
        f"{NAME}.10+2.12",
        f"{NAME}.10+2.-1",
        f"{NAME}.10+2.07",
        f"{NAME}.010+2.7",
        f"{NAME}.10+02.7",
        f"{NAME}.10+2.7\n",
        f" {NAME}.10+2.7",
        f"{NAME}.10+2.\u0667",
        f"{NAME}.0+2.1",
        f"{NAME}.200+57.1",
        f"{NAME}.10+2.7.1",
        f"{NAME}.10+2.{'7' * 5000}",
        f"{NAME.upper()}.10+2.7",
        f"{NAME[:-1]}.10+2.7",
        f"../../{NAME[6:]}.10+2.7",
        None,
        7,
        b"x",
        [NAME],
        {"shard": NAME},
    ],
)
def test_what_is_not_exactly_a_name_is_a_peers_fault(text: object) -> None:
    with pytest.raises(WireError, match="is not the name of a shard") as caught:
        ShardId.parse(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "data", "parity", "position", "message"),
    [
        ("data/7", 10, 2, 0, "'data/7' is not the name of an object"),
        (NAME, 10, 2, 12, r"10\+2 has shards 0 to 11, not 12"),
        (NAME, 10, 2, -1, "not -1"),
        (NAME, 0, 2, 0, "at least 1 data shard"),
    ],
)
def test_a_shard_that_cannot_be_is_refused(name: str, data: int, parity: int, position: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardId(name, data, parity, position)


def test_how_long_a_shard_is_follows_from_its_name() -> None:
    sizes = [ShardId(NAME, 10, 2, position).size_bytes for position in range(12)]
    assert sizes == [101] * 9 + [1001 - 909] + [101] * 2


def test_names_are_ordered_by_position() -> None:
    ids = [ShardId(NAME, 10, 2, position) for position in range(12)]
    assert all(first < second for first, second in pairwise(ids))


def test_a_shard_as_it_was_made_is_whole() -> None:
    assert all(shard(position).is_whole for position in range(12))


def test_a_shard_without_a_byte_is_whole() -> None:
    one_byte = name_of(ObjectRef(key="x", size_bytes=1, crc32c=1))
    assert shard(9, one_byte).payload == b""
    assert shard(9, one_byte).is_whole


@pytest.mark.parametrize("at", [0, 50, 100])
def test_a_shard_with_one_other_bit_is_not_whole(at: int) -> None:
    payload = bytearray(shard(3).payload)
    payload[at] ^= 1
    assert not replace(shard(3), payload=payload).is_whole


@pytest.mark.parametrize("change", [slice(0, 100), slice(1, 101), slice(0, 0)])
def test_a_shard_that_was_cut_is_not_whole(change: slice) -> None:
    assert not replace(shard(3), payload=shard(3).payload[change]).is_whole


def test_a_cut_shard_whose_checksum_fits_what_is_left_is_not_whole() -> None:
    assert not Shard(FIRST, FIRST.checksum(b"short"), b"short").is_whole


def test_a_shard_does_not_pass_for_that_of_another_position_code_or_object() -> None:
    found = shard(3)
    for other in (
        ShardId(NAME, 10, 2, 4),
        ShardId(NAME, 10, 1, 3),
        ShardId(name_of(ObjectRef(key="data/0123/8", size_bytes=1001, crc32c=0xDEADBEEF)), 10, 2, 3),
    ):
        assert len(found.payload) == other.size_bytes
        assert not replace(found, id=other).is_whole


def test_the_checksum_is_that_of_the_name_with_the_payload_behind_it() -> None:
    assert FIRST.checksum(b"payload") == crc32c(f"{NAME}.10+2.0payload".encode())


def test_shards_that_are_not_whole_are_erasures() -> None:
    shards = [shard(position) for position in range(12)]
    shards[2] = replace(shards[2], crc32c=shards[2].crc32c ^ 1)
    shards[7] = replace(shards[7], payload=shards[8].payload)
    found = [each for each in shards if each.is_whole]
    assert [each.id.position for each in found] == [0, 1, 3, 4, 5, 6, 8, 9, 10, 11]
    assert all(each.payload == shard(each.id.position).payload for each in found)
