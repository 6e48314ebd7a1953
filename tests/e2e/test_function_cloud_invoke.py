from __future__ import annotations

import asyncio
import base64
import json
from io import BytesIO
from typing import Any

import boto3  # type: ignore[import-untyped]  # it ships no types
import pytest
from botocore.exceptions import ClientError

from stoker_local import KeyPair, running_server
from stoker_local.functions import QueueSpec
from support.function_cloud import cloud_of, function, lambda_client
from support.waiting import until


async def call(client: Any, name: str, event: Any = None, **changes: Any) -> dict[str, Any]:
    """Invoke a function through the API and read its answer."""
    answer = await client.invoke(FunctionName=name, Payload=json.dumps(event), **changes)
    payload = await answer["Payload"].read()
    return {**answer, "Payload": json.loads(payload) if payload else None}


def test_a_function_is_called_and_its_instance_used_again() -> None:
    async def scenario() -> None:
        async with cloud_of(function("about")) as cloud, lambda_client(cloud) as client:
            context = base64.b64encode(b'{"custom": {"who": "me\\n"}}').decode()
            first = await call(client, "about", {}, ClientContext=context)
            assert (first["StatusCode"], first["ExecutedVersion"]) == (200, "$LATEST")
            seen = first["Payload"]
            assert seen["request_id"] == first["ResponseMetadata"]["RequestId"]
            assert (seen["calls"], seen["memory"], seen["client"]) == (1, "512", {"who": "me\n"})
            assert 0 < seen["remaining_milliseconds"] <= 30_000
            for name in (seen["arn"], "000000000000:function:about", "about:$LATEST"):
                again = await call(client, name, {})
                assert again["Payload"]["pid"] == seen["pid"]
            figures = cloud.statistics()["about"]
            assert (figures.invocations, figures.cold_starts, figures.errors) == (4, 1, 0)
            assert figures.billed_seconds > 0
            assert figures.dollars > 0

    asyncio.run(scenario())


def test_boto3_calls_functions_from_a_program_without_an_event_loop() -> None:
    with running_server(lambda: cloud_of(function("echo"))) as cloud:
        client = boto3.client(
            "lambda",
            endpoint_url=cloud.url,
            region_name="us-east-1",
            aws_access_key_id="stoker",
            aws_secret_access_key="stoker-secret",
        )
        answer = client.invoke(FunctionName="echo", Payload=b'{"a": "\xc3\xbc"}')
        assert json.loads(answer["Payload"].read()) == {"a": "ü"}
        assert json.loads(client.invoke(FunctionName="echo")["Payload"].read()) == {}
        client.close()
        assert cloud.statistics()["echo"].invocations == 2


def test_an_error_of_the_function_comes_back_with_its_type_message_and_trace() -> None:
    async def scenario() -> None:
        async with cloud_of(function("error"), function("deep_error")) as cloud, lambda_client(cloud) as client:
            answer = await call(client, "error", {"message": "no such sample"}, LogType="Tail")
            assert (answer["StatusCode"], answer["FunctionError"]) == (200, "Unhandled")
            assert answer["Payload"]["errorType"] == "ValueError"
            assert answer["Payload"]["errorMessage"] == "no such sample"
            assert "lambda_code.py" in answer["Payload"]["stackTrace"][0]
            log = base64.b64decode(answer["LogResult"]).decode()
            assert "[ERROR] ValueError: no such sample" in log
            deep = await call(client, "deep_error", {"message": "x" * 5000, "depth": 200})
            assert deep["Payload"]["errorType"] == "LookupError"
            assert cloud.statistics()["deep_error"].instances == 1  # it has survived its error

    asyncio.run(scenario())


def test_the_end_of_the_log_comes_with_the_answer() -> None:
    async def scenario() -> None:
        async with cloud_of(function("say")) as cloud, lambda_client(cloud) as client:
            answer = await call(client, "say", {"text": "hello"}, LogType="Tail")
            lines = base64.b64decode(answer["LogResult"]).decode().splitlines()
            request_id = answer["ResponseMetadata"]["RequestId"]
            assert lines[0] == f"START RequestId: {request_id} Version: $LATEST"
            assert lines.count("hello") == 2
            assert lines[-1].startswith(f"REPORT RequestId: {request_id}\tDuration: ")
            assert "\tInit Duration: " in lines[-1]
            answer = await call(client, "say", {"text": "y" * 9000}, LogType="Tail")
            assert len(base64.b64decode(answer["LogResult"])) == 4096
            assert "Init Duration" not in base64.b64decode(answer["LogResult"]).decode()
            assert "hello" in cloud.log("say")

    asyncio.run(scenario())


def test_who_cannot_sign_cannot_call() -> None:
    strangers: list[tuple[dict[str, Any], str]] = [
        ({"aws_secret_access_key": "wrong"}, "InvalidSignatureException"),
        ({"aws_access_key_id": "nobody"}, "UnrecognizedClientException"),
        ({"aws_access_key_id": "old", "aws_secret_access_key": "s"}, "ExpiredTokenException"),
    ]

    async def scenario() -> None:
        keys = (
            KeyPair(access_key="stoker", secret_key="stoker-secret"),
            KeyPair(access_key="old", secret_key="s", expires_at=1.0),
        )
        async with cloud_of(function("echo"), keys=keys) as cloud:
            for changes, code in strangers:
                async with lambda_client(cloud, **changes) as client:
                    with pytest.raises(ClientError) as refusal:
                        await call(client, "echo")
                assert refusal.value.response["Error"]["Code"] == code
                assert refusal.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
            assert cloud.statistics()["echo"].cold_starts == 0

    asyncio.run(scenario())


REFUSED: list[tuple[dict[str, Any], str, int]] = [
    ({"FunctionName": "nothing"}, "ResourceNotFoundException", 404),
    ({"FunctionName": "echo", "Qualifier": "7"}, "ResourceNotFoundException", 404),
    ({"FunctionName": "echo", "Payload": b"{"}, "InvalidRequestContentException", 400),
    ({"FunctionName": "echo", "Payload": b"\xff"}, "InvalidRequestContentException", 400),
    ({"FunctionName": "echo", "Payload": b"[" * 100_000}, "InvalidRequestContentException", 400),
    ({"FunctionName": "echo", "ClientContext": "e30K!"}, "InvalidParameterValueException", 400),
    ({"FunctionName": "echo", "ClientContext": "AA" * 2000}, "InvalidParameterValueException", 400),
    ({"FunctionName": "echo", "InvocationType": "Later"}, "InvalidParameterValueException", 400),
    ({"FunctionName": "echo", "Payload": BytesIO(b'"' + b"x" * 6_291_455 + b'"')}, "RequestTooLargeException", 413),
    (
        {"FunctionName": "echo", "InvocationType": "Event", "Payload": BytesIO(b'"' + b"x" * (1 << 20) + b'"')},
        "RequestTooLargeException",
        413,
    ),
]


def test_a_call_that_lambda_refuses_runs_nothing() -> None:
    async def scenario() -> None:
        async with cloud_of(function("echo")) as cloud, lambda_client(cloud) as client:
            for arguments, code, status in REFUSED:
                with pytest.raises(ClientError) as refusal:
                    await client.invoke(**arguments)
                assert refusal.value.response["Error"]["Code"] == code
                assert refusal.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
            assert cloud.statistics()["echo"].cold_starts == 0

    asyncio.run(scenario())


HOSTILE = [
    b"POST /2015-03-31/functions/echo/invocations HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999999\r\n",
    b"POST /2015-03-31/functions/echo/invocations HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n",
    b"POST /2015-03-31/functions/%FF%00/invocations HTTP/1.1\r\nHost: a\r\n",
    b"GET /2015-03-31/functions/echo/invocations HTTP/1.1\r\nHost: a\r\n",
    b"POST /2018-06-01/runtime/invocation/x/response HTTP/1.1\r\nHost: a\r\n",
    b"POST /../../etc/passwd HTTP/1.1\r\nHost: a\r\n",
    b"PUT http://elsewhere/2015-03-31/functions/echo/invocations HTTP/1.1\r\nHost: a\r\n",
    b"nonsense\r\n",
]


def test_a_hostile_request_is_refused_and_breaks_nothing() -> None:
    async def scenario() -> None:
        async with cloud_of(function("echo")) as cloud:
            host, _, port = cloud.url.removeprefix("http://").rpartition(":")
            for head in HOSTILE:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(head + b"Connection: close\r\n\r\n")
                assert 400 <= int((await reader.readline()).split()[1]) < 500
                writer.close()
            assert not (await cloud.invoke("echo", None)).error_type

    asyncio.run(scenario())


def test_a_dry_run_checks_and_runs_nothing() -> None:
    async def scenario() -> None:
        async with cloud_of(function("echo")) as cloud, lambda_client(cloud) as client:
            answer = await call(client, "echo", InvocationType="DryRun")
            assert answer["StatusCode"] == 204
            assert cloud.statistics()["echo"].cold_starts == 0

    asyncio.run(scenario())


def test_one_call_more_than_the_concurrency_is_throttled() -> None:
    async def scenario() -> None:
        sleeper = function("sleep", concurrency=2)
        async with cloud_of(sleeper) as cloud, lambda_client(cloud) as client:
            calls = [call(client, "sleep", {"seconds": 0.5}) for _ in range(3)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, BaseException)]
            assert len(refused) == 1
            assert isinstance(refused[0], client.exceptions.TooManyRequestsException)
            assert refused[0].response["Reason"] == "ReservedFunctionConcurrentInvocationLimitExceeded"
            pids = {answer["Payload"]["pid"] for answer in answers if isinstance(answer, dict)}
            assert len(pids) == 2
            figures = cloud.statistics()["sleep"]
            assert (figures.throttles, figures.peak_instances, figures.busy) == (1, 2, 0)

    asyncio.run(scenario())


def test_an_event_is_accepted_retried_twice_and_given_to_the_queue_of_failures() -> None:
    async def scenario() -> None:
        failing = function("error", on_failure="failed")
        async with cloud_of(failing, queues=(QueueSpec(name="failed"),)) as cloud, lambda_client(cloud) as client:
            answer = await call(client, "error", {"message": "never"}, InvocationType="Event")
            assert answer["StatusCode"] == 202
            (letter,) = await cloud.queues["failed"].receive(1)
            record = json.loads(letter.body)
            assert record["requestPayload"] == {"message": "never"}
            assert record["requestContext"]["requestId"] == answer["ResponseMetadata"]["RequestId"]
            assert record["requestContext"]["condition"] == "RetriesExhausted"
            assert record["requestContext"]["approximateInvokeCount"] == 3
            assert record["responsePayload"]["errorType"] == "ValueError"
            figures = cloud.statistics()["error"]
            assert (figures.invocations, figures.errors) == (3, 3)
            assert [h.kind for h in cloud.events()].count("retry") == 2

    asyncio.run(scenario())


def test_events_wait_for_concurrency_instead_of_being_throttled() -> None:
    async def scenario() -> None:
        sleeper = function("sleep", concurrency=1)
        async with cloud_of(sleeper) as cloud, lambda_client(cloud) as client:
            for _ in range(4):
                await call(client, "sleep", {"seconds": 0.05}, InvocationType="Event")
            await until(lambda: cloud.statistics()["sleep"].invocations == 4)
            figures = cloud.statistics()["sleep"]
            assert (figures.throttles, figures.errors, figures.peak_instances) == (0, 0, 1)

    asyncio.run(scenario())
