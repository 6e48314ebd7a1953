"""A copy of the same bytes over one TCP connection between two processes: the reference for tiers."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Copied", "copy_bodies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Cost of a copy.

    Attributes:
        seconds: duration.
        processor_seconds: processor time of both processes.
    """

    seconds: float
    processor_seconds: float


def _send(
    address: tuple[str, int], bodies: Sequence[bytes], times: int, spent: multiprocessing.SimpleQueue[float]
) -> None:
    with socket.create_connection(address) as connection:
        connection.recv(1)
        before = time.process_time()
        for number in range(times):
            connection.sendall(bodies[number % len(bodies)])
            connection.recv(1)
        spent.put(time.process_time() - before)


def copy_bodies(bodies: Sequence[bytes], times: int) -> Copied:
    """Copy bodies in turn, each on a request, with blocking calls, into mapped memory."""
    context = multiprocessing.get_context("spawn")
    spent: multiprocessing.SimpleQueue[float] = context.SimpleQueue()
    into = memoryview(bytearray(len(bodies[0])))
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = context.Process(target=_send, args=(server.getsockname(), bodies, times, spent), daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            began, before = time.perf_counter(), time.process_time()
            connection.send(b"x")
            for _ in range(times):
                got = 0
                while got < len(into):
                    got += connection.recv_into(into[got:])
                connection.send(b"x")
            seconds, own = time.perf_counter() - began, time.process_time() - before
        other = spent.get()
        sender.join()
    return Copied(seconds=seconds, processor_seconds=own + other)
