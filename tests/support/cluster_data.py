"""The data set that ranks with cache processes read, in a bucket of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker_local import BucketConfig, BucketProcess, BucketSpec, bucket_process
from support.cluster_rank import URL

__all__ = ["DATA_BYTES", "SAMPLES", "SUPER_SAMPLES", "cluster_bucket", "rank_environment"]

SAMPLES, SAMPLE_BYTES = 3840, 20_000
DATA_BYTES = SAMPLES * SAMPLE_BYTES
SUPER_SAMPLES = 39


@contextmanager
def cluster_bucket() -> Iterator[BucketProcess]:
    """Run a bucket with the data set, which processes find by their environment."""
    config = BucketConfig(buckets=(BucketSpec(name="cluster"),))
    with pytest.MonkeyPatch.context() as environment, bucket_process(config) as bucket:
        for name, value in bucket.environment().items():
            environment.setenv(name, value)
        schema = {"x": stoker.Array("uint8", (SAMPLE_BYTES,)), "id": stoker.Array("int64")}
        with stoker.Packer(URL, schema=schema, super_sample_bytes=2_000_000) as packer:
            packer.extend(
                {"x": np.full(SAMPLE_BYTES, number % 251, np.uint8), "id": number} for number in range(SAMPLES)
            )
        yield bucket


def rank_environment(rank: int, ranks: int, local_ranks: int) -> dict[str, str]:
    """Return the environment of a rank's process, as a launcher sets it."""
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % local_ranks, "LOCAL_WORLD_SIZE": local_ranks}
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        **{key: str(value) for key, value in numbers.items()},
    }
