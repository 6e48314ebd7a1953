"""Checks of every executor's behaviour; ``python -m support.executor_checks ray`` runs them all with Ray."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.abc import Executor
from stoker.errors import ConfigError, FunctionError, StokerError, TransientError
from stoker.fanout import ExecutorOptions, open_executor
from stoker.testing import ExecutorTests
from support.tiny_functions import FUNCTIONS

__all__ = ["CHECKS", "Check", "own_functions"]

Check = Callable[[Executor, Path], Awaitable[None]]
_TESTS = Path(__file__).parents[1]
_CHECK_SECONDS = 60.0
"""Of a check that hangs; the traceback then shows where."""


def own_functions(**changes: Any) -> ExecutorOptions:
    """Options for an executor that starts functions itself: the tiny ones, with the tests on its path."""
    return ExecutorOptions(functions=FUNCTIONS, environment={"PYTHONPATH": str(_TESTS)}, **changes)


async def what_a_call_is_charged_for_is_told(executor: Executor, _: Path) -> None:
    assert (await executor.call("echo", {})).memory_bytes > 0


async def two_calls_run_at_the_same_time(executor: Executor, folder: Path) -> None:
    one, other = await asyncio.gather(
        executor.call("meet", {"folder": str(folder), "me": "one", "other": "another"}),
        executor.call("meet", {"folder": str(folder), "me": "another", "other": "one"}),
    )
    assert (one.result, other.result) == ({"met": "another"}, {"met": "one"})


async def a_function_that_perishes_is_lost_and_the_next_call_works(executor: Executor, _: Path) -> None:
    with pytest.raises(TransientError):
        await executor.call("perish", {})
    assert (await executor.call("echo", {"still": "there"})).result == {"still": "there"}


async def a_call_that_runs_can_be_cancelled(executor: Executor, folder: Path) -> None:
    begun = folder / "begun"
    call = asyncio.create_task(executor.call("hang", {"file": str(begun)}))
    while not begun.exists() and not call.done():  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await executor.call("echo", {"still": "there"})).result == {"still": "there"}


async def a_result_that_is_no_json_is_the_functions_error(executor: Executor, _: Path) -> None:
    with pytest.raises(FunctionError, match=r"TypeError|MarshalError"):
        await executor.call("unspeakable", {})


async def an_error_names_the_function(executor: Executor, _: Path) -> None:
    with pytest.raises(FunctionError, match="fail failed with"):
        await executor.call("fail", {"type": "RuntimeError", "message": "the label is missing"})
    with pytest.raises(StokerError, match=r"there is no (such )?function"):
        await executor.call("nobody", {})


class _Collected(ExecutorTests):
    """Runs the checks of the shipped suite on an executor that has been entered."""

    def __init__(self) -> None:
        self.checks: dict[str, Check] = {}
        self._name = ""
        for name in dir(self):
            if name.startswith("test_") and name != "test_it_says_what_it_is":
                self._name = name  # _run identifies its check by it
                getattr(self, name)()

    def _run(self, check: Callable[[Executor], Awaitable[None]]) -> None:
        self.checks[self._name.removeprefix("test_")] = lambda executor, _: check(executor)


CHECKS: dict[str, Check] = _Collected().checks | {
    check.__name__: check
    for check in (
        what_a_call_is_charged_for_is_told,
        two_calls_run_at_the_same_time,
        a_function_that_perishes_is_lost_and_the_next_call_works,
        a_call_that_runs_can_be_cancelled,
        a_result_that_is_no_json_is_the_functions_error,
        an_error_names_the_function,
    )
}


async def _make(name: str) -> None:
    executor = open_executor(name, own_functions())
    with pytest.raises(ConfigError, match="inside its 'async with' block"):
        await executor.call("echo", {})
    async with executor:
        for check_name, check in CHECKS.items():
            with tempfile.TemporaryDirectory() as folder:
                async with asyncio.timeout(_CHECK_SECONDS):
                    await check(executor, Path(folder))
            print(check_name, flush=True)


if __name__ == "__main__":
    asyncio.run(_make(sys.argv[1]))
