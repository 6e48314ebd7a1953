"""The warm tier as the fetcher sees it: a place before the bucket that may be late, lack or lose anything.

Its proxy runs in this process, and is opened in the background at the first read. Until that has succeeded every read
is a miss, and after a failure it is left alone for some time. A proxy elsewhere is a server of a shared tier, and read
by the client of these.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Self

from stoker._base.task_group import end_tasks
from stoker._cost.prices import Prices
from stoker._shared.client import SharedTier, shared_tier_at
from stoker._shared.secret import VARIABLE, TierSecret
from stoker.abc import ObjectRef, Readable
from stoker.errors import ConfigError, StokerError
from stoker.fanout import open_executor
from stoker_warm._auth import Secret
from stoker_warm._billing import Tariff
from stoker_warm._config import BILLED, OPTIONS, Fleet
from stoker_warm._erasure import require_codec
from stoker_warm._listener import Listener
from stoker_warm._place import object_name
from stoker_warm._proxy import Proxy
from stoker_warm._shard import ShardMac

_log = logging.getLogger("stoker.warm.lazy")


class FleetProxy(Proxy):
    """A proxy in this process, with the executor that calls its nodes.

    Args:
        fleet: the nodes, and where to listen.
        secret: of the deployment.
        mac: makes the MACs of shards.

    Raises:
        ConfigError: the executor does not take a setting.
        MissingExtraError: the executor, or the code, needs what is not installed.
    """

    def __init__(self, fleet: Fleet, secret: Secret, mac: ShardMac) -> None:
        self._executor = executor = open_executor(fleet.executor, fleet.options)
        for setting, (option, _) in OPTIONS.items():
            if getattr(fleet.options, option) is not None and option not in {*executor.heeds, *BILLED}:
                raise ConfigError(f"{setting} means nothing to functions on {fleet.executor}; leave it out")
        listener = Listener(fleet.listen, advertised=fleet.advertised, certificate=fleet.certificate)
        tariff = None
        if executor.platform is not None:
            prices = Prices.load()
            functions, store = prices.function(executor.platform), prices.store(fleet.bucket)
            tariff = Tariff(functions=functions, store=store, egress=fleet.egress)
        super().__init__(fleet.config, secret, executor.call, listener, mac=mac, tariff=tariff)
        self._stack = AsyncExitStack()

    async def start(self) -> Self:
        """Listen, and call all nodes.

        Raises:
            StokerError: it cannot listen, or functions cannot be called.
        """
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._executor)
            stack.push_async_callback(super().close)
            await super().start()
            self._stack = stack.pop_all()
        return self

    async def close(self) -> None:
        """Have nodes return, and end. Idempotent."""
        await self._stack.aclose()


class WarmTier:
    """A :class:`~stoker.abc.Tier` over a proxy. For a fetcher, which asks the store as well when it is late.

    Each process has a proxy of its own.

    Args:
        start_proxy: returns a proxy that runs.
        secret: of the tenant, by which objects are named.
        max_object_bytes: size of the largest object that it can keep; None if that is not known.
        retry_seconds: after a failure the proxy is not started again for this long.
    """

    name = "warm"

    def __init__(
        self,
        start_proxy: Callable[[], Awaitable[Proxy]],
        secret: TierSecret,
        *,
        max_object_bytes: int | None = None,
        retry_seconds: float = 30.0,
    ) -> None:
        self._start_proxy, self._secret, self._retry_seconds = start_proxy, secret, retry_seconds
        self.max_object_bytes = max_object_bytes
        self._proxy: Proxy | None = None
        self._opening: asyncio.Task[None] | None = None
        self._forget()

    @classmethod
    def over(cls, proxy: Proxy, secret: TierSecret) -> WarmTier:
        """Return the tier of a proxy that runs already."""
        tier = cls(proxy.start, secret, max_object_bytes=proxy.config.max_object_bytes)
        tier._proxy = proxy
        return tier

    @property
    def proxy(self) -> Proxy | None:
        """The proxy while it runs in this process, else None."""
        if self._pid != os.getpid():
            self._forget()
        return self._proxy

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Fill ``into`` with an object, if it is there; begins to start the proxy if it does not run."""
        proxy = self.proxy
        if proxy is not None:
            return await proxy.objects.read(self._name(ref), into)
        loop = asyncio.get_running_loop()
        if self._opening is None and loop.time() >= self._retry_at_seconds:
            self._opening = loop.create_task(self._open())
        return False

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Keep an object that came from the bucket, if the proxy runs."""
        if self.proxy is not None:
            self.proxy.objects.offer(self._name(ref), data)

    def reject(self, ref: ObjectRef) -> None:
        """Forget an object whose bytes were wrong."""
        if self.proxy is not None:
            self.proxy.objects.drop(self._name(ref))

    async def close(self) -> None:
        """Close what was opened. Idempotent; a read opens it anew."""
        if self.proxy is None and self._opening is not None:
            await end_tasks([self._opening])
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            await proxy.close()

    def _name(self, ref: ObjectRef) -> str:
        return object_name(f"{self._secret.tenant}/{self._secret.name(ref)}")

    async def _open(self) -> None:
        try:
            self._proxy = await self._start_proxy()
        except StokerError as error:
            self._retry_at_seconds = asyncio.get_running_loop().time() + self._retry_seconds
            _log.warning(
                "the warm tier cannot be used: %s; it is tried again in %g s, the bucket serves meanwhile",
                error,
                self._retry_seconds,
            )
        finally:
            self._opening = None

    def _forget(self) -> None:
        """Begin with nothing: what there may be belongs to the process that this one was forked from."""
        self._pid, self._proxy, self._opening, self._retry_at_seconds = os.getpid(), None, None, float("-inf")


def secret_of_environment() -> Secret:
    """Return the deployment's secret, of the variable ``STOKER_WARM_SECRET``.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    return Secret.parse(os.environ.get(Secret.variable, ""))


def tier_secret_of_environment() -> TierSecret:
    """Return the first secret of ``STOKER_TIER_SECRET``, which nodes do not have; a random one if there is none.

    It names the objects of this process, and is the key of the MACs of shards.

    Raises:
        ConfigError: it is not one.
    """
    if os.environ.get(VARIABLE):
        return TierSecret.parse_all(os.environ)[0]
    _log.warning(
        "%s is not set: what nodes hold from before, and what this process writes to them, nobody else can read; %s",
        VARIABLE,
        TierSecret.remedy,
    )
    return TierSecret.generate()


def warm_tier_at(url: str, *, store: Readable, processes: int = 1) -> WarmTier | SharedTier:
    """Return a tier; nothing is connected to, and no function called, before the first read.

    Args:
        url: as :class:`~stoker_warm._config.Fleet` has it, or ``warm://HOST:PORT?fingerprint=…`` of a proxy elsewhere.
        store: of the data set, which this tier does not read.
        processes: that read through a tier each, in the whole job.

    Raises:
        ConfigError: it is not right, there is no secret, or every process would have a proxy of its own.
        MissingExtraError: what a proxy in this process needs is not installed.
    """
    if url.startswith("warm://"):
        return shared_tier_at(server_url(url), store=store, processes=processes)
    if processes > 1:
        raise ConfigError(
            f"{processes} processes read, and nodes serve one proxy: run `stoker warm proxy` with this URL, and give "
            "all of them the URL that it prints"
        )
    fleet, secret = Fleet.parse(url), secret_of_environment()
    require_codec(fleet.config.code)
    tenant = tier_secret_of_environment()
    mac = ShardMac(tenant.shards_key)
    return WarmTier(
        lambda: FleetProxy(fleet, secret, mac).start(), tenant, max_object_bytes=fleet.config.max_object_bytes
    )


def server_url(url: str) -> str:
    """Return the URL of a tier server for ``warm://``, which names a proxy's too; other URLs as they are."""
    scheme = "https" if "fingerprint=" in url else "http"
    return f"{scheme}://{url.removeprefix('warm://')}" if url.startswith("warm://") else url
