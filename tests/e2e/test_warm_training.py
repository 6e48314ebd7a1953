"""A training that reads through twelve nodes, which are killed and frozen at random while it does."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import psutil

import stoker
from stoker import S3Options
from stoker_local import BucketConfig, BucketSpec, LocalBucket, NetworkShape
from stoker_local.functions import FunctionCloud
from stoker_torch import Loader
from stoker_warm._events import NodeTask, WakeEvent
from support.local_bucket import s3_options
from support.warm_cloud import PREFIX, instances_of, node_cloud

NODES = 12
SAMPLES, SAMPLE_BYTES = 1500, 4096
OBJECT_BYTES = 128 << 10
BATCH_SIZE, BATCH_SECONDS = 25, 0.08
URL = "s3://stoker/train"
SCHEMA = {"id": stoker.Array("int64"), "data": stoker.Array("uint8", (SAMPLE_BYTES,))}


def content(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of a sample."""
    return np.random.default_rng(number).integers(0, 256, SAMPLE_BYTES, np.uint8)


@dataclass(frozen=True, slots=True)
class Run:
    """What a training saw.

    Attributes:
        epochs: the numbers of samples, as they came.
        damaged: samples whose bytes are not theirs.
        read: super-samples that it read, from wherever.
        warm: of these, from nodes.
    """

    epochs: list[list[int]]
    damaged: list[int]
    read: int
    warm: int


def train(options: S3Options, warm: str) -> Run:
    """Read two epochs with half as much memory as the data set takes."""
    epochs, damaged = list[list[int]](), list[int]()
    with Loader(
        URL, batch_size=BATCH_SIZE, seed=3, window=2, memory="3MB", epochs=2, options=options, warm=warm
    ) as loader:
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                epochs[-1] += batch["id"].tolist()
                for number, data in zip(batch["id"].tolist(), batch["data"].numpy(), strict=True):
                    if not np.array_equal(data, content(number)):
                        damaged.append(number)
                time.sleep(BATCH_SECONDS)  # what a step takes
        found = loader.stats()
    return Run(epochs, damaged, found.lookups, found.tier_hits.get("warm", 0))


async def warmed(cloud: FunctionCloud, number: int) -> None:
    """Have an instance of a node, as a schedule does before anybody trains."""
    wake = WakeEvent(node=f"warm-{number}", proxy="none:0", task=NodeTask.WARM)
    assert not (await cloud.invoke(f"{PREFIX}-warm-{number}", wake.to_event())).error_type


async def torment(rng: random.Random) -> tuple[int, int]:
    """Kill and freeze nodes at random, asleep or at work, until cancelled; return how many of each."""
    killed = frozen = 0
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(0.8)
            processes = instances_of(rng.randrange(NODES))
            is_kill = rng.random() < 0.5
            for process in processes:
                with suppress(ProcessLookupError, psutil.NoSuchProcess):
                    os.kill(process.pid, signal.SIGKILL if is_kill else signal.SIGSTOP)
                    killed, frozen = killed + is_kill, frozen + (not is_kill)
            if not is_kill:
                await asyncio.sleep(rng.random())
                for process in processes:
                    with suppress(ProcessLookupError, psutil.NoSuchProcess):
                        os.kill(process.pid, signal.SIGCONT)
    return killed, frozen


def test_every_sample_comes_once_an_epoch_and_the_second_mostly_from_nodes_whatever_happens_to_them() -> None:
    async def check() -> None:
        buckets = BucketConfig(buckets=(BucketSpec(name="stoker"),), shape=NetworkShape(first_byte_seconds=0.05))
        async with LocalBucket(buckets) as bucket, node_cloud(NODES) as cloud:
            options = s3_options(bucket)
            await asyncio.to_thread(pack, options)
            await asyncio.gather(*(warmed(cloud, number) for number in range(NODES)))
            nodes = f"nodes={NODES}&code=4+2&writes=16&wake=60s&ping=1s&endpoint={cloud.url}"
            tormenting = asyncio.create_task(torment(random.Random(3)))
            try:
                run = await asyncio.to_thread(train, options, f"warm+lambda://{PREFIX}?listen=127.0.0.1:0&{nodes}")
            finally:
                tormenting.cancel()
            killed, frozen = await tormenting
        print(f"killed {killed}, froze {frozen}: {run.warm} of {run.read} super-samples came from nodes")
        assert killed
        assert frozen
        assert [sorted(numbers) for numbers in run.epochs] == [list(range(SAMPLES))] * 2
        assert not run.damaged
        # An object is read once an epoch, so all that nodes gave was for the second.
        assert run.read / 4 < run.warm <= run.read / 2

    asyncio.run(check())


def pack(options: S3Options) -> None:
    with stoker.Packer(URL, schema=SCHEMA, super_sample_bytes=OBJECT_BYTES, options=options) as packer:
        for number in range(SAMPLES):
            packer.write({"id": number, "data": content(number)})
