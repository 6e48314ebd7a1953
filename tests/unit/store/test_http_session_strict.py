"""Connections of aiohttp's: used again after an answer, and never once anything came behind one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import aiohttp
import pytest

from stoker import HttpOptions
from stoker._stores.http import Destination, HttpRequest
from stoker._stores.http_session import SessionTransport, open_session
from stoker.errors import ServerError
from support.scripted_server import BODY, HEAD, WHOLE, Server, Speak, serving

BEHIND = {
    "answer": HEAD + b"X" * len(BODY),
    "part-of-a-head": b"HTTP/1.1 206 OK\r\nETag: evil\r\n",
    "part-of-a-status": b"HTT",
    "line-end": b"\r\n",
    "byte": b"H",
    "interim-answer": b"HTTP/1.1 102 Processing\r\n\r\n",
}
CHUNKED = b"HTTP/1.1 200 OK\r\nETag: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n0123\r\n0\r\n\r\n"
EMPTY = b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: 0\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
Use = Callable[[aiohttp.ClientSession, Server], Awaitable[None]]


def speaking(*answers: tuple[bytes, ...]) -> Speak:
    """Give each request of the first connection the next answer, in pieces with a pause between; then the last one."""
    left = list(answers)

    async def speak(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = server.connections
        while True:
            await reader.readuntil(b"\r\n\r\n")
            server.requests.append(number)
            for piece in left.pop(0) if len(left) > 1 else left[0]:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)

    return speak


def run(speak: Speak, use: Use) -> None:
    async def main() -> None:
        async with (
            serving(speak) as server,
            open_session(HttpOptions(read_timeout_seconds=2), server.url) as session,
        ):
            await use(session, server)

    asyncio.run(main())


async def read(session: aiohttp.ClientSession, server: Server) -> bytes:
    into = bytearray(len(BODY))
    call = HttpRequest(method="GET", url=f"{server.url}/x", headers={}, address="x")
    await SessionTransport(session).send(call, Destination(memoryview(into), 0, len(BODY)))
    return bytes(into)


async def ask(session: aiohttp.ClientSession, server: Server, method: str = "GET") -> bytes:
    call = HttpRequest(method=method, url=f"{server.url}/x", headers={}, address="x")
    return (await SessionTransport(session).send(call)).body


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
@pytest.mark.parametrize("pieces", ["at once", "with the end", "late"])
def test_what_comes_behind_an_answer_is_not_the_next_one(behind: bytes, pieces: str) -> None:
    first = {
        "at once": (WHOLE + behind,),
        "with the end": (WHOLE[:-100], WHOLE[-100:] + behind),
        "late": (WHOLE, behind),
    }[pieces]

    async def use(session: aiohttp.ClientSession, server: Server) -> None:
        for _ in range(3):
            assert await read(session, server) == BODY
            await asyncio.sleep(0.04)
        assert server.requests == [1, 2, 2]

    run(speaking(first, (WHOLE,)), use)


@pytest.mark.parametrize("behind", [b"HTTP/1.1 200", b"4\r\n", b"0\r\n"])
@pytest.mark.parametrize("is_late", [False, True])
def test_neither_is_what_comes_behind_one_in_chunks(behind: bytes, is_late: bool) -> None:
    async def use(session: aiohttp.ClientSession, server: Server) -> None:
        with suppress(ServerError):  # what comes at once may spoil the answer itself
            assert await ask(session, server) == b"0123"
        await asyncio.sleep(0.04)
        assert await ask(session, server) == b"0123"
        assert server.requests == [1, 2]

    run(speaking((CHUNKED, behind) if is_late else (CHUNKED + behind,), (CHUNKED,)), use)


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize(
    "answer", [CHUNKED, EMPTY, b"HTTP/1.1 100 Continue\r\n\r\n" + EMPTY], ids=["chunks", "empty", "interim"]
)
def test_an_answer_alone_leaves_its_connection_to_the_next_however_it_is_cut(answer: bytes, piece_bytes: int) -> None:
    pieces = tuple(answer[start : start + piece_bytes] for start in range(0, len(answer), piece_bytes))

    async def speak(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = server.connections
        while True:
            await reader.readuntil(b"\r\n\r\n")
            server.requests.append(number)
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)

    async def use(session: aiohttp.ClientSession, server: Server) -> None:
        for _ in range(3):
            assert await ask(session, server) in (b"0123", b"")
        assert set(server.requests) == {1}

    run(speak, use)


def test_the_length_that_an_answer_to_head_names_is_not_awaited() -> None:
    async def use(session: aiohttp.ClientSession, server: Server) -> None:
        for _ in range(3):
            assert await ask(session, server, "HEAD") == b""
        assert server.requests == [1, 1, 1]

    run(speaking((HEAD,)), use)
