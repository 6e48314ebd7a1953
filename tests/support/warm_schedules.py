"""Random fault schedules of a warm tier: nodes die, freeze, answer wrongly and multiply, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from typing import Any, cast

from stoker import FetchConfig
from stoker._fetch.fetcher import Fetcher
from stoker._memory.ring import Ring
from stoker.abc import ObjectRef
from stoker.testing import run_virtual
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from stoker_warm._proxy import Proxy
from stoker_warm._tier import WarmTier
from support.faulty_store import FaultyStore, StoreProfile, pin
from support.warm_faulty_node import NODE_FAULTS, FaultyNode
from support.warm_platform import TIER_SECRET, CallFaults, Instance, Platform, Tier, warm_name
from support.warm_wires import End, LinkConfig

__all__ = ["FAULTS", "WarmRun", "play"]

FAULTS = (
    "kill", "reclaim", "freeze", "cut", "split", "restart", "crash", "throttle", "fail", "unanswered", "slow start",
    "slow link", "node fault", "stray",
)  # fmt: skip
_POISON = 0xEE


class _Keeper:
    """The current proxy, as a tier."""

    def __init__(self, run: WarmRun) -> None:
        self.run, self.config, self.start, self.objects = run, run.config, run.tier.proxy.start, self

    async def read(self, name: str, into: memoryview) -> bool:
        return await self.run.tier.proxy.objects.read(name, into)

    def offer(self, name: str, data: memoryview) -> None:
        self.run.tier.proxy.objects.offer(name, data)

    def drop(self, name: str) -> None:
        self.run.tier.proxy.objects.remove(name)

    async def close(self) -> None:
        pass


class WarmRun:
    """One random schedule: nodes, a proxy, readers of a few objects, and faults.

    Attributes:
        counts: counts of events, by name.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        code = rng.choice(
            [
                ErasureCode(2, 1),
                ErasureCode(2, 1),
                ErasureCode(2, 1),
                ErasureCode(1, 1),
                ErasureCode(2, 2),
                ErasureCode(2, 0),
            ]
        )
        self.config = WarmConfig(
            nodes=code.shards + rng.choice([0, 0, 1]),
            code=code,
            linger_seconds=rng.choice([0.05, 0.1, 0.25]),
            keep_warm_seconds=8.0,
            ping_seconds=0.1,
            wake_seconds=1.0,
            fresh_seconds=rng.choice([0.0, 0.2, 1.0]),
            read_seconds=2.0,
            write_seconds=3.0,
            pending_bytes=rng.choice([5000, 1 << 20, 1 << 20]),
        )
        link = LinkConfig(
            latency_seconds=rng.choice([0.0005, 0.005, 0.02]),
            bytes_per_second=rng.choice([None, None, 1e6]),
            window_bytes=rng.choice([1 << 10, 256 << 10]),
            segment_bytes=rng.choice([301, 64 << 10]),
        )
        shelf_bytes = rng.choice([3000, 6000, 1 << 20, 1 << 20])
        sizes = [rng.choice([1, 37, 700, 700, rng.randrange(1, 4000)]) for _ in range(5)]
        self.bodies = {f"k{number}": random.Random(number).randbytes(size) for number, size in enumerate(sizes)}
        self.objects = [(warm_name(ref), self.bodies[ref.key]) for ref in pin(self.bodies)]
        self.tier = Tier(
            self.config,
            seed=rng.getrandbits(32),
            link=link,
            shelf_bytes=shelf_bytes,
            node_type=FaultyNode,
        )
        weighted = (*FAULTS, "node fault", "node fault")  # most node faults are wrong answers
        self.faults = rng.sample(weighted, rng.randint(1, 5)) if rng.random() < 0.95 else []
        self.is_over = False
        self.fair = self.platform.call_faults = CallFaults(answer_seconds=rng.choice([0.0, 0.0, 0.001, 0.05]))
        self.memory: list[bytearray] = []

    @property
    def platform(self) -> Platform:
        return self.tier.platform

    async def play(self) -> None:
        """Play it to its end, and check the invariants."""
        errors = list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        fetches = self.rng.random() < 0.3
        async with self.tier:
            if self.rng.random() < 0.6:
                await self.tier.put(*self.objects)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._do_wrong())
                async with asyncio.TaskGroup() as readers:
                    for number in range(2):
                        rng = random.Random(self.rng.random())
                        readers.create_task(self._fetch(rng, number) if fetches else self._read(rng))
                self.is_over = True
            await self._calm()
            self._check_beliefs()
            self._check_statistics()
            proxy = self.tier.proxy
        assert proxy.statistics().pending_bytes == 0
        assert (len(proxy._tasks), len(proxy.objects.write_tasks), len(proxy._peer_server._connections)) == (0, 0, 0)
        assert all(memory.count(_POISON) == len(memory) for memory in self.memory), "written to after the end"
        assert not errors, errors
        self.counts["calls"] += self.platform.counts.calls

    # Readers.

    async def _read(self, rng: random.Random) -> None:
        for _ in range(rng.randint(2, 7)):
            name, data = rng.choice(self.objects)
            into = bytearray(len(data))
            reading = asyncio.ensure_future(self._read_once(name, into))
            if rng.random() < 0.15:
                await asyncio.sleep(rng.choice([0.0, 0.005, rng.random()]))
                reading.cancel()
            await asyncio.wait([reading])
            if reading.cancelled():
                self.counts["cancelled"] += 1
            elif reading.result():
                assert into == data, "wrong bytes were delivered"
                self.counts["found"] += 1
            else:
                self.counts["not found"] += 1
                self.tier.proxy.objects.offer(name, memoryview(bytearray(data)))
            self._poison(into)
            await asyncio.sleep(rng.choice([0.0, 0.01, self.config.linger_seconds, rng.uniform(0.0, 3.0)]))

    async def _read_once(self, name: str, into: bytearray) -> bool:
        loop = asyncio.get_running_loop()
        begun_seconds = loop.time()
        found = await self.tier.proxy.objects.read(name, memoryview(into))
        assert loop.time() - begun_seconds <= self.config.read_seconds + 0.01, "a read took too long"
        return found

    async def _fetch(self, rng: random.Random, number: int) -> None:
        """Read through a fetcher with a bucket."""
        profile = StoreProfile(
            probability=rng.choice([{}, {"error": 0.1, "corrupt": 0.1, "reset": 0.1, "stall": 0.02}])
        )
        store = FaultyStore(self.bodies, profile=profile, seed=number)
        ring = Ring(4, 8192)
        refs: list[ObjectRef] = pin(self.bodies)
        fetcher = Fetcher(
            store,
            ring=ring,
            rng=rng,
            config=FetchConfig(deadline_seconds=600.0, attempt_seconds=4.0, attempts=24),
            tiers=[WarmTier.from_proxy(cast("Proxy", _Keeper(self)), TIER_SECRET)],
        )
        for _ in range(rng.randint(2, 7)):
            ref = rng.choice(refs)
            slot = await fetcher.fetch(ref)
            assert bytes(ring.view(slot, ref.size_bytes)) == self.bodies[ref.key], "wrong bytes were fetched"
            self.counts["fetched"] += 1
            if rng.random() < 0.5:
                await asyncio.sleep(rng.uniform(0.0, 1.0))
            assert bytes(ring.view(slot, ref.size_bytes)) == self.bodies[ref.key], "written to after the end"
            ring.release(slot)
        assert (ring.statistics().free, store.active) == (ring.slots, 0), "something was left behind"
        self.counts["from the tier"] += fetcher.stats.tier_hits.get("warm", 0)

    def _poison(self, memory: bytearray) -> None:
        memory[:] = bytes([_POISON]) * len(memory)
        self.memory.append(memory)

    # Faults.

    async def _do_wrong(self) -> None:
        while not self.is_over:
            await asyncio.sleep(min(5.0, self.rng.expovariate(1.0)))
            if self.faults and not self.is_over:
                await self._fault(self.rng.choice(self.faults))

    async def _fault(self, fault: str) -> None:
        rng, instances = self.rng, self.platform.all_instances()
        for_seconds = rng.choice([0.05, 0.5, 3.0])
        instance = rng.choice(instances) if instances else None
        match fault:
            case "restart" | "crash":
                await self.tier.replace(is_crash=fault == "crash")
            case "throttle":
                await self._change_call_faults(CallFaults(throttled=rng.choice([0.3, 1.0])), for_seconds)
            case "fail":
                await self._change_call_faults(CallFaults(failed=rng.choice([0.3, 1.0])), for_seconds)
            case "unanswered":
                await self._change_call_faults(CallFaults(unanswered=rng.choice([0.3, 1.0])), for_seconds)
            case "stray":
                await self._change_call_faults(CallFaults(stray=rng.choice([0.3, 1.0])), for_seconds)
            case "slow start":
                await self._change_call_faults(CallFaults(cold_seconds=3.0, warm_seconds=0.7), for_seconds)
            case "split":
                await self._split(for_seconds)
            case _ if instance is not None:
                await self._harm(instance, fault, for_seconds)
        self.counts[fault] += 1

    async def _harm(self, instance: Instance, fault: str, for_seconds: float) -> None:
        rng = self.rng
        match fault:
            case "kill" if instance.running is not None:
                self.platform.kill(instance)
            case "reclaim":
                self.platform.reclaim(instance.name)
            case "freeze":
                instance.freeze()
                await asyncio.sleep(for_seconds)
                instance.thaw()
            case "cut":
                end: End | None = rng.choice(instance.ends) if instance.ends else None
                if end is not None:
                    end = rng.choice(end._link.ends)
                    end.cut_after(end.sent_bytes + rng.choice([0, 1, rng.randrange(100), rng.randrange(4000)]))
            case "slow link":
                config = LinkConfig(latency_seconds=rng.choice([0.1, 1.5]), bytes_per_second=rng.choice([None, 500.0]))
                instance.link = config
                _carry_as(instance.ends, config)
            case "node fault":
                assert isinstance(instance.node, FaultyNode)
                instance.node.fault = rng.choice(NODE_FAULTS)
                self.counts[f"node fault: {instance.node.fault}"] += 1

    async def _change_call_faults(self, call_faults: CallFaults, for_seconds: float) -> None:
        self.platform.call_faults = call_faults
        await asyncio.sleep(for_seconds)
        self.platform.call_faults = self.fair

    async def _split(self, for_seconds: float) -> None:
        """Drop all traffic, without closing connections."""
        for link in self.tier.network.links:
            link.split()
        self.platform.is_split = True
        await asyncio.sleep(for_seconds)
        self.platform.is_split = False

    async def _calm(self) -> None:
        """End all faults, and wait until every node has had a keep-warm call."""
        self.platform.call_faults, self.platform.is_split = self.fair, False
        for instance in self.platform.all_instances():
            instance.thaw()
            instance.link = None
            _carry_as(instance.ends, self.tier.network.config)
            if isinstance(instance.node, FaultyNode) and instance.node.fault:
                self.platform.kill(instance)
        await asyncio.sleep(2.3 * self.config.keep_warm_seconds)

    # Invariants.

    def _check_beliefs(self) -> None:
        """Check that after a quiet period the proxy's view of each node equals its content."""
        believed, held = self.tier.believed(), self.tier.held()
        for name, shards in believed.items():
            unfounded = shards - held.get(name, set())
            assert not unfounded, f"{name} does not hold {[each.to_text() for each in unfounded]}"

    def _check_statistics(self) -> None:
        found = self.tier.proxy.statistics()
        assert found.pending_bytes == 0
        assert sum(found.nodes.values()) == self.config.nodes
        assert found.objects <= len(self.objects)
        assert found.held_bytes <= found.limit_bytes
        self.counts.update(
            {
                name: getattr(found, name)
                for name in (
                    *("restored", "late", "corrupt", "rebuilt"),
                    *("stored", "declined", "evicted"),
                )
            }
        )


def _carry_as(ends: list[End], config: LinkConfig) -> None:
    """Change how links carry bytes from now on; later bytes do not overtake earlier ones."""
    now_seconds = asyncio.get_running_loop().time()
    for link in {end._link for end in ends}:
        for end in link.ends:
            end._free_seconds = max(end._free_seconds, now_seconds) + link.config.latency_seconds
        link.config = config


class _Complaints(logging.Handler):
    """Log records about defects in the tier itself."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def play(seed: int) -> WarmRun:
    """Play one schedule to its end and return it.

    Raises:
        AssertionError: something wrong was delivered, believed or left behind (also in a group).
    """

    async def main() -> WarmRun:
        run = WarmRun(seed)
        await run.play()
        return run

    complaints, logger = _Complaints(), logging.getLogger("stoker.warm")
    logger.addHandler(complaints)
    try:
        run = run_virtual(main())
    finally:
        logger.removeHandler(complaints)
    assert not complaints.records, [record.getMessage() for record in complaints.records]
    return run
