"""Reads over TLS: how it ends, and what is left when it is cancelled."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stoker import HttpOptions
from stoker._stores.http import Destination, HttpRequest, HttpResponse
from stoker._stores.http_direct import Connector, DirectTransport, _HttpConnection
from stoker.errors import ConnectionLostError, DeadlineError, TruncatedError
from support.scripted_server import BODY, HEAD, WHOLE, Server, answer_all, answer_with, serving, with_server
from support.tls import Authority, make_authority
from support.waiting import until

GUARD = b"\xa5" * 64


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls"))


async def read(reader: DirectTransport, server: Server) -> HttpResponse:
    """Read the body between guard bytes."""
    memory = bytearray(GUARD + bytes(len(BODY)) + GUARD)
    call = HttpRequest(method="GET", url=f"{server.url}/k", headers={}, address="s3://b/k")
    try:
        reply = await reader.send(call, Destination(memoryview(memory)[64:-64], 0, len(BODY)))
        assert memory[64:-64] == BODY
    except asyncio.CancelledError:
        seen = bytes(memory)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert memory == seen
        raise
    finally:
        assert memory[:64] == memory[-64:] == GUARD
    return reply


def test_records_of_any_size_make_an_answer(authority: Authority) -> None:
    async def speak(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for size in (1, 100, 5000, len(WHOLE)):
            await reader.readuntil(b"\r\n\r\n")
            for start in range(0, len(WHOLE), size) if size > 1 else range(len(HEAD) + 9):
                writer.write(WHOLE[start : start + size])
            writer.write(WHOLE[len(HEAD) + 9 :] if size == 1 else b"")
            await writer.drain()

    async def use(server: Server, reader: DirectTransport) -> None:
        for _ in range(4):
            await read(reader, server)
        assert server.connections == 1

    with_server(speak, use, authority=authority)


@pytest.mark.parametrize("farewell", [True, False], ids=["farewell", "none"])
@pytest.mark.parametrize(
    ("said", "error"),
    [
        (0, ConnectionLostError),
        (30, ConnectionLostError),
        (len(HEAD), TruncatedError),
        (len(WHOLE) - 1, TruncatedError),
    ],
    ids=["nothing", "head", "no-body", "body"],
)
def test_a_connection_that_ends_early_is_a_typed_error(
    authority: Authority, said: int, error: type[Exception], farewell: bool
) -> None:
    async def cut(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(WHOLE[:said])
        await writer.drain()
        if not farewell:
            writer.transport.abort()

    async def use(server: Server, reader: DirectTransport) -> None:
        with pytest.raises(error, match="s3://b/k"):
            await read(reader, server)

    with_server(cut, use, authority=authority)


@pytest.mark.parametrize("farewell", [True, False], ids=["farewell", "none"])
def test_a_connection_that_ended_while_it_was_idle_is_replaced(authority: Authority, farewell: bool) -> None:
    async def once(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(WHOLE)
        await writer.drain()
        if not farewell:
            writer.transport.abort()

    async def use(server: Server, reader: DirectTransport) -> None:
        for count in (1, 2, 3):
            await read(reader, server)
            assert server.connections == count
            await until(lambda: server.hung_up == server.connections)

    with_server(once, use, authority=authority)


def test_what_comes_behind_an_answer_is_not_the_next_one(authority: Authority) -> None:
    async def use(server: Server, reader: DirectTransport) -> None:
        for count in (1, 2, 3):
            await read(reader, server)
            assert server.connections == count

    with_server(answer_with(WHOLE, WHOLE.replace(b"0", b"x")), use, authority=authority)


def test_a_storm_of_cancellations_loses_no_permit_and_no_connection(authority: Authority) -> None:
    chance = random.Random(1)

    async def use(server: Server, reader: DirectTransport) -> None:
        for _ in range(40):
            tasks = [asyncio.ensure_future(read(reader, server)) for _ in range(5)]
            for _ in range(chance.randrange(40)):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, HttpResponse | asyncio.CancelledError)
        await asyncio.gather(*(read(reader, server) for _ in range(6)))
        await reader.close()
        await until(lambda: server.hung_up == server.connections)

    with_server(answer_all, use, authority=authority, max_connections=3)


def test_an_unanswered_handshake_ends_at_the_deadline(authority: Authority) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            url = f"https://127.0.0.1:{listening.getsockname()[1]}"
            reader = DirectTransport(HttpOptions(connect_timeout_seconds=0.1), url, ca_bundle=str(authority.bundle))
            with pytest.raises(DeadlineError, match=r"took more than 0\.1 s"):
                await reader.send(HttpRequest(method="GET", url=f"{url}/k", headers={}, address="s3://b/k"))

    asyncio.run(main())


def test_a_server_without_tls_is_a_lost_connection(authority: Authority) -> None:
    async def refuse(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad\r\n\r\n")

    async def main() -> None:
        async with serving(refuse) as server:
            url = server.url.replace("http", "https")
            reader = DirectTransport(HttpOptions(), url, ca_bundle=str(authority.bundle))
            with pytest.raises(ConnectionLostError, match="could not be made"):
                await reader.send(HttpRequest(method="GET", url=f"{url}/k", headers={}, address="s3://b/k"))

    asyncio.run(main())


class _Cancelling(_HttpConnection):
    """Cancels the connecting task at the end of the handshake."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        super().__init__(memoryview(bytearray(1)))
        self._task = task
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._task.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


def test_a_connection_cancelled_as_it_is_made_is_closed_without_waiting_for_the_server(authority: Authority) -> None:
    async def main() -> None:
        async with serving(answer_all, tls=authority.server) as server:
            dialer = Connector(server.url, ssl.create_default_context(cafile=authority.bundle), 10)
            made: list[_Cancelling] = []

            def make() -> _Cancelling:
                made.append(_Cancelling(task))
                return made[0]

            task: asyncio.Task[object] = asyncio.ensure_future(dialer.connect(make, "s3://b/k"))
            await asyncio.wait([task])
            assert task.cancelled()
            await asyncio.sleep(0)
            assert made[0].is_lost

    asyncio.run(main())


LARGE = bytes(range(256)) * 4000


@contextmanager
def hanging_up(authority: Authority, answer: bytes) -> Iterator[str]:
    """Answer from a thread, ahead of a slow reader, and hang up right behind the answer."""

    def serve() -> None:
        while True:
            try:
                plain, _ = listening.accept()
            except OSError:
                return
            with authority.server.wrap_socket(plain, server_side=True) as speaking:
                while not speaking.recv(1 << 16).endswith(b"\r\n\r\n"):
                    pass
                speaking.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"https://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"Content-Length: %d\r\n\r\n%s" % (len(LARGE), LARGE),
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(LARGE), LARGE),
    ],
    ids=["sized", "chunked"],
)
def test_nothing_is_lost_of_an_answer_behind_which_the_server_hangs_up(authority: Authority, answer: bytes) -> None:
    async def main(url: str) -> None:
        reader = DirectTransport(HttpOptions(), url, ca_bundle=str(authority.bundle))
        for _ in range(8):
            asyncio.get_running_loop().call_later(0.01, time.sleep, 0.05)  # the answer and its end are there at once
            reply = await reader.send(HttpRequest(method="GET", url=f"{url}/k", headers={}, address="s3://b/k"))
            assert reply.body == LARGE
        await reader.close()

    with hanging_up(authority, b"HTTP/1.1 200 OK\r\n" + answer) as url:
        asyncio.run(main(url))
