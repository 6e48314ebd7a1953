"""What goes wrong, on purpose: faults by probability or by script, and what each does to a body."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from stoker_local._http1 import Body

__all__ = [
    "Fault",
    "FaultInjector",
    "FaultKind",
    "FaultPlan",
    "Step",
    "StepKind",
    "answer_steps",
    "check_probabilities",
    "kind_at",
]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        position: where in the body it strikes, as a fraction of its length.
        stall_seconds: how long a stall lasts.
        retry_after_seconds: what a 503 asks for in ``Retry-After``; None sends no such header.
    """

    kind: FaultKind
    position: float = 0.5
    stall_seconds: float = 30.0
    retry_after_seconds: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.position < 1:
            raise ValueError(f"position={self.position} is not within [0, 1)")


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


class StepKind(StrEnum):
    """What a connection does next."""

    SEND = "send"
    WAIT = "wait"
    RESET = "reset"
    CLOSE = "close"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of sending an answer: SEND ``data``, of which ``body_bytes`` are body, or WAIT for ``seconds``."""

    kind: StepKind
    data: Body = b""
    body_bytes: int = 0
    seconds: float = 0.0


def answer_steps(head: bytes, body: Body, fault: Fault | None) -> tuple[Step, ...]:
    """Return how an answer is sent when ``fault`` strikes its body, or its head if it has no body."""
    view = memoryview(body)
    if fault is None or fault.kind in (FaultKind.SLOW_DOWN, FaultKind.INTERNAL_ERROR):
        if len(view) <= _ONE_WRITE_BYTES:
            return (Step(kind=StepKind.SEND, data=head + view, body_bytes=len(view)),)
        return (_head(head), _body(view))
    lead, part = ((_head(head),), _body) if view else ((), _head)
    struck = view or memoryview(head)
    cut = int(fault.position * len(struck))
    match fault.kind:
        case FaultKind.RESET:
            return (*lead, part(struck[:cut]), Step(kind=StepKind.RESET))
        case FaultKind.TRUNCATE:
            return (*lead, part(struck[:cut]), Step(kind=StepKind.CLOSE))
        case FaultKind.STALL:
            pause = Step(kind=StepKind.WAIT, seconds=fault.stall_seconds)
            return (*lead, part(struck[:cut]), pause, part(struck[cut:]))
        case FaultKind.CORRUPT if view:
            return (*lead, part(view[:cut]), part(bytes([view[cut] ^ 0x01])), part(view[cut + 1 :]))
    return (_head(head),)


def _head(data: Body) -> Step:
    return Step(kind=StepKind.SEND, data=data)


def _body(data: Body) -> Step:
    return Step(kind=StepKind.SEND, data=data, body_bytes=len(data))
