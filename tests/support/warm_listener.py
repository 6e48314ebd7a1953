"""A passive proxy that a node connects to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from stoker.errors import ConnectionLostError
from stoker_warm._auth import ProxyHandshake, WarmSecret
from stoker_warm._events import WakeEvent
from stoker_warm._frames import Kind
from stoker_warm._node import NodeServer
from stoker_warm._peer_connections import NodeConnection, ProxyConnection
from stoker_warm._shard import ShardStore
from support.warm_platform import ADDRESS, SECRET
from support.warm_wires import LinkConfig, Network

__all__ = ["Listener"]


class Listener:
    """A proxy that one node connects to, in virtual time.

    Attributes:
        network: network between both.
        notices: notices from the node.
        connections: the node's connections, at the proxy's end.
        node: the node.
    """

    def __init__(
        self, config: LinkConfig | None = None, *, shelf_bytes: int = 4 << 20, secret: WarmSecret = SECRET
    ) -> None:
        self.network = Network(config)
        self.notices: list[Kind] = []
        self.connections: list[ProxyConnection] = []
        self._is_dialled = asyncio.Event()
        self.network.listen(ADDRESS, self._accept)
        self.node = NodeServer(ShardStore(shelf_bytes), secret, connect=self._dial)

    def _accept(self) -> ProxyConnection:
        connection = ProxyConnection(ProxyHandshake(SECRET), lambda _, kind, head: self.notices.append(kind))
        self.connections.append(connection)
        self._is_dialled.set()
        return connection

    async def _dial(self, wake: WakeEvent, make: Callable[[], NodeConnection]) -> NodeConnection:
        try:
            _, connection = await self.network.dial(wake.proxy, make)
        except ConnectionRefusedError as error:
            raise ConnectionLostError(str(error)) from None
        return connection

    async def run(
        self,
        meanwhile: Callable[[ProxyConnection], Awaitable[object]],
        *,
        seconds: float = 900.0,
        linger_seconds: float,
    ) -> float:
        """Run an invocation, with a function on its connection; return its duration in seconds."""
        wake = WakeEvent(node="warm-0", proxy=ADDRESS, linger_seconds=linger_seconds)
        begun_seconds = asyncio.get_running_loop().time()
        proxy = asyncio.ensure_future(self._serve(meanwhile))
        await self.node.run(wake, seconds)
        ran_seconds = asyncio.get_running_loop().time() - begun_seconds
        await proxy
        await asyncio.sleep(0.1)  # until its last message has arrived
        return ran_seconds

    async def _serve(self, meanwhile: Callable[[ProxyConnection], Awaitable[object]]) -> None:
        await self._is_dialled.wait()
        await self.connections[-1].wait_authenticated()
        await meanwhile(self.connections[-1])

    async def close(self) -> None:
        """Close all connections."""
        await self.node.close()
        for connection in self.connections:
            await connection.close()
