"""Carries out many tasks over an executor: retries, second calls for late ones, and as much at once as is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from stoker._base.progress import Amount
from stoker._base.sizes import counted
from stoker._base.task_group import task_group
from stoker._cost.prices import Prices
from stoker._fanout.board import Board, Call, FanoutConfig, Ramp, Task
from stoker._fanout.report import Report, Tally
from stoker.abc import Answer, Executor
from stoker.errors import ConfigError, ConnectionLostError, FanoutError, FunctionError, TransientError

_NAMED_ERRORS, _NAMED_TASKS = 10, 3  # that a message names: different ones, and tasks with the same one


class Driver:
    """Runs tasks over an executor that the caller has entered; one run after the other counts on one report.

    Args:
        executor: what performs the calls.
        config: how many at once, and how patiently.
        prices: what the report reckons with; by default the packaged ones.
        on_progress: is told how many tasks are done, and their bytes, of the run under way.

    Raises:
        ConfigError: there are no prices for the executor's platform.
    """

    def __init__(
        self,
        executor: Executor,
        config: FanoutConfig | None = None,
        *,
        prices: Prices | None = None,
        on_progress: Callable[[Amount], object] | None = None,
    ) -> None:
        self._executor = executor
        self._config = config or FanoutConfig()
        self._on_progress = on_progress
        most = self._config.most or executor.concurrency
        self._ramp = Ramp(start=self._config.start, most=most, period_seconds=self._config.ramp_seconds)
        prices = prices or Prices.load()
        self._tally = Tally(None if executor.platform is None else prices.function(executor.platform), prices)
        self._results: list[Mapping[str, Any]] = []
        self._failed = 0
        self._seconds = 0.0

    @property
    def report(self) -> Report:
        """What all runs so far did and cost, one that was cut off included."""
        return self._tally.report(self._results, self._failed, self._seconds)

    async def run(self, tasks: Sequence[Task]) -> list[Mapping[str, Any]]:
        """Carry out tasks and return their results, in the order of the tasks.

        A task that fails for good does not keep the others from being carried out. When this returns or raises, or is
        cancelled, no call is under way any more; what the cloud goes on with on its own is safe to be done twice.

        Raises:
            FanoutError: some tasks failed; names them.
            StokerError: what would meet every call, such as a function that is not there; the rest was given up.
        """
        if len({task.name for task in tasks}) < len(tasks):
            raise ConfigError("two tasks of a fan-out have the same name; give each its own")
        board = Board(tasks, self._config, self._ramp, self._tally)
        begun_seconds = asyncio.get_running_loop().time()
        try:
            await _Run(board, tasks, self._executor, self._on_progress).to_its_end()
        finally:
            self._seconds += asyncio.get_running_loop().time() - begun_seconds
            self._results += board.results.values()
            self._failed += len(board.failures)
        if board.failures:
            raise _failed(tasks, board)
        return [board.results[number] for number in range(len(tasks))]


class _Run:
    """Performs what the board decides."""

    def __init__(
        self, board: Board, tasks: Sequence[Task], executor: Executor, on_progress: Callable[[Amount], object] | None
    ) -> None:
        self._board, self._tasks, self._executor, self._on_progress = board, tasks, executor, on_progress
        self._calls: dict[Call, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._done_bytes = 0

    async def to_its_end(self) -> None:
        now_seconds = asyncio.get_running_loop().time()
        async with task_group() as group:
            while not self._board.is_over:
                self._changed.clear()
                for call in self._board.due(now_seconds):
                    self._calls[call] = group.create_task(self._perform(call))
                now_seconds = await self._wait_until(self._board.next_due_seconds())

    async def _wait_until(self, due_seconds: float | None) -> float:
        """Wait until a call has ended or something is due; return the time, not before that at which it is due."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(due_seconds):
                await self._changed.wait()
        except TimeoutError:
            assert due_seconds is not None  # noqa: S101 - there is no time-out without
            return max(loop.time(), due_seconds)  # timers may be early by the clock's resolution
        return loop.time()

    async def _perform(self, call: Call) -> None:
        task = self._tasks[call.task]
        loop = asyncio.get_running_loop()
        try:
            answer = await _answer(self._executor, task)
        except (TransientError, FunctionError) as error:
            given_up = self._board.failed(call, error, loop.time())
        else:
            done = len(self._board.results)
            given_up = self._board.answered(call, answer, loop.time())
            if len(self._board.results) > done:
                self._show(task)
        self._calls.pop(call, None)
        for other in given_up:
            self._calls.pop(other).cancel()
        self._changed.set()

    def _show(self, task: Task) -> None:
        self._done_bytes += task.size_bytes
        if self._on_progress is not None:
            self._on_progress(Amount(count=len(self._board.results), size_bytes=self._done_bytes))


async def _answer(executor: Executor, task: Task) -> Answer:
    try:
        return await executor.call(task.function, task.event)
    except asyncio.CancelledError:
        this = asyncio.current_task()
        if this is not None and this.cancelling():
            raise
        # Nobody here has cancelled it; as a cancelled task it would end without a word to the board.
        raise ConnectionLostError(f"the executor {executor.name} gave up the call") from None


def _failed(tasks: Sequence[Task], board: Board) -> FanoutError:
    failures = {tasks[number].name: board.failures[number] for number in sorted(board.failures)}
    alike: dict[str, list[str]] = {}
    for name, error in failures.items():
        alike.setdefault(str(error), []).append(name)
    named = [f"{_shortened(names)}: {error}" for error, names in islice(alike.items(), _NAMED_ERRORS)]
    if more := sum(map(len, islice(alike.values(), _NAMED_ERRORS, None))):
        named.append(f"and {more} more")
    others = "; the others are done and stay so" if len(failures) < len(tasks) else ""
    return FanoutError(
        f"{len(failures)} of {counted(len(tasks), 'task')} failed{others}: run the same command again when the cause "
        f"is removed ({'; '.join(named)})",
        failures,
    )


def _shortened(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_TASKS
    return ", ".join(names[:_NAMED_TASKS]) + (f" and {more} more" if more > 0 else "")
