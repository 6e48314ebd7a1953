"""What the benchmark's peers share is fair: the same pixels, the whole source, versions that do not move."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from benchmarks.environments import PEERS, program, python_of
from benchmarks.peers import common

from stoker.images import ImageDecoder

simplejpeg = pytest.importorskip("simplejpeg")


def jpeg(height: int, width: int) -> bytes:
    """Return a picture of slopes, whose pixels tell where they come from."""
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([255 * rows // height, 255 * columns // width, 255 * (rows + columns) // (height + width)], -1)
    encoded: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels, np.uint8), quality=90)
    return encoded


@pytest.mark.parametrize("shape", [(375, 500), (500, 375), (224, 224), (900, 1801), (100, 80), (3600, 3700)])
def test_peers_decode_to_the_pixels_that_stoker_decodes_to(shape: tuple[int, int]) -> None:
    data = jpeg(*shape)
    assert np.array_equal(common.decode(data), ImageDecoder(common.SIDE, common.SIDE)(data))


def test_source_gives_every_sample_with_its_number(tmp_path: Path) -> None:
    tokens = np.arange(3 * 2048, dtype=np.uint16).reshape(3, 2048)
    np.save(tmp_path / "tokens.npy", tokens)
    found = list(common.Source("tokens", tmp_path))
    assert [label for _, label in found] == [0, 1, 2]
    assert all(np.array_equal(data, row) for (data, _), row in zip(found, tokens, strict=True))


def test_source_cuts_jpegs_at_their_offsets_and_stops_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "jpegs.bin").write_bytes(b"abbccc")
    np.save(tmp_path / "offsets.npy", np.array([0, 1, 3, 6]))
    assert list(common.Source("jpegs", tmp_path)) == [(b"a", 0), (b"bb", 1), (b"ccc", 2)]
    assert list(common.Source("jpegs", tmp_path, 2)) == [(b"a", 0), (b"bb", 1)]


def test_stored_bytes_become_the_sample_again() -> None:
    image = np.arange(3072, dtype=np.uint8).reshape(32, 32, 3)
    restored = common.restore("images", decoded=False)(image.tobytes())
    assert isinstance(restored, np.ndarray)
    assert np.array_equal(restored, image)
    assert common.restore("jpegs", decoded=False)(b"jpeg") == b"jpeg"


@pytest.mark.parametrize("peer", PEERS)
def test_every_package_of_a_peer_is_pinned(peer: str) -> None:
    assert program(peer).exists()
    lines = program(peer).with_name("requirements.txt").read_text().splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert packages
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line) for line in packages)


def test_an_unknown_peer_is_named_with_those_that_exist() -> None:
    with pytest.raises(KeyError, match="webdataset"):
        python_of("nonesuch")
