"""Behaviour of every tier that evicts super-samples by the order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stoker._cache.eviction import POLICIES
from stoker._cache.index import ManagedTier
from stoker.errors import ConfigError, MemoryBudgetError
from support.tiers import LARGEST_BYTES, MANIFEST, body, disk_tier, future, memory_tier, offer, read_row

Maker = Callable[..., ManagedTier]


@pytest.fixture(params=["memory", "disk"])
def create_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Maker:
    """Return a function that creates a tier for a number of objects and a policy."""
    if request.param == "memory":
        return memory_tier
    return lambda held, policy="next-use": disk_tier(tmp_path / "cache", held, policy)


def test_what_was_offered_is_read_again_bit_by_bit(create_tier: Maker) -> None:
    async def check() -> None:
        tier = create_tier(20)
        await tier.follow(MANIFEST, future())
        for row in range(20):
            await offer(tier, row)
            assert await read_row(tier, row) == body(row)
        assert [await read_row(tier, row) for row in range(20)] == [body(row) for row in range(20)]
        found = tier.statistics()
        assert (found.lookups, found.hits, found.objects, found.evicted, found.damaged) == (40, 40, found.added, 0, 0)
        await tier.close()

    asyncio.run(check())


def test_what_was_never_offered_is_not_here(create_tier: Maker) -> None:
    async def check() -> None:
        tier = create_tier(4)
        await tier.follow(MANIFEST, future())
        await offer(tier, 1)
        assert await read_row(tier, 2) is None
        assert tier.statistics().hits == 0
        await tier.close()

    asyncio.run(check())


def test_what_is_offered_twice_is_held_once(create_tier: Maker) -> None:
    async def check() -> None:
        tier = create_tier(2)
        await tier.follow(MANIFEST, future())
        await offer(tier, 1, 1, 1, 2)
        assert [await read_row(tier, row) for row in (1, 2)] == [body(1), body(2)]
        assert (tier.statistics().added, tier.statistics().objects, tier.statistics().declined) == (2, 2, 0)
        await tier.close()

    asyncio.run(check())


def test_an_object_with_another_checksum_is_another_object(create_tier: Maker) -> None:
    async def check() -> None:
        tier = create_tier(4)
        await tier.follow(MANIFEST, future())
        await offer(tier, 1)
        ref = MANIFEST.ref(1)
        for other in (replace(ref, crc32c=ref.crc32c ^ 1), replace(ref, key="data/other"), MANIFEST.ref(4)):
            assert not await tier.read(other, memoryview(bytearray(other.size_bytes)))
        await tier.close()

    asyncio.run(check())


@pytest.mark.parametrize("policy", POLICIES)
def test_it_never_holds_more_than_its_limit(create_tier: Maker, policy: str) -> None:
    async def check() -> None:
        tier, ahead = create_tier(5, policy), future(epochs=None)
        await tier.follow(MANIFEST, ahead)
        for epoch in range(3):
            for row in sorted(range(20), key=lambda each: (each * 7 + epoch) % 20):
                if await read_row(tier, row) is None:
                    await offer(tier, row)
                ahead.advance(epoch, row)
                found = tier.statistics()
                assert found.used_bytes <= found.limit_bytes == 5 * LARGEST_BYTES
                assert found.objects <= 5
        assert tier.statistics().objects == 5
        await tier.close()

    asyncio.run(check())


def test_it_keeps_what_is_needed_soonest(create_tier: Maker) -> None:
    async def check() -> None:
        tier, ahead = create_tier(5), future()
        await tier.follow(MANIFEST, ahead)
        for row in range(20):
            await offer(tier, row)
        soonest = sorted(range(20), key=ahead.next_use)[:5]
        assert {row for row in range(20) if await read_row(tier, row) is not None} == set(soonest)
        await tier.close()

    asyncio.run(check())


def test_what_is_held_stays_for_the_next_stretch_of_another_order(create_tier: Maker) -> None:
    async def check() -> None:
        tier = create_tier(5)
        await tier.follow(MANIFEST, future())
        await offer(tier, 0, 1, 2, 3)
        await tier.follow(MANIFEST, future(seed=9))
        assert [await read_row(tier, row) is not None for row in range(5)] == [True] * 4 + [False]
        ahead = future(seed=10)
        await tier.follow(MANIFEST, ahead)
        farthest = max(range(4), key=ahead.next_use)
        await offer(tier, 4)
        sooner = min((row for row in range(5, 20)), key=ahead.next_use)
        await offer(tier, sooner)
        assert ahead.next_use(sooner) < ahead.next_use(farthest)
        gone = [row for row in range(5) if await read_row(tier, row) is None]
        assert gone == [max(range(5), key=ahead.next_use)]
        await tier.close()

    asyncio.run(check())


def test_what_another_version_does_not_have_goes_first(create_tier: Maker) -> None:
    async def check() -> None:
        tier = create_tier(3)
        await tier.follow(MANIFEST, future())
        await offer(tier, 17, 18, 19)
        for row in (17, 18, 19):
            assert await read_row(tier, row) is not None
        import numpy as np

        smaller = replace(
            MANIFEST, rows=MANIFEST.rows.select(np.arange(20) < 18), runs=(replace(MANIFEST.runs[0], rows=18),)
        )
        await tier.follow(smaller, future())
        for row in (0, 1):
            tier.offer(smaller.ref(row), memoryview(body(row)))
        assert await read_row(tier, 18) is None
        assert await read_row(tier, 19) is None
        assert await read_row(tier, 17) is not None
        await tier.close()

    asyncio.run(check())


def test_nothing_is_kept_before_it_follows_and_closing_twice_is_closing_once(create_tier: Maker) -> None:
    async def check() -> None:
        tier = create_tier(3)
        await tier.close()
        await tier.follow(MANIFEST, future())
        await offer(tier, 1)
        await tier.close()
        await tier.close()
        assert tier.statistics().objects == 0
        await tier.follow(MANIFEST, future())
        await offer(tier, 2)
        assert await read_row(tier, 2) == body(2)
        await tier.close()

    asyncio.run(check())


def test_what_is_larger_than_every_slot_is_declined(create_tier: Maker) -> None:
    async def check() -> None:
        tier = create_tier(3)
        await tier.follow(MANIFEST, future())
        large = replace(MANIFEST.ref(0), size_bytes=LARGEST_BYTES + 1)
        tier.offer(large, memoryview(bytes(LARGEST_BYTES + 1)))
        assert tier.statistics().declined == 1
        assert not await tier.read(large, memoryview(bytearray(LARGEST_BYTES + 1)))
        await tier.close()

    asyncio.run(check())


def test_a_limit_below_one_object_and_an_unknown_policy_are_refused(create_tier: Maker) -> None:
    with pytest.raises(MemoryBudgetError, match="raise limit="):
        create_tier(0)
    with pytest.raises(ConfigError, match="next-use, no-evict, lru, fifo"):
        create_tier(3, "best")


async def _child_check(tier: ManagedTier, inherits: bool) -> None:
    await tier.follow(MANIFEST, future())
    assert await read_row(tier, 1) == (body(1) if inherits else None)
    await offer(tier, 2)
    assert (await read_row(tier, 2) is not None) is (not inherits)  # the parent has the only part: it only reads
    await tier.close()


def test_a_forked_child_has_a_tier_of_its_own_and_leaves_its_parents_alone(create_tier: Maker) -> None:
    async def follow(tier: ManagedTier) -> None:
        await tier.follow(MANIFEST, future())
        await offer(tier, 1)
        assert await read_row(tier, 1) is not None

    tier = create_tier(3)
    with asyncio.Runner() as runner:
        runner.run(follow(tier))
        child = os.fork()
        if not child:
            code = 1
            try:
                asyncio.events._set_running_loop(None)
                asyncio.new_event_loop().run_until_complete(_child_check(tier, tier.is_shared))
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert runner.run(read_row(tier, 1)) == body(1)
        assert runner.run(read_row(tier, 2)) is None
        runner.run(tier.close())
