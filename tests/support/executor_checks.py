"""What every executor must do, one check each; ``python -m support.executor_checks ray`` makes them all of Ray."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.abc import Executor
from stoker.errors import ConfigError, FunctionError, ServerError, StokerError, ThrottledError, TransientError
from stoker.fanout import ExecutorOptions, open_executor
from support.tiny_functions import FUNCTIONS

__all__ = ["CHECKS", "Check", "own_functions"]

Check = Callable[[Executor, Path], Awaitable[None]]
_TESTS = Path(__file__).parents[1]
_CALLS = 12


def own_functions(**changes: Any) -> ExecutorOptions:
    """Options for an executor that starts functions itself: the tiny ones, with the tests on its path."""
    return ExecutorOptions(functions=FUNCTIONS, environment={"PYTHONPATH": str(_TESTS)}, **changes)


async def an_event_arrives_and_a_result_comes_back_as_they_are(executor: Executor, _: Path) -> None:
    for event in ({}, {"text": 'Ünïcødé \u2028 \U0001f600 \\ "', "deep": [{"a": [None, True, -1, 2.5]}], "": ""}):
        answer = await executor.call("echo", event)
        assert answer.result == event
        assert answer.billed_seconds >= 0
        assert answer.memory_bytes > 0


async def a_megabyte_goes_both_ways(executor: Executor, _: Path) -> None:
    event = {"objects": [[f"key/{number:07d}", number, "tag"] for number in range(30_000)]}
    assert (await executor.call("echo", event)).result == event


async def many_calls_at_once_get_their_own_answers(executor: Executor, _: Path) -> None:
    answers = await asyncio.gather(*(executor.call("echo", {"number": number}) for number in range(_CALLS)))
    assert [answer.result["number"] for answer in answers] == list(range(_CALLS))


async def two_calls_run_at_the_same_time(executor: Executor, folder: Path) -> None:
    one, other = await asyncio.gather(
        executor.call("meet", {"folder": str(folder), "me": "one", "other": "another"}),
        executor.call("meet", {"folder": str(folder), "me": "another", "other": "one"}),
    )
    assert (one.result, other.result) == ({"met": "another"}, {"met": "one"})


async def an_error_of_a_function_has_its_type_and_message(executor: Executor, _: Path) -> None:
    for error_type in ("SchemaError", "RuntimeError"):
        with pytest.raises(FunctionError) as caught:
            await executor.call("fail", {"type": error_type, "message": "the label is missing"})
        assert (caught.value.error_type, caught.value.error_message) == (error_type, "the label is missing")
        assert "fail failed with" in str(caught.value)


async def an_error_that_may_pass_is_transient(executor: Executor, _: Path) -> None:
    with pytest.raises(ServerError, match="the store failed inside"):
        await executor.call("fail", {"type": "ServerError", "message": "the store failed inside"})
    with pytest.raises(ThrottledError, match="slow down"):
        await executor.call("fail", {"type": "ThrottledError", "message": "slow down"})


async def a_function_that_perishes_is_lost_and_the_next_call_works(executor: Executor, _: Path) -> None:
    with pytest.raises(TransientError):
        await executor.call("perish", {})
    assert (await executor.call("echo", {"still": "there"})).result == {"still": "there"}


async def a_call_can_be_cancelled_and_the_next_one_works(executor: Executor, folder: Path) -> None:
    begun = folder / "begun"
    call = asyncio.create_task(executor.call("hang", {"file": str(begun)}))
    while not begun.exists():  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await executor.call("echo", {"still": "there"})).result == {"still": "there"}


async def what_a_function_prints_is_no_answer(executor: Executor, _: Path) -> None:
    assert (await executor.call("chatter", {})).result == {"printed": True}


async def a_result_that_is_no_object_is_the_functions_error(executor: Executor, _: Path) -> None:
    for function in ("listed", "unspeakable"):
        with pytest.raises(FunctionError, match=r"TypeError|MarshalError"):
            await executor.call(function, {})


async def a_function_that_is_not_there_is_a_final_error(executor: Executor, _: Path) -> None:
    with pytest.raises(StokerError, match=r"there is no (such )?function") as caught:
        await executor.call("nobody", {})
    assert not isinstance(caught.value, TransientError)


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        an_event_arrives_and_a_result_comes_back_as_they_are,
        a_megabyte_goes_both_ways,
        many_calls_at_once_get_their_own_answers,
        two_calls_run_at_the_same_time,
        an_error_of_a_function_has_its_type_and_message,
        an_error_that_may_pass_is_transient,
        a_function_that_perishes_is_lost_and_the_next_call_works,
        a_call_can_be_cancelled_and_the_next_one_works,
        what_a_function_prints_is_no_answer,
        a_result_that_is_no_object_is_the_functions_error,
        a_function_that_is_not_there_is_a_final_error,
    )
}


async def _make(name: str) -> None:
    executor = open_executor(name, own_functions())
    with pytest.raises(ConfigError, match="inside its 'async with' block"):
        await executor.call("echo", {})
    async with executor:
        for check_name, check in CHECKS.items():
            with tempfile.TemporaryDirectory() as folder:
                await check(executor, Path(folder))
            print(check_name, flush=True)


if __name__ == "__main__":
    asyncio.run(_make(sys.argv[1]))
