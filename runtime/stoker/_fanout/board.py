"""Which call is made next: the state of a fan-out, decided synchronously; the driver performs it.

A task waits to be started, or until its back-off has passed, or it runs in one call, two if the first is late; then it
is done or has failed. Whoever ends first decides: the other call of the task is given up. Time is given, not read.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker._base.retry import backoff_seconds
from stoker._fanout.config import FanoutConfig, Task
from stoker._fanout.ramp import Ramp
from stoker._fanout.report import Tally
from stoker._fanout.stragglers import Stragglers
from stoker.abc import Answer
from stoker.errors import FunctionError, StokerError, ThrottledError, TransientError

__all__ = ["Board", "Call"]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call under way: of which task, since when, and whether it is the second beside a late one."""

    task: int
    since_seconds: float
    is_second: bool


class Board:
    """The state of one fan-out.

    Args:
        tasks: what is to be carried out.
        config: how.
        ramp: how many calls may run at once.
        tally: where everything is counted.
    """

    def __init__(self, tasks: Sequence[Task], config: FanoutConfig, ramp: Ramp, tally: Tally) -> None:
        self._config, self._ramp, self._tally = config, ramp, tally
        self._late = Stragglers(factor=config.late_factor, fraction=config.late_fraction, burst=config.late_burst)
        self._random = random.Random(config.retry.seed)  # noqa: S311 - jitter is no secret
        self._fresh = deque(range(len(tasks)))
        self._delayed: list[tuple[float, int]] = []  # a heap: (when, task)
        self._running: dict[int, list[Call]] = {}
        self._watched: dict[Call, None] = {}  # the oldest first: calls that may yet get a second one
        self._in_flight = 0
        self._attempts = [0] * len(tasks)  # that failed since the task came further
        self._throttles = [0] * len(tasks)  # likewise
        self._partial: dict[int, Mapping[str, Any]] = {}
        self._starving_seconds: float | None = None  # since when there were only throttles
        self.results: dict[int, Mapping[str, Any]] = {}
        """Task → its last result, of the tasks that are done."""
        self.failures: dict[int, StokerError] = {}
        """Task → its last error, of the tasks that have failed."""

    @property
    def is_over(self) -> bool:
        """Whether every task is done or has failed."""
        return not (self._fresh or self._delayed or self._running)

    def due(self, now_seconds: float) -> Iterator[Call]:
        """Yield the calls to start at this time; each runs from then on."""
        while True:
            while self._in_flight < self._ramp.limit:
                if (call := self._next(now_seconds)) is None:
                    break
                yield call
            limit = self._ramp.limit
            self._ramp.grow(self._in_flight, now_seconds)
            if self._ramp.limit == limit:
                return

    def next_due_seconds(self) -> float | None:
        """Return when to ask for due calls again, if nothing ends before; None if nothing is due without that."""
        whens: list[float | None] = []
        if self._in_flight >= self._ramp.limit:
            whens.append(self._ramp.next_growth_seconds())
        else:
            whens.append(self._delayed[0][0] if self._delayed else None)
            whens.append(self._late_since())
        return min((when for when in whens if when is not None), default=None)

    def answered(self, call: Call, answer: Answer, now_seconds: float) -> list[Call]:
        """Take in what a call brought; return the calls to give up."""
        self._tally.answered(answer)
        if not self._ended(call):
            return []
        self._starving_seconds = None
        self._late.observe(now_seconds - call.since_seconds)
        others = self._give_up_others(call, now_seconds)
        self._tally.won(call.is_second)
        result = answer.result
        if result.get("state") != "packing":
            self.results[call.task] = result
        elif result == self._partial.get(call.task):
            stuck = TransientError("it stopped before its deadline without having come further")
            self._try_again(call.task, stuck, now_seconds)
        else:
            self._partial[call.task] = result
            self._attempts[call.task] = self._throttles[call.task] = 0
            self._tally.continued += 1
            heapq.heappush(self._delayed, (now_seconds, call.task))
        return others

    def failed(self, call: Call, error: TransientError | FunctionError, now_seconds: float) -> list[Call]:
        """Take in how a call failed; return the calls to give up."""
        if isinstance(error, ThrottledError):
            self._tally.throttled += 1
            self._ramp.throttled(call.since_seconds, self._in_flight, now_seconds)
        else:
            self._tally.in_vain(now_seconds - call.since_seconds)
            self._starving_seconds = None
        if not self._ended(call):
            return []
        if isinstance(error, FunctionError):
            self.failures[call.task] = error
            return self._give_up_others(call, now_seconds)
        if call.task in self._running:  # its other call may yet bring a result
            return []
        if isinstance(error, ThrottledError):
            self._wait_out(call.task, error, now_seconds)
        else:
            self._try_again(call.task, error, now_seconds)
        return []

    def _next(self, now_seconds: float) -> Call | None:
        """Return the next call: of a task that has waited long enough, a fresh one, or one that is late."""
        if self._delayed and self._delayed[0][0] <= now_seconds:
            return self._started(heapq.heappop(self._delayed)[1], now_seconds)
        if self._fresh:
            return self._started(self._fresh.popleft(), now_seconds)
        late_since = self._late_since()
        if late_since is not None and late_since <= now_seconds:
            late = next(iter(self._watched))
            self._late.spend()
            self._tally.second_calls += 1
            return self._started(late.task, now_seconds, is_second=True)
        return None

    def _late_since(self) -> float | None:
        """Return when the oldest call that has no second one is late; None if it may get none."""
        late_seconds = self._late.late_seconds() if self._watched and not self._fresh else None
        if late_seconds is None:
            return None
        return next(iter(self._watched)).since_seconds + late_seconds

    def _started(self, task: int, now_seconds: float, *, is_second: bool = False) -> Call:
        call = Call(task, now_seconds, is_second)
        if is_second:
            self._watched.pop(self._running[task][0])
            self._running[task].append(call)
        else:
            self._running[task] = [call]
            self._watched[call] = None
            self._late.earn()
        self._in_flight += 1
        self._tally.calls += 1
        return call

    def _ended(self, call: Call) -> bool:
        """Take a call off the board; return whether it was still there, and not given up just before it ended."""
        calls = self._running.get(call.task, [])
        if call not in calls:
            return False
        calls.remove(call)
        if not calls:
            del self._running[call.task]
        self._watched.pop(call, None)
        self._in_flight -= 1
        return True

    def _give_up_others(self, call: Call, now_seconds: float) -> list[Call]:
        others = list(self._running.get(call.task, ()))
        for other in others:
            self._ended(other)
            self._tally.in_vain(now_seconds - other.since_seconds)
        return others

    def _try_again(self, task: int, error: TransientError, now_seconds: float) -> None:
        self._attempts[task] += 1
        if self._attempts[task] >= self._config.retry.attempts:
            self.failures[task] = error
            return
        self._tally.retries += 1
        self._delay(task, self._attempts[task], error, now_seconds)

    def _wait_out(self, task: int, error: ThrottledError, now_seconds: float) -> None:
        """Delay a throttled task; all that wait fail if there has been nothing but throttles for too long."""
        if self._starving_seconds is None or self._running:
            self._starving_seconds = now_seconds
        if now_seconds - self._starving_seconds >= self._config.throttled_seconds:
            waiting = [task, *self._fresh, *(each for _, each in self._delayed)]
            self._fresh.clear()
            self._delayed.clear()
            self.failures.update(dict.fromkeys(waiting, error))
            return
        self._throttles[task] += 1
        self._delay(task, self._throttles[task], error, now_seconds)

    def _delay(self, task: int, failures: int, error: TransientError, now_seconds: float) -> None:
        wait_seconds = backoff_seconds(
            failures,
            base_seconds=self._config.retry.first_seconds,
            cap_seconds=self._config.retry.longest_seconds,
            rng=self._random,
            retry_after_seconds=min(error.retry_after_seconds or 0.0, self._config.throttled_seconds),
        )
        heapq.heappush(self._delayed, (now_seconds + wait_seconds, task))
