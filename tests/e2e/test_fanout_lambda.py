"""``stoker pack --on lambda``: the program, Lambda's runtime in a function cloud, instances that die, and a bucket."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager

import pytest

import stoker
from stoker import S3Options, open_store
from stoker_local import running_server
from stoker_local.functions import FunctionFault, FunctionFaultPlan, FunctionSpec
from stoker_local.functions import FunctionFaultKind as Kind
from support.deployments import content
from support.function_cloud import Clouds, bucket_and_cloud, function, run_stoker
from support.local_bucket import s3_options

RAW, DATASET = "s3://raw/in", "s3://stoker/train"
OBJECTS = 600
SMALL = ("--super-sample-bytes", "32KiB", "--part-bytes", "96KiB")
SETTINGS = {"STOKER_DATASETS": f"train={DATASET}", "STOKER_SOURCES": RAW}


def spec(name: str) -> FunctionSpec:
    return function(
        f"stoker_functions.aws.{name}", name=f"stoker-{name}", memory_mb=1024, concurrency=3, environment=SETTINGS
    )


def packing() -> AbstractAsyncContextManager[Clouds]:
    return bucket_and_cloud(spec("pack"), spec("commit"), buckets=("raw", "stoker"))


@pytest.fixture(scope="module")
def clouds() -> Iterator[Clouds]:
    with running_server(packing) as clouds:
        asyncio.run(put(s3_options(clouds[0])))
        yield clouds


async def put(options: S3Options) -> None:
    store = open_store(RAW, options=options)
    try:
        for number in range(OBJECTS):
            await store.put(f"{number:04}.bin", content(number, 2000))
    finally:
        await store.close()


def packed(clouds: Clouds, url: str, *more: str, code: int = 0) -> str:
    """Run the command, and return its output."""
    bucket, cloud = clouds
    command = ["pack", RAW, url, "--on", "lambda", "--function-url", cloud.url]
    done = run_stoker(bucket, *command, *SMALL, *more)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_killed_and_throttled_functions_pack_every_object_once_and_report_the_bill(clouds: Clouds) -> None:
    bucket, cloud = clouds
    at_once = [FunctionFault(kind=kind) for kind in (Kind.KILL, Kind.THROTTLE, Kind.DUPLICATE, Kind.KILL)]
    later = {Kind.KILL: 0.15, Kind.DUPLICATE: 0.1, Kind.THROTTLE: 0.15}
    cloud.inject(FunctionFaultPlan(script=tuple(at_once), probabilities=later, within_seconds=0.2, seed=4))
    said = packed(clouds, DATASET)

    dataset = stoker.Dataset(DATASET, options=s3_options(bucket))
    assert [(sample["path"], sample["data"]) for sample in dataset] == [
        (f"{number:04}.bin", content(number, 2000)) for number in range(OBJECTS)
    ]
    assert f"{OBJECTS} samples in" in said
    assert f"{DATASET}: version 1 has {OBJECTS} samples" in said
    assert re.search(r"\(retried \d+, throttled \d+, ", said)
    dollars = re.search(r"\$(\d+\.\d+) for functions", said)
    assert dollars is not None
    billed = sum(each.dollars for each in cloud.statistics().values())
    assert billed / 10 < float(dollars[1]) < billed * 10, "failed calls are estimated by their duration"


def test_what_a_function_may_not_touch_is_its_error_and_nothing_is_packed(clouds: Clouds) -> None:
    said = packed(clouds, "s3://stoker/elsewhere", code=1)
    assert "EventError" in said
    assert "add it to STOKER_DATASETS" in said
    assert "tasks failed" in said


def test_functions_that_are_not_there_end_the_command_at_once(clouds: Clouds) -> None:
    said = packed(clouds, "s3://stoker/elsewhere", "--function-prefix", "nobody", code=1)
    assert "nobody-pack: there is no such function; deploy it" in said
