"""Runs many tasks with an executor: retries, second calls for late ones, concurrency that the platform accepts."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from stoker._base.progress import WorkAmount
from stoker._base.retry import backoff_seconds
from stoker._base.sizes import format_count
from stoker._base.task_group import task_group
from stoker._cost.prices import Prices
from stoker._fanout.concurrency import FanoutConfig, Ramp, Stragglers, Task
from stoker._fanout.report import FanoutCounters, Report
from stoker.abc import Answer, Executor
from stoker.errors import (
    ConfigError,
    ConnectionLostError,
    FanoutError,
    FunctionError,
    StokerError,
    ThrottledError,
    TransientError,
)

_MAX_ERRORS_SHOWN, _MAX_TASKS_SHOWN = 10, 3  # in a message: different errors, and tasks with the same error


class Driver:
    """Runs tasks with an executor that the caller has entered; successive runs add to one report.

    Example:
        Compact a data set in a worker process of this machine:

        >>> options = ExecutorOptions(environment={"STOKER_DATASETS": "train=data"})
        >>> async with open_executor("local", options) as executor:
        ...     driver = Driver(executor, FanoutConfig(start_concurrency=1))
        ...     results = await driver.run([Task(name="train", function="compact", event={"dataset": "data"})])
        >>> driver.report.tasks, driver.report.failed
        (1, 0)

    Args:
        executor: executor of the calls.
        config: concurrency, retries and late calls; default ``FanoutConfig()``.
        prices: prices for the report; default the packaged ones.
        on_progress: called with the number of completed tasks of the current run, and their bytes.

    Raises:
        ConfigError: there are no prices for the executor's platform.
    """

    def __init__(
        self,
        executor: Executor,
        config: FanoutConfig | None = None,
        *,
        prices: Prices | None = None,
        on_progress: Callable[[WorkAmount], object] | None = None,
    ) -> None:
        self._executor = executor
        self._config = config or FanoutConfig()
        self._on_progress = on_progress
        max_limit = self._config.max_concurrency or executor.concurrency
        self._ramp = Ramp(
            start=self._config.start_concurrency, max_limit=max_limit, period_seconds=self._config.ramp_seconds
        )
        prices = prices or Prices.load()
        self._counters = FanoutCounters(
            None if executor.platform is None else prices.function(executor.platform), prices
        )
        self._results: list[Mapping[str, Any]] = []
        self._failed = 0
        self._seconds = 0.0

    @property
    def report(self) -> Report:
        """Counts and cost of all runs so far, including interrupted ones."""
        return self._counters.report(self._results, self._failed, self._seconds)

    async def run(self, tasks: Sequence[Task]) -> list[Mapping[str, Any]]:
        """Run tasks and return their results, in the order of the tasks.

        A task that fails does not stop the others. When this returns, raises or is cancelled, no call is in flight; the
        platform may still finish calls that were sent, which is safe because tasks are idempotent.

        Raises:
            ConfigError: two tasks have the same name.
            FanoutError: some tasks failed; names them.
            StokerError: an error that would meet every call, such as a missing function; all other calls are cancelled.
        """
        if len({task.name for task in tasks}) < len(tasks):
            raise ConfigError("two tasks of a fan-out have the same name; give each its own")
        run = _FanoutRun(tasks, self._config, self._ramp, self._counters, self._executor, self._on_progress)
        begun_seconds = asyncio.get_running_loop().time()
        try:
            await run.run()
        finally:
            self._seconds += asyncio.get_running_loop().time() - begun_seconds
            self._results += run.results.values()
            self._failed += len(run.failures)
        if run.failures:
            raise _create_error(tasks, run.failures)
        return [run.results[number] for number in range(len(tasks))]


@dataclass(slots=True, eq=False)
class _TaskState:
    """A task and its progress.

    Attributes:
        number: index of the task.
        task: the task.
        attempts: number of failed calls since the task last made progress.
        throttles: number of throttled calls since the task last made progress.
        partial: last result, if it says that work is left.
        calls: calls in flight; two if the first is late.
    """

    number: int
    task: Task
    attempts: int = 0
    throttles: int = 0
    partial: Mapping[str, Any] | None = None
    calls: list[_TaskCall] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _TaskCall:
    """A call in flight: its task, start time, whether it is a second call for a late one, and its asyncio task."""

    state: _TaskState
    start_seconds: float
    is_second: bool
    asyncio_task: asyncio.Task[None] | None = None


class _FanoutRun:
    """One run of :class:`Driver`.

    A task waits to be started, or for the end of its back-off, or runs in one call, or in two if the first is late;
    then it is done or has failed. The call that ends first decides, and the task's other call is cancelled.

    Args:
        tasks: tasks to run.
        config: retries and late calls.
        ramp: limit of concurrent calls.
        counters: counters of the report.
        executor: executor of the calls.
        on_progress: called with the number of completed tasks, and their bytes.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        config: FanoutConfig,
        ramp: Ramp,
        counters: FanoutCounters,
        executor: Executor,
        on_progress: Callable[[WorkAmount], object] | None,
    ) -> None:
        self._config, self._ramp, self._counters = config, ramp, counters
        self._executor, self._on_progress = executor, on_progress
        self._stragglers = Stragglers(factor=config.late_factor, fraction=config.late_fraction, burst=config.late_burst)
        self._random = random.Random(config.retry.seed)  # noqa: S311 - jitter is no secret
        self._unstarted = deque(_TaskState(number, task) for number, task in enumerate(tasks))
        self._delayed: list[tuple[float, int, _TaskState]] = []  # a heap: due time, and the task's number
        self._watched: dict[_TaskCall, None] = {}  # calls that may get a second one, oldest first
        self._in_flight = 0
        self._throttled_since_seconds: float | None = None  # time since which every call was throttled
        self._changed = asyncio.Event()
        self._done_bytes = 0
        self.results: dict[int, Mapping[str, Any]] = {}
        """Task number → last result, for completed tasks."""
        self.failures: dict[int, StokerError] = {}
        """Task number → last error, for failed tasks."""

    async def run(self) -> None:
        """Run until every task is done or has failed."""
        now_seconds = asyncio.get_running_loop().time()
        async with task_group() as group:
            while self._unstarted or self._delayed or self._in_flight:
                self._changed.clear()
                self._start_due(group, now_seconds)
                now_seconds = await self._wait_until(self._next_due_seconds())

    async def _wait_until(self, due_seconds: float | None) -> float:
        """Wait until a call ends or until ``due_seconds``; return the time, at least ``due_seconds`` if that passed."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(due_seconds):
                await self._changed.wait()
        except TimeoutError:
            assert due_seconds is not None  # noqa: S101 - there is no time-out without
            return max(loop.time(), due_seconds)  # timers may be early by the clock's resolution
        return loop.time()

    def _next_due_seconds(self) -> float | None:
        """Return when the next call is due if no call ends before; None if none is due until a call ends."""
        if self._in_flight >= self._ramp.limit:
            return self._ramp.next_growth_seconds()
        whens = (self._delayed[0][0] if self._delayed else None, self._next_late_seconds())
        return min((when for when in whens if when is not None), default=None)

    def _start_due(self, group: asyncio.TaskGroup, now_seconds: float) -> None:
        """Start the calls that are due at this time."""
        while True:
            while self._in_flight < self._ramp.limit and (call := self._next_call(now_seconds)) is not None:
                call.asyncio_task = group.create_task(self._perform(call))
            limit = self._ramp.limit
            self._ramp.grow(self._in_flight, now_seconds)
            if self._ramp.limit == limit:
                return

    def _next_call(self, now_seconds: float) -> _TaskCall | None:
        """Return the next call: for a task whose back-off has passed, a new task, or a late call."""
        if self._delayed and self._delayed[0][0] <= now_seconds:
            return self._create_call(heapq.heappop(self._delayed)[2], now_seconds)
        if self._unstarted:
            return self._create_call(self._unstarted.popleft(), now_seconds)
        late_since = self._next_late_seconds()
        if late_since is None or late_since > now_seconds:
            return None
        late = next(iter(self._watched))
        del self._watched[late]
        self._stragglers.spend()
        self._counters.counts["second_calls"] += 1
        return self._create_call(late.state, now_seconds, is_second=True)

    def _next_late_seconds(self) -> float | None:
        """Return when the oldest call without a second one becomes late; None if it may not get one."""
        late_seconds = self._stragglers.late_seconds() if self._watched and not self._unstarted else None
        return None if late_seconds is None else next(iter(self._watched)).start_seconds + late_seconds

    def _create_call(self, work: _TaskState, now_seconds: float, *, is_second: bool = False) -> _TaskCall:
        call = _TaskCall(work, now_seconds, is_second)
        work.calls.append(call)
        if not is_second:
            self._watched[call] = None
            self._stragglers.earn()
        self._in_flight += 1
        self._counters.counts["calls"] += 1
        return call

    async def _perform(self, call: _TaskCall) -> None:
        loop = asyncio.get_running_loop()
        try:
            answer = await _call_executor(self._executor, call.state.task)
        except (TransientError, FunctionError) as error:
            self._handle_error(call, error, loop.time())
        else:
            self._handle_answer(call, answer, loop.time())
        self._changed.set()

    def _handle_answer(self, call: _TaskCall, answer: Answer, now_seconds: float) -> None:
        """Handle the answer of a call, and cancel the other call of its task."""
        self._counters.count_answer(answer)
        if not self._remove_call(call):
            return
        self._throttled_since_seconds = None
        self._stragglers.observe(now_seconds - call.start_seconds)
        self._cancel_calls(call.state, now_seconds)
        self._counters.counts["second_calls_won"] += call.is_second
        work, result = call.state, answer.result
        if result.get("state") != "packing":
            self.results[work.number] = result
            self._done_bytes += work.task.size_bytes
            if self._on_progress is not None:
                self._on_progress(WorkAmount(count=len(self.results), size_bytes=self._done_bytes))
        elif result == work.partial:
            stuck = TransientError("the function stopped before its deadline without progress")
            self._retry(work, stuck, now_seconds)
        else:
            work.partial, work.attempts, work.throttles = result, 0, 0
            self._counters.counts["continued"] += 1
            heapq.heappush(self._delayed, (now_seconds, work.number, work))

    def _handle_error(self, call: _TaskCall, error: TransientError | FunctionError, now_seconds: float) -> None:
        """Handle the error of a call."""
        if isinstance(error, ThrottledError):
            self._counters.counts["throttled"] += 1
            self._ramp.record_throttle(call.start_seconds, self._in_flight, now_seconds)
        else:
            self._counters.count_failure(now_seconds - call.start_seconds)
            self._throttled_since_seconds = None
        if not self._remove_call(call):
            return
        if isinstance(error, FunctionError):
            self.failures[call.state.number] = error
            self._cancel_calls(call.state, now_seconds)
        elif call.state.calls:  # the task's other call may still succeed
            return
        elif isinstance(error, ThrottledError):
            self._delay_throttled(call.state, error, now_seconds)
        else:
            self._retry(call.state, error, now_seconds)

    def _remove_call(self, call: _TaskCall) -> bool:
        """Remove a call from those in flight; return False if it was cancelled just before it ended."""
        if call not in call.state.calls:
            return False
        call.state.calls.remove(call)
        self._watched.pop(call, None)
        self._in_flight -= 1
        return True

    def _cancel_calls(self, work: _TaskState, now_seconds: float) -> None:
        """Cancel the calls of a task that are in flight."""
        for call in list(work.calls):
            self._remove_call(call)
            self._counters.count_failure(now_seconds - call.start_seconds)
            if call.asyncio_task is not None:
                call.asyncio_task.cancel()

    def _retry(self, work: _TaskState, error: TransientError, now_seconds: float) -> None:
        work.attempts += 1
        if work.attempts >= self._config.retry.attempts:
            self.failures[work.number] = error
            return
        self._counters.counts["retries"] += 1
        self._delay(work, work.attempts, error, now_seconds)

    def _delay_throttled(self, work: _TaskState, error: ThrottledError, now_seconds: float) -> None:
        """Delay a throttled task; fail all waiting tasks if every call was throttled for too long."""
        if self._throttled_since_seconds is None or self._in_flight:
            self._throttled_since_seconds = now_seconds
        if now_seconds - self._throttled_since_seconds >= self._config.throttled_seconds:
            waiting = [work, *self._unstarted, *(each for _, _, each in self._delayed)]
            self._unstarted.clear()
            self._delayed.clear()
            self.failures.update(dict.fromkeys((each.number for each in waiting), error))
            return
        work.throttles += 1
        self._delay(work, work.throttles, error, now_seconds)

    def _delay(self, work: _TaskState, failures: int, error: TransientError, now_seconds: float) -> None:
        wait_seconds = backoff_seconds(
            failures,
            base_seconds=self._config.retry.backoff_base_seconds,
            cap_seconds=self._config.retry.backoff_cap_seconds,
            rng=self._random,
            retry_after_seconds=min(error.retry_after_seconds or 0.0, self._config.throttled_seconds),
        )
        heapq.heappush(self._delayed, (now_seconds + wait_seconds, work.number, work))


async def _call_executor(executor: Executor, task: Task) -> Answer:
    try:
        return await executor.call(task.function, task.event)
    except asyncio.CancelledError:
        this = asyncio.current_task()
        if this is not None and this.cancelling():
            raise
        # The executor cancelled it, not this run; a cancelled task would end without being handled.
        raise ConnectionLostError(f"the executor {executor.name} cancelled the call") from None


def _create_error(tasks: Sequence[Task], errors: Mapping[int, StokerError]) -> FanoutError:
    failures = {tasks[number].name: errors[number] for number in sorted(errors)}
    alike: dict[str, list[str]] = {}
    for name, error in failures.items():
        alike.setdefault(str(error), []).append(name)
    named = [f"{_shorten_names(names)}: {error}" for error, names in islice(alike.items(), _MAX_ERRORS_SHOWN)]
    if more := sum(map(len, islice(alike.values(), _MAX_ERRORS_SHOWN, None))):
        named.append(f"and {more} more")
    others = "; the others are done and stay so" if len(failures) < len(tasks) else ""
    return FanoutError(
        f"{len(failures)} of {format_count(len(tasks), 'task')} failed{others}: run the same command again once the "
        f"cause is fixed ({'; '.join(named)})",
        failures,
    )


def _shorten_names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_TASKS_SHOWN
    return ", ".join(names[:_MAX_TASKS_SHOWN]) + (f" and {more} more" if more > 0 else "")
