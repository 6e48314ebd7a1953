"""The warm tier as a fetcher meets it: asked before the bucket, told what came from there, never trusted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from stoker import FetchConfig
from stoker._fetch.fetcher import Fetcher
from stoker._memory.ring import Ring
from stoker.testing import run_virtual
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from stoker_warm._tier import WarmTier
from support.faulty_store import FaultyStore, StoreProfile, pin
from support.warm_platform import TIER_SECRET, Tier, warm_name

BODIES = {f"data/{number:02}": random.Random(number).randbytes(3000 + number) for number in range(20)}
REFS = pin(BODIES)
CODES = ["2+1", "2+2", "4+2"]


class Bench:
    """A fetcher between a warm tier and a bucket."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.store = FaultyStore(BODIES, profile=StoreProfile(tail_sigma=0.0))
        self.ring = Ring(4, 4096)
        self.fetcher = Fetcher(
            self.store,
            ring=self.ring,
            rng=random.Random(1),
            config=FetchConfig(hedge=False, attempt_seconds=20.0),
            tiers=[WarmTier.from_proxy(tier.proxy, TIER_SECRET)],
        )

    async def fetch_all(self) -> int:
        """Fetch every object once; return how many requests the bucket got for it.

        Behind it lies the pause in which a tier is left alone that was late, since its nodes had to start.
        """
        before = len(self.store.sent_seconds)
        for ref in REFS:
            slot = await self.fetcher.fetch(ref)
            assert bytes(self.ring.view(slot, ref.size_bytes)) == BODIES[ref.key]
            self.ring.release(slot)
        await asyncio.sleep(5.0)
        return len(self.store.sent_seconds) - before

    async def recovers(self) -> None:
        """Fetch until all objects come from the tier: each is there once its loss is known, and nodes have started."""
        requests = [await self.fetch_all() for _ in range(4)]
        assert requests[-1] == 0, requests


def check(code: str, test: Callable[[Bench], Awaitable[None]]) -> None:
    """Run a test when all objects are in the tier and its nodes sleep, in virtual time."""

    async def main() -> None:
        made = ErasureCode.parse(code)
        async with Tier(WarmConfig(nodes=made.shards, code=made)) as tier:
            bench = Bench(tier)
            assert await bench.fetch_all() == len(REFS), "from the bucket, once each"
            assert await bench.fetch_all() == 0
            await asyncio.sleep(5.0)
            await test(bench)

    run_virtual(main())


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("is_awake", [False, True])
def test_with_as_many_shards_of_every_object_lost_as_there_is_parity_for_the_bucket_is_not_asked(
    code: str, is_awake: bool
) -> None:
    async def test(bench: Bench) -> None:
        if is_awake:
            await bench.tier.can_read(warm_name(REFS[0]), BODIES[REFS[0].key])
        for node in range(bench.tier.config.code.parity):
            bench.tier.platform.reclaim(f"warm-{node}")
        assert await bench.fetch_all() == 0
        assert await bench.fetch_all() == 0
        assert bench.tier.proxy.statistics().losses == 0

    check(code, test)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("is_awake", [False, True])
def test_with_one_more_lost_the_bucket_serves_until_every_object_is_back(code: str, is_awake: bool) -> None:
    async def test(bench: Bench) -> None:
        if is_awake:
            await bench.tier.can_read(warm_name(REFS[0]), BODIES[REFS[0].key])
        for node in range(bench.tier.config.code.parity + 1):
            bench.tier.platform.reclaim(f"warm-{node}")
        assert await bench.fetch_all() == len(REFS)
        await bench.recovers()
        assert bench.tier.proxy.statistics().objects == len(REFS)

    check(code, test)


def test_the_loss_of_all_nodes_is_only_a_cold_start() -> None:
    async def test(bench: Bench) -> None:
        for node in range(bench.tier.config.nodes):
            bench.tier.platform.reclaim(f"warm-{node}")
        assert await bench.fetch_all() == len(REFS)
        await bench.recovers()

    check("2+1", test)


def test_objects_are_distinguished_by_their_bytes_not_by_their_keys() -> None:
    async def test(bench: Bench) -> None:
        key = REFS[0].key
        changed = BODIES[key][::-1]
        bench.store.objects[key] = changed
        (ref,) = pin({key: changed})
        slot = await bench.fetcher.fetch(ref)
        assert bytes(bench.ring.view(slot, ref.size_bytes)) == changed
        bench.ring.release(slot)

    check("2+1", test)


def test_an_object_of_which_the_tier_has_other_bytes_is_forgotten_and_comes_from_the_bucket_once() -> None:
    async def test(bench: Bench) -> None:
        ref, proxy = REFS[0], bench.tier.proxy
        proxy.objects.remove(warm_name(ref))
        await bench.tier.put((warm_name(ref), BODIES[ref.key][::-1]))  # which its MACs cannot tell: they are of these
        before = len(bench.store.sent_seconds)
        for _ in range(3):
            slot = await bench.fetcher.fetch(ref)
            assert bytes(bench.ring.view(slot, ref.size_bytes)) == BODIES[ref.key]
            bench.ring.release(slot)
            await asyncio.sleep(5.0)
        assert bench.fetcher.stats.checksum_failures == 1
        assert len(bench.store.sent_seconds) == before + 1
        assert await bench.tier.can_read(warm_name(ref), BODIES[ref.key])

    check("2+1", test)


def test_a_late_tier_costs_one_request_of_the_bucket_and_nothing_writes_afterwards() -> None:
    async def test(bench: Bench) -> None:
        fetcher = Fetcher(
            bench.store,
            ring=bench.ring,
            rng=random.Random(1),
            tiers=[WarmTier.from_proxy(bench.tier.proxy, TIER_SECRET)],
        )
        for instance in bench.tier.platform.all_instances():
            instance.freeze()
        before = len(bench.store.sent_seconds)
        slot = await fetcher.fetch(REFS[0])
        assert len(bench.store.sent_seconds) == before + 1
        for instance in bench.tier.platform.all_instances():
            instance.thaw()
        await asyncio.sleep(20.0)
        assert bytes(bench.ring.view(slot, REFS[0].size_bytes)) == BODIES[REFS[0].key]
        bench.ring.release(slot)

    check("2+1", test)
