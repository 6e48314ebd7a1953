"""One suite for every executor: worker processes, Lambda's real runtime, functions over HTTP, and Ray."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from stoker.abc import Executor
from stoker.errors import ConfigError
from stoker.fanout import ExecutorOptions, open_executor
from stoker_local import running_server
from stoker_local.functions import FunctionSpec
from support.executor_checks import CHECKS, own_functions
from support.function_cloud import cloud_of
from support.function_endpoints import gcf_endpoint
from support.tiny_functions import FUNCTIONS

TESTS = Path(__file__).parents[1]
RAY_SECONDS = 240.0  # all checks take 20 s; each has a limit of its own


@pytest.fixture(scope="module")
def lambda_url() -> Iterator[str]:
    """The address of a function cloud with the tiny functions in Lambda's runtime."""
    functions = [
        FunctionSpec(
            name=f"stoker-{name}",
            handler=f"support.tiny_lambda.{name}",
            task_root=str(TESTS),
            memory_mb=1024,
            timeout_seconds=60.0,
            concurrency=12,
        )
        for name in FUNCTIONS
    ]
    # The checks meet the functions in folders of this machine's /tmp.
    with running_server(lambda: cloud_of(*functions, tmp="folder")) as cloud:
        yield cloud.url


Place = Callable[[pytest.FixtureRequest], AbstractAsyncContextManager[Executor]]


@asynccontextmanager
async def local(_: pytest.FixtureRequest) -> AsyncIterator[Executor]:
    yield open_executor("local", own_functions(concurrency=2))


@asynccontextmanager
async def on_lambda(request: pytest.FixtureRequest) -> AsyncIterator[Executor]:
    url = request.getfixturevalue("lambda_url")
    yield open_executor("lambda", ExecutorOptions(endpoint_url=url, region="us-east-1"))


@asynccontextmanager
async def gcf(_: pytest.FixtureRequest) -> AsyncIterator[Executor]:
    async with gcf_endpoint() as endpoint:
        yield open_executor("gcf", ExecutorOptions(endpoint_url=endpoint.url))


PLACES: dict[str, Place] = {"local": local, "lambda": on_lambda, "gcf": gcf}


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stoker")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "stoker-secret")


@pytest.mark.parametrize("place", PLACES)
def test_an_executor_does_what_all_must(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async def checked() -> None:
        async with PLACES[place](request) as executor, executor:
            for name, check in CHECKS.items():
                folder = tmp_path / name
                folder.mkdir()
                try:
                    await check(executor, folder)
                except BaseException as failure:
                    failure.add_note(f"in the check {name}")
                    raise

    asyncio.run(checked())


@pytest.mark.parametrize("place", PLACES)
def test_an_executor_calls_nothing_before_it_is_entered_or_after_it_is_left(
    place: str, request: pytest.FixtureRequest
) -> None:
    async def called() -> None:
        async with PLACES[place](request) as executor:
            with pytest.raises(ConfigError, match="inside its 'async with' block"):
                await executor.call("echo", {})
            async with executor:
                pass
            with pytest.raises(ConfigError, match="inside its 'async with' block"):
                await executor.call("echo", {})

    asyncio.run(called())


@pytest.mark.parametrize("place", PLACES)
def test_an_executor_has_the_requested_name(place: str, request: pytest.FixtureRequest) -> None:
    async def name() -> str:
        async with PLACES[place](request) as executor:
            return executor.name

    assert asyncio.run(name()) == place


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'stoker[ray]'")
def test_a_ray_cluster_of_this_machine_does_what_all_executors_must() -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "support.executor_checks", "ray"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=RAY_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line in CHECKS] == list(CHECKS)  # Ray talks, too
