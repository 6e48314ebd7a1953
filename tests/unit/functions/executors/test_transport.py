from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web

from stoker.errors import ConfigError
from stoker_functions._executors.transport import open_session
from support.function_endpoints import gcf_endpoint


def test_a_connection_is_kept_alive_while_nothing_comes() -> None:
    async def begin(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()  # until the caller goes
        return response

    async def options() -> list[int]:
        async with gcf_endpoint() as endpoint, open_session(endpoint.url, timeout_seconds=5) as session:
            endpoint.answer_with = begin
            async with session.post(f"{endpoint.url}/x") as response:
                assert response.connection is not None
                assert response.connection.transport is not None
                connection: socket.socket = response.connection.transport.get_extra_info("socket")
                return [
                    connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                    connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
                ]

    assert asyncio.run(options()) == [1, 30]


def test_more_calls_than_a_pool_of_connections_run_at_once() -> None:
    async def most_at_once() -> int:
        everybody = asyncio.Event()
        running = 0

        async def wait(_: web.Request) -> web.Response:
            nonlocal running
            running += 1
            if running == 150:
                everybody.set()
            await everybody.wait()
            return web.Response()

        async def ask(session: Any, url: str) -> None:
            async with session.post(url) as response:
                await response.read()

        async with gcf_endpoint() as endpoint, open_session(endpoint.url, timeout_seconds=60) as session:
            endpoint.answer_with = wait
            await asyncio.gather(*(ask(session, f"{endpoint.url}/x") for _ in range(150)))
        return running

    assert asyncio.run(most_at_once()) == 150


def test_unreadable_certificates_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/no/such/file")

    async def opened() -> None:
        open_session("https://example.invalid", timeout_seconds=5)

    with pytest.raises(ConfigError, match="cannot read certificates"):
        asyncio.run(opened())
