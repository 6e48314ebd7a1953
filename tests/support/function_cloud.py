"""Functions for the local function cloud, and clients that call them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aioboto3
import psutil
from botocore.config import Config

from stoker_local import BucketConfig, BucketSpec, LocalBucket
from stoker_local.functions import FunctionCloud, FunctionCloudConfig, FunctionSpec, function_cloud

__all__ = [
    "GOOGLE_CODE",
    "HANDLERS",
    "Clouds",
    "bucket_and_cloud",
    "cloud_of",
    "function",
    "is_running",
    "lambda_client",
    "run_stoker",
]

HANDLERS = str(Path(__file__).parent / "cloud_handlers")
GOOGLE_CODE = str(Path(HANDLERS) / "google_code.py")
_WAIT_SECONDS = 300.0  # of a hang
Clouds = tuple[LocalBucket, FunctionCloud]


def function(handler: str, **changes: Any) -> FunctionSpec:
    """Return a function with its handler's name and enough memory for these tests."""
    module = "" if "." in handler else "lambda_code."
    settings: dict[str, Any] = {"timeout_seconds": 30.0, "memory_mb": 512, "concurrency": 4}
    name = handler.rpartition(".")[2]
    return FunctionSpec(**{"name": name, "handler": module + handler, "task_root": HANDLERS, **settings, **changes})


@asynccontextmanager
async def cloud_of(
    *functions: FunctionSpec, bucket: Any = None, gcs: Any = None, **settings: Any
) -> AsyncIterator[FunctionCloud]:
    """Run a function cloud with limits for start-up that also hold on a busy machine."""
    config = FunctionCloudConfig(
        **{"init_seconds": 60.0, "event_retry_seconds": (0.01, 0.02), **settings, "functions": functions}
    )
    async with function_cloud(config, bucket=bucket, gcs=gcs) as cloud:
        yield cloud


@asynccontextmanager
async def bucket_and_cloud(
    *functions: FunctionSpec, buckets: tuple[str, ...] = ("stoker",), **settings: Any
) -> AsyncIterator[Clouds]:
    """Run a local bucket, and a function cloud whose functions use it."""
    config = BucketConfig(buckets=tuple(BucketSpec(name=name) for name in buckets))
    async with LocalBucket(config) as bucket, cloud_of(*functions, bucket=bucket, **settings) as cloud:
        yield bucket, cloud


@asynccontextmanager
async def lambda_client(cloud: FunctionCloud, **changes: Any) -> AsyncIterator[Any]:
    """Yield an aioboto3 client with the default keys that does not retry."""
    settings: dict[str, Any] = {
        "endpoint_url": cloud.url,
        "aws_access_key_id": "stoker",
        "aws_secret_access_key": "stoker-secret",
        "region_name": "us-east-1",
        "config": Config(retries={"total_max_attempts": 1}, connect_timeout=60, read_timeout=60),
    }
    async with aioboto3.Session().client("lambda", **{**settings, **changes}) as client:
        yield client


def run_stoker(bucket: LocalBucket, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, with the environment of a bucket."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return subprocess.run(
        [sys.executable, "-m", "stoker.cli", *arguments],
        env={**mine, **bucket.environment()},
        capture_output=True,
        text=True,
        check=False,
        timeout=_WAIT_SECONDS,
    )


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        status: str = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return False
    return status not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
