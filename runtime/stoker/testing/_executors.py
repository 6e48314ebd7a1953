"""The contract of executors, as tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from stoker import errors
from stoker._base.task_group import end_tasks
from stoker.abc import Executor
from stoker.errors import FunctionError, ServerError, StokerError, ThrottledError, TransientError

_CONCURRENT_CALLS = 12


async def _echo(event: Mapping[str, Any], *_: object) -> dict[str, Any]:
    return dict(event)


async def _fail(event: Mapping[str, Any], *_: object) -> dict[str, Any]:
    """Raise the error of :mod:`stoker.errors` that the event names, RuntimeError if it names another."""
    kind = getattr(errors, event["type"], RuntimeError)
    raise kind(event["message"])


async def _chatter(event: Mapping[str, Any], *_: object) -> dict[str, Any]:
    """Print, as libraries do."""
    print("this is not an answer")
    return {"printed": True}


async def _listed(event: Mapping[str, Any], *_: object) -> Any:
    return [1, 2, 3]


async def _hang(event: Mapping[str, Any], *_: object) -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


CONTRACT_FUNCTIONS: Mapping[str, str] = {
    function.__name__[1:]: f"{__name__}:{function.__name__}" for function in (_echo, _fail, _chatter, _listed, _hang)
}
"""Functions that the executor suite calls: name → ``module:function``, ``async def (event, deployment, deadline)``."""


async def _catch_error(call: Awaitable[object]) -> StokerError:
    """Return the error that a call raises."""
    try:
        answer = await call
    except StokerError as error:
        return error
    raise AssertionError(f"the call returned {answer}, but it must raise an error")


class ExecutorTests:
    """The tests of an :class:`~stoker.abc.Executor` that runs the functions in :data:`CONTRACT_FUNCTIONS`.

    Override :meth:`create_executor`. Each test enters an executor of its own.

    Example:
        >>> from stoker.testing import CONTRACT_FUNCTIONS, ExecutorTests
        >>> class TestMyExecutor(ExecutorTests):
        ...     def create_executor(self):
        ...         return MyExecutor(CONTRACT_FUNCTIONS)
    """

    def create_executor(self) -> Executor:
        """Return an executor, not yet entered, that finds the suite's functions by their names."""
        raise NotImplementedError("override create_executor in your test class")

    def _run(self, check: Callable[[Executor], Awaitable[None]]) -> None:
        async def checked() -> None:
            async with self.create_executor() as executor:
                await check(executor)

        asyncio.run(checked())

    def test_it_says_what_it_is(self) -> None:
        executor = self.create_executor()
        assert executor.name
        assert executor.concurrency >= 1
        assert isinstance(executor.sees_files, bool)
        assert isinstance(executor.heeds, frozenset)
        assert executor.vcpus("echo") >= 0

    def test_an_event_arrives_and_a_result_comes_back_as_they_are(self) -> None:
        async def check(executor: Executor) -> None:
            for event in ({}, {"text": 'Ünïcødé \u2028 \U0001f600 \\ "', "deep": [{"a": [None, True, -1, 2.5]}]}):
                answer = await executor.call("echo", event)
                assert answer.result == event
                assert answer.billed_seconds >= 0
                assert answer.memory_bytes >= 0

        self._run(check)

    def test_a_megabyte_goes_both_ways(self) -> None:
        async def check(executor: Executor) -> None:
            event = {"objects": [[f"key/{number:07d}", number, "tag"] for number in range(30_000)]}
            assert (await executor.call("echo", event)).result == event

        self._run(check)

    def test_many_calls_at_once_get_their_own_answers(self) -> None:
        async def check(executor: Executor) -> None:
            answers = await asyncio.gather(
                *(executor.call("echo", {"number": number}) for number in range(_CONCURRENT_CALLS))
            )
            assert [answer.result["number"] for answer in answers] == list(range(_CONCURRENT_CALLS))

        self._run(check)

    def test_an_error_of_a_function_has_its_type_and_message(self) -> None:
        async def check(executor: Executor) -> None:
            for error_type in ("SchemaError", "RuntimeError"):
                error = await _catch_error(
                    executor.call("fail", {"type": error_type, "message": "the label is missing"})
                )
                assert isinstance(error, FunctionError), repr(error)
                assert (error.error_type, error.error_message) == (error_type, "the label is missing")

        self._run(check)

    def test_an_error_that_may_pass_is_transient(self) -> None:
        async def check(executor: Executor) -> None:
            for kind in (ServerError, ThrottledError):
                error = await _catch_error(executor.call("fail", {"type": kind.__name__, "message": "slow down"}))
                assert isinstance(error, kind), repr(error)
                assert "slow down" in str(error)

        self._run(check)

    def test_what_a_function_prints_is_no_answer(self) -> None:
        async def check(executor: Executor) -> None:
            assert (await executor.call("chatter", {})).result == {"printed": True}

        self._run(check)

    def test_a_result_that_is_no_object_is_the_functions_error(self) -> None:
        async def check(executor: Executor) -> None:
            error = await _catch_error(executor.call("listed", {}))
            assert isinstance(error, FunctionError), repr(error)

        self._run(check)

    def test_a_function_that_is_not_there_is_a_final_error(self) -> None:
        async def check(executor: Executor) -> None:
            error = await _catch_error(executor.call("nobody", {}))
            assert not isinstance(error, TransientError), f"{error!r} is transient, so the call would be retried"

        self._run(check)

    def test_a_call_can_be_cancelled_and_the_next_one_works(self) -> None:
        async def check(executor: Executor) -> None:
            call = asyncio.create_task(executor.call("hang", {}))
            await asyncio.sleep(0.05)
            await end_tasks([call])
            assert call.cancelled()
            assert (await executor.call("echo", {"still": "there"})).result == {"still": "there"}

        self._run(check)
