"""Functions on Google Cloud, called over HTTP with an identity token."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from stoker._stores.google_credentials import IdentityTokens
from stoker._stores.http import Call, Failure, Reply
from stoker._stores.http_session import SessionReader
from stoker.abc import Answer, Executor
from stoker.errors import ConfigError, CredentialsError, StokerError
from stoker.fanout import ExecutorOptions, error_of_function
from stoker_functions._executors.transport import open_session, refusal, result_of

_MAX_EVENT_BYTES = 32 << 20
_CONCURRENCY = 100
_TIMEOUT_SECONDS = 3630.0  # a function has at most 3600
_SIZES = {"compact": (4 << 30, 1.0), "shuffle": (8 << 30, 2.0)}  # as infra/terraform deploys them
_SIZE = (2 << 30, 1.0)  # of all others
_BILLED_STEP_SECONDS = 0.1
_PLACE = "{function}"


class GcfExecutor(Executor):
    """Posts events to ``https://{region}-{project}.cloudfunctions.net/{prefix}-{function}``.

    With an ``endpoint_url``, functions are below that instead; or at it, with their names for ``{function}``, as
    services of Cloud Run are: ``https://{function}-123456789012.us-central1.run.app``. One on this machine or without
    TLS gets no token.

    Google does not tell what a call is charged: it is the time that the answer took, in steps of 0.1 s, at the memory
    and processors that the options name, else those that ``infra/terraform`` gives the function.

    Raises:
        ConfigError: region and project are not given, nor an endpoint.
    """

    name = "gcf"
    platform = "cloud-run"
    heeds = frozenset({"prefix", "region", "project", "endpoint_url", "service_account"})

    def __init__(self, options: ExecutorOptions) -> None:
        if options.endpoint_url is None and not (options.region and options.project):
            raise ConfigError(
                "functions on Google Cloud are found by region and project, or by an endpoint; set "
                "--function-region and --function-project, or --function-url; in a warm tier's URL region= and "
                "project=, or endpoint="
            )
        self.concurrency = options.concurrency or _CONCURRENCY
        self._root = options.endpoint_url or f"https://{options.region}-{options.project}.cloudfunctions.net"
        self._options = options
        self._tokens: IdentityTokens | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> GcfExecutor:
        self._session = open_session(self._root, timeout_seconds=self._options.timeout_seconds or _TIMEOUT_SECONDS)
        if urlsplit(self._root).scheme == "https":
            self._tokens = IdentityTokens(self._options.service_account)
        return self

    async def __aexit__(self, *_: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def vcpus(self, function: str) -> float:
        """Return what the options say, else what the function is deployed with."""
        return self._options.vcpus or size_of(function)[1]

    async def call(self, function: str, event: Mapping[str, Any]) -> Answer:
        """Call a function and wait for its answer.

        Raises:
            ConfigError: the event has more than 32 MB.
            ThrottledError: 429 or 503: no instance is free, or may be started.
            TransientError: the call was lost, or the function failed in a way that may pass.
            FunctionError: the function failed.
            StoreError: Google refuses for a reason that will stay.
        """
        if self._session is None:
            raise ConfigError("an executor is used inside its 'async with' block")
        url = self._url(function)
        data = json.dumps(dict(event)).encode()
        if len(data) > _MAX_EVENT_BYTES:
            raise ConfigError(f"an event for {url} has {len(data)} bytes, Google takes 32 MB; plan smaller parts")
        headers = {"Content-Type": "application/json"}
        token = "" if self._tokens is None else await self._tokens.get(url)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        begun_seconds = asyncio.get_running_loop().time()
        call = Call(method="POST", url=url, headers=headers, address=url, data=data)
        reply = await SessionReader(self._session).read(call)
        seconds = asyncio.get_running_loop().time() - begun_seconds
        if reply.refused:
            error = _refused(function, url, reply)
            if isinstance(error, CredentialsError) and self._tokens is not None:
                self._tokens.forget(url, token)
            raise error
        return Answer(
            result=result_of(url, reply.body),
            billed_seconds=math.ceil(seconds / _BILLED_STEP_SECONDS) * _BILLED_STEP_SECONDS,
            memory_bytes=self._options.memory_bytes or size_of(function)[0],
            is_cold=None,
            vcpus=self.vcpus(function),
        )

    def _url(self, function: str) -> str:
        name = f"{self._options.prefix}-{function}"
        if _PLACE in self._root:
            return self._root.replace(_PLACE, name)
        return f"{self._root.rstrip('/')}/{name}"


def size_of(function: str) -> tuple[int, float]:
    """Return the memory in bytes and the processors that a function is deployed with."""
    return _SIZES.get(function, _SIZE)


def _refused(function: str, url: str, reply: Reply) -> StokerError:
    """Return the function's own error, which has a type, or the platform's."""
    said = reply.document
    if isinstance(said.get("errorType"), str):
        return error_of_function(function, said["errorType"], str(said.get("errorMessage", "")))
    text = reply.body.decode("utf-8", "replace")
    return refusal(Failure(address=url, status=reply.status, text=text, headers=reply.headers))
