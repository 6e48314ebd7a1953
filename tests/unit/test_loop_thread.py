from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from stoker._base.threads import LoopThread
from stoker.errors import StokerError


async def thread_name() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


def stoker_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "stoker-test"]


def test_the_thread_starts_at_the_first_call_and_ends_at_close() -> None:
    loop_thread = LoopThread("stoker-test")
    assert stoker_threads() == []
    assert loop_thread.run(thread_name()) == "stoker-test"
    assert stoker_threads() == ["stoker-test"]
    loop_thread.close()
    loop_thread.close()
    assert stoker_threads() == []


def test_call_soon_calls_in_order_on_the_thread_and_does_nothing_while_there_is_none() -> None:
    loop_thread = LoopThread("stoker-test")
    called: list[tuple[int, str]] = []

    def note(number: int) -> None:
        called.append((number, threading.current_thread().name))

    loop_thread.call_soon(note, 0)
    assert not loop_thread.is_running
    loop_thread.run(thread_name())
    loop_thread.call_soon(note, 1)
    loop_thread.call_soon(note, 2)
    loop_thread.run(thread_name())
    loop_thread.close()
    loop_thread.call_soon(note, 3)
    assert called == [(1, "stoker-test"), (2, "stoker-test")]


def test_a_closed_one_starts_again_when_it_is_used() -> None:
    loop_thread = LoopThread("stoker-test")
    for _ in range(3):
        assert loop_thread.run(thread_name()) == "stoker-test"
        loop_thread.close()


def test_close_cancels_what_runs_and_waits_for_it_to_end() -> None:
    loop_thread = LoopThread("stoker-test")
    started, ended = threading.Event(), threading.Event()

    async def long() -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            ended.set()

    future = loop_thread.call(long())
    started.wait()
    loop_thread.close()
    assert ended.is_set()
    with pytest.raises(CancelledError):
        future.result(timeout=0)


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_what_comes_last_is_awaited_on_the_thread_when_everything_else_has_ended(is_forgotten: bool) -> None:
    ended: list[str] = []

    async def last() -> None:
        ended.append(f"last on {await thread_name()}")

    async def long(started: threading.Event) -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            ended.append("call")

    loop_thread = LoopThread("stoker-test", on_close=last)
    loop_thread.close()
    assert ended == [], "a thread that never ran has nothing to close"
    for _ in range(2):
        started = threading.Event()
        loop_thread.call(long(started))
        started.wait()
        if not is_forgotten:
            loop_thread.close()
    del loop_thread
    gc.collect()
    wanted = ["call", "call", "last on stoker-test"] if is_forgotten else ["call", "last on stoker-test"] * 2
    assert ended == wanted
    assert stoker_threads() == []


def test_errors_reach_the_caller() -> None:
    loop_thread = LoopThread("stoker-test")

    async def fail() -> None:
        raise LookupError("on the thread")

    with pytest.raises(LookupError, match="on the thread"):
        loop_thread.run(fail())
    loop_thread.close()


def test_run_on_its_own_thread_is_an_error_and_not_a_deadlock() -> None:
    loop_thread = LoopThread("stoker-test")

    async def inside() -> None:
        loop_thread.run(thread_name())

    with pytest.raises(RuntimeError, match="own thread"):
        loop_thread.run(inside())
    loop_thread.close()


def test_it_works_beside_a_loop_that_runs_in_the_calling_thread() -> None:
    loop_thread = LoopThread("stoker-test")

    async def notebook() -> str:
        return loop_thread.run(thread_name())

    assert asyncio.run(notebook()) == "stoker-test"
    loop_thread.close()


def test_a_forgotten_one_ends_its_thread() -> None:
    loop_thread = LoopThread("stoker-test")
    loop_thread.run(thread_name())
    del loop_thread
    gc.collect()
    assert stoker_threads() == []


def test_after_a_fork_both_sides_continue() -> None:
    loop_thread = LoopThread("stoker-test")
    loop_thread.run(thread_name())
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if loop_thread.run(thread_name()) == "stoker-test":
                loop_thread.close()
                gc.collect()
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert loop_thread.run(thread_name()) == "stoker-test"
    loop_thread.close()


def test_an_interpreter_that_exits_without_close_says_nothing_and_does_not_hang() -> None:
    program = (
        "import asyncio\n"
        "from stoker._base.threads import LoopThread\n"
        "loop_thread = LoopThread()\n"
        "loop_thread.run(asyncio.sleep(0))\n"
        "loop_thread.call(asyncio.sleep(3600))\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", program],
        capture_output=True, timeout=300, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (b"", b"")


def test_what_belongs_to_a_thread_that_is_closed_does_not_start_it_again() -> None:
    loop_thread = LoopThread("stoker-test")
    life, refused = loop_thread.start(), threading.Event()

    async def long() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            with pytest.raises(StokerError, match="its objects cannot be used any more"):
                loop_thread.call(thread_name())
            refused.set()

    def wait() -> None:
        with pytest.raises(StokerError, match="was closed before the call ended"):
            loop_thread.run(long())

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not (loop_thread.call(_tasks()).result() > 1):
        pass
    loop_thread.close()
    waiting.join(30)
    assert refused.is_set()
    with pytest.raises(StokerError):
        loop_thread.run(thread_name(), life)
    assert stoker_threads() == []


async def _tasks() -> int:
    return len(asyncio.all_tasks()) - 1


def test_what_closes_last_is_awaited_behind_everything_else_and_its_error_is_raised() -> None:
    async def last() -> None:
        raise LookupError(await thread_name())

    loop_thread = LoopThread("stoker-test", on_close=last)
    loop_thread.close()
    loop_thread.start()
    with pytest.raises(LookupError, match="stoker-test"):
        loop_thread.close()
    assert stoker_threads() == []
