"""What goes wrong with functions, on purpose: by script or by chance, reproducibly, and at its time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from stoker_local._network import check_probabilities, kind_at
from stoker_local.functions._processes import FunctionProcess

__all__ = ["FunctionFault", "FunctionFaultInjector", "FunctionFaultKind", "FunctionFaultPlan", "striking"]


class FunctionFaultKind(StrEnum):
    """The ways in which a cloud can treat an invocation badly."""

    KILL = "kill"  # its instance is killed in mid-invocation
    FREEZE = "freeze"  # its instance stands still in mid-invocation for a while
    DUPLICATE = "duplicate"  # its event is delivered twice
    RECLAIM = "reclaim"  # the idle instances are gone, so it is a cold start
    THROTTLE = "throttle"  # it is refused: 429 TooManyRequestsException


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFault:
    """One fault.

    Attributes:
        after_seconds: when a kill or a freeze strikes, from the start of the handler; if that has ended, it misses.
        freeze_seconds: how long a freeze lasts.
    """

    kind: FunctionFaultKind
    after_seconds: float = 0.0
    freeze_seconds: float = 0.5

    def __post_init__(self) -> None:
        if not (self.after_seconds >= 0 and self.freeze_seconds >= 0):
            raise ValueError(f"after_seconds={self.after_seconds} or freeze_seconds={self.freeze_seconds} is negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFaultPlan:
    """Which invocations are struck.

    Attributes:
        script: faults of the first matching invocations, in order of arrival; None lets one pass.
        probabilities: chance of each kind, for matching invocations after the script; at most 1 in all.
        functions: names of functions that match; empty is all.
        within_seconds: kills and freezes drawn by chance strike at a moment drawn from [0, ``within_seconds``).
        freeze_seconds: of freezes drawn by chance.
        seed: of the draws. What hits a function's n-th invocation depends on nothing but this, its name and n.
    """

    script: tuple[FunctionFault | None, ...] = ()
    probabilities: Mapping[FunctionFaultKind, float] = field(default_factory=dict)
    functions: tuple[str, ...] = ()
    within_seconds: float = 0.5
    freeze_seconds: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        check_probabilities(self.probabilities)
        if not (self.within_seconds >= 0 and self.freeze_seconds >= 0):
            raise ValueError(
                f"within_seconds={self.within_seconds} or freeze_seconds={self.freeze_seconds} is negative"
            )


class FunctionFaultInjector:
    """A fault plan in operation."""

    __slots__ = ("_ordinals", "_plan", "_script")

    def __init__(self, plan: FunctionFaultPlan) -> None:
        self.replace(plan)

    def replace(self, plan: FunctionFaultPlan) -> None:
        """Follow another plan, from its beginning."""
        self._plan = plan
        self._script = deque(plan.script)
        self._ordinals: Counter[str] = Counter()

    def draw(self, function: str) -> FunctionFault | None:
        """Return the fault of the invocation that has just arrived, if it has one."""
        plan = self._plan
        if plan.functions and function not in plan.functions:
            return None
        if self._script:
            return self._script.popleft()
        if not plan.probabilities:
            return None
        self._ordinals[function] += 1
        # A generator of its own for each invocation: what one draws does not depend on the others' order of arrival.
        chance = random.Random(f"{plan.seed}/{function}/{self._ordinals[function]}")  # noqa: S311  (not secrets)
        kind = kind_at(chance.random(), plan.probabilities)
        if kind is None:
            return None
        return FunctionFault(
            kind=kind,
            after_seconds=chance.random() * plan.within_seconds,
            freeze_seconds=plan.freeze_seconds,
        )


@contextmanager
def striking(
    fault: FunctionFault | None, instance: FunctionProcess, note: Callable[[FunctionFaultKind], None]
) -> Iterator[None]:
    """Let a kill or a freeze strike at its time, unless the block is left before; what is frozen is thawed then.

    ``note`` is told what has struck.
    """
    if fault is None or fault.kind not in (FunctionFaultKind.KILL, FunctionFaultKind.FREEZE):
        yield
        return
    loop = asyncio.get_running_loop()

    def strike() -> None:
        note(fault.kind)
        (instance.kill if fault.kind is FunctionFaultKind.KILL else instance.freeze)()

    timers = [
        loop.call_later(fault.after_seconds, strike),
        loop.call_later(fault.after_seconds + fault.freeze_seconds, instance.thaw),
    ]
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        instance.thaw()
