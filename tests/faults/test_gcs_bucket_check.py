"""gs://: a 404 is the object's, unless Google reports that the bucket is missing; the check has no other effect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stoker import GcsOptions, HttpOptions, open_store
from stoker._format.manifest import POINTER_KEY
from stoker._stores import gcs
from stoker.abc import Store
from stoker.errors import BucketNotFoundError, NotFoundError
from support.scripted_server import Server, Speak, serving

NOT_FOUND = b"HTTP/1.1 404 No\r\nContent-Length: 9\r\n\r\nNot Found"
Check = Callable[[Store, Server], Awaitable[None]]


def speaking(about_bucket: bytes | None) -> Speak:
    """A GCS without objects; a request for the bucket is answered and disconnected, or never answered."""

    async def speak(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            is_object = b"maxResults" not in head
            server.requests.append(int(is_object))
            if is_object or about_bucket:
                writer.write(NOT_FOUND if is_object else about_bucket or b"")
                await writer.drain()
            if not is_object and about_bucket:
                return

    return speak


def run(about_bucket: bytes | None, check: Check, *, transport: str = "direct") -> None:
    async def main() -> None:
        async with serving(speaking(about_bucket)) as server:
            http = HttpOptions(transport=transport, read_timeout_seconds=5)  # type: ignore[arg-type]
            store = open_store("gs://bucket", options=GcsOptions(endpoint_url=server.url, http=http))
            try:
                await check(store, server)
            finally:
                await store.close()

    asyncio.run(main())


ANSWERS = {
    "cut": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
    "not-json": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 3\r\n\r\n<a>",
    "reset": b"H",
    "not-http": b"hello\r\n\r\n",
    "stall": None,
    "500": b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
    "403": b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("transport", ["direct", "aiohttp"])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_bucket_that_cannot_be_requested_leaves_a_missing_manifest_a_missing_object(
    answer: bytes | None, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs, "_BUCKET_CHECK_SECONDS", 0.05)

    async def check(store: Store, server: Server) -> None:
        for read in (store.get, store.head):
            with pytest.raises(NotFoundError) as caught:
                await read(POINTER_KEY)
            assert not isinstance(caught.value, BucketNotFoundError)
        assert 0 in server.requests

    run(answer, check, transport=transport)


def test_a_missing_bucket_is_distinguished_from_a_missing_manifest() -> None:
    async def check(store: Store, _: Server) -> None:
        for read in (store.get, store.head):
            with pytest.raises(BucketNotFoundError):
                await read(POINTER_KEY)

    run(NOT_FOUND, check)


def test_an_object_that_is_missing_takes_one_request() -> None:
    async def check(store: Store, server: Server) -> None:
        with pytest.raises(NotFoundError) as caught:
            await store.get("epochs/0/manifest.safetensors")
        assert not isinstance(caught.value, BucketNotFoundError)
        await store.delete("data/x")
        assert server.requests == [1, 1]

    run(NOT_FOUND, check)
