"""What a proxy does with objects: which are kept, read, lost, written again, and let go; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stoker.errors import ConfigError
from stoker.testing import run_virtual
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from stoker_warm._node_state import NodeState
from stoker_warm._shard import ShardId
from support.warm_platform import MAC, CallFaults, Tier, named
from support.warm_wires import LinkConfig

OBJECTS = [named(number, 3000 + number) for number in range(6)]
NAME, DATA = OBJECTS[0]


def check(
    test: Callable[[Tier], Awaitable[None]],
    *,
    nodes: int = 3,
    code: str = "2+1",
    shelf_bytes: int = 1 << 20,
    **settings: Any,
) -> None:
    """Run a test with a tier whose nodes sleep, in virtual time."""

    async def main() -> None:
        config = WarmConfig(nodes=nodes, code=ErasureCode.parse(code), **{"wake_seconds": 5.0, **settings})
        async with Tier(config, shelf_bytes=shelf_bytes) as tier:
            await asyncio.sleep(2.0)
            await test(tier)

    run_virtual(main())


def statistics(tier: Tier, *names: str) -> list[int]:
    found = tier.proxy.statistics()
    return [getattr(found, name) for name in names]


def test_what_was_offered_is_read_and_what_was_not_is_missed() -> None:
    async def test(tier: Tier) -> None:
        assert not await tier.can_read(NAME, DATA)
        await tier.put(*OBJECTS)
        for name, data in OBJECTS:
            assert await tier.can_read(name, data)
        assert statistics(tier, "hits", "misses", "losses", "stored") == [6, 1, 0, 6]

    check(test)


def test_an_object_of_no_bytes_is_kept_too() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(named(9, 0))
        assert await tier.can_read(*named(9, 0))

    check(test)


@pytest.mark.parametrize("size_bytes", [0, 1])
def test_shards_without_bytes_are_written_again_too(size_bytes: int) -> None:
    """They are counted by the check whether an object can be read."""

    async def test(tier: Tier) -> None:
        tiny = named(9, size_bytes)
        await tier.put(tiny)
        for node in range(tier.config.nodes):
            tier.platform.reclaim(f"warm-{node}")
            await asyncio.sleep(70.0)
            assert await tier.can_read(*tiny)
            await asyncio.sleep(1.0)
        assert statistics(tier, "rebuilt") == [tier.config.nodes]

    check(test)


def test_an_offer_is_copied_and_never_blocks() -> None:
    async def test(tier: Tier) -> None:
        memory = bytearray(DATA)
        tier.proxy.objects.offer(NAME, memoryview(memory))
        memory[:] = bytes(len(memory))
        await asyncio.sleep(3.0)
        assert await tier.can_read(NAME, DATA)

    check(test)


def test_copies_that_wait_are_bounded_and_what_is_more_is_declined() -> None:
    async def test(tier: Tier) -> None:
        for name, data in OBJECTS:
            tier.proxy.objects.offer(name, memoryview(data))
        assert statistics(tier, "pending_bytes", "declined") == [6001, 4]
        await asyncio.sleep(3.0)
        assert statistics(tier, "pending_bytes", "stored", "declined") == [0, 2, 4]

    check(test, pending_bytes=8000)


def test_the_same_object_is_written_once() -> None:
    async def test(tier: Tier) -> None:
        for _ in range(5):
            tier.proxy.objects.offer(NAME, memoryview(DATA))
        assert statistics(tier, "pending_bytes") == [3000]
        await asyncio.sleep(3.0)
        tier.proxy.objects.offer(NAME, memoryview(DATA))
        assert statistics(tier, "pending_bytes", "stored", "declined") == [0, 1, 0]

    check(test)


def test_an_object_that_no_node_takes_is_declined() -> None:
    async def test(tier: Tier) -> None:
        tier.platform.call_faults = CallFaults(throttled=1.0)
        await tier.put((NAME, DATA))
        assert statistics(tier, "stored", "declined", "objects", "held_bytes") == [0, 1, 0, 0]

    check(test, write_seconds=2.0)


@pytest.mark.parametrize("code", ["2+1", "2+2", "1+1", "1+2"])
def test_as_many_shards_as_there_is_parity_for_may_be_lost_and_come_back(code: str) -> None:
    async def test(tier: Tier) -> None:
        parity = tier.config.code.parity
        await tier.put(*OBJECTS)
        for node in range(parity):
            tier.platform.reclaim(f"warm-{node}")
        for _ in range(3):  # the first round finds them gone, the second calls them, the third knows what is lost
            for name, data in OBJECTS:
                assert await tier.can_read(name, data)
            await asyncio.sleep(1.0)
        assert statistics(tier, "hits", "losses", "rebuilt") == [18, 0, 6 * parity]
        assert tier.believed() == tier.held()
        for node in range(parity, 2 * parity):  # others
            tier.platform.reclaim(f"warm-{node % tier.config.nodes}")
        for name, data in OBJECTS:
            assert await tier.can_read(name, data)

    check(test, nodes=ErasureCode.parse(code).shards, code=code)


@pytest.mark.parametrize("code", ["2+1", "2+2", "3+0"])
def test_with_one_more_lost_an_object_is_lost_until_it_is_offered_again_and_only_what_is_missing_is_written(
    code: str,
) -> None:
    async def test(tier: Tier) -> None:
        await tier.put((NAME, DATA))
        lost = tier.config.code.parity + 1
        for node in range(lost):
            tier.platform.reclaim(f"warm-{node}")
        assert not await tier.can_read(NAME, DATA)
        assert statistics(tier, "losses", "misses") == [1, 0]
        assert not await tier.can_read(NAME, DATA)
        assert statistics(tier, "losses", "misses") == [1, 1]
        terms = {each.name: each.store.version.change_count for each in tier.platform.all_instances()}
        await tier.put((NAME, DATA))
        written = sum(each.store.version.change_count - terms[each.name] for each in tier.platform.all_instances())
        assert written == lost
        assert await tier.can_read(NAME, DATA)

    check(test, nodes=ErasureCode.parse(code).shards, code=code)


def test_nodes_that_cannot_be_reached_lose_nothing_and_a_read_ends_in_time() -> None:
    async def test(tier: Tier) -> None:
        await tier.put((NAME, DATA))
        await asyncio.sleep(2.0)
        tier.platform.call_faults = CallFaults(throttled=1.0)
        begun_seconds = asyncio.get_running_loop().time()
        assert not await tier.can_read(NAME, DATA)
        assert asyncio.get_running_loop().time() - begun_seconds <= tier.config.read_seconds
        tier.platform.call_faults = CallFaults()
        await asyncio.sleep(10.0)
        assert await tier.can_read(NAME, DATA)

    check(test)


def test_a_damaged_shard_is_an_erasure_and_is_written_anew() -> None:
    async def test(tier: Tier) -> None:
        await tier.put((NAME, DATA))
        store = tier.platform.instances["warm-0"][0].store
        (shard,) = store.list_ids()
        held = store.get(shard)
        assert held is not None
        payload = bytearray(held.payload)
        payload[7] ^= 1
        store.set(shard, held.mac, payload)
        assert await tier.can_read(NAME, DATA)
        await asyncio.sleep(1.0)
        assert statistics(tier, "corrupt", "hits", "rebuilt") == [1, 1, 1]
        again = store.get(shard)
        assert again is not None
        assert MAC.verify(shard, again.payload, again.mac)

    check(test)


def test_a_slow_node_is_not_waited_for() -> None:
    async def test(tier: Tier) -> None:
        await tier.put((NAME, DATA))
        tier.platform.instances["warm-1"][0].freeze()
        begun_seconds = asyncio.get_running_loop().time()
        assert await tier.can_read(NAME, DATA)
        assert asyncio.get_running_loop().time() - begun_seconds < 0.1
        assert statistics(tier, "late", "hits") == [1, 1]

    check(test)


def test_full_nodes_evict_whole_objects_unread_ones_first() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS[:3])
        assert await tier.can_read(*OBJECTS[0])
        await tier.put(OBJECTS[3])
        assert [await tier.can_read(*each) for each in OBJECTS[:4]] == [True, False, True, True]
        await tier.put(OBJECTS[4])
        await asyncio.sleep(1.0)
        assert statistics(tier, "evicted", "objects") == [2, 3]
        believed = tier.believed()
        assert believed == tier.held()
        assert {len(shards) for shards in believed.values()} == {3}

    check(test, shelf_bytes=3 * (1600 + 768))


def test_pending_deletions_of_a_node_are_not_undone_by_its_list() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS[:2])
        proxy = tier.proxy
        proxy.objects.remove(NAME)
        await proxy._reconcile(proxy._nodes[0])
        assert not await tier.can_read(NAME, DATA)
        await tier.put(OBJECTS[2])
        assert tier.believed() == tier.held()

    check(test)


def test_writers_at_once_do_not_delete_what_the_other_has_just_put_there() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS)
        for turn in range(30):
            for name, _ in OBJECTS[turn % 3 :]:
                tier.proxy.objects.remove(name)
            await tier.put(*OBJECTS[::-1])
        assert tier.believed() == tier.held()

    check(test, fresh_seconds=0.0, writes=4)


def test_an_object_that_is_dropped_is_not_found_again_and_goes_from_its_nodes() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS[:2])
        tier.proxy.objects.remove(NAME)
        tier.proxy.objects.remove(named(99, 10)[0])  # of which nothing is known
        assert not await tier.can_read(NAME, DATA)
        await tier.put(OBJECTS[2])  # which has the nodes told
        assert [await tier.can_read(*each) for each in OBJECTS[:3]] == [False, True, True]
        assert tier.believed() == tier.held()
        await tier.put((NAME, DATA))
        assert await tier.can_read(NAME, DATA)

    check(test)


@pytest.mark.parametrize("delay_seconds", [0.0, 0.0005, 0.001, 0.0011, 0.0015, 0.002, 0.011, 0.012, 0.013])
def test_an_object_that_is_dropped_while_it_is_written_is_not_kept(delay_seconds: float) -> None:
    async def test(tier: Tier) -> None:
        tier.proxy.objects.offer(NAME, memoryview(DATA))
        await asyncio.sleep(delay_seconds)
        tier.proxy.objects.remove(NAME)
        await asyncio.sleep(2.0)
        assert statistics(tier, "objects", "pending_bytes") == [0, 0]
        assert not await tier.can_read(NAME, DATA)
        await tier.put(OBJECTS[1])
        assert tier.believed() == tier.held()
        assert not await tier.can_read(NAME, DATA)

    check(test)


def test_an_object_that_is_dropped_while_it_waits_to_be_written_is_not_kept() -> None:
    async def test(tier: Tier) -> None:
        for name, data in OBJECTS[:2]:
            tier.proxy.objects.offer(name, memoryview(data))
        await asyncio.sleep(0.0005)  # the first is on its way, and it is not the second's turn
        tier.proxy.objects.remove(OBJECTS[1][0])
        await asyncio.sleep(2.0)
        assert statistics(tier, "objects", "stored", "pending_bytes") == [1, 1, 0]
        assert [await tier.can_read(*each) for each in OBJECTS[:2]] == [True, False]

    check(test, writes=1)


def test_an_object_that_is_dropped_while_it_is_read_is_not_written_again() -> None:
    async def test(tier: Tier) -> None:
        await tier.put((NAME, DATA))
        first = ShardId(NAME, 2, 1, 0)
        assert any(each.store.delete(first) for each in tier.platform.all_instances())
        reading = asyncio.ensure_future(tier.can_read(NAME, DATA))
        await asyncio.sleep(0.0005)
        assert not reading.done()
        tier.proxy.objects.remove(NAME)
        assert await reading
        await asyncio.sleep(2.0)
        assert statistics(tier, "objects") == [0]
        assert not await tier.can_read(NAME, DATA)

    check(test)


def test_an_offer_that_no_node_could_begin_is_not_counted_for_ever() -> None:
    async def test(tier: Tier) -> None:
        tier.proxy.objects.offer(NAME, memoryview(DATA))
        await tier.proxy.close()
        tier.proxy.objects.offer(NAME, memoryview(DATA))
        assert statistics(tier, "pending_bytes", "declined") == [0, 1]
        assert not await tier.can_read(NAME, DATA)

    check(test)


@pytest.mark.parametrize("is_crash", [False, True])
def test_a_proxy_in_the_place_of_another_learns_what_nodes_hold(is_crash: bool) -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS)
        await asyncio.sleep(1.0)
        await tier.replace(is_crash=is_crash)
        calls = len(tier.platform.calls)
        await asyncio.sleep(1.0)
        assert len(tier.platform.calls) == calls + tier.config.nodes, "each node is called once"
        assert [await tier.can_read(*each) for each in OBJECTS] == [True] * 6
        assert tier.platform.counts.cold == tier.config.nodes

    check(test)


def test_a_closed_proxy_makes_no_call_and_leaves_no_task() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS)
        reading = [asyncio.ensure_future(tier.can_read(*each)) for each in OBJECTS]
        await asyncio.sleep(0.0)
        await tier.proxy.close()
        await tier.proxy.close()
        await asyncio.wait(reading)
        calls = len(tier.platform.calls)
        await asyncio.sleep(100.0)
        assert len(tier.platform.calls) == calls
        assert (len(tier.proxy._tasks), len(tier.proxy._peer_server._connections)) == (0, 0)

    check(test)


def test_nothing_is_written_to_memory_whose_reader_has_left() -> None:
    async def test(tier: Tier) -> None:
        await tier.put((NAME, DATA))
        for delay_seconds in [at * 0.0002 for at in range(100)]:
            into = bytearray(len(DATA))
            reading = asyncio.ensure_future(tier.proxy.objects.read(NAME, memoryview(into)))
            await asyncio.sleep(delay_seconds)
            reading.cancel()
            await asyncio.wait([reading])
            into[:] = b"\xee" * len(into)
            await asyncio.sleep(0.5)
            assert into.count(0xEE) == len(into)

    check(test)


def test_reads_cost_one_call_for_as_long_as_they_come_soon_behind_each_other() -> None:
    async def test(tier: Tier) -> None:
        await tier.put((NAME, DATA))
        await asyncio.sleep(2.0)
        tier.platform.calls.clear()
        billed_seconds = tier.platform.counts.billed_seconds
        for _ in range(100):
            assert await tier.can_read(NAME, DATA)
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)
        assert [call.task for call in tier.platform.calls] == ["serve"] * 3
        assert not any(call.is_cold for call in tier.platform.calls)
        billed_seconds = tier.platform.counts.billed_seconds - billed_seconds
        assert billed_seconds < 3 * (100 * 0.105 + tier.config.linger_seconds + 0.1)

    check(test, linger_seconds=0.25)


@pytest.mark.parametrize("answer_seconds", [0.0, 0.001, 0.05])
def test_readers_at_any_pace_never_start_second_instances(answer_seconds: float) -> None:
    """The moment when a node goes is met in many ways: none makes the platform start an empty instance beside it."""

    async def test(tier: Tier) -> None:
        tier.platform.call_faults = CallFaults(answer_seconds=answer_seconds)
        await tier.put((NAME, DATA))
        for turn in range(300):
            assert await tier.can_read(NAME, DATA)
            await asyncio.sleep(tier.config.linger_seconds - 0.02 + turn * 0.0001)
        assert tier.platform.counts.cold <= tier.config.nodes
        assert len(tier.platform.all_instances()) == tier.config.nodes
        assert statistics(tier, "hits", "losses") == [300, 0]

    check(test)


def test_an_hour_of_rest_costs_one_short_call_a_minute_for_each_node() -> None:
    async def test(tier: Tier) -> None:
        await tier.put((NAME, DATA))
        await asyncio.sleep(60.0)
        tier.platform.calls.clear()
        billed_seconds = tier.platform.counts.billed_seconds
        await asyncio.sleep(3600.0)
        assert {call.task for call in tier.platform.calls} == {"warm"}
        assert 58 * 3 <= len(tier.platform.calls) <= 60 * 3
        assert tier.platform.counts.billed_seconds - billed_seconds < 0.011 * 60 * 3

    check(test)


def test_the_meter_agrees_with_the_platform() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS)
        for _ in range(50):
            await tier.can_read(*OBJECTS[3])
            await asyncio.sleep(0.7)
        await asyncio.sleep(100.0)
        used = tier.proxy.bill.usage.values()
        counts = tier.platform.counts
        assert sum(each.calls for each in used) == counts.calls
        assert sum(each.cold_starts for each in used) == counts.cold
        assert sum(each.billed_seconds for each in used) == pytest.approx(counts.billed_seconds)

    check(test)


def test_nodes_forget_what_they_hold_on_request_and_the_proxy_names_those_that_do_not_come() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS)
        assert await tier.proxy.delete_all() == []
        assert (tier.held(), tier.believed()) == ({}, {})
        tier.platform.call_faults = CallFaults(failed=1.0)
        await asyncio.sleep(60.0)
        assert await tier.proxy.delete_all() == [
            f"warm-{number}: warm-{number} cannot be called" for number in range(3)
        ]
        tier.platform.call_faults = CallFaults()
        status = await tier.proxy.status(wake_nodes=True)
        assert (status["absent"], status["problems"], status["nodes"]["gone"]) == (0, [], 0)

    check(test)


def test_a_proxy_that_was_never_started_can_be_closed() -> None:
    async def main() -> None:
        await Tier(WarmConfig(nodes=3, code=ErasureCode(2, 1))).proxy.close()

    run_virtual(main())


@pytest.mark.parametrize("wrong", [{"nodes": 2}, {"linger_seconds": 0.0}, {"linger_seconds": 901.0}, {"writes": 0}])
def test_settings_with_which_nothing_could_be_read_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        WarmConfig(**{"nodes": 3, "code": ErasureCode(2, 1), **wrong})


def test_a_node_whose_shards_are_always_late_is_neither_called_again_nor_given_up() -> None:
    async def main() -> None:
        objects = [named(number, 4000) for number in range(5)]
        async with Tier(WarmConfig(nodes=3, code=ErasureCode(2, 1), fresh_seconds=0.5)) as tier:
            await tier.put(*objects)
            slow = tier.platform.instances["warm-0"][0]
            slow.link = LinkConfig(bytes_per_second=20_000.0)
            for end in slow.ends:
                end._link.config = slow.link
            calls = len(tier.platform.calls)
            for number in range(1000):
                assert await tier.can_read(*objects[number % 5])
                await asyncio.sleep(0.01)
            statistics = tier.proxy.statistics()
            assert (statistics.losses, statistics.rebuilt) == (0, 0)
            assert statistics.late > 900
            assert len(tier.platform.calls) - calls <= 1
            assert len(tier.platform.all_instances()) == 3, "one instance each"
            assert tier.proxy._nodes[0].state_machine.state is NodeState.AWAKE

    run_virtual(main())
