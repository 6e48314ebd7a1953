"""A platform of node functions in virtual time: instances that start, freeze, are taken back, and dial out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.errors import ConnectionLostError, ThrottledError
from stoker.fanout import Answer
from stoker.warm.connection import Connection
from stoker.warm.handshake import Secret
from stoker.warm.node import NodeServer
from stoker.warm.proxy import Proxy
from stoker.warm.settings import WarmConfig
from stoker.warm.shelf import Shelf
from stoker.warm.wake import Wake
from support.warm_wires import End, LinkConfig, Network

__all__ = ["ADDRESS", "SECRET", "Instance", "MemoryDoor", "Platform", "Tier"]

SECRET = Secret(b"of all tests of the warm tier, 32 bytes at least")
ADDRESS = "proxy:7411"


class MemoryDoor:
    """A door on a network in memory."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.address, self.fingerprint = ADDRESS, ""
        self.is_open = False

    async def open(self, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        self.network.listen(self.address, protocol)
        self.is_open = True

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.network.stop(self.address)


class Instance:
    """A process of a function."""

    def __init__(self, platform: Platform, name: str, shelf_bytes: int) -> None:
        self.name, self.platform = name, platform
        self.shelf = Shelf(shelf_bytes)
        self.ends: list[End] = []
        self.running: asyncio.Task[dict[str, Any]] | None = None
        self.is_dead = False
        instance = f"{platform.rng.getrandbits(64):016x}"
        self.node = NodeServer(self.shelf, SECRET, connect=self._dial, instance=instance)

    async def _dial(self, wake: Wake, make: Callable[[], Connection]) -> Connection:
        try:
            end, connection = await self.platform.network.dial(wake.proxy, make, name=self.name)
        except ConnectionRefusedError as error:
            raise ConnectionLostError(str(error)) from None
        self.ends.append(end)
        return connection

    def kill(self) -> None:
        """End the process: what it held is lost, its connections are reset."""
        self.is_dead = True
        for end in self.ends:
            end.abort()
        if self.running is not None:
            self.running.cancel()

    def freeze(self) -> None:
        """Stop the process in the middle of whatever it does, for the network at least."""
        for end in self.ends:
            end.freeze()

    def thaw(self) -> None:
        """Let it go on."""
        for end in self.ends:
            end.thaw()


@dataclass(slots=True)
class Counts:
    """What a platform did."""

    calls: int = 0
    cold: int = 0
    billed_seconds: float = 0.0


class Platform:
    """Runs instances of functions, one invocation at a time each; scales out when all of a function's are busy.

    Args:
        network: that instances dial over.
        shelf_bytes: of each instance.
        rng: for what is drawn.
        most: instances of a function, at most.
    """

    def __init__(
        self, network: Network, *, shelf_bytes: int = 64 << 20, rng: random.Random | None = None, most: int = 3
    ) -> None:
        self.network, self.shelf_bytes, self.most = network, shelf_bytes, most
        self.rng = rng or random.Random(0)
        self.counts = Counts()
        self.instances: dict[str, list[Instance]] = {}
        self.cold_seconds, self.warm_seconds = 0.3, 0.01

    async def invoke(self, name: str, event: Mapping[str, Any]) -> Answer:
        """Call a function."""
        instances = self.instances.setdefault(name, [])
        idle = [each for each in instances if each.running is None]
        is_cold = not idle
        if is_cold:
            if len(instances) >= self.most:
                raise ThrottledError(f"{name} runs too often")
            instances.append(Instance(self, name, self.shelf_bytes))
            idle = [instances[-1]]
        instance = idle[0]
        instance.running = asyncio.ensure_future(self._run(instance, event, is_cold))
        begun = asyncio.get_running_loop().time()
        try:
            result = await instance.running
        except asyncio.CancelledError:
            if not instance.is_dead:
                instance.running.cancel()
                raise
            raise ConnectionLostError(f"the instance of {name} was killed") from None
        finally:
            instance.running = None
            self.counts.calls += 1
            self.counts.cold += is_cold
            self.counts.billed_seconds += asyncio.get_running_loop().time() - begun
        seconds = asyncio.get_running_loop().time() - begun
        return Answer(result=result, billed_seconds=seconds, memory_bytes=1 << 30, is_cold=is_cold)

    async def _run(self, instance: Instance, event: Mapping[str, Any], is_cold: bool) -> dict[str, Any]:
        await asyncio.sleep(self.cold_seconds if is_cold else self.warm_seconds)
        return await instance.node.run(Wake.parse(event), 900.0)

    def reclaim(self, name: str) -> None:
        """Take all instances of a function."""
        for instance in self.instances.pop(name, []):
            instance.kill()

    async def close(self) -> None:
        """End everything."""
        for name in list(self.instances):
            self.reclaim(name)
        await asyncio.sleep(2.0)


class Tier:
    """A proxy with its nodes, in virtual time; ``async with``."""

    def __init__(self, config: WarmConfig | None = None, *, seed: int = 0, link: LinkConfig | None = None) -> None:
        self.rng = random.Random(seed)
        self.network = Network(link)
        self.platform = Platform(self.network, rng=self.rng)
        self.config = config or WarmConfig()
        self.proxy = self.new_proxy()

    def new_proxy(self) -> Proxy:
        """Return a proxy that knows nothing of what nodes hold."""
        return Proxy(self.config, SECRET, self.platform.invoke, MemoryDoor(self.network), rng=self.rng)

    async def __aenter__(self) -> Tier:
        await self.proxy.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.proxy.close()
        await self.platform.close()
