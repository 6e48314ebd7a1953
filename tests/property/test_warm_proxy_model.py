"""A warm tier against a model of it that is too simple to be wrong."""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stoker.testing import VirtualClockLoop
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from support.warm_faulty_node import FaultyNode
from support.warm_platform import Instance, Tier, named

CODES = {1: ErasureCode(2, 1), 2: ErasureCode(2, 2)}
OBJECTS = [named(number, size) for number, size in enumerate([0, 1, 63, 400, 1000, 1001])]
WHICH = st.integers(0, len(OBJECTS) - 1)
NODE = st.integers(0, 4)


class WarmTierMachine(RuleBasedStateMachine):
    """What is known of each object: it was never put there, or nodes were harmed since it was put there for sure.

    It must be readable as long as no more of them were than there is parity for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualClockLoop)
        self.harmed: dict[str, set[int]] = {}
        self.offered: set[str] = set()
        self.dropped: set[str] = set()
        self.frozen: set[int] = set()
        self.lying: set[int] = set()

    @initialize(parity=st.sampled_from(sorted(CODES)), spare=st.integers(0, 1), keep_warm=st.sampled_from([5.0, 60.0]))
    def begin(self, parity: int, spare: int, keep_warm: float) -> None:
        code = CODES[parity]
        config = WarmConfig(nodes=code.shards + spare, code=code, keep_warm_seconds=keep_warm, read_seconds=3.0)

        async def start() -> None:
            self.tier = Tier(config, node_type=FaultyNode)
            await self.tier.proxy.start()
            await asyncio.sleep(1.0)

        self.runner.run(start())

    @precondition(lambda self: not self.frozen and not self.lying)
    @rule(which=WHICH)
    def an_object_is_put_there(self, which: int) -> None:
        name, data = OBJECTS[which]

        async def put() -> bool:
            await asyncio.sleep(70.0)  # until all know what was lost
            for _ in range(2):  # what is there in part is made whole behind the first reading
                await self.tier.can_read(name, data)
                await self.tier.put((name, data))
                await asyncio.sleep(1.0)
            return await self.tier.can_read(name, data)

        assert self.runner.run(put())
        self.offered.add(name)
        self.harmed[name] = set()

    @rule(which=WHICH)
    def an_object_is_offered(self, which: int) -> None:
        name, data = OBJECTS[which]

        async def offer() -> None:
            self.tier.proxy.objects.offer(name, memoryview(data))

        self.runner.run(offer())
        self.offered.add(name)

    @rule(which=WHICH)
    def an_object_is_read(self, which: int) -> None:
        name, data = OBJECTS[which]
        found = self.runner.run(self.tier.can_read(name, data))  # which compares the bytes
        if name not in self.offered:  # an instance that was away meanwhile may bring back what was dropped
            assert not found or name in self.dropped
        elif len(self.harmed.get(name, set(range(99)))) <= self.tier.config.code.parity:
            assert found

    @rule(which=WHICH)
    def an_object_is_dropped(self, which: int) -> None:
        name, _ = OBJECTS[which]

        async def drop() -> None:
            self.tier.proxy.objects.remove(name)

        self.runner.run(drop())
        if name in self.offered:
            self.offered.remove(name)
            self.dropped.add(name)
        self.harmed.pop(name, None)

    @rule(node=NODE)
    def a_node_is_taken_back(self, node: int) -> None:
        async def kill() -> None:
            self.tier.platform.reclaim(f"warm-{node}")

        self.runner.run(kill())
        self._harm(node)
        self.frozen.discard(node)
        self.lying.discard(node)

    @rule(node=NODE)
    def a_node_freezes(self, node: int) -> None:
        instances = self.tier.platform.instances.get(f"warm-{node}", [])
        for instance in instances:
            instance.freeze()
        if instances:
            self._harm(node)
            self.frozen.add(node)

    @rule(node=NODE, fault=st.sampled_from(["bytes", "forged", "mac", "short", "other shard"]))
    def a_node_becomes_faulty(self, node: int, fault: str) -> None:
        instances = self.tier.platform.instances.get(f"warm-{node}", [])
        self._set_fault(fault, instances)
        if instances:
            self._harm(node)
            self.lying.add(node)

    @precondition(lambda self: self.lying)
    @rule()
    def all_nodes_are_honest_again(self) -> None:
        self._set_fault("", self.tier.platform.all_instances())
        self.lying.clear()

    @precondition(lambda self: self.frozen)
    @rule()
    def all_nodes_go_on(self) -> None:
        async def thaw() -> None:
            for instance in self.tier.platform.all_instances():
                instance.thaw()

        self.runner.run(thaw())
        self.frozen.clear()

    @rule()
    def the_next_call_of_each_node_goes_astray(self) -> None:
        self.tier.platform.strays |= {node.name for node in self.tier.proxy._nodes}  # which harms none

    @precondition(lambda self: not self.frozen)
    @rule(is_crash=st.booleans())
    def another_proxy_takes_over(self, is_crash: bool) -> None:
        async def replace() -> None:
            self.tier.platform.strays.clear()  # it knows no instance yet, so it would believe any
            await asyncio.sleep(30.0)  # calls of the one before that still run would start empty instances
            await self.tier.replace(is_crash=is_crash)
            await asyncio.sleep(20.0)

        self.runner.run(replace())

    @rule(seconds=st.sampled_from([0.01, 0.24, 0.26, 3.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.runner.run(asyncio.sleep(seconds))

    @invariant()
    def the_books_are_in_order(self) -> None:
        found = self.tier.proxy.statistics()
        assert found.objects <= len(self.offered | self.dropped)
        assert sum(found.nodes.values()) == self.tier.config.nodes
        assert found.held_bytes <= found.limit_bytes

    def teardown(self) -> None:
        async def close() -> None:
            await self.tier.proxy.close()
            assert self.tier.proxy.statistics().pending_bytes == 0
            await self.tier.platform.close()
            assert asyncio.all_tasks() == {asyncio.current_task()}

        self.runner.run(close())
        self.runner.close()

    def _set_fault(self, fault: str, instances: list[Instance]) -> None:
        for instance in instances:
            assert isinstance(instance.node, FaultyNode)
            instance.node.fault = fault

    def _harm(self, node: int) -> None:
        for harmed in self.harmed.values():
            harmed.add(node)


WarmTierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestWarmTier = WarmTierMachine.TestCase
