"""The function of a node: settings in its environment, and errors of unsupported events."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

from stoker.errors import ConfigError, EventError, ThrottledError
from stoker_functions._deployment import Deployment, DeploymentSettings, InvocationDeadline
from stoker_functions._instance import answer_request
from stoker_functions._warm_node import RESERVED_BYTES, shard_limit_bytes, warm_node
from stoker_warm._auth import WarmSecret
from stoker_warm._events import NodeReport, NodeTask, WakeEvent

SECRET = WarmSecret.generate()
ENVIRONMENT = {"STOKER_WARM_SECRET": SECRET.reveal(), "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "1024"}


def settings(**changes: str) -> DeploymentSettings:
    """Return a node's environment, without data sets or buckets."""
    return DeploymentSettings.from_environment({**ENVIRONMENT, **changes})


def event(**changes: Any) -> dict[str, Any]:
    return {**WakeEvent(node="warm-3", proxy="127.0.0.1:1", task=NodeTask.WARM).to_event(), **changes}


async def called(deployment: Deployment, given: object, seconds: float = 10.0) -> dict[str, Any]:
    return await warm_node(given, deployment, InvocationDeadline.after(seconds))


def test_a_node_has_its_memory_for_shards_but_for_what_the_program_takes() -> None:
    assert shard_limit_bytes(settings()) == (1 << 30) - RESERVED_BYTES
    assert shard_limit_bytes(settings(AWS_LAMBDA_FUNCTION_MEMORY_SIZE="193")) == 1 << 20
    assert shard_limit_bytes(settings(STOKER_WARM_SHARD_BYTES="100MiB")) == 100 << 20


def test_a_deprecated_variable_is_read_and_logged_and_its_present_name_goes_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert settings(STOKER_WARM_SHELF_BYTES="100MiB").warm_shard_bytes == 100 << 20
    assert caplog.messages == ["STOKER_WARM_SHELF_BYTES is deprecated: write STOKER_WARM_SHARD_BYTES"]
    assert settings(STOKER_WARM_SHELF_BYTES="100MiB", STOKER_WARM_SHARD_BYTES="1MiB").warm_shard_bytes == 1 << 20


@pytest.mark.parametrize(
    "changes", [{"AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "192"}, {"STOKER_WARM_SHARD_BYTES": "0"}], ids=str
)
def test_a_node_without_memory_for_shards_is_an_error(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="no room for shards"):
        shard_limit_bytes(settings(**changes))


def test_a_limit_that_is_no_number_of_bytes_is_named() -> None:
    with pytest.raises(ConfigError, match="STOKER_WARM_SHARD_BYTES"):
        settings(STOKER_WARM_SHARD_BYTES="much")


def test_without_a_secret_a_node_says_how_to_make_one_that_it_takes() -> None:
    with pytest.raises(ConfigError, match="STOKER_WARM_SECRET") as caught:
        asyncio.run(called(Deployment(settings(STOKER_WARM_SECRET="")), event()))
    command = re.findall(r"`stoker (.*?)`", str(caught.value))[0].split()
    made = subprocess.run([sys.executable, "-m", "stoker.cli", *command], capture_output=True, text=True, check=True)
    # With the end of its line, as it was stored.
    assert asyncio.run(called(Deployment(settings(STOKER_WARM_SECRET=made.stdout)), event()))


@pytest.mark.parametrize("text", ["c2hvcnQ", "not base64url!", "x" * 41])
def test_what_is_no_secret_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match="secret") as caught:
        asyncio.run(called(Deployment(settings(STOKER_WARM_SECRET=text)), event()))
    assert text not in str(caught.value)


def test_settings_do_not_show_the_secret() -> None:
    assert SECRET.reveal() not in repr(settings())


def test_an_instance_is_one_node_from_one_invocation_to_the_next_and_another_instance_is_another() -> None:
    async def check() -> None:
        one, other = Deployment(settings()), Deployment(settings())
        reports = [NodeReport.parse(await called(deployment, event())) for deployment in (one, one, other)]
        assert reports[0] == reports[1]
        assert reports[0].instance != reports[2].instance
        assert (reports[0].held_bytes, reports[0].limit_bytes) == (0, (1 << 30) - RESERVED_BYTES)

    asyncio.run(check())


@pytest.mark.parametrize("given", [None, [], {}, event(node="../etc"), event(task="rob"), event(more=1)])
def test_an_event_that_is_none_of_a_proxy_is_refused(given: object) -> None:
    with pytest.raises(EventError, match="warm node's event"):
        asyncio.run(called(Deployment(settings()), given))


def test_an_instance_refuses_a_second_concurrent_request_so_that_google_tries_another() -> None:
    async def check() -> None:
        greeted, left = asyncio.Event(), asyncio.Event()

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            greeted.set()
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
            left.set()

        server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        serve = event(task="serve", proxy=f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        deployment = Deployment(settings())
        first = asyncio.create_task(answer_request(warm_node, json.dumps(serve).encode(), deployment))
        await greeted.wait()
        with pytest.raises(ThrottledError, match="concurrency of 1"):
            await called(deployment, serve)
        answer, status = await answer_request(warm_node, json.dumps(serve).encode(), deployment)
        assert (status, answer["errorType"]) == (429, "ThrottledError")
        first.cancel()
        await asyncio.wait([first])
        await left.wait()
        server.close()
        await server.wait_closed()
        assert (await answer_request(warm_node, json.dumps(event()).encode(), deployment))[1] == 200

    asyncio.run(check())
