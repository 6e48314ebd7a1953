"""What every transport of reads makes of an answer, good or bad: one suite for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Literal

import pytest

from stoker import HttpOptions
from stoker._stores.http import Destination, HttpRequest, HttpResponse, HttpTransport
from stoker._stores.http_session import Connections
from stoker.errors import ConfigError, ConnectionLostError, ServerError, StoreError, TruncatedError

BODY = b"0123456789"


def head(*lines: str, status: str = "206 Partial Content") -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *lines, "", "")).encode()


def serve(answer: bytes, use: Callable[[str], Awaitable[None]]) -> bytes:
    """Run ``use(url)`` against a server that sends ``answer`` and disconnects; return the requests."""
    asked: list[bytes] = []

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def main() -> None:
        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        async with server:
            await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/b/a%2Fb%20c+%C3%BC?x=%2F")

    asyncio.run(main())
    return asked[0]


Transport = Literal["direct", "aiohttp"]
TRANSPORTS: list[Transport] = ["direct", "aiohttp"]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Transport:
    carrier: Transport = request.param
    return carrier


@asynccontextmanager
async def reader_of(url: str, transport: Transport) -> AsyncIterator[HttpTransport]:
    connections = Connections(HttpOptions(transport=transport), url)
    try:
        yield connections.reader
    finally:
        await connections.close()


def read(transport: Transport, answer: bytes, start: int = 2, end: int = 7) -> tuple[HttpResponse, bytes, bytes]:
    """Return the reply, the caller's memory and the request of a read of ``[start, end)``."""
    into = bytearray(end - start)
    replies: list[HttpResponse] = []

    async def use(url: str) -> None:
        async with reader_of(url, transport) as reader:
            call = HttpRequest(method="GET", url=url, headers={}, address="s3://b/k")
            replies.append(await reader.send(call, Destination(memoryview(into), start, end)))

    asked = serve(answer, use)
    return replies[0], bytes(into), asked


def test_a_range_arrives_in_the_callers_memory_with_the_objects_size(transport: Transport) -> None:
    reply, into, _ = read(transport, head("Content-Range: bytes 2-6/10", "Content-Length: 5", "ETag: x") + BODY[2:7])
    assert into == BODY[2:7]
    assert reply.size_bytes == 10
    assert reply.headers["ETag"] == "x"
    assert not reply.is_error


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (head("Content-Range: bytes 2-6/10", "Content-Length: 5") + BODY[2:7], 1),
        (head("Content-Range: bytes 2-6/10", "Transfer-Encoding: chunked") + b"5\r\n23456\r\n0\r\n\r\n", 1),
        (head("Content-Range: bytes 2-6/10", "Content-Length: 5") + BODY[2:5], 1),
        (head("Content-Length: 0", status="503 Slow Down"), 0),
        (head("Content-Range: bytes 3-7/10", "Content-Length: 5") + BODY[3:8], 0),
    ],
    ids=["sized", "chunked", "cut-short", "refused", "another-range"],
)
def test_the_first_byte_of_a_request_is_reported(transport: Transport, answer: bytes, told: int) -> None:
    begun: list[None] = []

    async def use(url: str) -> None:
        async with reader_of(url, transport) as reader:
            call = HttpRequest(method="GET", url=url, headers={}, address="s3://b/k")
            destination = Destination(memoryview(bytearray(5)), 2, 7, lambda: begun.append(None))
            with suppress(StoreError):
                await reader.send(call, destination)

    serve(answer, use)
    assert len(begun) == told


def test_a_chunked_range_arrives_as_well(transport: Transport) -> None:
    chunks = b"2\r\n23\r\n3\r\n456\r\n0\r\n\r\n"
    _, into, _ = read(transport, head("Content-Range: bytes 2-6/10", "Transfer-Encoding: chunked") + chunks)
    assert into == BODY[2:7]


def test_the_url_goes_out_as_it_was_signed_and_requests_no_compression(transport: Transport) -> None:
    _, _, asked = read(transport, head("Content-Range: bytes 2-6/10", "Content-Length: 5") + BODY[2:7])
    assert asked.startswith(b"GET /b/a%2Fb%20c+%C3%BC?x=%2F HTTP/1.1\r\n")
    assert b"accept-encoding: identity\r\n" in asked.lower()


def test_a_compressed_object_is_not_unpacked(transport: Transport) -> None:
    lines = ("Content-Range: bytes 2-6/10", "Content-Length: 5", "Content-Encoding: gzip")
    assert read(transport, head(*lines) + BODY[2:7])[1] == BODY[2:7]


def test_the_whole_object_may_come_without_a_range(transport: Transport) -> None:
    reply, into, _ = read(transport, head("Content-Length: 10", status="200 OK") + BODY, 0, 10)
    assert (into, reply.size_bytes) == (BODY, 10)


@pytest.mark.parametrize(
    "answer",
    [
        head("Content-Range: bytes 2-6/10", "Content-Length: 5") + BODY[2:5],
        head("Content-Range: bytes 2-6/10", "Content-Length: 3") + BODY[2:5],
        head("Content-Range: bytes 2-6/10", "Content-Length: 7") + BODY[2:9],
        head("Content-Range: bytes 2-6/10") + BODY[2:5],
        head("Content-Range: bytes 2-6/10") + BODY[2:9],
        head("Content-Range: bytes 2-5/6", "Content-Length: 4") + BODY[2:6],
    ],
    ids=["hangs-up", "short-length", "long-length", "short-unsized", "long-unsized", "object-too-short"],
)
def test_a_body_of_another_length_than_requested_is_truncated(transport: Transport, answer: bytes) -> None:
    with pytest.raises(TruncatedError, match="s3://b/k"):
        read(transport, answer)


@pytest.mark.parametrize(
    "answer",
    [
        head("Content-Length: 10", status="200 OK") + BODY,
        head("Content-Length: 5", status="200 OK") + BODY[2:7],
        head("Content-Length: 5") + BODY[2:7],
        head("Content-Range: bytes 3-7/10", "Content-Length: 5") + BODY[3:8],
        head("Content-Range: bytes 2-9/10", "Content-Length: 8") + BODY[2:],
        head("Content-Range: pages 2-6/*", "Content-Length: 5") + BODY[2:7],
    ],
    ids=["ignores", "pretends", "silent", "another", "longer", "nonsense"],
)
def test_an_answer_about_another_range_is_refused(transport: Transport, answer: bytes) -> None:
    with pytest.raises(StoreError, match=r"[rR]ange") as caught:
        read(transport, answer)
    assert not isinstance(caught.value, TruncatedError)


@pytest.mark.parametrize(("answer", "kind"), [(b"", ConnectionLostError), (b"SSH-2.0-OpenSSH\r\n\r\n", ServerError)])
def test_what_is_no_http_is_a_transient_error(transport: Transport, answer: bytes, kind: type[StoreError]) -> None:
    with pytest.raises(kind):
        read(transport, answer)


def test_a_redirect_is_returned_not_followed(transport: Transport) -> None:
    moved = head("Location: http://127.0.0.1:1/elsewhere", "Content-Length: 3", status="301 Moved") + b"why"
    reply, into, _ = read(transport, moved)
    assert (reply.is_error, reply.status, reply.body) == (True, 301, b"why")
    assert into == bytes(5)


def test_an_error_document_is_cut_at_64_kib(transport: Transport) -> None:
    reply, _, _ = read(transport, head(f"Content-Length: {1 << 20}", status="500 No") + b"e" * (1 << 20))
    assert reply.body == b"e" * (64 << 10)


def test_an_invalid_url_is_a_configuration_error(transport: Transport) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError):
            async with reader_of("http:///nohost", transport) as reader:
                await reader.send(HttpRequest(method="GET", url="http:///nohost", headers={}, address="s3://b/k"))

    asyncio.run(main())


@pytest.mark.parametrize("value", ["secret\n", "sec\r\nret: 1", " secret", "s\u00e9cret", "sec\x00ret"])
def test_a_header_that_http_cannot_carry_is_a_configuration_error_that_does_not_tell_it(value: str) -> None:
    with pytest.raises(ConfigError, match="header X-Token") as caught:
        HttpRequest(method="GET", url="http://host/k", headers={"X-Token": value}, address="s3://b/k")
    assert "cret" not in str(caught.value)
