"""Connections that receive straight into the caller's memory: kept, used again, given up, never written to late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from stoker.clock import run_virtual
from stoker.errors import ConnectionLostError, DeadlineError, StoreError, TruncatedError
from stoker.store.http import Call, Destination, Reply
from stoker.store.http_direct import DirectReader
from stoker.store.options import HttpOptions
from support.stores import eventually

BODY = b"0123456789" * 1000
HEAD = (
    f"HTTP/1.1 206 OK\r\nETag: x\r\nContent-Range: bytes 0-{len(BODY) - 1}/{len(BODY)}\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n"
).encode()
WHOLE = HEAD + BODY

Speak = Callable[["Server", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Server:
    """What a server saw: requests, by the connection that they came over."""

    url: str = ""
    requests: list[int] = field(default_factory=list)
    connections: int = 0
    hung_up: int = 0


async def answer_all(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    number = server.connections
    while True:
        await reader.readuntil(b"\r\n\r\n")
        server.requests.append(number)
        writer.write(WHOLE)
        await writer.drain()


@asynccontextmanager
async def serving(speak: Speak) -> AsyncIterator[Server]:
    server = Server()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        server.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await speak(server, reader, writer)
        server.hung_up += 1
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        await asyncio.sleep(0.01)  # what was accepted last begins to be served
        await asyncio.gather(*tasks)
        await listening.wait_closed()


async def read(reader: DirectReader, server: Server, into: bytearray | None = None) -> Reply:
    into = bytearray(len(BODY)) if into is None else into
    call = Call(method="GET", url=f"{server.url}/k", headers={}, address="s3://b/k")
    reply = await reader.read_into(call, Destination(memoryview(into), 0, len(BODY)))
    assert into == BODY
    return reply


def with_server(speak: Speak, use: Callable[[Server, DirectReader], Awaitable[None]], **options: float) -> None:
    async def main() -> None:
        async with serving(speak) as server:
            reader = DirectReader(HttpOptions(**options), server.url)  # type: ignore[arg-type]  # numbers all
            try:
                async with asyncio.timeout(30):
                    await use(server, reader)
            finally:
                await reader.close()

    asyncio.run(main())


def test_a_connection_is_used_again() -> None:
    async def use(server: Server, reader: DirectReader) -> None:
        for _ in range(3):
            await read(reader, server)
        assert server.requests == [1, 1, 1]

    with_server(answer_all, use)


def test_reads_at_once_have_a_connection_each_up_to_the_limit() -> None:
    async def use(server: Server, reader: DirectReader) -> None:
        await asyncio.gather(*(read(reader, server) for _ in range(8)))
        assert server.connections == 3
        assert len(server.requests) == 8

    with_server(answer_all, use, max_connections=3)


def test_a_read_over_a_connection_that_the_server_has_closed_is_sent_again() -> None:
    async def once(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        server.requests.append(server.connections)
        writer.write(WHOLE)
        await writer.drain()
        await reader.readexactly(1)  # hangs up where the next request begins, without a word

    async def use(server: Server, reader: DirectReader) -> None:
        await read(reader, server)
        await read(reader, server)
        assert server.requests == [1, 2]

    with_server(once, use)


def test_a_fresh_connection_that_breaks_without_a_word_is_an_error() -> None:
    async def hang_up(_: Server, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async def use(server: Server, reader: DirectReader) -> None:
        with pytest.raises(ConnectionLostError, match="before an answer came"):
            await read(reader, server)
        assert server.connections == 1

    with_server(hang_up, use)


def test_a_connection_that_broke_in_the_middle_is_not_used_again() -> None:
    async def cut(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(WHOLE[:-1] if server.connections == 1 else WHOLE)
        await writer.drain()

    async def use(server: Server, reader: DirectReader) -> None:
        with pytest.raises(TruncatedError, match="s3://b/k"):
            await read(reader, server)
        await read(reader, server)
        assert server.connections == 2

    with_server(cut, use)


def test_a_server_that_speaks_without_being_asked_is_hung_up_on() -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(WHOLE)
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(WHOLE)  # an answer to nothing; the next read must not take it for its own
        await writer.drain()
        await reader.read()

    async def use(server: Server, reader: DirectReader) -> None:
        await read(reader, server)
        await eventually(lambda: server.hung_up > 0)
        await read(reader, server)
        assert server.connections == 2

    with_server(talk, use)


def test_a_silent_server_is_given_up_and_its_connection_closed() -> None:
    async def say_half(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(WHOLE[: len(WHOLE) // 2])
        await writer.drain()
        await reader.read()

    async def use(server: Server, reader: DirectReader) -> None:
        with pytest.raises(DeadlineError, match=r"silent for 0\.1 s"):
            await read(reader, server)
        await eventually(lambda: server.hung_up > 0)

    with_server(say_half, use, read_timeout_seconds=0.1)


def test_a_cancelled_read_writes_nothing_more_wherever_it_stood() -> None:
    async def drip(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(WHOLE), 500):
            writer.write(WHOLE[start : start + 500])
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()

    async def use(server: Server, reader: DirectReader) -> None:
        for turns in range(60):
            into = bytearray(len(BODY))
            task = asyncio.ensure_future(read(reader, server, into))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            seen = bytes(into)
            await asyncio.sleep(0.001)
            assert into == seen

    with_server(drip, use)


def test_closing_breaks_what_is_under_way() -> None:
    async def say_nothing(_: Server, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await reader.read()

    async def use(server: Server, reader: DirectReader) -> None:
        task = asyncio.ensure_future(read(reader, server))
        await eventually(lambda: server.connections > 0)
        await reader.close()
        with pytest.raises(ConnectionLostError, match="s3://b/k"):
            await task

    with_server(say_nothing, use)


def test_nobody_listening_is_a_connection_lost() -> None:
    async def main() -> None:
        listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        server = Server(url=f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        listening.close()
        await listening.wait_closed()
        reader = DirectReader(HttpOptions(), server.url)
        with pytest.raises(ConnectionLostError, match="could not be made"):
            await read(reader, server)

    asyncio.run(main())


def test_a_host_without_an_address_is_a_connection_lost() -> None:
    async def main() -> None:
        reader = DirectReader(HttpOptions(), "http://no-such-host.invalid:80")
        with pytest.raises(ConnectionLostError, match="could not be made"):
            await read(reader, Server(url="http://no-such-host.invalid:80"))

    asyncio.run(main())


def test_a_connection_that_takes_too_long_to_make_is_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.sleep(1e6)

    monkeypatch.setattr("stoker.store.dialer.start_connection", never)

    async def main() -> None:
        reader = DirectReader(HttpOptions(), "http://127.0.0.1:80")
        with pytest.raises(DeadlineError, match="could be made in time"):
            await read(reader, Server(url="http://127.0.0.1:80"))
        assert asyncio.get_running_loop().time() == 10.0

    run_virtual(main())


def test_every_connection_begins_with_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[str] = []
    looked_up = 0

    async def refuse(addresses: list[tuple[object, ...]], **_: object) -> None:
        first.append(addresses[0][4][0])  # type: ignore[index]
        raise ConnectionRefusedError

    async def look_up(*_: object, **__: object) -> list[tuple[object, ...]]:
        nonlocal looked_up
        looked_up += 1
        return [(2, 1, 6, "", (f"10.0.0.{number}", 80)) for number in range(3)]

    monkeypatch.setattr("stoker.store.dialer.start_connection", refuse)

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        reader = DirectReader(HttpOptions(), "http://bucket.example")
        for _ in range(4):
            with pytest.raises(StoreError):
                await read(reader, Server(url="http://bucket.example"))
        assert sorted(set(first)) == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]
        assert first[0] == first[3]
        assert looked_up == 1
        await asyncio.sleep(11)
        with pytest.raises(StoreError):
            await read(reader, Server(url="http://bucket.example"))
        assert looked_up == 2

    run_virtual(main())
