"""A copy of the same bytes over one connection between two processes, plain and with TLS."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from typing import Any

from benchmarks.tiers.place import Objects, Place
from benchmarks.warm_tier.fleet import processor_seconds
from stoker._shared.certificate import create_ephemeral_tls

__all__ = ["child", "plain_copy", "tls_copy"]

_START_SECONDS, _END_SECONDS = 60.0, 10.0
_ASK_BYTES = 4


@contextmanager
def child(serve: Callable[..., None], core: int | None, *arguments: Any) -> Iterator[tuple[int, Any]]:
    """Run a server in a process of its own; yield its process id and its first message.

    Args:
        serve: server function; it gets a pipe and ``arguments``, and ends at a message or the end of the pipe.
        core: core that the process may use; None for all.
        arguments: arguments, which must be picklable.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_on_core, args=(serve, core, theirs, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_SECONDS):
            raise TimeoutError(f"{serve.__name__} did not start")
        assert process.pid is not None
        yield process.pid, ours.recv()
    finally:
        ours.close()
        process.join(_END_SECONDS)
        process.kill()


def _serve_on_core(serve: Callable[..., None], core: int | None, pipe: Pipe, arguments: Sequence[Any]) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    serve(pipe, *arguments)


def _serve(pipe: Pipe, objects: Objects, is_tls: bool) -> None:
    """Send objects on request, by number, over a single connection."""
    bodies = [memoryview(body) for body in objects.bodies()]
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_tls:
            connection = create_ephemeral_tls().context.wrap_socket(connection, server_side=True)
        with connection:
            while asked := connection.recv(_ASK_BYTES):
                connection.sendall(bodies[int.from_bytes(asked)])


@asynccontextmanager
async def plain_copy(objects: Objects, core: int | None) -> AsyncIterator[Place]:
    """Copy over TCP, with blocking calls, into mapped memory."""
    with child(_serve, core, objects, False) as (pid, port), socket.create_connection(("127.0.0.1", port)) as peer:
        yield _place("plain TCP copy", pid, peer)


@asynccontextmanager
async def tls_copy(objects: Objects, core: int | None) -> AsyncIterator[Place]:
    """Copy over TLS 1.3, in the same way."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # a child process, over loopback
    with (
        child(_serve, core, objects, True) as (pid, port),
        socket.create_connection(("127.0.0.1", port)) as bare,
        context.wrap_socket(bare) as peer,
    ):
        yield _place("TLS copy", pid, peer)


def _place(name: str, pid: int, peer: socket.socket) -> Place:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def read(number: int, into: memoryview) -> None:
        peer.sendall(number.to_bytes(_ASK_BYTES))
        done = 0
        while done < len(into):
            got = peer.recv_into(into[done:])
            if not got:
                raise ConnectionError(f"the other end of the {name} hung up")
            done += got

    return Place(name=name, read=read, server_seconds=lambda: processor_seconds(pid))
