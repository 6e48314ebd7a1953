from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from stoker.abc import Answer
from stoker.errors import (
    ConfigError,
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
from stoker_functions._executors.gcf import GcfExecutor, deployed_size
from support.function_endpoints import Answering, Endpoint, answer_with, gcf_endpoint


class KnownTokens:
    """Stands for Google."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.forgotten: list[str] = []

    def __call__(self, audience: str) -> KnownTokens:
        self.asked.append(audience)
        return self

    async def current(self) -> str:
        return "an-identity"

    def discard(self, token: str) -> None:
        assert token == "an-identity"
        self.forgotten.append(self.asked[-1])


def called(
    answer_with: Answering | None = None, event: dict[str, Any] | None = None, **options: Any
) -> tuple[Answer | BaseException, Endpoint, KnownTokens]:
    """Call the function echo once; return its answer or the error, the endpoint and the tokens."""

    async def call() -> tuple[Answer | BaseException, Endpoint, KnownTokens]:
        tokens = KnownTokens()
        async with gcf_endpoint() as endpoint:
            endpoint.answer_with = answer_with
            async with GcfExecutor(ExecutorOptions(endpoint_url=endpoint.url, **options)) as executor:
                executor._tokens = tokens  # type: ignore[assignment]
                (outcome,) = await asyncio.gather(executor.call("echo", event or {}), return_exceptions=True)
            return outcome, endpoint, tokens

    return asyncio.run(call())


def test_an_event_is_posted_with_a_token_for_this_function_alone() -> None:
    answer, endpoint, tokens = called(event={"a": 1}, prefix="mine")
    assert isinstance(answer, NotFoundError)  # the endpoint knows the prefix stoker only
    ((request, body),) = endpoint.seen
    assert (request.method, request.path) == ("POST", "/mine-echo")
    assert request.headers["Authorization"] == "Bearer an-identity"
    assert request.headers["Content-Type"] == "application/json"
    assert json.loads(body) == {"a": 1}
    assert tokens.asked == [f"{endpoint.url}/mine-echo"]


def test_what_a_call_is_charged_is_its_time_in_tenths_at_the_size_of_the_function() -> None:
    answer, _, _ = called(memory_bytes=1 << 30, vcpus=0.5)
    assert isinstance(answer, Answer)
    assert answer.billed_seconds * 10 == pytest.approx(round(answer.billed_seconds * 10))
    assert answer.billed_seconds >= 0.1
    assert (answer.memory_bytes, answer.vcpus, answer.is_cold) == (1 << 30, 0.5, None)
    answer, _, _ = called()
    assert isinstance(answer, Answer)
    assert (answer.memory_bytes, answer.vcpus) == deployed_size("echo") == (2 << 30, 1.0)


def test_a_function_is_charged_at_the_size_that_it_is_deployed_with() -> None:
    sizes = (Path(__file__).parents[4] / "infra" / "terraform" / "functions.tf").read_text()
    rows = re.findall(r'^ +([\w-]+) += \{ cpu = (\d+), memory = "(\d+)Gi"', sizes, re.MULTILINE)
    assert len(rows) == 7
    for name, cpus, gigabytes in rows:
        assert deployed_size(name) == (int(gigabytes) << 30, float(cpus)), name
        executor = GcfExecutor(ExecutorOptions(region="here", project="mine"))
        assert executor.vcpus(name) == float(cpus)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (429, ThrottledError),
        (503, ThrottledError),
        (500, ServerError),
        (502, ServerError),
        (504, ServerError),
        (408, DeadlineError),
        (401, CredentialsError),
        (403, PermissionDeniedError),
        (404, NotFoundError),
        (413, StoreError),
        (302, StoreError),
    ],
)
def test_what_the_platform_refuses_is_a_typed_error(status: int, kind: type[Exception]) -> None:
    error, endpoint, _ = called(answer_with(status, "<html>no</html>", Retry_After="3", Location="/elsewhere"))
    assert type(error) is kind
    assert len(endpoint.seen) == 1
    if isinstance(error, ThrottledError):
        assert error.retry_after_seconds == 3


@pytest.mark.parametrize(
    ("status", "error_type", "kind"),
    [
        (400, "EventError", FunctionError),
        (500, "KeyError", FunctionError),
        (503, "TransientError", TransientError),
        (503, "ThrottledError", ThrottledError),
        (503, "ChecksumError", TransientError),
        (429, "SchemaError", FunctionError),
    ],
)
def test_what_a_function_itself_says_goes_before_the_status(
    status: int, error_type: str, kind: type[Exception]
) -> None:
    error, _, _ = called(answer_with(status, {"errorType": error_type, "errorMessage": "so it is"}))
    assert isinstance(error, kind)
    assert "so it is" in str(error)


@pytest.mark.parametrize("body", ["[]", "null", '{"errorType": 5}', '{"error": {}}', "{", "[" * 100_000])
def test_an_answer_that_is_not_a_functions_error_is_the_platforms(body: str) -> None:
    error, _, _ = called(answer_with(500, body))
    assert isinstance(error, ServerError)


@pytest.mark.parametrize("body", ["", "<html>", "[" * 100_000])
def test_a_success_without_json_is_not_the_function_s_and_is_retried(body: str) -> None:
    error, _, _ = called(answer_with(200, body))
    assert isinstance(error, ServerError)


def test_a_token_that_was_refused_is_not_used_again() -> None:
    _, endpoint, tokens = called(answer_with(401, ""))
    assert tokens.forgotten == [f"{endpoint.url}/stoker-echo"]


def test_an_event_that_google_would_refuse_is_not_sent() -> None:
    error, endpoint, _ = called(event={"text": "x" * (32 << 20)})
    assert isinstance(error, ConfigError)
    assert not endpoint.seen


def test_without_region_and_project_the_functions_cannot_be_found() -> None:
    for options in (ExecutorOptions(), ExecutorOptions(region="europe-west1"), ExecutorOptions(project="mine")):
        with pytest.raises(ConfigError, match="region and project"):
            GcfExecutor(options)


def test_functions_are_found_by_region_and_project() -> None:
    executor = GcfExecutor(ExecutorOptions(region="europe-west1", project="mine"))
    assert executor._root == "https://europe-west1-mine.cloudfunctions.net"


def test_a_service_of_cloud_run_has_a_host_of_its_own() -> None:
    executor = GcfExecutor(ExecutorOptions(endpoint_url="https://{function}-123456789012.europe-west1.run.app"))
    assert executor._url("pack") == "https://stoker-pack-123456789012.europe-west1.run.app"

    async def call() -> tuple[Answer, list[str], str]:
        tokens = KnownTokens()
        async with gcf_endpoint() as endpoint:
            options = ExecutorOptions(endpoint_url=f"{endpoint.url}/{{function}}")
            async with GcfExecutor(options) as executor:
                executor._tokens = tokens  # type: ignore[assignment]
                return await executor.call("echo", {"a": 1}), tokens.asked, endpoint.url

    answer, asked, url = asyncio.run(call())
    assert answer.result["a"] == 1
    assert asked == [f"{url}/stoker-echo"]


def test_an_endpoint_without_tls_gets_no_token() -> None:
    async def tokens(url: str) -> object:
        async with GcfExecutor(ExecutorOptions(endpoint_url=url)) as executor:
            return executor._tokens

    assert asyncio.run(tokens("http://127.0.0.1:8080")) is None
    assert asyncio.run(tokens("https://functions.example")) is not None
