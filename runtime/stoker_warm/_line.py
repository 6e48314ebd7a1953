"""One connection to a proxy that runs elsewhere, made again when it was lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from stoker.errors import ConfigError, ConnectionLostError, DeadlineError, StokerError, WireError
from stoker_warm._connection import Answer, Connection
from stoker_warm._handshake import PeerSide
from stoker_warm._wire import Head, Kind

__all__ = ["ClientConfig", "Connect", "Line"]

Connect = Callable[[Callable[[], Connection]], Awaitable[Connection]]
"""Connects to the proxy what it is given a way to make; as :func:`~stoker_warm._sockets.dial`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """How hard a client tries.

    Attributes:
        dial_seconds: for connecting, the handshake included.
        read_seconds: for an object; then the bucket is asked.
        offer_seconds: for handing over an object.
        pending_bytes: copies of objects that wait to be handed over; more are not kept at all.
        offers: objects that are handed over at once.
        least_wait_seconds: between two attempts to connect; doubled after each that fails.
        most_wait_seconds: between two attempts.

    Raises:
        ConfigError: one of them is not positive.
    """

    dial_seconds: float = 5.0
    read_seconds: float = 15.0
    offer_seconds: float = 60.0
    pending_bytes: int = 256 << 20
    offers: int = 2
    least_wait_seconds: float = 0.5
    most_wait_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of a warm tier's client is more than 0, not {getattr(self, name)}")


class Line:
    """One connection to the proxy, made again when it was lost, at intervals that grow. Lives on one event loop.

    Args:
        proxy: what to call it in an error.
        config: how hard it tries.
        handshake: makes this side's of a connection.
        connect: reaches the proxy.
        rng: spreads attempts to connect.
    """

    def __init__(
        self,
        proxy: str,
        config: ClientConfig,
        handshake: Callable[[], PeerSide],
        connect: Connect,
        rng: random.Random,
    ) -> None:
        self._proxy, self._config, self._handshake, self._connect, self._rng = proxy, config, handshake, connect, rng
        self._connection: Connection | None = None
        self._dialling: asyncio.Task[StokerError | None] | None = None
        self._attempts = 0
        self._failed = 0  # times in a row
        self._next_seconds = float("-inf")
        self.connects = 0
        """Connections that were made."""
        self.failure: StokerError | None = None
        """Of the last attempt to connect, if that failed."""

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None and self._connection.is_open

    def is_well(self) -> None:
        """The proxy has answered."""
        self._failed = 0

    async def connected(self) -> Connection | None:
        """Return the connection, None if there is none. Only the first attempt to make it is waited for."""
        if self.is_open:
            return self._connection
        self._begin()
        if self._dialling is not None and self._attempts == 1:
            # Whoever wants it waits for the same one; a reader that leaves, leaves it to the others.
            await asyncio.wait([self._dialling])
        return self._connection if self.is_open else None

    async def opened(self) -> Connection:
        """Return the connection, after an attempt to make it if there is none.

        Raises:
            StokerError: why there is none.
        """
        self._next_seconds = float("-inf")
        self._begin()
        if self._dialling is not None:
            await asyncio.wait([self._dialling])
            if (error := self._dialling.result()) is not None:
                raise error
        if self._connection is None:
            raise ConnectionLostError(f"there is no connection to the warm tier's proxy at {self._proxy}")
        return self._connection

    async def close(self) -> None:
        """End it. Idempotent."""
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait([self._dialling])
        if self._connection is not None:
            await self._connection.close()

    def _begin(self) -> None:
        """Begin to connect, if that is due."""
        loop = asyncio.get_running_loop()
        if self.is_open or (self._dialling is not None and not self._dialling.done()):
            return
        self._dialling = None
        if loop.time() >= self._next_seconds:
            longest = min(self._config.most_wait_seconds, self._config.least_wait_seconds * 2**self._failed)
            self._next_seconds = loop.time() + longest * self._rng.uniform(0.5, 1.0)
            self._attempts += 1
            self._failed = min(self._failed + 1, 32)  # until it is well
            self._dialling = loop.create_task(self._dial())

    async def _dial(self) -> StokerError | None:
        connection: Connection | None = None

        def make() -> Connection:
            nonlocal connection
            connection = Connection(self._handshake(), _refuse)
            return connection

        try:
            async with asyncio.timeout(self._config.dial_seconds):
                self._connection = await self._connect(make)
                await self._connection.ready()
        except (StokerError, TimeoutError) as error:
            lost = DeadlineError(f"the warm tier's proxy at {self._proxy} does not answer")
            self.failure = error if isinstance(error, StokerError) else lost
            if connection is not None:
                connection.abort()
            return self.failure
        except BaseException:
            if connection is not None:
                connection.abort()
            raise
        self.connects += 1
        self.failure = None
        return None


async def _refuse(kind: Kind, head: Head, body: bytearray) -> Answer:
    raise WireError(f"{kind.name} is not asked of a client")
