"""How fast the bucket answers and how it fails: delays, rates and faults, each drawn from a seeded stream."""

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

from stoker._base.arguments import AtLeastOne, Bound, Bounded, Fraction
from stoker_local._http1 import Body

SO_MAX_PACING_RATE = 47  # Linux; Python's socket module does not name it
_BURST_SECONDS = 0.005
_Finite = Annotated[float, Bound(">=", 0), Bound("<", math.inf)]
_Rate = Annotated[float, Bound(">=", 1024), Bound("<", math.inf)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(Bounded):
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

    first_byte_seconds: _Finite = 0.0
    first_byte_sigma: _Finite = 0.0
    connection_bytes_per_second: _Rate | None = None
    total_bytes_per_second: _Rate | None = None
    tail_fraction: Fraction[float] = 0.0
    tail_seconds: _Finite = 0.0
    gets_per_second: Annotated[float, Bound(">", 0), Bound("<", math.inf)] | None = None
    gets_burst: AtLeastOne[int] = 1
    gets_wait: bool = False
    software_pacing: bool = False
    seed: int = 0


_CLOUD = Shape(
    first_byte_seconds=0.020,
    first_byte_sigma=0.1,
    connection_bytes_per_second=90e6,
    total_bytes_per_second=600e6,
)

PROFILES = {
    "none": Shape(),
    "cloud": _CLOUD,
    "cloud-tail": replace(_CLOUD, tail_fraction=0.05, tail_seconds=2.0),
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


_ONE_WRITE_BYTES = 1 << 16
K = TypeVar("K")


class FaultKind(StrEnum):
    """The ways in which an answer can fail."""

    SLOW_DOWN = "slow_down"  # 503 SlowDown
    INTERNAL_ERROR = "internal_error"  # 500 InternalError
    RESET = "reset"  # the connection is reset in mid-body
    TRUNCATE = "truncate"  # the connection ends in mid-body
    CORRUPT = "corrupt"  # one byte of the body is wrong
    STALL = "stall"  # nothing is sent for a while in mid-body, then the rest


_ANSWERS = (FaultKind.SLOW_DOWN, FaultKind.INTERNAL_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Bounded):
    """One fault.

    Attributes:
        position: where in the body it strikes, as a fraction of its length.
        stall_seconds: how long a stall lasts.
        retry_after_seconds: what a 503 asks for in ``Retry-After``; None sends no such header.
    """

    kind: FaultKind
    position: Annotated[float, Bound(">=", 0), Bound("<", 1)] = 0.5
    stall_seconds: float = 30.0
    retry_after_seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Which requests fail.

    Attributes:
        script: faults of the first matching requests, in order of arrival; None lets one pass.
        probabilities: chance of each kind, for matching requests after the script; at most 1 in all.
        operations: S3 operations that match.
        key_prefix: keys that match.
        stall_seconds: of stalls drawn by chance.
        retry_after_seconds: of 503s drawn by chance.
        seed: of the draws.
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
    """Refuse what are no chances of faults.

    Raises:
        ValueError: one is negative, or they sum to more than 1.
    """
    chances = probabilities.values()
    if any(not chance >= 0 for chance in chances) or not sum(chances) <= 1 + 1e-9:
        raise ValueError(f"probabilities {dict(probabilities)} are negative or sum to more than 1")


def kind_at(drawn: float, probabilities: Mapping[K, float]) -> K | None:
    """Return the kind of fault that a number drawn from [0, 1) stands for, or None if it stands for no fault."""
    for kind, chance in probabilities.items():
        drawn -= chance
        if drawn < 0:
            return kind
    return None


class FaultInjector:
    """A fault plan in operation."""

    __slots__ = ("_plan", "_random", "_script")

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._script = deque(plan.script)
        self._random = random.Random(plan.seed)  # noqa: S311  (reproducible faults, not secrets)

    def draw(self, operation: str, key: str) -> Fault | None:
        """Return the fault of the request that has just arrived, if it has one."""
        plan = self._plan
        if operation not in plan.operations or not key.startswith(plan.key_prefix):
            return None
        if self._script:
            return self._script.popleft()
        if not plan.probabilities:
            return None
        kind = kind_at(self._random.random(), plan.probabilities)
        if kind is None:
            return None
        return Fault(
            kind=kind,
            position=self._random.random(),
            stall_seconds=plan.stall_seconds,
            retry_after_seconds=plan.retry_after_seconds,
        )


def cut_answer(head: bytes, body: Body, fault: Fault | None) -> tuple[list[Body], list[Body]]:
    """Return the pieces of an answer before and after ``fault`` strikes its body, or its head if it has no body.

    One wrong byte is among the pieces before.
    """
    view = memoryview(body)
    if fault is None or fault.kind in _ANSWERS or (fault.kind is FaultKind.CORRUPT and not view):
        return ([head + view] if len(view) <= _ONE_WRITE_BYTES else [head, view]), []
    lead, struck = ([head], view) if view else ([], memoryview(head))
    cut = int(fault.position * len(struck))
    if fault.kind is FaultKind.CORRUPT:
        return [head, view[:cut], bytes([view[cut] ^ 0x01]), view[cut + 1 :]], []
    return [*lead, struck[:cut]], [struck[cut:]]
