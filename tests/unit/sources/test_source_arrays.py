from __future__ import annotations

import asyncio
import io
import struct
import zipfile
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker import Array
from stoker._base import task_group
from stoker._sources import arrays, open_source
from stoker.abc import ObjectInfo
from stoker.errors import PackError, StokerError
from stoker.testing import WatchedStore
from support.cases import for_each
from support.memory import memory_of
from support.places import look, put_all, read_all

X = np.arange(1000 * 6, dtype="int32").reshape(1000, 2, 3)


def npy_of(array: Any, **options: Any) -> bytes:
    data = io.BytesIO()
    np.save(data, array, **options)
    return data.getvalue()


def npz_of(compressed: bool, **columns: Any) -> bytes:
    data = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(data, **columns)
    return data.getvalue()


def npy_with_header(header: str, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    text = header.encode("latin1")
    length = struct.pack("<H" if version == b"\1\0" else "<I", len(text))
    return b"\x93NUMPY" + version + length + text + data


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{request.function.__name__}/a b"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 1000)


def test_an_npy_file_gives_its_rows_as_x(folder: str) -> None:
    put_all(folder, {"x+ü.npy": npy_of(X)})
    source = look(f"{folder}/x+ü.npy")
    assert (source.kind, source.samples) == ("npy", 1000)
    assert dict(source.schema) == {"x": Array("int32", (2, 3))}
    rows = read_all(f"{folder}/x+ü.npy")
    assert np.array_equal(np.stack([sample["x"] for _, sample in rows]), X)
    assert rows[7][0] == "x+ü.npy: row 7"


@pytest.mark.parametrize("compressed", [False, True])
def test_an_npz_file_gives_its_keys(folder: str, compressed: bool) -> None:
    put_all(folder, {"d.npz": npz_of(compressed, image=X, label=np.arange(1000))})
    source = look(f"{folder}/d.npz")
    assert (source.kind, source.samples) == ("npz", 1000)
    assert dict(source.schema) == {"image": Array("int32", (2, 3)), "label": Array("int64")}
    rows = [sample for _, sample in read_all(f"{folder}/d.npz")]
    assert np.array_equal(np.stack([row["image"] for row in rows]), X)
    assert [int(row["label"]) for row in rows] == list(range(1000))


@pytest.mark.parametrize("name", ["x.npy", "stored.npz", "compressed.npz"])
def test_reading_starts_at_any_row(name: str) -> None:
    url = "memory://rows"
    contents = {"x.npy": npy_of(X), "stored.npz": npz_of(False, x=X), "compressed.npz": npz_of(True, x=X)}
    put_all(url, contents)
    for start in (0, 1, 41, 42, 500, 999, 1000):
        rows = [sample["x"] for _, sample in read_all(f"{url}/{name}", start=start)]
        assert np.array_equal(np.array(rows).reshape(-1, 2, 3), X[start:])


@pytest.mark.parametrize(
    "array",
    [X.astype(">i4"), X.astype("?"), X.astype("float16"), np.arange(5.0), np.asfortranarray(np.arange(9))],
    ids=["big-endian", "bool", "float16", "scalars", "one-dimensional fortran"],
)
def test_every_storable_dtype_and_byte_order_is_read(array: Any) -> None:
    put_all("memory://dtypes", {"x.npy": npy_of(array)})
    assert np.array_equal(np.stack([sample["x"] for _, sample in read_all("memory://dtypes/x.npy")]), array)


def test_rows_are_streamed_not_the_whole_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_group, "MAX_AHEAD_BYTES", 1 << 20)
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 1 << 18)
    big = np.zeros((64, 1 << 20), "uint8")
    (tmp_path / "x.npy").write_bytes(npy_of(big))
    (tmp_path / "bomb.npz").write_bytes(npz_of(True, x=big))
    del big

    async def read(name: str) -> None:
        source = await open_source(tmp_path / name)
        async with aclosing(source.read()) as samples:
            assert len([None async for _ in samples]) == 64
        await source.close()

    assert memory_of(lambda: asyncio.run(read("x.npy"))).peak_bytes < 12 << 20
    assert memory_of(lambda: asyncio.run(read("bomb.npz"))).peak_bytes < 12 << 20


def test_a_store_may_hold_on_to_a_view_of_what_it_has_read_into() -> None:
    class Holding(WatchedStore):
        held: list[memoryview]

        async def get_range(self, *which: Any, into: memoryview, **options: Any) -> ObjectInfo:
            self.held = [*getattr(self, "held", []), into]
            return await super().get_range(*which, into=into, **options)

    async def read(name: str) -> list[Any]:
        source = await open_source(f"memory://held/{name}", wrap=Holding)
        async with aclosing(source.read()) as samples:
            return [sample["x"] async for _, sample in samples]

    put_all("memory://held", {"x.npy": npy_of(X), "stored.npz": npz_of(False, x=X), "x.npz": npz_of(True, x=X)})
    for name in ("x.npy", "stored.npz", "x.npz"):
        assert np.array_equal(np.stack(asyncio.run(read(name))), X)


def test_a_directory_longer_than_the_tail_that_is_read_first_is_found() -> None:
    columns = {f"column_{number:04}_{'x' * 60}": np.arange(3) for number in range(700)}
    put_all("memory://wide", {"x.npz": npz_of(False, **columns)})
    assert list(look("memory://wide/x.npz").schema) == list(columns)
    put_all("memory://wide", {"x.npz": npz_of(False, **{f"c{number}": np.arange(3) for number in range(1025)})})
    with pytest.raises(PackError, match="holds 1025 arrays; a schema has at most 1024"):
        look("memory://wide/x.npz")


HOSTILE: dict[str, Callable[[], bytes]] = {
    "objects": lambda: npy_of(np.array([{"a": 1}], dtype=object), allow_pickle=True),
    "records": lambda: npy_of(np.zeros(3, [("a", "i4")])),
    "text": lambda: npy_of(np.array(["a", "b"])),
    "complex": lambda: npy_of(np.zeros(3, "complex64")),
    "fortran": lambda: npy_of(np.asfortranarray(X)),
    "scalar": lambda: npy_of(np.float32(1)),
    "no rows": lambda: npy_of(X[:0]),
    "empty rows": lambda: npy_of(X[:, :0]),
    "cut off": lambda: npy_of(X)[:-1],
    "too long": lambda: npy_of(X) + b"x",
    "too few rows": lambda: npy_with_header("{'descr': '<i4', 'fortran_order': False, 'shape': (2,)}\n", b"1234"),
    "many rows": lambda: npy_with_header("{'descr': '<i4', 'fortran_order': False, 'shape': (1<<60,)}\n", b"1234"),
    "huge": lambda: npy_with_header(f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({1 << 62},)}}\n", b"1234"),
    "negative": lambda: npy_with_header("{'descr': '<i4', 'fortran_order': False, 'shape': (-1, -1)}\n", b"1234"),
    "bool shape": lambda: npy_with_header("{'descr': '|u1', 'fortran_order': False, 'shape': (True,)}\n", b"1"),
    "code": lambda: npy_with_header("__import__('os').abort()\n"),
    "deep": lambda: npy_with_header("(" * 5000 + "\n"),
    "long header": lambda: npy_with_header(" " * 60_000 + "\n"),
    "lying header": lambda: b"\x93NUMPY\2\0\xff\xff\xff\xff{}",
    "no header": lambda: b"\x93NUMPY\1\0\x10\x00",
    "version 9": lambda: b"\x93NUMPY\x09\0\x10\x00" + b" " * 16,
    "not numpy": lambda: b"%PDF-1.7 hello, world",
    "empty": lambda: b"",
}


@for_each("name", HOSTILE)
def test_a_hostile_or_unfit_npy_file_is_an_error_that_names_it(name: str) -> None:
    put_all("memory://hostile", {"bad.npy": HOSTILE[name]()})
    with pytest.raises(PackError, match=r"memory://hostile/bad\.npy") as caught:
        look("memory://hostile/bad.npy")
    assert len(str(caught.value)) < 500


def test_rows_larger_than_any_sample_may_be_are_an_error_that_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker._sources.listing.MAX_SAMPLE_BYTES", 4000)
    put_all("memory://wide", {"good.npy": npy_of(np.zeros((2, 4000), "uint8"))})
    put_all("memory://wide", {"bad.npy": npy_of(np.zeros((2, 4001), "uint8"))})
    assert look("memory://wide/good.npy").kind == "npy"
    with pytest.raises(
        PackError, match=r"memory://wide/bad\.npy has rows of 4001 bytes; .* at most 4000 .*: cut the rows"
    ):
        look("memory://wide/bad.npy")


def member_of(name: str, data: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr(name, data)
    return file.getvalue()


def patched(data: bytes, signature: bytes, offset: int, value: bytes) -> bytes:
    at = data.rindex(signature) + offset
    return data[:at] + value + data[at + len(value) :]


GOOD = npz_of(False, x=X)
ZIPPED = npz_of(True, x=X)
HOSTILE_NPZ: dict[str, Callable[[], bytes]] = {
    "not a zip": lambda: b"hello" * 10,
    "empty": lambda: b"",
    "no arrays": lambda: npz_of(False),
    "other lengths": lambda: npz_of(False, x=X, y=X[1:]),
    "pickles": lambda: member_of("x.npy", HOSTILE["objects"]()),
    "not an array": lambda: member_of("x.npy", b"hello"),
    "bad column name": lambda: npz_of(False, **{"a-b": X}),
    "bzip2": lambda: member_of("x.npy", npy_of(X), compression=zipfile.ZIP_BZIP2),
    "twice": lambda: two_of_a_name(),
    "encrypted": lambda: patched(GOOD, b"PK\1\2", 8, b"\1\0"),
    "offset outside": lambda: patched(GOOD, b"PK\1\2", 42, b"\xf0\xff\xff\x7f"),
    "size outside": lambda: patched(GOOD, b"PK\1\2", 20, b"\xf0\xff\xff\x7f\xf0\xff\xff\x7f"),
    "two sizes": lambda: patched(GOOD, b"PK\1\2", 20, b"\x10\0\0\0"),
    "size lies": lambda: patched(ZIPPED, b"PK\1\2", 24, b"\xf0\xff\xff\x7f"),
    "huge directory": lambda: patched(GOOD, b"PK\5\6", 12, b"\xf0\xff\xff\x7f"),
    "directory outside": lambda: patched(GOOD, b"PK\5\6", 16, b"\xf0\xff\xff\x7f"),
    "cut off": lambda: GOOD[:-30],
    "no name": lambda: patched(GOOD, b"PK\1\2", 28, b"\0\0\0\0\5\0"),
}


def two_of_a_name() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", npy_of(X))
        archive.writestr("x", npy_of(X))
    return file.getvalue()


@for_each("name", HOSTILE_NPZ)
def test_a_hostile_or_unfit_npz_file_is_an_error_that_names_it(name: str) -> None:
    put_all("memory://hostile", {"bad.npz": HOSTILE_NPZ[name]()})
    with pytest.raises(PackError, match=r"memory://hostile/bad\.npz"):
        look("memory://hostile/bad.npz")


def test_damage_inside_a_compressed_array_is_an_error() -> None:
    noise = np.random.default_rng(1).integers(0, 256, (1000, 24), dtype="uint8")
    data = npz_of(True, x=noise)
    for offset in (5000, len(data) // 2, len(data) - 300):
        put_all("memory://damage", {"x.npz": patched(data, data[offset : offset + 8], 0, b"\0" * 8)})
        with pytest.raises(PackError, match=r"x\.npz.* is damaged"):
            read_all("memory://damage/x.npz")


@pytest.mark.parametrize("good", [npy_of(X[:20]), npz_of(False, x=X[:9]), npz_of(True, x=X[:9])], ids=len)
def test_no_bit_flip_or_cut_causes_anything_but_a_typed_error(good: bytes) -> None:
    suffix = "npz" if good.startswith(b"PK") else "npy"
    rng = np.random.default_rng(7)
    survived = 0
    for _ in range(300):
        data = bytearray(good)
        if rng.random() < 0.3:
            del data[int(rng.integers(len(data))) :]
        else:
            data[int(rng.integers(min(len(data), 400)) * rng.choice([1, -1]))] ^= 1 << int(rng.integers(8))
        put_all("memory://flips", {f"x.{suffix}": bytes(data)})
        try:
            read_all(f"memory://flips/x.{suffix}")
            survived += 1
        except StokerError:
            continue
    assert survived < 300
