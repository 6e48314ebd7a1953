"""Compactions with other targets and other limits, at the same time: no sample and no remembered name is lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence

from stoker import RetryingStore, open_store
from stoker._maintenance.compaction import CompactionResult, compact
from stoker._maintenance.garbage import collect_garbage
from stoker._pack.catalog import BucketCatalog
from stoker.abc import ObjectInfo
from stoker.testing import run_virtual
from stoker_functions._commit import commit
from stoker_functions._ingest import ingest_objects
from support.deployments import DelayedStore, Place, plenty

SEEDS = range(84, 94)


async def delivered(place: Place, raw: Sequence[ObjectInfo], group: int) -> None:
    """Let raw objects come in groups, and commit them."""
    for start in range(0, len(raw), group):
        await ingest_objects(place.notified(raw[start : start + group]), place.deployment(), plenty())
    await commit({"dataset": place.dataset}, place.deployment(), plenty())


async def compacted(place: Place, target_bytes: int, limit_bytes: int | None) -> CompactionResult:
    store = RetryingStore(DelayedStore(open_store(place.dataset), 0.01))
    now_seconds = time.time()
    return await compact(
        store, BucketCatalog(store), now_seconds=now_seconds, super_sample_bytes=target_bytes, limit_bytes=limit_bytes
    )


async def story(rng: random.Random, happened: Counter[str]) -> None:
    place = Place()
    raw: list[ObjectInfo] = []
    for _ in range(rng.randint(2, 4)):
        count = rng.randint(5, 30)
        fresh = await place.put(range(len(raw), len(raw) + count))
        await delivered(place, fresh, rng.choice([1, 3, 7]))
        raw += fresh
        asked = [
            (rng.choice([5000, 9000, 20_000]), rng.choice([None, 11_000])) for _ in range(rng.choice([1, 2, 2, 3]))
        ]
        done = await asyncio.gather(*(compacted(place, *each) for each in asked))
        happened["compacted"] += any(each.objects_before for each in done)
        happened["several compacted"] += sum(bool(each.objects_after) for each in done) > 1
        if rng.random() < 0.5:
            await collect_garbage(open_store(place.dataset), delete=True, keep_versions=1)
    for group in (1, 4):
        await delivered(place, rng.sample(raw, len(raw)), group)
        assert sorted(await place.numbers()) == list(range(len(raw)))


def test_what_comes_again_after_compactions_at_the_same_time_is_known() -> None:
    happened: Counter[str] = Counter()
    for seed in SEEDS:
        try:
            run_virtual(story(random.Random(seed), happened))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert happened["compacted"]
    assert happened["several compacted"]
