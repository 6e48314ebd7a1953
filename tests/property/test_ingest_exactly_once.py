"""Raw objects, announced in any groups, more than once, to functions that die, are in the data set once each."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from stoker import open_store
from stoker._maintenance.garbage import collect_garbage
from stoker._maintenance.recovery import rebuild_manifest
from stoker.abc import ObjectInfo
from stoker.errors import StokerError
from stoker.testing import DyingStore, run_virtual
from stoker_functions._commit import commit, compact
from stoker_functions._ingest import ingest_objects
from support.deployments import DelayedStore, Place, plenty

OBJECTS = 60
STEPS = 25
SEEDS = 30
BLOCKS = 3


class Story:
    """What happens to one data set: deliveries, commits and compactions, some of which die, some at the same time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.place = Place()
        self.happened: Counter[str] = Counter()

    async def run(self) -> None:
        objects = await self.place.put(range(OBJECTS), value_bytes=self.random.choice([100, 300, 900]))
        undelivered = list(objects)
        for _ in range(STEPS):
            steps = [self._step(objects, undelivered) for _ in range(self.random.choice([1, 1, 2, 3]))]
            await asyncio.gather(*steps)
        while undelivered:  # a queue drops a message only after it was received
            await self._deliver(undelivered[:20], undelivered, is_doomed=False)
        await self._commit(is_doomed=False)
        assert sorted(await self.place.numbers()) == list(range(OBJECTS))
        await self._compact(is_doomed=False)
        assert sorted(await self.place.numbers()) == list(range(OBJECTS))
        await self._check_recovery()

    async def _step(self, objects: list[ObjectInfo], undelivered: list[ObjectInfo]) -> None:
        is_doomed = self.random.random() < 0.4
        what = self.random.choices(["deliver", "commit", "compact", "maintain"], [6, 3, 1, 1])[0]
        if what == "deliver":
            group = self.random.sample(objects, self.random.randint(1, 12))
            await self._deliver(group, undelivered, is_doomed=is_doomed)
        elif what == "commit":
            await self._commit(is_doomed=is_doomed)
        elif what == "maintain":
            await self._maintain(is_doomed=is_doomed)
        else:
            await self._compact(is_doomed=is_doomed)

    def _deployment(self, is_doomed: bool) -> Any:
        lives, late = self.random.randint(0, 40), self.random.random() < 0.5

        def wrap(store: Any) -> Any:
            return DyingStore(DelayedStore(store, 0.01), lives if is_doomed else 10**9, late=late)

        return self.place.deployment(wrap)

    async def _deliver(self, group: list[ObjectInfo], undelivered: list[ObjectInfo], *, is_doomed: bool) -> None:
        try:
            for error in await ingest_objects(self.place.notified(group), self._deployment(is_doomed), plenty()):
                if error is not None:
                    raise error
        except StokerError:
            self.happened["delivery died"] += 1
            return
        self.happened["delivered"] += 1
        if self.random.random() < 0.8:  # else the answer is lost, and the queue delivers again
            undelivered[:] = [info for info in undelivered if info not in group]

    async def _commit(self, *, is_doomed: bool) -> None:
        try:
            result = await commit({"dataset": self.place.dataset}, self._deployment(is_doomed), plenty())
        except StokerError:
            self.happened["commit died"] += 1
            return
        self.happened["committed"] += bool(result["runs"])
        self.happened["repeated"] += bool(result["repeated_samples"])

    async def _compact(self, *, is_doomed: bool) -> None:
        event = {"dataset": self.place.dataset, "super_sample_bytes": 8000}
        try:
            result = await compact(event, self._deployment(is_doomed), plenty())
        except StokerError:
            self.happened["compaction died"] += 1
            return
        self.happened["compacted"] += bool(result["objects_before"])

    async def _maintain(self, *, is_doomed: bool) -> None:
        """Collect garbage, or rebuild an intact manifest, concurrently with everything else."""
        store = self._deployment(is_doomed).dataset_store(self.place.dataset)
        try:
            if self.random.random() < 0.7:
                await collect_garbage(store, delete=True, keep_versions=self.random.choice([None, 1, 3]))
                self.happened["collected"] += 1
            else:
                await rebuild_manifest(store, adopt=self.random.random() < 0.5)
                self.happened["rebuilt"] += 1
        except StokerError:
            self.happened["maintenance died"] += 1

    async def _check_recovery(self) -> None:
        """Without its manifests the data set is rebuilt from the rest, before garbage is collected and behind it."""
        store = open_store(self.place.dataset)
        for _ in range(2):
            for key in [*await self.place.keys("manifests/"), "manifest.safetensors"]:
                await store.delete(key)
            report = await rebuild_manifest(store)
            assert report.lost == ()
            await self._commit(is_doomed=False)  # of what a commit that died has left
            assert sorted(await self.place.numbers()) == list(range(OBJECTS))
            await collect_garbage(store, delete=True, keep_versions=1)
            assert sorted(await self.place.numbers()) == list(range(OBJECTS))


@pytest.mark.parametrize("block", range(BLOCKS))
def test_whatever_dies_and_however_often_it_is_announced_every_object_is_there_exactly_once(block: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(block * SEEDS // BLOCKS, (block + 1) * SEEDS // BLOCKS):
        story = Story(seed)
        try:
            run_virtual(story.run())
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        happened += story.happened
    for what in (
        "delivered",
        "delivery died",
        "committed",
        "commit died",
        "repeated",
        "compacted",
        "compaction died",
        "collected",
        "rebuilt",
    ):
        assert happened[what], f"{what}: never"
