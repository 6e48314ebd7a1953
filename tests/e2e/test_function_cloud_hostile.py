"""Hostile functions: the cloud survives anything that they answer, write or leave behind."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from typing import Any

import aiohttp
import pytest
from botocore.exceptions import ClientError

from stoker_local.functions import FunctionCloud, GoogleSpec, QueueSpec, Schedule
from support.function_cloud import GOOGLE_CODE, cloud_of, function, lambda_client

DEEP = "[" * 100_000
ERROR = "invocation/ID/error"


async def spoken(cloud: FunctionCloud, *requests: tuple[str, str, str]) -> tuple[str, bytes]:
    outcome = await cloud.invoke("speak", {"requests": requests})
    return outcome.error_type, outcome.payload


ERRORS = [
    "",
    "garbage",
    DEEP,
    "5",
    '{"errorType": 5}',
    '{"errorType": ["Runtime.Unknown"]}',
    '{"errorType": ""}',
    '{"errorType": "Runtime.\\ud800"}',
    '{"errorType": "two\\nlines"}',
    json.dumps({"errorType": "x" * 300}),
]


def test_an_error_of_any_form_is_one_that_can_be_read_and_the_cloud_continues() -> None:
    async def scenario() -> None:
        async with cloud_of(function("speak")) as cloud:
            for body in ERRORS:
                error_type, payload = await spoken(cloud, ("POST", ERROR, body))
                assert error_type == "Unhandled"
                assert json.loads(payload)["errorType"] == "Unhandled"
            assert await spoken(cloud) == ("", b"[]")
            assert cloud.statistics()["speak"].errors == len(ERRORS)

    asyncio.run(scenario())


def test_a_function_that_answers_out_of_turn_is_refused_and_its_own_answer_counts() -> None:
    async def scenario() -> None:
        async with cloud_of(function("speak")) as cloud:
            result = "invocation/ID/response"
            twice = [("POST", result, '"first"'), ("POST", result, '"second"'), ("POST", ERROR, "{}")]
            assert await spoken(cloud, *twice) == ("", b'"first"')
            strange = [("POST", "init/error", "{}"), ("GET", "invocation/next", ""), ("POST", "nonsense", "")]
            assert await spoken(cloud, *strange) == ("", b"[403, 403, 404]")
            assert await spoken(cloud, ("POST", "invocation/other/response", "1")) == ("", b"[400]")

    asyncio.run(scenario())


def test_an_event_too_large_for_its_queue_is_dropped_and_reported() -> None:
    async def scenario() -> None:
        request = ("POST", ERROR, json.dumps({"errorType": "Large", "errorMessage": "y" * 900_000}))
        event = {"requests": [request]}
        schedule = Schedule(name="s", function="speak", rate="rate(1 day)", input=event)
        failing = function("speak", on_failure="failed", retries=0)
        async with cloud_of(failing, queues=(QueueSpec(name="failed"),), schedules=(schedule,)) as cloud:
            await cloud.fire("s")
            assert cloud.queues["failed"].bodies == []
            assert [each.kind for each in cloud.events()][-2:] == ["dropped", "undelivered"]
            assert not (await cloud.invoke("speak", {"requests": []})).error_type

    asyncio.run(scenario())


def test_what_writes_without_end_does_not_hold_up_the_cloud() -> None:
    async def scenario() -> None:
        async with cloud_of(function("babble"), function("echo")) as cloud:
            pid = json.loads((await cloud.invoke("babble", None)).payload)
            try:
                for _ in range(20):
                    assert len((await cloud.invoke("babble", None)).log) <= 4096
                    assert not (await cloud.invoke("echo", None)).error_type
            finally:
                os.kill(pid, signal.SIGKILL)

    asyncio.run(scenario())


RESULTS: list[dict[str, Any]] = [
    {"statusCode": 200, "headers": {"x": "\ud800"}},
    {"statusCode": 200, "headers": {"content-type": "\x01"}},
    {"statusCode": 200, "cookies": ["a=\x7f"]},
    {"statusCode": 200, "body": "\ud800"},
]


def test_a_response_that_http_cannot_carry_is_a_bad_gateway() -> None:
    async def scenario() -> None:
        async with cloud_of(function("page", url_auth="NONE")) as cloud, aiohttp.ClientSession() as session:
            for result in RESULTS:
                async with session.post(cloud.function_urls["page"], json=result) as answer:
                    assert answer.status == 502

    asyncio.run(scenario())


def test_a_client_context_that_is_nested_too_deeply_is_refused() -> None:
    async def scenario() -> None:
        async with cloud_of(function("echo")) as cloud, lambda_client(cloud) as client:
            context = base64.b64encode(DEEP[:2600].encode()).decode()
            with pytest.raises(ClientError, match="Client context is not base64 of JSON"):
                await client.invoke(FunctionName="echo", ClientContext=context)

    asyncio.run(scenario())


async def status_of(url: str, head: bytes) -> int:
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


def test_a_request_for_another_host_is_refused() -> None:
    async def scenario() -> None:
        mirror = GoogleSpec(name="mirror", target="mirror", source=GOOGLE_CODE)
        async with cloud_of(function("page", url_auth="NONE"), google=(mirror,)) as cloud:
            for url in (cloud.function_urls["page"], cloud.google_urls["mirror"]):
                assert await status_of(url, b"GET http://elsewhere/x") == 400
                assert await status_of(url, b"GET //elsewhere/x") == 200  # a path, if an odd one
            assert cloud.statistics()["mirror"].errors == 0

    asyncio.run(scenario())
