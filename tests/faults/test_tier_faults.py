"""Tiers in virtual time: slow and failing disks, spoilt files, cancelled fetches, and a bucket that fails, too."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker import FetchConfig
from stoker._cache import disk_tier as module
from stoker._cache.index import ManagedTier
from stoker._fetch.fetcher import Fetcher
from stoker._memory.ring import Ring
from stoker.testing import run_virtual
from support.faulty_store import FaultyStore, StoreProfile
from support.tiers import LARGEST_BYTES, MANIFEST, OBJECTS, body, disk_tier, future, memory_tier

SLOTS = 8


class Disk:
    """Threads that take virtual time, of a disk that fails and spoils with some probability."""

    def __init__(self, rng: random.Random, path: Path, fails: float, spoils: float) -> None:
        self.rng, self.path, self.fails, self.spoils = rng, path, fails, spoils
        self.busy = 0
        self.threads: set[asyncio.Future[Any]] = set()

    async def in_thread(self, work: Callable[[threading.Event], Any]) -> Any:
        """Like the real one: a cancelled caller waits for the end of the work."""
        cancelled = threading.Event()
        thread = asyncio.ensure_future(self._work(work, cancelled))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.wait([thread])
            thread.exception()
            raise

    async def until_cancelled(self, work: Callable[[], Any], executor: object, left: object) -> Any:
        """Like the real one: a cancelled caller does not wait for the thread."""
        thread = asyncio.ensure_future(self._work(lambda _: work(), threading.Event()))
        self.threads.add(thread)
        thread.add_done_callback(self.threads.discard)
        thread.add_done_callback(lambda _: thread.exception())
        return await asyncio.shield(thread)

    async def _work(self, work: Callable[[threading.Event], Any], cancelled: threading.Event) -> Any:
        self.busy += 1
        try:
            await asyncio.sleep(self.rng.expovariate(1 / 0.02))
            if self.rng.random() < self.spoils:
                self._spoil()
            return work(cancelled)
        finally:
            self.busy -= 1

    def _spoil(self) -> None:
        files = sorted(each for each in self.path.rglob("*") if each.is_file())
        if files:
            os.truncate(self.rng.choice(files), self.rng.randrange(3000))

    def write(self, handle: int, data: Any) -> int:
        if self.rng.random() < self.fails:
            raise OSError(self.rng.choice([errno.EIO, errno.ENOSPC]), "the disk failed")
        return REAL_WRITE(handle, data[: self.rng.randrange(1, len(data) + 1)])

    def preadv(self, handle: int, into: Any, at: int) -> int:
        if self.rng.random() < self.fails:
            raise OSError(errno.EIO, "the disk failed")
        (piece,) = into
        return REAL_READ(handle, [piece[: self.rng.randrange(1, len(piece) + 1)]], at)


REAL_WRITE, REAL_READ = os.write, os.preadv


async def fetch_many(tiers: list[ManagedTier], store: FaultyStore, rng: random.Random, disk: Disk) -> int:
    """Fetch in a random order, a few at a time, some of which are cancelled; return how many came."""
    ring = Ring(SLOTS, LARGEST_BYTES)
    fetcher = Fetcher(store, ring=ring, rng=rng, config=FetchConfig(deadline_seconds=600.0), tiers=tiers)
    ahead = future(epochs=None)
    for tier in tiers:
        await tier.follow(MANIFEST, ahead)
    arrived = 0

    async def fetch_one(row: int) -> None:
        nonlocal arrived
        slot = await fetcher.fetch(MANIFEST.ref(row))
        try:
            await asyncio.sleep(rng.random() * 0.05)
            assert ring.view(slot, len(body(row))) == body(row), row  # it was not written to
        finally:
            ring.release(slot)
        arrived += 1

    for turn in range(60):
        fetches = [asyncio.ensure_future(fetch_one(rng.randrange(20))) for _ in range(SLOTS // 2)]
        if rng.random() < 0.4:
            await asyncio.sleep(rng.random() * 0.1)
            rng.choice(fetches).cancel()
        found = await asyncio.gather(*fetches, return_exceptions=True)
        assert all(each is None or isinstance(each, asyncio.CancelledError) for each in found), found
        ahead.advance(turn // 10, turn % 10 * 10)
    assert ring.statistics().free == SLOTS
    for tier in tiers:
        await tier.close()
    if disk.threads:
        await asyncio.wait(disk.threads)
    assert (disk.busy, store.active) == (0, 0)
    return arrived


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_to_tiers_every_object_comes_and_is_right(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    disk = Disk(rng, tmp_path, fails=rng.choice([0.0, 0.0, 0.01]), spoils=rng.choice([0.0, 0.1, 0.3]))
    monkeypatch.setattr(module, "run_in_thread", disk.in_thread)
    monkeypatch.setattr(module, "run_in_thread_until_cancelled", disk.until_cancelled)
    monkeypatch.setattr(os, "write", disk.write)
    monkeypatch.setattr(os, "preadv", disk.preadv)
    profile = StoreProfile(probability={"error": 0.05, "reset": 0.05, "corrupt": 0.03, "truncate": 0.02})
    store = FaultyStore(OBJECTS, profile=profile, seed=seed)
    tiers: list[ManagedTier] = [disk_tier(tmp_path, rng.randrange(1, 20), rng.choice(["next-use", "lru", "fifo"]))]
    if rng.random() < 0.5:
        tiers.insert(0, memory_tier(rng.randrange(1, 10)))
    arrived = run_virtual(fetch_many(tiers, store, rng, disk))
    assert arrived > 200
    for tier in tiers:
        found = tier.statistics()
        assert found.hits <= found.lookups
        assert found.objects == 0  # closed


def test_what_a_tier_has_costs_no_request_while_the_bucket_is_out(tmp_path: Path) -> None:
    async def check() -> None:
        tier, rng = disk_tier(tmp_path, 20), random.Random(1)
        store = FaultyStore(OBJECTS, profile=StoreProfile(outages=[(10.0, 1e9)], tail_sigma=0.0))
        ring = Ring(SLOTS, LARGEST_BYTES)
        fetcher = Fetcher(
            store,
            ring=ring,
            rng=rng,
            config=FetchConfig(min_concurrency=1, start_concurrency=1, max_concurrency=1),
            tiers=[tier],
        )
        await tier.follow(MANIFEST, future())
        for row in range(10):
            ring.release(await fetcher.fetch(MANIFEST.ref(row)))
        await asyncio.sleep(20)
        waiting = asyncio.ensure_future(fetcher.fetch(MANIFEST.ref(15)))  # holds the only permit
        await asyncio.sleep(1)
        sent = len(store.sent_seconds)
        begun = asyncio.get_running_loop().time()
        for row in range(10):
            slot = await fetcher.fetch(MANIFEST.ref(row))
            assert ring.view(slot, len(body(row))) == body(row)
            ring.release(slot)
        assert asyncio.get_running_loop().time() == begun
        assert len(store.sent_seconds) == sent
        assert fetcher.stats.tier_hits == {tier.name: 10}
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await tier.close()

    run_virtual(check())
