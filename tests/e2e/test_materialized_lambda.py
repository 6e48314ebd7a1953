"""``stoker shuffle --on lambda``: Lambda's runtime in a function cloud whose instances die and are invoked twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

import stoker
from stoker_local import LocalBucket, running_server
from stoker_local.functions import FunctionFault, FunctionFaultPlan
from stoker_local.functions import FunctionFaultKind as Kind
from stoker_torch import Loader
from stoker_torch._config import LoaderShuffle
from support.function_cloud import Clouds, bucket_and_cloud, function, run_stoker
from support.local_bucket import s3_options

DATASET = "s3://stoker/train"
SAMPLES = 2000


def shuffling() -> AbstractAsyncContextManager[Clouds]:
    settings = {"STOKER_DATASETS": f"train={DATASET}"}
    return bucket_and_cloud(
        function("stoker_functions.aws.shuffle", name="stoker-shuffle", concurrency=2, environment=settings)
    )


@pytest.fixture(scope="module")
def clouds() -> Iterator[Clouds]:
    with running_server(shuffling) as clouds:
        schema = {"x": stoker.Array("int64"), "image": stoker.Array("uint8", (20, 20))}
        store = s3_options(clouds[0])
        with stoker.Packer(DATASET, schema=schema, super_sample_bytes=32 << 10, options=store) as packer:
            packer.extend({"x": number, "image": np.full((20, 20), number % 251, "u1")} for number in range(SAMPLES))
        yield clouds


def loader(bucket: LocalBucket, shuffle: LoaderShuffle) -> Loader:
    return Loader(DATASET, batch_size=64, shuffle=shuffle, seed=7, lanes=2, options=s3_options(bucket))


def shuffled(clouds: Clouds, *more: str) -> str:
    """Run the command, and return its output."""
    bucket, cloud = clouds
    command = ["shuffle", DATASET, "--seed", "7", "--lanes", "2", "--on", "lambda", "--function-url", cloud.url]
    done = run_stoker(bucket, *command, "--memory", "512MiB", *more)
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
            assert mine._resources.pipeline.is_materialized
    shuffled(clouds, "--epoch", "2", "--keep", "1", "--slices", "2", "--quiet")
    there = {key.split("/")[3] for key in bucket.objects["stoker"] if "/epochs/" in key}
    assert there == {"00000001", "00000002"}
    assert cloud.statistics()["stoker-shuffle"].faults["kill"]
