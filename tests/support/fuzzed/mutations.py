"""Hostile versions of files, with defects from the framing down to one number behind correct checksums.

A mutation changes one of four levels: the bytes; the JSON of the header, with its length corrected; the tensors, in a
file rebuilt around them, so that only their meaning is wrong; or whole parts, swapped between files. A file may then be
resealed: all checksums are corrected, so that wrong content does not look like damage.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stoker._base.checksum import crc32c
from stoker._format import manifest, tensorfile
from stoker._format.supersample import CHECKSUMS, SuperSample
from stoker._format.tensorfile import DTYPES, DType
from stoker._pack import record
from stoker.errors import StokerError

__all__ = ["Mutate", "mutated_bytes", "mutated_file", "mutated_json", "mutated_record", "resealed"]

Mutate = Callable[[bytes, Sequence[bytes], random.Random], bytes]
"""Returns a hostile version of a file, which may contain parts of other files of its kind."""

NUMBERS = [
    -1, 0, 1, 2, 3, 7, 8, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**47, 2**48, 2**53, 2**63 - 1, 2**63, 2**64 - 1,
    2**64, 10**30, 10**400, -0.0, 1.0, 1e308, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
TEXTS = [
    "", "U8", "I64", "F8_E4M3", "BF16", "C64", "(,f4", "int64", "ragged", "x" * 5000, "\0", "é", "\ud800", "-1", "1_0",
    "9" * 5000, "[" * 5000, "../../etc/passwd", "/etc/passwd", "s3://other/key", "\x1b[2J", "a\r\nHost: other",
]  # fmt: skip
SHAPES = [[2**47, 2**47, 0], [1] * 33, [2**31], [2**47, 2], [0], [True], [1.0], [-1], "1", 3]
NAMES = [
    "label", "caption", "caption.offsets", "__crc32c__", "__metadata__", "samples", "tag", "tag.offsets", "run_id",
    "prefix", "schema", "crc32c", "stoker", "name", "kind", "dtype", "shape", "classes",
]  # fmt: skip
WHOLE_NUMBERS = [0, 1, 2, 5, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
TOO_MANY_COLUMNS = json.dumps([{"name": f"c{number}", "kind": "text"} for number in range(1025)])
RAW_ENTRIES = [  # values that no dict has, and that json.dumps would not write
    b'"__metadata__":{}',
    b'"label":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
    b'"label":{"dtype":"U8","shape":[0],"data_offsets":[-0,0]}',
    b'"label":{"dtype":"U8","shape":[1e999],"data_offsets":[0,0]}',
    b'"label":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}',
    b'"\xff":0',
    b'"\xed\xa0\x80":0',
    b'"n' + b"a" * 20_000 + b'":0',
    b'"deep":' + b'{"a":' * 2000 + b"0" + b"}" * 2000,
    b'"deep":' + b"[" * 5000 + b"]" * 5000,
]


# Bytes.


def mutated_bytes(data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
    """Flip bits, cut, repeat, move or overwrite a range, or splice two files."""
    if not data:
        return rng.randbytes(rng.randrange(20))
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    action = rng.randrange(8)
    if action < 2:
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if action == 2:
        return data[:start]
    if action == 3:
        return data + rng.randbytes(rng.randrange(1, 20))
    if action == 4:
        return data[:start] + data[end:]
    if action == 5:
        return data[:end] + data[start:]
    if action == 6:
        return data[:start] + rng.randbytes(end - start) + data[end:]
    return data[:start] + rng.choice(pool)[start:]


# JSON.


def _deep(levels: int) -> Any:
    nested: Any = []
    for _ in range(levels):
        nested = [nested]
    return nested


def _hostile(rng: random.Random) -> Any:
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice(TEXTS)
    return rng.choice(
        [
            None, True, [], {}, _deep(rng.choice([50, 500])), [rng.choice(NUMBERS) for _ in range(rng.randrange(5))],
            [rng.choice(NUMBERS)] * 70,
            {rng.choice(NAMES): rng.choice(TEXTS)}, TOO_MANY_COLUMNS, "[3]", "{}",
            json.dumps([{"name": "x", "kind": "array", "dtype": "(,f4"}]),
        ]
    )  # fmt: skip


def _mutated_value(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one hostile change somewhere in it."""
    if rng.random() < 0.15 or not isinstance(value, dict | list) or not value:
        if type(value) is int and rng.random() < 0.5:
            return value + rng.choice([-8, -1, 1, 8, 2**32, 2**48])
        if isinstance(value, str) and value and rng.random() < 0.7:
            return _mutated_text(value, rng)
        return _hostile(rng)
    if isinstance(value, list):
        index = rng.randrange(len(value))
        changed = [*value[:index], _mutated_value(value[index], rng), *value[index + 1 :]]
        return rng.choice([changed, changed, value[:index] + value[index + 1 :], value + value[index : index + 1]])
    key = rng.choice(list(value))
    action = rng.randrange(6)
    if action == 0:
        return {k: v for k, v in value.items() if k != key}
    if action == 1:
        return {rng.choice(NAMES) if k == key else k: v for k, v in value.items()}
    if action == 2:
        return {**value, rng.choice([*NAMES, *TEXTS]): _hostile(rng)}
    if key == "shape" and rng.random() < 0.3:
        return {**value, key: rng.choice(SHAPES)}
    return {**value, key: _mutated_value(value[key], rng)}


def _mutated_text(text: str, rng: random.Random) -> str:
    try:
        inner = json.loads(text)
    except (ValueError, RecursionError):
        inner = None
    if isinstance(inner, list):  # the schema: JSON in JSON
        return json.dumps(_mutated_value(inner, rng), separators=(",", ":"))
    index = rng.randrange(len(text))
    return text[:index] + rng.choice(["", "0", "f", "\ud800", "é", " ", "-"]) + text[index + 1 :]


def mutated_json(text: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
    """Change a value, a key, the encoding or the spelling of a JSON text."""
    if text.startswith(b"{") and rng.random() < 0.15:
        comma = b"," if len(text.strip()) > 2 else b""
        return b"{" + rng.choice(RAW_ENTRIES) + comma + text[1:]
    try:
        value = json.loads(text)
        separators = (",", ":") if rng.random() < 0.9 else (", ", ": ")
        changed = json.dumps(_mutated_value(value, rng), ensure_ascii=rng.random() < 0.9, separators=separators)
    except (ValueError, RecursionError):
        return mutated_bytes(text, pool, rng)
    encoding = rng.choice(["utf-8"] * 20 + ["utf-16-le", "utf-8-sig"])
    return changed.encode("utf-8", "surrogatepass") if encoding == "utf-8" else changed.encode(encoding, "replace")


def _mutated_header(data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
    end = _header_end(data)
    text = mutated_json(data[8:end], pool, rng)
    lengths = [0, 1, max(0, len(text) - 1), len(data), 2**20, 2**63, 2**64 - 1]
    length = len(text) if rng.random() < 0.95 else rng.choice(lengths)
    return struct.pack("<Q", length) + text + data[end:]


def _header_end(data: bytes) -> int:
    return 8 + int(struct.unpack_from("<Q", data)[0]) if len(data) >= 8 else len(data)


# Tensors.


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor and its bytes."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    content: bytes

    def filled(self, content: bytes) -> _Part:
        """Return the part with other content, with the first dimension that this needs."""
        size_bytes = self.dtype.size_bytes * int(np.prod(self.shape[1:]))
        rows = len(content) // size_bytes if size_bytes else 0
        return replace(self, shape=(rows, *self.shape[1:]), content=content[: rows * size_bytes])


def _parse_parts(data: bytes) -> tuple[dict[str, str], list[_Part]]:
    header = tensorfile.parse_header(data, len(data))
    body = data[header.header_bytes :]
    return dict(header.metadata), [_Part(t.name, t.dtype, t.shape, body[t.start : t.end]) for t in header.tensors]


def _join_parts(metadata: dict[str, str], parts: Sequence[_Part]) -> bytes:
    tensors = tensorfile.lay_out((part.name, part.dtype, part.shape) for part in parts)
    return tensorfile.encode_header(metadata, tensors) + b"".join(part.content for part in parts)


def _mutated_numbers(part: _Part, rng: random.Random) -> _Part:
    """Set, swap, reverse or repeat numbers."""
    holder = np.dtype(f"<u{part.dtype.size_bytes}")
    numbers = np.frombuffer(part.content, holder).copy()
    if not len(numbers):
        return part
    first, second = (rng.randrange(len(numbers)) for _ in range(2))
    action = rng.randrange(6)
    if action < 3:
        numbers[first] = rng.choice(WHOLE_NUMBERS) & (256**holder.itemsize - 1)
    elif action == 3:
        numbers[[first, second]] = numbers[[second, first]]
    elif action == 4:
        numbers = numbers[::-1]
    else:
        numbers[first:] = numbers[second]
    return replace(part, content=numbers.tobytes())


def _mutated_part(part: _Part, parts: Sequence[_Part], rng: random.Random) -> _Part:
    """Change a tensor's numbers, length, dimensions, type, name or content."""
    action = rng.randrange(10)
    if action < 5:
        return _mutated_numbers(part, rng)
    if action == 5:  # longer or shorter by up to two rows
        row = max(1, len(part.content) // max(1, part.shape[0] if part.shape else 1))
        return part.filled(rng.choice([part.content[:-row], part.content + part.content[:row], part.content * 2, b""]))
    if action == 6:
        shape = rng.choice([(len(part.content) // part.dtype.size_bytes,), (1, *part.shape), (*part.shape, 1)])
        return replace(part, shape=shape) if len(shape) < 32 else part
    if action == 7:
        return replace(part, dtype=rng.choice(list(DTYPES.values()))).filled(part.content)
    if action == 8:
        return replace(part, name=rng.choice([*NAMES, *(other.name for other in parts)]))
    return part.filled(rng.choice(parts).content)


def _mutated_parts(data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
    """Change tensors or metadata, and build a file that is valid as safetensors."""
    metadata, parts = _parse_parts(data)
    other_metadata, others = _parse_parts(rng.choice(pool))
    action = rng.randrange(9)
    index = rng.randrange(len(parts)) if parts else 0
    if not parts or action == 0:
        metadata = other_metadata
    elif action == 1:
        parts = [*parts[:index], *parts[index + 1 :]]
    elif action == 2:
        rng.shuffle(parts)
    elif action == 3:
        same = [part for part in others if part.name == parts[index].name]
        parts[index] = rng.choice(same or others or parts)
    elif action == 4:  # nothing of anything
        parts = [part.filled(b"") for part in parts]
    elif action == 5:
        name = rng.choice(list(metadata) or [""])
        metadata[name] = rng.choice([other_metadata.get(name, ""), _mutated_text(metadata.get(name) or " ", rng)])
    else:
        parts[index] = _mutated_part(parts[index], parts, rng)
    return _join_parts(metadata, parts)


# Files.


def mutated_file(data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
    """Change a file on any level, sometimes on two, and reseal most."""
    for _ in range(1 if rng.random() < 0.8 else 2):
        mutate = rng.choice([mutated_bytes, _mutated_header, _mutated_header, _mutated_parts, _mutated_parts])
        try:
            data = mutate(data, pool, rng)
        except (StokerError, UnicodeError):  # too damaged to be parsed, or impossible to write
            data = mutated_bytes(data, pool, rng)
    return resealed(data) if rng.random() < 0.7 else data


def mutated_record(data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
    """Change a pack record, the manifest in it, or the rows that it replaces."""
    if rng.random() < 0.5:
        return mutated_file(data, pool, rng)
    try:
        metadata, parts = _parse_parts(data)
        if "replaces" in metadata and rng.random() < 0.5:
            rows = _mutated_value(json.loads(metadata["replaces"]), rng)
            return resealed(_join_parts({**metadata, "replaces": json.dumps(rows)}, parts))
        prefixes = [_parse_parts(other)[1][0].content for other in pool]
        (part,) = (part for part in parts if part.name == "prefix")
        changed = mutated_file(part.content or rng.choice(prefixes), prefixes, rng)
        return resealed(_join_parts(metadata, [part.filled(changed), *(p for p in parts if p is not part)]))
    except (StokerError, ValueError, IndexError):
        return mutated_file(data, pool, rng)


def resealed(data: bytes) -> bytes:
    """Return the file with the correct checksums of its content; unchanged if they cannot be determined."""
    try:
        header = tensorfile.parse_header(data, len(data))
    except StokerError:
        return data
    said, body = header.metadata.get("crc32c", ""), data[header.header_bytes :]
    if "stoker" in header.metadata:
        data, body = _values_resealed(data, body)
        right = f"{crc32c(body):08x}"
    elif "stoker_digest" in header.metadata:
        right = f"{crc32c(body):08x}"
    elif "stoker_manifest" in header.metadata:
        right = manifest._checksum(header.metadata, header.tensors, body)
    else:
        right = record._checksum(header.metadata, body)
    was, becomes = (json.dumps(text).encode() for text in (said, right))
    text = data[: header.header_bytes].replace(b'"crc32c":' + was, b'"crc32c":' + becomes)
    text = text.replace(b'"crc32c": ' + was, b'"crc32c": ' + becomes)
    if len(text) != header.header_bytes:
        text = struct.pack("<Q", len(text) - 8) + text[8:]
    return text + data[header.header_bytes :]


def _values_resealed(data: bytes, body: bytes) -> tuple[bytes, bytes]:
    try:
        head = SuperSample(data).head
    except StokerError:
        return data, body
    checksums = head.checksums.copy()
    for column, name in enumerate(head.schema):
        for row in range(head.samples):
            start, end = head.row_range(name, row, row + 1)
            checksums[row, column] = crc32c(data[start:end])
    start = head.starts[CHECKSUMS]
    data = data[:start] + checksums.tobytes() + data[start + checksums.nbytes :]
    return data, data[head.header_bytes :]
