"""A node: a shard store in the memory of a function, and the connection on which the proxy reads and writes shards.

A function does not accept connections, so it connects to the proxy that its invocation names, and keeps the connection
and the shards from one invocation to the next (A. Wang et al., "InfiniCache" (FAST 2020), section 3.3). Between two
invocations the process is frozen. An invocation is billed by its duration, so it ends soon after the last request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from stoker._shared.address import Address
from stoker.errors import ConnectionLostError, StokerError, WireError
from stoker_warm._auth import NodeHandshake, WarmSecret, connect_to_proxy
from stoker_warm._events import NodeReport, NodeTask, WakeEvent
from stoker_warm._frames import Head, Kind
from stoker_warm._peer_connections import NodeConnection, ReplyParts
from stoker_warm._shard import MAX_SHARDS_PER_FRAME, ShardId, ShardStore, is_mac

ProxyConnector = Callable[[WakeEvent, Callable[[], NodeConnection]], Awaitable[NodeConnection]]
"""Connects to the proxy of an invocation, with a function that creates the connection."""

_LEAVE_TIMEOUT_SECONDS = 1.0
"""Timeout for sending the remaining answers and the LEAVING notice."""
_STALL_TIMEOUT_SECONDS = 5.0
"""Time without progress in sending an answer after which the proxy counts as gone."""
_MIN_POLL_SECONDS = 0.01
"""Minimum time between two checks for activity."""


async def _connect(wake: WakeEvent, create_connection: Callable[[], NodeConnection]) -> NodeConnection:
    return await connect_to_proxy(Address.parse(wake.proxy), wake.fingerprint, create_connection)


class NodeServer:
    """An instance of a node. Runs one invocation at a time, all on one event loop.

    Args:
        store: Store of its shards.
        secret: Secret of the deployment.
        connect: Function that connects to the proxy.
        instance: Unique id of the instance, 16 hexadecimal digits; None draws a random one.
    """

    def __init__(
        self, store: ShardStore, secret: WarmSecret, *, connect: ProxyConnector = _connect, instance: str | None = None
    ) -> None:
        self._store, self._secret, self._connect = store, secret, connect
        self._instance = instance or secrets.token_hex(8)
        self._connection: NodeConnection | None = None
        self._address = ("", "")
        self._must_stop = asyncio.Event()  # the proxy has sent STOP, or the connection has ended

    @property
    def report(self) -> NodeReport:
        """The report of this instance's current state."""
        store = self._store
        return NodeReport(
            instance=self._instance, version=store.version, held_bytes=store.held_bytes, limit_bytes=store.limit_bytes
        )

    async def run(self, wake: WakeEvent, available_seconds: float) -> dict[str, Any]:
        """Run an invocation, and return the report as JSON values.

        Returns when no request has arrived for ``linger_seconds``, when the proxy sends STOP, when the connection ends,
        or after ``available_seconds``. Answers that are being sent are completed first, if there is time.

        Args:
            wake: Event of the invocation.
            available_seconds: Time available, in seconds; notifying the proxy may take one second more.

        Raises:
            StokerError: The proxy cannot be reached, or one side does not know the secret.
        """
        if wake.task is not NodeTask.WARM:
            stop_at_seconds = asyncio.get_running_loop().time() + available_seconds
            connection = await self._open_connection(wake)
            await self._serve(connection, wake, stop_at_seconds)
        return self.report.to_json()

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _open_connection(self, wake: WakeEvent) -> NodeConnection:
        """Return the connection of the last invocation, after notifying the proxy on it, or a new one."""
        # Lets a loop that was frozen process the connection's events of the meantime.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self._must_stop.clear()
        address = (wake.proxy, wake.fingerprint)
        old = self._connection
        if old is not None and old.is_open and address == self._address and not wake.must_reconnect:
            with suppress(ConnectionLostError):
                old.notify(Kind.HERE, self.report.to_json())
                return old
        await self.close()
        handshake = NodeHandshake(self._secret, wake.node, self.report.to_json(), fingerprint=wake.fingerprint)
        connection = await self._connect(wake, lambda: NodeConnection(handshake, self._handle_request))
        try:
            await connection.wait_authenticated()
        except BaseException:
            connection.abort()
            raise
        self._connection, self._address = connection, address
        return connection

    async def _serve(self, connection: NodeConnection, wake: WakeEvent, stop_at_seconds: float) -> None:
        """Wait while the connection answers requests, then send the LEAVING notice."""
        ended = asyncio.ensure_future(connection.wait_closed())
        ended.add_done_callback(lambda _: self._must_stop.set())
        try:
            await self._wait_until_idle(connection, wake.linger_seconds, stop_at_seconds)
        finally:
            ended.cancel()
            await asyncio.wait([ended])
        patience_seconds = max(0.0, stop_at_seconds - asyncio.get_running_loop().time())
        with suppress(StokerError, TimeoutError):
            async with asyncio.timeout(_LEAVE_TIMEOUT_SECONDS + min(patience_seconds, _STALL_TIMEOUT_SECONDS)):
                connection.notify(Kind.LEAVING, self.report.to_json())
                await connection.flush()

    async def _wait_until_idle(self, connection: NodeConnection, linger_seconds: float, stop_at_seconds: float) -> None:
        """Wait until the connection was idle for a while, or the invocation must end for another reason."""
        loop = asyncio.get_running_loop()
        begun_seconds = loop.time()
        while connection.is_open and not self._must_stop.is_set():
            patience_seconds = max(linger_seconds, _STALL_TIMEOUT_SECONDS) if connection.is_sending else linger_seconds
            moved_seconds = max(begun_seconds, connection.received_seconds, connection.sent_seconds)
            left_seconds = min(stop_at_seconds, moved_seconds + patience_seconds) - loop.time()
            if left_seconds <= 0.0:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_seconds, max(linger_seconds, _MIN_POLL_SECONDS))):
                    await self._must_stop.wait()

    def _handle_request(self, kind: Kind, head: Head, body: bytearray) -> ReplyParts:
        match kind:
            case Kind.PING:
                return Kind.PONG, self.report.to_json(), ()
            case Kind.GET:
                shard = self._store.get(ShardId.parse(head.get("shard")))
                return (Kind.FOUND, {"mac": shard.mac}, (shard.payload,)) if shard else (Kind.MISSING, {}, ())
            case Kind.SET:
                return self._store_shard(ShardId.parse(head.get("shard")), head.get("mac"), body)
            case Kind.DELETE:
                for each in ShardId.parse_all(head.get("shards")):
                    self._store.delete(each)
                return Kind.STORED, self.report.to_json(), ()
            case Kind.INDEX:
                after = ShardId.parse(head["after"]) if head.get("after") else None
                page = self._store.list_ids(after, MAX_SHARDS_PER_FRAME)
                listing = {"shards": [each.to_text() for each in page], "more": int(len(page) == MAX_SHARDS_PER_FRAME)}
                return Kind.LISTED, listing, ()
            case Kind.STOP:
                self._must_stop.set()
                return Kind.BYE, self.report.to_json(), ()
        raise WireError(f"a node cannot handle a {kind.name} request")

    def _store_shard(self, shard: ShardId, mac: object, body: bytearray) -> ReplyParts:
        """Store a shard with its MAC, which only the proxy can verify."""
        if not is_mac(mac):
            raise WireError(f"the shard {shard.to_text()} has a malformed MAC: {mac!r:.80}")
        if len(body) != shard.size_bytes:
            return Kind.REFUSED, {"reason": "wrong length"}, ()
        evicted = self._store.set(shard, mac, body)
        if evicted is None:
            return Kind.REFUSED, {"reason": "too large"}, ()
        gone = [each.to_text() for each in evicted[:MAX_SHARDS_PER_FRAME]]  # further ones show in the version
        return Kind.STORED, {**self.report.to_json(), "evicted": gone}, ()
