"""The checksum of bytes one behind the other, from those of each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker._base import checksum
from stoker._base.checksum import combine_crc32c, crc32c
from support.cases import for_each

CHECK = 0xE3069283  # of the digits 1 to 9, as RFC 3720 (B.4) and the catalogues of CRCs give it


@pytest.fixture(params=["google-crc32c", "awscrt"], autouse=True, scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[None]:
    before, checksum._extend = checksum._extend, checksum._google_crc32c
    assert request.param == "google-crc32c" or checksum.use_awscrt()
    yield
    checksum._extend = before


def test_the_checksum_is_that_of_castagnoli() -> None:
    assert crc32c(b"123456789") == CHECK
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"") == 0
    assert crc32c(b"", CHECK) == CHECK
    assert crc32c(memoryview(bytearray(b"456789")), crc32c(b"123")) == CHECK


def test_without_awscrt_the_other_library_computes_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_extend", checksum._google_crc32c)
    monkeypatch.setitem(sys.modules, "awscrt", None)
    assert not checksum.use_awscrt()
    assert crc32c(b"123456789") == CHECK


def test_the_loader_computes_checksums_with_awscrt_and_the_runtime_does_not_import_it() -> None:
    program = (
        "import sys, stoker._fetch.fetcher; assert 'awscrt' not in sys.modules; "
        "import stoker_torch, stoker._base.checksum as c; from awscrt import checksums; "
        "assert c._extend is checksums.crc32c"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


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


@for_each("second_bytes", [1, 511, 512, 513, (1 << 20) - 1, (8 << 20) + 3])
def test_lengths_of_many_bits_combine(second_bytes: int) -> None:
    first, second = b"the head", bytes(range(251)) * (second_bytes // 251 + 1)
    second = second[:second_bytes]
    assert combine_crc32c(crc32c(first), crc32c(second), second_bytes) == crc32c(first + second)
    assert combine_crc32c(crc32c(first), crc32c(bytes(second_bytes)), second_bytes) == crc32c(
        first + bytes(second_bytes)
    )
