"""A warm tier from what a setting says of it: a client of a proxy, or a proxy in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from stoker._cost.prices import FunctionPrices, Prices
from stoker.abc import Executor, Readable
from stoker.errors import ConfigError
from stoker.fanout import open_executor
from stoker_warm._auth import Secret
from stoker_warm._client import WarmClient
from stoker_warm._config import BILLED, OPTIONS, Fleet, WarmLocation
from stoker_warm._erasure import require_codec
from stoker_warm._listener import TcpListener
from stoker_warm._proxy import Proxy
from stoker_warm._server import ProxyServer, Tariff, overview, told
from stoker_warm._tier import LazyBackend, ManagedBackend, WarmTier


class OwnProxy:
    """A proxy in this process, with the executor that calls its nodes; a :class:`~stoker_warm._tier.ManagedBackend`.

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
    ) -> OwnProxy:
        """Listen, and call all nodes.

        Args:
            fleet: the nodes, and where to listen.
            secret: of the deployment.
            serves: makes what answers clients; without, they are turned away.

        Raises:
            StokerError: it cannot listen, or functions cannot be called.
        """
        executor = _executor(fleet)
        tariff = _tariff(fleet, executor)
        server = serves(tariff) if serves is not None else None
        listener = TcpListener(fleet.listen, advertised=fleet.advertised, certificate=fleet.certificate)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(executor)
            proxy = Proxy(fleet.config, secret, executor.call, listener, clients=server)
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


async def open_backend(location: WarmLocation, secret: Secret) -> ManagedBackend:
    """Return what reads and keeps objects there; ``close`` it in the end, on the same event loop.

    A proxy in this process listens and calls its nodes from here on. One elsewhere is connected to when it is first
    asked, so that it need not be there yet.

    Args:
        location: of the tier.
        secret: of the deployment.

    Raises:
        ConfigError: what it needs is not right, or the address cannot be used.
        StokerError: functions cannot be called.
    """
    if location.fleet is not None:
        return await OwnProxy.open(location.fleet, secret)
    if location.proxy is None:
        raise ConfigError(f"the location {location.url} names neither a proxy nor functions")
    return WarmClient(location.proxy, secret, fingerprint=location.fingerprint)


def secret_of_environment() -> Secret:
    """Return the deployment's secret, of the variable ``STOKER_WARM_SECRET``.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    return Secret.parse(os.environ.get("STOKER_WARM_SECRET", ""))


def warm_tier_at(url: str, *, store: Readable, processes: int = 1) -> WarmTier:
    """Return a tier; nothing is connected to, and no function called, before the first read.

    Args:
        url: as :class:`~stoker_warm._config.WarmLocation` has it.
        store: of the data set, which this tier does not read.
        processes: that read through a tier each, in the whole job.

    Raises:
        ConfigError: it is not right, there is no secret, or every process would have a proxy of its own.
        MissingExtraError: what the code of a proxy in this process needs is not installed.
    """
    location, secret, limit = WarmLocation.parse(url), secret_of_environment(), None
    if location.fleet is not None:
        if processes > 1:
            raise ConfigError(
                f"{processes} processes read, and nodes serve one proxy: run `stoker warm proxy` with this URL, and "
                "give all of them the warm:// URL that it prints"
            )
        require_codec(location.fleet.config.code)
        limit = location.fleet.config.max_object_bytes
    return WarmTier(LazyBackend(lambda: open_backend(location, secret)), max_object_bytes=limit)
