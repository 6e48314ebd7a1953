"""The instances of one function: how many may be at work, which are idle, and when those are taken back.

What an instance is, and how a request gets to it, is the platform's business (``fleet``, ``google.service``).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from stoker_local.functions._errors import ServiceError
from stoker_local.functions._faults import FunctionFault, FunctionFaultInjector, FunctionFaultKind
from stoker_local.functions._ledger import Account
from stoker_local.functions._tasks import Tasks

__all__ = ["Pool", "PoolConfig"]

_STRIKE_LATER = (FunctionFaultKind.KILL, FunctionFaultKind.FREEZE)


class Instance(Protocol):
    """What a pool knows of an instance."""

    name: str

    async def live(self) -> None:
        """Run until it ends; cancelled, end it."""


T = TypeVar("T", bound=Instance)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """What a pool is made of.

    Attributes:
        function: its name.
        slots: most invocations at once.
        idle_seconds: an instance without work for so long is taken back.
        tasks: in which instances live.
    """

    function: str
    slots: int
    idle_seconds: float
    faults: FunctionFaultInjector
    account: Account
    tasks: Tasks


class Pool(Generic[T]):
    """The instances of a function.

    Attributes:
        slots: one is acquired for every invocation, by :meth:`admit` or by whom it delivers again.
        living: but for those that are about to end.
        idle: of these, the one that worked last is last.
    """

    def __init__(self, config: PoolConfig) -> None:
        self.slots = asyncio.Semaphore(config.slots)
        self.living: dict[T, asyncio.Task[None]] = {}
        self.idle: dict[T, asyncio.TimerHandle] = {}
        self._config = config
        self._account = config.account

    async def admit(self, *, waits: bool = False) -> FunctionFault | None:
        """Acquire a slot for an invocation; return the fault that is to strike it.

        Args:
            waits: wait for a slot rather than be throttled.

        Raises:
            ServiceError: throttled.
        """
        fault = self._config.faults.draw(self._config.function)
        kind = fault and fault.kind
        if fault is not None and kind not in _STRIKE_LATER:
            self._account.struck(fault.kind)
        if kind is FunctionFaultKind.THROTTLE or (self.slots.locked() and not waits):
            self._account.throttled()
            reason = "ReservedFunctionConcurrentInvocationLimitExceeded"
            raise ServiceError("TooManyRequestsException", "Rate Exceeded.", reason=reason)
        if kind is FunctionFaultKind.RECLAIM:
            self.reclaim()
        await self.slots.acquire()
        return fault

    def start(self, instance: T) -> None:
        """Let a new instance live."""
        self.living[instance] = self._config.tasks.start(self._live(instance))
        self._account.started(instances=len(self.living))

    def wake(self, instance: T) -> None:
        """Note that an instance has work."""
        if timer := self.idle.pop(instance, None):
            timer.cancel()

    def rest(self, instance: T) -> None:
        """Note that an instance has no more work; it is taken back if none comes."""
        loop = asyncio.get_running_loop()
        self.idle[instance] = loop.call_later(self._config.idle_seconds, self._take_back, instance)

    def reclaim(self) -> None:
        """Take all idle instances back at once."""
        for instance in list(self.idle):
            self._take_back(instance)

    def _take_back(self, instance: T) -> None:
        self._account.reclaimed(instance.name)
        self.living[instance].cancel()
        self._forget(instance)

    async def _live(self, instance: T) -> None:
        try:
            await instance.live()
        finally:
            self._forget(instance)

    def _forget(self, instance: T) -> None:
        self.wake(instance)
        self.living.pop(instance, None)
        self._account.meter.instances = len(self.living)
