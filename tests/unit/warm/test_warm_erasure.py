"""Codes: how objects are cut, what parity is, and what arguments and losses are refused."""

from __future__ import annotations

import sys
from itertools import combinations

import numpy as np
import pytest

from stoker._base.checksum import crc32c
from stoker.errors import ConfigError, LostShardsError, MissingExtraError
from stoker_warm._erasure import ErasureCode, encode, require_codec, restore
from support.cases import for_each
from support.memory import memory_of

CODES = [
    ErasureCode.parse(text)
    for text in ("1+0", "1+1", "1+2", "1+3", "3+0", "2+1", "4+2", "10+1", "10+2", "2+4", "250+6", "254+2")
]
SIZES = [0, 1, 2, 9, 10, 11, 12, 249, 251, 4097]


def content(size_bytes: int) -> memoryview:
    return memoryview(np.random.default_rng(size_bytes).bytes(size_bytes))


def parity_of(data: memoryview, code: ErasureCode) -> dict[int, memoryview]:
    """Return position → parity shard, written over memory that was not zero."""
    out = [memoryview(bytearray(b"\xaa" * code.shard_bytes(len(data)))) for _ in range(code.parity)]
    encode(data, code, out)
    return dict(enumerate(out, code.data))


def arrived(data: memoryview, code: ErasureCode, missing: set[int]) -> memoryview:
    """Return a slot with the data shards that are not missing, something else in their place, and more behind it."""
    into = memoryview(bytearray(b"\x55" * (len(data) + 7)))
    for position, (start, end) in enumerate(code.data_ranges(len(data))):
        if position not in missing:
            into[start:end] = data[start:end]
    return into


@for_each("code", CODES, ids=str)
def test_a_code_is_written_as_it_is_read(code: ErasureCode) -> None:
    assert ErasureCode.parse(str(code)) == code


@for_each(
    "text", ["", "10", "10+", "+2", "010+2", "10+02", "10+-1", "-1+2", "10+2\n", " 10+2", "1e1+2", "\u0661+2", "10+2+1"]
)
def test_a_text_that_is_no_code_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a code; write .* 10\+2"):
        ErasureCode.parse(text)


@pytest.mark.parametrize("text", ["0+1", "9" * 10_000 + "+1"])
def test_a_code_without_data_and_one_without_end_are_refused_in_few_words(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a code") as caught:
        ErasureCode.parse(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("data", "parity"), [(0, 1), (-1, 3), (1, -1), (200, 57), (257, 0), (999, 999)])
def test_a_code_that_cannot_be_is_refused(data: int, parity: int) -> None:
    with pytest.raises(ConfigError, match="at most 256 in all"):
        ErasureCode(data, parity)


@for_each("size_bytes", SIZES)
@for_each("code", CODES, ids=str)
def test_data_shards_are_the_object_without_holes_and_none_is_longer_than_the_first(
    code: ErasureCode, size_bytes: int
) -> None:
    cuts = code.data_ranges(size_bytes)
    assert len(cuts) == code.data
    assert b"".join(content(size_bytes)[start:end] for start, end in cuts) == content(size_bytes)
    lengths = [end - start for start, end in cuts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == code.shard_bytes(size_bytes) == -(-size_bytes // code.data)


def test_an_object_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 0 bytes, not -1"):
        ErasureCode(4, 2).data_ranges(-1)


def test_one_parity_shard_is_the_xor_of_the_data_shards() -> None:
    assert parity_of(memoryview(bytes([1, 2, 3, 4, 8, 16, 32])), ErasureCode(3, 1)) == {
        3: bytes([1 ^ 4 ^ 32, 2 ^ 8, 3 ^ 16])
    }


@pytest.mark.parametrize(
    ("text", "checksum"), [("10+1", 0x2887D58F), ("4+2", 0x9A5A505C), ("10+2", 0xA844C5D5), ("10+4", 0x91F1FE98)]
)
def test_parity_is_the_same_forever(text: str, checksum: int) -> None:
    # A proxy restores from what another release has stored.
    data = memoryview(bytes(range(256)) * 5)
    assert crc32c(b"".join(parity_of(data, ErasureCode.parse(text)).values())) == checksum


@for_each("size_bytes", SIZES)
@for_each("text", ["1+1", "1+2", "1+3", "2+1", "4+2", "3+3"])
def test_any_data_shards_restore_an_object_of_any_size(text: str, size_bytes: int) -> None:
    code, data = ErasureCode.parse(text), content(size_bytes)
    parity = parity_of(data, code)
    for kept in combinations(range(code.shards), code.data):
        missing = set(range(code.data)) - set(kept)
        into = arrived(data, code, missing)
        restore(
            code, size_bytes, into, {position: parity[position] for position in kept if position in parity}, missing
        )
        assert into == bytes(data) + b"\x55" * 7


@pytest.mark.parametrize("text", ["2+1", "2+2", "3+3"])
def test_shards_larger_than_what_is_computed_at_once_are_restored(text: str) -> None:
    code, data = ErasureCode.parse(text), content(3 * 700_001 + 1)
    parity = parity_of(data, code)
    missing = set(range(min(code.data, code.parity)))
    into = arrived(data, code, missing)
    restore(code, len(data), into, parity, missing)
    assert into[: len(data)] == data


def test_the_object_is_only_read_and_may_be_read_only() -> None:
    data = content(1000)
    assert data.readonly
    before = bytes(data)
    assert len(parity_of(data, ErasureCode(3, 2))) == 2
    assert data == before


@pytest.mark.parametrize(("text", "max_bytes"), [("10+1", 16 << 10), ("10+2", 600 << 10), ("10+3", 800 << 10)])
def test_no_data_shard_is_copied(text: str, max_bytes: int) -> None:
    # zfec returns memory of its own, a piece of 128 KiB for each parity shard; those of two pieces are there at once.
    code, size_bytes = ErasureCode.parse(text), (8 << 20) - 3
    into = memoryview(bytearray(size_bytes))
    parity = [memoryview(bytearray(code.shard_bytes(size_bytes))) for _ in range(code.parity)]
    require_codec(code)

    def work() -> None:
        encode(into, code, parity)
        restore(code, size_bytes, into, dict(enumerate(parity, code.data)), set(range(code.parity)))

    assert memory_of(work).peak_bytes < max_bytes


@pytest.mark.parametrize(("text", "lost"), [("10+0", 1), ("10+1", 2), ("4+2", 3)])
def test_more_losses_than_parity_are_an_error_and_nothing_is_written(text: str, lost: int) -> None:
    code, data, missing = ErasureCode.parse(text), content(1000), set(range(lost))
    into = arrived(data, code, missing)
    before = bytes(into)
    with pytest.raises(LostShardsError, match=f"{lost} data shards of 1000 bytes .* bucket"):
        restore(code, 1000, into, parity_of(data, code), missing)
    assert into == before


def test_shards_without_a_byte_are_never_lost() -> None:
    code, data = ErasureCode(10, 1), content(1)
    into = arrived(data, code, {0})
    restore(code, 1, into, parity_of(data, code), set(range(10)))
    assert into[:1] == data


@for_each("code", CODES, ids=str)
def test_what_is_all_there_needs_no_parity(code: ErasureCode) -> None:
    data = content(100)
    into = arrived(data, code, set())
    restore(code, 100, into, {}, set())
    assert into[:100] == data


@pytest.mark.parametrize("lengths", [[], [25], [25, 24], [25, 26], [25, 25, 25]])
def test_memory_that_does_not_fit_the_parity_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"4\+2 of 99 bytes has 2 parity shards of 25 bytes"):
        encode(content(99), ErasureCode(4, 2), [memoryview(bytearray(length)) for length in lengths])


@pytest.mark.parametrize(
    ("into_bytes", "parity", "missing", "message"),
    [
        (98, {4: 25}, [0], "99 bytes does not fit in 98"),
        (99, {4: 25}, [4], r"data shards of 4\+2 are 0 to 3, not \[4\]"),
        (99, {4: 25}, [-1], "are 0 to 3"),
        (99, {3: 25}, [0], r"parity shards of 4\+2 are 4 to 5, not \[3\]"),
        (99, {6: 25}, [0], "are 4 to 5"),
        (99, {4: 25, 5: 24}, [0], r"have 25 bytes in 4\+2 of 99, not {5: 24}"),
    ],
)
def test_what_does_not_fit_the_code_is_refused(
    into_bytes: int, parity: dict[int, int], missing: list[int], message: str
) -> None:
    views = {position: memoryview(bytearray(length)) for position, length in parity.items()}
    with pytest.raises(ConfigError, match=message):
        restore(ErasureCode(4, 2), 99, memoryview(bytearray(into_bytes)), views, missing)


def test_a_shard_that_is_missing_twice_is_restored_once() -> None:
    code, data = ErasureCode(4, 1), content(99)
    into = arrived(data, code, {2})
    restore(code, 99, into, parity_of(data, code), [2, 2])
    assert into[:99] == data


def test_more_than_two_parity_shards_need_an_extra_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code = ErasureCode(77, 3)  # which no other test has loaded
    monkeypatch.setitem(sys.modules, "zfec", None)
    shards = [memoryview(bytearray(1)) for _ in range(3)]
    with pytest.raises(
        MissingExtraError, match=r"two parity shards, such as 77\+3, needs zfec; pip install 'stoker\[warm\]'"
    ):
        encode(content(10), code, shards)
    with pytest.raises(MissingExtraError):
        restore(code, 10, memoryview(bytearray(10)), {77: shards[0]}, {0})
    with pytest.raises(MissingExtraError):
        require_codec(code)
    restore(code, 10, memoryview(bytearray(10)), {}, set())


def test_two_parity_shards_need_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zfec", None)
    for text in ("7+0", "7+1", "7+2"):
        code = ErasureCode.parse(text)
        require_codec(code)
        data, missing = content(100), set(range(code.parity))
        into = arrived(data, code, missing)
        restore(code, 100, into, parity_of(data, code), missing)
        assert into[:100] == data
