"""A training whose warm tier freezes, falls silent and dies: it reads from the bucket without waits for nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest

import stoker
from stoker import S3Options
from stoker_local import BucketConfig, BucketSpec, LocalBucket, NetworkShape
from stoker_local.functions import FunctionCloud
from stoker_torch import Loader
from stoker_warm._events import NodeTask, WakeEvent
from support.local_bucket import s3_options
from support.warm_cloud import PREFIX, instances_of, node_cloud

NODES = 3
SAMPLES, SAMPLE_BYTES, BATCH_SIZE = 480, 4096, 24
BUCKET_SECONDS = 0.03
BUSY_SECONDS = 0.9
"""Allowed for a busy machine; without a breaker the longest waits are those of the tier's limit, ten seconds."""
URL = "s3://stoker/train"


class Striking:
    """Sends a signal to all nodes again and again, as a platform that wakes them for a call would undo it.

    Args:
        number: the signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._number, self._ended = number, threading.Event()
        self._pids = [process.pid for node in range(NODES) for process in instances_of(node)]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.005):
            self._send(self._number)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                os.kill(pid, number)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._send(signal.SIGCONT)


def epoch(loader: Loader) -> tuple[float, int]:
    """Read an epoch; return its longest wait and the super-samples that came from the tier."""
    hits, waits, numbers = loader.stats().tier_hits.get("warm", 0), list[float](), list[int]()
    begun = time.perf_counter()
    for batch in loader:
        waits.append(time.perf_counter() - begun)
        numbers += batch["id"].tolist()
        time.sleep(0.01)
        begun = time.perf_counter()
    assert sorted(numbers) == list(range(SAMPLES))
    return max(waits), loader.stats().tier_hits.get("warm", 0) - hits


def train(options: S3Options, warm: str, number: signal.Signals) -> None:
    with Loader(URL, batch_size=BATCH_SIZE, window=2, memory="1MB", options=options, warm=warm) as loader:
        for _ in range(20):
            if epoch(loader)[1]:
                break
            time.sleep(0.3)
        else:
            pytest.fail("no super-sample came from the tier in 20 epochs")
        striking = Striking(number)
        try:
            found = [epoch(loader) for _ in range(4)]
        finally:
            striking.end()
        assert max(wait for wait, _ in found) <= BUCKET_SECONDS + 0.1 + BUSY_SECONDS, found
        if number is signal.SIGSTOP:
            stats = loader.stats()
            assert stats.tier_late["warm"] >= 3
            assert stats.tier_states["warm"] != "closed"


async def warmed(cloud: FunctionCloud, number: int) -> None:
    """Have an instance of a node."""
    wake = WakeEvent(node=f"warm-{number}", proxy="none:0", task=NodeTask.WARM)
    assert not (await cloud.invoke(f"{PREFIX}-warm-{number}", wake.to_event())).error_type


def pack(options: S3Options) -> None:
    schema = {"id": stoker.Array("int64"), "data": stoker.Array("uint8", (SAMPLE_BYTES,))}
    with stoker.Packer(URL, schema=schema, super_sample_bytes=64 << 10, options=options) as packer:
        packer.extend(
            {"id": number, "data": np.full(SAMPLE_BYTES, number % 251, np.uint8)} for number in range(SAMPLES)
        )


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_no_batch_waits_for_nodes_that_are_frozen_or_killed(number: signal.Signals) -> None:
    async def check() -> None:
        buckets = BucketConfig(
            buckets=(BucketSpec(name="stoker"),), shape=NetworkShape(first_byte_seconds=BUCKET_SECONDS)
        )
        async with LocalBucket(buckets) as bucket, node_cloud(NODES) as cloud:
            options = s3_options(bucket)
            await asyncio.to_thread(pack, options)
            await asyncio.gather(*(warmed(cloud, node) for node in range(NODES)))
            nodes = f"nodes={NODES}&code=2+1&writes=16&wake=60s&ping=1s&endpoint={cloud.url}"
            warm = f"warm+lambda://{PREFIX}?listen=127.0.0.1:0&{nodes}"
            await asyncio.to_thread(train, options, warm, number)

    asyncio.run(check())
