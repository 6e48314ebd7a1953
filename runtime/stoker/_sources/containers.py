"""Detects files that hold many samples, such as tables and archives, by their names or first bytes.

The kind ``files`` makes one sample of each file, which is rarely intended for a table or an archive, so the user must
ask for it.
"""

from __future__ import annotations

import re
import struct
import zlib

from stoker._base.checksum import crc32c

SNIFFED_BYTES = 4096

_SUFFIXES_OF = {
    "CSV table": "csv tsv psv",
    "JSON Lines file": "jsonl ndjson jsonlines",
    "Parquet table": "parquet pq",
    "Arrow table": "arrow feather ipc",
    "ORC table": "orc",
    "Avro file": "avro",
    "spreadsheet": "xls xlsx ods",
    "TFRecord file": "tfrecord tfrecords tfrec",
    "RecordIO file": "rec",
    "MDS shard": "mds",
    "FFCV file": "beton",
    "HDF5 file": "h5 hdf5 hdf he5",
    "IDX file": "idx1-ubyte idx2-ubyte idx3-ubyte idx4-ubyte",
    "LMDB database": "lmdb mdb",
    "SQLite database": "sqlite sqlite3 db",
    "pickle": "pkl pickle joblib",
    "PyTorch file": "pt pth ckpt",
    "safetensors file": "safetensors",
    "NumPy array": "npy",
    "NumPy archive": "npz",
    "compressed tar": "tgz tbz tbz2 txz tzst",
    "zip archive": "zip",
    "7-Zip archive": "7z",
    "RAR archive": "rar",
}
_KIND_BY_SUFFIX = {suffix: kind for kind, suffixes in _SUFFIXES_OF.items() for suffix in suffixes.split()}
_COMPRESSED = ("gz", "bz2", "xz", "zst", "lz4")
_NUMBERED = re.compile(r"-\d+-of-\d+$", re.ASCII)  # train.tfrecord-00000-of-00010
_IDX = re.compile(r"(?:^|[-.])(idx[1-4]-ubyte)$", re.ASCII)  # train-images-idx3-ubyte
_ZIPPED_DOCUMENTS = (".docx", ".pptx", ".odt", ".odp", ".epub", ".jar", ".apk", ".sb3", ".usdz", ".3mf")

_KIND_BY_MAGIC = {
    b"PAR1": "Parquet table",
    b"ARROW1": "Arrow table",
    b"FEA1": "Arrow table",
    b"ORC": "ORC table",
    b"Obj\1": "Avro file",
    b"\x89HDF\r\n\x1a\n": "HDF5 file",
    b"SQLite format 3\0": "SQLite database",
    b"\x93NUMPY": "NumPy array",
    b"PK\3\4": "zip archive",
    b"PK\5\6": "zip archive",
    b"7z\xbc\xaf\x27\x1c": "7-Zip archive",
    b"Rar!\x1a\7": "RAR archive",
    b"BZh": "bzip2 file",
    b"\xfd7zXZ\0": "xz file",
    b"\x28\xb5\x2f\xfd": "Zstandard file",
}
_GZIP = b"\x1f\x8b"
_PICKLE = re.compile(rb"\x80[\x02-\x05](?:\x95|[}\](c])", re.DOTALL)
_JSON_LINES = re.compile(rb"\s*\{[^\n]*\}[ \t\r]*\n\s*\{")


def detect_by_name(key: str) -> str | None:
    """Return the kind of container that a file is by its name, such as ``CSV table``; None if it is none."""
    name = _NUMBERED.sub("", key.rpartition("/")[2].lower())
    if match := _IDX.search(name):
        return _KIND_BY_SUFFIX[match[1]]
    stem, _, suffix = name.rpartition(".")
    if suffix in _COMPRESSED:
        inner = stem.rpartition(".")[2] if "." in stem else ""
        kind = "tar" if inner == "tar" else _KIND_BY_SUFFIX.get(inner)
        return None if kind is None else f"compressed {kind}"
    return _KIND_BY_SUFFIX.get(suffix) if stem else None


def detect_by_content(beginning: bytes, key: str = "") -> str | None:
    """Return the kind of container that a file is by its first bytes; None if it is none.

    Args:
        beginning: first :data:`SNIFFED_BYTES` of the file, or all of a shorter file.
        key: name of the file, to recognize documents that are zip archives.
    """
    for magic, kind_of_magic in _KIND_BY_MAGIC.items():
        if beginning.startswith(magic):
            is_document = kind_of_magic == "zip archive" and key.lower().endswith(_ZIPPED_DOCUMENTS)
            return None if is_document else kind_of_magic
    if beginning.startswith(_GZIP):
        inner = _inflate(beginning)
        # Not examined recursively: some gzip files decompress to themselves.
        kind = None if inner.startswith(_GZIP) else detect_by_content(inner)
        return None if kind is None else f"compressed {kind}"
    if beginning[257:262] == b"ustar":
        return "tar archive"
    if beginning[16:20] == b"\xde\xc0\xef\xbe":
        return "LMDB database"
    if _PICKLE.match(beginning):
        return "pickle"
    if _JSON_LINES.match(beginning):
        return "JSON Lines file"
    if beginning[8:10] == b'{"' and int.from_bytes(beginning[:8], "little") < 1 << 30:
        return "safetensors file"
    return "TFRecord file" if _is_tfrecord(beginning) else None


def remedy_for(kind: str) -> str:
    """Return the advice for a container that should not become one sample."""
    if kind == "tar archive":
        return "give its name the suffix .tar"
    if kind.startswith("NumPy"):
        return "pack each by itself, with --append from the second"
    if kind.endswith(("archive", "tar")):
        return "unpack it (of a compressed tar, make a plain .tar)"
    if kind in ("bzip2 file", "xz file", "Zstandard file"):
        return "decompress it"
    return "read its rows and write them with stoker.Packer, or use the --kind of a plug-in (docs/plugins.md)"


def _inflate(beginning: bytes) -> bytes:
    try:
        return zlib.decompressobj(31).decompress(beginning, SNIFFED_BYTES)
    except zlib.error:
        return b""


def _is_tfrecord(beginning: bytes) -> bool:
    """Return whether the file begins with a TFRecord's length and the masked CRC-32C of the length."""
    if len(beginning) < 12:
        return False
    checksum = crc32c(beginning[:8])
    masked = (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    return struct.unpack_from("<I", beginning, 8) == (masked,)
