"""Bytes from anywhere: a reader gives an equal object or a typed error; never a crash, a hang or a large allocation.

Mutations are of three kinds: of bytes (bit flips, cuts, appended and repeated stretches), of the header's JSON (values
replaced by hostile ones, keys removed, repeated or added) and of the data's numbers. They are drawn from a seed.
"""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.numpy
import safetensors.torch
from hypothesis import example, given
from hypothesis import strategies as st

from stoker.errors import ChecksumError, FormatError
from stoker.manifest import Manifest
from stoker.schema import Array, Schema, Text
from stoker.supersample import Head, SuperSample
from support.supersamples import EVERY_KIND, built, manifest_of, samples_of

SMALL = Schema({"label": Array("int64"), "caption": Text()})
SUPER_SAMPLES = [built(schema, samples_of(schema, count))[0] for schema, count in ((SMALL, 2), (EVERY_KIND, 4))]
MANIFESTS = [manifest_of(tags, SMALL).to_bytes() for tags in (["0123456789abcdef" * 2] * 3, ["17", "18"], ["x", "ÿ"])]

NUMBERS = [
    -1, 0, 1, 2, 3, 7, 8, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**47, 2**48, 2**53, 2**63 - 1, 2**63, 2**64 - 1,
    2**64, 10**30, 0.0, 1.0, 1e308, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
TEXTS = [
    "",
    "U8",
    "F8_E4M3",
    "BF16",
    "C64",
    "(,f4",
    "x" * 5000,
    "\0",
    "é",
    "\ud800",
    "-1",
    "1_0",
    "9" * 5000,
    "[" * 5000,
]
NAMES = ["label", "caption", "caption.offsets", "__crc32c__", "__metadata__", "samples", "tag", "tag.offsets", "run_id"]


def deep(levels: int) -> Any:
    nested: Any = []
    for _ in range(levels):
        nested = [nested]
    return nested


def hostile_value(rng: random.Random) -> Any:
    return rng.choice(
        [
            *rng.sample(NUMBERS, 4), *rng.sample(TEXTS, 4), None, True, [], {}, deep(50),
            [rng.choice(NUMBERS) for _ in range(rng.randrange(5))], [rng.choice(NUMBERS)] * 70,
            {rng.choice(NAMES): rng.choice(TEXTS)}, json.dumps([{"name": "x", "kind": "array", "dtype": "(,f4"}]),
        ]
    )  # fmt: skip


def mutate_json(value: Any, rng: random.Random) -> Any:
    """Return ``value`` with one hostile change somewhere in it."""
    if rng.random() < 0.15 or not isinstance(value, dict | list) or not value:
        if type(value) is int and rng.random() < 0.5:
            return value + rng.choice([-8, -1, 1, 8, 2**32, 2**48])
        if isinstance(value, str) and value and rng.random() < 0.7:
            return mutated_text(value, rng)
        return hostile_value(rng)
    if isinstance(value, list):
        index = rng.randrange(len(value))
        changed = [*value[:index], mutate_json(value[index], rng), *value[index + 1 :]]
        return rng.choice([changed, changed, value[:index] + value[index + 1 :], value + value[index : index + 1]])
    key = rng.choice(list(value))
    action = rng.randrange(6)
    if action == 0:
        return {k: v for k, v in value.items() if k != key}
    if action == 1:
        return {rng.choice(NAMES) if k == key else k: v for k, v in value.items()}
    if action == 2:
        return {**value, rng.choice([*NAMES, *TEXTS]): hostile_value(rng)}
    return {**value, key: mutate_json(value[key], rng)}


def mutated_text(text: str, rng: random.Random) -> str:
    try:
        inner = json.loads(text)
    except ValueError:
        inner = None
    if isinstance(inner, list):  # the schema: JSON in JSON
        return json.dumps(mutate_json(inner, rng))
    index = rng.randrange(len(text))
    return text[:index] + rng.choice(["", "0", "f", "\ud800", "é", " ", "-"]) + text[index + 1 :]


def mutate_header(data: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    header = data[8 : 8 + length]
    if rng.random() < 0.1:  # a key twice, which no dict can say
        entry = (
            b'"__metadata__":{}' if rng.random() < 0.5 else b'"label":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
        )
        text = b"{" + entry + b"," + header[1:]
    else:
        changed = mutate_json(json.loads(header), rng)
        text = json.dumps(changed, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    encoding = rng.choice(["utf-8"] * 20 + ["utf-16-le", "utf-8-sig"])
    if encoding != "utf-8":
        text = text.decode("utf-8", "replace").encode(encoding)
    length = len(text) if rng.random() < 0.95 else rng.choice([0, 1, len(text) - 1, len(data), 2**20, 2**63, 2**64 - 1])
    return struct.pack("<Q", length) + text + data[8 + len(header) :]


def mutate_numbers(data: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    width = rng.choice(["<I", "<q"])
    at = 8 + length + rng.randrange(max(1, (len(data) - 8 - length) // 4)) * 4
    changed = bytearray(data)
    if at + struct.calcsize(width) <= len(data):
        values = (0, 1, 5, 2**31 - 1) if width == "<I" else (-1, 1, 2**31, 2**62, -(2**63))
        struct.pack_into(width, changed, at, rng.choice(values))
    return bytes(changed)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return rng.choice(
        [
            bytes(changed),
            data[:start],
            data + rng.randbytes(rng.randrange(1, 20)),
            data[:start] + data[end:],
            data[:end] + data[start:],
            data[:start] + rng.randbytes(end - start) + data[end:],
        ]
    )


MUTATORS: list[Callable[[bytes, random.Random], bytes]] = [mutate_header, mutate_header, mutate_numbers, mutate_bytes]


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = rng.choice(MUTATORS)(data, rng)
    return changed if rng.random() < 0.8 or len(changed) < 9 else mutate_bytes(changed, rng)


def read_super_sample(data: bytes) -> str:
    """Read all there is to read, and return how it ended."""
    try:
        opened = SuperSample(data)
    except FormatError:
        return "FormatError"
    for name in opened.head.schema:
        opened.column(name)
    try:
        opened.verify()
    except ChecksumError:
        pass
    else:
        safetensors.numpy.load(data) if is_plain(opened) else safetensors.torch.load(data)
    try:
        for row in range(len(opened)):
            opened[row]
    except FormatError:  # text that is not UTF-8
        return "FormatError"
    for name in opened.head.schema:
        start, end = opened.head.row_range(name, 0, len(opened))
        try:
            opened.head.verify_rows(name, 0, memoryview(data)[start:end])
        except ChecksumError:
            return "ChecksumError"
    return "read"


def is_plain(opened: SuperSample) -> bool:
    """Return whether numpy has all of the dtypes."""
    return not any(column.dtype.is_bits for column in opened.head.schema.values())


def read_manifest(data: bytes) -> str:
    """Read all there is to read, and return how it ended."""
    try:
        manifest = Manifest.from_bytes(data)
    except (FormatError, ChecksumError) as error:
        return type(error).__name__
    safetensors.torch.load(data)
    assert len({manifest.ref(row).key for row in range(len(manifest))}) <= len(manifest)
    assert manifest.samples * 4 <= manifest.size_bytes
    return "read"


def ends(read: Callable[[bytes], str], originals: list[bytes], count: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    return Counter(read(mutated(rng.choice(originals), rng)) for _ in range(count))


@pytest.mark.parametrize("seed", range(5))
def test_a_mutated_super_sample_is_read_or_refused_and_what_is_read_safetensors_reads(seed: int) -> None:
    ended = ends(read_super_sample, SUPER_SAMPLES, 4000, seed)
    assert ended["FormatError"] > 2000
    assert ended["ChecksumError"] > 50  # the mutations reach behind the header's checks too


@pytest.mark.parametrize("seed", range(5))
def test_a_mutated_manifest_is_refused_unless_nothing_of_it_changed(seed: int) -> None:
    rng = random.Random(seed)
    ended: Counter[str] = Counter()
    for _ in range(4000):
        original = rng.choice(MANIFESTS)
        changed = mutated(original, rng)
        ended[how := read_manifest(changed)] += 1
        if how == "read":
            assert Manifest.from_bytes(changed).to_bytes() == original
    assert ended["FormatError"] > 2000
    assert ended["ChecksumError"] > 100


@pytest.mark.parametrize("data", SUPER_SAMPLES[:1])
def test_a_super_sample_cut_anywhere_is_a_format_error(data: bytes) -> None:
    for end in range(len(data)):
        with pytest.raises(FormatError):
            SuperSample(data[:end])
        with pytest.raises(FormatError):
            SuperSample(data[end + 1 :])


@pytest.mark.parametrize("data", MANIFESTS)
def test_a_manifest_cut_anywhere_is_a_format_error(data: bytes) -> None:
    for end in range(len(data)):
        with pytest.raises(FormatError):
            Manifest.from_bytes(data[:end])
        with pytest.raises(FormatError):
            Manifest.from_bytes(data[end + 1 :])


@pytest.mark.parametrize("data", SUPER_SAMPLES)
def test_a_head_is_opened_from_any_prefix_that_holds_it_and_refused_from_any_other(data: bytes) -> None:
    needed = SuperSample(data).head.head_bytes
    for end in range(0, len(data), 7):
        if end >= needed:
            assert Head.parse(data[:end], len(data)).head_bytes == needed
        else:
            with pytest.raises(FormatError):
                Head.parse(data[:end], len(data))


@pytest.mark.parametrize("read", [read_super_sample, read_manifest])
@pytest.mark.parametrize("claim", [2**20, 2**31, 2**40, 2**47, 2**63])
def test_a_huge_count_allocates_nothing(read: Callable[[bytes], str], claim: int) -> None:
    """A lying object must not cost more than itself; the allowance is for what JSON's objects take."""
    original = SUPER_SAMPLES[0] if read is read_super_sample else MANIFESTS[0]
    (length,) = struct.unpack_from("<Q", original)
    entries = json.loads(original[8 : 8 + length])
    for name in [name for name in entries if name != "__metadata__"]:
        for field, value in (("shape", [claim]), ("shape", [claim, 0]), ("data_offsets", [0, claim])):
            text = json.dumps({**entries, name: {**entries[name], field: value}}).encode()
            lying = struct.pack("<Q", len(text)) + text + original[8 + length :]
            tracemalloc.start()
            try:
                assert read(lying) == "FormatError"
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < 8 * len(lying) + 100_000


@pytest.mark.parametrize("read", [read_super_sample, read_manifest])
def test_no_mutation_allocates_much_more_than_the_object(read: Callable[[bytes], str]) -> None:
    originals = SUPER_SAMPLES if read is read_super_sample else MANIFESTS
    rng = random.Random(99)
    for data in [mutated(rng.choice(originals), rng) for _ in range(500)]:
        tracemalloc.start()
        try:
            read(data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 16 * len(data) + 100_000


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xff" * 8)
@example(b"\0" * 8)
@example(struct.pack("<Q", 2) + b"{}")
def test_arbitrary_bytes_are_a_format_error(data: bytes) -> None:
    for whole in (data, struct.pack("<Q", len(data)) + data):
        with pytest.raises(FormatError):
            SuperSample(whole)
        with pytest.raises(FormatError):
            Manifest.from_bytes(whole)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, st.dictionaries(st.sampled_from(["stoker", "stoker_manifest", "schema", "run", "crc32c"]), st.text()))
def test_arbitrary_json_as_a_header_is_refused(value: Any, metadata: dict[str, str]) -> None:
    header = (
        {**value, "__metadata__": {"stoker": "1", "stoker_manifest": "1", **metadata}} if type(value) is dict else value
    )
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text
    for read in (SuperSample, Manifest.from_bytes):
        with pytest.raises((FormatError, ChecksumError)):
            read(data)
