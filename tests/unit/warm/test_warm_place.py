"""What nodes hold as a place of a tier server: read once for all who ask, in bounded memory, each tenant's alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from stoker.errors import StoreError
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from stoker_warm._tier_server import WarmStorage, create_object_name
from support.warm_connections import run
from support.warm_platform import Tier
from support.warm_wires import LinkConfig

CONFIG = WarmConfig(nodes=4, code=ErasureCode(2, 1))
SIZE = 100_000
TENANT = "0123456789abcdef"
KEYS = [f"{TENANT}/{number:08x}{SIZE:08x}{number:016x}" for number in range(6)]
OBJECTS = {key: bytes([number]) * SIZE for number, key in enumerate(KEYS)}


async def filled(tier: Tier, keys: Sequence[str] = KEYS) -> WarmStorage:
    """Return a place that was given objects."""
    place = WarmStorage(tier.proxy)
    for key in keys:
        assert place.reserve(key, SIZE, "")
        await place.store(key, memoryview(OBJECTS[key]))
        place.cancel_reservation(key)
    await tier.put()
    return place


def counting_reads(tier: Tier) -> list[str]:
    """Return a list to which each object is added that is read from the nodes."""
    found, read = list[str](), tier.proxy.objects.read

    async def counted(name: str, into: memoryview) -> bool:
        found.append(name)
        return await read(name, into)

    tier.proxy.objects.read = counted  # type: ignore[method-assign]  # to look inside
    return found


async def read(place: WarmStorage, key: str, *, seconds: float = 0.0) -> bytes | None:
    """Return an object, after it was needed for some time."""
    async with place.pin(key) as data:
        await asyncio.sleep(seconds)
        return None if data is None else bytes(data)


def test_what_was_kept_is_read_and_what_was_not_is_missing() -> None:
    async def test() -> None:
        async with Tier(CONFIG) as tier:
            place = await filled(tier, KEYS[:5])
            assert [await read(place, key) for key in KEYS] == [*list(OBJECTS.values())[:5], None]
            assert [key in place for key in KEYS] == [True] * 5 + [False]
            found = place.statistics()
            assert (found.objects, found.added, found.hits, found.declined) == (5, 5, 5, 0)
            assert 5 * SIZE * 1.5 <= found.used_bytes <= found.limit_bytes

    run(test)


def test_an_object_is_read_from_nodes_once_for_all_readers() -> None:
    async def test() -> None:
        async with Tier(CONFIG) as tier:
            place = await filled(tier)
            reads = counting_reads(tier)
            slow = asyncio.create_task(read(place, KEYS[0], seconds=5.0))
            others = [asyncio.create_task(read(place, KEYS[0])) for _ in range(5)]
            assert await asyncio.gather(*others) == [OBJECTS[KEYS[0]]] * 5
            await asyncio.sleep(2.0)
            assert await read(place, KEYS[0]) == await slow == OBJECTS[KEYS[0]]
            assert len(reads) == 1
            assert tier.proxy.statistics().hits == 7, "each is a GET that the bucket was spared"
            assert await read(place, KEYS[0]) == OBJECTS[KEYS[0]]
            assert len(reads) == 2, "its memory has gone"

    run(test)


def test_a_cancelled_reader_affects_no_other_and_the_last_one_releases_the_memory() -> None:
    async def test() -> None:
        async with Tier(CONFIG, link=LinkConfig(bytes_per_second=1e6)) as tier:
            place = await filled(tier)
            leaving, staying = (asyncio.create_task(read(place, KEYS[0])) for _ in range(2))
            await asyncio.sleep(0.01)
            leaving.cancel()
            assert await staying == OBJECTS[KEYS[0]]
            last = asyncio.create_task(read(place, KEYS[1]))
            await asyncio.sleep(0.01)
            assert place._budget.held == SIZE
            last.cancel()
            await asyncio.wait([last])
            await asyncio.sleep(0.01)
            assert (place._budget.held, place._reads) == (0, {})
            assert await read(place, KEYS[1]) == OBJECTS[KEYS[1]]

    run(test)


def test_memory_is_bounded_for_any_number_of_readers_and_others_wait() -> None:
    async def test() -> None:
        async with Tier(CONFIG) as tier:
            await filled(tier)
            place = WarmStorage(tier.proxy, max_read_bytes=2 * SIZE)
            readers = [asyncio.create_task(read(place, key, seconds=0.1)) for key in KEYS * 20]
            most = 0
            while not all(each.done() for each in readers):
                most = max(most, place._budget.held)
                await asyncio.sleep(0.01)
            assert [each.result() for each in readers] == [*OBJECTS.values()] * 20
            assert most == 2 * SIZE
            assert place._budget.held == 0

    run(test)


def test_an_object_that_never_fits_or_that_nodes_have_lost_is_missing_and_leaves_no_memory_behind() -> None:
    async def test() -> None:
        async with Tier(CONFIG) as tier:
            place = await filled(tier)
            assert await read(WarmStorage(tier.proxy, max_read_bytes=SIZE - 1), KEYS[0]) is None
            for number in range(CONFIG.nodes):
                tier.platform.reclaim(f"warm-{number}")
            assert [await read(place, key) for key in KEYS] == [None] * len(KEYS)
            await asyncio.sleep(0.01)
            assert place._budget.held == 0

    run(test)


def test_a_failed_read_fails_for_all_its_waiters() -> None:
    async def test() -> None:
        async with Tier(CONFIG) as tier:
            place = await filled(tier)

            async def failing(name: str, into: memoryview) -> bool:
                await asyncio.sleep(1.0)
                raise StoreError("it is broken")

            tier.proxy.objects.read = failing  # type: ignore[method-assign]  # as nothing does on purpose
            found = await asyncio.gather(*(read(place, KEYS[0]) for _ in range(3)), return_exceptions=True)
            assert [type(each) for each in found] == [StoreError] * 3
            await asyncio.sleep(0.01)
            assert place._budget.held == 0

    run(test)


def test_offers_are_bounded_before_they_arrive_and_one_that_breaks_off_gives_its_room_back() -> None:
    async def test() -> None:
        config = WarmConfig(nodes=4, code=ErasureCode(2, 1), pending_bytes=2 * SIZE)
        async with Tier(config) as tier:
            place = WarmStorage(tier.proxy)
            assert [place.reserve(key, SIZE, "") for key in KEYS[:3]] == [True, True, False]
            assert [key in place for key in KEYS[:3]] == [True, True, False]
            place.cancel_reservation(KEYS[0])
            assert place.reserve(KEYS[2], SIZE, "")
            assert place.statistics().declined == 1
            assert await read(place, KEYS[2]) is None, "it is on its way"
            await place.store(KEYS[2], memoryview(OBJECTS[KEYS[2]]))
            assert not place.reserve(KEYS[3], SIZE, ""), "a copy waits to be written"
            await tier.put()
            assert place.reserve(KEYS[3], SIZE, "")

    run(test)


def test_an_object_whose_shards_cannot_be_sent_is_declined_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Tier(CONFIG) as tier:
            place = WarmStorage(tier.proxy)
            with caplog.at_level(logging.WARNING, "stoker.warm.proxy"):
                assert not any(place.reserve(key, CONFIG.max_object_bytes + 1, "") for key in KEYS)
            (told,) = caplog.messages
            assert "use a code with more data shards" in told

    run(test)


def test_an_object_that_is_dropped_is_not_found_again() -> None:
    async def test() -> None:
        async with Tier(CONFIG) as tier:
            place = await filled(tier)
            place.drop(KEYS[0])
            assert (KEYS[0] in place, await read(place, KEYS[0])) == (False, None)
            assert await read(place, KEYS[1]) == OBJECTS[KEYS[1]]

    run(test)


def test_tenants_have_objects_of_their_own_under_one_name() -> None:
    async def test() -> None:
        async with Tier(CONFIG) as tier:
            place = await filled(tier, KEYS[:1])
            name = KEYS[0].partition("/")[2]
            for other in ("f" * 16, ""):
                assert await read(place, f"{other}/{name}") is None
            assert create_object_name(KEYS[0])[8:16] == name[8:16], "the size stays in it"

    run(test)
