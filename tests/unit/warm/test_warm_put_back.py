"""What nodes lose is put back from where it came from, without anybody reading it; in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stoker import Prices
from stoker.errors import ConfigError, ObjectChangedError, ServerError, StoreError
from stoker.testing import run_virtual
from stoker_warm._code import Code
from stoker_warm._life import State
from stoker_warm._put_back import takes_whole
from stoker_warm._settings import WarmConfig
from support.warm_origin import MemoryOrigin
from support.warm_platform import Mood, Tier, named

OBJECTS = [named(number, 3000 + number) for number in range(6)]
NAME, DATA = OBJECTS[0]
NOTICED_SECONDS = 70.0
"""After so long a node that is called each minute was."""


def check(
    test: Callable[[Tier, MemoryOrigin], Awaitable[None]],
    *,
    nodes: int = 8,
    code: str = "4+2",
    known: list[tuple[str, bytes]] = OBJECTS,
    put_back: int = 2,
    shelf_bytes: int = 1 << 20,
    **settings: Any,
) -> None:
    """Run a test with a tier that holds all objects, and an origin that has those that are known."""

    async def main() -> None:
        origin = MemoryOrigin.of(known)
        config = WarmConfig(nodes=nodes, code=Code.parse(code), put_back=put_back, **{"wake_seconds": 5.0, **settings})
        async with Tier(config, shelf_bytes=shelf_bytes, origins=[origin]) as tier:
            await asyncio.sleep(2.0)
            await tier.put(*OBJECTS)
            await test(tier, origin)

    run_virtual(main())


def holders(tier: Tier, name: str) -> dict[int, int]:
    """Return position → node of an object's shards."""
    found = tier.proxy._directory.find(name, is_use=False)
    return {} if found is None else {at: node for at, node in enumerate(found.nodes) if node >= 0}


def take(tier: Tier, *nodes: int) -> None:
    for node in nodes:
        tier.platform.reclaim(f"warm-{node}")


def is_whole(tier: Tier, name: str) -> bool:
    """Return whether nodes hold all shards of an object, whatever is believed of them."""
    held = {shard for shards in tier.held().values() for shard in shards}
    return sum(shard.object == name for shard in held) == tier.config.code.shards


def put_back(tier: Tier) -> int:
    return tier.proxy.statistics().put_back


def test_what_a_node_lost_is_put_back_before_anybody_reads_it() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        lost = sum(0 in holders(tier, name).values() for name, _ in OBJECTS)
        take(tier, 0)
        await asyncio.sleep(NOTICED_SECONDS)
        assert put_back(tier) == lost >= 2
        assert all(is_whole(tier, name) for name, _ in OBJECTS)
        assert tier.proxy.statistics().rebuilt == 0
        for name, data in OBJECTS:
            assert await tier.kept(name, data)
        assert tier.proxy.statistics().rebuilt == 0

    check(test)


@pytest.mark.parametrize(("at", "is_part"), [(0, True), (3, True), (4, False), (5, False)])
def test_a_data_shard_is_read_as_a_part_of_the_object_and_for_parity_the_whole_is(at: int, is_part: bool) -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        take(tier, holders(tier, NAME)[at])
        await asyncio.sleep(NOTICED_SECONDS)
        (read,) = (read for read in origin.reads if read[0] == NAME)
        assert read[1:] == (tier.config.code.cuts(len(DATA))[at] if is_part else (0, len(DATA)))
        assert is_whole(tier, NAME)
        # Every set of shards that restores the object restores the same.
        take(tier, *(node for place, node in holders(tier, NAME).items() if place in {(at + 1) % 6, (at + 2) % 6}))
        assert await tier.kept(NAME, DATA)

    check(test)


@pytest.mark.parametrize(
    ("code", "positions", "is_whole"),
    [("4+2", [3], False), ("4+2", [0, 1], True), ("4+2", [4], True), ("10+2", [1, 2, 5, 9], False)],
)
def test_the_whole_is_read_for_parity_and_where_parts_would_be_half_of_it(
    code: str, positions: list[int], is_whole: bool
) -> None:
    assert takes_whole(Code.parse(code), positions) == is_whole


def test_an_object_that_lost_several_shards_is_whole_again() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        take(tier, *(holders(tier, NAME)[at] for at in (0, 1)))
        await asyncio.sleep(NOTICED_SECONDS)
        assert is_whole(tier, NAME)

    check(test)


def test_an_object_of_which_more_is_lost_than_parity_is_put_back() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        take(tier, *(holders(tier, NAME)[at] for at in (0, 2, 5)))
        await asyncio.sleep(NOTICED_SECONDS)
        assert is_whole(tier, NAME)
        assert await tier.kept(NAME, DATA)
        assert tier.proxy.statistics().losses == 0

    check(test)


def test_all_nodes_may_be_taken_at_once() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        take(tier, *range(8))
        await asyncio.sleep(2 * NOTICED_SECONDS)
        assert all([await tier.kept(name, data) for name, data in OBJECTS])
        assert tier.proxy.statistics().losses == 0

    check(test)


def test_with_no_more_nodes_than_shards_the_same_node_gets_them_again() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        take(tier, 3)
        await asyncio.sleep(NOTICED_SECONDS)
        assert put_back(tier) == 6
        assert all(is_whole(tier, name) for name, _ in OBJECTS)

    check(test, nodes=6)


def test_what_has_no_place_waits_until_a_node_is_back_and_is_not_read_before() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        tier.platform.mood = Mood(failed=1.0)
        take(tier, 3)
        await asyncio.sleep(5 * NOTICED_SECONDS)
        assert tier.proxy._nodes[3].life.state is State.GONE
        assert (put_back(tier), origin.reads) == (0, [])
        tier.platform.mood = Mood()
        assert await tier.proxy.wake() == {}
        await asyncio.sleep(2.0)
        assert all(is_whole(tier, name) for name, _ in OBJECTS)

    check(test, nodes=6)


def test_what_the_origin_does_not_know_waits_for_the_next_read() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        take(tier, holders(tier, NAME)[0])
        await asyncio.sleep(NOTICED_SECONDS)
        assert not is_whole(tier, NAME)
        assert await tier.kept(NAME, DATA)
        await asyncio.sleep(2.0)
        assert is_whole(tier, NAME)

    check(test, known=OBJECTS[1:])


def test_the_first_origin_that_knows_an_object_gives_it() -> None:
    async def main() -> None:
        origins = [MemoryOrigin.of(OBJECTS[:1]), MemoryOrigin.of(OBJECTS)]
        config = WarmConfig(nodes=6, code=Code.parse("4+2"), put_back=2)
        async with Tier(config, origins=origins) as tier:
            await asyncio.sleep(2.0)
            await tier.put(*OBJECTS)
            take(tier, 0)
            await asyncio.sleep(NOTICED_SECONDS)
            assert all(is_whole(tier, name) for name, _ in OBJECTS)
        assert {name for name, *_ in origins[0].reads} == {NAME}
        assert {name for name, *_ in origins[1].reads} == {name for name, _ in OBJECTS[1:]}

    run_virtual(main())


def test_an_origin_that_cannot_tell_is_asked_again_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        origin.find_failure = ServerError("the bucket is down")
        take(tier, 0)
        await asyncio.sleep(NOTICED_SECONDS + 600.0)
        assert 10 <= origin.asked <= 20
        assert "cannot be put back for now: the bucket is down" in caplog.text
        origin.find_failure = None
        await asyncio.sleep(60.0)
        assert all(is_whole(tier, name) for name, _ in OBJECTS)

    check(test)


def test_an_object_that_cannot_be_read_now_is_tried_again_at_growing_intervals() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        origin.read_failure = ServerError("the bucket is down")
        take(tier, holders(tier, NAME)[0])
        await asyncio.sleep(NOTICED_SECONDS + 600.0)
        assert put_back(tier) == 0
        assert 10 <= len([read for read in origin.reads if read[0] == NAME]) <= 20
        origin.read_failure = None
        await asyncio.sleep(60.0)
        assert all(is_whole(tier, name) for name, _ in OBJECTS)

    check(test)


def test_an_object_that_cannot_be_read_now_is_tried_again_when_a_node_comes() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        origin.read_failure = ServerError("the bucket is down")
        take(tier, holders(tier, NAME)[0])
        await asyncio.sleep(NOTICED_SECONDS + 600.0)
        origin.read_failure = None
        tier.proxy._put_back.met()  # type: ignore[union-attr]
        await asyncio.sleep(1.0)
        assert is_whole(tier, NAME)

    check(test)


def test_a_shard_that_its_node_does_not_take_now_is_put_back_later() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        origin.seconds = 5.0
        take(tier, 3)
        while not origin.under_way:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.5)
        tier.platform.mood = Mood(throttled=1.0)
        take(tier, 3)
        await asyncio.sleep(NOTICED_SECONDS)
        assert not is_whole(tier, NAME)
        tier.platform.mood = Mood()
        await asyncio.sleep(2 * NOTICED_SECONDS)
        assert all(is_whole(tier, name) for name, _ in OBJECTS)

    check(test, nodes=6)


def test_what_an_object_loses_while_it_is_written_is_put_back_afterwards() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        tier.proxy._writer.under_way.add(NAME)
        take(tier, holders(tier, NAME)[0])
        await asyncio.sleep(NOTICED_SECONDS)
        assert not is_whole(tier, NAME)
        tier.proxy._writer.under_way.discard(NAME)
        await asyncio.sleep(60.0)
        assert is_whole(tier, NAME)

    check(test)


def test_an_object_that_is_another_one_by_now_is_not_put_back_and_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        origin.read_failure = ObjectChangedError("somebody wrote there")
        take(tier, holders(tier, NAME)[0])
        await asyncio.sleep(NOTICED_SECONDS)
        take(tier, min(set(range(8)) - set(holders(tier, NAME).values())))
        await asyncio.sleep(NOTICED_SECONDS)
        assert put_back(tier) == 0
        assert len([read for read in origin.reads if read[0] == NAME]) == 1
        assert "are not put back: somebody wrote there" in caplog.text
        # The reservations were given back: a read writes what is missing.
        origin.read_failure = None
        assert await tier.kept(NAME, DATA)
        await asyncio.sleep(2.0)
        assert is_whole(tier, NAME)

    check(test)


def test_a_whole_that_is_damaged_is_not_put_back() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        origin.objects[NAME] = bytes(len(DATA))
        take(tier, holders(tier, NAME)[5])
        await asyncio.sleep(NOTICED_SECONDS)
        assert (NAME, 0, len(DATA)) in origin.reads
        assert not is_whole(tier, NAME)
        assert await tier.kept(NAME, DATA)

    check(test)


def test_what_went_for_others_is_not_put_back() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        origin.seconds = 5.0
        take(tier, *range(8))
        await asyncio.sleep(NOTICED_SECONDS)
        tier.proxy._writer.evict(tier.proxy._directory.forget(OBJECTS[-1][0]))
        tier.proxy._let_go([OBJECTS[-1][0]])
        await asyncio.sleep(NOTICED_SECONDS)
        assert {name for name, *_ in origin.reads} == {name for name, _ in OBJECTS[:-1]}

    check(test, put_back=1, keep_warm_seconds=69.0)


def test_no_more_objects_are_put_back_at_a_time_than_is_set() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        origin.seconds = 5.0
        take(tier, *range(8))
        await asyncio.sleep(3 * NOTICED_SECONDS)
        assert origin.most_under_way == 3
        assert all(is_whole(tier, name) for name, _ in OBJECTS)

    check(test, put_back=3)


def test_by_default_only_reads_put_shards_back() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        take(tier, *range(8))
        await asyncio.sleep(2 * NOTICED_SECONDS)
        assert (put_back(tier), origin.asked) == (0, 0)

    check(test, put_back=WarmConfig().put_back)


def test_an_offer_and_putting_back_do_not_write_twice() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        origin.seconds = 20.0
        take(tier, *range(8))
        while not origin.reads:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(1.0)
        name = origin.reads[0][0]
        tier.proxy.offer(name, memoryview(origin.objects[name]))
        assert tier.proxy.statistics().pending_bytes == 0
        await asyncio.sleep(5 * NOTICED_SECONDS)
        assert all(is_whole(tier, name) for name, _ in OBJECTS)

    check(test)


def test_the_bill_has_what_was_read_for_it() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        take(tier, 0)
        await asyncio.sleep(NOTICED_SECONDS)
        prices = Prices.load()
        bill = tier.proxy.meter.bill(100.0, prices.function("lambda"), prices.store("s3"), "internet")
        assert bill.put_back_requests == len(origin.reads) > 0
        assert bill.put_back_bytes == sum(end - start for _, start, end in origin.reads)
        assert bill.put_back_dollars > bill.put_back_requests * 4e-7
        assert bill.dollars > bill.serve_dollars + bill.warm_dollars + bill.backup_dollars

    check(test)


def test_a_proxy_that_is_closed_reads_nothing_any_more() -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        origin.seconds = 1000.0
        take(tier, *range(8))
        await asyncio.sleep(NOTICED_SECONDS)
        assert origin.under_way
        await tier.proxy.close()
        assert origin.under_way == 0

    check(test)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_taken_and_however_the_origin_fares_all_is_whole_in_the_end(seed: int) -> None:
    async def test(tier: Tier, origin: MemoryOrigin) -> None:
        rng = random.Random(seed)
        origin.seconds = rng.choice([0.0, 0.1, 5.0])
        failures: list[StoreError | None] = [None, None, ServerError("down")]
        for _ in range(30):
            origin.find_failure, origin.read_failure = rng.choice(failures), rng.choice(failures)
            tier.platform.mood = Mood(throttled=rng.choice([0.0, 0.0, 0.5]), failed=rng.choice([0.0, 0.2]))
            take(tier, *rng.sample(range(tier.config.nodes), rng.randint(0, 4)))
            await asyncio.sleep(rng.uniform(0.0, 40.0))
            await tier.kept(*rng.choice(OBJECTS))
        origin.find_failure = origin.read_failure = None
        tier.platform.mood = Mood()
        await tier.proxy.wake()
        await asyncio.sleep(4 * NOTICED_SECONDS)
        assert all(is_whole(tier, name) for name, _ in OBJECTS)
        assert tier.believed() == tier.held()

    check(test, nodes=random.Random(seed).choice([6, 8, 12]))


def test_a_negative_number_of_objects_is_refused() -> None:
    with pytest.raises(ConfigError, match="put_back is a number of objects, 0 for none, not -1"):
        WarmConfig(put_back=-1)
