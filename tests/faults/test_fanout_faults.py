"""Random platforms: throttles, losses, deadlines, late calls and final errors, in virtual time, from a seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from stoker import RetryPolicy
from stoker.abc import Answer
from stoker.errors import ConnectionLostError, DeadlineError, FanoutError, FunctionError, ThrottledError
from stoker.fanout import Driver, FanoutConfig
from stoker.testing import run_virtual
from support.cases import for_each
from support.fanout import ScriptedExecutor, answer, numbered_tasks

SEEDS = range(100)


class Platform:
    """Accepts concurrent calls, of which some are lost, late, stopped at their deadline, or fail for good."""

    def __init__(self, rng: random.Random, tasks: int) -> None:
        self._rng = rng
        self._capacity = rng.choice([1, 3, 10, 40, 1000])
        self._lost = rng.choice([0.0, 0.05, 0.3])
        self._late = rng.choice([0.0, 0.02, 0.2])
        self._seconds = rng.choice([0.05, 5.0, 600.0])
        self._steps = [rng.choice([1, 1, 1, 2, 7]) for _ in range(tasks)]
        self.doomed = {number for number in range(tasks) if rng.random() < rng.choice([0.0, 0.0, 0.05])}
        self._running = 0
        self._progress: Counter[int] = Counter()
        self.throttled = 0

    async def call(self, number: int, _: int) -> Answer:
        if self._running >= self._capacity:
            self.throttled += 1
            raise ThrottledError("too many", retry_after_seconds=self._rng.choice([None, 0.5]))
        self._running += 1
        try:
            return await self._ran(number)
        finally:
            self._running -= 1

    async def _ran(self, number: int) -> Answer:
        seconds = self._seconds * self._rng.lognormvariate(0.0, 0.3)
        is_late = self._rng.random() < self._late
        await asyncio.sleep(seconds * (50 if is_late else 1))
        if self._rng.random() < self._lost:
            raise self._rng.choice([ConnectionLostError("lost"), DeadlineError("too late")])
        if number in self.doomed:
            raise FunctionError("work", "SchemaError", "it never fits")
        self._progress[number] = min(self._progress[number] + 1, self._steps[number])
        is_complete = self._progress[number] == self._steps[number]
        state = {"state": "complete" if is_complete else "packing"}
        return answer({**state, "number": number, "samples": self._progress[number]}, seconds=seconds)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_task_is_done_or_named_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    tasks = numbered_tasks(rng.choice([1, 7, 60, 250]))
    platform = Platform(rng, len(tasks))
    executor = ScriptedExecutor(platform.call, concurrency=rng.choice([1, 5, 300]))
    config = FanoutConfig(
        start_concurrency=rng.choice([1, 8]),
        retry=RetryPolicy(attempts=30, backoff_base_seconds=0.5, backoff_cap_seconds=30.0, seed=seed),
    )
    driver = Driver(executor, config)
    results: list[Any] = []
    failed: set[int] = set()
    try:
        results = list(run_virtual(driver.run(tasks)))  # which fails if a call is left running
    except FanoutError as error:
        failed = {int(name.removeprefix("part ")) for name in error.failures}
    report = driver.report

    assert failed == platform.doomed
    assert [result["number"] for result in results] == ([] if failed else list(range(len(tasks))))
    assert all(result["state"] == "complete" for result in results)
    assert (report.tasks, report.failed) == (len(tasks) - len(failed), len(failed))
    assert executor.in_flight == 0
    assert executor.most_in_flight <= executor.concurrency
    assert report.calls == len(executor.started)
    assert report.throttled == platform.throttled
    assert report.second_calls <= config.late_burst + config.late_fraction * report.calls
    assert report.second_calls_won <= report.second_calls


def test_the_same_seed_takes_the_same_course() -> None:
    def course() -> list[tuple[float, int]]:
        rng = random.Random(7)
        executor = ScriptedExecutor(Platform(rng, 60).call)
        config = FanoutConfig(
            retry=RetryPolicy(attempts=30, backoff_base_seconds=0.5, backoff_cap_seconds=30.0, seed=7)
        )
        with suppress(FanoutError):
            run_virtual(Driver(executor, config).run(numbered_tasks(60)))
        return executor.started

    assert course() == course()


@for_each("seed", range(60))
def test_a_run_that_is_cancelled_at_any_time_leaves_nothing_running(seed: int) -> None:
    rng = random.Random(seed)
    executor = ScriptedExecutor(Platform(rng, 60).call)
    driver = Driver(executor, FanoutConfig(retry=RetryPolicy(attempts=30, seed=seed)))

    async def cancelled() -> bool:
        running = asyncio.create_task(driver.run(numbered_tasks(60)))
        await asyncio.sleep(rng.choice([0.0, 0.01, 0.5, 5.0, 500.0]) * rng.random())
        running.cancel()
        done = (await asyncio.gather(running, return_exceptions=True))[0]
        return isinstance(done, asyncio.CancelledError)

    was_cancelled = run_virtual(cancelled())  # which fails if a task is left
    assert executor.in_flight == 0
    assert was_cancelled or driver.report.tasks + driver.report.failed == 60
