"""The checksum of bytes one behind the other, from those of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker._base.checksum import combine_crc32c, crc32c

CHECK = 0xE3069283  # of the digits 1 to 9, as RFC 3720 (B.4) and the catalogues of CRCs give it


def test_the_checksum_is_that_of_castagnoli() -> None:
    assert crc32c(b"123456789") == CHECK
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"") == 0


@given(st.binary(max_size=300), st.integers(0, 300))
def test_two_checksums_combine_to_that_of_the_whole_wherever_it_is_cut(data: bytes, cut: int) -> None:
    first, second = data[:cut], data[cut:]
    assert combine_crc32c(crc32c(first), crc32c(second), len(second)) == crc32c(data)


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_any_number_of_pieces_combine_from_either_end(pieces: list[bytes]) -> None:
    whole = crc32c(b"".join(pieces))
    forwards = 0
    for piece in pieces:
        forwards = combine_crc32c(forwards, crc32c(piece), len(piece))
    backwards, behind = 0, 0
    for piece in reversed(pieces):
        backwards, behind = combine_crc32c(crc32c(piece), backwards, behind), behind + len(piece)
    assert forwards == backwards == whole


@pytest.mark.parametrize("second_bytes", [1, 511, 512, 513, (1 << 20) - 1, (8 << 20) + 3])
def test_lengths_of_many_bits_combine(second_bytes: int) -> None:
    first, second = b"the head", bytes(range(251)) * (second_bytes // 251 + 1)
    second = second[:second_bytes]
    assert combine_crc32c(crc32c(first), crc32c(second), second_bytes) == crc32c(first + second)
    assert combine_crc32c(crc32c(first), crc32c(bytes(second_bytes)), second_bytes) == crc32c(
        first + bytes(second_bytes)
    )
