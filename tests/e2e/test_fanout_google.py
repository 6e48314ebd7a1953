"""A fan-out over functions in Google's own server of functions, instances of which die."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import stoker
import stoker_functions.gcp
from stoker import GcsOptions, RetryPolicy, open_store
from stoker._base.task_group import for_each
from stoker._fanout.job import JobConfig, PackJob, plan_job
from stoker._sources import open_source
from stoker.fanout import Driver, ExecutorOptions, FanoutConfig, Report, Task, open_executor
from stoker_local import GcsConfig, LocalGcs
from stoker_local.functions import FunctionCloudConfig, FunctionFaultKind, FunctionFaultPlan, GoogleSpec, function_cloud
from support.deployments import content

RAW, DATASET = "gs://raw/in", "gs://stoker/train"
OBJECTS = 300
SETTINGS = {"STOKER_DATASETS": f"train={DATASET}", "STOKER_SOURCES": RAW, "STOKER_TIMEOUT_SECONDS": "30"}


def google(name: str) -> GoogleSpec:
    return GoogleSpec(
        name=f"stoker-{name}",
        source=str(stoker_functions.gcp.__file__),
        target=name,
        environment=SETTINGS,
        timeout_seconds=30.0,
        instances=2,
    )


async def planned(options: GcsOptions) -> PackJob:
    raw, store = open_store(RAW, options=options), open_store(DATASET, options=options)

    async def put(number: int) -> None:
        await raw.put(f"{number:04}.bin", content(number, 2000))

    await for_each(range(OBJECTS), put, concurrency=16)
    source = await open_source(RAW, options=options)
    try:
        return await plan_job(
            source, store, JobConfig(dataset=DATASET, super_sample_bytes=32 << 10, part_bytes=96 << 10)
        )
    finally:
        for opened in (source, raw, store):
            await opened.close()


async def carried_out(tasks: Sequence[Task], url: str) -> tuple[list[Mapping[str, Any]], Report]:
    """Have the tasks of one function done, at whose own address any path leads to it."""
    async with open_executor("gcf", ExecutorOptions(endpoint_url=url)) as executor:
        retry = RetryPolicy(attempts=8, backoff_base_seconds=0.05, backoff_cap_seconds=0.5)
        driver = Driver(executor, FanoutConfig(retry=retry, ramp_seconds=0.2))
        return await driver.run(tasks), driver.report


def test_functions_on_google_pack_every_object_once_though_instances_die() -> None:
    async def main() -> tuple[list[Mapping[str, Any]], Report]:
        config = FunctionCloudConfig(google=(google("pack"), google("commit")), init_seconds=60.0)
        async with LocalGcs(GcsConfig(buckets=("raw", "stoker"))) as gcs, function_cloud(config, gcs=gcs) as cloud:
            options = GcsOptions(endpoint_url=gcs.url)
            job = await planned(options)
            faults = {FunctionFaultKind.KILL: 0.2, FunctionFaultKind.DUPLICATE: 0.1}
            cloud.inject(FunctionFaultPlan(probabilities=faults, within_seconds=0.1, seed=2))
            _, report = await carried_out(job.tasks, cloud.google_urls["stoker-pack"])
            cloud.inject(FunctionFaultPlan())
            committed, _ = await carried_out([job.commit], cloud.google_urls["stoker-commit"])
            await asyncio.to_thread(check, options)
        return committed, report

    committed, report = asyncio.run(main())
    assert (committed[0]["version"], committed[0]["samples"]) == (1, OBJECTS)
    assert report.samples == OBJECTS
    assert report.throttled + report.retries > 0
    assert report.dollars is not None
    assert report.dollars > 0


def check(options: GcsOptions) -> None:
    dataset = stoker.Dataset(DATASET, options=options)
    assert [(sample["path"], sample["data"]) for sample in dataset] == [
        (f"{number:04}.bin", content(number, 2000)) for number in range(OBJECTS)
    ]
