"""A platform of node functions in virtual time: instances start, freeze, are reclaimed, connect and fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from stoker._base.checksum import crc32c
from stoker._cache.index import name_of
from stoker._shared.address import Address
from stoker._shared.secret import TierSecret
from stoker.abc import Answer, ObjectRef
from stoker.errors import ConnectionLostError, ServerError, ThrottledError
from stoker_warm._auth import WarmSecret
from stoker_warm._config import WarmConfig
from stoker_warm._events import WakeEvent
from stoker_warm._listener import Listener
from stoker_warm._node import NodeServer
from stoker_warm._peer_connections import NodeConnection, ProxyConnection
from stoker_warm._proxy import Proxy
from stoker_warm._shard import ShardId, ShardMac, ShardStore
from stoker_warm._tier_server import create_object_name
from support.warm_wires import End, LinkConfig, Network

__all__ = [
    "ADDRESS",
    "MAC",
    "SECRET",
    "TIER_SECRET",
    "Call",
    "Instance",
    "MemoryListener",
    "Platform",
    "Tier",
    "named",
    "warm_name",
]

SECRET = WarmSecret(b"of all tests of the warm tier, 32 bytes at least")
TIER_SECRET = TierSecret(bytes(range(32)))
ADDRESS = "proxy:7411"
MAC = ShardMac(b"of shards in all tests, 32 bytes")


def warm_name(ref: ObjectRef) -> str:
    """Return an object's name in the proxy."""
    return create_object_name(f"{TIER_SECRET.tenant}/{TIER_SECRET.object_name(ref)}")


def named(number: int, size_bytes: int) -> tuple[str, bytes]:
    """Return an object's name and bytes."""
    data = random.Random(number).randbytes(size_bytes)
    return name_of(ObjectRef(key=str(number), size_bytes=size_bytes, crc32c=crc32c(data))), data


class MemoryListener(Listener):
    """A listener on a network in memory."""

    def __init__(self, network: Network) -> None:
        super().__init__(Address.parse(ADDRESS))
        self.network = network
        self.is_open = False
        self.max_unauthenticated = 0

    async def open(self, create_connection: Callable[[], ProxyConnection], *, max_unauthenticated: int = 0) -> None:
        self.network.listen(self.address, create_connection)
        self.max_unauthenticated = max_unauthenticated
        self.is_open = True

    def discard_unauthenticated(self, connection: ProxyConnection) -> None:
        pass

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.network.stop(self.address)


class Instance:
    """A process of a function. Between invocations it is frozen.

    Attributes:
        running: the current invocation; None between two.
        link: behaviour of its connections; None for the network's.
    """

    def __init__(self, platform: Platform, name: str) -> None:
        self.name, self.platform = name, platform
        self.store = ShardStore(platform.shelf_bytes)
        self.ends: list[End] = []
        self.running: asyncio.Task[dict[str, Any]] | None = None
        self.is_dead = self.is_stopped = False
        self.link: LinkConfig | None = None
        self.instance = f"{platform.rng.getrandbits(64):016x}"
        self.node = platform.node_type(self.store, SECRET, connect=self._dial, instance=self.instance)

    async def run(self, event: Mapping[str, Any], start_seconds: float) -> dict[str, Any]:
        """Run one invocation."""
        try:
            await asyncio.sleep(start_seconds)
            self._hold(is_held=False)
            return await self.node.run(WakeEvent.parse(event), self.platform.limit_seconds)
        finally:
            self._hold(is_held=True)
            self.running = None

    async def _dial(self, wake: WakeEvent, make: Callable[[], NodeConnection]) -> NodeConnection:
        if self.platform.is_split:
            await asyncio.sleep(self.platform.dial_seconds)
            raise ConnectionLostError("nobody answers")
        try:
            end, connection = await self.platform.network.dial(wake.proxy, make, name=self.name)
        except ConnectionRefusedError as error:
            raise ConnectionLostError(str(error)) from None
        if self.link is not None:
            self.platform.network.links[-1].config = self.link
        self.ends = [*(each for each in self.ends if not each.is_closing()), end]
        self._hold(is_held=False)
        return connection

    def kill(self) -> None:
        """End the process: its shards are lost, its connections are reset."""
        self.is_dead = True
        for end in self.ends:
            end.thaw()
            end.abort()
        if self.running is not None:
            self.running.cancel()

    def freeze(self) -> None:
        """Stop the process at any point, as far as the network sees."""
        self.is_stopped = True
        self._hold(is_held=True)

    def thaw(self) -> None:
        """Continue the process."""
        self.is_stopped = False
        self._hold(is_held=self.running is None)

    def _hold(self, *, is_held: bool) -> None:
        for end in self.ends:
            if (is_held or self.is_stopped) and not self.is_dead:
                end.freeze()
            else:
                end.thaw()


@dataclass(slots=True)
class Counts:
    """Counts of a platform's actions."""

    calls: int = 0
    cold: int = 0
    throttled: int = 0
    failed: int = 0
    unanswered: int = 0
    billed_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Call:
    """A started invocation."""

    at_seconds: float
    name: str
    task: str
    is_cold: bool


@dataclass(slots=True, kw_only=True)
class CallFaults:
    """Behaviour of calls: the probability of each kind of failure, and the durations of starts and answers.

    A call goes astray if another instance, possibly a new one, runs it than the first idle one.
    """

    throttled: float = 0.0
    failed: float = 0.0
    unanswered: float = 0.0
    stray: float = 0.0
    cold_seconds: float = 0.3
    warm_seconds: float = 0.01
    answer_seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Platform:
    """Runs instances of functions, each with one invocation at a time; starts another when all are busy.

    A call that is cancelled, or whose answer is lost, continues to run.

    Attributes:
        network: network of the instances; it delivers nothing while ``is_split``.
        shelf_bytes: memory for shards of each instance.
        rng: source of randomness.
        most: maximum number of instances of a function.
        limit_seconds: time limit of an invocation.
        node_type: class of the node that runs in an instance.
        calls: started invocations.
        strays: functions whose next call goes astray.
    """

    network: Network
    rng: random.Random
    shelf_bytes: int = 64 << 20
    most: int = 3
    limit_seconds: float = 900.0
    dial_seconds: float = 5.0
    node_type: Callable[..., NodeServer] = NodeServer
    call_faults: CallFaults = field(default_factory=CallFaults)
    counts: Counts = field(default_factory=Counts)
    calls: list[Call] = field(default_factory=list)
    instances: dict[str, list[Instance]] = field(default_factory=dict)
    is_split: bool = False
    strays: set[str] = field(default_factory=set)
    _running: set[asyncio.Task[dict[str, Any]]] = field(default_factory=set)

    async def invoke(self, name: str, event: Mapping[str, Any]) -> Answer:
        """Call a function."""
        instances = self.instances.setdefault(name, [])
        idle = [each for each in instances if each.running is None]
        is_stray = name in self.strays or (self.call_faults.stray > 0.0 and self.rng.random() < self.call_faults.stray)
        self.strays.discard(name)
        if is_stray and (idle[1:] or len(instances) < self.most):
            idle = idle[1:]
        is_cold = not idle
        if self.rng.random() < self.call_faults.throttled or (is_cold and len(instances) >= self.most):
            self.counts.throttled += 1
            raise ThrottledError(f"{name} runs too often")
        if self.rng.random() < self.call_faults.failed:
            self.counts.failed += 1
            await asyncio.sleep(self.rng.uniform(0.0, 0.2))
            raise ServerError(f"{name} cannot be called")
        if is_cold:
            idle = [Instance(self, name)]
            instances.append(idle[0])
        begun_seconds = asyncio.get_running_loop().time()
        self.calls.append(Call(begun_seconds, name, str(event["task"]), is_cold))
        running = self._begin(idle[0], event, is_cold)
        if self.rng.random() < self.call_faults.unanswered:
            self.counts.unanswered += 1
            await asyncio.wait([running], timeout=self.rng.uniform(0.0, 1.0))
            raise ConnectionLostError(f"the answer of {name} is lost")
        await asyncio.wait([running])
        await asyncio.sleep(self.call_faults.answer_seconds)
        if running.cancelled():
            raise ConnectionLostError(f"the instance of {name} was killed")
        seconds = asyncio.get_running_loop().time() - begun_seconds
        return Answer(result=running.result(), billed_seconds=seconds, memory_bytes=1 << 30, is_cold=is_cold)

    def _begin(self, instance: Instance, event: Mapping[str, Any], is_cold: bool) -> asyncio.Task[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        begun_seconds = loop.time()
        start_seconds = self.call_faults.cold_seconds if is_cold else self.call_faults.warm_seconds
        running = instance.running = loop.create_task(instance.run(event, start_seconds))
        self._running.add(running)

        def ended(task: asyncio.Task[dict[str, Any]]) -> None:
            self._running.discard(task)
            instance.running = None
            if not task.cancelled():
                task.exception()  # the caller may have been cancelled
            self.counts.calls += 1
            self.counts.cold += is_cold
            self.counts.billed_seconds += loop.time() - begun_seconds

        running.add_done_callback(ended)
        return running

    def all_instances(self) -> list[Instance]:
        """Return all instances."""
        return [instance for name in sorted(self.instances) for instance in self.instances[name]]

    def holds(self, name: str, instance: str | None) -> set[ShardId]:
        """Return the shards of an instance of a function; none if the instance does not exist."""
        return {
            shard
            for each in self.instances.get(name, [])
            if each.instance == instance
            for shard in each.store.list_ids()
        }

    def kill(self, instance: Instance) -> None:
        """Kill one instance."""
        self.instances[instance.name].remove(instance)
        instance.kill()

    def reclaim(self, name: str) -> None:
        """Kill all instances of a function."""
        for instance in list(self.instances.get(name, [])):
            self.kill(instance)

    async def close(self) -> None:
        """Kill all instances."""
        for name in list(self.instances):
            self.reclaim(name)
        while self._running:
            await asyncio.wait(list(self._running))
        await asyncio.sleep(2.0)


class Tier:
    """A proxy with its nodes, in virtual time; ``async with``."""

    def __init__(
        self,
        config: WarmConfig | None = None,
        *,
        seed: int = 0,
        link: LinkConfig | None = None,
        **platform: Any,
    ) -> None:
        self.rng = random.Random(seed)
        self.network = Network(link)
        self.platform = Platform(network=self.network, rng=self.rng, **platform)
        self.config = config or WarmConfig()
        self.proxy = self.new_proxy()

    def new_proxy(self) -> Proxy:
        """Return a proxy that does not know which shards nodes hold."""
        listener = MemoryListener(self.network)
        return Proxy(self.config, SECRET, self.platform.invoke, listener, mac=MAC, rng=self.rng)

    async def replace(self, *, is_crash: bool = False) -> None:
        """Replace the proxy; after a crash, frozen nodes do not learn of it."""
        old = self.proxy
        if is_crash:
            for link in self.network.links:
                link.split()
        await old.close()
        self.proxy = self.new_proxy()
        await self.proxy.start()

    async def can_read(self, name: str, data: bytes) -> bool:
        """Return whether an object can be read; checks its bytes."""
        into = bytearray(len(data))
        found = await self.proxy.objects.read(name, memoryview(into))
        assert not found or into == data
        return found

    async def put(self, *objects: tuple[str, bytes]) -> None:
        """Write objects, and wait until they are written."""
        for name, data in objects:
            self.proxy.objects.offer(name, memoryview(data))
        while self.proxy.objects.write_tasks:  # noqa: ASYNC110 - tests use the public state
            await asyncio.sleep(0.01)

    def believed(self) -> dict[str, set[ShardId]]:
        """Return node → shards that it holds according to the proxy."""
        directory, believed = self.proxy._directory, dict[str, set[ShardId]]()
        for key in list(directory._rows):
            row = directory._rows[key]
            name = directory._row_name(row)
            for position, node in enumerate(directory._row_cells(row)):
                if node < 0x8000:
                    believed.setdefault(f"warm-{node}", set()).add(directory._create_shard_id(name, position))
        return believed

    def held(self) -> dict[str, set[ShardId]]:
        """Return node → shards in the instance that the proxy knows."""
        held = {node.name: self.platform.holds(node.name, node.state_machine.instance) for node in self.proxy._nodes}
        return {name: shards for name, shards in held.items() if shards}

    async def __aenter__(self) -> Self:
        await self.proxy.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.proxy.close()
        await self.platform.close()
