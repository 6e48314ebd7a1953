from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from stoker.abc import Answer
from stoker.errors import (
    ConfigError,
    ConnectionLostError,
    CredentialsError,
    DeadlineError,
    FunctionError,
    NotFoundError,
    PermissionDeniedError,
    ServerError,
    StoreError,
    ThrottledError,
    TransientError,
)
from stoker.fanout import ExecutorOptions
from stoker_functions._executors.lambda_ import LambdaExecutor
from support.function_endpoints import Answering, Endpoint, answer_with, lambda_endpoint


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stoker")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-secret")
    monkeypatch.delenv("AWS_PROFILE", raising=False)


def called(
    answer_with: Answering | None = None, event: dict[str, Any] | None = None, log: str | None = None, **options: Any
) -> tuple[Answer | BaseException, Endpoint]:
    """Call the function echo once; return its answer or the error, and the endpoint with what it saw."""

    async def call() -> tuple[Answer | BaseException, Endpoint]:
        async with lambda_endpoint() as endpoint:
            endpoint.answer_with = answer_with
            endpoint.log = endpoint.log if log is None else log
            given = {"endpoint_url": endpoint.url, "region": "eu-west-1", **options}
            async with LambdaExecutor(ExecutorOptions(**given)) as executor:
                (outcome,) = await asyncio.gather(executor.call("echo", event or {}), return_exceptions=True)
            return outcome, endpoint

    return asyncio.run(call())


def test_the_call_is_signed_for_lambda_waits_for_the_result_and_requests_the_bill() -> None:
    answer, endpoint = called(event={"text": "é"})
    assert isinstance(answer, Answer)
    assert (answer.billed_seconds, answer.memory_bytes, answer.is_cold) == (1.353, 2 << 30, True)
    ((request, body),) = endpoint.seen
    assert request.path == "/2015-03-31/functions/stoker-echo/invocations"
    assert "/eu-west-1/lambda/aws4_request" in request.headers["Authorization"]
    assert request.headers["X-Amz-Invocation-Type"] == "RequestResponse"
    assert request.headers["X-Amz-Log-Type"] == "Tail"
    assert json.loads(body) == {"text": "é"}


def test_functions_are_named_by_the_prefix() -> None:
    _, endpoint = called(prefix="mine")
    assert endpoint.seen[0][0].match_info["name"] == "mine-echo"


def test_without_a_report_the_time_until_the_answer_is_what_is_known() -> None:
    answer, _ = called(log="nothing")
    assert isinstance(answer, Answer)
    assert 0 < answer.billed_seconds < 60
    assert (answer.memory_bytes, answer.is_cold) == (0, None)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (429, "TooManyRequestsException", ThrottledError),
        (502, "EC2ThrottledException", ThrottledError),
        (502, "ENILimitReachedException", ThrottledError),
        (500, "ServiceException", ServerError),
        (502, "EC2UnexpectedException", ServerError),
        (409, "ResourceConflictException", ServerError),
        (502, "ResourceNotReadyException", ServerError),
        (408, "SnapStartTimeoutException", DeadlineError),
        (404, "ResourceNotFoundException", NotFoundError),
        (403, "AccessDeniedException", PermissionDeniedError),
        (403, "ExpiredTokenException", CredentialsError),
        (403, "UnrecognizedClientException", CredentialsError),
        (403, "InvalidSignatureException", CredentialsError),
        (413, "RequestTooLargeException", StoreError),
        (400, "InvalidRequestContentException", StoreError),
    ],
)
def test_a_refusal_is_a_typed_error_and_is_not_repeated(status: int, code: str, kind: type[Exception]) -> None:
    said = {"Type": "User", "Message": "because", "message": "because"}
    error, endpoint = called(answer_with(status, said, x_amzn_ErrorType=code, Retry_After="7"))
    assert type(error) is kind
    assert "stoker-echo: " in str(error)
    assert code in str(error)
    assert len(endpoint.seen) == 1
    if isinstance(error, ThrottledError):
        assert error.retry_after_seconds == 7


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        ({"errorType": "KeyError", "errorMessage": "'label'", "stackTrace": []}, FunctionError, "KeyError: 'label'"),
        ({"errorType": "ChecksumError", "errorMessage": "damaged"}, TransientError, "gave up: damaged"),
        (
            {"errorMessage": "2026-11-21T10:00:00Z 1 Task timed out after 900.00 seconds"},
            DeadlineError,
            "ran out of time",
        ),
        (
            {"errorType": "Sandbox.Timedout", "errorMessage": "Error: Task timed out after 3.00 seconds"},
            DeadlineError,
            "ran out of time",
        ),
        (
            {"errorType": "Runtime.ExitError", "errorMessage": "Error: Runtime exited with error: signal: killed"},
            ConnectionLostError,
            "signal: killed",
        ),
        ({"errorType": "Runtime.OutOfMemory", "errorMessage": "no memory"}, FunctionError, "Runtime.OutOfMemory"),
        ({"errorType": "Runtime.ImportModuleError", "errorMessage": "No module"}, FunctionError, "ImportModuleError"),
        ({"errorMessage": "something"}, FunctionError, "Unhandled: something"),
        ({}, FunctionError, "Unhandled: no message"),
        ({"errorType": None, "errorMessage": None}, FunctionError, "Unhandled: no message"),
    ],
    ids=str,
)
def test_how_a_function_ended_is_a_typed_error(said: dict[str, Any], kind: type[Exception], message: str) -> None:
    error, _ = called(answer_with(200, said, X_Amz_Function_Error="Unhandled"))
    assert isinstance(error, kind)
    assert message in str(error)


def test_an_answer_without_json_is_not_the_function_s() -> None:
    error, _ = called(answer_with(200, "<html>welcome</html>"))
    assert isinstance(error, ServerError)


def test_a_connection_that_breaks_is_lost_and_is_not_repeated_by_botocore() -> None:
    async def abort(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    error, endpoint = called(abort)
    assert isinstance(error, ConnectionLostError)
    assert len(endpoint.seen) == 1


def test_a_redirect_is_not_followed() -> None:
    async def redirect(request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": str(request.url)})

    error, endpoint = called(redirect)
    assert isinstance(error, StoreError)
    assert len(endpoint.seen) == 1


def test_a_function_that_takes_longer_than_the_options_allow_is_a_deadline() -> None:
    async def never(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    error, _ = called(never, timeout_seconds=0.05)
    assert isinstance(error, DeadlineError)


def test_an_event_that_lambda_would_refuse_is_not_sent() -> None:
    error, endpoint = called(event={"text": "x" * (6 << 20)})
    assert isinstance(error, ConfigError)
    assert "plan smaller parts" in str(error)
    assert not endpoint.seen


def test_secrets_that_an_endpoint_echoes_are_in_no_error() -> None:
    async def echo(request: web.Request) -> web.StreamResponse:
        return web.json_response({"Message": str(dict(request.headers))}, status=400)

    error, endpoint = called(echo)
    signature = endpoint.seen[0][0].headers["Authorization"].rpartition("Signature=")[2]
    assert "session-secret" not in str(error)
    assert signature not in str(error)


def entered(**options: Any) -> None:
    async def enter() -> None:
        async with LambdaExecutor(ExecutorOptions(**options)) as executor:
            await executor.call("echo", {})

    asyncio.run(enter())


def test_the_region_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "ap-south-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    _, endpoint = called(region=None)
    assert "/ap-south-1/lambda/aws4_request" in endpoint.seen[0][0].headers["Authorization"]


def test_a_missing_region_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(ConfigError, match="region is not known"):
        entered()


def test_missing_credentials_are_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(CredentialsError, match="no AWS credentials were found"):
        entered(region="us-east-1", endpoint_url="http://127.0.0.1:9")


def test_an_unknown_profile_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match="nobody"):
        entered(region="us-east-1")


def test_an_endpoint_that_is_no_url_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Invalid endpoint: nowhere"):
        entered(region="us-east-1", endpoint_url="nowhere")
    monkeypatch.setenv("AWS_ENDPOINT_URL_LAMBDA", "nowhere either")
    with pytest.raises(ConfigError, match="Invalid endpoint: nowhere either"):
        entered(region="us-east-1")
