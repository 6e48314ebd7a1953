from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from stoker_local.functions._sandbox import InstanceState, RuntimeApi
from stoker_local.functions._statistics import Invocation

EVENT = Invocation(request_id="id", payload=b'{"a": 1}', client_context='{"custom": {}}')


@dataclass
class Runtime:
    """A scripted runtime client."""

    api: RuntimeApi
    session: aiohttp.ClientSession
    root: str
    polls: list[InstanceState] = field(default_factory=list)

    async def post(self, path: str, body: bytes = b"null") -> int:
        async with self.session.post(f"{self.root}/{path}", data=body) as answer:
            return answer.status

    async def poll(self) -> tuple[int, Any, bytes]:
        async with self.session.get(f"{self.root}/invocation/next") as answer:
            return answer.status, answer.headers, await answer.read()


@asynccontextmanager
async def runtime() -> AsyncIterator[Runtime]:
    polls: list[InstanceState] = []
    api = RuntimeApi(arn="arn:f", on_poll=lambda: polls.append(api.state))
    async with api.serve("127.0.0.1") as address, aiohttp.ClientSession() as session:
        yield Runtime(api, session, f"http://{address}/2018-06-01/runtime", polls)


def run(scenario: Callable[[Runtime], Awaitable[None]]) -> None:
    async def main() -> None:
        async with runtime() as each:
            await asyncio.wait_for(scenario(each), 60)

    asyncio.run(main())


def test_a_poll_waits_for_an_event_and_its_answer_is_the_events() -> None:
    async def scenario(client: Runtime) -> None:
        polling = asyncio.create_task(client.poll())
        await client.api.poll_future
        assert (client.api.state, client.polls) == (InstanceState.FROZEN, [InstanceState.FROZEN])
        before = time.time()
        client.api.begin(EVENT, timeout_seconds=5.0)
        after = time.time()
        status, headers, body = await polling
        assert (status, body, headers["Content-Type"]) == (200, EVENT.payload, "application/json")
        assert headers["Lambda-Runtime-Aws-Request-Id"] == "id"
        assert headers["Lambda-Runtime-Invoked-Function-Arn"] == "arn:f"
        assert headers["Lambda-Runtime-Client-Context"] == EVENT.client_context
        begun = int(headers["Lambda-Runtime-Deadline-Ms"]) / 1000 - 5.0
        assert before - 0.001 < begun <= after
        assert await client.post("invocation/id/response", b'"done"') == 202
        assert client.api.result_future.result().payload == b'"done"'
        assert client.api.state is InstanceState.ANSWERED

    run(scenario)


def test_an_error_comes_with_its_type() -> None:
    async def scenario(client: Runtime) -> None:
        polling = asyncio.create_task(client.poll())
        await client.api.poll_future
        client.api.begin(EVENT, timeout_seconds=5.0)
        await polling
        body = json.dumps({"errorType": "ValueError", "errorMessage": "no"}).encode()
        assert await client.post("invocation/id/error", body) == 202
        answer = await client.api.result_future
        assert (answer.error_type, answer.payload) == ("ValueError", body)

    run(scenario)


def test_an_error_that_is_malformed_is_an_error_all_the_same() -> None:
    async def scenario(client: Runtime) -> None:
        for body in (b"", b"[]", b"not json", b'{"errorType": null}', b"\xff"):
            api = RuntimeApi(arn="arn:f", on_poll=lambda: None)
            async with api.serve("127.0.0.1") as address:
                url = f"http://{address}/2018-06-01/runtime/init/error"
                async with client.session.post(url, data=body) as answer:
                    assert answer.status == 202
            assert api.result_future.result().error_type == "Unhandled"

    run(scenario)


def test_what_is_out_of_turn_is_refused() -> None:
    async def scenario(client: Runtime) -> None:
        assert await client.post("invocation/id/response") == 400  # there is no such invocation
        polling = asyncio.create_task(client.poll())
        await client.api.poll_future
        assert await client.post("init/error") == 403
        status, _, _ = await client.poll()
        assert status == 403
        client.api.begin(EVENT, timeout_seconds=5.0)
        await polling
        assert await client.post("invocation/another/response") == 400
        assert await client.post("invocation/id/response") == 202
        assert await client.post("invocation/id/response") == 403
        assert await client.post("nonsense") == 404

    run(scenario)


def test_an_event_for_an_instance_that_has_just_died_breaks_nothing() -> None:
    async def scenario(client: Runtime) -> None:
        polling = asyncio.create_task(client.poll())
        await client.api.poll_future
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await client.session.close()
        client.api.begin(EVENT, timeout_seconds=5.0)  # its process has died, which others will notice
        assert client.api.state is InstanceState.BUSY
        assert not client.api.result_future.done()

    run(scenario)
