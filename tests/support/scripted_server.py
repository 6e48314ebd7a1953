"""A server whose responses are a test's own bytes, plain or over TLS, and the requests that it received."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from stoker import HttpOptions
from stoker._stores.http_direct import DirectTransport
from support.tls import Authority

BODY = b"0123456789" * 1000
HEAD = (
    f"HTTP/1.1 206 OK\r\nETag: x\r\nContent-Range: bytes 0-{len(BODY) - 1}/{len(BODY)}\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n"
).encode()
WHOLE = HEAD + BODY

Use = Callable[["Server", DirectTransport], Awaitable[None]]
Speak = Callable[["Server", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Server:
    """Requests that a server received, by connection."""

    url: str = ""
    requests: list[int] = field(default_factory=list)
    connections: int = 0
    hung_up: int = 0


def answer_with(*words: bytes) -> Speak:
    """Return a handler that answers each request with these bytes at once."""

    async def speak(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = server.connections
        while True:
            await reader.readuntil(b"\r\n\r\n")
            server.requests.append(number)
            writer.write(b"".join(words))
            await writer.drain()

    return speak


answer_all = answer_with(WHOLE)


@asynccontextmanager
async def serving(speak: Speak, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """Run ``speak`` on each connection and close it when ``speak`` returns; all have ended at the end of the block."""
    server = Server()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        server.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            await speak(server, reader, writer)
        server.hung_up += 1
        writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()

    listening = await asyncio.start_server(serve, host, 0, ssl=tls)
    named = f"[{host}]" if ":" in host else host
    server.url = f"{'http' if tls is None else 'https'}://{named}:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        await asyncio.sleep(0.01)  # the connection that was accepted last begins to be served
        await asyncio.gather(*tasks)
        await listening.wait_closed()


def with_server(speak: Speak, use: Use, *, authority: Authority | None = None, **options: float) -> None:
    """Run ``use`` with a reader and its server; unhandled errors on the reader's side fail the test."""
    unseen: list[dict[str, Any]] = []

    def note(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "incoming connection" not in context["message"]:  # of the server, about a client that closed the connection
            unseen.append(context)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(note)
        tls, bundle = (None, None) if authority is None else (authority.server, str(authority.bundle))
        async with serving(speak, tls=tls) as server:
            reader = DirectTransport(HttpOptions(**options), server.url, ca_bundle=bundle)  # type: ignore[arg-type]  # numbers all
            try:
                async with asyncio.timeout(60):
                    await use(server, reader)
            finally:
                await reader.close()

    asyncio.run(main())
    assert unseen == []
