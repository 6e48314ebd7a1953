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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stoker._base.machine import raise_file_limit
from stoker._base.task_group import end_tasks
from stoker._cluster.arena import Arena
from stoker._cluster.files import is_at, machine_label, try_lock
from stoker._cluster.frames import HELLO, HELLO_SIZE
from stoker._cluster.serving import Node, NodeConnection
from stoker._cluster.spec import ClusterSpec
from stoker._cluster.tcp import listen_tcp
from stoker.errors import ConfigError

_LOCK_SECONDS = 5.0
"""Time to wait for a process that is about to end."""
_HELLO_SECONDS = 2.0
_RETRY_SECONDS = 0.5
_PORT_SECONDS = 10.0
"""Time that a port for other machines stays open without a client: worker processes may follow each other."""
_FIRST_SECONDS = 10.0
"""Minimum time to wait for the first client, which has started the process."""

_log = logging.getLogger("stoker.cluster.node")


async def serve(
    listener: socket.socket,
    arena: Arena,
    spec: ClusterSpec,
    label: str,
    on_start: Callable[[Node], object] = lambda _: None,
) -> None:
    """Answer clients until there was none for the time of the spec, or the process is asked to end.

    Args:
        listener: socket that listens.
        arena: memory of the objects.
        spec: limit, and time without a client.
        label: name of this machine among those of a job.
        on_start: called with the node.
    """
    loop, node = asyncio.get_running_loop(), Node(arena, spec.limit_bytes, label=label, listen=listen_tcp)
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
            if node.idle_since is not None and loop.time() - node.idle_since >= _PORT_SECONDS:
                node.close_ports()
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), min(left, 0.5))
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        await end_tasks([accepting])
        node.close_ports()
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
    raise_file_limit()
    try:
        asyncio.run(serve(listener, arena, spec, machine_label(base.with_suffix(".label"))))
    finally:
        if is_at(lock, base.with_suffix(".lock")):  # else the socket is another process's
            path.unlink(missing_ok=True)
        listener.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
