"""Forged shards: nodes and relays that change, exchange and replay what they hold or carry; in virtual time.

A read returns the right bytes or is a miss, and the cost of faulty nodes is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from stoker._base.checksum import crc32c
from stoker.testing import run_virtual
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from stoker_warm._node_state import NodeContents, NodeState
from stoker_warm._shard import Shard, ShardId
from support.warm_faulty_node import FaultyNode, forge
from support.warm_platform import MAC, Instance, Tier, named

OBJECTS = [named(number, 3000) for number in range(4)]
NAME, DATA = OBJECTS[0]
LIAR = "warm-0"


def check(test: Callable[[Tier], Awaitable[None]], *, code: str = "2+1", nodes: int = 3, **settings: Any) -> None:
    """Run a test with a tier of which the nodes hold all objects."""

    async def main() -> None:
        config = WarmConfig(nodes=nodes, code=ErasureCode.parse(code), keep_warm_seconds=20.0, **settings)
        async with Tier(config, node_type=FaultyNode) as tier:
            await tier.put(*OBJECTS)
            await test(tier)

    run_virtual(main())


def faulty_node_of(instance: Instance) -> FaultyNode:
    assert isinstance(instance.node, FaultyNode)
    return instance.node


def the_faulty_node(tier: Tier) -> FaultyNode:
    (instance,) = tier.platform.instances[LIAR]
    return faulty_node_of(instance)


def state_of_liar(tier: Tier) -> NodeState:
    return tier.proxy._nodes[0].state_machine.state


def corrupt(tier: Tier) -> int:
    return tier.proxy.statistics().corrupt


async def read_until_given_up(tier: Tier, most: int = 40) -> None:
    """Read objects until the faulty node is given up; each comes from the other nodes."""
    for number in range(most):
        if state_of_liar(tier) is NodeState.GONE:
            return
        assert await tier.can_read(*OBJECTS[number % len(OBJECTS)])
        await asyncio.sleep(0.01)
    raise AssertionError("the faulty node is still in use")


# The result of a CRC.


@pytest.mark.parametrize("start", [0, 1, 100, 1495])
def test_a_crc_does_not_tell_a_forged_shard_from_the_right_one_and_its_mac_does(start: int) -> None:
    shard = ShardId(NAME, 2, 1, 0)
    changed = bytearray(DATA)
    forge(changed, start)
    right, wrong = DATA[: shard.size_bytes], bytes(changed[: shard.size_bytes])
    assert right != wrong
    assert crc32c(right) == crc32c(wrong)
    assert crc32c(shard.to_text().encode() + right) == crc32c(shard.to_text().encode() + wrong)
    assert crc32c(DATA) == crc32c(changed), "nor does that of the object"
    mac = MAC.sign(shard, right)
    assert MAC.verify(shard, right, mac)
    assert not MAC.verify(shard, wrong, mac)


# Nodes.


@pytest.mark.parametrize("fault", ["bytes", "forged", "mac", "short", "other shard"])
def test_a_lying_node_is_given_up_after_three_wrong_shards_and_costs_no_read(
    caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    async def test(tier: Tier) -> None:
        the_faulty_node(tier).fault = fault
        await read_until_given_up(tier)
        assert corrupt(tier) == 3
        assert LIAR not in tier.believed()
        assert [await tier.can_read(*each) for each in OBJECTS] == [True] * 4
        assert corrupt(tier) == 3, "it is not asked any more"

    check(test)
    assert caplog.text.count("warm-0 answers with wrong shards") == 1


def test_a_node_with_oversized_shards_is_given_up_like_one_with_wrong_answers() -> None:
    async def test(tier: Tier) -> None:
        the_faulty_node(tier).fault = "long"
        await read_until_given_up(tier)
        connections = len(tier.network.links)
        assert LIAR not in tier.believed()
        assert [await tier.can_read(*each) for each in OBJECTS] == [True] * 4
        assert len(tier.network.links) == connections, "it is not asked any more"

    check(test)


def test_bytes_and_macs_of_other_shards_are_refused() -> None:
    """Another position, an older object of the same size, and what both have in common."""

    async def test(tier: Tier) -> None:
        stolen = [
            shard
            for instance in tier.platform.all_instances()
            for each in instance.store.list_ids()
            if (shard := instance.store.get(each)) is not None
        ]
        faulty_node = the_faulty_node(tier)
        right = {each.id: each for each in stolen}
        choices: Sequence[Callable[[ShardId], Shard | None]] = (
            lambda asked: next(each for each in stolen if each.id.object == asked.object and each.id != asked),
            lambda asked: next(each for each in stolen if each.id.object != asked.object),
            lambda asked: Shard(asked, stolen[-1].mac, right[asked].payload),
        )
        for number, choice in enumerate(choices):
            faulty_node.fault, faulty_node.instead = "instead", choice
            assert await tier.can_read(*OBJECTS[number])
            await asyncio.sleep(1.0)
            assert corrupt(tier) == number + 1
        assert state_of_liar(tier) is NodeState.GONE

    check(test)


def test_what_a_liar_lists_when_it_comes_again_is_deleted_and_one_more_lie_gives_it_up() -> None:
    async def test(tier: Tier) -> None:
        faulty_node = the_faulty_node(tier)
        faulty_node.fault = "forged"
        await read_until_given_up(tier)
        held = set(faulty_node._store.list_ids())
        assert held
        for turn in range(1, 4):
            await asyncio.sleep(25.0)  # it is called, and greets
            assert state_of_liar(tier) is not NodeState.GONE
            assert LIAR not in tier.believed()
            name, data = named(100 + turn, 3000)
            await tier.put((name, data))
            assert not held & set(faulty_node._store.list_ids())
            assert {shard.object for shard in tier.believed()[LIAR]} == {name}
            held = set(faulty_node._store.list_ids())
            assert await tier.can_read(name, data)
            assert (state_of_liar(tier), corrupt(tier)) == (NodeState.GONE, 3 + turn)

    check(test)


def test_a_liar_that_does_better_keeps_what_it_is_sent_from_then_on() -> None:
    async def test(tier: Tier) -> None:
        the_faulty_node(tier).fault = "forged"
        await read_until_given_up(tier)
        the_faulty_node(tier).fault = ""
        await asyncio.sleep(25.0)
        await tier.put(named(100, 3000))
        # Have it list what it has: no trust is needed for what it was sent.
        tier.proxy._nodes[0]._on_contents(NodeContents.UNKNOWN)
        await asyncio.sleep(1.0)
        assert len(tier.believed()[LIAR]) == 1
        assert await tier.can_read(*named(100, 3000))
        assert corrupt(tier) == 3

    check(test)


def test_an_honest_instance_that_comes_after_a_liar_is_believed() -> None:
    async def test(tier: Tier) -> None:
        store = the_faulty_node(tier)._store
        copies = [shard for each in store.list_ids() if (shard := store.get(each)) is not None]
        the_faulty_node(tier).fault = "bytes"
        await read_until_given_up(tier)
        tier.platform.reclaim(LIAR)
        honest = Instance(tier.platform, LIAR)
        for each in copies:
            honest.store.set(each.id, each.mac, bytes(each.payload))
        tier.platform.instances[LIAR].append(honest)
        await asyncio.sleep(25.0)
        assert tier.believed()[LIAR] == {each.id for each in copies}
        tier.platform.reclaim("warm-1")
        assert [await tier.can_read(*each) for each in OBJECTS] == [True] * 4
        assert corrupt(tier) == 3

    check(test)


def test_when_half_of_the_nodes_lie_a_read_is_right_or_a_miss_and_the_liars_cost_three_shards_each() -> None:
    async def test(tier: Tier) -> None:
        objects = [named(200 + number, 3000) for number in range(20)]
        await tier.put(*objects)
        faulty = {f"warm-{number}" for number in range(0, 12, 2)}
        for instance in tier.platform.all_instances():
            faulty_node_of(instance).fault = "forged" if instance.name in faulty else ""
        for _ in range(3):
            for each in objects:
                if not await tier.can_read(*each):  # which compares the bytes
                    await tier.put(each)
        assert {node.name for node in tier.proxy._nodes if node.state_machine.state is NodeState.GONE} == faulty
        assert not faulty & set(tier.believed())
        assert corrupt(tier) <= 3 * len(faulty) + tier.config.code.shards, "but those that were asked for at once"
        assert [await tier.can_read(*each) for each in objects] == [True] * len(objects)
        for minute in range(10):  # from now on, one each time that a faulty node reconnects and is sent a shard
            before = corrupt(tier)
            await asyncio.sleep(60.0)
            await tier.put(named(300 + minute, 3000))
            for each in objects:
                assert await tier.can_read(*each)
            assert await tier.can_read(*named(300 + minute, 3000)) or corrupt(tier) > before
            assert corrupt(tier) <= before + len(faulty)

    check(test, code="4+2", nodes=12)


# Relays.


def tampered(segment: bytes) -> bytes:
    """Change the objects that are known, wherever they come by; the relay knows no key."""
    changed = bytearray(segment)
    for _, data in OBJECTS:
        for known in (data[:64], data[1500:1564]):
            if (start := segment.find(known)) >= 0:
                forge(changed, start)
    return bytes(changed)


@pytest.mark.parametrize("tampering", [1, 3])
def test_a_relay_between_node_and_proxy_cannot_change_a_shard_unseen(tampering: int) -> None:
    async def test(tier: Tier) -> None:
        for number in range(tampering):
            for end in tier.platform.instances[f"warm-{number}"][0].ends:
                end.tamper = tampered
        found = [await tier.can_read(*each) for each in OBJECTS for _ in range(3)]
        assert corrupt(tier) > 0
        assert tampering == 3 or all(found)

    check(test)


def test_what_a_relay_changes_on_the_way_to_a_node_is_found_when_it_is_read() -> None:
    async def test(tier: Tier) -> None:
        for node in range(3):
            for end in tier.platform.instances[f"warm-{node}"][0].ends:
                end._other.tamper = tampered
        for name, _ in OBJECTS:
            tier.proxy.objects.remove(name)
        await tier.put((NAME, DATA))
        assert tier.believed() == tier.held()
        assert not await tier.can_read(NAME, DATA)
        assert corrupt(tier) == 2

    check(test)
