"""The simulated network of the local bucket: delays, rates and faults, drawn from seeded generators."""

from __future__ import annotations

import math
import random
import socket
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from stoker._base.arguments import AtLeastOne, BoundedConfig, Fraction, NumberBound
from stoker_local._http1 import Body

SO_MAX_PACING_RATE = 47  # Linux; missing in Python's socket module
_BURST_SECONDS = 0.005
_Finite = Annotated[float, NumberBound(">=", 0), NumberBound("<", math.inf)]
_Rate = Annotated[float, NumberBound(">=", 1024), NumberBound("<", math.inf)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape(BoundedConfig):
    """Delays and rates of the network between a client and the bucket; default as fast as the machine.

    Attributes:
        first_byte_seconds: median delay before the first byte of every response, in seconds.
        first_byte_sigma: sigma of the lognormal distribution of that delay; 0 makes it constant.
        connection_bytes_per_second: maximum rate of GET bodies on one connection, in bytes/s; None is unlimited. If the
            kernel does the pacing, the first ten segments of a connection (640 KB on loopback) are not delayed.
        total_bytes_per_second: maximum rate of GET bodies on all connections together, in bytes/s; None is unlimited.
        tail_fraction: fraction of GETs, 0 to 1, that are delayed by another ``tail_seconds``.
        tail_seconds: additional delay of these GETs, in seconds.
        gets_per_second: maximum rate of GETs; faster ones get 503 SlowDown. None is unlimited.
        gets_burst: number of GETs that may arrive at once after a pause.
        gets_wait: delay GETs above the maximum rate instead of refusing them.
        software_pacing: pace connections with timers even if the kernel can: exact from the first byte, at the cost of
            one timer per 256 KiB.
        seed: seed of the delays, which are drawn in the order of the requests.

    Example:
        >>> NetworkShape(first_byte_seconds=0.02, connection_bytes_per_second=90e6).first_byte_seconds
        0.02
    """

    first_byte_seconds: _Finite = 0.0
    first_byte_sigma: _Finite = 0.0
    connection_bytes_per_second: _Rate | None = None
    total_bytes_per_second: _Rate | None = None
    tail_fraction: Fraction[float] = 0.0
    tail_seconds: _Finite = 0.0
    gets_per_second: Annotated[float, NumberBound(">", 0), NumberBound("<", math.inf)] | None = None
    gets_burst: AtLeastOne[int] = 1
    gets_wait: bool = False
    software_pacing: bool = False
    seed: int = 0


_CLOUD = NetworkShape(
    first_byte_seconds=0.020,
    first_byte_sigma=0.1,
    connection_bytes_per_second=90e6,
    total_bytes_per_second=600e6,
)

PROFILES = {
    "none": NetworkShape(),
    "cloud": _CLOUD,
    "cloud-tail": replace(_CLOUD, tail_fraction=0.05, tail_seconds=2.0),
}
"""Profile name (``none``, ``cloud``, ``cloud-tail``) → network shape."""


class Pacer:
    """A token bucket, kept as the time at which all bytes granted so far will have been sent.

    Grants are made in the order of the calls, so connections that share a pacer share its rate. Late timers do not
    lower the rate: up to ``burst_seconds`` of delay may be caught up.
    """

    __slots__ = ("_burst_seconds", "_bytes_per_second", "_sent_at")

    def __init__(self, bytes_per_second: float, *, burst_seconds: float = _BURST_SECONDS) -> None:
        self._bytes_per_second = bytes_per_second
        self._burst_seconds = burst_seconds
        self._sent_at = -math.inf

    def reserve(self, size_bytes: int, now: float) -> float:
        """Grant ``size_bytes``; return the seconds after ``now`` at which they may be sent."""
        self._sent_at = max(self._sent_at, now - self._burst_seconds) + size_bytes / self._bytes_per_second
        return max(0.0, self._sent_at - now)


class Shaper:
    """Draws the delays of a :class:`NetworkShape` and creates its pacers."""

    __slots__ = ("_next_get_seconds", "_random", "_total_pacer", "shape")

    def __init__(self, shape: NetworkShape) -> None:
        self.shape = shape
        self._next_get_seconds = -math.inf
        self._random = random.Random(shape.seed)  # noqa: S311  (reproducible delays, not secrets)
        self._total_pacer = None if shape.total_bytes_per_second is None else Pacer(shape.total_bytes_per_second)

    def rate_limit_delay(self, now: float) -> float | None:
        """Return the seconds that a GET arriving at ``now`` waits under ``gets_per_second``; None refuses it."""
        rate, burst = self.shape.gets_per_second, self.shape.gets_burst
        if rate is None:
            return 0.0
        wait = max(0.0, self._next_get_seconds - now - (burst - 1) / rate)
        if wait and not self.shape.gets_wait:
            return None
        self._next_get_seconds = max(now, self._next_get_seconds) + 1 / rate
        return wait

    def first_byte_delay(self) -> float:
        """Return the delay before a response, in seconds."""
        shape = self.shape
        if not shape.first_byte_seconds or not shape.first_byte_sigma:
            return shape.first_byte_seconds
        return shape.first_byte_seconds * math.exp(shape.first_byte_sigma * self._random.gauss(0.0, 1.0))

    def tail_delay(self) -> float:
        """Return the additional delay of one GET, in seconds: ``tail_seconds`` or 0."""
        is_slow = self.shape.tail_fraction > 0 and self._random.random() < self.shape.tail_fraction
        return self.shape.tail_seconds if is_slow else 0.0

    def create_pacers(self, connection: socket.socket) -> tuple[Pacer, ...]:
        """Return the pacers of a new connection's bodies; its own rate is set in the kernel if possible."""
        rate = self.shape.connection_bytes_per_second
        total = () if self._total_pacer is None else (self._total_pacer,)
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


_MAX_SINGLE_WRITE_BYTES = 1 << 16
K = TypeVar("K")


class FaultKind(StrEnum):
    """Kinds of faults that a response can have.

    Example:
        >>> plan = FaultPlan(probabilities={FaultKind.SLOW_DOWN: 0.1, FaultKind.TRUNCATE: 0.01})
    """

    SLOW_DOWN = "slow_down"  # 503 SlowDown
    INTERNAL_ERROR = "internal_error"  # 500 InternalError
    RESET = "reset"  # the connection is reset within the body
    TRUNCATE = "truncate"  # the connection is closed within the body
    CORRUPT = "corrupt"  # one byte of the body is wrong
    STALL = "stall"  # the body pauses for ``stall_seconds``, then continues


_ERROR_KINDS = (FaultKind.SLOW_DOWN, FaultKind.INTERNAL_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(BoundedConfig):
    """One fault.

    Attributes:
        kind: kind of the fault.
        position: where in the body the fault occurs, as a fraction of its length (0 ≤ position < 1).
        stall_seconds: duration of a stall, in seconds.
        retry_after_seconds: value of a 503's ``Retry-After`` header, in seconds; None sends no such header.

    Example:
        >>> Fault(kind=FaultKind.STALL, stall_seconds=5.0).position
        0.5
    """

    kind: FaultKind
    position: Annotated[float, NumberBound(">=", 0), NumberBound("<", 1)] = 0.5
    stall_seconds: float = 30.0
    retry_after_seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Selects the requests that fail, by script or at random.

    Attributes:
        script: faults of the first matching requests, in order of arrival; None means no fault.
        probabilities: probability of each kind for matching requests after the script; their sum is at most 1.
        operations: S3 operations whose requests match.
        key_prefix: prefix of the keys whose requests match; empty matches every key.
        stall_seconds: duration of random stalls, in seconds.
        retry_after_seconds: ``Retry-After`` of random 503s, in seconds; None sends no such header.
        seed: seed of the random faults.

    Example:
        >>> plan = FaultPlan(script=(None, Fault(kind=FaultKind.RESET)), probabilities={FaultKind.SLOW_DOWN: 0.1})
        >>> plan.operations
        ('GetObject',)
    """

    script: tuple[Fault | None, ...] = ()
    probabilities: Mapping[FaultKind, float] = field(default_factory=dict)
    operations: tuple[str, ...] = ("GetObject",)
    key_prefix: str = ""
    stall_seconds: float = 30.0
    retry_after_seconds: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_probabilities(self.probabilities)


def check_probabilities(probabilities: Mapping[Any, float]) -> None:
    """Check the probabilities of a fault plan.

    Raises:
        ValueError: a probability is negative, or their sum is greater than 1.
    """
    chances = probabilities.values()
    if any(not chance >= 0 for chance in chances) or not sum(chances) <= 1 + 1e-9:
        raise ValueError(f"probabilities {dict(probabilities)} must not be negative and must sum to at most 1")


def draw_kind(number: float, probabilities: Mapping[K, float]) -> K | None:
    """Return the kind of fault that a random number from [0, 1) selects, or None for no fault."""
    for kind, chance in probabilities.items():
        number -= chance
        if number < 0:
            return kind
    return None


class FaultInjector:
    """Draws the faults of a :class:`FaultPlan`, request by request."""

    __slots__ = ("_plan", "_random", "_script")

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._script = deque(plan.script)
        self._random = random.Random(plan.seed)  # noqa: S311  (reproducible faults, not secrets)

    def draw(self, operation: str, key: str) -> Fault | None:
        """Return the fault of the next request, or None."""
        plan = self._plan
        if operation not in plan.operations or not key.startswith(plan.key_prefix):
            return None
        if self._script:
            return self._script.popleft()
        if not plan.probabilities:
            return None
        kind = draw_kind(self._random.random(), plan.probabilities)
        if kind is None:
            return None
        return Fault(
            kind=kind,
            position=self._random.random(),
            stall_seconds=plan.stall_seconds,
            retry_after_seconds=plan.retry_after_seconds,
        )


def split_response(head: bytes, body: Body, fault: Fault | None) -> tuple[list[Body], list[Body]]:
    """Split a response into the pieces to send before and after ``fault``.

    The fault applies to the body, or to the head if the body is empty. A corrupted byte is among the pieces before.
    """
    view = memoryview(body)
    if fault is None or fault.kind in _ERROR_KINDS or (fault.kind is FaultKind.CORRUPT and not view):
        return ([head + view] if len(view) <= _MAX_SINGLE_WRITE_BYTES else [head, view]), []
    lead, struck = ([head], view) if view else ([], memoryview(head))
    cut = int(fault.position * len(struck))
    if fault.kind is FaultKind.CORRUPT:
        return [head, view[:cut], bytes([view[cut] ^ 0x01]), view[cut + 1 :]], []
    return [*lead, struck[:cut]], [struck[cut:]]
