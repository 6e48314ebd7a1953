from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import pytest

from stoker_local.functions import FunctionCloud, Outcome
from stoker_local.functions._processes import choose_tmp
from support.function_cloud import cloud_of, function

Tmp = Literal["tmpfs", "folder"]


def error_of(outcome: Outcome) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(outcome.payload)
    assert error["errorType"] == outcome.error_type
    return error


async def good(cloud: FunctionCloud, name: str, event: Any) -> Any:
    outcome = await cloud.invoke(name, event)
    assert not outcome.error_type, outcome.payload
    return json.loads(outcome.payload)


def test_an_invocation_ends_at_its_deadline() -> None:
    async def scenario() -> None:
        async with cloud_of(function("sleep", timeout_seconds=1.0)) as cloud:
            outcome = await cloud.invoke("sleep", {"seconds": 60})
            assert outcome.error_type == "Sandbox.Timedout"
            message = error_of(outcome)["errorMessage"]
            assert message == f"RequestId: {outcome.request_id} Error: Task timed out after 1.00 seconds"
            assert outcome.billed_milliseconds >= 1000
            assert b"Status: timeout" in outcome.log
            assert cloud.statistics()["sleep"].instances == 0
            assert (await cloud.invoke("sleep", {"seconds": 60})).error_type == "Sandbox.Timedout"
            assert cloud.statistics()["sleep"].cold_starts == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("code", "message"),
    [(3, "Runtime exited with error: exit status 3"), (0, "Runtime exited without providing a reason")],
)
def test_a_process_that_exits_is_a_runtime_error_with_its_log(code: int, message: str) -> None:
    async def scenario() -> None:
        async with cloud_of(function("leave")) as cloud:
            outcome = await cloud.invoke("leave", {"code": code})
            assert outcome.error_type == "Runtime.ExitError"
            assert error_of(outcome)["errorMessage"].endswith(f"Error: {message}")
            assert b"about to leave" in outcome.log

    asyncio.run(scenario())


def test_memory_beyond_the_limit_is_out_of_memory_and_the_end_of_the_instance() -> None:
    async def scenario() -> None:
        async with cloud_of(function("allocate", memory_mb=128)) as cloud:
            assert await good(cloud, "allocate", {"mebibytes": 8}) == 8
            assert cloud.statistics()["allocate"].instances == 1
            outcome = await cloud.invoke("allocate", {"mebibytes": 150})
            assert outcome.error_type == "Runtime.OutOfMemory"
            assert error_of(outcome)["errorMessage"].endswith("Runtime exited with error: signal: killed")
            assert outcome.memory_bytes > 128 << 20
            assert await good(cloud, "allocate", {"mebibytes": 1}) == 1  # a new one
            runaway = await cloud.invoke("allocate", {"mebibytes": 4096})
            assert runaway.error_type == "Runtime.OutOfMemory"
            assert cloud.statistics()["allocate"].cold_starts == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("tmp", ["tmpfs", "folder"])
def test_tmp_is_private_and_ends_with_its_instance(tmp: Tmp, tmp_path: Path) -> None:
    if tmp == "tmpfs" and choose_tmp("auto") != "tmpfs":
        pytest.skip("this system gives processes no mount namespace of their own")

    async def scenario() -> None:
        async with cloud_of(function("fill_tmp", tmp_mb=512), tmp=tmp) as cloud:
            assert cloud.tmp == tmp
            first = await good(cloud, "fill_tmp", {"mebibytes": 2})
            assert (first["before"], first["written"], first["error"]) == ([], 2 << 20, None)
            again = await good(cloud, "fill_tmp", {"mebibytes": 1})
            assert again["before"] == ["filler"]
            cloud.reclaim()
            assert (await good(cloud, "fill_tmp", {"mebibytes": 1}))["before"] == []
            assert (first["folder"] == "/tmp") is (tmp == "tmpfs")  # noqa: S108  (its own)
            folder.append(first["folder"])

    folder: list[str] = []
    asyncio.run(scenario())
    assert not (Path(folder[0]) / "filler").exists()


def test_no_more_than_1024_files_are_open_at_once() -> None:
    async def scenario() -> None:
        async with cloud_of(function("open_files")) as cloud:
            opened = await good(cloud, "open_files", {"files": 5000})
            assert opened["error"] == "Too many open files"
            assert 900 < opened["opened"] < 1024

    asyncio.run(scenario())


def test_a_private_tmp_shows_only_the_code(tmp_path: Path) -> None:
    if choose_tmp("auto") != "tmpfs" or not tmp_path.is_relative_to("/tmp"):  # noqa: S108  (the machine's)
        pytest.skip("this system gives processes no /tmp of their own, or the tests none of its")

    async def scenario() -> None:
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "looking.py").write_text(
            "import os\ndef handler(event, context):\n    return [os.listdir(path) for path in event]\n"
        )
        (tmp_path / "secret").write_text("hush")
        looking = function("looking.handler", task_root=str(tmp_path / "code"))
        async with cloud_of(looking) as cloud:
            above, code = await good(cloud, "handler", [str(tmp_path), str(tmp_path / "code")])
            assert above == ["code"]
            assert "looking.py" in code

    asyncio.run(scenario())


@pytest.mark.parametrize(("tmp", "error"), [("tmpfs", "No space left on device"), ("folder", "File too large")])
def test_a_full_tmp_is_an_error_in_the_function(tmp: Tmp, error: str) -> None:
    if tmp == "tmpfs" and choose_tmp("auto") != "tmpfs":
        pytest.skip("this system gives processes no mount namespace of their own")

    async def scenario() -> None:
        async with cloud_of(function("fill_tmp", tmp_mb=512, memory_mb=128), tmp=tmp) as cloud:
            filled = await good(cloud, "fill_tmp", {"mebibytes": 513})
            assert filled["error"] == error
            assert filled["written"] <= 512 << 20

    asyncio.run(scenario())


def test_a_result_that_is_too_large_is_an_error() -> None:
    async def scenario() -> None:
        async with cloud_of(function("result_of")) as cloud:
            largest = 6_291_556
            assert len(await good(cloud, "result_of", {"bytes": largest - 2})) == largest - 2
            outcome = await cloud.invoke("result_of", {"bytes": largest})
            assert outcome.error_type == "Function.ResponseSizeTooLarge"
            assert "6291556 bytes" in error_of(outcome)["errorMessage"]
            assert len(await good(cloud, "result_of", {"bytes": 1})) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("handler", "error_type", "message"),
    [
        ("no_such_module.handler", "Runtime.ImportModuleError", "No module named 'no_such_module'"),
        ("lambda_code.no_such_function", "Runtime.HandlerNotFound", "Handler 'no_such_function' missing"),
        ("broken_code.handler", "RuntimeError", "this module is broken"),
    ],
)
def test_a_function_that_cannot_start_says_why_every_time(handler: str, error_type: str, message: str) -> None:
    async def scenario() -> None:
        async with cloud_of(function(handler)) as cloud:
            for _ in range(2):
                outcome = await cloud.invoke(handler.rpartition(".")[2], None)
                assert outcome.error_type == error_type
                assert message in error_of(outcome)["errorMessage"]
                assert outcome.billed_milliseconds > 0
            figures = next(iter(cloud.statistics().values()))
            assert (figures.cold_starts, figures.instances, figures.errors) == (2, 0, 2)

    asyncio.run(scenario())


def test_a_cold_start_that_takes_too_long_is_an_error() -> None:
    async def scenario() -> None:
        async with cloud_of(function("slow_code.handler"), init_seconds=1.0) as cloud:
            outcome = await cloud.invoke("handler", None)
            assert outcome.error_type == "Sandbox.Timedout"
            assert "Init timed out after 1.00 seconds" in error_of(outcome)["errorMessage"]
            assert outcome.init_seconds is not None

    asyncio.run(scenario())
