"""Objects that are written in parts, against every store: whole or not at all, never over another, nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import stoker
from stoker import RetryingStore, RetryPolicy
from stoker._base.segments import SegmentedBytes
from stoker._base.upload import UPLOAD_PART_BYTES, ObjectUpload, PartWritable
from stoker._maintenance.garbage import collect_garbage
from stoker.abc import Buffer, ObjectInfo, Store
from stoker.errors import NotFoundError, ServerError, StoreError
from stoker.testing import StoreLocation
from stoker_local import LocalBucket
from support.local_bucket import s3_options

PIECE = bytes(range(251)) * 5000
DATA = SegmentedBytes([b"head", *[PIECE] * 27, b"tail"])  # three parts, of which none ends with a buffer
POLICY = RetryPolicy(backoff_base_seconds=0.0, backoff_cap_seconds=0.0, seed=0)


class _BrokenUpload:
    """Fails with an error in the calls with given numbers, before or after the store's own call."""

    def __init__(self, upload: ObjectUpload, failures: dict[int, Exception], *, after: bool = False) -> None:
        self.upload, self.failures, self.after = upload, failures, after
        self.concurrency = upload.concurrency
        self.calls = self.aborts = 0

    async def _fail_or(self, call: Callable[[], Awaitable[Any]]) -> Any:
        error = self.failures.get(self.calls)
        self.calls += 1
        if error is not None and not self.after:
            raise error
        result = await call()
        if error is not None:
            raise error
        return result

    async def put_part(self, number: int, start: int, data: Buffer) -> None:
        await self._fail_or(lambda: self.upload.put_part(number, start, data))

    async def complete(self) -> ObjectInfo:
        info: ObjectInfo = await self._fail_or(self.upload.complete)
        return info

    async def abort(self) -> None:
        self.aborts += 1
        await self.upload.abort()


class BreakingStore(RetryingStore):
    """A store with retries, whose uploads break."""

    def __init__(self, store: Store, failures: dict[int, Exception], *, after: bool = False) -> None:
        super().__init__(store, POLICY)
        self.failures, self.after = failures, after
        self.uploads: list[_BrokenUpload] = []

    async def begin_upload(self, key: str, size_bytes: int) -> ObjectUpload | None:
        upload = await super().begin_upload(key, size_bytes)
        if upload is None:
            pytest.skip("this store holds whole objects in memory")
        self.uploads.append(_BrokenUpload(upload, self.failures, after=self.after))
        return self.uploads[-1]


async def contents(store: Store, key: str) -> bytes:
    info = await store.head(key)
    data = bytearray(info.size_bytes)
    await store.get_range(key, 0, len(data), into=memoryview(data), tag=info.tag)
    return bytes(data)


async def keys(store: Store) -> list[str]:
    return [info.key async for info in store.list("data/")]


def test_an_object_in_parts_is_that_of_one_put(place: StoreLocation) -> None:
    async def check(store: Store) -> None:
        info = await RetryingStore(store).put_once("data/x", DATA)
        assert info is not None
        assert (info.key, info.size_bytes) == ("data/x", len(DATA))
        assert await store.head("data/x") == info
        assert await contents(store, "data/x") == DATA[:]

    place.run(check)


def test_an_existing_object_stays_and_is_accepted_if_it_has_the_same_bytes(place: StoreLocation) -> None:
    if place.needs_single_writer:
        pytest.skip("this emulator ignores conditions")

    async def check(store: Store) -> None:
        retrying = RetryingStore(store)
        first = await retrying.put_once("data/x", DATA)
        assert await retrying.put_once("data/x", SegmentedBytes([DATA[:]])) == first
        other = SegmentedBytes([b"?", DATA[1:]])
        assert await retrying.put_once("data/x", other) is None
        assert await contents(store, "data/x") == DATA[:]

    place.run(check)


@pytest.mark.parametrize("after", [False, True])
def test_a_part_that_fails_is_sent_again(place: StoreLocation, after: bool) -> None:
    if after and place.needs_single_writer:
        pytest.skip("this emulator refuses bytes that it has already, unlike Google")

    async def check(store: Store) -> None:
        breaking = BreakingStore(store, {1: ServerError("?"), 3: ServerError("?")}, after=after)
        assert await breaking.put_once("data/x", DATA) is not None
        assert breaking.uploads[0].aborts == 0
        assert await contents(store, "data/x") == DATA[:]

    place.run(check)


def test_a_completion_whose_response_is_lost_is_recognised(place: StoreLocation) -> None:
    async def check(store: Store) -> None:
        breaking = BreakingStore(store, {3: ServerError("?")}, after=True)
        info = await breaking.put_once("data/x", DATA)
        assert info is not None
        assert await store.head("data/x") == info

    place.run(check)


@pytest.mark.parametrize("call", [0, 1, 3])
def test_an_upload_that_fails_leaves_nothing(place: StoreLocation, call: int) -> None:
    async def check(store: Store) -> None:
        breaking = BreakingStore(store, {call: StoreError("no")})
        with pytest.raises(StoreError, match="no"):
            await breaking.put_once("data/x", DATA)
        assert breaking.uploads[0].aborts == 1
        with pytest.raises(NotFoundError):
            await store.head("data/x")
        assert await keys(store) == []

    place.run(check)


def test_a_cancelled_upload_leaves_nothing(place: StoreLocation) -> None:
    async def check(store: Store) -> None:
        begun = asyncio.Event()

        class Waiting(BreakingStore):
            async def begin_upload(self, key: str, size_bytes: int) -> ObjectUpload | None:
                upload = await super().begin_upload(key, size_bytes)
                begun.set()
                return upload

        waiting = Waiting(store, {})
        writing = asyncio.create_task(waiting.put_once("data/x", DATA))
        await asyncio.wait([writing, asyncio.create_task(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
        if writing.done():
            writing.result()
        writing.cancel()
        await asyncio.wait([writing])
        assert waiting.uploads[0].aborts == 1
        assert await keys(store) == []

    place.run(check)


def test_a_small_object_of_several_buffers_is_one_put(place: StoreLocation) -> None:
    async def check(store: Store) -> None:
        breaking = BreakingStore(store, {})
        assert await breaking.put_once("data/x", SegmentedBytes([b"a", b"", b"bc"])) is not None
        assert breaking.uploads == []
        assert await contents(store, "data/x") == b"abc"

    place.run(check)


def test_slices_of_segments_are_those_of_the_whole() -> None:
    whole = bytes(range(50))
    data = SegmentedBytes([whole[:7], b"", whole[7:8], whole[8:40], whole[40:]])
    assert len(data) == 50
    assert b"".join(data) == whole
    for start in range(51):
        for end in range(51):
            assert bytes(data[start:end]) == whole[start:end]
    assert UPLOAD_PART_BYTES % (256 << 10) == 0


def test_garbage_collection_discards_the_uploads_of_killed_packs(local_bucket: LocalBucket) -> None:
    options, url = s3_options(local_bucket), "s3://stoker/killed"
    with stoker.Packer(url, schema={"x": stoker.Bytes()}, options=options) as packer:
        packer.write({"x": b"1"})

    async def main() -> None:
        store = stoker.open_store(url, options=options)
        assert isinstance(store, PartWritable)
        keys = [f"data/{number:016x}/00000000" for number in range(3)]
        for key in [*keys, "other"]:
            upload = await store.begin_upload(key, 100)
            assert upload is not None
            await upload.put_part(0, 0, b"x")
        report = await collect_garbage(store)
        assert sorted(upload.key for upload in report.uploads) == keys
        await collect_garbage(store, delete=True)
        assert (await collect_garbage(store)).uploads == ()
        assert [upload.key for upload in await store.list_uploads("")] == ["other"]  # type: ignore[attr-defined]
        await store.close()

    asyncio.run(main())
