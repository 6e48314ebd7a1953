from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker_local.functions import (
    FunctionCloud,
    FunctionFault,
    FunctionFaultKind,
    FunctionFaultPlan,
    QueueSpec,
    Schedule,
    ServiceError,
)
from support.function_cloud import cloud_of, function, is_running
from support.waiting import until

KILL, FREEZE = FunctionFaultKind.KILL, FunctionFaultKind.FREEZE
DUPLICATE, RECLAIM, THROTTLE = FunctionFaultKind.DUPLICATE, FunctionFaultKind.RECLAIM, FunctionFaultKind.THROTTLE


def is_frozen(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def instances() -> list[psutil.Process]:
    """Return the child processes that use the Runtime API."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "awslambdaric" in child.cmdline():
                found.append(child)
    return found


async def result(cloud: FunctionCloud, name: str, event: Any = None) -> Any:
    outcome = await cloud.invoke(name, event)
    assert not outcome.error_type, outcome.payload
    return json.loads(outcome.payload)


def struck(*script: FunctionFault | None) -> FunctionFaultPlan:
    return FunctionFaultPlan(script=script)


def test_an_instance_stands_still_between_invocations() -> None:
    async def scenario() -> None:
        async with cloud_of(function("tick")) as cloud:
            pid = (await result(cloud, "tick"))["pid"]
            await until(lambda: is_frozen(pid))
            turns = psutil.Process(pid).num_ctx_switches()
            await asyncio.sleep(0.2)
            # Its thread counts milliseconds: it would have had hundreds of turns.
            assert psutil.Process(pid).num_ctx_switches() == turns
            counted = (await result(cloud, "tick"))["ticks"]
            while (await result(cloud, "tick"))["ticks"] == counted:
                pass  # it continues at the same point

    asyncio.run(scenario())


def test_the_instance_that_worked_last_works_next_and_the_others_are_taken_back() -> None:
    async def scenario() -> None:
        async with cloud_of(function("sleep"), idle_seconds=2.0) as cloud:
            both = await asyncio.gather(*(result(cloud, "sleep", {"seconds": 0.3}) for _ in range(2)))
            pids = {each["pid"] for each in both}
            assert len(pids) == 2
            last = (await result(cloud, "sleep", {"seconds": 0}))["pid"]
            (other,) = pids - {last}
            calling = asyncio.create_task(result(cloud, "sleep", {"seconds": 25}))
            await until(lambda: not is_running(other))
            figures = await until(lambda: (seen := cloud.statistics()["sleep"]).instances == 1 and seen)
            assert (figures.cold_starts, figures.reclaimed, figures.busy) == (2, 1, 1)
            assert is_running(last)
            calling.cancel()

    asyncio.run(scenario())


def test_a_function_sees_its_own_variables_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        about = function("about", environment={"MINE": "1"})
        async with cloud_of(about, environment={"ROLE": "2"}) as cloud:
            seen = (await result(cloud, "about"))["environment"]
            assert "SECRET_OF_THIS_TEST" not in seen
            assert (seen["MINE"], seen["ROLE"]) == ("1", "2")
            assert seen["AWS_LAMBDA_FUNCTION_NAME"] == "about"
            assert seen["AWS_LAMBDA_FUNCTION_MEMORY_SIZE"] == "512"
            assert seen["AWS_LAMBDA_LOG_GROUP_NAME"] == "/aws/lambda/about"
            assert seen["AWS_REGION"] == "us-east-1"
            allowed = {"MINE", "ROLE", "PATH", "LANG", "TZ", "HOME", "TMPDIR", "_HANDLER", "LC_CTYPE"}
            extra = {name for name in seen if not name.startswith(("AWS_", "LAMBDA_")) and name not in allowed}
            assert extra <= {"_X_AMZN_TRACE_ID"}
            assert "AWS_SECRET_ACCESS_KEY" not in seen

    monkeypatch.setenv("SECRET_OF_THIS_TEST", "hush")
    asyncio.run(scenario())


def test_a_kill_in_mid_invocation_is_an_error_and_the_next_call_a_cold_start() -> None:
    async def scenario() -> None:
        kill = FunctionFault(kind=KILL, after_seconds=0.2)
        async with cloud_of(function("sleep"), faults=struck(None, kill)) as cloud:
            first = (await result(cloud, "sleep", {"seconds": 0}))["pid"]
            outcome = await cloud.invoke("sleep", {"seconds": 60})
            assert outcome.error_type == "Runtime.ExitError"
            assert b"signal: killed" in outcome.payload
            assert not is_running(first)
            assert (await result(cloud, "sleep", {"seconds": 0}))["pid"] != first
            figures = cloud.statistics()["sleep"]
            assert (figures.cold_starts, figures.errors, figures.faults) == (2, 1, {"kill": 1})
            assert figures.billed_seconds >= 0.2

    asyncio.run(scenario())


def test_a_fault_that_comes_too_late_strikes_nothing() -> None:
    async def scenario() -> None:
        plan = struck(FunctionFault(kind=KILL, after_seconds=50), FunctionFault(kind=FREEZE, after_seconds=50))
        async with cloud_of(function("about"), faults=plan) as cloud:
            pids = [(await result(cloud, "about"))["pid"] for _ in range(3)]
            assert len(set(pids)) == 1
            await until(lambda: is_frozen(pids[0]))
            assert cloud.statistics()["about"].faults == {}

    asyncio.run(scenario())


def test_a_freeze_in_mid_invocation_only_takes_time() -> None:
    async def scenario() -> None:
        freeze = FunctionFault(kind=FREEZE, freeze_seconds=0.6)
        async with cloud_of(function("sleep"), faults=struck(None, freeze)) as cloud:
            pid = (await result(cloud, "sleep", {"seconds": 0}))["pid"]
            outcome = await cloud.invoke("sleep", {"seconds": 0.1})
            assert not outcome.error_type
            assert outcome.seconds >= 0.6
            assert json.loads(outcome.payload)["pid"] == pid
            assert cloud.statistics()["sleep"].faults == {"freeze": 1}

    asyncio.run(scenario())


def test_a_frozen_invocation_runs_into_its_deadline_and_leaves_nothing() -> None:
    async def scenario() -> None:
        freeze = FunctionFault(kind=FREEZE, freeze_seconds=60)
        async with cloud_of(function("sleep", timeout_seconds=1.0), faults=struck(freeze)) as cloud:
            invoking = asyncio.create_task(cloud.invoke("sleep", {"seconds": 0.5}))
            await until(instances)
            assert (await invoking).error_type == "Sandbox.Timedout"
            assert cloud.statistics()["sleep"].faults == {"freeze": 1}
            assert not instances()

    asyncio.run(scenario())


def test_a_duplicate_delivers_the_same_event_twice_and_answers_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "calls"
        duplicate = FunctionFault(kind=DUPLICATE)
        counter = function("count", environment={"COUNT_FILE": str(file)}, concurrency=1)
        async with cloud_of(counter, faults=struck(duplicate), tmp="folder") as cloud:
            assert await result(cloud, "count", {"n": 1}) == {"batchItemFailures": []}
            await until(lambda: cloud.statistics()["count"].invocations == 2)
            assert [json.loads(line) for line in file.read_text().splitlines()] == [{"n": 1}, {"n": 1}]
            assert cloud.statistics()["count"].faults == {"duplicate": 1}

    asyncio.run(scenario())


def test_a_reclaim_makes_the_next_call_cold_and_a_throttle_refuses_it() -> None:
    async def scenario() -> None:
        plan = struck(None, FunctionFault(kind=RECLAIM), FunctionFault(kind=THROTTLE))
        async with cloud_of(function("about"), faults=plan) as cloud:
            first = (await result(cloud, "about"))["pid"]
            assert (await result(cloud, "about"))["pid"] != first
            with pytest.raises(ServiceError, match="Rate Exceeded"):
                await cloud.invoke("about", None)
            await until(lambda: not is_running(first))
            cloud.inject(FunctionFaultPlan())
            assert (await result(cloud, "about"))["calls"] == 2
            assert cloud.statistics()["about"].faults == {"reclaim": 1, "throttle": 1}

    asyncio.run(scenario())


def test_an_instance_that_is_killed_from_outside_swallows_no_call() -> None:
    async def scenario() -> None:
        async with cloud_of(function("about")) as cloud:
            for _ in range(5):
                pid = (await result(cloud, "about"))["pid"]
                os.kill(pid, signal.SIGKILL)
                outcome = await cloud.invoke("about", None)
                assert outcome.error_type in ("", "Runtime.ExitError")
            os.kill((await result(cloud, "about"))["pid"], signal.SIGKILL)
            await until(lambda: cloud.statistics()["about"].instances == 0)
            assert (await result(cloud, "about"))["calls"] == 1

    asyncio.run(scenario())


def test_a_caller_that_goes_away_does_not_stop_its_function() -> None:
    async def scenario() -> None:
        async with cloud_of(function("sleep")) as cloud:
            calling = asyncio.create_task(cloud.invoke("sleep", {"seconds": 0.5}))
            await until(lambda: cloud.statistics()["sleep"].busy)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            await until(lambda: cloud.statistics()["sleep"].invocations == 1)
            assert cloud.statistics()["sleep"].errors == 0

    asyncio.run(scenario())


def left_behind() -> tuple[int, set[str], set[Path]]:
    """How many files are open, which threads run, and which folders stand for a ``/tmp``."""
    threads = {thread.name for thread in threading.enumerate()}
    return len(list(Path("/proc/self/fd").iterdir())), threads, set(Path(tempfile.gettempdir()).glob("stoker-tmp-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's files")
def test_the_block_leaves_no_file_thread_or_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where no other test makes folders

    async def scenario() -> None:
        files, threads, folders = left_behind()
        async with cloud_of(function("about"), function("leave"), tmp="folder") as cloud:
            for _ in range(2):
                await result(cloud, "about")
                await cloud.invoke("leave", {"code": 1})
            cloud.reclaim()
            await result(cloud, "about")
        await until(lambda: left_behind()[1] <= threads)
        assert (left_behind()[0], left_behind()[2]) == (files, folders)

    asyncio.run(scenario())


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def test_nothing_is_left_when_the_block_is_left_by_an_error() -> None:
    left: dict[str, Any] = {}

    async def scenario() -> None:
        async with cloud_of(function("about", url_auth="NONE"), function("sleep"), function("spawn")) as cloud:
            left["pids"] = [(await result(cloud, "about"))["pid"], await result(cloud, "spawn")]
            left["urls"] = [cloud.url, cloud.function_urls["about"]]
            asyncio.get_running_loop().create_task(cloud.invoke("sleep", {"seconds": 60}))
            await until(lambda: cloud.statistics()["sleep"].busy)
            raise LookupError("of the test")

    with pytest.raises(LookupError, match="of the test"):
        asyncio.run(scenario())
    for pid in left["pids"]:
        deadline = time.monotonic() + 60
        while is_running(pid):  # the function's child is killed, but not waited for
            assert time.monotonic() < deadline
            time.sleep(0.005)
    for url in left["urls"]:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address_of(url)).close()


def test_a_process_that_was_forked_from_this_one_does_not_hold_up_the_end() -> None:
    async def scenario() -> None:
        async with cloud_of(function("about")) as cloud:
            await result(cloud, "about")
            forked.start()

    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    try:
        asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        forked.kill()
        forked.join()
        forked.close()


def test_nothing_is_left_when_the_block_is_cancelled_during_a_cold_start() -> None:
    async def scenario() -> None:
        async with cloud_of(function("slow_code.handler")) as cloud:
            asyncio.get_running_loop().create_task(cloud.invoke("handler", None))
            await until(lambda: cloud.statistics()["handler"].instances)
            await asyncio.sleep(60)

    async def outer() -> None:
        running = asyncio.create_task(scenario())
        await asyncio.sleep(0.5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(outer())


def test_whatever_strikes_every_event_is_handled_or_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        file, everything = tmp_path / "calls", set(range(60))
        counter = function("count", environment={"COUNT_FILE": str(file)}, on_failure="failed")
        chances = {KILL: 0.15, FREEZE: 0.1, DUPLICATE: 0.15, RECLAIM: 0.15, THROTTLE: 0.1}
        async with cloud_of(
            counter,
            tmp="folder",
            queues=(QueueSpec(name="failed"),),
            schedules=tuple(
                Schedule(name=str(n), function="count", rate="rate(1 day)", input={"n": n}) for n in everything
            ),
            faults=FunctionFaultPlan(probabilities=chances, within_seconds=0.02, freeze_seconds=0.05, seed=1),
        ) as cloud:
            await asyncio.gather(*(cloud.fire(str(n)) for n in everything))
            await until(lambda: not cloud.statistics()["count"].busy)  # duplicates come late
            handled = {json.loads(line)["n"] for line in file.read_text().splitlines()}
            given_up = {json.loads(body)["requestPayload"]["n"] for body in cloud.queues["failed"].bodies}
            assert handled | given_up == everything
            figures = cloud.statistics()["count"]
            assert {"duplicate", "reclaim", "throttle"} <= set(figures.faults)
            assert figures.peak_instances <= 4

    asyncio.run(scenario())


def test_the_same_faults_hit_the_same_invocations_again() -> None:
    async def outcomes() -> list[str]:
        plan = FunctionFaultPlan(probabilities={KILL: 0.3, RECLAIM: 0.2}, within_seconds=0.0, seed=11)
        async with cloud_of(function("sleep"), faults=plan) as cloud:
            return [(await cloud.invoke("sleep", {"seconds": 0.2})).error_type for _ in range(7)]

    first = asyncio.run(outcomes())
    assert 0 < first.count("Runtime.ExitError") < 7
    assert asyncio.run(outcomes()) == first
