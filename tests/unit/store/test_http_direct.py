"""Connections that receive straight into the caller's memory: kept, used again, given up, never written to late."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from contextlib import nullcontext
from pathlib import Path

import pytest

from stoker import HttpOptions
from stoker._stores.http import Destination, HttpRequest, HttpResponse
from stoker._stores.http_direct import DirectTransport, _HttpConnection
from stoker.errors import ConnectionLostError, DeadlineError, StoreError, TruncatedError
from stoker.testing import run_virtual
from support.scripted_server import BODY, HEAD, WHOLE, Server, answer_all, answer_with, serving, with_server
from support.waiting import until


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def read(reader: DirectTransport, server: Server, into: bytearray | None = None) -> HttpResponse:
    into = bytearray(len(BODY)) if into is None else into
    call = HttpRequest(method="GET", url=f"{server.url}/k", headers={}, address="s3://b/k")
    reply = await reader.send(call, Destination(memoryview(into), 0, len(BODY)))
    assert into == BODY
    return reply


def test_a_connection_is_used_again() -> None:
    async def use(server: Server, reader: DirectTransport) -> None:
        for _ in range(3):
            await read(reader, server)
        assert server.requests == [1, 1, 1]

    with_server(answer_all, use)


def test_reads_at_once_have_a_connection_each_up_to_the_limit() -> None:
    async def use(server: Server, reader: DirectTransport) -> None:
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

    async def use(server: Server, reader: DirectTransport) -> None:
        await read(reader, server)
        await read(reader, server)
        assert server.requests == [1, 2]

    with_server(once, use)


def test_a_fresh_connection_that_breaks_without_a_word_is_an_error() -> None:
    async def hang_up(_: Server, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async def use(server: Server, reader: DirectTransport) -> None:
        with pytest.raises(ConnectionLostError, match="before a response came"):
            await read(reader, server)
        assert server.connections == 1

    with_server(hang_up, use)


def test_a_connection_that_broke_in_the_middle_is_not_used_again() -> None:
    async def cut(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(WHOLE[:-1] if server.connections == 1 else WHOLE)
        await writer.drain()

    async def use(server: Server, reader: DirectTransport) -> None:
        with pytest.raises(TruncatedError, match="s3://b/k"):
            await read(reader, server)
        await read(reader, server)
        assert server.connections == 2

    with_server(cut, use)


def test_an_unrequested_response_closes_the_connection() -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(WHOLE)
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(WHOLE)  # an answer to nothing; the next read must not take it for its own
        await writer.drain()
        await reader.read()

    async def use(server: Server, reader: DirectTransport) -> None:
        await read(reader, server)
        await until(lambda: server.hung_up > 0)
        await read(reader, server)
        assert server.connections == 2

    with_server(talk, use)


def test_what_comes_behind_an_answer_is_not_the_next_one() -> None:
    async def use(server: Server, reader: DirectTransport) -> None:
        for count in range(1, 4):
            await read(reader, server)
            assert server.connections == count

    with_server(answer_with(WHOLE, WHOLE.replace(b"0", b"x")), use)


def test_a_refusals_connection_is_used_again_unless_something_comes_behind_it() -> None:
    refusal = b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno"

    async def use(server: Server, reader: DirectTransport, connections: int) -> None:
        call = HttpRequest(method="GET", url=f"{server.url}/k", headers={}, address="s3://b/k")
        for _ in range(2):
            reply = await reader.send(call, Destination(memoryview(bytearray(len(BODY))), 0, len(BODY)))
            assert (reply.status, reply.body) == (403, b"no")
        assert server.connections == connections

    with_server(answer_with(refusal), lambda server, reader: use(server, reader, 1))
    with_server(answer_with(refusal, b"HTTP/1.1 200 O"), lambda server, reader: use(server, reader, 2))


def test_an_endpoint_may_be_an_ipv6_address() -> None:
    async def main() -> None:
        async with serving(answer_all, host="::1") as server:
            reader = DirectTransport(HttpOptions(), server.url)
            await read(reader, server)
            await reader.close()

    asyncio.run(main())


def test_a_request_is_sent_again_once_and_only_on_a_fresh_connection() -> None:
    async def first_only(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        server.requests.append(server.connections)
        if server.connections == 1:
            writer.write(WHOLE)
            await reader.readexactly(1)

    async def use(server: Server, reader: DirectTransport) -> None:
        await read(reader, server)
        with pytest.raises(ConnectionLostError):
            await read(reader, server)
        assert server.requests == [1, 2]

    with_server(first_only, use)


def test_what_was_answered_by_a_single_byte_is_not_sent_again() -> None:
    async def one_byte(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(WHOLE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"H")
        await writer.drain()

    async def use(server: Server, reader: DirectTransport) -> None:
        await read(reader, server)
        with pytest.raises(ConnectionLostError):
            await read(reader, server)
        assert server.connections == 1

    with_server(one_byte, use)


@pytest.mark.parametrize(("gap_seconds", "is_silent"), [(0.9, False), (1.1, True)])
def test_a_server_that_drips_is_not_silent_unless_it_pauses_for_too_long(
    monkeypatch: pytest.MonkeyPatch, gap_seconds: float, is_silent: bool
) -> None:
    heard, updated = 0, _HttpConnection.buffer_updated

    def hear(connection: _HttpConnection, count: int) -> None:
        nonlocal heard
        heard += count
        updated(connection, count)

    async def drip(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        pieces = [*5 * [b"HTTP/1.1 100 Continue\r\n\r\n"], HEAD[:9], HEAD[9:]]
        said, loop = 0, asyncio.get_running_loop()
        now_seconds = loop.time()
        with monkeypatch.context() as patch:
            patch.setattr(loop, "time", lambda: now_seconds)  # what the machine takes does not count
            for piece in [*pieces, *(BODY[start : start + 3000] for start in range(0, len(BODY), 3000))]:
                writer.write(piece)
                said += len(piece)
                while heard < said and not (writer.is_closing() or reader.at_eof()):  # noqa: ASYNC110 - by turns
                    await asyncio.sleep(0)
                now_seconds += gap_seconds
                await asyncio.sleep(0)  # for timers that are due

    async def use(server: Server, reader: DirectTransport) -> None:
        with pytest.raises(DeadlineError) if is_silent else nullcontext():
            await read(reader, server)

    monkeypatch.setattr(_HttpConnection, "buffer_updated", hear)
    with_server(drip, use, read_timeout_seconds=1)


def test_a_silent_server_is_given_up_and_its_connection_closed() -> None:
    async def say_half(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(WHOLE[: len(WHOLE) // 2])
        await writer.drain()
        await reader.read()

    async def use(server: Server, reader: DirectTransport) -> None:
        with pytest.raises(DeadlineError, match=r"sent nothing for 0\.1 s"):
            await read(reader, server)
        await until(lambda: server.hung_up > 0)

    with_server(say_half, use, read_timeout_seconds=0.1)


def test_a_cancelled_read_writes_nothing_more_wherever_it_stood() -> None:
    async def drip(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(WHOLE), 500):
            writer.write(WHOLE[start : start + 500])
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()

    async def use(server: Server, reader: DirectTransport) -> None:
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


def test_a_storm_of_cancellations_loses_no_permit_and_no_descriptor() -> None:
    guard = b"\xa5" * 64
    chance = random.Random(1)

    async def use(server: Server, reader: DirectTransport) -> None:
        call = HttpRequest(method="GET", url=f"{server.url}/k", headers={}, address="s3://b/k")
        before = open_descriptors()
        for _ in range(100):
            memories = [bytearray(guard + bytes(len(BODY)) + guard) for _ in range(10)]
            places = [Destination(memoryview(memory)[64:-64], 0, len(BODY)) for memory in memories]
            tasks = [asyncio.ensure_future(reader.send(call, place)) for place in places]
            for _ in range(chance.randrange(20)):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            seen = list(map(bytes, memories))
            await asyncio.sleep(0)
            assert memories == seen
            assert all(memory[:64] == memory[-64:] == guard for memory in memories)
        await asyncio.gather(*(read(reader, server) for _ in range(6)))
        await reader.close()
        await until(lambda: open_descriptors() <= before)

    with_server(answer_all, use, max_connections=3)


@pytest.mark.parametrize("point", [None, 0, 5, len(HEAD), len(HEAD) + 7, len(WHOLE) - 1])
def test_a_reset_at_any_point_is_a_typed_error_and_the_next_read_begins_anew(point: int | None) -> None:
    async def reset(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if point is not None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(WHOLE[:point])
            await writer.drain()
        if server.connections == 2:
            writer.write(WHOLE[point:])
            return
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async def use(server: Server, reader: DirectTransport) -> None:
        # What is received before the reset may be lost with it.
        late = TruncatedError if point and point >= len(HEAD) else ConnectionLostError
        with pytest.raises((ConnectionLostError, late)):
            await read(reader, server)
        if point is not None:
            await read(reader, server)
            assert server.connections == 2

    with_server(reset, use)


def test_closing_breaks_what_is_under_way() -> None:
    async def say_nothing(_: Server, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await reader.read()

    async def use(server: Server, reader: DirectTransport) -> None:
        task = asyncio.ensure_future(read(reader, server))
        await until(lambda: server.connections > 0)
        await reader.close()
        with pytest.raises(ConnectionLostError, match="s3://b/k"):
            await task

    with_server(say_nothing, use)


@pytest.mark.parametrize("kept", [False, True])
def test_closing_breaks_what_waits_for_a_connection_or_makes_one(kept: bool) -> None:
    async def use(server: Server, reader: DirectTransport) -> None:
        if kept:
            await read(reader, server)
        tasks = [asyncio.ensure_future(read(reader, server)) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await reader.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, ConnectionLostError)
        await until(lambda: server.hung_up == server.connections)

    with_server(answer_all, use, max_connections=2)


def test_a_missing_listener_is_a_lost_connection() -> None:
    async def main() -> None:
        listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        server = Server(url=f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        listening.close()
        await listening.wait_closed()
        reader = DirectTransport(HttpOptions(), server.url)
        with pytest.raises(ConnectionLostError, match="could not be made"):
            await read(reader, server)

    asyncio.run(main())


def test_a_host_without_an_address_is_a_connection_lost() -> None:
    async def main() -> None:
        reader = DirectTransport(HttpOptions(), "http://no-such-host.invalid:80")
        with pytest.raises(ConnectionLostError, match="could not be made"):
            await read(reader, Server(url="http://no-such-host.invalid:80"))

    asyncio.run(main())


def test_a_connection_that_takes_too_long_to_make_is_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.sleep(1e6)

    monkeypatch.setattr("stoker._stores.http_direct.start_connection", never)

    async def main() -> None:
        reader = DirectTransport(HttpOptions(), "http://127.0.0.1:80")
        with pytest.raises(DeadlineError, match="took more than 10 s"):
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

    monkeypatch.setattr("stoker._stores.http_direct.start_connection", refuse)

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        reader = DirectTransport(HttpOptions(), "http://bucket.example")
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
