"""HTTP to functions: one request that may be silent for an hour, over a connection that is kept alive meanwhile.

What platforms answer becomes the result of a function, or a typed error that says the remedy.
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

from stoker._stores.http import Call, Reply, Rule, error_of
from stoker._stores.http_session import SessionReader
from stoker._stores.options import proxy_of, trusted
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
"""Gateways forget a connection without traffic, AWS's after 350 s. What a system does not know is left out; macOS calls
the first by the second's name."""
_BAD_CREDENTIALS: Rule = (CredentialsError, "the credentials are missing, wrong or expired; log in again")
_BUSY: Rule = (ServerError, "the function is being changed or started; try again")
_SERVER: Rule = (ServerError, "the platform failed inside; try again")
_THROTTLED: Rule = (
    ThrottledError,
    "too many functions run at once; have the limit on concurrency raised, or ask for fewer calls at once",
)
_TOO_LARGE: Rule = (StoreError, "the event is larger than the platform takes; plan smaller parts")

_REFUSALS: dict[str, Rule] = {
    # By the platform's own code, or by status.
    "400": (StoreError, "the platform does not take the call"),
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
_UNKNOWN = _REFUSALS["400"]


class HttpExecutor(Executor):
    """Posts each event to the URL of its function, once, and waits for the answer.

    Waiting costs a connection each and brings the result, the error and the bill back with it; a call that nobody waits
    for would need a place where all this is found later.

    Attributes:
        vendor: whose platform it is, for messages.
        max_event_bytes: what the platform takes.
        timeout_seconds: that a call may take, unless the options say otherwise.
        most_calls: at once, unless the options say otherwise.
    """

    vendor: ClassVar[str]
    max_event_bytes: ClassVar[int]
    timeout_seconds: ClassVar[float]
    most_calls: ClassVar[int]

    def __init__(self, options: ExecutorOptions) -> None:
        self.concurrency = options.concurrency or self.most_calls
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
            ConfigError: the event is larger than the platform takes.
            ThrottledError: no instance is free, or may be started.
            TransientError: the call was lost, or the function failed in a way that may pass.
            FunctionError: the function failed.
            StoreError: the platform refuses for a reason that will stay.
        """
        if self._session is None:
            raise ConfigError("an executor is used inside its 'async with' block")
        data = json.dumps(dict(event)).encode()
        if len(data) > self.max_event_bytes:
            takes = f"{self.vendor} takes {self.max_event_bytes >> 20} MB"
            raise ConfigError(f"an event for {self._name(function)} has {len(data)} bytes, {takes}; plan smaller parts")
        call = await self._signed(function, data)
        begun_seconds = asyncio.get_running_loop().time()
        reply = await SessionReader(self._session).read(call)
        return self._answer(function, call, reply, asyncio.get_running_loop().time() - begun_seconds)

    def _name(self, function: str) -> str:
        """Return what a function is deployed as."""
        return f"{self._options.prefix}-{function}"

    @abstractmethod
    async def _signed(self, function: str, data: bytes) -> Call:
        """Return the call of a function."""

    @abstractmethod
    def _answer(self, function: str, call: Call, reply: Reply, seconds: float) -> Answer:
        """Return what became of a call that took so long, or raise the function's error or the platform's."""


def open_session(url: str, *, timeout_seconds: float) -> aiohttp.ClientSession:
    """Return a session for calls below ``url`` in the running loop, through the environment's proxy.

    It makes as many connections as there are calls: their number is the caller's business.

    Raises:
        ConfigError: the environment names a proxy or certificates that cannot be used.
    """
    verify = trusted() if url.startswith("https://") else True
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=verify, socket_factory=_kept_alive),
        proxy=proxy_of(url),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=timeout_seconds),
    )


def _kept_alive(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def refusal(address: str, reply: Reply, *, code: str = "", text: str) -> StoreError:
    """Return the error for what a platform refused, by its own code or by the status."""
    rule = _REFUSALS.get(code) or _REFUSALS.get(str(reply.status), _UNKNOWN)
    return error_of(address, reply, {str(reply.status): rule}, code, text)


def result_of(function: str, body: bytes) -> dict[str, Any]:
    """Return a function's result.

    Raises:
        ServerError: the body is not JSON: somebody else answered.
        FunctionError: it is JSON and no object.
    """
    try:
        result = json.loads(body)
    except (ValueError, RecursionError):
        raise ServerError(f"{function} answered {len(body)} bytes that are not JSON") from None
    if not isinstance(result, dict):
        raise error_of_function(function, "TypeError", f"the result is no JSON object but a {type(result).__name__}")
    return result
