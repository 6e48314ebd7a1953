"""An epoch is written to a bucket under random faults, in virtual time: it is right, or a typed error is raised."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import pytest

from stoker import Array, Bytes, Order, OrderConfig, Schema
from stoker._fetch.materialized_pipeline import read_epoch
from stoker._format.manifest import Manifest, version_key
from stoker._format.supersample import SuperSample
from stoker._order.epoch_layout import EpochLayout
from stoker.abc import Buffer, ObjectInfo
from stoker.errors import (
    ConnectionLostError,
    NotFoundError,
    PreconditionFailedError,
    ServerError,
    StoreError,
    ThrottledError,
)
from stoker.testing import run_virtual
from stoker_functions._shuffle_job.work import Way, perform
from support.faulty_store import FAULTS, FaultyStore, StoreProfile
from support.materialized import MEMORY_BYTES, WAYS, plan_tasks
from support.packed_objects import packed_objects

T = TypeVar("T")

SCHEMA = Schema({"number": Array("int64"), "image": Array("uint8", (20, 10)), "sound": Bytes()})
COUNTS = [30, 1, 44, 25, 50]
RNG = np.random.default_rng(0)
SAMPLES = [
    {"number": i, "image": RNG.integers(0, 256, (20, 10), np.uint8), "sound": RNG.bytes(i % 9 * 40)}
    for i in range(sum(COUNTS))
]
MANIFEST, OBJECTS = packed_objects(SCHEMA, SAMPLES, COUNTS)


class FaultyBucket(FaultyStore):
    """A faulty store that can be written to; writes fail too, before they have an effect or behind it."""

    def __init__(self, profile: StoreProfile, seed: int) -> None:
        super().__init__({**OBJECTS, version_key(1): MANIFEST.to_bytes()}, profile=profile, seed=seed)
        self._lots = random.Random(seed)
        self._writes = 0

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        return await self._unreliable("get", lambda: self._get(key))

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        return await self._unreliable("put", lambda: self._put(key, bytes(data), if_absent, if_tag))

    async def delete(self, key: str) -> None:
        await self._unreliable("delete", lambda: self._delete(key))

    async def close(self) -> None:
        pass

    async def _unreliable(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        await asyncio.sleep(self._lots.random() * 0.05)
        lot = self._lots.random() / max(1e-9, self.profile.probability.get("error", 0.0) * 4)
        if lot < 1:
            self.faults[f"{name} refused"] += 1
            raise self._lots.choice([ThrottledError("slow down"), ServerError("inside"), ConnectionLostError("gone")])
        result = await work()
        if lot < 2:
            self.faults[f"{name} unanswered"] += 1
            raise ConnectionLostError("gone before the answer")
        return result

    async def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        if key not in self.objects:
            raise NotFoundError(f"{key} does not exist")
        return self.objects[key], ObjectInfo(key=key, size_bytes=len(self.objects[key]), tag=self.tags[key])

    async def _put(self, key: str, data: bytes, if_absent: bool, if_tag: str | None) -> ObjectInfo:
        if (if_absent and key in self.objects) or (if_tag is not None and self.tags.get(key) != if_tag):
            raise PreconditionFailedError(f"{key} was written by another process")
        self._writes += 1
        self.objects[key], self.tags[key] = data, f"w{self._writes}"
        return ObjectInfo(key=key, size_bytes=len(data), tag=self.tags[key])

    async def _delete(self, key: str) -> None:
        self.objects.pop(key, None)


def faulty_profile(seed: int) -> StoreProfile:
    rng = random.Random(seed)
    return StoreProfile(
        tail_sigma=rng.choice([0.3, 1.0]),
        probability={fault: rng.choice([0.0, 0.03, 0.06]) for fault in FAULTS},
        outages=[(0.3, 0.3 + rng.random())] if rng.random() < 0.3 else [],
        closing_seconds=rng.choice([0.0, 0.05]),
    )


def numbers_of(bucket: FaultyBucket, layout: EpochLayout) -> list[int]:
    """Return the numbers of an epoch's samples, in its rows' order, from the objects as they stand."""
    epoch = asyncio.run(_found(bucket, layout))
    found: list[int] = []
    for row in range(len(epoch)):
        sample = SuperSample(bucket.objects[layout.folder + epoch.key(row)])
        sample.verify()
        found += sample.column("number").tolist()
        for place in range(len(sample)):
            value, wanted = sample[place], SAMPLES[found[place - len(sample)]]
            assert value["sound"] == wanted["sound"]
            assert (value["image"] == wanted["image"]).all()
    return found


async def _found(bucket: FaultyBucket, layout: EpochLayout) -> Manifest:
    bucket.profile = StoreProfile(tail_sigma=0.0)
    epoch = await read_epoch(bucket, layout)
    assert epoch is not None
    return epoch


def check(bucket: FaultyBucket, *, lanes: int, epoch: int) -> None:
    layout = EpochLayout(MANIFEST, seed=7, lanes=lanes, epoch=epoch)
    full = Order(np.array(COUNTS), OrderConfig(shuffle="full", seed=7), epoch).at(0, len(SAMPLES))
    rows = Order(np.array([len(SAMPLES)]), OrderConfig(shuffle="none", lanes=lanes), epoch).at(0, len(SAMPLES))
    found = numbers_of(bucket, layout)
    assert [found[row] for row in rows.tolist()] == full.tolist()


async def play(bucket: FaultyBucket, way: Way, seed: int) -> None:
    """Carry out all tasks, each by two at the same time, of which one is given up at some time, or both."""
    rng = random.Random(seed)
    for phase in plan_tasks(way, lanes=2, slices=4, scatters=2, epoch=seed % 5, object_bytes=4000):
        for task in phase:
            while True:
                twins = [asyncio.create_task(perform(bucket, task, memory_bytes=MEMORY_BYTES)) for _ in range(2)]
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random())
                    rng.choice(twins).cancel()
                results = await asyncio.gather(*twins, return_exceptions=True)
                assert bucket.active == 0, "something was left behind"
                assert all(isinstance(each, dict | StoreError | asyncio.CancelledError) for each in results), results
                if any(isinstance(result, dict) and result["state"] == "complete" for result in results):
                    break


@pytest.mark.parametrize("way", WAYS)
def test_bad_weather_and_twins_make_the_same_epoch(way: Way) -> None:
    faults: Counter[str] = Counter()
    for seed in range(12):
        bucket = FaultyBucket(faulty_profile(seed), seed)
        run_virtual(play(bucket, way, seed))
        faults += bucket.faults
        check(bucket, lanes=2, epoch=seed % 5)
    assert {"put refused", "put unanswered", "get refused", "corrupt", "throttle", "reset"} <= faults.keys()
