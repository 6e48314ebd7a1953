"""From a request to its response, whatever happens on the way; and the handlers that platforms call for it."""

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
from stoker_functions._deployment import Deadline, Deployment, Settings
from stoker_functions.serve._answers import (
    GOOGLE_ANSWER_BYTES,
    LAMBDA_ANSWER_BYTES,
    Library,
    ServeConfig,
)
from stoker_functions.serve._messages import (
    AsgiApp,
    Refusal,
    Request,
    Response,
    from_asgi,
    from_lambda_url,
    parse,
    to_asgi,
    to_lambda_url,
)

_log = logging.getLogger("stoker_functions.serve.service")
_BEARER = re.compile(r"[Bb]earer +([A-Za-z0-9._-]{1,10000})", re.ASCII)
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="stoker"'}

_RESERVED_SECONDS = 1.0  # to tell the client that it should try again


class Service:
    """Answers requests for the data sets of a deployment. Made once per instance; nothing is read before the first.

    Args:
        config: what is served, and how much at a time.
        store: opens the store of a data set by its URL, or returns the one that is open; who gives it, closes it.
        clock: POSIX time, for tokens.

    Cancelling an answer leaves nothing behind.
    """

    def __init__(
        self, config: ServeConfig, store: Callable[[str], Store], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._config, self._clock = config, clock
        self._library = PerLoop(lambda: Library(config, store))

    async def answer(self, request: Request, seconds: float = math.inf) -> Response:
        """Return the response to a request of somebody whom the platform has let in.

        Args:
            request: what is asked.
            seconds: that there are left for it.
        """
        return await self._answered(request, seconds, token_is_needed=False)

    async def answer_with_token(self, request: Request, seconds: float = math.inf) -> Response:
        """Return the response to a request, which must carry a token of ours for the data set."""
        return await self._answered(request, seconds, token_is_needed=True)

    async def _answered(self, request: Request, seconds: float, *, token_is_needed: bool) -> Response:
        """Turn what goes wrong into a response; what nobody foresaw is left to the platform."""
        seconds = min(seconds, self._config.answer_seconds)
        try:
            allowed = self._datasets_of(request) if token_is_needed else None
            ask = parse(request)
            if allowed is not None and ask.dataset not in allowed:
                raise Refusal(403, "forbidden", "the token is not for this data set")
            async with asyncio.timeout(seconds):
                return await self._library.get().answer(ask, request)
        except StokerError as error:
            refusal = _refusal_of(error)
        except TimeoutError:
            refusal = _refusal_of(DeadlineError(f"no answer to {request.path!r} within {seconds:g} s"))
        return refusal.response(with_body=request.method != "HEAD")

    def _datasets_of(self, request: Request) -> tuple[str, ...]:
        """Return what a request's token is for."""
        if self._config.token_keys is None:
            raise ConfigError("requests with a token are served, and STOKER_TOKEN_KEYS is not set")
        match = _BEARER.fullmatch(request.headers.get("authorization", ""))
        try:
            return self._config.token_keys.verify(match[1] if match else "", self._clock()).datasets
        except CredentialsError:
            raise Refusal(401, "unauthorized", "a valid token is needed", headers=_CHALLENGE) from None


def _refusal_of(error: StokerError) -> Refusal:
    """Return what a client is told of an error: what it can do, and nothing of what lies behind the service."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, NotFoundError):
        return Refusal(404, "not-found", "the data set has no such version or object")
    if isinstance(error, TransientError | FetchError | ObjectChangedError):
        _log.warning("a request was put off: %s", error)
        wanted_seconds = error.retry_after_seconds if isinstance(error, TransientError) else None
        headers = {"Retry-After": str(min(60, max(1, math.ceil(wanted_seconds or 0))))}
        return Refusal(503, "unavailable", "the bucket does not answer as it should; try again", headers=headers)
    _log.error("a request failed: %s: %s", type(error).__name__, error)
    return Refusal(500, "failed", "the request could not be answered; the function's log says why")


async def serve_url(event: object, deployment: Deployment, deadline: Deadline) -> dict[str, Any]:
    """Answer a request to a Lambda function URL that the platform has let through.

    Raises:
        EventError: the event is no request.
    """
    return await _serve_url(_service(deployment, LAMBDA_ANSWER_BYTES).answer, event, deadline)


async def serve_url_with_token(event: object, deployment: Deployment, deadline: Deadline) -> dict[str, Any]:
    """Answer a request to a Lambda function URL that anybody may call, if it has a token of ours.

    Raises:
        EventError: the event is no request.
    """
    return await _serve_url(_service(deployment, LAMBDA_ANSWER_BYTES).answer_with_token, event, deadline)


async def _serve_url(
    answer: Callable[[Request, float], Awaitable[Response]], event: object, deadline: Deadline
) -> dict[str, Any]:
    request = from_lambda_url(cast("Mapping[str, Any]", event))
    return to_lambda_url(await answer(request, deadline.remaining_seconds() - _RESERVED_SECONDS))


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
