"""The requests of one try of a range: an attempt, and hedges while it is late; the first that succeeds wins.

The attempt runs in the task of its caller, and only hedges have tasks of their own, since few requests are late. One
timer, that of a :class:`RaceWatch`, serves all races of a reader: timers of their own cost more than most races take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from stoker._base.fetch_record import Request
from stoker._base.task_group import end_tasks
from stoker._fetch.hedge import TIMER_SECONDS
from stoker.errors import StoreError


@dataclass(slots=True, eq=False)
class Attempt:
    """One request of a race: the first one, or a hedge.

    Attributes:
        into: memory that only this request writes to.
        sent_seconds: time of sending, in seconds of the event loop.
        begun_seconds: time at which its response began; None before.
        ended_seconds: time at which it ended; None before.
        task: task that it runs in; None before it runs.
        is_lost: whether it was ended because another request of its race was faster.
        is_overdue: whether it was ended at its time limit.
        error: error of the store, or of the time limit; None without one.
        has_succeeded: whether its bytes have arrived.
    """

    into: memoryview
    sent_seconds: float
    begun_seconds: float | None = None
    ended_seconds: float | None = None
    task: asyncio.Task[Any] | None = None
    is_lost: bool = False
    is_overdue: bool = False
    error: StoreError | None = None
    has_succeeded: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether its response has begun."""
        return self.begun_seconds is not None

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.ended_seconds is None

    @property
    def is_stopped(self) -> bool:
        """Whether its race has ended it."""
        return self.is_lost or self.is_overdue

    def lose(self) -> None:
        """End it, if it runs: another request of its race is faster."""
        if self._may_stop:
            self.is_lost = True
            self._cancel()

    def expire(self) -> None:
        """End it, if it runs: it has reached its time limit."""
        if self._may_stop:
            self.is_overdue = True
            self._cancel()

    @property
    def _may_stop(self) -> bool:
        return self.is_running and not self.is_stopped

    def _cancel(self) -> None:
        assert self.task is not None  # noqa: S101 - set before anything else runs
        self.task.cancel()

    def request(self, key: str) -> Request:
        """Return the record of the request for traces."""
        ended_seconds = self.sent_seconds if self.ended_seconds is None else self.ended_seconds
        return Request(self.sent_seconds, self.begun_seconds, ended_seconds, self.into.nbytes, self.has_succeeded, key)


@dataclass(slots=True, eq=False, kw_only=True)
class Race:
    """The requests of one try.

    Attributes:
        attempts: the requests, in the order of sending.
        borrowed: returns the memory of the hedges.
    """

    attempts: list[Attempt] = field(default_factory=list)
    borrowed: ExitStack = field(default_factory=ExitStack)
    _hedges: list[asyncio.Task[None]] = field(default_factory=list)
    _changed: asyncio.Future[None] | None = None

    @property
    def winner(self) -> Attempt | None:
        """The successful request that was sent first; None if there is none."""
        return next((attempt for attempt in self.attempts if attempt.has_succeeded), None)

    def begin(self, attempt: Attempt, now_seconds: float) -> None:
        """Record that a response begins: requests that still wait for theirs end, before they transfer bytes."""
        attempt.begun_seconds = now_seconds
        for other in self.attempts:
            if not other.has_begun:
                other.lose()

    def succeed(self, attempt: Attempt) -> None:
        """Record that the bytes of a request have arrived: all others end."""
        attempt.has_succeeded = True
        for other in self.attempts:
            if other is not attempt:
                other.lose()

    def hedge(self, attempt: Attempt, running: Coroutine[Any, Any, None]) -> None:
        """Run a hedge in a task of its own."""
        self.attempts.append(attempt)
        attempt.task = task = asyncio.create_task(running)
        self._hedges.append(task)
        task.add_done_callback(lambda _: self._end_hedge(attempt))

    def _end_hedge(self, attempt: Attempt) -> None:
        if attempt.ended_seconds is None:  # cancelled before it was sent
            attempt.ended_seconds = attempt.sent_seconds
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def wait_for_hedges(self) -> None:
        """Wait until a request has succeeded, or none runs."""
        while self.winner is None and any(attempt.is_running for attempt in self.attempts):
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed

    async def close(self) -> None:
        """End the hedges and wait for their ends; raises an error of a hedge that does not come from the store."""
        await end_tasks(self._hedges)
        for task in self._hedges:
            if not task.cancelled():
                task.result()


class RaceWatch:
    """One timer for all races of a reader: calls a function for each race when its time has come.

    Args:
        look: function that looks after a race at a time, and returns the time to look again, in loop time.
    """

    def __init__(self, look: Callable[[Race, float], float]) -> None:
        self._look = look
        self._due: dict[Race, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, race: Race, due_seconds: float) -> None:
        """Look after a race from a time on, until :meth:`remove`."""
        self._due[race] = due_seconds
        if self._timer is None or due_seconds < self._timer.when():
            self._set_timer(due_seconds)

    def remove(self, race: Race) -> None:
        """Stop looking after a race. The timer goes on while there are others."""
        del self._due[race]
        if not self._due and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look_soon(self, races: Iterable[Race] | None = None) -> None:
        """Look after some of the races at the next turn of the loop; by default after all."""
        now_seconds = asyncio.get_running_loop().time()
        self._due |= dict.fromkeys(self._due if races is None else races, now_seconds)
        if self._due:
            self._set_timer(now_seconds)

    def _set_timer(self, due_seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due_seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_seconds = asyncio.get_running_loop().time()
        for race, due_seconds in list(self._due.items()):
            if due_seconds - now_seconds < TIMER_SECONDS:
                self._due[race] = self._look(race, now_seconds)
        self._set_timer(min(self._due.values()))
