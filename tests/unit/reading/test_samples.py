"""What is requested for samples read by number, to the byte, and what is held meanwhile."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

from stoker import Array, Bytes, Ragged, Schema, Text
from stoker._fetch.config import GAP_BYTES
from stoker._format.supersample import Head
from stoker._memory.budget import SampleMemory, open_head_bytes
from stoker.errors import MemoryBudgetError
from stoker.testing import run_virtual
from support.faulty_store import StoreProfile
from support.memory import ROUNDS, Memory
from support.packed_objects import packed_objects
from support.same import same
from support.sample_reading import SampleBench
from support.supersamples import EVERY_KIND, every_dtype, samples_of

ROWS = 400
SCHEMA = Schema({"label": Array("int64"), "image": Array("uint8", (1000,)), "sound": Bytes()})
RNG = np.random.default_rng(0)
SAMPLES: list[dict[str, Any]] = [
    {
        "label": np.array(number),
        "image": RNG.integers(0, 256, 1000, np.uint8),
        "sound": RNG.bytes(500 + number % 100 if number % 7 else 0),
    }
    for number in range(3 * ROWS)
]
MANIFEST, OBJECTS = packed_objects(SCHEMA, SAMPLES, [ROWS] * 3)
KEYS = [MANIFEST.key(row) for row in range(3)]
HEADS = [Head.parse(OBJECTS[key], len(OBJECTS[key])) for key in KEYS]


def bench(**settings: Any) -> SampleBench:
    return SampleBench(MANIFEST, OBJECTS, **settings)


def head_range(super_sample: int) -> tuple[str, int, int]:
    return KEYS[super_sample], 0, HEADS[super_sample].head_bytes


def value_range(column: str, number: int, to: int | None = None) -> tuple[str, int, int]:
    """Return where the values of a column are, of a sample or of all up to another one of the same super-sample."""
    super_sample, row = divmod(number, ROWS)
    end = row if to is None else to % ROWS
    return KEYS[super_sample], *HEADS[super_sample].row_range(column, row, end + 1)


@pytest.mark.parametrize("schema", [EVERY_KIND, every_dtype()], ids=["every kind", "every dtype"])
def test_values_are_those_packed_whatever_their_kind_and_dtype(schema: Schema) -> None:
    samples = samples_of(schema, 60, seed=3)
    reading = SampleBench(*packed_objects(schema, samples, [20, 1, 39]))
    for indices in ([7], [20], [59, 0, 20, 7, 21, 7], list(range(60)), list(range(59, -1, -3))):
        assert same(reading.samples(*indices), [samples[number] for number in indices])


def test_the_first_sample_of_a_super_sample_takes_its_head_and_a_range_a_column_and_the_next_no_head() -> None:
    reading = bench()
    assert reading.requested_ranges(5) == [head_range(0), value_range("image", 5), value_range("sound", 5)]
    assert reading.requested_ranges(9) == [value_range("image", 9), value_range("sound", 9)]
    assert reading.requested_ranges(ROWS) == [head_range(1), value_range("image", ROWS), value_range("sound", ROWS)]


def test_one_large_column_takes_two_requests_at_first_and_then_one() -> None:
    reading = bench(columns=["image", "label"])
    assert reading.requested_ranges(5) == [head_range(0), value_range("image", 5)]
    assert reading.requested_ranges(6) == [value_range("image", 6)]
    assert reading.samples(6)[0].keys() == {"image", "label"}


def test_small_columns_take_the_head_and_then_nothing() -> None:
    reading = bench(columns=["label"])
    assert reading.requested_ranges(5, 700, 2) == [head_range(0), head_range(1)]
    assert reading.requested_ranges(*range(2 * ROWS)) == []


def test_empty_values_take_no_request_of_their_own() -> None:
    reading = bench(columns=["sound"])
    assert reading.requested_ranges(7) == [head_range(0)]
    assert reading.samples(7, 14) == [{"sound": b""}] * 2


def test_a_sample_requested_many_times_is_read_once_and_every_copy_has_its_own_memory() -> None:
    reading = bench(columns=["image"])
    assert reading.requested_ranges(*[5] * 1000) == [head_range(0), value_range("image", 5)]
    one, other = reading.samples(5, 5)
    one["image"][:] = 0
    assert same(other["image"], SAMPLES[5]["image"])


def test_values_near_each_other_are_read_as_one_range_and_others_apart() -> None:
    reading = bench(columns=["image"])
    near = GAP_BYTES // 1000
    assert reading.requested_ranges(3, 4, 5) == [head_range(0), value_range("image", 3, 5)]
    assert reading.requested_ranges(10, 11 + near) == [value_range("image", 10, 11 + near)]
    assert reading.requested_ranges(10, 12 + near) == [value_range("image", 10), value_range("image", 12 + near)]


def test_a_super_sample_of_which_nearly_all_is_requested_is_read_whole_in_one_request() -> None:
    reading = bench(split_parts=1)
    assert reading.requested_ranges(*range(ROWS)) == [(KEYS[0], 0, len(OBJECTS[KEYS[0]]))]
    assert reading.requested_ranges(*range(ROWS + 100, 2 * ROWS)) == [(KEYS[1], 0, len(OBJECTS[KEYS[1]]))]
    fewer = reading.requested_ranges(*range(2 * ROWS, 2 * ROWS + 200))
    assert fewer[0] == head_range(2)
    assert sum(end - start for _, start, end in fewer) < 0.7 * len(OBJECTS[KEYS[2]])


def test_columns_that_are_little_of_a_super_sample_are_never_read_with_the_rest() -> None:
    reading = bench(columns=["sound"])
    assert reading.requested_ranges(*range(ROWS)) == [head_range(0), value_range("sound", 1, ROWS - 1)]


def test_a_large_sample_requested_alone_is_read_in_parallel_ranges() -> None:
    schema = Schema({"video": Array("uint8", (5 << 20,)), "label": Array("int64")})
    samples = [{"video": np.full(5 << 20, number, np.uint8), "label": np.array(number)} for number in range(4)]
    reading = SampleBench(*packed_objects(schema, samples, [2, 2]))
    assert len(reading.requested_ranges(0)) == 1 + 4
    assert len(reading.requested_ranges(1, 2)) == 1 + 2
    assert same(reading.samples(3, 1), [samples[3], samples[1]])


def test_heads_used_longest_ago_make_room_and_are_read_again() -> None:
    cost = open_head_bytes(SCHEMA, max(head.head_bytes for head in HEADS))
    bodies = max(map(len, OBJECTS.values()))
    fixed = SampleMemory.plan(MANIFEST, 0, 10 * bodies).manifest_bytes
    reading = bench(columns=["label"], memory_bytes=fixed + bodies + 2 * cost, hedge=False)
    assert 2 * cost <= reading.memory.head_bytes < 3 * cost
    asked = [[key for key, _, _ in reading.requested_ranges(number)] for number in (0, ROWS, 0, 2 * ROWS, 0, ROWS)]
    assert asked == [[KEYS[0]], [KEYS[1]], [], [KEYS[2]], [], [KEYS[1]]]
    assert reading.reader._heads.held_bytes <= reading.memory.head_bytes


@pytest.mark.parametrize("schema", [EVERY_KIND, every_dtype()], ids=["every kind", "every dtype"])
def test_an_open_head_takes_no_more_memory_than_it_counts_for(schema: Schema) -> None:
    objects = packed_objects(schema, samples_of(schema, 200), [2] * 100)
    memory = Memory()
    for _ in range(ROUNDS):
        reading = SampleBench(*objects, columns=[next(iter(schema))])
        reading.samples(0)
        heads = reading.reader._heads
        before = heads.held_bytes
        gc.collect()
        with memory.round():
            assert len(reading.requested_ranges(*range(2, 200, 2))) >= 99
            gc.collect()
    logged_bytes = 99 * 400  # what the store of the test keeps of each request
    assert 0.4 * memory.held_bytes < heads.held_bytes - before
    assert memory.held_bytes - logged_bytes < heads.held_bytes - before


def least_bytes(**settings: Any) -> int:
    with pytest.raises(MemoryBudgetError, match="random access") as refused:
        bench(memory_bytes=0, **settings)
    return int(str(refused.value).partition("memory=")[2].split()[0])


@pytest.mark.parametrize("is_hedged", [True, False])
def test_the_least_memory_is_named_and_works(is_hedged: bool) -> None:
    figure = least_bytes(hedge=is_hedged)
    with pytest.raises(MemoryBudgetError):
        bench(memory_bytes=figure - 1, hedge=is_hedged)
    reading = bench(memory_bytes=figure, hedge=is_hedged)
    memory = reading.memory
    spent = memory.manifest_bytes + memory.hedge_slots * memory.slot_bytes + memory.head_bytes + memory.value_bytes
    assert spent == figure
    for indices in (range(0, 3 * ROWS, 5), range(3 * ROWS)):
        assert same(reading.samples(*indices), [SAMPLES[number] for number in indices])


def test_however_many_are_requested_no_more_than_the_memory_is_held_beside_the_result() -> None:
    schema = Schema({"image": Array("uint8", (10_000,)), "tokens": Ragged("uint16"), "text": Text()})
    samples = [
        {"image": np.zeros(10_000, np.uint8), "tokens": np.zeros(number % 9, np.uint16), "text": "x" * (number % 5)}
        for number in range(1200)
    ]
    manifest, objects = packed_objects(schema, samples, [40] * 30)
    limit = 2_500_000
    for asked in (list(range(0, 1200, 3)), list(range(1200)), list(range(0, 1200, 40))):
        memory = Memory()
        for _ in range(ROUNDS):
            reading = SampleBench(manifest, objects, memory_bytes=limit)
            with memory.round():
                found = reading.samples(*asked)
            assert same(found[-1], samples[asked[-1]])
            assert reading.leaves_nothing()
        heads_bytes = reading.reader._heads.held_bytes
        assert memory.peak_bytes - (memory.held_bytes - heads_bytes) < limit, f"{len(asked)} samples"


def test_calls_at_once_share_the_memory() -> None:
    reading = bench(columns=["image"], memory_bytes=least_bytes(), profile=StoreProfile(tail_sigma=1.0))

    async def calls() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(*(reading.read(range(call, 3 * ROWS, 97)) for call in range(20)))

    for call, found in enumerate(run_virtual(calls())):
        assert same(found, [{"image": SAMPLES[number]["image"]} for number in range(call, 3 * ROWS, 97)])
    assert reading.leaves_nothing()


def test_calls_at_once_read_a_head_once() -> None:
    reading = bench(columns=["label"], profile=StoreProfile(tail_sigma=1.0))

    async def calls() -> None:
        await asyncio.gather(*(reading.read([3, 800]) for _ in range(5)))

    run_virtual(calls())
    assert sorted(reading.store.sent_ranges) == [head_range(0), head_range(2)]
