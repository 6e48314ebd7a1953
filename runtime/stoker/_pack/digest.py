"""The digest of a data set's committed pack records: all in one object, so that not each of them has to be read.

Committed records never change, and a commit needs of each of them which run it is of and which raw objects it names. An
instance that starts reads the digest instead, and then those records that have other tags or are not in it. It is a
shortcut and nothing else: lost, damaged or old, it costs requests.

A safetensors file: two tensors of bytes, the objects' tags and the records without their prefixes, each with the
offsets of its ``n`` pieces, ``I64 [n + 1]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np

from stoker._base.checksum import crc32c
from stoker._format import tensorfile
from stoker._format.dtypes import DTYPES, DType
from stoker._format.supersample import FORMAT
from stoker._pack.record import PackRecord, record_key
from stoker.errors import ChecksumError, FormatError

__all__ = ["DIGEST_KEY", "digest_bytes", "digested"]

DIGEST_KEY = "packs/committed.safetensors"
_NAMES = ("tag", "record")


def digest_bytes(records: Mapping[str, tuple[str, PackRecord]]) -> bytes:
    """Return the digest of records: key → tag of the object, and what it says without its prefix."""
    ordered = [records[key] for key in sorted(records)]
    pieces = {
        "tag": [tag.encode() for tag, _ in ordered],
        "record": [record.to_bytes() for _, record in ordered],
    }
    data = b"".join(_offsets(pieces[name]) + b"".join(pieces[name]) for name in _NAMES)
    tensors = _tensors(len(ordered), [sum(map(len, pieces[name])) for name in _NAMES])
    return tensorfile.encode_header({"stoker_digest": FORMAT, "crc32c": f"{crc32c(data):08x}"}, tensors) + data


def digested(data: bytes) -> dict[str, tuple[str, PackRecord]]:
    """Return the records whose digest is ``data``: key → tag of the object, and what it says without its prefix.

    Raises:
        FormatError: the bytes are no digest.
        ChecksumError: they were one and are damaged.
    """
    header = tensorfile.parse_header(data, len(data))
    if header.metadata.get("stoker_digest") != FORMAT:
        raise FormatError("this is not a digest of a format that this version reads; a newer stoker may")
    by_name = {tensor.name: tensor for tensor in header.tensors}
    count = by_name["tag.offsets"].shape[0] - 1 if "tag.offsets" in by_name and by_name["tag.offsets"].shape else 0
    sizes = [by_name[name].end - by_name[name].start if name in by_name else 0 for name in _NAMES]
    if count < 0 or header.tensors != _tensors(count, sizes):
        raise FormatError("the digest's tensors are not those of one")
    content = memoryview(data)[header.header_bytes :]
    if header.metadata.get("crc32c") != f"{crc32c(content):08x}":
        raise ChecksumError("the digest is damaged: its checksum differs")
    tags, records = (_pieces(content, by_name[f"{name}.offsets"], by_name[name]) for name in _NAMES)
    found: dict[str, tuple[str, PackRecord]] = {}
    for tag, piece in zip(tags, records, strict=True):
        record = PackRecord.from_bytes(piece)
        if not record.is_committed:
            raise FormatError(f"the digest has the record of run {record.run}, which is not committed")
        found[record_key(record.run)] = str(tag, "utf-8", "replace"), record
    return found


def _offsets(pieces: Iterable[bytes]) -> bytes:
    return np.cumsum([0, *map(len, pieces)], dtype="<i8").tobytes()


def _tensors(count: int, sizes: Iterable[int]) -> tuple[tensorfile.Tensor, ...]:
    wanted: list[tuple[str, DType, tuple[int, ...]]] = []
    for name, size in zip(_NAMES, sizes, strict=True):
        wanted += [(f"{name}.offsets", DTYPES["int64"], (count + 1,)), (name, DTYPES["uint8"], (size,))]
    return tensorfile.laid_out(wanted)


def _pieces(content: memoryview, offsets: tensorfile.Tensor, data: tensorfile.Tensor) -> list[memoryview]:
    ends = np.frombuffer(content[offsets.start : offsets.end], "<i8")
    if ends[0] != 0 or ends[-1] != data.end - data.start or (ends[1:] < ends[:-1]).any():
        raise FormatError("the offsets of the digest do not rise to their end")
    return [content[data.start + start : data.start + end] for start, end in pairwise(ends.tolist())]
