"""The same functions as Google runs them: objects of the local GCS become a data set, whatever dies on the way."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import aiohttp
import pytest

import stoker_functions.gcp
from stoker import GcsOptions, open_store
from stoker._base.task_group import for_each
from stoker._sources.folders import files_schema
from stoker._sources.parts import SourcePart
from stoker_local import GcsConfig, LocalGcs
from stoker_local.functions import (
    FunctionCloudConfig,
    FunctionFaultKind,
    FunctionFaultPlan,
    GoogleSpec,
    ObjectFinalized,
    QueueSpec,
    function_cloud,
)
from stoker_torch import Loader
from support.deployments import content

pytestmark = pytest.mark.timeout(600)  # 20 s on two quiet processors
OBJECTS = 300
RAW, DATASET = "gs://raw/in", "gs://stoker/train"
SETTINGS = {
    "STOKER_DATASETS": f"train={DATASET}",
    "STOKER_SOURCES": RAW,
    "STOKER_INGEST": '{"dataset": "train", "kind": "files", "super_sample_bytes": 20000}',
    "STOKER_TIMEOUT_SECONDS": "6",
}


def google(name: str, **changes: Any) -> GoogleSpec:
    given: dict[str, Any] = {
        "source": str(stoker_functions.gcp.__file__),
        "target": name,
        "environment": SETTINGS,
        "timeout_seconds": 6.0,
        "instances": 2,
        **changes,
    }
    return GoogleSpec(name=f"stoker-{name}", **given)


CONFIG = FunctionCloudConfig(
    google=(google("ingest", concurrency=80), google("commit"), google("pack")),
    queues=(QueueSpec(name="finalized", visibility_seconds=3.0, max_receives=50),),
    finalized=(ObjectFinalized(bucket="raw", function="stoker-ingest", queue="finalized", concurrency=120),),
    init_seconds=60.0,
)


def numbers_read(options: GcsOptions) -> list[int]:
    found: list[int] = []
    with Loader(DATASET, batch_size=32, seed=1, memory="64MB", options=options) as loader:
        for batch in loader:
            found += [int(path.removesuffix(".bin")) for path in batch["path"]]
    return found


def test_finalized_objects_are_trained_on_exactly_once_though_instances_die() -> None:
    async def main() -> None:
        async with (
            LocalGcs(GcsConfig(buckets=("raw", "stoker"))) as gcs,
            function_cloud(CONFIG, gcs=gcs) as cloud,
            aiohttp.ClientSession() as session,
        ):
            options = GcsOptions(endpoint_url=gcs.url)
            raw = open_store(RAW, options=options)
            faults = {FunctionFaultKind.KILL: 0.01, FunctionFaultKind.DUPLICATE: 0.1}
            cloud.inject(FunctionFaultPlan(probabilities=faults, within_seconds=1.5, seed=5))

            async def put(number: int) -> None:
                await raw.put(f"{number:05d}.bin", content(number))

            await for_each(range(OBJECTS), put, concurrency=16)
            await cloud.queues["finalized"].wait_until_empty()
            cloud.inject(FunctionFaultPlan())
            async with session.post(cloud.google_urls["stoker-commit"], json={"dataset": DATASET}) as answer:
                assert answer.status == 200, await answer.text()
                result = await answer.json()
            assert (result["version"], result["samples"]) == (1, OBJECTS)
            assert sorted(await asyncio.to_thread(numbers_read, options)) == list(range(OBJECTS))
            done = cloud.statistics()["stoker-ingest"]
            assert done.faults["duplicate"]
            assert done.faults["kill"]
            await raw.close()

    asyncio.run(main())


def test_what_can_never_be_packed_ends_among_the_dead_letters_and_all_else_is_packed() -> None:
    queues = (
        # Long enough for what can be packed to be packed: else it would be received again, and given up, too.
        QueueSpec(name="finalized", visibility_seconds=6.0, max_receives=2, dead_letters="dead"),
        QueueSpec(name="dead"),
    )

    async def main() -> None:
        async with (
            LocalGcs(GcsConfig(buckets=("raw", "stoker"))) as gcs,
            function_cloud(dataclasses.replace(CONFIG, queues=queues), gcs=gcs) as cloud,
            aiohttp.ClientSession() as session,
        ):
            async with session.post(cloud.google_urls["stoker-ingest"], data="nonsense") as answer:
                assert (answer.status, (await answer.json())["errorType"]) == (400, "EventError")
            raw = open_store("gs://raw", options=GcsOptions(endpoint_url=gcs.url))
            await for_each(range(8), lambda number: raw.put(f"in/{number:05d}.bin", content(number)), concurrency=8)
            await raw.put("in/too-large.bin", bytes(20_001))
            await raw.put("beside.bin", content(9))
            await cloud.queues["finalized"].wait_until_empty()
            dead = {json.loads(body)["body"]["name"] for body in cloud.queues["dead"].bodies}
            assert dead == {"in/too-large.bin", "beside.bin"}
            async with session.post(cloud.google_urls["stoker-commit"], json={"dataset": DATASET}) as answer:
                assert (await answer.json())["samples"] == 8
            await raw.close()

    asyncio.run(main())


def test_a_part_is_packed_by_a_request_and_its_errors_are_reported() -> None:
    async def main() -> None:
        async with (
            LocalGcs(GcsConfig(buckets=("raw", "stoker"))) as gcs,
            function_cloud(CONFIG, gcs=gcs) as cloud,
            aiohttp.ClientSession() as session,
        ):
            raw = open_store(RAW, options=GcsOptions(endpoint_url=gcs.url))
            objects = tuple([await raw.put(f"{number:05d}.bin", content(number)) for number in range(20)])
            part = SourcePart(
                dataset=DATASET,
                dataset_id="d" * 16,
                source=RAW,
                kind="files",
                schema=files_schema(),
                super_sample_bytes=20_000,
                objects=objects,
            )
            url = cloud.google_urls["stoker-pack"]
            for body, status, kind in (
                (json.dumps(part.to_json()), 200, ""),
                (json.dumps({**part.to_json(), "source": "file:///etc"}), 400, "EventError"),
                ("nonsense", 400, "EventError"),
            ):
                async with session.post(url, data=body) as answer:
                    result = await answer.json()
                    assert (answer.status, result.get("errorType", "")) == (status, kind), result
            await raw.close()

    asyncio.run(main())
