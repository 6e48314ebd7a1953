from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from gcloud.aio.storage import Storage
from yarl import URL

from stoker_local import GcsConfig, LocalGcs, running_gcs
from stoker_local._gcs import GcsError, split_upload

DATA = bytes(range(256)) * 40


@asynccontextmanager
async def _opened(config: GcsConfig | None = None) -> AsyncIterator[tuple[LocalGcs, aiohttp.ClientSession, Any]]:
    async with LocalGcs(config) as gcs, aiohttp.ClientSession() as session:
        untyped: Any = session  # gcloud-aio names another class than the one it takes
        yield gcs, session, Storage(session=untyped, api_root=gcs.url)


async def _status(work: Awaitable[object]) -> int:
    with pytest.raises(aiohttp.ClientResponseError) as caught:
        await work
    return caught.value.status


@pytest.mark.parametrize("key", ["plain", "a b/ü+%2F&?#.bin", "x//y", "☃"])
@pytest.mark.parametrize(
    "how",
    [{}, {"metadata": {"cacheControl": "no-store"}}, {"force_resumable_upload": True}],
    ids=["media", "multipart", "resumable"],
)
def test_an_object_comes_back_as_it_was_uploaded(key: str, how: dict[str, Any]) -> None:
    async def exercise() -> None:
        async with _opened() as (_, _, storage):
            uploaded = await storage.upload("stoker", key, DATA, **how)
            assert (uploaded["name"], uploaded["size"]) == (key, str(len(DATA)))
            assert await storage.download("stoker", key) == DATA
            assert await storage.download_metadata("stoker", key) == uploaded
            assert [o["name"] for o in (await storage.list_objects("stoker"))["items"]] == [key]
            await storage.delete("stoker", key)
            assert await _status(storage.download("stoker", key)) == 404
            assert await _status(storage.delete("stoker", key)) == 404

    asyncio.run(exercise())


def test_a_large_object_comes_back_whole_and_in_ranges() -> None:
    large = os.urandom(6 << 20)

    async def exercise() -> None:
        async with _opened() as (_, _, storage):
            await storage.upload("stoker", "large", large)
            assert await storage.download("stoker", "large") == large
            tail = await storage.download("stoker", "large", headers={"Range": "bytes=1000000-"})
            assert tail == large[1_000_000:]

    asyncio.run(exercise())


@pytest.mark.parametrize("how", [{}, {"metadata": {"a": "b"}}, {"force_resumable_upload": True}])
def test_a_write_holds_its_precondition_and_generations_only_grow(how: dict[str, Any]) -> None:
    async def exercise() -> None:
        async with _opened() as (_, _, storage):

            async def put(data: bytes, generation: str) -> int:
                made = await storage.upload("stoker", "k", data, parameters={"ifGenerationMatch": generation}, **how)
                return int(made["generation"])

            first = await put(b"1", "0")
            assert await _status(put(b"2", "0")) == 412
            assert await _status(put(b"2", str(first + 1))) == 412
            assert await storage.download("stoker", "k") == b"1"
            second = await put(b"3", str(first))
            assert second > first
            await storage.delete("stoker", "k")
            assert await put(b"4", "0") > second

    asyncio.run(exercise())


def test_a_read_holds_its_generation() -> None:
    async def exercise() -> None:
        async with _opened() as (gcs, session, storage):
            old = (await storage.upload("stoker", "k", b"old"))["generation"]
            new = (await storage.upload("stoker", "k", b"new"))["generation"]
            url = f"{gcs.url}/storage/v1/b/stoker/o/k"
            expected = {("generation", new): 200, ("generation", old): 404, ("ifGenerationMatch", new): 200}
            expected |= {("ifGenerationMatch", old): 412, ("ifGenerationMatch", "x"): 400}
            for (name, value), status in expected.items():
                async with session.get(url, params={"alt": "media", name: value}) as response:
                    assert (name, response.status) == (name, status)
                    if status == 200:
                        assert (await response.read(), response.headers["x-goog-generation"]) == (b"new", new)
                    else:
                        assert (await response.json())["error"]["code"] == status

    asyncio.run(exercise())


def test_ranges_end_where_they_should() -> None:
    async def exercise() -> None:
        async with _opened() as (gcs, session, storage):
            await storage.upload("stoker", "k", DATA)
            url = f"{gcs.url}/download/storage/v1/b/stoker/o/k?alt=media"
            for header, part in {"bytes=5-9": DATA[5:10], "bytes=10000-": DATA[10000:], "bytes=-7": DATA[-7:]}.items():
                async with session.get(url, headers={"Range": header}) as response:
                    assert (response.status, await response.read()) == (206, part)
            async with session.get(url, headers={"Range": f"bytes={len(DATA)}-"}) as response:
                assert (response.status, response.headers["Content-Range"]) == (416, f"bytes */{len(DATA)}")

    asyncio.run(exercise())


def test_a_listing_is_paged_in_order_from_any_offset() -> None:
    async def exercise() -> None:
        async with _opened() as (gcs, _, storage):
            keys = sorted(f"{folder}/{n}" for folder in "aü" for n in range(5))
            for key in keys:
                await storage.upload("stoker", key, b"x")
            listed: list[str] = []
            token: str | None = ""
            while token is not None:
                page = await storage.list_objects("stoker", params={"maxResults": "3", "pageToken": token})
                listed += [o["name"] for o in page["items"]]
                token = page.get("nextPageToken")
            assert listed == keys
            page = await storage.list_objects("stoker", params={"prefix": "ü/", "startOffset": "ü/3"})
            assert [o["name"] for o in page["items"]] == ["ü/3", "ü/4"]
            assert (await storage.list_objects("stoker", params={"delimiter": "/"}))["prefixes"] == ["a/", "ü/"]
            assert list(gcs.buckets["stoker"]) == keys

    asyncio.run(exercise())


def test_refusals_have_googles_form() -> None:
    async def exercise() -> None:
        config = GcsConfig(token="open sesame", forbidden=("secret",), buckets=("stoker", "secret"))
        async with _opened(config) as (gcs, session, _):
            let_in = {"Authorization": "Bearer open sesame"}

            async def ask(path: str, headers: dict[str, str]) -> tuple[int, str]:
                async with session.get(f"{gcs.url}/storage/v1/b/{path}", headers=headers) as response:
                    error = (await response.json()).get("error", {})
                    assert error.get("code", 200) == response.status
                    return response.status, error["errors"][0]["reason"] if error else ""

            assert await ask("stoker", let_in) == (200, "")
            assert await ask("stoker", {}) == (401, "authError")
            assert await ask("secret/o/k", let_in) == (403, "forbidden")
            assert await ask("nowhere/o", let_in) == (404, "notFound")
            assert await ask("stoker/o/absent", let_in) == (404, "notFound")
            gcs.fail_next(429, retry_after_seconds=2)
            gcs.fail_next(503)
            assert await ask("stoker", let_in) == (429, "rateLimitExceeded")
            assert await ask("stoker", let_in) == (503, "backendError")
            assert await ask("stoker", let_in) == (200, "")
            assert gcs.requests["GET 200"] == 2

    asyncio.run(exercise())


def test_a_bucket_is_made_once() -> None:
    async def exercise() -> None:
        async with _opened() as (gcs, session, storage):
            for name, status in [("new", 200), ("new", 409), ("", 400)]:
                async with session.post(f"{gcs.url}/storage/v1/b?project=p", json={"name": name}) as response:
                    assert response.status == status
            await storage.upload("new", "k", b"x")

    asyncio.run(exercise())


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/related", b""),
        ("multipart/related; boundary=x", b"--x\r\n\r\n{}\r\n--x--"),
        ("multipart/related; boundary=x", b"--x\r\n\r\n[]\r\n--x\r\n\r\ndata\r\n--x--"),
        ("multipart/related; boundary=x", b"--x\r\n\r\n{}\r\n--x\r\n\r\ndata without an end"),
    ],
)
def test_a_malformed_multipart_upload_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(GcsError) as caught:
        split_upload(content_type, body)
    assert caught.value.status == 400


def test_bytes_that_look_like_a_boundary_stay_in_the_object() -> None:
    data = b"\r\n--xy\r\n" + os.urandom(100) + b"\r\n"
    body = (
        b"--x\r\nContent-Type: application/json\r\n\r\n{}\r\n--x\r\nContent-Type: a/b\r\n\r\n" + data + b"\r\n--x--\r\n"
    )
    assert split_upload("multipart/related; boundary=x", body) == ({"contentType": "a/b"}, data)


def test_it_runs_on_a_thread_of_its_own_too() -> None:
    async def read(url: str) -> int:
        async with aiohttp.ClientSession() as session, session.get(URL(f"{url}/storage/v1/b/stoker")) as response:
            return response.status

    with running_gcs() as gcs:
        assert gcs.environment() == {"STORAGE_EMULATOR_HOST": gcs.url}
        assert asyncio.run(read(gcs.url)) == 200
