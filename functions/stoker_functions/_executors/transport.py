"""HTTP calls of functions: one request that may take an hour, over a connection with TCP keep-alive.

The platform's response becomes the result of a function, or a typed error with the remedy.
"""

from __future__ import annotations

import asyncio
import json
import socket
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import aiohttp
from aiohappyeyeballs import AddrInfoType

from stoker._stores.http import ErrorRule, HttpRequest, HttpResponse, create_error
from stoker._stores.http_session import SessionTransport
from stoker._stores.options import create_tls_context, find_proxy
from stoker.abc import Answer, Executor
from stoker.errors import (
    ConfigError,
    CredentialsError,
    DeadlineError,
    NotFoundError,
    PermissionDeniedError,
    ServerError,
    StoreError,
    ThrottledError,
)
from stoker.fanout import ExecutorOptions, error_of_function

_CONNECT_SECONDS = 10.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPALIVE": 60, "TCP_KEEPINTVL": 30, "TCP_KEEPCNT": 4}
"""Socket options, since gateways drop connections without traffic (AWS after 350 s). Options that the system lacks are
left out; the first is called TCP_KEEPALIVE on macOS."""
_BAD_CREDENTIALS: ErrorRule = (CredentialsError, "the credentials are missing, wrong or expired; log in again")
_BUSY: ErrorRule = (ServerError, "the function is being changed or started; try again")
_SERVER: ErrorRule = (ServerError, "the platform had an internal error; try again")
_THROTTLED: ErrorRule = (
    ThrottledError,
    "too many functions run at once; raise the platform's concurrency limit, or lower the number of concurrent calls",
)
_TOO_LARGE: ErrorRule = (StoreError, "the event is larger than the platform accepts; plan smaller parts")

_ERROR_RULES: dict[str, ErrorRule] = {
    # By the platform's own code, or by HTTP status.
    "400": (StoreError, "the platform rejects the call"),
    "401": _BAD_CREDENTIALS,
    "403": (
        PermissionDeniedError,
        "these credentials may not call the function; grant lambda:InvokeFunction (AWS) or roles/run.invoker (Google)",
    ),
    "404": (NotFoundError, "there is no such function; deploy it, or correct its prefix, region, project or account"),
    "408": (DeadlineError, "the platform waited too long; try again"),
    "409": _BUSY,
    "413": _TOO_LARGE,
    "429": _THROTTLED,
    "500": _SERVER,
    "502": _SERVER,
    "503": _THROTTLED,
    "504": _SERVER,
    "EC2ThrottledException": _THROTTLED,
    "ENILimitReachedException": _THROTTLED,
    "ExpiredTokenException": _BAD_CREDENTIALS,
    "InvalidSignatureException": _BAD_CREDENTIALS,
    "MissingAuthenticationTokenException": _BAD_CREDENTIALS,
    "ResourceNotReadyException": _BUSY,
    "SubnetIPAddressLimitReachedException": _THROTTLED,
    "UnrecognizedClientException": _BAD_CREDENTIALS,
}
_UNKNOWN = _ERROR_RULES["400"]


class HttpExecutor(Executor):
    """Posts each event to the URL of its function, once, and waits for the answer.

    Each waiting call takes a connection, which returns the result, the error and the bill; asynchronous calls would
    need a place to store these.

    Attributes:
        vendor: name of the platform's vendor, for messages.
        max_event_bytes: size of the largest event that the platform accepts.
        timeout_seconds: time limit of a call, unless the options have one.
        max_calls: maximum number of concurrent calls, unless the options have one.
    """

    vendor: ClassVar[str]
    max_event_bytes: ClassVar[int]
    timeout_seconds: ClassVar[float]
    max_calls: ClassVar[int]

    def __init__(self, options: ExecutorOptions) -> None:
        self.concurrency = options.concurrency or self.max_calls
        self._options = options
        self._session: aiohttp.ClientSession | None = None

    def _connect(self, url: str) -> None:
        timeout_seconds = self._options.timeout_seconds or self.timeout_seconds
        self._session = open_session(url, timeout_seconds=timeout_seconds)

    async def __aexit__(self, *_: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(self, function: str, event: Mapping[str, Any]) -> Answer:
        """Call a function and wait for its end.

        Raises:
            ConfigError: the event is larger than the platform accepts.
            ThrottledError: no instance is free, and none may be started.
            TransientError: the call was lost, or the function failed and may succeed if it is called again.
            FunctionError: the function failed.
            StoreError: the platform rejects the call, and would do so again.
        """
        if self._session is None:
            raise ConfigError("an executor is used inside its 'async with' block")
        data = json.dumps(dict(event)).encode()
        if len(data) > self.max_event_bytes:
            takes = f"{self.vendor} takes {self.max_event_bytes >> 20} MB"
            raise ConfigError(f"an event for {self._name(function)} has {len(data)} bytes, {takes}; plan smaller parts")
        call = await self._signed(function, data)
        begun_seconds = asyncio.get_running_loop().time()
        reply = await SessionTransport(self._session).send(call)
        return self._answer(function, call, reply, asyncio.get_running_loop().time() - begun_seconds)

    def _name(self, function: str) -> str:
        """Return the name that a function is deployed by."""
        return f"{self._options.prefix}-{function}"

    @abstractmethod
    async def _signed(self, function: str, data: bytes) -> HttpRequest:
        """Return the signed request that calls a function."""

    @abstractmethod
    def _answer(self, function: str, call: HttpRequest, reply: HttpResponse, seconds: float) -> Answer:
        """Return the answer of a call that took ``seconds``, or raise the function's or the platform's error."""


def open_session(url: str, *, timeout_seconds: float) -> aiohttp.ClientSession:
    """Return a session for calls below ``url`` in the running loop, through the environment's proxy.

    It does not limit the number of connections: the caller limits its calls.

    Raises:
        ConfigError: the environment names a proxy or certificates that cannot be used.
    """
    verify = create_tls_context() if url.startswith("https://") else True
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=verify, socket_factory=_create_socket),
        proxy=find_proxy(url),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=timeout_seconds),
    )


def _create_socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    new_socket = socket.socket(family, kind, protocol)
    new_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            new_socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return new_socket


def platform_error(address: str, reply: HttpResponse, *, code: str = "", text: str) -> StoreError:
    """Return the error of a platform's error response, by its own code or by the HTTP status."""
    rule = _ERROR_RULES.get(code) or _ERROR_RULES.get(str(reply.status), _UNKNOWN)
    return create_error(address, reply, {str(reply.status): rule}, code, text)


def parse_result(function: str, body: bytes) -> dict[str, Any]:
    """Return a function's result.

    Raises:
        ServerError: the body is not JSON, so another server answered.
        FunctionError: the body is JSON, but not an object.
    """
    try:
        result = json.loads(body)
    except (ValueError, RecursionError):
        raise ServerError(f"{function} answered {len(body)} bytes that are not JSON") from None
    if not isinstance(result, dict):
        raise error_of_function(function, "TypeError", f"the result is not a JSON object but a {type(result).__name__}")
    return result
