"""Reading only the wanted columns of super-samples: the same values, fewer bytes, every one of them verified."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker import FetchConfig, Schema
from stoker._fetch.config import GAP_BYTES
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.gather import gather
from stoker._fetch.super_samples import SuperSampleReader, column_parts
from stoker._format.manifest import Manifest
from stoker._format.supersample import Head
from stoker._memory.ring import Ring
from stoker.abc import ObjectRef, Tier
from stoker.errors import FetchError, FormatError
from stoker.testing import run_virtual
from stoker_torch import Loader
from support.faulty_store import FaultyStore, StoreProfile
from support.packed_objects import packed_objects, value_at
from support.supersamples import built

SCHEMA = Schema(
    {
        "label": stoker.Array("int64"),
        "image": stoker.Array("uint8", (40, 50)),
        "depth": stoker.Array("float32", (100,)),
        "sound": stoker.Bytes(),
        "text": stoker.Text(),
    }
)


def sample_of(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {
        "label": number,
        "image": rng.integers(0, 256, (40, 50), np.uint8),
        "depth": rng.random(100, np.float32),
        "sound": rng.bytes(number % 7 * 100),
        "text": f"sample {number}" * (number % 3),
    }


SAMPLES = [sample_of(number) for number in range(60)]
COUNTS = [20, 25, 15]
MANIFEST, OBJECTS = packed_objects(SCHEMA, SAMPLES, COUNTS)
HEADS = [Head.parse(OBJECTS[MANIFEST.key(row)], len(OBJECTS[MANIFEST.key(row)])) for row in range(3)]


class Bench:
    """A store with the objects, and a reading of some columns of them."""

    def __init__(
        self,
        *columns: str,
        script: Callable[[int, str], str | None] | None = None,
        manifest: Manifest = MANIFEST,
        config: FetchConfig | None = None,
        tiers: Sequence[Tier] = (),
    ) -> None:
        self.store = FaultyStore(OBJECTS, profile=StoreProfile(tail_sigma=0.0))
        self.store.script = script
        self.ring = Ring(4, MANIFEST.largest_bytes)
        self.fetcher = Fetcher(self.store, ring=self.ring, rng=random.Random(0), config=config, tiers=tiers)
        self.columns = {name: SCHEMA[name] for name in columns}
        self.reading = SuperSampleReader(manifest, self.columns, self.fetcher, self.ring)

    async def check(self, row: int) -> None:
        """Read a super-sample, and compare every value of it."""
        slot = await self.reading.fetch(row)
        rows = np.arange(COUNTS[row])
        picked = self.reading.locate([slot], np.zeros_like(rows), rows)
        assert picked.super_samples.tolist() == [row] * COUNTS[row]
        found = gather(picked, self.columns)
        first = sum(COUNTS[:row])
        for name, values in found.items():
            assert len(values) == COUNTS[row]
            for place in range(COUNTS[row]):
                wanted = SAMPLES[first + place][name]
                assert value_at(values, place) == (wanted.tolist() if isinstance(wanted, np.ndarray) else wanted)
        self.ring.release(slot)
        assert self.ring.free == self.ring.slots

    @property
    def bytes_by_key(self) -> dict[str, int]:
        read: dict[str, int] = {}
        for key, start, end in self.store.sent_ranges:
            read[key] = read.get(key, 0) + end - start
        return read


@pytest.mark.parametrize(
    "columns",
    [("label",), ("image",), ("depth", "text"), ("sound",), ("text", "label"), ("image", "sound"), (*SCHEMA,)],
)
def test_any_columns_have_the_values_that_were_packed(columns: tuple[str, ...]) -> None:
    async def main() -> None:
        bench = Bench(*columns)
        for row in range(3):
            await bench.check(row)

    run_virtual(main())


def test_columns_that_lie_in_the_head_take_one_request_for_the_head_alone() -> None:
    async def main() -> None:
        bench = Bench("label")
        for row in range(3):
            await bench.check(row)
        assert bench.store.sent_ranges == [(MANIFEST.key(row), 0, HEADS[row].head_bytes) for row in range(3)]
        assert bench.reading.saving > 0.9

    run_virtual(main())


def test_bytes_of_the_other_columns_are_not_read() -> None:
    async def main() -> None:
        bench = Bench("text")
        for row in range(3):
            await bench.check(row)
            start, end = HEADS[row].row_range("text", 0, COUNTS[row])
            assert bench.bytes_by_key[MANIFEST.key(row)] == HEADS[row].head_bytes + end - start

    run_virtual(main())


def test_from_the_second_object_on_all_is_read_at_once_where_little_would_be_saved() -> None:
    async def main() -> None:
        bench = Bench("image", "label", "depth")
        for row in range(3):
            await bench.check(row)
        assert 0.0 < bench.reading.saving < 0.3
        ranges = bench.store.sent_ranges
        assert ranges[0] == (MANIFEST.key(0), 0, HEADS[0].head_bytes)
        assert ranges[-2:] == [(MANIFEST.key(row), 0, len(OBJECTS[MANIFEST.key(row)])) for row in (1, 2)]

    run_virtual(main())


def test_all_columns_are_always_one_request() -> None:
    async def main() -> None:
        bench = Bench(*SCHEMA)
        await bench.check(0)
        assert len(bench.store.sent_ranges) == 1

    run_virtual(main())


def test_urgent_columns_are_read_in_parallel_ranges() -> None:
    async def main() -> None:
        config = FetchConfig(split_parts=3, split_min_bytes=1000)
        bench = Bench("image", config=config)
        slot = await bench.reading.fetch(0, urgent=True)
        bench.ring.release(slot)
        image = HEADS[0].row_range("image", 0, COUNTS[0])
        ranges = sorted((start, end) for _, start, end in bench.store.sent_ranges[1:])
        assert len(ranges) == 3
        assert (ranges[0][0], ranges[-1][1]) == image
        assert [start for start, _ in ranges[1:]] == [end for _, end in ranges[:-1]]
        assert bench.store.peak_active == 3

    run_virtual(main())


def test_columns_that_touch_or_nearly_do_are_one_range() -> None:
    wide = Schema({"a": stoker.Array("uint8", (100_000,)), "b": stoker.Bytes(), "c": stoker.Bytes()})
    for gap_bytes, parts in ((GAP_BYTES, 1), (GAP_BYTES + 1, 2)):
        body, _ = built(wide, [{"a": np.zeros(100_000, np.uint8), "b": bytes(gap_bytes), "c": b"end"}])
        head = Head.parse(body, len(body))
        found = column_parts(head, ["c", "a"])
        assert len(found) == parts
        assert all(part.offset == part.start for part in found)
        assert (found[0].start, found[-1].end) == (head.starts["a"], len(body))
    assert column_parts(head, []) == []


def test_a_column_without_a_single_byte_needs_no_request() -> None:
    body, _ = built(Schema({"x": stoker.Bytes(), "y": stoker.Bytes()}), [{"x": b"", "y": b"something"}])
    assert column_parts(Head.parse(body, len(body)), ["x"]) == []


@given(sizes=st.lists(st.sampled_from([0, 0, 1, 9, GAP_BYTES, GAP_BYTES + 1]), min_size=1, max_size=6), data=st.data())
@settings(max_examples=60, deadline=None)
def test_only_narrow_gaps_between_requested_columns_are_bridged(sizes: list[int], data: st.DataObject) -> None:
    names = [f"c{number}" for number in range(len(sizes))]
    wanted = data.draw(st.lists(st.sampled_from(names), unique=True))
    sample = {name: bytes(size) for name, size in zip(names, sizes, strict=True)}
    body, _ = built(Schema({name: stoker.Bytes() for name in names}), [sample])
    head = Head.parse(body, len(body))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(head.row_range(name, 0, 1) for name in wanted if sample[name]):
        is_near = merged and start - merged[-1][1] <= GAP_BYTES
        merged.append((merged.pop()[0] if is_near else start, end))
    found = column_parts(head, wanted)
    assert [(part.offset, part.start, part.end) for part in found] == [(start, start, end) for start, end in merged]


@pytest.mark.parametrize("request_number", [0, 1])
def test_spoilt_bytes_of_head_or_column_are_read_again(request_number: int) -> None:
    async def main() -> None:
        bench = Bench("image", script=lambda number, key: "corrupt" if number == request_number else None)
        await bench.check(1)
        assert bench.fetcher.stats.checksum_failures == 1
        assert len(bench.store.sent_ranges) == 3

    run_virtual(main())


@pytest.mark.parametrize("spoilt", ["head", "image"])
def test_bytes_spoilt_at_rest_are_an_error_that_names_the_object_and_leaves_no_slot_taken(spoilt: str) -> None:
    async def main() -> None:
        bench = Bench("image")
        key = MANIFEST.key(2)
        body = bytearray(OBJECTS[key])
        body[HEADS[2].starts["label" if spoilt == "head" else "image"] + 5] ^= 1
        bench.store.objects[key] = bytes(body)
        with pytest.raises(FetchError, match=key):
            await bench.reading.fetch(2)
        assert bench.ring.free == bench.ring.slots

    run_virtual(main())


def test_damage_in_unrequested_columns_is_ignored() -> None:
    async def main() -> None:
        bench = Bench("depth")
        key = MANIFEST.key(2)
        body = bytearray(OBJECTS[key])
        body[HEADS[2].starts["sound"]] ^= 1
        bench.store.objects[key] = bytes(body)
        await bench.check(2)

    run_virtual(main())


@pytest.mark.parametrize("columns", [("image",), (*SCHEMA,)])
def test_an_object_of_another_schema_than_the_manifest_s_is_refused_and_leaves_no_slot_taken(
    columns: tuple[str, ...],
) -> None:
    async def main() -> None:
        says = replace(MANIFEST, schema=Schema({**SCHEMA, "label": stoker.Array("uint64")}))
        bench = Bench(*columns, manifest=says)
        with pytest.raises(FormatError, match=MANIFEST.key(0)):
            await bench.reading.fetch(0)
        assert bench.ring.free == bench.ring.slots

    run_virtual(main())


def test_a_nearer_place_that_holds_the_object_saves_every_request() -> None:
    class Near:
        name = "near"

        async def read(self, ref: ObjectRef, into: memoryview) -> bool:
            into[:] = OBJECTS[ref.key]
            return True

        def offer(self, ref: ObjectRef, data: memoryview) -> None:
            raise AssertionError("it has the object")

        async def close(self) -> None: ...

    async def main() -> None:
        bench = Bench("image", tiers=[Near()])
        await bench.check(0)
        assert bench.store.sent_ranges == []

    run_virtual(main())


@pytest.fixture(scope="module")
def url() -> str:
    url = "memory://columns/ds"
    with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=30_000) as packer:
        packer.extend(SAMPLES)
    return url


def test_a_loader_of_some_columns_reads_less_and_plans_so(url: str) -> None:
    with Loader(url, batch_size=8, columns=["label", "depth"], epochs=1) as loader:
        numbers = []
        for batch in loader:
            assert list(batch) == ["label", "depth"]
            numbers += batch["label"].tolist()
            for number, depth in zip(batch["label"].tolist(), batch["depth"], strict=True):
                assert depth.tolist() == SAMPLES[number]["depth"].tolist()
        plan, stats = loader.plan, loader.stats()
        assert sorted(numbers) == list(range(60))
        assert stats.read_bytes < loader.manifest.size_bytes / 3
        # The plan is of an epoch: the manifest was read before.
        assert plan.get_requests == stats.get_requests - 1
        assert plan.read_bytes == pytest.approx(stats.read_bytes - len(loader.manifest.to_bytes()), rel=0.05)


def test_a_decoder_runs_on_a_column_of_the_chosen_ones(url: str) -> None:
    with Loader(url, batch_size=60, columns=["text", "label"], decode={"text": len}, epochs=1) as loader:
        (batch,) = loader
    assert list(batch) == ["text", "label"]
    assert batch["text"].tolist() == [len(SAMPLES[number]["text"]) for number in batch["label"].tolist()]


def test_the_order_does_not_depend_on_the_columns(url: str) -> None:
    def labels(columns: list[str] | None) -> list[int]:
        with Loader(url, batch_size=7, columns=columns, seed=4, epochs=1) as loader:
            return [label for batch in loader for label in batch["label"].tolist()]

    assert labels(None) == labels(["label"]) == labels(["sound", "label"])
