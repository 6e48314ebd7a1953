"""A node: a shard store in the memory of a function, and the connection on which the proxy asks for what is on it.

Nobody can connect to a function, so it dials out to the proxy that its invocation names, and keeps the connection, with
the shards, from one invocation to the next (A. Wang et al., "InfiniCache" (FAST 2020), section 3.3). Between two of
them the process is frozen. It is billed for as long as an invocation lasts, so that ends soon after the last request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from stoker._shared.address import Address
from stoker.errors import ConnectionLostError, StokerError, WireError
from stoker_warm._auth import NodeHandshake, Secret, dial
from stoker_warm._ends import Answer, NodeEnd
from stoker_warm._events import Report, Task, Wake
from stoker_warm._frames import Head, Kind
from stoker_warm._shard import LISTED_AT_ONCE, ShardId, ShardStore, is_mac

Dial = Callable[[Wake, Callable[[], NodeEnd]], Awaitable[NodeEnd]]
"""Connects what it is given a way to make to the proxy of an invocation."""

_BYE_SECONDS = 1.0
"""For what is being sent when it is time to go, and for saying so."""
_STALL_SECONDS = 5.0
"""Until a proxy that takes nothing of an answer counts as gone."""
_LOOK_SECONDS = 0.01
"""The least time between two looks at what is being sent."""


async def _dial(wake: Wake, make: Callable[[], NodeEnd]) -> NodeEnd:
    return await dial(Address.parse(wake.proxy), wake.fingerprint, make)


class NodeServer:
    """An instance of a node. Runs one invocation at a time, all on one event loop.

    Args:
        store: of its shards.
        secret: of the deployment.
        connect: reaches the proxy.
        instance: 16 hexadecimal digits that no other instance has.
    """

    def __init__(
        self, store: ShardStore, secret: Secret, *, connect: Dial = _dial, instance: str | None = None
    ) -> None:
        self._store, self._secret, self._connect = store, secret, connect
        self._instance = instance or secrets.token_hex(8)
        self._connection: NodeEnd | None = None
        self._address = ("", "")
        self._must_go = asyncio.Event()  # the proxy says so, or the connection has ended

    @property
    def report(self) -> Report:
        """What this instance says of itself."""
        store = self._store
        return Report(
            instance=self._instance,
            version=store.version,
            held_bytes=store.held_bytes,
            limit_bytes=store.limit_bytes,
        )

    async def run(self, wake: Wake, seconds: float) -> dict[str, Any]:
        """Do what an invocation asks, and return the report.

        Ends when there was no request for ``linger_seconds``, when the proxy says so, when the connection
        ends, or when it is time to go; what is being answered then is answered first, if there is time.

        Args:
            wake: the invocation.
            seconds: after which it is time to go; to say so may take one more.

        Raises:
            StokerError: the proxy cannot be reached, or one of both does not know the secret.
        """
        if wake.task is not Task.WARM:
            stop_at_seconds = asyncio.get_running_loop().time() + seconds
            connection = await self._connected(wake)
            await self._serve(connection, wake, stop_at_seconds)
        return self.report.to_json()

    async def close(self) -> None:
        """End the connection. Idempotent."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _connected(self, wake: Wake) -> NodeEnd:
        """Return the connection from before, on which the proxy is notified, or a new one."""
        # A loop that stood still learns now of what happened to the connection meanwhile.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self._must_go.clear()
        address = (wake.proxy, wake.fingerprint)
        old = self._connection
        if old is not None and old.is_open and address == self._address and not wake.dial_anew:
            with suppress(ConnectionLostError):
                old.notify(Kind.HERE, self.report.to_json())
                return old
        await self.close()
        handshake = NodeHandshake(self._secret, wake.node, self.report.to_json(), fingerprint=wake.fingerprint)
        connection = await self._connect(wake, lambda: NodeEnd(handshake, self._answer))
        try:
            await connection.ready()
        except BaseException:
            connection.abort()
            raise
        self._connection, self._address = connection, address
        return connection

    async def _serve(self, connection: NodeEnd, wake: Wake, stop_at_seconds: float) -> None:
        """Be there until it is time to go; the requests themselves are answered by the connection."""
        ended = asyncio.ensure_future(connection.closed())
        ended.add_done_callback(lambda _: self._must_go.set())
        try:
            await self._linger(connection, wake.linger_seconds, stop_at_seconds)
        finally:
            ended.cancel()
            await asyncio.wait([ended])
        patience_seconds = max(0.0, stop_at_seconds - asyncio.get_running_loop().time())
        with suppress(StokerError, TimeoutError):
            async with asyncio.timeout(_BYE_SECONDS + min(patience_seconds, _STALL_SECONDS)):
                connection.notify(Kind.LEAVING, self.report.to_json())
                await connection.flush()

    async def _linger(self, connection: NodeEnd, linger_seconds: float, stop_at_seconds: float) -> None:
        """Wait until nothing has come or gone on a connection for a while, or there is another reason to go."""
        loop = asyncio.get_running_loop()
        begun_seconds = loop.time()
        while connection.is_open and not self._must_go.is_set():
            patience_seconds = max(linger_seconds, _STALL_SECONDS) if connection.is_sending else linger_seconds
            moved_seconds = max(begun_seconds, connection.received_seconds, connection.sent_seconds)
            left_seconds = min(stop_at_seconds, moved_seconds + patience_seconds) - loop.time()
            if left_seconds <= 0.0:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_seconds, max(linger_seconds, _LOOK_SECONDS))):
                    await self._must_go.wait()

    def _answer(self, kind: Kind, head: Head, body: bytearray) -> Answer:
        match kind:
            case Kind.PING:
                return Kind.PONG, self.report.to_json(), ()
            case Kind.GET:
                shard = self._store.get(ShardId.parse(head.get("shard")))
                return (Kind.FOUND, {"mac": shard.mac}, (shard.payload,)) if shard else (Kind.MISSING, {}, ())
            case Kind.SET:
                return self._put(ShardId.parse(head.get("shard")), head.get("mac"), body)
            case Kind.DELETE:
                for each in ShardId.parse_all(head.get("shards")):
                    self._store.delete(each)
                return Kind.STORED, self.report.to_json(), ()
            case Kind.INDEX:
                after = ShardId.parse(head["after"]) if head.get("after") else None
                page = self._store.ids(after, LISTED_AT_ONCE)
                listed = {"shards": [each.to_text() for each in page], "more": int(len(page) == LISTED_AT_ONCE)}
                return Kind.LISTED, listed, ()
            case Kind.STOP:
                self._must_go.set()
                return Kind.BYE, self.report.to_json(), ()
        raise WireError(f"a node does not know what to do with {kind.name}")

    def _put(self, shard: ShardId, mac: object, body: bytearray) -> Answer:
        """Keep a shard with its MAC, which only the proxy can check."""
        if not is_mac(mac):
            raise WireError(f"the shard {shard.to_text()} comes with the MAC {mac!r:.80}")
        if len(body) != shard.size_bytes:
            return Kind.REFUSED, {"reason": "of another length"}, ()
        evicted = self._store.set(shard, mac, body)
        if evicted is None:
            return Kind.REFUSED, {"reason": "too large"}, ()
        gone = [each.to_text() for each in evicted[:LISTED_AT_ONCE]]  # of more the version tells
        return Kind.STORED, {**self.report.to_json(), "evicted": gone}, ()
