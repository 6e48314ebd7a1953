"""``stoker shuffle --on lambda``: Lambda's runtime in a function cloud whose instances die and are invoked twice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

import stoker
from stoker._stores import S3Options
from stoker_local import BucketConfig, BucketSpec, LocalBucket, running_server
from stoker_local.functions import (
    FunctionCloud,
    FunctionCloudConfig,
    FunctionFault,
    FunctionFaultPlan,
    FunctionSpec,
    function_cloud,
)
from stoker_local.functions import FunctionFaultKind as Kind
from stoker_torch import Loader
from stoker_torch._config import LoaderShuffle

DATASET = "s3://stoker/train"
SAMPLES = 2000
_TIMEOUT_SECONDS = 300  # of a hang
Clouds = tuple[LocalBucket, FunctionCloud]


@asynccontextmanager
async def both() -> AsyncIterator[Clouds]:
    shuffle = FunctionSpec(
        name="stoker-shuffle",
        handler="stoker_functions.aws.shuffle",
        memory_mb=512,
        timeout_seconds=30.0,
        concurrency=2,
        environment={"STOKER_DATASETS": f"train={DATASET}"},
    )
    config = FunctionCloudConfig(functions=(shuffle,), init_seconds=60.0)
    buckets = BucketConfig(buckets=(BucketSpec(name="stoker"),))
    async with LocalBucket(buckets) as bucket, function_cloud(config, bucket=bucket) as cloud:
        yield bucket, cloud


@pytest.fixture(scope="module")
def clouds() -> Iterator[Clouds]:
    with running_server(both) as clouds:
        schema = {"x": stoker.Array("int64"), "image": stoker.Array("uint8", (20, 20))}
        store = options(clouds[0])
        with stoker.Packer(DATASET, schema=schema, super_sample_bytes=32 << 10, options=store) as packer:
            packer.extend({"x": number, "image": np.full((20, 20), number % 251, "u1")} for number in range(SAMPLES))
        yield clouds


def options(bucket: LocalBucket) -> S3Options:
    return S3Options(
        endpoint_url=bucket.url, region="us-east-1", access_key_id="stoker", secret_access_key="stoker-secret"
    )


def loader(bucket: LocalBucket, shuffle: LoaderShuffle) -> Loader:
    return Loader(DATASET, batch_size=64, shuffle=shuffle, seed=7, lanes=2, options=options(bucket))


def shuffled(clouds: Clouds, *more: str) -> str:
    """Run the command, and return what it said."""
    bucket, cloud = clouds
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        "AWS_ENDPOINT_URL_S3": bucket.url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "stoker",
        "AWS_SECRET_ACCESS_KEY": "stoker-secret",
    }
    command = [sys.executable, "-m", "stoker.cli", "shuffle", DATASET, "--seed", "7", "--lanes", "2"]
    functions = ["--on", "lambda", "--function-url", cloud.url, "--memory", "512MiB"]
    done = subprocess.run(
        [*command, *functions, *more],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_functions_that_die_and_are_invoked_twice_make_an_epoch_that_is_trained_on_and_then_deleted(
    clouds: Clouds,
) -> None:
    bucket, cloud = clouds
    at_once = [FunctionFault(kind=kind) for kind in (Kind.KILL, Kind.THROTTLE, Kind.DUPLICATE)]
    later = {Kind.KILL: 0.15, Kind.DUPLICATE: 0.15, Kind.THROTTLE: 0.1}
    cloud.inject(FunctionFaultPlan(script=tuple(at_once), probabilities=later, within_seconds=0.1, seed=5))
    shown = shuffled(clouds, "--epoch", "0", "--way", "scattered", "--slices", "6", "--plan")
    assert re.search(r"scattered +6 +6 .*\$0\.0000", shown)
    said = shuffled(clouds, "--epochs", "0..1", "--way", "scattered", "--slices", "6")
    assert re.search(r"\$(\d+\.\d+) for functions", said)
    assert f"epoch 1 is at {DATASET}/epochs/" in said
    cloud.inject(FunctionFaultPlan())
    for epoch in (0, 1):
        with loader(bucket, "materialized") as mine, loader(bucket, "full") as full:
            mine.set_epoch(epoch)
            full.set_epoch(epoch)
            for one, other in zip(mine, full, strict=True):
                assert sorted(one["x"].tolist()) == sorted(other["x"].tolist())
                assert (one["image"][:, 0, 0] == one["x"] % 251).all()
            assert mine._feed.is_materialized  # type: ignore[union-attr]
    shuffled(clouds, "--epoch", "2", "--keep", "1", "--slices", "2", "--quiet")
    there = {key.split("/")[3] for key in bucket.objects["stoker"] if "/epochs/" in key}
    assert there == {"00000001", "00000002"}
    assert cloud.statistics()["stoker-shuffle"].faults["kill"]
