"""A proxy in this process, with all that it needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from stoker._cost.prices import FunctionPrices, Prices
from stoker.abc import Executor
from stoker.errors import ConfigError
from stoker.fanout import open_executor
from stoker_warm._door import TcpDoor
from stoker_warm._handshake import Secret
from stoker_warm._location import BILLED, OPTIONS, Fleet
from stoker_warm._origin import Origin
from stoker_warm._proxy import Proxy
from stoker_warm._server import ProxyServer, Tariff, overview, told

__all__ = ["OwnProxy"]


class OwnProxy:
    """A proxy in this process, with the executor that calls its nodes; a :class:`WarmKeeper`.

    Attributes:
        proxy: what keeps the objects.
        tariff: by whose prices its bill is made.
    """

    def __init__(self, proxy: Proxy, tariff: Tariff, stack: AsyncExitStack) -> None:
        self.proxy, self.tariff, self._stack = proxy, tariff, stack
        self._begun_seconds = asyncio.get_running_loop().time()

    @classmethod
    async def open(
        cls,
        fleet: Fleet,
        secret: Secret,
        *,
        serves: Callable[[Tariff], ProxyServer] | None = None,
        origins: Sequence[Origin] = (),
    ) -> OwnProxy:
        """Listen, and call all nodes.

        Args:
            fleet: the nodes, and where to listen.
            secret: of the deployment.
            serves: makes what answers clients; without, they are turned away.
            origins: where objects came from.

        Raises:
            StokerError: it cannot listen, or functions cannot be called.
        """
        executor = _executor(fleet)
        tariff = _tariff(fleet, executor)
        server = serves(tariff) if serves is not None else None
        door = TcpDoor(fleet.listen, advertised=fleet.advertised, certificate=fleet.certificate)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(executor)
            proxy = Proxy(fleet.config, secret, executor.call, door, clients=server, origins=origins)
            if server is not None:
                server.attend(proxy)
            stack.push_async_callback(proxy.close)
            await proxy.start()
            return cls(proxy, tariff, stack.pop_all())

    async def read(self, name: str, into: memoryview) -> bool:
        """Fill ``into`` with an object, if it is there."""
        return await self.proxy.read(name, into)

    def offer(self, name: str, data: memoryview) -> None:
        """Have an object kept."""
        self.proxy.offer(name, data)

    async def status(self, *, wakes: bool = False) -> Mapping[str, Any]:
        """Return how the tier does; see ``stoker_warm._server.overview``."""
        problems = await self.proxy.wake() if wakes else {}
        seconds = asyncio.get_running_loop().time() - self._begun_seconds
        return overview(self.proxy, self.tariff, seconds, problems)

    async def down(self, *, forgets: bool = False) -> list[str]:
        """Have nodes return, and drop what they hold if it ``forgets``; return what went wrong."""
        problems = await self.proxy.forget() if forgets else {}
        await self.proxy.stop()
        return told(problems)

    async def close(self) -> None:
        """Have nodes return, and end. Idempotent."""
        await self._stack.aclose()


def _executor(fleet: Fleet) -> Executor:
    executor = open_executor(fleet.executor, fleet.options)
    for setting, (option, _) in OPTIONS.items():
        if getattr(fleet.options, option) is not None and option not in {*executor.heeds, *BILLED}:
            raise ConfigError(f"{setting} means nothing to functions on {fleet.executor}; leave it out")
    return executor


def _tariff(fleet: Fleet, executor: Executor) -> Tariff:
    prices = Prices.load()
    functions = _FREE if executor.platform is None else prices.function(executor.platform)
    return Tariff(functions=functions, store=prices.store(fleet.bucket), egress=fleet.egress)


_FREE = FunctionPrices(
    name="this machine",
    region="local",
    source="",
    dollars_per_request=0.0,
    dollars_per_gb_second=0.0,
    dollars_per_vcpu_second=0.0,
)
