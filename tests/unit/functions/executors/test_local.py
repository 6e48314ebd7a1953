from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker import RetryPolicy
from stoker.abc import Answer
from stoker.errors import ConnectionLostError, DeadlineError, FunctionError
from stoker.fanout import Driver, ExecutorOptions, FanoutConfig, Task
from stoker_functions._executors.worker import LocalExecutor
from support.executor_checks import own_functions

ROOT = Path(__file__).parents[4]
_WAIT_SECONDS = 300.0  # of a hang


def workers() -> list[psutil.Process]:
    """The worker processes of this one."""
    return [
        child for child in psutil.Process().children() if "stoker_functions._executors.worker" in command_line(child)
    ]


def command_line(process: psutil.Process) -> str:
    """The command line of a process; empty when it has ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


async def written(file: Path) -> int:
    """Wait until a function has written its process id."""
    while not (found := who(file)):  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.01)
    return found


def who(file: Path) -> int:
    return int(file.read_text() or 0) if file.exists() else 0


def test_workers_are_as_many_as_calls_at_once_are_reused_and_gone_at_the_end() -> None:
    async def work() -> tuple[int, list[bool | None]]:
        async with LocalExecutor(own_functions(concurrency=2)) as executor:
            assert not workers(), "none before the first call"
            answers = [await executor.call("echo", {}) for _ in range(3)]
            assert len(workers()) == 1
            answers += await asyncio.gather(*(executor.call("echo", {}) for _ in range(6)))
            return len(workers()), [answer.is_cold for answer in answers]

    count, cold = asyncio.run(work())
    assert count == 2
    assert cold.count(True) == 2
    assert not workers()


def test_a_killed_worker_is_reported_with_its_signal_and_replaced() -> None:
    async def work() -> Answer:
        async with LocalExecutor(own_functions(concurrency=1)) as executor:
            with pytest.raises(ConnectionLostError, match="the worker that ran perish was killed by SIGKILL"):
                await executor.call("perish", {})
            await executor.call("echo", {})
            for process in workers():
                process.kill()  # while it is idle
                process.wait()
            with pytest.raises(ConnectionLostError):
                await executor.call("echo", {})
            return await executor.call("echo", {"a": "new one"})

    assert asyncio.run(work()).result == {"a": "new one"}
    assert not workers()


def test_a_worker_that_cannot_start_is_reported_with_its_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        options = ExecutorOptions(environment={"PYTHONPATH": "", "PYTHONHOME": "/nowhere"})
        async with LocalExecutor(options) as executor:
            with pytest.raises(ConnectionLostError, match="exited with 1"):
                await executor.call("echo", {})

    asyncio.run(work())
    assert "Python" in capfd.readouterr().err
    assert not workers()


def test_a_machine_that_starts_no_more_processes_may_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def work() -> None:
        async with LocalExecutor(own_functions()) as executor:
            with pytest.raises(ConnectionLostError, match="no worker could be started"):
                await executor.call("echo", {})

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    asyncio.run(work())


def test_settings_that_are_not_valid_are_the_functions_error() -> None:
    async def work() -> None:
        options = ExecutorOptions(environment={"STOKER_DATASETS": "no url"})
        async with LocalExecutor(options) as executor:
            with pytest.raises(FunctionError, match="STOKER_DATASETS"):
                await executor.call("pack", {})

    asyncio.run(work())


def test_a_function_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    async def work() -> None:
        async with LocalExecutor(own_functions(concurrency=1, timeout_seconds=0.5)) as executor:
            with pytest.raises(DeadlineError, match=r"hang took longer than 0.5 s"):
                await executor.call("hang", {"file": str(tmp_path / "me")})
            psutil.wait_procs(workers(), _WAIT_SECONDS)
            assert not workers(), "though the executor is still open"

    asyncio.run(work())


def test_a_call_that_is_cancelled_ends_its_function(tmp_path: Path) -> None:
    async def work() -> int:
        async with LocalExecutor(own_functions(concurrency=1)) as executor:
            call = asyncio.create_task(executor.call("hang", {"file": str(tmp_path / "me")}))
            who = await written(tmp_path / "me")
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return who

    assert not psutil.pid_exists(asyncio.run(work()))


def test_settings_reach_the_functions_and_the_environment_stays_as_it_is() -> None:
    async def work() -> Answer:
        options = own_functions()
        settings = {**options.environment, "STOKER_SOURCES": "/data"}
        async with LocalExecutor(ExecutorOptions(functions=options.functions, environment=settings)) as executor:
            return await executor.call("variable", {"name": "STOKER_SOURCES"})

    assert asyncio.run(work()).result == {"value": "/data"}
    assert "STOKER_SOURCES" not in os.environ


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_go_when_the_process_that_started_them_does(how: signal.Signals, tmp_path: Path) -> None:
    program = f"""
import asyncio
from stoker_functions._executors.worker import LocalExecutor
from support.executor_checks import own_functions

async def main():
    async with LocalExecutor(own_functions(concurrency=2)) as executor:
        await executor.call("echo", {{}})
        await asyncio.gather(*(executor.call("hang", {{"file": {str(tmp_path)!r} + f"/{{n}}"}}) for n in range(2)))

asyncio.run(main())
"""
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL
    )
    try:

        async def both() -> list[int]:
            return [await written(tmp_path / name) for name in ("0", "1")]

        running = [psutil.Process(number) for number in asyncio.run(asyncio.wait_for(both(), _WAIT_SECONDS))]
        process.send_signal(how)
        process.wait(_WAIT_SECONDS)
        _, alive = psutil.wait_procs(running, _WAIT_SECONDS)
        assert not alive
    finally:
        process.kill()
        process.wait()


def test_a_fan_out_survives_workers_that_are_killed_in_the_middle(tmp_path: Path) -> None:
    """Each function that meets no file of its name leaves one and dies."""
    (tmp_path / "fragile.py").write_text(
        "import os, pathlib, signal\n"
        "async def once(event, *_):\n"
        "    mark = pathlib.Path(event['mark'])\n"
        "    if not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return {'samples': 1, 'objects': 1}\n"
    )
    tasks = [Task(name=f"{n}", function="once", event={"mark": str(tmp_path / f"{n}")}) for n in range(4)]
    options = ExecutorOptions(
        concurrency=2, functions={"once": "fragile:once"}, environment={"PYTHONPATH": str(tmp_path)}
    )

    async def work() -> tuple[list[Any], Driver]:
        async with LocalExecutor(options) as executor:
            driver = Driver(
                executor,
                FanoutConfig(retry=RetryPolicy(attempts=8, backoff_base_seconds=0.01, backoff_cap_seconds=0.01)),
            )
            return list(await driver.run(tasks)), driver

    results, driver = asyncio.run(work())
    assert results == [{"samples": 1, "objects": 1}] * 4
    assert (driver.report.retries, driver.report.samples, driver.report.dollars) == (4, 4, None)
