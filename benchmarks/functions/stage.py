"""The test bench of functions: a local bucket, and Lambda's real runtime clients."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.functions.quiet import functions_cpu_seconds
from stoker._cost.prices import GB_BYTES
from stoker._sources.folders import files_schema
from stoker._sources.parts import SourcePart
from stoker.abc import ObjectInfo
from stoker_local import BucketConfig, BucketSpec, LocalBucket, NetworkShape
from stoker_local.functions import FunctionCloud, FunctionCloudConfig, FunctionSpec, Outcome, function_cloud
from stoker_warm._auth import WarmSecret

__all__ = ["DATA", "MEMORY_BYTES", "Stage", "Usage", "function", "gb_seconds", "pack_event", "stage"]

RAW, DATA = "s3://raw", "s3://data"
MEMORY_MB = 1769  # one processor, as functions are deployed
MEMORY_BYTES = MEMORY_MB << 20
_ROOT = Path(__file__).parents[2]
_SETTINGS = {
    "STOKER_DATASETS": f"all={DATA} taken={DATA}/taken served={DATA}/served",
    "STOKER_SOURCES": RAW,
    "STOKER_INGEST": '{"dataset": "taken", "kind": "files"}',
    "STOKER_WARM_SECRET": WarmSecret.generate().reveal(),
}
_PLENTY_SECONDS = 900.0


def function(name: str, handler: str = "", *, concurrency: int = 1) -> FunctionSpec:
    """Return one of stoker's functions with its deployed settings, or another handler with the same settings."""
    return FunctionSpec(
        name=name,
        handler=handler or f"stoker_functions.aws.{name}",
        task_root=str(_ROOT),
        memory_mb=MEMORY_MB,
        timeout_seconds=_PLENTY_SECONDS,
        concurrency=concurrency,
        environment=_SETTINGS,
    )


@dataclass(slots=True)
class Usage:
    """Resource usage during a measurement.

    Attributes:
        seconds: duration.
        function_cpu_seconds: processor time of all functions.
        other_cpu_seconds: processor time of this process: the bucket and the function cloud.
        requests: S3 operation → number of requests to the bucket.
    """

    seconds: float = 0.0
    function_cpu_seconds: float = 0.0
    other_cpu_seconds: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Stage:
    """A bucket and functions.

    Attributes:
        bucket: server with the buckets ``raw`` and ``data``.
        cloud: cloud of the functions.
    """

    bucket: LocalBucket
    cloud: FunctionCloud

    def put_raw(self, folder: str, count: int, size_bytes: int) -> list[ObjectInfo]:
        """Store raw objects of incompressible bytes below ``raw/<folder>``."""
        content = np.random.default_rng(0).integers(0, 256, (count, size_bytes), dtype=np.uint8)
        found = []
        for number, data in enumerate(content):
            key = f"{number:06}.bin"
            stored = self.bucket.put("raw", f"{folder}/{key}", data.tobytes())
            found.append(ObjectInfo(key=key, size_bytes=size_bytes, tag=stored.tag.strip('"')))
        return found

    async def invoke(self, name: str, event: Any) -> Outcome:
        """Run a function, waiting for its concurrency.

        Raises:
            RuntimeError: it failed.
        """
        outcome = await self.cloud.invoke(name, event, waits=True)
        if outcome.error_type:
            raise RuntimeError(f"{name} failed: {outcome.payload.decode()}\n{outcome.log.decode(errors='replace')}")
        return outcome

    @contextmanager
    def measure(self) -> Iterator[Usage]:
        """Yield the resource usage of the block, complete after it; the functions in it must be warm."""
        usage, before = Usage(), Counter(self.bucket.counts.requests)
        started, ours, theirs = time.perf_counter(), time.process_time(), functions_cpu_seconds()
        yield usage
        usage.seconds = time.perf_counter() - started
        usage.other_cpu_seconds = time.process_time() - ours
        usage.function_cpu_seconds = functions_cpu_seconds() - theirs
        usage.requests = Counter(self.bucket.counts.requests) - before


@asynccontextmanager
async def stage(*functions: FunctionSpec, shape: NetworkShape) -> AsyncIterator[Stage]:
    """Run a bucket with a shape, and functions that may read its raw objects and write its data sets."""
    buckets = BucketConfig(buckets=(BucketSpec(name="raw"), BucketSpec(name="data")), shape=shape)
    config = FunctionCloudConfig(functions=functions, init_seconds=60.0)
    async with LocalBucket(buckets) as bucket, function_cloud(config, bucket=bucket) as cloud:
        yield Stage(bucket, cloud)


def pack_event(
    folder: str, objects: Sequence[ObjectInfo], dataset: str, super_sample_bytes: int = 8 << 20
) -> dict[str, Any]:
    """Return the event that packs raw objects into a data set; the same values give the same run."""
    part = SourcePart(
        dataset=f"{DATA}/{dataset}",
        dataset_id=hashlib.sha256(dataset.encode()).hexdigest()[:16],
        source=f"{RAW}/{folder}",
        kind="files",
        schema=files_schema(),
        super_sample_bytes=super_sample_bytes,
        objects=tuple(objects),
    )
    return part.to_json()


def gb_seconds(outcome: Outcome) -> float:
    """Return the billed GB-seconds of an invocation."""
    return outcome.billed_milliseconds / 1000 * MEMORY_BYTES / GB_BYTES
