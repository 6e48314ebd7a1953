"""What each way takes: foreseen as it is then counted, and the cheapest that works is taken."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from stoker import Array, Operation, Prices, Schema
from stoker._base.meter import Meter
from stoker._fetch.materialized_pipeline import read_epoch
from stoker._format.manifest import Manifest, ManifestRows, PackRun
from stoker._format.supersample import SuperSampleRecord
from stoker._format.versions import read_manifest
from stoker._stores.object_store import MeteredStore
from stoker.errors import ConfigError, MemoryBudgetError
from stoker_functions._shuffle_job.plan import EpochPlan, PlanConfig, choose_plan, plan_ways
from stoker_functions._shuffle_job.work import ShuffleTask, Way
from support.materialized import WAYS, layout_of, perform_tasks
from support.packing import fresh_store, pack
from support.supersamples import samples_of

GIB = 1 << 30


def data_set(size_bytes: float, sample_bytes: int, object_bytes: int = 8 << 20) -> Manifest:
    """Return the manifest of a data set of one large column and a label."""
    head_bytes = 1000 + 20 * (object_bytes // sample_bytes)
    packed = SuperSampleRecord(
        ordinal=0,
        size_bytes=object_bytes,
        samples=object_bytes // sample_bytes,
        head_bytes=head_bytes,
        head_crc32c=1,
        crc32c=1,
    )
    count = math.ceil(size_bytes / object_bytes)
    schema = Schema({"image": Array("uint8", (sample_bytes - 12,)), "label": Array("int64")})
    rows = ManifestRows.of([packed] * count)
    return Manifest(dataset="d", version=1, schema=schema, rows=rows, runs=(PackRun("0" * 16, 0, count),))


def plans(manifest: Manifest, *, lanes: int = 8, slices: int = 1, **worker: Any) -> dict[Way, EpochPlan]:
    prices = Prices.load()
    settings = {
        "memory_bytes": int(1.5 * GIB),
        "task_seconds": 900.0,
        "concurrency": 100,
        "prices": prices.functions["lambda"],
        "configured_bytes": 1769 << 20,
        **worker,
    }
    config = PlanConfig(
        lanes=lanes,
        slices=slices,
        store=prices.store("s3"),
        **settings,
    )
    return {plan.way: plan for plan in plan_ways(manifest, config)}


def chosen(manifest: Manifest, **settings: Any) -> Way:
    return choose_plan(list(plans(manifest, **settings).values())).way


@pytest.mark.parametrize(
    ("size_bytes", "sample_bytes", "way"),
    [
        (0.5 * GIB, 3000, "streamed"),  # all in one function's memory
        (100 * GIB, 3000, "scattered"),
        (100 * GIB, 110_000, "scattered"),
        (100 * GIB, 1 << 20, "ranged"),
        (100 * GIB, 4 << 20, "streamed"),  # two to a super-sample: most of what is read is wanted
    ],
)
def test_the_way_depends_on_how_much_there_is_and_in_how_many_pieces(
    size_bytes: float, sample_bytes: int, way: Way
) -> None:
    assert chosen(data_set(size_bytes, sample_bytes)) == way


def test_a_hundred_gigabytes_of_small_samples_cost_cents() -> None:
    by_way = plans(data_set(100 * GIB, 3000))
    assert by_way["scattered"].store_dollars < 0.25
    assert by_way["ranged"].problem or by_way["ranged"].store_dollars > 10
    assert by_way["streamed"].dollars > 50


def test_what_every_way_takes_is_what_its_formula_says() -> None:
    manifest = data_set(10 * GIB, 100_000)
    count, samples = len(manifest), manifest.samples
    by_way = plans(manifest, lanes=4, slices=16)
    streamed, ranged, scattered = by_way["streamed"], by_way["ranged"], by_way["scattered"]
    assert streamed.slices == 16
    assert streamed.get_requests == pytest.approx(16 * count, rel=0.01)
    assert streamed.read_bytes == pytest.approx(16 * manifest.size_bytes, rel=0.01)
    assert streamed.written_bytes == pytest.approx(manifest.size_bytes, rel=0.01)
    assert ranged.get_requests == pytest.approx(ranged.slices * count + samples, rel=0.05)
    assert scattered.read_bytes == scattered.written_bytes == pytest.approx(2 * manifest.size_bytes, rel=0.01)
    cells = scattered.put_requests / 2
    parts = scattered.slices * scattered.scatters
    assert scattered.get_requests == pytest.approx(count + cells + parts, rel=0.05)


@pytest.mark.parametrize("slices", [1, 5, 8, 30])
def test_the_number_of_slices_is_the_requested_one_or_what_memory_needs(slices: int) -> None:
    for plan in plans(data_set(10 * GIB, 100_000), slices=slices).values():
        assert plan.slices >= slices
        assert plan.slices % 8 == 0 or 8 % plan.slices == 0
    few = plans(data_set(10 * GIB, 100_000), memory_bytes=8 * GIB)["streamed"].slices
    many = plans(data_set(10 * GIB, 100_000), memory_bytes=GIB)["streamed"].slices
    assert few < many


@pytest.mark.parametrize(
    ("lanes", "slices", "match"),
    [
        (0, 1, r"lanes must be in .*, not 0"),
        (65537, 1, r"lanes must be in .*, not 65537"),
        (3, 0, r"slices must be in .*, not 0"),
        (3, 65536, r"\[1, 65535\] for 3 lanes"),
    ],
)
def test_more_lanes_or_slices_than_there_may_be_are_refused(lanes: int, slices: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        plans(data_set(GIB, 100_000), lanes=lanes, slices=slices)


def test_the_most_slices_are_a_plan_that_tasks_can_be_made_of() -> None:
    plan = plans(data_set(GIB, 100_000), lanes=3, slices=65535)["streamed"]
    tasks = plan.phases(dataset="any", version=1, seed=7, epoch=0, lanes=3, keep=0)[0]
    assert ShuffleTask.from_event(tasks[-1].to_event()).slices == len(tasks) == 65535


def test_data_that_fits_in_no_number_of_slices_is_reported() -> None:
    found = plans(data_set(15000 * GIB, 100_000), memory_bytes=240 << 20, task_seconds=math.inf)
    for way in ("streamed", "scattered"):
        assert "in 65536 slices, which is the maximum" in found[way].problem


def test_a_task_that_would_take_too_long_is_cut_and_if_that_is_useless_the_way_is_none() -> None:
    manifest = data_set(200 * GIB, 100_000)
    long, short = plans(manifest, task_seconds=math.inf), plans(manifest, task_seconds=300.0)
    assert "of its limit of 5 s" in plans(manifest, task_seconds=5.0)["streamed"].problem
    for way in ("ranged", "streamed"):
        assert not short[way].problem
        assert short[way].task_seconds <= 300
        assert short[way].slices > long[way].slices


def test_objects_of_an_epoch_are_no_larger_than_those_of_the_data_set() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, samples_of(SCHEMA, 100), schema=SCHEMA, super_sample_bytes=400_000)
        manifest = await read_manifest(store)
        plan = plans(manifest, lanes=2, task_seconds=math.inf)["streamed"]
        phases = plan.phases(dataset="any", version=1, seed=7, epoch=0, lanes=2, keep=0)
        await perform_tasks(store, phases, 1 << 30)
        epoch = await read_epoch(store, await layout_of(store, phases[0][0]))
        assert epoch is not None
        assert 0.7 * manifest.largest_bytes < epoch.largest_bytes <= manifest.largest_bytes

    asyncio.run(main())


def test_where_no_way_works_every_reason_is_given() -> None:
    manifest = data_set(1000 * GIB, 3000)
    found = plans(manifest, task_seconds=5.0)
    with pytest.raises(MemoryBudgetError, match=r"ranged: .*streamed: .*scattered: "):
        choose_plan(list(found.values()))
    with pytest.raises(MemoryBudgetError, match="MiB or more in total"):
        plans(manifest, memory_bytes=64 << 20)


SCHEMA = Schema({"image": Array("uint8", (100, 200)), "label": Array("int64")})
MEMORY_BYTES = 24 << 20


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_foreseen_is_what_is_counted(way: Way, slices: int) -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, samples_of(SCHEMA, 400), schema=SCHEMA, super_sample_bytes=1_000_000)
        manifest = await read_manifest(store)
        plan = plans(manifest, lanes=2, slices=slices, memory_bytes=MEMORY_BYTES, task_seconds=math.inf)[way]
        metered = MeteredStore(store, Meter("memory://"))
        phases = plan.phases(dataset="any", version=1, seed=7, epoch=0, lanes=2, keep=0)
        await perform_tasks(metered, phases, MEMORY_BYTES)
        reading = metered.meter.snapshot()
        slack = 0.2 if way == "ranged" else 0.05
        assert reading.requests[Operation.GET] == pytest.approx(plan.get_requests, rel=slack, abs=6)
        assert reading.read_bytes == pytest.approx(plan.read_bytes, rel=slack)
        assert reading.requests[Operation.PUT] == pytest.approx(plan.put_requests, rel=0.1, abs=4)
        assert reading.written_bytes == pytest.approx(plan.written_bytes, rel=0.05)

    asyncio.run(main())
