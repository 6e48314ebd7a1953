"""How fast the bucket answers: first-byte delay, rates, and a tail, each drawn from a seeded stream."""

from __future__ import annotations

import math
import random
import socket
import sys
from dataclasses import dataclass

__all__ = ["PROFILES", "Pacer", "Shape", "Shaper"]

SO_MAX_PACING_RATE = 47  # Linux; Python's socket module does not name it
_BURST_SECONDS = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the network between a client and the bucket is like. The default is: as fast as the machine.

    Attributes:
        first_byte_seconds: median delay before the first byte of an answer, of every operation.
        first_byte_sigma: sigma of its lognormal distribution; 0 is a constant delay.
        connection_bytes_per_second: rate of each connection (GETs); None is unlimited. Where the kernel paces, it lets
            the first ten segments of a connection (640 KB on loopback) go at once.
        total_bytes_per_second: rate of all connections together (GETs); None is unlimited.
        tail_fraction: how many GETs, of all, are delayed by another ``tail_seconds``.
        gets_per_second: GETs answered; what comes faster is refused with 503 SlowDown. None is unlimited.
        gets_burst: GETs that may come at once, after a pause.
        gets_wait: let what comes faster wait for its turn, and refuse nothing.
        software_pacing: pace connections with timers even where the kernel can do it: exact from the first byte,
            at the cost of a timer for every 256 KiB.
        seed: of the delays, drawn in the order in which requests arrive.
    """

    first_byte_seconds: float = 0.0
    first_byte_sigma: float = 0.0
    connection_bytes_per_second: float | None = None
    total_bytes_per_second: float | None = None
    tail_fraction: float = 0.0
    tail_seconds: float = 0.0
    gets_per_second: float | None = None
    gets_burst: int = 1
    gets_wait: bool = False
    software_pacing: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not all(0 <= v < math.inf for v in (self.first_byte_seconds, self.first_byte_sigma, self.tail_seconds)):
            raise ValueError("a shape's delays and sigma are finite and not negative")
        if not 0 <= self.tail_fraction <= 1:
            raise ValueError(f"tail_fraction={self.tail_fraction} is not within [0, 1]")
        if not 0 < (self.gets_per_second or 1) < math.inf or self.gets_burst < 1:
            raise ValueError(f"gets_per_second={self.gets_per_second} or gets_burst={self.gets_burst} is not positive")
        for rate in (self.connection_bytes_per_second, self.total_bytes_per_second):
            if rate is not None and not 1024 <= rate < math.inf:
                raise ValueError(f"a rate of {rate} bytes per second is below 1024; use None for no limit")


_CLOUD = Shape(
    first_byte_seconds=0.020,
    first_byte_sigma=0.1,
    connection_bytes_per_second=90e6,
    total_bytes_per_second=600e6,
)

PROFILES = {
    "none": Shape(),
    "cloud": _CLOUD,
    "cloud-tail": Shape(
        first_byte_seconds=_CLOUD.first_byte_seconds,
        first_byte_sigma=_CLOUD.first_byte_sigma,
        connection_bytes_per_second=_CLOUD.connection_bytes_per_second,
        total_bytes_per_second=_CLOUD.total_bytes_per_second,
        tail_fraction=0.05,
        tail_seconds=2.0,
    ),
}


class Pacer:
    """A token bucket as a virtual clock: the time at which everything granted so far will have been sent.

    It grants in the order it is asked, so connections that share one share its rate. Late timers do not lower the
    rate: up to ``burst_seconds`` of it may be caught up.
    """

    __slots__ = ("_burst_seconds", "_bytes_per_second", "_sent_at")

    def __init__(self, bytes_per_second: float, *, burst_seconds: float = _BURST_SECONDS) -> None:
        self._bytes_per_second = bytes_per_second
        self._burst_seconds = burst_seconds
        self._sent_at = -math.inf

    def reserve(self, size_bytes: int, now: float) -> float:
        """Grant ``size_bytes`` and return how many seconds after ``now`` the next grant may be used."""
        self._sent_at = max(self._sent_at, now - self._burst_seconds) + size_bytes / self._bytes_per_second
        return max(0.0, self._sent_at - now)


class Shaper:
    """A shape in operation: draws delays and hands out pacers."""

    __slots__ = ("_next_get_seconds", "_random", "_total", "shape")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._next_get_seconds = -math.inf
        self._random = random.Random(shape.seed)  # noqa: S311  (reproducible delays, not secrets)
        self._total = None if shape.total_bytes_per_second is None else Pacer(shape.total_bytes_per_second)

    def get_delay(self, now: float) -> float | None:
        """Return the seconds until it is the turn of a GET that arrives now; None if it is refused."""
        rate, burst = self.shape.gets_per_second, self.shape.gets_burst
        if rate is None:
            return 0.0
        wait = max(0.0, self._next_get_seconds - now - (burst - 1) / rate)
        if wait and not self.shape.gets_wait:
            return None
        self._next_get_seconds = max(now, self._next_get_seconds) + 1 / rate
        return wait

    def first_byte_delay(self) -> float:
        """Return the seconds to wait before answering a request."""
        shape = self.shape
        if not shape.first_byte_seconds or not shape.first_byte_sigma:
            return shape.first_byte_seconds
        return shape.first_byte_seconds * math.exp(shape.first_byte_sigma * self._random.gauss(0.0, 1.0))

    def tail_delay(self) -> float:
        """Return the further seconds to wait before answering this GET; mostly 0."""
        drawn = self.shape.tail_fraction > 0 and self._random.random() < self.shape.tail_fraction
        return self.shape.tail_seconds if drawn else 0.0

    def pacers(self, connection: socket.socket) -> tuple[Pacer, ...]:
        """Return the pacers of a new connection's bodies, having set its rate in the kernel where that can be."""
        rate = self.shape.connection_bytes_per_second
        total = () if self._total is None else (self._total,)
        if rate is None or (not self.shape.software_pacing and _pace_in_kernel(connection, int(rate))):
            return total
        return (*total, Pacer(rate))


def _pace_in_kernel(connection: socket.socket, bytes_per_second: int) -> bool:
    if not sys.platform.startswith("linux") or bytes_per_second >= 1 << 32:
        return False
    try:
        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_second)
        return connection.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) & 0xFFFFFFFF == bytes_per_second
    except OSError:
        return False
