"""Latency of super-samples if 5% of a bucket's requests are late by 2 s: without hedges, hedged, and with the tier."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np

from benchmarks.warm_tier.fleet import Object, create_objects, fleet
from benchmarks.warm_tier.rate import patient
from stoker import FetchConfig, open_store
from stoker._fetch.fetcher import Fetcher
from stoker._memory.ring import Ring
from stoker_local import PROFILES, BucketConfig, bucket_process
from stoker_warm._erasure import ErasureCode
from stoker_warm._tier import WarmTier

__all__ = ["Tail", "tails"]

OBJECT_BYTES, OBJECTS = 8 << 20, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Latencies of sequential reads.

    Attributes:
        name: name of the way to read.
        median_seconds: median of all reads.
        p99_seconds: 99th percentile of all reads.
        requests: number of bucket requests per read.
        reads: number of reads.
    """

    name: str
    median_seconds: float
    p99_seconds: float
    requests: float
    reads: int


async def tails(reads: int) -> list[Tail]:
    """Measure the three ways."""
    objects = create_objects(OBJECTS, OBJECT_BYTES)
    code, alone, rng = ErasureCode(10, 2), FetchConfig(hedge=False), random.Random(1)
    with (
        bucket_process(BucketConfig(shape=PROFILES["cloud-tail"])) as bucket,
        patch.dict(os.environ, bucket.environment()),
    ):
        store = open_store("s3://stoker/warm")
        try:
            for each in objects:
                await store.put(each.ref.key, each.data)
            reading = Reading(objects, reads)
            found = [await reading.tail("bucket", Fetcher(store, ring=reading.ring, rng=rng, config=alone))]
            found.append(await reading.tail("bucket, hedged", Fetcher(store, ring=reading.ring, rng=rng)))
            async with fleet(patient(code)) as running:
                await running.put(objects)
                warm = Fetcher(
                    store, ring=reading.ring, rng=rng, tiers=[WarmTier.from_proxy(running.proxy, running.tenant)]
                )
                await reading.tail("once, so that all memory is in use", warm)
                found.append(await reading.tail(f"warm tier, {code}", warm))
        finally:
            await store.close()
    return found


class Reading:
    """Objects that are read in turn, sequentially.

    Args:
        objects: objects to read.
        reads: number of reads.
    """

    def __init__(self, objects: Sequence[Object], reads: int) -> None:
        self.ring = Ring(4, OBJECT_BYTES)
        self._objects, self._reads = objects, reads

    async def tail(self, name: str, fetcher: Fetcher) -> Tail:
        """Read with a fetcher of the ring."""
        seconds, before = [], fetcher.stats.requests
        for number in range(self._reads):
            began = time.perf_counter()
            slot = await fetcher.fetch(self._objects[number % len(self._objects)].ref)
            seconds.append(time.perf_counter() - began)
            self.ring.release(slot)
        half, most = np.percentile(seconds, [50, 99])
        return Tail(
            name=name,
            median_seconds=float(half),
            p99_seconds=float(most),
            requests=(fetcher.stats.requests - before) / self._reads,
            reads=self._reads,
        )
