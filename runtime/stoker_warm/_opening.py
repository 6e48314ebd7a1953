"""A warm tier from what a setting says of it: a client of a proxy, or a proxy in this process."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import AsyncExitStack

from stoker._cost.prices import Prices
from stoker._shared.secret import VARIABLE, TierSecret
from stoker.abc import Executor, Readable
from stoker.errors import ConfigError
from stoker.fanout import open_executor
from stoker_warm._auth import Secret
from stoker_warm._billing import Tariff
from stoker_warm._config import BILLED, OPTIONS, Fleet, WarmLocation
from stoker_warm._erasure import require_codec
from stoker_warm._listener import TcpListener
from stoker_warm._proxy import Proxy
from stoker_warm._shard import KEY_BYTES, ShardMac
from stoker_warm._tier import LazyBackend, ManagedBackend, WarmTier

_log = logging.getLogger("stoker.warm.opening")


class FleetProxy(Proxy):
    """A proxy in this process, with the executor that calls its nodes.

    Args:
        fleet: the nodes, and where to listen.
        secret: of the deployment.

    Raises:
        ConfigError: the executor does not take a setting, or ``STOKER_TIER_SECRET`` is not right.
        MissingExtraError: the executor, the code or the MACs of shards needs what is not installed.
    """

    def __init__(self, fleet: Fleet, secret: Secret) -> None:
        self._executor = _executor(fleet)
        listener = TcpListener(fleet.listen, advertised=fleet.advertised, certificate=fleet.certificate)
        super().__init__(
            fleet.config,
            secret,
            self._executor.call,
            listener,
            mac=mac_of_environment(),
            tariff=_tariff(fleet, self._executor),
        )
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Listen, and call all nodes.

        Raises:
            StokerError: it cannot listen, or functions cannot be called.
        """
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._executor)
            stack.push_async_callback(super().close)
            await super().start()
            self._stack = stack.pop_all()

    async def close(self) -> None:
        """Have nodes return, and end. Idempotent."""
        await self._stack.aclose()


def _executor(fleet: Fleet) -> Executor:
    executor = open_executor(fleet.executor, fleet.options)
    for setting, (option, _) in OPTIONS.items():
        if getattr(fleet.options, option) is not None and option not in {*executor.heeds, *BILLED}:
            raise ConfigError(f"{setting} means nothing to functions on {fleet.executor}; leave it out")
    return executor


def _tariff(fleet: Fleet, executor: Executor) -> Tariff | None:
    if executor.platform is None:
        return None
    prices = Prices.load()
    return Tariff(functions=prices.function(executor.platform), store=prices.store(fleet.bucket), egress=fleet.egress)


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
        proxy = FleetProxy(location.fleet, secret)
        await proxy.start()
        return proxy
    raise ConfigError(f"the location {location.url} names no functions")


def secret_of_environment() -> Secret:
    """Return the deployment's secret, of the variable ``STOKER_WARM_SECRET``.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    return Secret.parse(os.environ.get("STOKER_WARM_SECRET", ""))


def mac_of_environment() -> ShardMac:
    """Return what makes the MACs of shards: by the first secret of ``STOKER_TIER_SECRET``, else by a random key.

    Raises:
        ConfigError: the variable is set, and a secret in it is not right.
        MissingExtraError: the package that computes MACs is not installed.
    """
    if os.environ.get(VARIABLE):
        return ShardMac(TierSecret.parse_all(os.environ)[0].shards_key)
    _log.warning(
        "%s is not set: shards are protected with a random key, and what nodes hold from an earlier proxy cannot be "
        "read; `stoker tier secret` makes a secret that lasts",
        VARIABLE,
    )
    return ShardMac(secrets.token_bytes(KEY_BYTES))


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
