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
        deployment: the nodes, and where to listen.
        secret: of the deployment.
        mac: makes the MACs of shards.

    Raises:
        ConfigError: the executor does not take a setting.
        MissingExtraError: the executor, or the code, needs what is not installed.
    """

    def __init__(self, deployment: WarmDeployment, secret: WarmSecret, mac: ShardMac) -> None:
        self._executor = executor = open_executor(deployment.executor, deployment.options)
        for setting, (option, _) in EXECUTOR_SETTINGS.items():
            if getattr(deployment.options, option) is not None and option not in {*executor.heeds, *BILLING_OPTIONS}:
                raise ConfigError(f"{setting} means nothing to functions on {deployment.executor}; leave it out")
        listener = Listener(deployment.listen, advertised=deployment.advertised, certificate=deployment.certificate)
        tariff = None
        if executor.platform is not None:
            prices = Prices.load()
            functions, store = prices.function(executor.platform), prices.store(deployment.bucket)
            tariff = WarmPrices(functions=functions, store=store, egress=deployment.egress)
        super().__init__(deployment.config, secret, executor.call, listener, mac=mac, prices=tariff)
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
        self._start_task: asyncio.Task[None] | None = None
        self._reset()

    @classmethod
    def from_proxy(cls, proxy: Proxy, secret: TierSecret) -> WarmTier:
        """Return the tier of a proxy that runs already."""
        tier = cls(proxy.start, secret, max_object_bytes=proxy.config.max_object_bytes)
        tier._proxy = proxy
        return tier

    @property
    def proxy(self) -> Proxy | None:
        """The proxy while it runs in this process, else None."""
        if self._pid != os.getpid():
            self._reset()
        return self._proxy

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Fill ``into`` with an object, if it is there; begins to start the proxy if it does not run."""
        proxy = self.proxy
        if proxy is not None:
            return await proxy.objects.read(self._object_name(ref), into)
        loop = asyncio.get_running_loop()
        if self._start_task is None and loop.time() >= self._retry_at_seconds:
            self._start_task = loop.create_task(self._start())
        return False

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Keep an object that came from the bucket, if the proxy runs."""
        if self.proxy is not None:
            self.proxy.objects.offer(self._object_name(ref), data)

    def reject(self, ref: ObjectRef) -> None:
        """Forget an object whose bytes were wrong."""
        if self.proxy is not None:
            self.proxy.objects.remove(self._object_name(ref))

    async def close(self) -> None:
        """Close what was opened. Idempotent; a read opens it anew."""
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
                "the warm tier cannot be used: %s; it is tried again in %g s, the bucket serves meanwhile",
                error,
                self._retry_seconds,
            )
        finally:
            self._start_task = None

    def _reset(self) -> None:
        """Begin with nothing: what there may be belongs to the process that this one was forked from."""
        self._pid, self._proxy, self._start_task, self._retry_at_seconds = os.getpid(), None, None, float("-inf")


def read_warm_secret() -> WarmSecret:
    """Return the deployment's secret, of the variable ``STOKER_WARM_SECRET``.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    return WarmSecret.parse(os.environ.get(WarmSecret.variable, ""))


def read_tier_secret() -> TierSecret:
    """Return the first secret of ``STOKER_TIER_SECRET``, which nodes do not have; a random one if there is none.

    It names the objects of this process, and is the key of the MACs of shards.

    Raises:
        ConfigError: it is not one.
    """
    if os.environ.get(SECRET_VARIABLE):
        return TierSecret.parse_all(os.environ)[0]
    _log.warning(
        "%s is not set: what nodes hold from before, and what this process writes to them, nobody else can read; %s",
        SECRET_VARIABLE,
        TierSecret.remedy,
    )
    return TierSecret.generate()


def open_warm_tier(url: str, *, store: Readable, processes: int = 1) -> WarmTier | SharedTier:
    """Return a tier; nothing is connected to, and no function called, before the first read.

    Args:
        url: as :class:`~stoker_warm._config.WarmDeployment` has it, or ``warm://HOST:PORT?fingerprint=…`` of a proxy
            elsewhere.
        store: of the data set, which this tier does not read.
        processes: that read through a tier each, in the whole job.

    Raises:
        ConfigError: it is not right, there is no secret, or every process would have a proxy of its own.
        MissingExtraError: what a proxy in this process needs is not installed.
    """
    if url.startswith("warm://"):
        return open_shared_tier(parse_server_url(url), store=store, processes=processes)
    if processes > 1:
        raise ConfigError(
            f"{processes} processes read, and nodes serve one proxy: run `stoker warm proxy` with this URL, and give "
            "all of them the URL that it prints"
        )
    fleet, secret = WarmDeployment.parse(url), read_warm_secret()
    require_codec(fleet.config.code)
    tenant = read_tier_secret()
    mac = ShardMac(tenant.shards_key)
    return WarmTier(
        lambda: InProcessProxy(fleet, secret, mac).start(), tenant, max_object_bytes=fleet.config.max_object_bytes
    )


def parse_server_url(url: str) -> str:
    """Return the URL of a tier server for ``warm://``, which names a proxy's too; other URLs as they are."""
    scheme = "https" if "fingerprint=" in url else "http"
    return f"{scheme}://{url.removeprefix('warm://')}" if url.startswith("warm://") else url
