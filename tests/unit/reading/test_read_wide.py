"""Reading a few of many small columns: only their bytes and the header, verified by the header's checksums."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stoker
from stoker import Schema
from stoker._base.checksum import combine_crc32c, crc32c
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.gather import gather
from stoker._fetch.super_samples import SuperSampleReader, wide_parts
from stoker._format import supersample
from stoker._format.manifest import Manifest
from stoker._format.supersample import COLUMN_CHECKSUMS, MIN_WIDE_COLUMNS, Head, is_wide
from stoker._format.wide import fixed_layout, parse_checksums
from stoker._memory.ring import Ring
from stoker.abc import ObjectRef
from stoker.errors import ChecksumError, StokerError
from stoker.testing import run_virtual
from support.faulty_store import FaultyStore, StoreProfile
from support.packed_objects import packed_objects

DTYPES = ("int8", "float16", "float32", "float64")
NARROW = {f"f{number:02}": stoker.Array(DTYPES[number % 4]) for number in range(MIN_WIDE_COLUMNS)}
SCHEMA = Schema({"wide": stoker.Array("uint8", (100,)), "text": stoker.Text(), **NARROW})
COUNTS = [1500, 1750]
WANTED = ("f31", "f03", "wide")


def sample_of(number: int) -> dict[str, Any]:
    values = {
        name: column.dtype.holder.type((number + place) % 100) for place, (name, column) in enumerate(NARROW.items())
    }
    return {"wide": np.full(100, number % 251, np.uint8), "text": "x" * (number % 5), **values}


SAMPLES = [sample_of(number) for number in range(sum(COUNTS))]
MANIFEST, OBJECTS = packed_objects(SCHEMA, SAMPLES, COUNTS)


def reader(
    *columns: str,
    objects: dict[str, bytes] | None = None,
    script: Callable[[int, str], str | None] | None = None,
    manifest: Manifest = MANIFEST,
) -> tuple[SuperSampleReader, FaultyStore]:
    """Return a reader of some columns, and its store."""
    store = FaultyStore(objects or OBJECTS, profile=StoreProfile(tail_sigma=0.0))
    store.script = script
    ring = Ring(3, manifest.largest_bytes)
    fetcher = Fetcher(store, ring=ring, rng=random.Random(0))
    return SuperSampleReader(manifest, {name: SCHEMA[name] for name in columns}, fetcher, ring), store


def check(found: SuperSampleReader, row: int, slot: int) -> None:
    """Compare every value of a super-sample in a slot."""
    rows = np.arange(COUNTS[row])
    batch = gather(found.locate([slot], np.zeros_like(rows), rows), found.columns)
    first = sum(COUNTS[:row])
    for name, values in batch.items():
        wanted = [SAMPLES[first + number][name] for number in rows.tolist()]
        assert isinstance(values, np.ndarray)
        assert np.array_equal(values, np.stack(wanted))


def test_only_the_header_and_the_wanted_columns_are_read() -> None:
    async def go() -> None:
        found, store = reader(*WANTED)
        for row in range(len(COUNTS)):
            check(found, row, await found.fetch(row))
        parts = [part for row in range(len(COUNTS)) for part in wide_parts(MANIFEST, WANTED, row)]
        assert sorted((start, end) for _, start, end in store.sent_ranges) == sorted((p.start, p.end) for p in parts)
        assert found.saving > 0.5

    run_virtual(go())


def test_the_layout_is_that_of_the_head() -> None:
    for row, samples in enumerate(COUNTS):
        data = OBJECTS[MANIFEST.key(row)]
        head = Head.parse(data, len(data))
        layout = fixed_layout(SCHEMA, samples, head.head_bytes)
        assert layout.header_bytes == head.header_bytes
        fixed = {name: head.row_range(name, 0, samples) for name, column in SCHEMA.items() if column.is_fixed}
        assert layout.ranges == fixed


def test_a_column_whose_length_varies_is_read_with_the_head() -> None:
    async def go() -> None:
        found, store = reader("f03", "text")
        await found.fetch(0)
        head_bytes = int(MANIFEST.rows.head_bytes[0])
        assert (MANIFEST.key(0), 0, head_bytes) in store.sent_ranges

    run_virtual(go())


def test_damage_in_a_column_or_the_header_is_found() -> None:
    layout = fixed_layout(SCHEMA, COUNTS[0], int(MANIFEST.rows.head_bytes[0]))
    for place in (layout.header_bytes - 40, layout.ranges["f03"][0], layout.ranges["wide"][1] - 1):

        async def go(place: int = place) -> None:
            data = bytearray(OBJECTS[MANIFEST.key(0)])
            data[place] ^= 1
            found, _ = reader(*WANTED, objects=OBJECTS | {MANIFEST.key(0): bytes(data)})
            with pytest.raises(StokerError, match="corrupt"):
                await found.fetch(0)

        run_virtual(go())


def test_damage_on_the_way_is_read_again() -> None:
    async def go() -> None:
        found, store = reader(*WANTED, script=lambda number, _: "corrupt" if number == 0 else None)
        check(found, 0, await found.fetch(0))
        assert len(store.sent_ranges) == 2 * len(wide_parts(MANIFEST, WANTED, 0))

    run_virtual(go())


def test_objects_without_these_checksums_are_read_with_their_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supersample, "is_wide", lambda _: False)  # as earlier versions packed
    manifest, objects = packed_objects(SCHEMA, SAMPLES, COUNTS)

    async def go() -> None:
        found, store = reader(*WANTED, objects=objects, manifest=manifest)
        for row in range(len(COUNTS)):
            check(found, row, await found.fetch(row))
        assert (manifest.key(0), 0, int(manifest.rows.head_bytes[0])) in store.sent_ranges

    run_virtual(go())


def test_a_header_that_is_not_the_packed_one_is_refused() -> None:
    layout = fixed_layout(SCHEMA, COUNTS[0], int(MANIFEST.rows.head_bytes[0]))
    data, ref = OBJECTS[MANIFEST.key(0)], MANIFEST.ref(0)
    checksums = parse_checksums(memoryview(data)[: layout.header_bytes], layout, ref)
    assert checksums is not None
    assert list(checksums) == list(layout.ranges)
    other = OBJECTS[MANIFEST.key(1)][: layout.header_bytes]
    with pytest.raises(ChecksumError, match="the manifest says"):
        parse_checksums(memoryview(other), layout, ref)
    with pytest.raises(ChecksumError, match="cannot be read"):
        parse_checksums(memoryview(bytes(layout.header_bytes)), layout, ref)


@pytest.mark.parametrize("checksums", [7, ["00000000"], "0" * 8, "g" * 8 * (len(NARROW) + 1)])
def test_a_header_with_other_than_checksums_is_refused(checksums: object) -> None:
    layout = fixed_layout(SCHEMA, COUNTS[0], int(MANIFEST.rows.head_bytes[0]))
    text = json.dumps({"__metadata__": {"crc32c": "0", "schema": SCHEMA.to_json(), COLUMN_CHECKSUMS: checksums}})
    header = bytes(8) + text.encode()
    size_bytes = len(header) + 9
    ref = ObjectRef(key="k", size_bytes=size_bytes, crc32c=combine_crc32c(crc32c(header), 0, 9))
    with pytest.raises(ChecksumError, match="checksum of each column"):
        parse_checksums(memoryview(header), layout, ref)


def test_only_headers_of_many_small_columns_have_their_checksums() -> None:
    few = Schema(dict(list(NARROW.items())[: MIN_WIDE_COLUMNS - 1]))
    assert not is_wide(few)
    _, objects = packed_objects(few, [{name: SAMPLES[0][name] for name in few}], [1])
    for data, is_there in ((next(iter(objects.values())), False), (OBJECTS[MANIFEST.key(0)], True)):
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert (COLUMN_CHECKSUMS in header["__metadata__"]) is is_there


def test_rows_of_many_narrow_columns_are_delivered_in_their_order() -> None:
    async def go() -> None:
        found, _ = reader(*NARROW)
        slots = [await found.fetch(row) for row in range(len(COUNTS))]
        rng = np.random.default_rng(0)
        which = rng.integers(0, len(COUNTS), 500)
        rows = rng.integers(0, min(COUNTS), 500)
        located = found.locate(slots, which, rows)
        assert located.super_samples.tolist() == which.tolist()
        assert located.rows.tolist() == rows.tolist()
        numbers = np.array([0, COUNTS[0]])[which] + rows
        for name, values in gather(located, found.columns).items():
            assert isinstance(values, np.ndarray)
            assert values.tolist() == [SAMPLES[number][name] for number in numbers.tolist()]

    run_virtual(go())
