"""From raw objects in a bucket to training: packed, committed and compacted by emulated functions that die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stoker import S3Options, open_store
from stoker._base.task_group import for_each
from stoker._format import versions
from stoker.abc import Store
from stoker_local import BucketConfig, BucketSpec, LocalBucket
from stoker_local.functions import (
    EventSource,
    FunctionCloud,
    FunctionCloudConfig,
    FunctionFault,
    FunctionFaultKind,
    FunctionFaultPlan,
    FunctionSpec,
    Notification,
    QueueSpec,
    Schedule,
    function_cloud,
)
from stoker_torch import Loader
from support.deployments import content
from support.local_bucket import s3_options

pytestmark = pytest.mark.timeout(600)  # 25 s on two quiet processors
OBJECTS = 2000
RAW, DATASET = "s3://raw/in", "s3://stoker/train"
SETTINGS = {
    "STOKER_DATASETS": f"train={DATASET}",
    "STOKER_SOURCES": RAW,
    "STOKER_INGEST": '{"dataset": "train", "kind": "files", "super_sample_bytes": 50000}',
}
FAULTS = FunctionFaultPlan(
    script=(FunctionFault(kind=FunctionFaultKind.KILL), FunctionFault(kind=FunctionFaultKind.FREEZE)) * 4,
    probabilities={
        FunctionFaultKind.KILL: 0.15,
        FunctionFaultKind.FREEZE: 0.1,
        FunctionFaultKind.DUPLICATE: 0.1,
        FunctionFaultKind.RECLAIM: 0.05,
    },
    within_seconds=0.4,
    freeze_seconds=0.3,
    seed=11,
)


def spec(name: str, **changes: Any) -> FunctionSpec:
    given = {"memory_mb": 1024, "timeout_seconds": 8.0, "environment": SETTINGS, "concurrency": 2, **changes}
    return FunctionSpec(name=f"stoker-{name}", handler=f"stoker_functions.aws.{name}", **given)


def config(**changes: Any) -> FunctionCloudConfig:
    given = {
        "functions": (
            spec("ingest"),
            *(spec(name, concurrency=1, timeout_seconds=300.0) for name in ("commit", "compact")),
        ),
        "queues": (
            QueueSpec(
                name="raw", visibility_seconds=8.0, max_receives=50, dead_letters="dead", duplicate_probability=0.05
            ),
            QueueSpec(name="dead"),
        ),
        "notifications": (Notification(bucket="raw", prefix="in/", queue="raw"),),
        "sources": (EventSource(queue="raw", function="stoker-ingest", batch_size=80, window_seconds=0.3),),
        "schedules": (
            Schedule(name="commit", function="stoker-commit", rate="rate(1 second)", input={"dataset": DATASET}),
        ),
        "init_seconds": 60.0,
        "seed": 3,
    }
    return FunctionCloudConfig(**{**given, **changes})


@asynccontextmanager
async def clouds(settings: FunctionCloudConfig) -> AsyncIterator[tuple[FunctionCloud, S3Options]]:
    buckets = BucketConfig(buckets=(BucketSpec(name="raw"), BucketSpec(name="stoker")))
    async with LocalBucket(buckets) as bucket, function_cloud(settings, bucket=bucket) as cloud:
        options = s3_options(bucket)
        yield cloud, options


async def put_raw(store: Store, numbers: range) -> None:
    async def put(number: int) -> None:
        await store.put(f"{number:05d}.bin", content(number))

    await for_each(numbers, put, concurrency=16)


def numbers_read(options: S3Options) -> list[int]:
    """Return which raw objects an epoch of training sees."""
    found: list[int] = []
    with Loader(DATASET, batch_size=64, seed=1, memory="64MB", options=options) as loader:
        for batch in loader:
            for path, data in zip(batch["path"], batch["data"], strict=True):
                number = int(path.removesuffix(".bin"))
                assert bytes(data) == content(number)
                found.append(number)
    return found


def test_raw_objects_are_trained_on_exactly_once_though_functions_die_freeze_and_are_invoked_twice() -> None:
    async def main() -> None:
        async with clouds(config()) as (cloud, options):
            raw, data = open_store(RAW, options=options), open_store(DATASET, options=options)
            cloud.inject(FAULTS)
            await put_raw(raw, range(OBJECTS))
            await cloud.queues["raw"].wait_until_empty()
            assert cloud.queues["dead"].bodies == []
            manifest = None
            while manifest is None or manifest.samples < OBJECTS:  # a commit is due every second
                await asyncio.sleep(0.2)
                manifest = await versions.find_newest_manifest(data)
            small = len(manifest)
            cloud.inject(FunctionFaultPlan())
            event = {"dataset": DATASET, "super_sample_bytes": 100_000}
            outcome = await cloud.invoke("stoker-compact", event, waits=True)
            assert not outcome.error_type, outcome
            compacted = await versions.read_manifest(data)
            assert len(compacted) < small
            sizes = sorted(compacted.rows.size_bytes.tolist())
            assert sizes[len(sizes) // 2] >= 50_000
            assert sorted(await asyncio.to_thread(numbers_read, options)) == list(range(OBJECTS))
            done = cloud.statistics()["stoker-ingest"]
            assert done.cold_starts > 1
            assert done.faults["kill"]
            assert done.faults["freeze"]
            await raw.close()
            await data.close()

    asyncio.run(main())
