from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from stoker import RetryPolicy
from stoker._base.progress import WorkAmount
from stoker.abc import Answer
from stoker.errors import (
    ConfigError,
    ConnectionLostError,
    FanoutError,
    FunctionError,
    NotFoundError,
    StokerError,
    ThrottledError,
)
from stoker.fanout import Driver, FanoutConfig, Report, Task
from stoker.testing import run_virtual
from support.fanout import Behaviour, ScriptedExecutor, answer, numbered_tasks

RETRY = RetryPolicy(attempts=4, backoff_base_seconds=1.0, backoff_cap_seconds=8.0, seed=1)


def config(**changes: Any) -> FanoutConfig:
    return FanoutConfig(**{"retry": RETRY, **changes})


def run(
    behave: Behaviour, count: int, *, concurrency: int = 1000, **changes: Any
) -> tuple[list[Mapping[str, Any]] | StokerError, Report, ScriptedExecutor]:
    """Carry out numbered tasks in virtual time; return the results or the error, the report and the executor."""
    executor = ScriptedExecutor(behave, concurrency=concurrency)
    driver = Driver(executor, config(**changes))

    async def carried_out() -> list[Mapping[str, Any]] | StokerError:
        try:
            return await driver.run(numbered_tasks(count))
        except StokerError as error:
            return error

    outcome = run_virtual(carried_out())
    assert executor.in_flight == 0
    return outcome, driver.report, executor


async def taking(seconds: float, number: int, **result: Any) -> Answer:
    await asyncio.sleep(seconds)
    return answer({"number": number, **result}, seconds=seconds)


def test_results_come_in_the_order_of_the_tasks_whatever_ends_first() -> None:
    outcome, report, _ = run(lambda number, _: taking(100 - number, number), 50, start_concurrency=50)
    assert outcome == [{"number": number} for number in range(50)]
    assert (report.tasks, report.calls, report.retries, report.failed) == (50, 50, 0, 0)


def test_no_tasks_are_done_at_once() -> None:
    outcome, report, executor = run(lambda number, _: taking(1, number), 0)
    assert (outcome, report.calls, executor.started) == ([], 0, [])


def test_calls_at_once_begin_few_and_double_each_period_while_nothing_throttles() -> None:
    _, _, executor = run(lambda number, _: taking(60, number), 100, start_concurrency=4, ramp_seconds=2.0)
    seconds = [seconds for seconds, _ in executor.started]
    assert [len(list(group)) for _, group in itertools.groupby(seconds)] == [4, 4, 8, 16, 32, 36]
    assert sorted(set(seconds)) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


@pytest.mark.parametrize(("most", "concurrency", "expected"), [(None, 5, 5), (3, 100, 3), (7, 5, 7)])
def test_no_more_run_at_once_than_is_allowed(most: int | None, concurrency: int, expected: int) -> None:
    outcome, _, executor = run(lambda number, _: taking(10, number), 60, max_concurrency=most, concurrency=concurrency)
    assert isinstance(outcome, list)
    assert executor.most_in_flight == expected


def test_a_platform_that_takes_ten_at_once_gets_all_done_and_half_as_many_calls_after_a_throttle() -> None:
    running = 0

    async def behave(number: int, _: int) -> Answer:
        nonlocal running
        if running >= 10:
            raise ThrottledError("too many")
        running += 1
        try:
            return await taking(5, number)
        finally:
            running -= 1

    outcome, report, executor = run(behave, 200, start_concurrency=8)
    assert outcome == [{"number": number} for number in range(200)]
    assert 0 < report.throttled < 100
    assert executor.most_in_flight == 11, "ten, and the one that is refused"
    assert report.retries == 0, "a throttled call is no failure"


def test_a_lost_call_is_made_again_after_a_back_off() -> None:
    async def behave(number: int, before: int) -> Answer:
        if number == 3 and before < 2:
            raise ConnectionLostError("gone")
        return await taking(1, number)

    outcome, report, executor = run(behave, 8)
    assert isinstance(outcome, list)
    assert (executor.calls[3], report.retries, report.calls, report.wasted_calls) == (3, 2, 10, 2)
    third = [seconds for seconds, number in executor.started if number == 3]
    assert 0 < third[1] <= 1.0
    assert third[1] < third[2] <= third[1] + 2.0


def test_what_the_platform_asks_to_wait_is_waited() -> None:
    async def behave(number: int, before: int) -> Answer:
        if not before:
            raise ThrottledError("slowly", retry_after_seconds=100.0)
        return answer()

    _, _, executor = run(behave, 1)
    assert executor.started[1][0] >= 100.0


def test_a_platform_that_requests_a_day_waits_no_longer_than_the_patience() -> None:
    async def behave(number: int, before: int) -> Answer:
        if not before:
            raise ThrottledError("tomorrow", retry_after_seconds=86_400.0)
        return answer()

    outcome, report, _ = run(behave, 1, throttled_seconds=300.0)
    assert isinstance(outcome, list)
    assert 300.0 <= report.seconds <= 301.0


def test_a_call_that_its_executor_cancels_is_lost_and_made_again() -> None:
    async def behave(number: int, before: int) -> Answer:
        if not before:
            raise asyncio.CancelledError
        return await taking(1, number)

    outcome, report, _ = run(behave, 3)
    assert outcome == [{"number": number} for number in range(3)]
    assert report.retries == 3


def test_a_task_that_is_lost_at_every_attempt_fails_and_the_rest_is_carried_out() -> None:
    async def behave(number: int, _: int) -> Answer:
        if number == 5:
            raise ConnectionLostError("gone for good")
        return await taking(1, number)

    outcome, report, executor = run(behave, 20)
    assert isinstance(outcome, FanoutError)
    assert list(outcome.failures) == ["part 5"]
    assert isinstance(outcome.failures["part 5"], ConnectionLostError)
    assert "1 of 20 tasks failed" in str(outcome)
    assert "run the same command again" in str(outcome)
    assert "part 5: gone for good" in str(outcome)
    assert executor.calls[5] == RETRY.attempts
    assert (report.tasks, report.failed) == (19, 1)


def test_an_error_of_all_tasks_mentions_no_others() -> None:
    async def behave(number: int, _: int) -> Answer:
        raise FunctionError("work", "SchemaError", "no label")

    assert str(run(behave, 3)[0]).startswith("3 of 3 tasks failed: run the same command again")
    assert str(run(behave, 1)[0]).startswith("1 of 1 task failed: run the same command again")


def test_an_error_of_a_function_is_not_tried_again_and_the_rest_is_carried_out() -> None:
    async def behave(number: int, _: int) -> Answer:
        if number % 2:
            raise FunctionError("work", "SchemaError", f"part {number} has no label")
        return await taking(1, number)

    outcome, report, executor = run(behave, 40)
    assert isinstance(outcome, FanoutError)
    assert list(outcome.failures) == [f"part {number}" for number in range(1, 40, 2)]
    assert set(executor.calls.values()) == {1}
    assert (report.tasks, report.failed) == (20, 20)
    assert "part 19: the function work failed with SchemaError: part 19 has no label; and 10 more" in str(outcome)


def test_an_error_of_many_tasks_is_shown_once() -> None:
    async def behave(number: int, _: int) -> Answer:
        if number == 9:
            raise FunctionError("work", "SchemaError", "there is no label")
        raise FunctionError("work", "EventError", "not allowed")

    outcome, _, _ = run(behave, 20)
    assert isinstance(outcome, FanoutError)
    assert len(outcome.failures) == 20
    shared = "part 0, part 1, part 2 and 16 more: the function work failed with EventError: not allowed"
    assert f"({shared}; part 9: the function work failed with SchemaError: there is no label)" in str(outcome)


def test_an_error_that_would_meet_every_call_ends_the_run_at_once() -> None:
    async def behave(number: int, _: int) -> Answer:
        if number == 2:
            await asyncio.sleep(3)
            raise NotFoundError("there is no such function")
        return await taking(1000, number)

    outcome, report, executor = run(behave, 1000, start_concurrency=10, ramp_seconds=100)
    assert isinstance(outcome, NotFoundError)
    assert (len(executor.started), executor.cancelled) == (10, 9)
    assert report.seconds == 3.0


def test_a_function_that_stopped_at_its_deadline_is_called_again_until_it_is_complete() -> None:
    async def behave(number: int, before: int) -> Answer:
        state = "packing" if before < 5 else "complete"
        return await taking(10, number, state=state, samples=before, objects=1)

    outcome, report, _ = run(behave, 3)
    assert outcome == [{"number": number, "state": "complete", "samples": 5, "objects": 1} for number in range(3)]
    assert (report.calls, report.continued, report.retries, report.samples) == (18, 15, 0, 15)


def test_a_function_that_stops_again_and_again_without_coming_further_fails() -> None:
    outcome, _, executor = run(lambda number, _: taking(10, number, state="packing", samples=7), 1)
    assert isinstance(outcome, FanoutError)
    assert "stopped before its deadline without progress" in str(outcome)
    assert executor.calls[0] == 1 + RETRY.attempts


def test_attempts_are_counted_anew_once_a_task_has_come_further() -> None:
    async def behave(number: int, before: int) -> Answer:
        if before % 3:
            raise ConnectionLostError("gone")
        return answer({"state": "packing" if before < 30 else "complete", "samples": before})

    outcome, report, _ = run(behave, 1)
    assert outcome == [{"state": "complete", "samples": 30}]
    assert (report.continued, report.retries) == (10, 20)


def slow_once(late: set[int], seconds: float) -> Behaviour:
    async def behave(number: int, before: int) -> Answer:
        return await taking(seconds if number in late and not before else 10, number)

    return behave


def test_a_late_call_gets_a_second_one_whose_answer_counts_and_is_given_up_itself() -> None:
    outcome, report, executor = run(slow_once({4}, 10_000), 10, start_concurrency=10)
    assert outcome == [{"number": number} for number in range(10)]
    assert (report.second_calls, report.second_calls_won, report.wasted_calls, executor.cancelled) == (1, 1, 1, 1)
    assert report.seconds == 40.0, "three times the median, and then ten seconds"


def test_the_first_call_may_still_be_the_first_to_end() -> None:
    outcome, report, executor = run(slow_once({4}, 35), 10, start_concurrency=10)
    assert isinstance(outcome, list)
    assert (report.second_calls, report.second_calls_won, executor.cancelled, report.seconds) == (1, 0, 1, 35.0)


def test_no_call_gets_a_second_one_while_tasks_wait_to_be_started() -> None:
    _, _, executor = run(slow_once({0}, 10_000), 200, start_concurrency=10, max_concurrency=10)
    first_second_call = max(seconds for seconds, number in executor.started if number == 0)
    assert first_second_call >= max(seconds for seconds, number in executor.started if number != 0)


def test_second_calls_are_bounded_where_everything_has_become_slow() -> None:
    async def behave(number: int, before: int) -> Answer:
        return await taking(10 if number < 60 else 5000, number)

    outcome, report, _ = run(behave, 100, start_concurrency=100, late_fraction=0.05, late_burst=1)
    assert isinstance(outcome, list)
    assert report.second_calls == 6


def test_a_late_call_that_fails_leaves_the_second_one_to_continue() -> None:
    async def behave(number: int, before: int) -> Answer:
        if number == 4 and not before:
            await asyncio.sleep(33)
            raise ConnectionLostError("gone after all")
        return await taking(10, number)

    outcome, report, executor = run(behave, 10, start_concurrency=10)
    assert isinstance(outcome, list)
    assert (executor.calls[4], report.retries, report.second_calls_won) == (2, 0, 1)


def test_a_final_error_of_either_call_ends_both() -> None:
    async def behave(number: int, before: int) -> Answer:
        if number == 4 and before:
            raise FunctionError("work", "SchemaError", "no label")
        return await taking(10_000 if number == 4 else 10, number)

    outcome, report, executor = run(behave, 10, start_concurrency=10)
    assert isinstance(outcome, FanoutError)
    assert (report.failed, executor.cancelled, report.seconds) == (1, 1, 30.0)


def test_a_platform_that_only_throttles_ends_the_run_after_the_patience() -> None:
    async def behave(number: int, _: int) -> Answer:
        raise ThrottledError("never")

    outcome, report, executor = run(behave, 30, throttled_seconds=300.0)
    assert isinstance(outcome, FanoutError)
    assert len(outcome.failures) == 30
    assert 300 <= report.seconds < 400
    assert report.throttled == len(executor.started)


def test_a_platform_that_throttles_for_long_while_calls_still_run_is_borne() -> None:
    async def behave(number: int, _: int) -> Answer:
        if asyncio.get_running_loop().time() > 0 and running:
            raise ThrottledError("one at a time")
        running.add(number)
        try:
            return await taking(2000, number)
        finally:
            running.discard(number)

    running: set[int] = set()
    outcome, report, _ = run(behave, 3, start_concurrency=1, ramp_seconds=1.0, throttled_seconds=300.0)
    assert outcome == [{"number": number} for number in range(3)]
    assert report.throttled > 0


def test_progress_counts_tasks_once_and_their_bytes() -> None:
    shown: list[WorkAmount] = []
    executor = ScriptedExecutor(slow_once({4}, 10_000))
    driver = Driver(executor, config(start_concurrency=10), on_progress=shown.append)
    run_virtual(driver.run(numbered_tasks(10, size_bytes=7)))
    assert shown == [WorkAmount(count=done, size_bytes=7 * done) for done in range(1, 11)]


def test_one_report_covers_runs_one_after_the_other() -> None:
    executor = ScriptedExecutor(lambda number, _: taking(1, number))
    driver = Driver(executor, config())

    async def twice() -> None:
        await driver.run(numbered_tasks(3))
        await driver.run(numbered_tasks(2))

    run_virtual(twice())
    assert (driver.report.tasks, driver.report.calls, driver.report.seconds) == (5, 5, 2.0)


def test_tasks_with_one_name_are_refused_before_anything_is_called() -> None:
    executor = ScriptedExecutor(lambda number, _: taking(1, number))
    task = Task(name="twin", function="work", event={"number": 0})
    with pytest.raises(ConfigError, match="same name"):
        run_virtual(Driver(executor, config()).run([task, task]))
    assert not executor.started


def test_a_platform_without_prices_is_refused() -> None:
    executor = ScriptedExecutor(lambda number, _: taking(1, number))
    executor.platform = "mainframe"
    with pytest.raises(ConfigError, match="no prices for functions on mainframe, only for lambda"):
        Driver(executor)


@pytest.mark.parametrize(
    "changes",
    [
        {"start_concurrency": 0},
        {"max_concurrency": 0},
        {"ramp_seconds": 0},
        {"throttled_seconds": 0},
        {"late_factor": 0.5},
        {"late_fraction": 1.5},
        {"late_burst": -1},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FanoutConfig(**changes)
