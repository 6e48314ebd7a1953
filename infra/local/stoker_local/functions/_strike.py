"""Kills and freezes in mid-invocation, at their time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stoker_local.functions._faults import FunctionFault, FunctionFaultKind

__all__ = ["Target", "striking"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a fault can do to an instance; ``note`` is told what has struck."""

    kill: Callable[[], None]
    freeze: Callable[[], None]
    thaw: Callable[[], None]
    note: Callable[[FunctionFaultKind], None]


@contextmanager
def striking(fault: FunctionFault | None, target: Target) -> Iterator[None]:
    """Let a kill or a freeze strike at its time, unless the block is left before; a frozen target is thawed then."""
    if fault is None or fault.kind not in (FunctionFaultKind.KILL, FunctionFaultKind.FREEZE):
        yield
        return
    loop = asyncio.get_running_loop()

    def strike() -> None:
        target.note(fault.kind)
        (target.kill if fault.kind is FunctionFaultKind.KILL else target.freeze)()

    timers = [
        loop.call_later(fault.after_seconds, strike),
        loop.call_later(fault.after_seconds + fault.freeze_seconds, target.thaw),
    ]
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        target.thaw()
