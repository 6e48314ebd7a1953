"""Samples read by number, under random faults: every value right or a typed error, nothing left behind."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest

from stoker import Array, Bytes, Schema
from stoker._format.supersample import Head
from stoker._memory.budget import SampleMemory
from stoker.errors import (
    CopiedBucketWarning,
    CredentialsError,
    FetchError,
    FormatError,
    NotFoundError,
    ObjectChangedError,
)
from stoker.testing import run_virtual
from support.fault_profiles import faulty_profile
from support.faulty_store import FAULTS, StoreProfile
from support.packed_objects import packed_objects
from support.same import same
from support.sample_reading import SampleBench

SCHEMA = Schema({"number": Array("int64"), "image": Array("uint8", (20, 10)), "sound": Bytes()})
COUNTS = [30, 1, 44, 25, 50]
RNG = np.random.default_rng(0)
SAMPLES: list[dict[str, Any]] = [
    {"number": np.array(i), "image": RNG.integers(0, 256, (20, 10), np.uint8), "sound": RNG.bytes(i % 9 * 40)}
    for i in range(sum(COUNTS))
]
MANIFEST, OBJECTS = packed_objects(SCHEMA, SAMPLES, COUNTS)
FIRSTS = np.cumsum([0, *COUNTS])
TIGHT_BYTES = SampleMemory.plan(MANIFEST, 2, 1 << 30).manifest_bytes + 3 * MANIFEST.largest_bytes + 40_000


def bench(**settings: Any) -> SampleBench:
    return SampleBench(MANIFEST, OBJECTS, **settings)


def right(found: list[dict[str, Any]], indices: list[int]) -> bool:
    return same(found, [SAMPLES[number] for number in indices])


def test_random_faults_spoil_no_value_and_leave_nothing() -> None:
    faults: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in range(40):
        rng = random.Random(seed)
        reading = bench(
            profile=faulty_profile(seed),
            seed=seed,
            memory_bytes=rng.choice([TIGHT_BYTES, 1 << 24]),
            attempt_seconds=1.0,
            checksum_attempts=10,
            hedge_first_seconds=0.2,
        )

        async def calls(reading: SampleBench = reading, rng: random.Random = rng) -> None:
            for _ in range(4):
                asked = [rng.choices(range(len(SAMPLES)), k=rng.choice([1, 20, 90])) for _ in range(3)]
                for indices, found in zip(asked, await asyncio.gather(*map(reading.read, asked)), strict=True):
                    assert right(found, indices), "wrong bytes were delivered"

        run_virtual(calls())
        assert reading.leaves_nothing()
        stats = reading.reader._fetcher.stats
        faults.update(reading.store.faults)
        totals["hedges"] += stats.hedges
        totals["hedge wins"] += stats.hedge_wins
        totals["checksum failures"] += stats.checksum_failures
        totals["retries"] += sum(stats.retries.values())
    print(f"\n40 runs: {dict(faults)}, {dict(totals)}")
    assert set(FAULTS) <= faults.keys()
    assert all(totals[name] for name in ("hedges", "hedge wins", "checksum failures", "retries"))


@pytest.mark.parametrize("fault", ["corrupt", "truncate", "reset", "throttle", "error", "stall"])
def test_a_head_and_a_range_are_read_again_until_they_are_right(fault: str) -> None:
    reading = bench(columns=["image"], hedge=False)
    reading.store.script = lambda number, key: fault if number in (0, 2) else None
    assert same(reading.samples(33), [{"image": SAMPLES[33]["image"]}])
    assert reading.store.faults[fault] == 2
    assert len(reading.store.sent_ranges) == 4


def spoil(reading: SampleBench, row: int, place: int) -> str:
    """Change a byte of an object for good; return its key."""
    key = MANIFEST.key(row)
    body = bytearray(OBJECTS[key])
    body[place] ^= 1
    reading.store.objects[key] = bytes(body)
    return key


def test_a_value_spoilt_at_rest_is_an_error_that_names_object_column_and_row_and_its_neighbours_can_be_read() -> None:
    reading = bench()
    head = Head.parse(OBJECTS[MANIFEST.key(2)], len(OBJECTS[MANIFEST.key(2)]))
    key = spoil(reading, 2, head.row_range("image", 7, 8)[0] + 3)
    number = int(FIRSTS[2]) + 7
    with pytest.raises(FetchError, match=rf"{key} is corrupt: .* \(column 'image' of row 7 is not what was packed\)"):
        reading.samples(3, number)
    assert reading.leaves_nothing()
    assert right(reading.samples(number - 1, number + 1), [number - 1, number + 1])
    reading.store.objects[key] = OBJECTS[key]
    assert right(reading.samples(number), [number])


@pytest.mark.parametrize("count", [1, 44], ids=["by its head", "whole"])
def test_a_head_spoilt_at_rest_is_an_error_that_names_the_object_and_can_be_tried_again(count: int) -> None:
    reading = bench()
    key = spoil(reading, 2, 150)
    asked = [int(FIRSTS[2]) + row for row in range(count)]
    with pytest.raises(FetchError, match=f"{key}.*{'its head' if count == 1 else 'CRC-32C'}"):
        reading.samples(*asked)
    assert reading.leaves_nothing()
    reading.store.objects[key] = OBJECTS[key]
    assert right(reading.samples(*asked), asked)


def test_an_object_of_another_data_set_under_a_key_is_never_taken_for_the_pinned_one() -> None:
    other, _ = packed_objects(SCHEMA, SAMPLES[::-1], COUNTS[::-1])
    reading = SampleBench(other, OBJECTS)
    with pytest.raises((FetchError, ObjectChangedError, FormatError), match="data/"):
        reading.samples(3)
    assert reading.leaves_nothing()


def test_a_missing_object_is_named() -> None:
    reading = bench()
    del reading.store.objects[MANIFEST.key(4)]
    with pytest.raises(NotFoundError, match=MANIFEST.key(4)):
        reading.samples(0, 149)
    assert right(reading.samples(0), [0])


def test_a_replaced_object_is_reported_or_accepted_on_its_checksums() -> None:
    copied = bench()
    copied.store.tags = dict.fromkeys(OBJECTS, "v2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert right(copied.samples(0, 40, 149), [0, 40, 149])
    assert [warning.category for warning in caught] == [CopiedBucketWarning]
    replaced = bench()
    key = spoil(replaced, 0, 150)
    replaced.store.tags[key] = "v2"
    with pytest.raises(ObjectChangedError, match=key):
        replaced.samples(0)


def test_what_is_pinned_is_sent_as_a_precondition_with_every_range() -> None:
    reading = bench()
    reading.samples(0, 40, 149)
    assert set(reading.store.sent_tags) == {"v1"}


def test_an_outage_ends_in_an_error_at_the_deadline_and_the_reader_can_be_used_again() -> None:
    reading = bench(profile=StoreProfile(tail_sigma=0.0, outages=[(0.0, 100.0)]), deadline_seconds=10.0)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(FetchError, match="deadline"):
            await reading.read([0, 40, 149])
        assert loop.time() <= 10.0
        await asyncio.sleep(100.0 - loop.time())
        assert right(await reading.read([0, 40, 149]), [0, 40, 149])

    run_virtual(main())
    assert reading.leaves_nothing()


def test_an_error_that_no_retry_helps_ends_the_call_at_once() -> None:
    reading = bench(profile=StoreProfile(tail_sigma=0.0, credentials_expire_at=0.015))
    with pytest.raises(CredentialsError):
        reading.samples(*range(0, 150, 7))
    assert reading.leaves_nothing()


@pytest.mark.parametrize("memory_bytes", [TIGHT_BYTES, 1 << 24])
def test_cancelling_at_any_time_leaves_nothing_and_harms_no_other_call(memory_bytes: int) -> None:
    everything, some = list(range(150)), list(range(0, 150, 11))

    async def main(reading: SampleBench, seconds: float) -> None:
        doomed = [asyncio.create_task(reading.read(indices)) for indices in (some, everything, [5])]
        other = asyncio.create_task(reading.read(some))
        await asyncio.sleep(seconds)
        for task in doomed:
            task.cancel()
        ended = await asyncio.gather(*doomed, return_exceptions=True)
        assert all(isinstance(end, list | asyncio.CancelledError) for end in ended)
        assert right(await other, some)

    for step in range(40):
        reading = bench(
            profile=StoreProfile(closing_seconds=0.05, probability={"stall": 0.02}),
            seed=step,
            memory_bytes=memory_bytes,
        )
        run_virtual(main(reading, step * 0.006))
        assert reading.leaves_nothing()
