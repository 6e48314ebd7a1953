"""HTTP endpoints with the protocols of the two platforms, which run the tiny functions in this process."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from stoker.errors import ConfigError, EventError, SchemaError, TransientError
from support import tiny_functions
from support.web import served

__all__ = ["REPORT", "Answering", "Endpoint", "answer_with", "gcf_endpoint", "lambda_endpoint"]

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]

REPORT = (
    "START RequestId: 1 Version: $LATEST\nEND RequestId: 1\nREPORT RequestId: 1\tDuration: 102.25 ms\t"
    "Billed Duration: 1353 ms\tMemory Size: 2048 MB\tMax Memory Used: 129 MB\tInit Duration: 1250.31 ms\t\n"
)
_FINAL = (ConfigError, EventError, SchemaError)


@dataclass(slots=True)
class Endpoint:
    """A server, its recorded requests, and its responses.

    Attributes:
        url: URL of its root.
        seen: requests, with their bodies.
        answer_with: handler that answers instead of a function; None runs the function.
        log: output of an invocation.
    """

    url: str = ""
    seen: list[tuple[web.Request, bytes]] = field(default_factory=list)
    answer_with: Answering | None = None
    log: str = REPORT

    async def handle(
        self, request: web.Request, run: Callable[[str, bytes], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        body = await request.read()
        self.seen.append((request, body))
        if self.answer_with is not None:
            return await self.answer_with(request)
        name = request.match_info["name"].removeprefix("stoker-")
        if name == "perish":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return await run(name, body)


def answer_with(status: int, body: Any, **headers: str) -> Answering:
    """Return a handler that answers with a body, as it is or as JSON; the argument X_Name is the header X-Name."""

    async def answer(_: web.Request) -> web.StreamResponse:
        text = body if isinstance(body, str) else json.dumps(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, text=text, headers=named, content_type="application/json")

    return answer


@asynccontextmanager
async def _serving(endpoint: Endpoint, path: str, handler: Any) -> AsyncIterator[Endpoint]:
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post(path, handler)
    # A function is cancelled when its caller disconnects, so that none is left when a test ends.
    async with served(app, handler_cancellation=True) as endpoint.url:
        yield endpoint


async def _ran(name: str, body: bytes) -> Any:
    return await getattr(tiny_functions, name)(json.loads(body))


@asynccontextmanager
async def lambda_endpoint() -> AsyncIterator[Endpoint]:
    """Run an endpoint of Lambda's Invoke API."""
    endpoint = Endpoint()

    async def run(name: str, body: bytes) -> web.StreamResponse:
        if name not in tiny_functions.FUNCTIONS:
            said = {"Type": "User", "Message": "Function not found: arn:aws:lambda:us-east-1:1:function:stoker-nobody"}
            return web.json_response(said, status=404, headers={"x-amzn-ErrorType": "ResourceNotFoundException"})
        headers = {"X-Amz-Log-Result": base64.b64encode(endpoint.log.encode()).decode()}
        try:
            text = json.dumps(await _ran(name, body))
        except Exception as error:  # noqa: BLE001 - whatever a function raises is its answer
            headers["X-Amz-Function-Error"] = "Unhandled"
            text = json.dumps({"errorMessage": str(error), "errorType": type(error).__name__, "stackTrace": []})
        return web.Response(text=text, headers=headers, content_type="application/json")

    async def handler(request: web.Request) -> web.StreamResponse:
        return await endpoint.handle(request, run)

    async with _serving(endpoint, "/2015-03-31/functions/{name}/invocations", handler):
        yield endpoint


@asynccontextmanager
async def gcf_endpoint() -> AsyncIterator[Endpoint]:
    """Run an endpoint of functions that are called over HTTP, and fail with a status and the error as JSON."""
    endpoint = Endpoint()

    async def run(name: str, body: bytes) -> web.StreamResponse:
        if name not in tiny_functions.FUNCTIONS:
            return web.Response(text="<html>404 Not Found</html>", status=404, content_type="text/html")
        try:
            return web.json_response(text=json.dumps(await _ran(name, body)))
        except Exception as error:  # noqa: BLE001 - whatever a function raises is its answer
            status = 503 if isinstance(error, TransientError) else 400 if isinstance(error, _FINAL) else 500
            said = {"errorType": type(error).__name__, "errorMessage": str(error)}
            return web.json_response(said, status=status)

    async def handler(request: web.Request) -> web.StreamResponse:
        return await endpoint.handle(request, run)

    async with _serving(endpoint, "/{name}", handler):
        yield endpoint
