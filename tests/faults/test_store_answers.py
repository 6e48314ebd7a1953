"""Whatever an endpoint answers to whatever operation, what comes of it is a result or one of our errors."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import pytest

from stoker import GcsOptions, HttpOptions, S3Options, ServedOptions, StoreOptions, open_store
from stoker._format.manifest import POINTER_KEY
from stoker._stores import gcs
from stoker.abc import Store
from stoker.errors import ConnectionLostError, StokerError, TransientError
from support.scripted_server import Server, serving
from support.stores import list_keys, read_range

Transport = Literal["direct", "aiohttp"]


@dataclass(frozen=True)
class Fault:
    """An answer, and how the connection ends: it is closed, reset, or silent until the client leaves."""

    words: bytes = b""
    end: Literal["close", "reset", "silence"] = "close"


def answered(status: str, *headers: str, body: bytes = b"", length: int | None = None) -> bytes:
    lines = (f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body) if length is None else length}", "", "")
    return "\r\n".join(lines).encode() + body


PORTAL = b"<html><body>Please log in</body></html>"
XML = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>We</Message></Error>'
TAGS = ("ETag: x", "x-goog-generation: 1")
RANGED = (*TAGS, "Content-Range: bytes 0-3/10")
FAULTS = {
    "closed": Fault(),
    "reset": Fault(end="reset"),
    "silence": Fault(end="silence"),
    "part of a head": Fault(b"HTTP/1.1 200 OK\r\nContent-Le"),
    "reset in the head": Fault(b"HTTP/1.1 200 OK\r\nContent-Le", "reset"),
    "not HTTP": Fault(b"SSH-2.0-OpenSSH_9\r\n\r\n"),
    "cut": Fault(answered("200 OK", *TAGS, body=b'{"items": [', length=100)),
    "cut JSON": Fault(answered("200 OK", *TAGS, "Content-Type: application/json", body=b'{"items": [')),
    "reset in the body": Fault(answered("200 OK", *TAGS, body=b"0123", length=100), "reset"),
    "silence in the body": Fault(answered("200 OK", *TAGS, body=b"0123", length=100), "silence"),
    "cut range": Fault(answered("206 P", *RANGED, body=b"01", length=4)),
    "silence in a range": Fault(answered("206 P", *RANGED, body=b"01", length=4), "silence"),
    "another range": Fault(answered("206 P", *TAGS, "Content-Range: bytes 5-8/10", body=b"0123")),
    "no range": Fault(answered("206 P", *TAGS, body=b"0123")),
    "a portal's page": Fault(answered("200 OK", "Content-Type: text/html", body=PORTAL)),
    "XML": Fault(answered("200 OK", "Content-Type: application/xml", *TAGS, body=XML)),
    "empty": Fault(answered("200 OK")),
    "null": Fault(answered("200 OK", "Content-Type: application/json", *TAGS, body=b"null")),
    "no content": Fault(b"HTTP/1.1 204 No\r\n\r\n"),
    "cut chunk": Fault(b"HTTP/1.1 200 OK\r\nETag: x\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc"),
    "no chunk": Fault(b"HTTP/1.1 200 OK\r\nETag: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc"),
    "cut refusal": Fault(answered("404 No", "Content-Type: application/json", body=b'{"err', length=100)),
    "silence in a refusal": Fault(answered("503 No", body=b"<Err", length=100), "silence"),
    "XML refusal": Fault(answered("404 No", body=b"<Error><Code>NoSuchKey</Code></Error>")),
    "not text": Fault(answered("404 No", body=b"\xff\xfe{")),
    "deep JSON": Fault(answered("404 No", "Content-Type: application/json", body=b'{"error":' * 5000)),
    "unknown 5xx": Fault(answered("529 No", body=b"{}")),
    "unknown 4xx": Fault(answered("499 No", body=b"[]")),
    "unzipped": Fault(answered("200 OK", *TAGS, "Content-Encoding: gzip", body=b"not gzip")),
    "early hints": Fault(b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n", "silence"),
    "two lengths": Fault(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n01234"),
    "length that is none": Fault(b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n01234"),
    "redirect": Fault(answered("307 Go", "Location: https://127.0.0.1:1/")),
}
READS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "get": lambda store: store.get(POINTER_KEY),
    "range": lambda store: read_range(store, POINTER_KEY, 0, 4),
    "pinned range": lambda store: read_range(store, POINTER_KEY, 0, 4, "1"),
    "empty range": lambda store: read_range(store, POINTER_KEY, 0, 0),
    "head": lambda store: store.head(POINTER_KEY),
    "get of another": lambda store: store.get("data/0123456789abcdef/00000000"),
}
OTHERS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "list": list_keys,
    "put": lambda store: store.put("x", b"0123456789"),
    "put if absent": lambda store: store.put("x", b"0123456789", if_absent=True),
    "put if unchanged": lambda store: store.put("x", b"0123456789", if_tag="1"),
    "delete": lambda store: store.delete("x"),
    "identity": lambda store: store.describe_credentials(),  # type: ignore[attr-defined]  # every store over a network has it
    "endpoint": lambda store: store.describe_endpoint(),  # type: ignore[attr-defined]
}


@asynccontextmanager
async def endpoint(faults: dict[str, Fault], chosen: list[str]) -> AsyncIterator[str]:
    """Serve the fault that is chosen to each request, over connections of their own."""

    async def speak(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        fault = faults[chosen[-1]]
        writer.write(fault.words)
        await writer.drain()
        if fault.end == "reset":
            gone: socket.socket = writer.get_extra_info("socket")
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        elif fault.end == "silence":
            await reader.read()

    async with serving(speak) as server:
        yield server.url


def opened(scheme: str, url: str, transport: Transport, *, silence_seconds: float = 0.04) -> Store:
    http = HttpOptions(transport=transport, read_timeout_seconds=silence_seconds, connect_timeout_seconds=0.2)
    options: StoreOptions
    if scheme == "s3":
        options = S3Options(endpoint_url=url, region="us-east-1", access_key_id="AK", secret_access_key="SK", http=http)
        return open_store("s3://bucket", options=options)
    if scheme == "gs":
        return open_store("gs://bucket", options=GcsOptions(endpoint_url=url, token="T", http=http))
    options = ServedOptions(token="T", http=http)
    return open_store(f"stoker+{url}/v1/ds", options=options)


@pytest.mark.parametrize("transport", ["direct", "aiohttp"])
@pytest.mark.parametrize("scheme", ["s3", "gs", "stoker+http"])
def test_no_answer_to_any_operation_ends_in_an_error_of_another_library(
    scheme: str, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs, "_BUCKET_CHECK_SECONDS", 0.04)
    strangers: dict[tuple[str, str], BaseException] = {}

    async def attempt(store: Store, use: str, fault: str) -> None:
        try:
            async with asyncio.timeout(10.0):  # many times what anything may take
                await (READS | OTHERS)[use](store)
        except StokerError:
            pass
        except Exception as error:  # noqa: BLE001 - that there is none is what is tested
            strangers[use, fault] = error

    async def main() -> None:
        chosen = [""]
        async with endpoint(FAULTS, chosen) as url:
            store = opened(scheme, url, transport)
            for fault in FAULTS:
                chosen.append(fault)
                uses = READS if transport == "aiohttp" else READS | OTHERS
                print(fault, flush=True)
                await asyncio.gather(*(attempt(store, use, fault) for use in uses))
                print("done", flush=True)
            await store.close()

    asyncio.run(main())
    assert strangers == {}


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_interim_answers_without_end_are_a_lost_connection(scheme: str) -> None:
    async def main() -> None:
        async def speak(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            with suppress(ConnectionError):
                while True:
                    writer.write(b"HTTP/1.1 103 Early\r\n\r\n" * 100)
                    await writer.drain()
                    await asyncio.sleep(0)

        async with serving(speak) as server:
            store = opened(scheme, server.url, "direct", silence_seconds=60.0)
            with pytest.raises(ConnectionLostError):
                async with asyncio.timeout(60.0):
                    await store.put("x", b"data")
            await store.close()

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux gives up a peer that takes nothing")
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_request_body_that_the_server_does_not_read_is_a_lost_connection(scheme: str) -> None:
    async def main() -> None:
        over = asyncio.Event()

        async def speak(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # a TCP transport has it
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await over.wait()
            writer.transport.abort()

        async with serving(speak) as server:
            store = opened(scheme, server.url, "direct")
            with pytest.raises(TransientError):
                async with asyncio.timeout(10.0):
                    await store.put("x", bytes(16 << 20))
            over.set()
            await store.close()

    asyncio.run(main())
