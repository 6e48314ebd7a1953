"""The warm tier for the fetcher: an optional tier before the bucket, which may be late, or lack or lose any object.

Its proxy runs in this process, and is started in the background by the first read. Until it runs, every read is a miss;
after a failed start, the next attempt waits for some time. A proxy elsewhere is read by the client of shared tiers.
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
from stoker._shared.client import SharedTier, open_shared_tier
from stoker._shared.secret import SECRET_VARIABLE, TierSecret
from stoker.abc import ObjectRef, Readable
from stoker.errors import ConfigError, StokerError
from stoker.fanout import open_executor
from stoker_warm._auth import WarmSecret
from stoker_warm._billing import WarmPrices
from stoker_warm._config import BILLING_OPTIONS, EXECUTOR_SETTINGS, WarmDeployment
from stoker_warm._erasure import require_codec
from stoker_warm._listener import Listener
from stoker_warm._proxy import Proxy
from stoker_warm._shard import ShardMac
from stoker_warm._tier_server import create_object_name

_log = logging.getLogger("stoker.warm.lazy")


class InProcessProxy(Proxy):
    """A proxy in this process, with the executor that calls its nodes.

    Args:
        deployment: Nodes, and the address to listen on.
        secret: Secret of the deployment.
        mac: Key for the MACs of shards.

    Raises:
        ConfigError: The executor does not support a given setting.
        MissingExtraError: A package that the executor or the erasure code needs is not installed.
    """

    def __init__(self, deployment: WarmDeployment, secret: WarmSecret, mac: ShardMac) -> None:
        self._executor = executor = open_executor(deployment.executor, deployment.options)
        for setting, (option, _) in EXECUTOR_SETTINGS.items():
            if getattr(deployment.options, option) is not None and option not in {*executor.heeds, *BILLING_OPTIONS}:
                raise ConfigError(f"{setting} has no effect for functions on {deployment.executor}; leave it out")
        listener = Listener(deployment.listen, advertised=deployment.advertised, certificate=deployment.certificate)
        tariff = None
        if executor.platform is not None:
            prices = Prices.load()
            functions = prices.function(executor.platform)
            store = prices.store(deployment.bucket)
            tariff = WarmPrices(functions=functions, store=store, egress=deployment.egress)
        super().__init__(deployment.config, secret, executor.call, listener, mac=mac, prices=tariff)
        self._stack = AsyncExitStack()

    async def start(self) -> Self:
        """Open the executor, listen, and call all nodes.

        Raises:
            StokerError: The address cannot be used, or functions cannot be called.
        """
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._executor)
            stack.push_async_callback(super().close)
            await super().start()
            self._stack = stack.pop_all()
        return self

    async def close(self) -> None:
        """Send STOP to the nodes, and close the proxy and the executor. Idempotent."""
        await self._stack.aclose()


class WarmTier:
    """A :class:`~stoker.abc.Tier` over a proxy. If a read is late, the fetcher reads from the store.

    Each process has its own proxy.

    Args:
        start_proxy: Function that starts a proxy, and returns it.
        secret: Secret of the tenant, from which the names of objects are derived.
        max_object_bytes: Size of the largest object that the tier can store; None if unknown.
        retry_seconds: Time after a failed start before the next attempt.
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
        self._start_task: asyncio.Task[None] | None = None
        self._reset()

    @classmethod
    def from_proxy(cls, proxy: Proxy, secret: TierSecret) -> WarmTier:
        """Return the tier of a running proxy."""
        tier = cls(proxy.start, secret, max_object_bytes=proxy.config.max_object_bytes)
        tier._proxy = proxy
        return tier

    @property
    def proxy(self) -> Proxy | None:
        """The proxy, while it runs in this process; otherwise None."""
        if self._pid != os.getpid():
            self._reset()
        return self._proxy

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Read an object into ``into``; return False, and start the proxy in the background, if it does not run."""
        proxy = self.proxy
        if proxy is not None:
            return await proxy.objects.read(self._object_name(ref), into)
        loop = asyncio.get_running_loop()
        if self._start_task is None and loop.time() >= self._retry_at_seconds:
            self._start_task = loop.create_task(self._start())
        return False

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Queue an object from the bucket for writing, if the proxy runs."""
        if self.proxy is not None:
            self.proxy.objects.offer(self._object_name(ref), data)

    def reject(self, ref: ObjectRef) -> None:
        """Remove an object whose bytes were wrong."""
        if self.proxy is not None:
            self.proxy.objects.remove(self._object_name(ref))

    async def close(self) -> None:
        """Close the proxy. Idempotent; the next read starts a new one."""
        if self.proxy is None and self._start_task is not None:
            await end_tasks([self._start_task])
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            await proxy.close()

    def _object_name(self, ref: ObjectRef) -> str:
        return create_object_name(f"{self._secret.tenant}/{self._secret.object_name(ref)}")

    async def _start(self) -> None:
        try:
            self._proxy = await self._start_proxy()
        except StokerError as error:
            self._retry_at_seconds = asyncio.get_running_loop().time() + self._retry_seconds
            _log.warning(
                "the warm tier cannot be used: %s; the next attempt is in %g s, and reads use the bucket until then",
                error,
                self._retry_seconds,
            )
        finally:
            self._start_task = None

    def _reset(self) -> None:
        """Reset the state: after a fork, proxy and task belong to the parent process."""
        self._pid, self._proxy, self._start_task, self._retry_at_seconds = os.getpid(), None, None, float("-inf")


def read_warm_secret() -> WarmSecret:
    """Return the deployment's secret from the environment variable ``STOKER_WARM_SECRET``.

    Raises:
        ConfigError: The variable is not set, or its value is malformed.
    """
    return WarmSecret.parse(os.environ.get(WarmSecret.variable, ""))


def read_tier_secret() -> TierSecret:
    """Return the first secret of ``STOKER_TIER_SECRET``, which nodes do not know; a random one if it is not set.

    The names of this process's objects and the key for the MACs of shards are derived from it.

    Raises:
        ConfigError: The variable's value is malformed.
    """
    if os.environ.get(SECRET_VARIABLE):
        return TierSecret.parse_all(os.environ)[0]
    _log.warning(
        "%s is not set: this process cannot read objects that others have written to nodes, nor they its own; %s",
        SECRET_VARIABLE,
        TierSecret.remedy,
    )
    return TierSecret.generate()


def open_warm_tier(url: str, *, store: Readable, processes: int = 1) -> WarmTier | SharedTier:
    """Create a tier from a URL, without connecting or calling a function before the first read.

    Args:
        url: URL of a :class:`~stoker_warm._config.WarmDeployment`, or ``warm://HOST:PORT?fingerprint=…`` of a proxy.
        store: Store of the data set; unused by this tier.
        processes: Number of processes of the job that read through a tier of their own.

    Raises:
        ConfigError: The URL is invalid, a secret is missing, or several processes would each run a proxy.
        MissingExtraError: A package that a proxy in this process needs is not installed.
    """
    if url.startswith("warm://"):
        return open_shared_tier(parse_server_url(url), store=store, processes=processes)
    if processes > 1:
        raise ConfigError(
            f"{processes} processes read, but nodes serve only one proxy; run `stoker warm proxy` with this URL, and "
            "give all processes the URL that it prints"
        )
    fleet, secret = WarmDeployment.parse(url), read_warm_secret()
    require_codec(fleet.config.code)
    tenant = read_tier_secret()
    mac = ShardMac(tenant.shards_key)
    return WarmTier(
        lambda: InProcessProxy(fleet, secret, mac).start(), tenant, max_object_bytes=fleet.config.max_object_bytes
    )


def parse_server_url(url: str) -> str:
    """Return the HTTP URL of a ``warm://`` URL; other URLs are returned unchanged."""
    scheme = "https" if "fingerprint=" in url else "http"
    return f"{scheme}://{url.removeprefix('warm://')}" if url.startswith("warm://") else url
