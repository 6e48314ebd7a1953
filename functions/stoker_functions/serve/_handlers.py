"""What the platforms' adapters call: the service of a deployment, for a function URL's event or an ASGI request."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import cache
from typing import Any, cast

from stoker._stores.access_token import TokenKeys
from stoker_functions._deployment import Deadline, Deployment
from stoker_functions._settings import Settings
from stoker_functions.serve._asgi import AsgiApp, from_asgi, to_asgi
from stoker_functions.serve._config import GOOGLE_ANSWER_BYTES, LAMBDA_ANSWER_BYTES, ServeConfig
from stoker_functions.serve._lambda_url import from_lambda_url, to_lambda_url
from stoker_functions.serve._service import Service

__all__ = ["config_of", "serve_scope", "serve_scope_with_token", "serve_url", "serve_url_with_token"]

_RESERVED_SECONDS = 1.0  # to tell the client that it should try again


async def serve_url(event: object, deployment: Deployment, deadline: Deadline) -> dict[str, Any]:
    """Answer a request to a Lambda function URL that the platform has let through.

    Raises:
        EventError: the event is no request.
    """
    request = from_lambda_url(cast("Mapping[str, Any]", event))
    service = _service(deployment, LAMBDA_ANSWER_BYTES)
    return to_lambda_url(await service.answer(request, deadline.remaining_seconds() - _RESERVED_SECONDS))


async def serve_url_with_token(event: object, deployment: Deployment, deadline: Deadline) -> dict[str, Any]:
    """Answer a request to a Lambda function URL that anybody may call, if it has a token of ours.

    Raises:
        EventError: the event is no request.
    """
    request = from_lambda_url(cast("Mapping[str, Any]", event))
    service = _service(deployment, LAMBDA_ANSWER_BYTES)
    return to_lambda_url(await service.answer_with_token(request, deadline.remaining_seconds() - _RESERVED_SECONDS))


async def serve_scope(scope: MutableMapping[str, Any], deployment: Deployment) -> AsgiApp:
    """Answer an ASGI request that the platform has let through."""
    return to_asgi(await _service(deployment, GOOGLE_ANSWER_BYTES).answer(from_asgi(scope)))


async def serve_scope_with_token(scope: MutableMapping[str, Any], deployment: Deployment) -> AsgiApp:
    """Answer an ASGI request from anybody, if it has a token of ours."""
    return to_asgi(await _service(deployment, GOOGLE_ANSWER_BYTES).answer_with_token(from_asgi(scope)))


def config_of(settings: Settings, answer_bytes: int) -> ServeConfig:
    """Return the configuration of a deployment on a platform that sends at most ``answer_bytes``.

    Raises:
        ConfigError: ``STOKER_TOKEN_KEYS`` or ``STOKER_DATASETS`` is not valid.
    """
    return ServeConfig(
        datasets=settings.datasets,
        token_keys=TokenKeys.parse(settings.token_keys) if settings.token_keys else None,
        answer_bytes=answer_bytes,
        memory_bytes=settings.memory_bytes // 4,
    )


@cache
def _service(deployment: Deployment, answer_bytes: int) -> Service:
    """Return the service of a deployment, of which an instance has one."""
    return Service(config_of(deployment.settings, answer_bytes), deployment.served)
