"""A service behind a real HTTP server on this machine: its ASGI application on aiohttp's server, on its own thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from stoker import StoreOptions, open_store
from stoker.abc import Store
from stoker_functions.serve import Request, Response, ServeConfig, Service, asgi_app
from stoker_functions.serve._messages import AsgiApp
from stoker_local import running_server
from support.authenticators import OPEN, Authenticator

__all__ = ["Hosted", "hosting", "running_service"]

Spoil = Callable[[Request, int, Response], Response]


@dataclass(frozen=True, kw_only=True)
class Hosted:
    """A running service.

    Attributes:
        url: URL of the server.
        requests: received requests, in order of arrival.
        statuses: statuses of the responses, in their order.
    """

    url: str
    requests: list[Request] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    def dataset(self, name: str) -> str:
        """Return the URL of a data set, for stores and loaders."""
        return f"stoker+{self.url}/v1/{name}"


@asynccontextmanager
async def hosting(app: AsgiApp, authenticator: Authenticator = OPEN) -> AsyncIterator[str]:
    """Serve an ASGI application behind an authentication; yield the server's URL."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if (refusal := authenticator.refusal(request)) is not None:
            return refusal
        target, _, query = request.raw_path.partition("?")
        scope: MutableMapping[str, Any] = {
            "type": "http",
            "method": request.method,
            "path": request.path,
            "raw_path": target.encode("latin-1"),
            "query_string": query.encode("latin-1"),
            "headers": [(name.lower(), value) for name, value in request.raw_headers],
        }
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": await request.read(), "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        await app(scope, receive, send)
        start, *bodies = sent
        headers = [(name.decode(), value.decode()) for name, value in start["headers"]]
        body = b"".join(message.get("body", b"") for message in bodies)
        return web.Response(status=start["status"], headers=dict(headers), body=body)

    server = web.Server(handle)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _serving(
    config: ServeConfig, options: StoreOptions | None, *, with_token: bool, spoil: Spoil, authenticator: Authenticator
) -> AsyncIterator[Hosted]:
    stores: dict[str, Store] = {}

    def opened(url: str) -> Store:
        if url not in stores:
            stores[url] = open_store(url, options=options)
        return stores[url]

    service = Service(config, opened)

    async def answer(request: Request) -> Response:
        hosted.requests.append(request)
        response = await (service.answer_with_token if with_token else service.answer)(request)
        response = spoil(request, hosted.requests.count(request) - 1, response)
        hosted.statuses.append(response.status)
        return response

    async with hosting(asgi_app(answer), authenticator) as url:
        hosted = Hosted(url=url)
        yield hosted
    for store in stores.values():
        await store.close()


@contextmanager
def running_service(
    datasets: Mapping[str, str],
    options: StoreOptions | None = None,
    *,
    with_token: bool = False,
    spoil: Spoil = lambda _request, _before, response: response,
    authenticator: Authenticator = OPEN,
    **changes: Any,
) -> Iterator[Hosted]:
    """Serve data sets, whose stores are opened with ``options``; ``changes`` are settings of the service.

    The result of ``spoil(request, before, response)`` replaces each response, after ``before`` identical requests.
    """
    config = ServeConfig(datasets=datasets, **changes)
    with running_server(
        lambda: _serving(config, options, with_token=with_token, spoil=spoil, authenticator=authenticator)
    ) as hosted:
        yield hosted
