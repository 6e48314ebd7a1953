"""Which call is made next: the state of a fan-out, decided synchronously; the driver performs it.

A task waits to be started, or until its back-off has passed, or it runs in one call, two if the first is late; then it
is done or has failed. Whichever call ends first decides: the other one of the task is given up. How many calls may run
at once follows from what the platform refused (:class:`Ramp`), which call is late from how long others took
(:class:`Stragglers`). Time is given, not read.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from stoker._base.arguments import AtLeastOne, Bounded, Fraction, NotNegative, Positive
from stoker._base.retry import RetryPolicy, backoff_seconds
from stoker._fanout.report import Tally
from stoker.abc import Answer
from stoker.errors import FunctionError, StokerError, ThrottledError, TransientError


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of work: a function and its event, which may be delivered more than once.

    It is done when the function's result has the state ``complete`` or none. After ``packing`` it is called again.

    Attributes:
        name: what to call it in messages; no two tasks of a fan-out share one.
        function: to run.
        event: what it gets, a JSON object.
        size_bytes: how much work it is, for the progress shown.
    """

    name: str
    function: str
    event: Mapping[str, Any]
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FanoutConfig(Bounded):
    """How many calls run at once, and what is done about those that fail or are late.

    Attributes:
        start: calls at once at first; while nothing throttles, their number doubles every ``ramp_seconds``.
        most: calls at once, at most; None is what the executor holds sensible.
        ramp_seconds: see ``start``.
        retry: of calls that were lost or ended with a transient error. A throttled call does not count as an attempt.
        throttled_seconds: the run ends when nothing else but throttles has come for so long.
        late_factor: a call is late after this many times the median of those that ended well.
        late_fraction: late calls, at most, of all that get a second one beside them.
        late_burst: second calls that are free besides.
    """

    start: AtLeastOne[int] = 8
    most: AtLeastOne[int] | None = None
    ramp_seconds: Positive[float] = 1.0
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(attempts=8, first_seconds=0.5, longest_seconds=30.0))
    throttled_seconds: Positive[float] = 600.0
    late_factor: AtLeastOne[float] = 3.0
    late_fraction: Fraction[float] = 0.1
    late_burst: NotNegative[int] = 2


_STEPS = 8
"""After a throttle, the limit comes back to where it was in so many periods."""
_PAUSE_PERIODS = 30
"""For so long the limit stays where it was before more was refused."""


class Ramp:
    """The limit on calls at once: few at first, more while the platform takes them, half when it throttles.

    In the manner of TCP (Jacobson, "Congestion Avoidance and Control", SIGCOMM 1988): doubling until the first
    throttle, then growth by steps; with a pause at the last number that was taken before more is tried (Ha, Rhee and
    Xu, "CUBIC", SIGOPS 2008). Unlike the limit on requests, which follows throughput because requests share a link, it
    grows with time alone: functions share nothing but their platform's limit, a call may take a quarter of an hour, and
    a throttled one is refused at once.

    Args:
        start: the limit at first.
        most: which it never exceeds.
        period_seconds: between one growth and the next.

    Attributes:
        limit: calls that may run at once now.
    """

    __slots__ = ("_cut_seconds", "_grown_seconds", "_most", "_period_seconds", "_step", "_taken", "limit")

    def __init__(self, *, start: int, most: int, period_seconds: float) -> None:
        self.limit = min(start, most)
        self._most = most
        self._period_seconds = period_seconds
        self._step: int | None = None  # none before the first throttle: double
        self._taken: int | None = None  # the most that were known to be taken at once, until more is tried
        self._grown_seconds: float | None = None  # when the calls filled the limit first, or it grew last
        self._cut_seconds = float("-inf")

    def grow(self, in_flight: int, now_seconds: float) -> None:
        """Raise the limit if a period has passed in which it was reached: what is not used says nothing."""
        if in_flight < self.limit or self.limit >= self._most:
            self._grown_seconds = None
        elif self._grown_seconds is None:
            self._grown_seconds = now_seconds
        elif now_seconds >= self._grown_seconds + self._wait_seconds():
            if self._taken is not None and self.limit >= self._taken:
                self._taken = None
            grown = self.limit + (self.limit if self._step is None else self._step)
            self.limit = min(self._most, grown if self._taken is None else min(grown, self._taken))
            self._grown_seconds = now_seconds

    def next_growth_seconds(self) -> float | None:
        """Return when the limit will grow if it stays reached; None if it will not."""
        return None if self._grown_seconds is None else self._grown_seconds + self._wait_seconds()

    def throttled(self, sent_seconds: float, in_flight: int, now_seconds: float) -> None:
        """A call sent at ``sent_seconds`` was refused; one cut answers all that were sent before it.

        ``in_flight``: calls that run, the refused one included.
        """
        if sent_seconds < self._cut_seconds:
            return
        reached = min(self.limit, in_flight)
        self.limit = max(1, reached // 2)
        self._step = max(1, reached // (2 * _STEPS))
        self._taken = max(1, reached - 1)
        self._cut_seconds = now_seconds
        self._grown_seconds = None

    def _wait_seconds(self) -> float:
        """Return how long the limit must be reached before it grows."""
        is_at_the_most_taken = self._taken is not None and self.limit >= self._taken
        return self._period_seconds * (_PAUSE_PERIODS if is_at_the_most_taken else 1)


_LEAST_CALLS = 3
"""So many must have ended well before their median says what is late."""
_REMEMBERED_CALLS = 256
_LEAST_SECONDS = 1.0
"""Nothing is late before: what is over so soon is not worth a second call."""


class Stragglers:
    """What calls take, and what may be spent on late ones.

    Backup tasks after Dean and Ghemawat, "MapReduce: Simplified Data Processing on Large Clusters" (OSDI 2004, section
    3.6): only once nothing waits to be started, since until then an instance is better used by a task that nobody has.
    A budget that calls fill bounds what an outage can cost, as with hedged reads.

    Args:
        factor: a call is late after this many times the median.
        fraction: second calls, at most, of all first ones.
        burst: second calls that are free besides.
    """

    __slots__ = ("_burst", "_calls", "_factor", "_fraction", "_seconds", "_spent")

    def __init__(self, *, factor: float, fraction: float, burst: int) -> None:
        self._factor, self._fraction, self._burst = factor, fraction, burst
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED_CALLS)
        self._calls = 0
        self._spent = 0

    def observe(self, seconds: float) -> None:
        """A call ended well after so long."""
        self._seconds.append(seconds)

    def earn(self) -> None:
        """A call was started that is no second one."""
        self._calls += 1

    def late_seconds(self) -> float | None:
        """Return after how long a call is late and a second one allowed; None while that is not known or not so."""
        if len(self._seconds) < _LEAST_CALLS or self._spent + 1 > self._burst + self._fraction * self._calls:
            return None
        return max(_LEAST_SECONDS, self._factor * median(self._seconds))

    def spend(self) -> None:
        """A second call is started."""
        self._spent += 1


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
        self._tally.counts["second_calls_won"] += call.is_second
        result = answer.result
        if result.get("state") != "packing":
            self.results[call.task] = result
        elif result == self._partial.get(call.task):
            stuck = TransientError("it stopped before its deadline without having come further")
            self._try_again(call.task, stuck, now_seconds)
        else:
            self._partial[call.task] = result
            self._attempts[call.task] = self._throttles[call.task] = 0
            self._tally.counts["continued"] += 1
            heapq.heappush(self._delayed, (now_seconds, call.task))
        return others

    def failed(self, call: Call, error: TransientError | FunctionError, now_seconds: float) -> list[Call]:
        """Take in how a call failed; return the calls to give up."""
        if isinstance(error, ThrottledError):
            self._tally.counts["throttled"] += 1
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
            self._tally.counts["second_calls"] += 1
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
        self._tally.counts["calls"] += 1
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
        self._tally.counts["retries"] += 1
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
