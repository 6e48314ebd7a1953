"""A client of a proxy that runs elsewhere and that trainers share.

Nothing here ever stops a training: a proxy that is not there, is being restarted, hangs or talks nonsense is a miss. It
is looked for again after a while that grows, not at every read. Objects to read and objects to put away have a
connection each, so that a read never waits behind what is written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.errors import ConfigError, ConnectionLostError, DeadlineError, StokerError, WireError
from stoker_warm._auth import Address, PeerSide, Secret, dial
from stoker_warm._connection import Connection
from stoker_warm._frames import MAX_BODY_BYTES, Head, Kind
from stoker_warm._requests import Answer

Connect = Callable[[Callable[[], Connection]], Awaitable[Connection]]
"""Connects to the proxy what it is given a way to make; as :func:`~stoker_warm._auth.dial`."""


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


class ReconnectingConnection:
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


_log = logging.getLogger("stoker.warm.client")


@dataclass(slots=True)
class ClientStatistics:
    """What a client did.

    Attributes:
        hits: objects that were read.
        misses: objects that the proxy does not have.
        failures: reads that it did not answer, or not as it should.
        unreachable: reads for which there was no connection.
        connects: connections that were made.
        stored: objects that the proxy took.
        refused: objects that it did not take.
        declined: objects that were not even offered, since too many wait or nobody is there.
        pending_bytes: copies that wait.
    """

    hits: int = 0
    misses: int = 0
    failures: int = 0
    unreachable: int = 0
    connects: int = 0
    stored: int = 0
    refused: int = 0
    declined: int = 0
    pending_bytes: int = 0


class WarmClient:
    """A :class:`~stoker_warm._tier.TierBackend` that asks a proxy. Connects at the first read; lives on one event loop.

    Args:
        address: of the proxy.
        secret: of the deployment.
        fingerprint: of the proxy's certificate, empty without TLS.
        config: how hard it tries.
        connect: reaches the proxy; by default over TCP.
        rng: spreads attempts to connect, so that clients do not all come at once.
    """

    def __init__(
        self,
        address: Address,
        secret: Secret,
        *,
        fingerprint: str = "",
        config: ClientConfig | None = None,
        connect: Connect | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config or ClientConfig()
        self._tally = ClientStatistics()
        self._instance = secrets.token_hex(8)

        def handshake() -> PeerSide:
            return PeerSide(secret, "client", f"client-{os.getpid()}", self._instance, fingerprint=fingerprint)

        def over_tcp(make: Callable[[], Connection]) -> Awaitable[Connection]:
            return dial(address, fingerprint, make, self._config.dial_seconds)

        rng = rng or random.Random()  # noqa: S311 - when to connect is no secret
        self._reads, self._writes = (
            ReconnectingConnection(str(address), self._config, handshake, connect or over_tcp, rng) for _ in range(2)
        )
        self._turns = asyncio.Semaphore(self._config.offers)
        self._offered: dict[str, asyncio.Task[None]] = {}
        self._dropped: set[str] = set()
        self._is_closed = self._has_warned = False

    def statistics(self) -> ClientStatistics:
        """Return a snapshot."""
        counted = {name: getattr(self._tally, name) for name in ClientStatistics.__slots__}
        return ClientStatistics(**counted | {"connects": self._reads.connects + self._writes.connects})

    async def read(self, name: str, into: memoryview) -> bool:
        """Fill ``into`` with an object, if the proxy is there and has it. Whatever is wrong is a miss.

        When the call ends, however it ends, nothing writes to ``into`` any more.
        """
        if name in self._dropped:
            self._tally.misses += 1
            return False
        connection = None if self._is_closed else await self._reads.connected()
        if connection is None:
            self._tally.unreachable += 1
            self._warn()
            return False
        sent_seconds = asyncio.get_running_loop().time()
        try:
            reply = await connection.request(Kind.READ, {"object": name}, into=into, timeout=self._config.read_seconds)
        except StokerError as error:
            self._tally.failures += 1
            if isinstance(error, DeadlineError) and connection.statistics().heard_seconds <= sent_seconds:
                connection.abort(error)  # it hangs: those that come next need not wait for it, too
            _log.debug("the warm tier's proxy does not give %s: %s", name, error)
            return False
        self._reads.is_well()
        self._has_warned = False
        is_whole = reply.kind is Kind.FOUND and reply.body_bytes == len(into)
        self._tally.hits += is_whole
        self._tally.misses += reply.kind is Kind.MISSING
        self._tally.failures += not is_whole and reply.kind is Kind.FOUND
        return is_whole

    def offer(self, name: str, data: memoryview) -> None:
        """Have an object kept, if there is room for a copy until the proxy has it. Never blocks."""
        if name in self._offered or len(data) > MAX_BODY_BYTES:
            return
        has_room = self._tally.pending_bytes + len(data) <= self._config.pending_bytes
        if self._is_closed or not has_room or not self._reads.is_open:
            self._tally.declined += 1
            return
        self._tally.pending_bytes += len(data)
        task = self._offered[name] = asyncio.get_running_loop().create_task(self._hand_over(name, bytes(data)))
        task.add_done_callback(lambda _: self._handed_over(name, len(data)))

    def drop(self, name: str) -> None:
        """Ask for an object no more: its bytes were wrong. The proxy, which others use, too, is not told."""
        self._dropped.add(name)

    async def status(self, *, wakes: bool = False) -> Mapping[str, Any]:
        """Return how the tier does; see :meth:`stoker_warm._proxy.Proxy.status`. What waits here is pending, too.

        Args:
            wakes: whether all nodes are called before.

        Raises:
            StokerError: the proxy cannot be asked.
        """
        told = await self._asked(Kind.STATUS, {"wake": int(wakes)}, Kind.LISTED)
        return {**told, "pending_bytes": told.get("pending_bytes", 0) + self._tally.pending_bytes}

    async def down(self, *, forgets: bool = False) -> list[str]:
        """Have all nodes return, and the proxy end.

        Args:
            forgets: whether nodes drop what they hold.

        Returns:
            What went wrong.

        Raises:
            StokerError: the proxy cannot be asked.
        """
        head = await self._asked(Kind.DOWN, {"forget": int(forgets)}, Kind.BYE)
        problems = head.get("problems")
        return [str(each) for each in problems] if isinstance(problems, list) else []

    async def close(self) -> None:
        """End the connections; what waits to be handed over is dropped. Idempotent."""
        self._is_closed = True
        tasks = list(self._offered.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._reads.close()
        await self._writes.close()

    def _warn(self) -> None:
        """Say that there is no proxy: once, until there is one."""
        if self._reads.failure is not None and not self._has_warned:
            self._has_warned = True
            _log.warning("the warm tier is done without until its proxy is back: %s", self._reads.failure)

    async def _asked(self, kind: Kind, head: Head, wanted: Kind) -> Head:
        """Ask for what may take as long as all nodes need to wake."""
        connection = await self._reads.opened()
        reply = await connection.request(kind, head)
        if reply.kind is not wanted:
            raise WireError(f"the warm tier's proxy answers {kind.name} by {reply.kind.name}")
        return reply.head

    async def _hand_over(self, name: str, data: bytes) -> None:
        async with self._turns:
            connection = await self._writes.connected()
            if connection is None:
                self._tally.declined += 1
                return
            try:
                reply = await connection.request(
                    Kind.OFFER, {"object": name}, body=(data,), timeout=self._config.offer_seconds
                )
            except StokerError as error:
                self._tally.declined += 1
                _log.debug("the warm tier's proxy does not take %s: %s", name, error)
                return
            self._writes.is_well()
            self._tally.stored += reply.kind is Kind.STORED
            self._tally.refused += reply.kind is Kind.REFUSED

    def _handed_over(self, name: str, size_bytes: int) -> None:
        del self._offered[name]
        self._tally.pending_bytes -= size_bytes
