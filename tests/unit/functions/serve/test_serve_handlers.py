"""What the adapters call: a deployment's settings, its stores and its service."""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stoker._stores.access_token import Grant, format_key
from stoker.errors import ConfigError, EventError
from stoker_functions._deployment import Deployment, DeploymentSettings, InvocationDeadline
from stoker_functions.serve import LAMBDA_ANSWER_BYTES, TokenKeys
from stoker_functions.serve._service import (
    create_config,
    serve_scope,
    serve_scope_with_token,
    serve_url,
    serve_url_with_token,
)
from support.datasets import pack_numbers
from support.served_requests import ask, serving

SECRET = b"s" * 32


def deployed(use: Callable[[Deployment], Awaitable[Any]]) -> Any:
    """Return what ``use`` does with a deployment that serves ``ds`` and accepts tokens."""
    settings = DeploymentSettings(datasets={"ds": pack_numbers(20)}, token_keys=format_key("k", SECRET))

    async def main() -> Any:
        deployment = Deployment(settings)
        try:
            return await use(deployment)
        finally:
            await deployment.close()

    return asyncio.run(main())


def event(headers: dict[str, str] | None = None) -> dict[str, Any]:
    path = "/v1/ds/batches/3"
    http = {"method": "GET", "path": path}
    return {
        "version": "2.0",
        "rawPath": path,
        "rawQueryString": "size=4",
        "headers": headers or {},
        "requestContext": {"http": http},
    }


def scope(headers: dict[str, str] | None = None) -> dict[str, Any]:
    pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return {"method": "GET", "path": "/v1/ds/batches/3", "query_string": b"size=4", "headers": pairs}


async def receive() -> dict[str, Any]:
    return {"type": "http.request"}


async def status_of(app: Any) -> int:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app({}, None, send)
    return int(sent[0]["status"])


def bearer(start_seconds: int) -> dict[str, str]:
    grant = Grant(datasets=("ds",), not_before_seconds=start_seconds, expires_seconds=start_seconds + 600)
    return {"authorization": f"Bearer {TokenKeys({'k': SECRET}).sign(grant)}"}


def test_a_function_url_is_answered_from_the_deployments_data_sets() -> None:
    async def use(deployment: Deployment) -> None:
        answer = await serve_url(event(), deployment, InvocationDeadline.after(30))
        assert (answer["statusCode"], answer["isBase64Encoded"]) == (200, True)
        config = serving(deployment.settings.datasets["ds"])
        wanted = await asyncio.to_thread(ask, config, "/v1/ds/batches/3", "size=4")
        assert b64decode(answer["body"]) == wanted.body

    deployed(use)


def test_with_a_token_only_those_that_have_one_are_answered() -> None:
    async def use(deployment: Deployment) -> None:
        for headers, status in ((None, 401), (bearer(0), 401), (bearer(int(time.time())), 200)):
            answer = await serve_url_with_token(event(headers), deployment, InvocationDeadline.after(30))
            assert answer["statusCode"] == status
            assert await status_of(await serve_scope_with_token(scope(headers), receive, deployment)) == status
        assert await status_of(await serve_scope(scope(), receive, deployment)) == 200

    deployed(use)


def test_what_is_no_request_is_an_error_of_the_event() -> None:
    async def use(deployment: Deployment) -> None:
        for handler in (serve_url, serve_url_with_token):
            with pytest.raises(EventError):
                await handler({"Records": []}, deployment, InvocationDeadline.after(30))

    deployed(use)


def test_an_invocation_without_time_is_put_off() -> None:
    async def use(deployment: Deployment) -> None:
        answer = await serve_url(event(), deployment, InvocationDeadline.after(0.5))
        assert answer["statusCode"] == 503

    deployed(use)


def test_a_deployments_settings_are_those_of_its_service() -> None:
    secret = "QUFB" * 12
    settings = DeploymentSettings(datasets={"train": "memory://x/y"}, token_keys=f"k:{secret}", memory_bytes=1 << 30)
    config = create_config(settings, LAMBDA_ANSWER_BYTES)
    assert (config.datasets, config.memory_bytes) == ({"train": "memory://x/y"}, 256 << 20)
    assert config.token_keys is not None
    assert secret not in repr(config)
    assert create_config(DeploymentSettings(), 1).token_keys is None
    with pytest.raises(ConfigError):
        create_config(DeploymentSettings(token_keys="k:short"), 1)
