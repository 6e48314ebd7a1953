"""The metadata server of a machine with a Google service account, which issues identity tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from aiohttp import web

from stoker._stores import google_credentials as google_identity
from stoker_local import running_server
from support.web import served

__all__ = ["machine_account"]


@contextmanager
def machine_account(monkeypatch: pytest.MonkeyPatch, token: Callable[[], str]) -> Iterator[list[str]]:
    """Run such a server for this process; ``token`` creates its tokens. Yields the requested audiences."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.query["audience"])
        return web.Response(text=token())

    app = web.Application()
    app.router.add_get("/identity", answer)
    with running_server(lambda: served(app)) as url:
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
        monkeypatch.setenv("CLOUDSDK_CONFIG", "/no/such/folder")
        monkeypatch.setattr(google_identity, "GCE_ENDPOINT_ID_TOKEN", url + "/identity?audience={audience}")
        yield asked
