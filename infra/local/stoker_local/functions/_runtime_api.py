"""The Runtime API of one instance: how the cloud hands out events and a real runtime client answers them.

Every instance has an endpoint of its own, so that no event is given to the poll of one that has died.
Source of the contract: AWS Lambda Developer Guide, "Using the Lambda runtime API for custom runtimes".
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from types import MappingProxyType

from aiohttp import web

from stoker_local.functions._outcome import Answer, Invocation
from stoker_local.functions._payload import MAX_RESULT_BYTES, read_body
from stoker_local.functions._serving import serving

__all__ = ["InstanceState", "RuntimeApi"]

_MAX_ERROR_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 21  # the client sends an error's whole trace in one
_VERSION = "/2018-06-01/runtime"
_ERROR_TYPE = re.compile(r"[\w.:$-]{1,255}")


class InstanceState(StrEnum):
    """Where an instance is in its life."""

    STARTING = "starting"
    FROZEN = "frozen"
    BUSY = "busy"
    ANSWERED = "answered"  # and not back for more yet
    DEAD = "dead"


_STEPS: Mapping[tuple[InstanceState, str], InstanceState] = MappingProxyType(
    {
        (InstanceState.STARTING, "poll"): InstanceState.FROZEN,
        (InstanceState.STARTING, "fail"): InstanceState.ANSWERED,
        (InstanceState.FROZEN, "invoke"): InstanceState.BUSY,
        (InstanceState.BUSY, "answer"): InstanceState.ANSWERED,
        (InstanceState.ANSWERED, "poll"): InstanceState.FROZEN,
        **{(state, "end"): InstanceState.DEAD for state in InstanceState},
    }
)


class RuntimeApi:
    """The endpoint of one instance.

    Attributes:
        state: of the instance.
        answer: of the start or of the invocation under way; a start answers only if it fails.
        polled: done while the instance waits for work.
    """

    def __init__(self, *, arn: str, on_poll: Callable[[], None]) -> None:
        self.state = InstanceState.STARTING
        self._arn = arn
        self._on_poll = on_poll
        self._loop = asyncio.get_running_loop()
        self._work: asyncio.Future[tuple[Invocation, int]] = self._loop.create_future()
        self._request_id = ""
        self.answer: asyncio.Future[Answer] = self._loop.create_future()
        self.polled: asyncio.Future[None] = self._loop.create_future()

    def begin(self, invocation: Invocation, *, timeout_seconds: float) -> None:
        """Hand out an invocation; :attr:`answer` is that of it from here on."""
        self.step("invoke")
        self.answer, self.polled = self._loop.create_future(), self._loop.create_future()
        self._request_id = invocation.request_id
        deadline_milliseconds = int((time.time() + timeout_seconds) * 1000)
        if not self._work.done():  # cancelled where the instance has died unnoticed
            self._work.set_result((invocation, deadline_milliseconds))

    def step(self, event: str) -> None:
        """Go on to the next state.

        Raises:
            KeyError: the event cannot happen in this state.
        """
        self.state = _STEPS[self.state, event]

    def serving(self, host: str) -> AbstractAsyncContextManager[str]:
        """Listen on a free port; yields the address that the runtime client takes."""
        app = web.Application(middlewares=[_only_in_turn])
        app.router.add_get(f"{_VERSION}/invocation/next", self._next)
        app.router.add_post(f"{_VERSION}/invocation/{{id}}/response", self._respond)
        app.router.add_post(f"{_VERSION}/invocation/{{id}}/error", self._fail)
        app.router.add_post(f"{_VERSION}/init/error", self._fail_start)
        # A poll ends with its process.
        return serving(app, host, handler_cancellation=True, max_field_size=_MAX_HEADER_BYTES)

    async def _next(self, request: web.Request) -> web.Response:
        self.step("poll")
        if not self.polled.done():
            self.polled.set_result(None)
        self._on_poll()
        invocation, deadline_milliseconds = await self._work
        self._work = self._loop.create_future()
        headers = {
            "Lambda-Runtime-Aws-Request-Id": invocation.request_id,
            "Lambda-Runtime-Deadline-Ms": str(deadline_milliseconds),
            "Lambda-Runtime-Invoked-Function-Arn": self._arn,
        }
        if invocation.client_context:
            headers["Lambda-Runtime-Client-Context"] = invocation.client_context
        return web.Response(body=invocation.payload, headers=headers, content_type="application/json")

    async def _respond(self, request: web.Request) -> web.Response:
        body = await read_body(request, limit_bytes=MAX_RESULT_BYTES)
        if body is not None:
            return self._answered(request, Answer(payload=body), status=202)
        message = f"Response payload size exceeded maximum allowed payload size ({MAX_RESULT_BYTES} bytes)."
        error = {"errorType": "Function.ResponseSizeTooLarge", "errorMessage": message}
        answer = Answer(payload=json.dumps(error).encode(), error_type="Function.ResponseSizeTooLarge")
        return self._answered(request, answer, status=413)

    async def _fail(self, request: web.Request) -> web.Response:
        return self._answered(request, await _error(request), status=202)

    def _answered(self, request: web.Request, answer: Answer, *, status: int) -> web.Response:
        if request.match_info["id"] != self._request_id:
            return web.json_response({"errorType": "InvalidRequestID"}, status=400)
        self.step("answer")
        self.answer.set_result(answer)
        return web.json_response({"status": "OK"}, status=status)

    async def _fail_start(self, request: web.Request) -> web.Response:
        answer = await _error(request)
        self.step("fail")
        self.answer.set_result(answer)
        return web.json_response({"status": "OK"}, status=202)


@web.middleware
async def _only_in_turn(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except KeyError as error:
        return web.json_response({"errorType": "InvalidStateTransition", "errorMessage": str(error)}, status=403)


async def _error(request: web.Request) -> Answer:
    """Return an error that others can read: what has no type, or none that could be one, is text."""
    body = await read_body(request, limit_bytes=_MAX_ERROR_BYTES) or b""
    try:
        error_type = json.loads(body)["errorType"]
    except (ValueError, TypeError, KeyError, RecursionError):
        error_type = None
    if isinstance(error_type, str) and _ERROR_TYPE.fullmatch(error_type):
        return Answer(payload=body, error_type=error_type)
    error = {"errorType": "Unhandled", "errorMessage": body.decode("utf-8", "replace")}
    return Answer(payload=json.dumps(error).encode(), error_type="Unhandled")
