"""Tables and archives that ``files`` would make one sample of: known by name and by how they begin."""

from __future__ import annotations

import gzip
import io
import pickle
import sqlite3
import struct
import zipfile

import numpy as np
import pytest

from stoker import Array, Packer
from stoker._base.checksum import crc32c
from stoker._sources.containers import SNIFFED_BYTES, detect_by_content, detect_by_name
from stoker.errors import ConfigError, PackError
from support.cases import for_each
from support.places import look, put_all, read_all, tar_of


@for_each(
    ("name", "kind"),
    [
        ("a/x.csv", "CSV table"),
        ("X.CSV", "CSV table"),
        ("x.csv.gz", "compressed CSV table"),
        ("x.jsonl", "JSON Lines file"),
        ("x.jsonl.zst", "compressed JSON Lines file"),
        ("part-0.parquet", "Parquet table"),
        ("data-00000-of-00001.arrow", "Arrow table"),
        ("train.tfrecord-00000-of-00010", "TFRecord file"),
        ("train-images-idx3-ubyte", "IDX file"),
        ("train-images.idx3-ubyte", "IDX file"),
        ("x.tar.gz", "compressed tar"),
        ("x.tgz", "compressed tar"),
        ("x.tar.xz", "compressed tar"),
        ("x.zip", "zip archive"),
        ("x.h5", "HDF5 file"),
        ("x.pkl", "pickle"),
        ("x.npy", "NumPy array"),
        ("x.nii.gz", None),
        ("x.txt.gz", None),
        ("x.json", None),
        ("x.wav", None),
        ("csv", None),
        (".csv", None),
        ("x.csv/1.bin", None),
    ],
)
def test_a_container_is_known_by_its_name(name: str, kind: str | None) -> None:
    assert detect_by_name(name) == kind


def _zip() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("a", b"x")
    return data.getvalue()


def _npy() -> bytes:
    data = io.BytesIO()
    np.save(data, np.arange(3))
    return data.getvalue()


def _tfrecord() -> bytes:
    length = struct.pack("<Q", 3)
    checksum = crc32c(length)
    masked = ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return length + struct.pack("<I", masked) + b"abc" + bytes(4)


def _sqlite() -> bytes:
    with sqlite3.connect(":memory:") as connection:
        connection.execute("create table t (x)")
        return connection.serialize()


BEGINNINGS = {
    "Parquet table": b"PAR1" + bytes(20),
    "Arrow table": b"ARROW1\0\0",
    "HDF5 file": b"\x89HDF\r\n\x1a\n" + bytes(20),
    "zip archive": _zip(),
    "NumPy array": _npy(),
    "SQLite database": _sqlite(),
    "TFRecord file": _tfrecord(),
    "pickle": pickle.dumps({"data": 1}),
    "tar archive": tar_of([("a.txt", b"x")]),
    "compressed tar archive": gzip.compress(tar_of([("a.txt", b"x")]), mtime=0),
    "JSON Lines file": b'{"a": {"b": 1}}\r\n {"a": 2}\n',
    "compressed JSON Lines file": gzip.compress(b'{"a": 1}\n{"a": 2}\n', mtime=0),
    "xz file": b"\xfd7zXZ\0" + bytes(9),
}


@for_each("kind", BEGINNINGS)
def test_a_container_is_known_by_how_it_begins(kind: str) -> None:
    assert detect_by_content(BEGINNINGS[kind][:SNIFFED_BYTES]) == kind


def test_a_super_sample_is_known_by_how_it_begins() -> None:
    with Packer("memory://containers-own", schema={"x": Array("int64")}) as packer:
        packer.write({"x": 1})
    found = [detect_by_content(sample["data"]) for _, sample in read_all("memory://containers-own", "files")]
    assert set(found) == {"safetensors file"}


@for_each(
    "beginning",
    [
        b"",
        b"\x1f\x8b",
        gzip.compress(b"some text", mtime=0),
        gzip.compress(gzip.compress(b"PAR1", mtime=0), mtime=0),
        b'{"a": 1}\n',
        b'{\n  "a": 1\n}\n',
        b"[1, 2]\n[3]\n",
        b"a,b\n1,2\n",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0",
        b"\x80\x02",
        bytes(4096),
        np.random.default_rng(1).bytes(4096),
    ],
)
def test_what_is_no_container_is_not_taken_for_one(beginning: bytes) -> None:
    assert detect_by_content(beginning) is None


def test_documents_that_are_zip_archives_are_files() -> None:
    put_all("memory://containers-documents", {"a.docx": _zip(), "b.epub": _zip()})
    assert look("memory://containers-documents").samples == 2


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("x.csv", b"a,b\n1,2\n"),
        ("x.jsonl", b'{"a": 1}\n'),
        ("x.tar.gz", gzip.compress(tar_of([("a.txt", b"x")]), mtime=0)),
        ("sub/x.parquet", b""),
        ("without-suffix", b"PAR1" + bytes(100)),
        ("x.json", b'{"a": 1}\n{"a": 2}\n'),
    ],
)
def test_a_container_is_refused_unless_declared_a_file(key: str, data: bytes) -> None:
    url = f"memory://containers/{key.replace('/', '-')}"
    put_all(url, {"a.wav": b"sound", key: data})
    with pytest.raises(ConfigError, match=rf"first: {key}, .*--kind files"):
        look(url)
    assert look(url, "files").samples == 2


def test_of_many_files_the_first_and_the_largest_of_each_suffix_are_looked_at() -> None:
    url = "memory://containers-many"
    put_all(
        url,
        {f"{number:03}": b"x" for number in range(300)} | {"150": b"PAR1" + bytes(10), "200.bin": BEGINNINGS["pickle"]},
    )
    with pytest.raises(ConfigError, match=r"2 files with many samples each \(first: 150, Parquet table\)"):
        look(url)


def test_one_file_is_refused_with_what_it_is_and_what_to_do(tmp_path: str) -> None:
    put_all(str(tmp_path), {"x.csv": b"a,b\n"})
    with pytest.raises(ConfigError, match=r"x\.csv \(CSV table\).*stoker\.Packer"):
        look(f"{tmp_path}/x.csv")
    put_all("memory://containers-one", {"x.csv": b"a,b\n"})
    with pytest.raises(PackError, match=r"x\.csv, and a file \(CSV table\).*stoker\.Packer"):
        look("memory://containers-one/x.csv")
