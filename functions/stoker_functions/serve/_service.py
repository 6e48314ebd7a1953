"""The service that turns requests into responses, also after errors, and the handlers that platforms call."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import cache
from typing import Any, cast

from stoker._base.threads import PerLoop
from stoker._stores.access_token import TokenKeys
from stoker.abc import Store
from stoker.errors import (
    ConfigError,
    CredentialsError,
    DeadlineError,
    FetchError,
    NotFoundError,
    ObjectChangedError,
    StokerError,
    TransientError,
)
from stoker_functions._deployment import Deployment, DeploymentSettings, InvocationDeadline
from stoker_functions.serve._answers import (
    GOOGLE_ANSWER_BYTES,
    LAMBDA_ANSWER_BYTES,
    ServeConfig,
    ServedDatasets,
)
from stoker_functions.serve._messages import (
    AsgiApp,
    HttpError,
    Receive,
    Request,
    Response,
    from_lambda_url,
    parse_request,
    receive_asgi,
    to_asgi,
    to_lambda_url,
)

_log = logging.getLogger("stoker_functions.serve.service")
_BEARER = re.compile(r"[Bb]earer +([A-Za-z0-9._-]{1,10000})", re.ASCII)
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="stoker"'}

_RESERVED_SECONDS = 1.0  # time to send the client an error before the platform ends the invocation


class Service:
    """Answers requests for the data sets of a deployment.

    Construct it once per instance; it reads nothing before the first request. Answers may be cancelled.

    Args:
        config: data sets and limits.
        store: function from the URL of a data set to its open store, which the caller closes.
        clock: function that returns POSIX time in seconds, for the expiry of tokens.

    Example:
        >>> service = Service(ServeConfig(datasets={"train": "data"}), stoker.open_store)
        >>> response = await service.answer(Request(method="GET", path="/v1/train/manifest"))
        >>> response.status
        200
    """

    def __init__(
        self, config: ServeConfig, store: Callable[[str], Store], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._config, self._clock = config, clock
        self._library = PerLoop(lambda: ServedDatasets(config, store))

    async def answer(self, request: Request, seconds: float = math.inf) -> Response:
        """Return the response to a request that the platform has authenticated.

        Args:
            request: the request.
            seconds: time limit of the answer; default ``answer_seconds`` of the config.
        """
        return await self._answer_request(request, seconds, token_is_needed=False)

    async def answer_with_token(self, request: Request, seconds: float = math.inf) -> Response:
        """Return the response to a request, which must have a bearer token for the data set.

        Args:
            request: the request.
            seconds: time limit of the answer; default ``answer_seconds`` of the config.
        """
        return await self._answer_request(request, seconds, token_is_needed=True)

    async def _answer_request(self, request: Request, seconds: float, *, token_is_needed: bool) -> Response:
        """Return the response, also to errors of stoker; other exceptions go up to the platform."""
        seconds = min(seconds, self._config.answer_seconds)
        try:
            allowed = self._token_datasets(request) if token_is_needed else None
            ask = parse_request(request)
            if allowed is not None and ask.dataset not in allowed:
                raise HttpError(403, "forbidden", "the token is not for this data set")
            async with asyncio.timeout(seconds):
                return await self._library.get().answer(ask, request)
        except StokerError as error:
            refusal = _http_error_of(error)
        except TimeoutError:
            refusal = _http_error_of(DeadlineError(f"no answer to {request.path!r} within {seconds:g} s"))
        return refusal.response(with_body=request.method != "HEAD")

    def _token_datasets(self, request: Request) -> tuple[str, ...]:
        """Return the names of the data sets that a request's token is for."""
        if self._config.token_keys is None:
            raise ConfigError("this function checks tokens, and STOKER_TOKEN_KEYS is not set: set it to the keys")
        match = _BEARER.fullmatch(request.headers.get("authorization", ""))
        try:
            return self._config.token_keys.verify(match[1] if match else "", self._clock()).datasets
        except CredentialsError:
            raise HttpError(401, "unauthorized", "a valid token is needed", headers=_CHALLENGE) from None


def _http_error_of(error: StokerError) -> HttpError:
    """Return the HTTP error for an error: it tells the client what to do, and nothing about the bucket."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, NotFoundError):
        return HttpError(404, "not-found", "the data set has no such version or object")
    if isinstance(error, TransientError | FetchError | ObjectChangedError):
        _log.warning("a request got 503 and will be tried again: %s", error)
        wanted_seconds = error.retry_after_seconds if isinstance(error, TransientError) else None
        headers = {"Retry-After": str(min(60, max(1, math.ceil(wanted_seconds or 0))))}
        return HttpError(503, "unavailable", "the bucket did not answer in time, or failed; try again", headers=headers)
    _log.error("a request failed: %s: %s", type(error).__name__, error)
    return HttpError(500, "failed", "the request could not be answered; the function's log says why")


async def serve_url(event: object, deployment: Deployment, deadline: InvocationDeadline) -> dict[str, Any]:
    """Answer a request to a Lambda function URL that the platform has authenticated.

    Raises:
        EventError: the event is not a request.
    """
    return await _serve_url(_service(deployment, LAMBDA_ANSWER_BYTES).answer, event, deadline)


async def serve_url_with_token(event: object, deployment: Deployment, deadline: InvocationDeadline) -> dict[str, Any]:
    """Answer a request to a public Lambda function URL, if it has a valid token.

    Raises:
        EventError: the event is not a request.
    """
    return await _serve_url(_service(deployment, LAMBDA_ANSWER_BYTES).answer_with_token, event, deadline)


async def _serve_url(
    answer: Callable[[Request, float], Awaitable[Response]], event: object, deadline: InvocationDeadline
) -> dict[str, Any]:
    request = from_lambda_url(cast("Mapping[str, Any]", event))
    return to_lambda_url(await answer(request, deadline.remaining_seconds() - _RESERVED_SECONDS))


async def serve_scope(scope: MutableMapping[str, Any], receive: Receive, deployment: Deployment) -> AsgiApp:
    """Answer an ASGI request that the platform has authenticated."""
    return to_asgi(await _service(deployment, GOOGLE_ANSWER_BYTES).answer(await receive_asgi(scope, receive)))


async def serve_scope_with_token(scope: MutableMapping[str, Any], receive: Receive, deployment: Deployment) -> AsgiApp:
    """Answer a public ASGI request, if it has a valid token."""
    request = await receive_asgi(scope, receive)
    return to_asgi(await _service(deployment, GOOGLE_ANSWER_BYTES).answer_with_token(request))


def create_config(settings: DeploymentSettings, answer_bytes: int) -> ServeConfig:
    """Return the configuration of a deployment on a platform whose responses have at most ``answer_bytes``.

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
    """Return the service of a deployment; an instance has one."""
    return Service(create_config(deployment.settings, answer_bytes), deployment.unmetered_store)
