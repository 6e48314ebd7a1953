"""Names of shards, and which shards are what their names say: whole, and made by who has the key."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from stoker._cache.index import name_of
from stoker.abc import ObjectRef
from stoker.errors import ConfigError, MissingExtraError, WireError
from stoker_warm._shard import Shard, ShardId, ShardMac, is_mac
from support.cases import for_each

NAME = name_of(ObjectRef(key="data/0123/7", size_bytes=1001, crc32c=0xDEADBEEF))
FIRST = ShardId(NAME, 10, 2, 0)
MAC = ShardMac(bytes(range(32)))


def shard(position: int, object_name: str = NAME) -> Shard:
    shard_id = ShardId(object_name, 10, 2, position)
    payload = bytes([position]) * shard_id.size_bytes
    return Shard(shard_id, MAC.sign(shard_id, payload), payload)


def is_right(found: Shard, mac: ShardMac = MAC) -> bool:
    return mac.verify(found.id, found.payload, found.mac)


def test_a_name_reads_as_object_code_and_position() -> None:
    assert ShardId(NAME, 10, 2, 7).to_text() == f"{NAME}.10+2.7"


@pytest.mark.parametrize(("data", "parity"), [(1, 0), (1, 1), (10, 2), (128, 128), (255, 1)])
def test_every_name_is_read_as_it_was_written(data: int, parity: int) -> None:
    for position in range(data + parity):
        shard_id = ShardId(NAME, data, parity, position)
        assert ShardId.parse(shard_id.to_text()) == shard_id


@for_each(
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


@pytest.mark.parametrize("texts", [None, 7, {}, "x", [1], ["x"], [FIRST.to_text(), None]])
def test_what_is_not_a_list_of_names_is_a_peers_fault(texts: object) -> None:
    with pytest.raises(WireError):
        ShardId.parse_all(texts)


def test_a_list_of_names_is_read_in_its_order() -> None:
    ids = [ShardId(NAME, 10, 2, position) for position in (3, 1, 2)]
    assert ShardId.parse_all([each.to_text() for each in ids]) == ids
    assert ShardId.parse_all([]) == []


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


def test_a_shard_as_it_was_made_is_right() -> None:
    assert all(is_right(shard(position)) for position in range(12))


def test_a_shard_without_a_byte_is_right() -> None:
    one_byte = name_of(ObjectRef(key="x", size_bytes=1, crc32c=1))
    assert shard(9, one_byte).payload == b""
    assert is_right(shard(9, one_byte))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_the_kind_of_memory_makes_no_difference(kind: type[bytes]) -> None:
    assert is_right(replace(shard(3), payload=kind(shard(3).payload)))


@pytest.mark.parametrize("at", [0, 50, 100])
def test_a_shard_with_one_other_bit_is_wrong(at: int) -> None:
    payload = bytearray(shard(3).payload)
    payload[at] ^= 1
    assert not is_right(replace(shard(3), payload=payload))


@pytest.mark.parametrize("change", [slice(0, 100), slice(1, 101), slice(0, 0)])
def test_a_shard_that_was_cut_is_wrong(change: slice) -> None:
    assert not is_right(replace(shard(3), payload=shard(3).payload[change]))


@for_each("at", range(56))
def test_a_mac_with_one_other_digit_is_wrong(at: int) -> None:
    mac = shard(3).mac
    other = "0" if mac[at] != "0" else "1"
    assert not is_right(replace(shard(3), mac=mac[:at] + other + mac[at + 1 :]))


def test_a_shard_does_not_pass_for_that_of_another_position_code_or_object() -> None:
    found = shard(3)
    for other in (
        ShardId(NAME, 10, 2, 4),
        ShardId(NAME, 10, 1, 3),
        ShardId(name_of(ObjectRef(key="data/0123/8", size_bytes=1001, crc32c=0xDEADBEEF)), 10, 2, 3),
    ):
        assert len(found.payload) == other.size_bytes
        assert not is_right(replace(found, id=other))


def test_bytes_do_not_move_between_the_position_and_the_payload() -> None:
    eleventh, first = ShardId(NAME, 10, 2, 11), ShardId(NAME, 10, 2, 1)
    assert not MAC.verify(first, b"1payload", MAC.sign(eleventh, b"payload"))
    assert not MAC.verify(eleventh, b"payload", MAC.sign(first, b"1payload"))


def test_without_the_key_no_mac_is_made_that_passes() -> None:
    other = ShardMac(bytes(32))
    assert not is_right(shard(3), other)
    assert not is_right(replace(shard(3), mac=other.sign(FIRST, shard(3).payload)))


def test_two_macs_of_one_shard_have_nothing_in_common() -> None:
    macs = [MAC.sign(FIRST, b"payload") for _ in range(1000)]
    assert len({mac[:24] for mac in macs}) == len({mac[24:] for mac in macs}) == 1000
    assert all(MAC.verify(FIRST, b"payload", mac) for mac in macs)


def test_a_mac_is_that_of_the_standard() -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce, key, said = bytes(range(12)), bytes(range(32)), f"{NAME}.10+2.0\npayload".encode()
    assert MAC.verify(FIRST, b"payload", (nonce + AESGCM(key).encrypt(nonce, b"", said)).hex())


@pytest.mark.parametrize("mac", [None, 7, "", "0" * 55, "0" * 57, "0" * 55 + "G", "A" * 56, "\u0660" * 56, ["0" * 56]])
def test_what_has_not_the_form_of_a_mac_is_wrong(mac: object) -> None:
    assert not is_mac(mac)
    assert not MAC.verify(FIRST, b"payload", mac)


def test_shards_that_are_wrong_are_erasures() -> None:
    shards = [shard(position) for position in range(12)]
    shards[2] = replace(shards[2], mac=shards[3].mac)
    shards[7] = replace(shards[7], payload=shards[8].payload)
    found = [each for each in shards if is_right(each)]
    assert [each.id.position for each in found] == [0, 1, 3, 4, 5, 6, 8, 9, 10, 11]
    assert all(each.payload == shard(each.id.position).payload for each in found)


@pytest.mark.parametrize("size_bytes", [0, 16, 31, 33])
def test_a_key_of_another_length_is_refused(size_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"must have 32 bytes, not {size_bytes}"):
        ShardMac(bytes(size_bytes))


def test_the_key_is_not_shown() -> None:
    assert repr(MAC) == "ShardMac(…)"


def test_what_is_missing_for_macs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(MissingExtraError, match=r"the proxy of a warm tier needs .*; pip install 'stoker\[warm\]'"):
        ShardMac(bytes(32))
