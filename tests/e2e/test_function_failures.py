"""What goes wrong around the functions: a typed error, a dead letter, nothing lost, nothing half visible."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stoker import open_store
from stoker._format import versions
from stoker._sources.folders import files_schema
from stoker._sources.parts import SourcePart
from stoker.abc import ObjectInfo, Store
from stoker_local.functions import (
    EventSource,
    FunctionCloud,
    FunctionFault,
    FunctionFaultKind,
    FunctionFaultPlan,
    FunctionSpec,
    Notification,
    Outcome,
    QueueSpec,
)
from support.deployments import content
from support.function_cloud import bucket_and_cloud
from support.local_bucket import s3_options

RAW, DATASET = "s3://raw/in", "s3://stoker/train"
SETTINGS = {
    "STOKER_DATASETS": f"train={DATASET}",
    "STOKER_SOURCES": RAW,
    "STOKER_INGEST": '{"dataset": "train", "kind": "image-folder", "classes": ["cat", "dog"]}',
}
TESTS = str(Path(__file__).parents[1])


def spec(name: str, **changes: Any) -> FunctionSpec:
    given = {
        "handler": f"stoker_functions.aws.{name}",
        "memory_mb": 512,
        "timeout_seconds": 10.0,
        "environment": SETTINGS,
        **changes,
    }
    return FunctionSpec(name=f"stoker-{name}", **given)


@dataclass(frozen=True)
class Running:
    """A function cloud over a local bucket, and stores of the raw objects and the data set."""

    cloud: FunctionCloud
    raw: Store
    data: Store

    async def call(self, name: str, event: object) -> Outcome:
        return await self.cloud.invoke(f"stoker-{name}", event, waits=True)

    async def commit(self) -> dict[str, Any]:
        outcome = await self.call("commit", {"dataset": DATASET})
        assert not outcome.error_type, outcome
        result: dict[str, Any] = json.loads(outcome.payload)
        return result


@asynccontextmanager
async def running(*functions: FunctionSpec, **changes: Any) -> AsyncIterator[Running]:
    buckets = ("raw", "stoker")
    async with bucket_and_cloud(*functions, spec("commit"), buckets=buckets, **changes) as (bucket, cloud):
        options = s3_options(bucket)
        raw, data = open_store(RAW, options=options), open_store(DATASET, options=options)
        try:
            yield Running(cloud, raw, data)
        finally:
            await raw.close()
            await data.close()


def error_of(outcome: Outcome) -> str:
    return str(json.loads(outcome.payload)["errorMessage"])


async def ended_in_error(cloud: FunctionCloud, name: str) -> None:
    """Wait for it: its messages may have come again, and be done, before it is given up."""
    while not cloud.statistics()[name].errors:  # noqa: ASYNC110 - the cloud has no event for it
        await asyncio.sleep(0.1)


def part(objects: list[ObjectInfo], **changes: Any) -> dict[str, Any]:
    given = {
        "dataset": DATASET,
        "dataset_id": "d" * 16,
        "source": RAW,
        "kind": "files",
        "schema": files_schema(),
        "super_sample_bytes": 8 << 20,
        "objects": tuple(objects),
    }
    return SourcePart(**{**given, **changes}).to_json()


def queue(**changes: Any) -> dict[str, Any]:
    raw = QueueSpec(name="raw", visibility_seconds=10.0, max_receives=2, dead_letters="dead")
    return {
        "queues": (raw, QueueSpec(name="dead")),
        "notifications": (Notification(bucket="raw", prefix="in/", queue="raw"),),
        "sources": (EventSource(queue="raw", function="stoker-ingest", batch_size=20, window_seconds=0.3),),
        **changes,
    }


def test_messages_that_can_never_be_packed_become_dead_letters_and_spoil_no_others() -> None:
    async def main() -> None:
        short = spec("ingest", timeout_seconds=5.0)
        raw = QueueSpec(name="raw", visibility_seconds=5.0, max_receives=2, dead_letters="dead")
        async with running(short, **queue(queues=(raw, QueueSpec(name="dead")))) as at:
            hostile = ["not JSON", "[]", '{"Records": [{}]}', '{"Records": 3}', "\0", '{"a":' * 3000]
            for body in hostile:
                at.cloud.queues["raw"].send(body)
            for number in range(10):
                await at.raw.put(f"{'cat' if number % 2 else 'dog'}/{number}.jpg", content(number))
            await at.raw.put("bird/11.jpg", content(11))
            await at.cloud.queues["raw"].wait_until_empty()
            dead = at.cloud.queues["dead"].bodies
            assert len(dead) == len(hostile) + 1
            assert any("bird" in body for body in dead)
            assert (await at.commit())["samples"] == 10

    asyncio.run(main())


def test_an_invocation_that_runs_out_of_time_is_delivered_again_and_nothing_is_lost_or_half_visible() -> None:
    async def main() -> None:
        slow = FunctionFault(kind=FunctionFaultKind.FREEZE, after_seconds=0.05, freeze_seconds=8.0)
        short = spec("ingest", timeout_seconds=4.0)
        raw = QueueSpec(name="raw", visibility_seconds=4.0, max_receives=5, dead_letters="dead")
        faults = FunctionFaultPlan(script=(slow,), functions=("stoker-ingest",))
        async with running(short, **queue(queues=(raw, QueueSpec(name="dead"))), faults=faults) as at:
            for number in range(10):
                await at.raw.put(f"cat/{number}.jpg", content(number))
            await at.cloud.queues["raw"].wait_until_empty()
            await ended_in_error(at.cloud, "stoker-ingest")
            assert at.cloud.queues["dead"].bodies == []
            assert (await at.commit())["samples"] == 10

    asyncio.run(main())


def test_large_raw_objects_are_packed_within_the_functions_memory() -> None:
    async def main() -> None:
        async with running(spec("pack", memory_mb=256, timeout_seconds=60.0)) as at:
            objects = [await at.raw.put(f"{number}.bin", content(number, 4 << 20)) for number in range(60)]
            outcome = await at.call("pack", part(objects))
            assert not outcome.error_type, outcome
            result = json.loads(outcome.payload)
            assert (result["state"], result["samples"], result["objects"]) == ("complete", 60, 60)
            assert 0 < outcome.memory_bytes <= 256 << 20

    asyncio.run(main())


def test_a_function_with_too_little_memory_says_how_much_it_needs_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        async with running(spec("pack", memory_mb=128)) as at:
            objects = [await at.raw.put("1.bin", content(1))]
            outcome = await at.call("pack", part(objects))
            assert outcome.error_type == "ConfigError"
            assert "give the function at least 224 MiB" in error_of(outcome)
            assert [info.key async for info in at.data.list()] == []

    asyncio.run(main())


def test_a_full_tmp_does_not_matter() -> None:
    async def main() -> None:
        filled = spec("pack", handler="support.full_tmp.pack", task_root=TESTS, timeout_seconds=60.0)
        async with running(filled) as at:
            if at.cloud.tmp != "tmpfs":
                pytest.skip("this system gives instances no /tmp of limited size")
            objects = [await at.raw.put(f"{number}.bin", content(number)) for number in range(20)]
            outcome = await at.call("pack", part(objects))
            assert not outcome.error_type, outcome
            assert json.loads(outcome.payload)["samples"] == 20

    asyncio.run(main())


def test_hostile_events_get_a_typed_error_and_reach_no_bucket() -> None:
    async def main() -> None:
        async with running(spec("pack"), spec("compact")) as at:
            objects = [await at.raw.put("1.bin", content(1))]
            good = part(objects)
            for name, event in (
                ("pack", {}),
                ("pack", [good]),
                ("pack", {**good, "dataset": "s3://raw/in"}),
                ("pack", {**good, "source": "file:///proc/self/environ"}),
                ("pack", {**good, "source": "s3://raw"}),
                ("pack", {**good, "objects": [["../../stoker/manifest.safetensors", 10**15, "x"]], "kind": "pickle"}),
                ("pack", {**good, "super_sample_bytes": 1e9}),
                ("compact", {"dataset": "s3://elsewhere/train"}),
                ("commit", {"dataset": DATASET, "runs": ["../../x"], "job": "0" * 16}),
                ("commit", {"dataset": DATASET, "nonsense": True}),
            ):
                outcome = await at.call(name, event)
                assert outcome.error_type == "EventError", (event, outcome)
                assert "stoker-secret" not in error_of(outcome)
            assert [info.key async for info in at.data.list()] == []
            assert await versions.find_newest_manifest(at.data) is None

    asyncio.run(main())
