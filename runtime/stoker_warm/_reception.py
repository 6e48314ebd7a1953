"""Who dials the proxy: nodes, which are told apart by their names, and clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from stoker._base.task_group import task_group
from stoker.errors import StokerError, WireError
from stoker_warm._connection import Answer, Connection
from stoker_warm._door import MOST_STRANGERS, Door
from stoker_warm._fleet import Node
from stoker_warm._handshake import ProxySide, Secret
from stoker_warm._wire import Head, Kind

__all__ = ["Clients", "Reception"]

_log = logging.getLogger("stoker.warm.reception")

_QUIET_SECONDS = 10.0
"""Between two words about connections that ended for the same kind of reason."""


class Clients(Protocol):
    """Answers those who are no nodes."""

    def room(self, size_bytes: int) -> bytearray | None:
        """Return memory for the body of a request, None for it to be thrown away."""
        ...

    async def answer(self, connection: Connection, kind: Kind, head: Head, body: bytearray) -> Answer:
        """Answer a request of a client."""
        ...


class Reception:
    """All connections to a proxy. Lives on its event loop.

    Args:
        secret: of the deployment.
        door: where they dial.
        nodes: by number; told of their connections.
        clients: answers the requests of clients; without it they are turned away.
        spawn: runs what it is given until it ends or the proxy does.
    """

    def __init__(
        self,
        secret: Secret,
        door: Door,
        nodes: Sequence[Node],
        clients: Clients | None,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._secret, self._door, self._nodes, self._clients, self._spawn = secret, door, nodes, clients, spawn
        self._connections: set[Connection] = set()
        self._told: dict[type[StokerError], tuple[float, int]] = {}  # when last, and how many have ended like it since

    async def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be used.
        """
        await self._door.open(self._accept, most_strangers=MOST_STRANGERS + len(self._nodes))

    def close_door(self) -> None:
        """Let nobody in any more. Idempotent."""
        self._door.close()

    async def close(self) -> None:
        """End all connections."""
        async with task_group() as group:
            for connection in list(self._connections):
                group.create_task(connection.close())

    def _accept(self) -> Connection:
        connection: Connection

        def noticed(kind: Kind, head: Head) -> None:
            node = self._node_of(connection)
            if node is None:
                return
            try:
                node.noticed(connection, kind, head)
            except WireError as error:
                connection.abort(error)

        async def answer(kind: Kind, head: Head, body: bytearray) -> Answer:
            if self._clients is None or connection.peer is None or connection.peer.role != "client":
                raise WireError(f"{kind.name} is not asked of a proxy")
            return await self._clients.answer(connection, kind, head, body)

        handshake = ProxySide(self._secret, fingerprint=self._door.fingerprint)
        room = self._clients.room if self._clients is not None else _no_room
        connection = Connection(handshake, answer, notice=noticed, room=room)
        self._spawn(self._attend(connection))
        return connection

    async def _attend(self, connection: Connection) -> None:
        """Be there for a connection until it ends."""
        self._connections.add(connection)
        node: Node | None = None
        try:
            peer = await connection.ready()
            if peer.role == "node":
                node = self._node_of(connection)
                if node is None:
                    raise WireError(f"there is no node {peer.node}")
                node.greeted(connection, peer.greeting)
            await connection.closed()
        except StokerError as error:
            self._tell(error)
            connection.abort()
        finally:
            self._connections.discard(connection)
            connection.abort()
            if node is not None:
                node.lost(connection)

    def _tell(self, error: StokerError) -> None:
        """Say why a connection ended; of many alike, which strangers can cause, only the first and their number."""
        now_seconds, kind = asyncio.get_running_loop().time(), type(error)
        told_seconds, untold = self._told.get(kind, (float("-inf"), 0))
        if now_seconds - told_seconds < _QUIET_SECONDS:
            self._told[kind] = told_seconds, untold + 1
            return
        self._told[kind] = now_seconds, 0
        more = f" ({untold:,} more have ended like this since the last word)" if untold else ""
        _log.warning("a connection of the warm tier ended: %s%s", error, more)

    def _node_of(self, connection: Connection) -> Node | None:
        peer = connection.peer
        number = peer.node.removeprefix("warm-") if peer is not None else ""
        is_number = number.isascii() and number.isdigit() and len(number) <= 5
        return self._nodes[int(number)] if is_number and int(number) < len(self._nodes) else None


def _no_room(_: int) -> None:
    """Take no bodies: nodes send none unasked."""
