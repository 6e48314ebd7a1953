"""Readers of files: super-samples, their heads, manifests, pack records and the framing of all of them."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import safetensors

from stoker import Array, Schema, Text
from stoker._fetch.gather import RaggedValues, RowLocations, gather
from stoker._fetch.super_samples import locate_values
from stoker._format import manifest as manifests_module
from stoker._format import supersample, tensorfile
from stoker._format.manifest import Manifest, PackRun
from stoker._format.supersample import Head, SuperSample
from stoker._pack import record as record_module
from stoker._pack.record import PackRecord
from stoker.errors import ChecksumError, FormatError
from support.fuzzed.mutations import mutated_bytes, mutated_file, mutated_record
from support.fuzzed.reader import Reader
from support.identities import add_identities
from support.supersamples import EVERY_KIND, RUN, built, manifest_of, samples_of

__all__ = ["FILES"]

SMALL = Schema({"label": Array("int64"), "caption": Text()})


def _theirs(data: bytes) -> dict[str, Any]:
    """Return the tensors that the reference implementation reads."""
    return dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]


def _read_super_sample(data: bytes) -> str:
    opened = SuperSample(data)
    _check_head(opened.head)
    _check_gather(opened, data)
    assert _theirs(data).keys() == opened.head.starts.keys()
    opened.verify()
    for name in opened.head.schema:
        start, end = opened.head.row_range(name, 0, len(opened))
        opened.head.verify_rows(name, 0, memoryview(data)[start:end])
    for row in range(len(opened)):
        opened[row]
    return "read"


def _check_head(head: Head) -> None:
    """Check that all values are in the object, and that the rows of a column are contiguous."""
    assert head.header_bytes <= head.head_bytes <= head.size_bytes
    assert head.checksums.shape == (head.samples, len(head.schema))
    assert head.samples * 4 * len(head.schema) <= head.head_bytes
    assert Schema.from_json(head.schema.to_json()) == head.schema
    for name in head.schema:
        borders = [head.row_range(name, row, row + 1) for row in range(head.samples)]
        ends = [head.header_bytes, *(border for pair in borders for border in pair), head.size_bytes]
        assert ends == sorted(ends), f"rows of {name} are not in order within the object"
        assert all(end == start for (_, end), (start, _) in pairwise(borders))


def _check_gather(opened: SuperSample, data: bytes) -> None:
    """Check that gathering from a slot, with other slots around it, gives the values and touches nothing else."""
    head, base = opened.head, 7
    memory = memoryview(b"\xaa" * base + data + b"\xaa" * 64)
    rows = np.array([*range(head.samples), 0], np.int64)[::-1]
    which = np.zeros(len(rows), np.int64)
    values_at = locate_values(head.schema, memory, [head.starts], np.array([base]), which, rows)
    picked = RowLocations(which, rows, values_at)
    for name, values in gather(picked, head.schema).items():
        column = head.schema[name]
        for place, row in enumerate(rows.tolist()):
            start, end = head.row_range(name, row, row + 1)
            if isinstance(values, RaggedValues):
                first, last = values.offsets[place : place + 2] * column.element_bytes
                found = values.data[first:last].tobytes()
            else:
                found = values[place].tobytes()
            assert found == data[start:end], f"row {row} of {name} is not what lies there"


@cache
def super_samples() -> list[bytes]:
    """Return super-samples with some and with all kinds of columns."""
    wide = Schema({"label": Array("int32", classes=("a", "b")), "image": Array("uint8", (5, 5, 3))})
    return [built(schema, samples_of(schema, count))[0] for schema, count in ((SMALL, 2), (EVERY_KIND, 3), (wide, 2))]


def _read_head(data: bytes) -> str:
    (size_bytes,) = struct.unpack("<Q", data[:8].ljust(8, b"\0"))
    head = Head.parse(data[8:], size_bytes)
    _check_head(head)
    assert head.head_bytes <= len(data) - 8
    return "read"


def heads() -> list[bytes]:
    whole = [(data, SuperSample(data).head.head_bytes) for data in super_samples()]
    return [struct.pack("<Q", len(data)) + data[: head_bytes + more] for data, head_bytes in whole for more in (0, 9)]


def _mutated_head(data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
    """Change the claimed size, or the head in an object of that size."""
    size_bytes = struct.unpack("<Q", data[:8].ljust(8, b"\0"))[0]
    if rng.random() < 0.2:
        size_bytes = rng.choice([0, 7, size_bytes - 1, size_bytes + 1, 2**25, 2**32 - 1, 2**40, 2**63]) % 2**64
        return struct.pack("<Q", size_bytes) + data[8:]
    if rng.random() < 0.3:
        return data[:8] + mutated_bytes(data[8:], [other[8:] for other in pool], rng)
    cut = len(data) - 8
    whole = (data[8:] + bytes(max(0, min(size_bytes, 1 << 16) - cut)))[: 1 << 16]
    changed = mutated_file(whole, super_samples(), rng)
    return struct.pack("<Q", len(changed)) + changed[: rng.choice([cut, cut + rng.randrange(64), len(changed)])]


# Manifests, pack records and the framing.


def _read_manifest(data: bytes) -> str:
    manifest = Manifest.from_bytes(data)
    _theirs(data)
    _check_manifest(manifest)
    written = manifest.to_bytes()
    assert Manifest.from_bytes(written).to_bytes() == written
    assert manifest.file_bytes == len(written)
    longer = manifest.append_runs(manifest.rows, PackRun("f" * 16, 0, len(manifest)))
    assert [longer.rows.tag(len(manifest) + row) for row in range(len(manifest))] == [
        manifest.rows.tag(row) for row in range(len(manifest))
    ]
    return "read"


def _check_manifest(manifest: Manifest) -> None:
    refs = [manifest.ref(row) for row in range(len(manifest))]
    assert refs, "a manifest of nothing"
    assert len({ref.key for ref in refs}) == len(refs), "an object is listed twice"
    for row, ref in enumerate(refs):
        assert re.fullmatch(r"data/[0-9a-f]{16}/[0-9]{8,10}", ref.key)
        assert 0 < manifest.rows.head_bytes[row] <= ref.size_bytes < 40 << 20
        assert ref.tag.isascii()
        assert ref.tag.isprintable()
    assert manifest.largest_bytes <= manifest.size_bytes
    assert len(refs) <= manifest.samples <= manifest.size_bytes // 4


@cache
def manifests() -> list[bytes]:
    """Return manifests with each kind of tag, of one run and of several, with and without strong identities."""
    tags = ["0123456789abcdef" * 2] * 3, ["17", "18"], ["x", "y z"], ["", "f" * 32, "3"]
    one_run = [manifest_of(each, SMALL) for each in tags]
    twice = replace(one_run[0], runs=(PackRun(RUN, 0, 1), PackRun(RUN, 7, 1), PackRun("0" * 16, 0, 1)))
    return [manifest.to_bytes() for manifest in (*one_run, twice, add_identities(one_run[0], [0, 2]))]


def _read_record(data: bytes) -> str:
    record = PackRecord.from_bytes(data)
    assert PackRecord.from_bytes(record.to_bytes()).to_bytes() == record.to_bytes()
    assert re.fullmatch("[0-9a-f]{16}", record.run)
    assert (record.progress[1], record.samples > 0) == (len(record), len(record) > 0)
    if record.prefix is not None:
        _check_manifest(record.prefix)
    return "read"


@cache
def records() -> list[bytes]:
    empty = PackRecord(run=RUN, identity="0" * 64, source="a folder", mode="create")
    prefix = Manifest.from_bytes(manifests()[0])
    prefix = replace(prefix, runs=(PackRun(RUN, 0, len(prefix)),))
    some = replace(empty, prefix=prefix)
    names = np.frombuffer(random.Random(3).randbytes(16 * prefix.samples), np.uint8).reshape(-1, 16)
    committed = replace(some, state="committed", version=3, mode="append")
    deferred = replace(some, state="complete", mode="deferred", sources=names, job="1" * 16)
    compacted = replace(
        deferred, state="committed", version=2, committed_seconds=1, replaces=(PackRun("2" * 16, 3, 2),), job=""
    )
    return [record.to_bytes() for record in (empty, some, committed, deferred, compacted)]


def _read_framing(data: bytes) -> str:
    header = tensorfile.parse_header(data, len(data))
    assert header.header_bytes + (header.tensors[-1].end if header.tensors else 0) == len(data)
    if 0 not in (size for tensor in header.tensors for size in tensor.shape):  # safetensors refuses some empty tensors
        theirs = {name: (tuple(each["shape"]), bytes(each["data"])) for name, each in _theirs(data).items()}
        body = data[header.header_bytes :]
        assert theirs == {t.name: (t.shape, body[t.start : t.end]) for t in header.tensors}
    return "read"


FRAMING = (
    tensorfile.parse_length,
    tensorfile.parse_header,
    tensorfile._check_unique_keys,
    tensorfile._parse_natural,
    tensorfile._parse_tensor,
)
HEAD = (Head.parse, supersample._parse_metadata, supersample._sample_count)

FILES = {
    "framing": Reader(
        read=_read_framing,
        seeds=lambda: [*super_samples(), *manifests(), *records()],
        mutate=mutated_file,
        errors=(FormatError,),
    ),
    "head": Reader(
        read=_read_head, seeds=heads, mutate=_mutated_head, errors=(FormatError,), refusing=(*FRAMING, *HEAD)
    ),
    "super-sample": Reader(
        read=_read_super_sample,
        seeds=super_samples,
        mutate=mutated_file,
        errors=(FormatError, ChecksumError),
        refusing=(SuperSample.verify, Text.decode),
    ),
    "manifest": Reader(
        read=_read_manifest,
        seeds=manifests,
        mutate=mutated_file,
        errors=(FormatError, ChecksumError),
        refusing=(
            Manifest.from_bytes,
            manifests_module._parse_version,
            manifests_module._parse_rows,
            manifests_module._parse_text_tags,
            manifests_module._parse_runs,
        ),
    ),
    "pack record": Reader(
        read=_read_record,
        seeds=records,
        mutate=mutated_record,
        errors=(FormatError, ChecksumError),
        refusing=(
            PackRecord.from_bytes,
            PackRecord._check,
            record_module._check_match,
            record_module._parse_replaces,
        ),
    ),
}
