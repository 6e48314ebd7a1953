"""Requests to a service without a server: each on an event loop of its own, or several on one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from stoker import open_store
from stoker.abc import Store
from stoker_functions.serve import Request, Response, ServeConfig, Service

__all__ = ["ask", "serving", "error_of", "with_service"]


def serving(url: str, **changes: Any) -> ServeConfig:
    """Return a configuration that serves the data set at ``url`` as ``ds``."""
    return ServeConfig(**{"datasets": {"ds": url}, **changes})


def with_service(
    config: ServeConfig,
    use: Callable[[Service], Awaitable[Any]],
    *,
    store: Callable[[str], Store] = open_store,
    clock: Callable[[], float] = lambda: 0.0,
) -> Any:
    """Return the result of ``use`` with a service, on an event loop of its own; closes the stores afterwards."""
    stores: dict[str, Store] = {}

    def opened(url: str) -> Store:
        if url not in stores:
            stores[url] = store(url)
        return stores[url]

    async def main() -> Any:
        try:
            return await use(Service(config, opened, clock=clock))
        finally:
            for each in stores.values():
                await each.close()

    return asyncio.run(main())


def ask(
    config: ServeConfig,
    path: str,
    query: str = "",
    *,
    headers: Mapping[str, str] | None = None,
    method: str = "GET",
    **more: Any,
) -> Response:
    """Return the response to one request that the platform has authenticated."""
    request = Request(method=method, path=path, query=query, headers=headers or {})
    response: Response = with_service(config, lambda service: service.answer(request), **more)
    return response


def error_of(response: Response) -> str:
    """Return the code of an error response; checks that it is one, has a message and may not be cached."""
    assert response.status >= 400
    assert response.headers["Cache-Control"] == "no-store"
    assert response.headers["Content-Type"] == "application/json"
    document = json.loads(response.body)
    assert set(document) == {"error", "message"}
    assert document["message"]
    return str(document["error"])
