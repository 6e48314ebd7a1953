"""Connects to the cache process of this machine, and starts it if there is none. All of it blocks: for a thread."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from stoker._cluster.arena import map_arena
from stoker._cluster.files import runtime_folder, try_lock
from stoker._cluster.frames import HELLO, HELLO_SIZE
from stoker._cluster.spec import ClusterSpec
from stoker.errors import ConfigError, ConnectionLostError

_START_SECONDS = 15.0
_POLL_SECONDS = 0.02


class NodeLink(NamedTuple):
    """A connection to a cache process.

    Attributes:
        connection: connected socket.
        arena: its memory, for reading; None if it cannot be mapped.
    """

    connection: socket.socket
    arena: memoryview | None


def connect(spec: ClusterSpec, text: str, cancelled: threading.Event) -> NodeLink:
    """Connect to the process with a setting; start it if there is none.

    Args:
        spec: the setting.
        text: the setting as it was given.
        cancelled: event that ends the call.

    Raises:
        ConfigError: the process cannot start.
        ConnectionLostError: it does not answer.
    """
    base = runtime_folder() / spec.key
    until, starter = time.monotonic() + _START_SECONDS, None
    try:
        while True:
            with suppress(OSError, EOFError):
                link = _greet(base.with_suffix(".sock"))
                if not cancelled.is_set():
                    return link
                link.connection.close()
            if cancelled.is_set() or time.monotonic() >= until:
                raise ConnectionLostError(f"the cache process of cluster={text!r} does not answer at {base}.sock")
            if starter is not None:
                _start(base, text, until, cancelled)
            else:
                starter = try_lock(base.with_suffix(".start"))
                if starter is None:  # another loader starts it
                    time.sleep(_POLL_SECONDS)
                # Else it may have started since the greeting: greet again before a start.
    finally:
        if starter is not None:
            fcntl.flock(starter, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor, too
            os.close(starter)


def _greet(path: Path) -> NodeLink:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(2.0)
        connection.connect(str(path))
        hello, descriptors, _, _ = socket.recv_fds(connection, len(HELLO) + HELLO_SIZE.size, 1)
        try:
            if len(hello) != len(HELLO) + HELLO_SIZE.size or not hello.startswith(HELLO):
                raise EOFError(f"{path} is not the socket of a cache process of this release")
            arena = None
            with suppress(OSError):  # objects are then sent over the socket
                arena = map_arena(descriptors[0], *HELLO_SIZE.unpack(hello[len(HELLO) :])) if descriptors else None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    return NodeLink(connection, arena)


def _start(base: Path, text: str, until: float, cancelled: threading.Event) -> None:
    """Start a process; return when it listens, or when there is one already.

    Raises:
        ConfigError: it cannot start.
        ConnectionLostError: it did not within the time, or the call was cancelled.
    """
    log = base.with_suffix(".log")
    with log.open("ab") as output:  # a running process may write to it, too
        begin = output.tell()
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", "stoker._cluster.node", str(base), text],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,
        )
    with process:
        while process.poll() is None:
            if cancelled.is_set() or time.monotonic() >= until:
                process.kill()
                raise ConnectionLostError(f"the cache process of cluster={text!r} did not start in time")
            time.sleep(_POLL_SECONDS)
    if process.returncode:
        reason = log.read_bytes()[begin:].decode("utf-8", "replace").strip()
        raise ConfigError(f"cluster={text!r}: {reason[-500:]}")
