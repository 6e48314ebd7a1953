"""The cache process of a machine, which holds super-samples for all loaders there.

A loader starts it as ``python -m stoker._cluster.node`` (:mod:`stoker._cluster.launch`). It goes into the background
once it listens, and ends when it has had no client for some time. A lock on a file, which it holds until then, ensures
that there is one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from stoker._base.task_group import end_tasks
from stoker._cache.index import size_of
from stoker._cluster.arena import Arena
from stoker._cluster.catalog import Catalog, Decision, Reply
from stoker._cluster.files import is_at, try_lock
from stoker._cluster.frames import HELLO, HELLO_SIZE, Frame, FrameProtocol, Kind
from stoker._cluster.spec import ClusterSpec
from stoker.errors import ConfigError

LEASE_SECONDS = 30.0
"""Time limit of a lease: the client is stuck then, and another one that waits fetches the object."""
_LOCK_SECONDS = 5.0
"""Time to wait for a process that is about to end."""
_HELLO_SECONDS = 2.0
_RETRY_SECONDS = 0.5
_PASSING_BYTES = 256 << 20
"""Maximum memory, beside the limit and not above it, of objects that ranks with the same batches need at a time."""
_FIRST_SECONDS = 10.0
"""Minimum time to wait for the first client, which has started the process."""

_log = logging.getLogger("stoker.cluster.node")


class Node:
    """Answers the clients of one machine. Used by one event loop.

    Args:
        arena: memory of the objects.
        limit_bytes: its size.

    Attributes:
        clients: present connections.
        had_clients: whether there was one.
        idle_since: event loop's time at which the last client left; None while there is one.
    """

    def __init__(self, arena: Arena, limit_bytes: int) -> None:
        self.arena, self.catalog = arena, Catalog(limit_bytes, min(limit_bytes, _PASSING_BYTES))
        self.clients: set[NodeConnection] = set()
        self.had_clients = False
        self.idle_since: float | None = asyncio.get_running_loop().time()

    def add_client(self, client: NodeConnection) -> None:
        """Add a client."""
        self.clients.add(client)
        self.had_clients, self.idle_since = True, None

    def remove_client(self, client: NodeConnection) -> None:
        """Remove a client, and give its leases to others."""
        self.clients.discard(client)
        self.answer(self.catalog.forget(client))
        if not self.clients:
            self.idle_since = asyncio.get_running_loop().time()

    def answer(self, replies: Iterable[Reply | None]) -> None:
        """Send replies."""
        for reply in replies:
            if reply is not None:
                assert isinstance(reply.client, NodeConnection)  # noqa: S101 - only these ask
                reply.client.reply(reply)

    def watch_lease(self, client: NodeConnection, name: str) -> None:
        """End a client's lease at its time limit."""
        lease = self.catalog.lease_of(client, name)
        asyncio.get_running_loop().call_later(LEASE_SECONDS, self._expire, client, name, lease)

    def _expire(self, client: NodeConnection, name: str, lease: int | None) -> None:
        if lease is None or self.catalog.lease_of(client, name) != lease:
            return
        if self.catalog.is_arriving(name):
            client.abort()  # stuck in the middle: it must not write any more
        else:
            self.answer(self.catalog.release(client, name))


class NodeConnection(FrameProtocol):
    """The connection of a client."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node
        self._has_mapped = False
        self._asked: dict[int, str] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._node.add_client(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._node.remove_client(self)

    def reply(self, reply: Reply) -> None:
        """Send the answer to a request."""
        name = self._asked.pop(reply.request, "")
        place, body = reply.place, memoryview(b"")
        if isinstance(place, bytearray):
            self.send(Frame(Kind.PASS, reply.request, name), memoryview(place))
            return
        if reply.decision is Decision.LEASE:
            self._node.watch_lease(self, name)
        elif reply.decision is Decision.HIT and not self._has_mapped:
            body = self._node.arena.memory[place : place + size_of(name)]
        self.send(Frame(Kind[reply.decision.name], reply.request, name, place), body)

    def frame_received(self, frame: Frame) -> tuple[int, memoryview | None]:
        catalog, name = self._node.catalog, frame.name
        match frame.kind:
            case Kind.OPEN:
                self._has_mapped = bool(frame.number)
            case Kind.ASK:
                self._asked[frame.request] = name
                reply = catalog.ask(self, frame.request, name, is_shared=bool(frame.number))
                self._node.answer([reply])
                if reply is None:
                    self.send(Frame(Kind.WAIT, frame.request, name))
            case Kind.PEEK:
                self._asked[frame.request] = name
                self._node.answer([catalog.peek(self, frame.request, name)])
            case Kind.GIVE:
                return size_of(name), self._place(name)
            case Kind.RELEASE:
                self._node.answer(catalog.release(self, name))
            case Kind.CANCEL:
                if self._asked.pop(frame.request, None) is not None:
                    catalog.cancel(self, frame.request, name)
            case Kind.REJECT:
                catalog.reject(name)
            case _:
                raise ValueError(f"a client sent {frame.kind.name}")
        return 0, None

    def _place(self, name: str) -> memoryview | None:
        node, size_bytes = self._node, size_of(name)
        place = node.catalog.begin(self, name)
        if place is None:
            return None
        if isinstance(place, bytearray):
            return memoryview(place)
        if not node.arena.reserve(place, size_bytes):
            _log.warning("the system has no room for more than %d bytes: no object is added", node.catalog.used_bytes)
            node.answer(node.catalog.stop_adding(name))
            return None
        return node.arena.memory[place : place + size_bytes]

    def body_received(self, frame: Frame) -> None:
        self._node.answer(self._node.catalog.complete(self, frame.name))


async def serve(
    listener: socket.socket, arena: Arena, spec: ClusterSpec, on_start: Callable[[Node], object] = lambda _: None
) -> None:
    """Answer clients until there was none for the time of the spec, or the process is asked to end.

    Args:
        listener: socket that listens.
        arena: memory of the objects.
        spec: limit, and time without a client.
        on_start: called with the node.
    """
    loop, node = asyncio.get_running_loop(), Node(arena, spec.limit_bytes)
    on_start(node)
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    accepting = loop.create_task(_accept(listener, node, spec.limit_bytes))
    try:
        while not stopped.is_set():
            left = spec.linger_seconds if node.had_clients else max(spec.linger_seconds, _FIRST_SECONDS)
            if node.idle_since is not None:
                left -= loop.time() - node.idle_since
            if left <= 0:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), min(left, 0.5))
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        await end_tasks([accepting])
        for client in list(node.clients):
            client.abort()


async def _accept(listener: socket.socket, node: Node, size_bytes: int) -> None:
    loop, shared = asyncio.get_running_loop(), node.arena.readable
    hello, descriptors = HELLO + HELLO_SIZE.pack(size_bytes), [] if shared is None else [shared]
    while True:
        try:
            client, _ = await loop.sock_accept(listener)
        except OSError as error:  # such as too many open files
            _log.warning("no client can connect: %s", error)
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        try:
            client.settimeout(_HELLO_SECONDS)  # never waits: the buffer of a new socket is empty
            socket.send_fds(client, [hello], descriptors)
            client.setblocking(False)
            await loop.connect_accepted_socket(lambda: NodeConnection(node), client)
        except OSError as error:
            _log.warning("a client could not connect: %s", error)
            client.close()


def _wait_for_lock(file: Path) -> int | None:
    """Return a descriptor with the lock on a file; None if another process keeps it."""
    until = time.monotonic() + _LOCK_SECONDS
    while (lock := try_lock(file)) is None and time.monotonic() < until:
        time.sleep(0.02)
    return lock


def main(arguments: list[str]) -> int:
    """Run the process; ``arguments`` are the path of its files without the ending, and the setting."""
    base, spec = Path(arguments[0]), ClusterSpec.parse(arguments[1])
    lock = _wait_for_lock(base.with_suffix(".lock"))
    if lock is None:
        return 0  # there is one
    path = base.with_suffix(".sock")
    try:
        arena = Arena(spec.limit_bytes, spec.path)
        path.unlink(missing_ok=True)  # of a process that was killed
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(128)
        listener.setblocking(False)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{path}: {error}; set XDG_RUNTIME_DIR to another folder", file=sys.stderr)
        return 1
    if os.fork():
        os._exit(0)  # the loader waits for this process, and its child goes on
    os.setsid()
    try:
        asyncio.run(serve(listener, arena, spec))
    finally:
        if is_at(lock, base.with_suffix(".lock")):  # else the socket is another process's
            path.unlink(missing_ok=True)
        listener.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
