"""What every store that can be read does with a data set: buckets, and what a function serves of them over HTTP."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest

import stoker
from stoker import HttpOptions, S3Options, ServedOptions, StoreOptions, open_store
from stoker._format.manifest import POINTER_KEY, Manifest, version_key
from stoker.abc import ObjectInfo, Store
from stoker.errors import BucketNotFoundError, ConfigError, NotFoundError, ObjectChangedError, TruncatedError
from stoker_functions.serve import LAMBDA_ANSWER_BYTES
from stoker_local import KeyPair
from support.authenticators import OPEN, REGION, IamAuthenticator, enter
from support.datasets import SCHEMA, sample_of
from support.local_bucket import s3_options
from support.serving_host import running_service
from support.stores import list_keys, read_range, run_check

SAMPLES = 60
CALLER = KeyPair(access_key="caller", secret_key="caller-secret", session_token="caller-token")
Check = Callable[[Store], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class ReadableStore:
    """A data set of two versions, and how to read it.

    Attributes:
        objects: what its bucket holds, by key.
        statuses: what a function has answered so far, if it is served.
        is_redirecting: whether the function sends its readers to the bucket.
    """

    url: str
    missing_url: str
    options: StoreOptions | None = None
    objects: dict[str, tuple[bytes, ObjectInfo]] = field(repr=False)
    statuses: list[int] = field(default_factory=list, repr=False)
    is_redirecting: bool = False

    @property
    def newest(self) -> Manifest:
        return Manifest.from_bytes(self.objects[POINTER_KEY][0])

    @property
    def key(self) -> str:
        """That of a super-sample in the middle."""
        return self.newest.key(len(self.newest) // 2)

    def open(self) -> Store:
        return open_store(self.url, options=self.options)

    def run(self, check: Check) -> None:
        run_check(self.open(), check)


def filled(url: str, options: StoreOptions | None) -> dict[str, tuple[bytes, ObjectInfo]]:
    """Pack two versions to an empty place and return the objects there."""
    for start, end in ((0, 40), (40, SAMPLES)):
        mode: Any = "append" if start else "create"
        with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=800, options=options, mode=mode) as packer:
            packer.extend(map(sample_of, range(start, end)))
    found: dict[str, tuple[bytes, ObjectInfo]] = {}

    async def collect(store: Store) -> None:
        found.update({key: await store.get(key) for key in await list_keys(store)})

    run_check(open_store(url, options=options), collect)
    return found


PLACES = ("memory", "bucket", "served", "served-aiohttp", "redirecting", "redirecting-aiohttp", "redirecting-iam")
_serial = count()


@pytest.fixture(scope="module", params=PLACES)
def readable(request: pytest.FixtureRequest) -> Iterator[ReadableStore]:
    name: str = request.param
    options: S3Options | None = None
    number = next(_serial)  # the fixture may be made again for one place, after others
    url, missing_url = f"memory://readable-{number}/ds", "memory://no-such-bucket"
    if name.startswith(("bucket", "redirecting")):
        url, missing_url = f"s3://stoker/readable-{number}", "s3://no-such-bucket"
        options = s3_options(request.getfixturevalue("local_bucket"))
    objects = filled(url, options)
    with ExitStack() as stack:
        if name in ("memory", "bucket"):
            yield ReadableStore(url=url, missing_url=missing_url, options=options, objects=objects)
            return
        is_redirecting = name.startswith("redirecting")
        answer_bytes = 1 if is_redirecting else LAMBDA_ANSWER_BYTES
        authenticator, auth = OPEN, ServedOptions()
        if name.endswith("iam"):
            authenticator, auth = IamAuthenticator(CALLER), ServedOptions(auth="aws", region=REGION)
            enter(stack.enter_context(pytest.MonkeyPatch.context()), CALLER)
        hosted = stack.enter_context(
            running_service({"ds": url}, options, answer_bytes=answer_bytes, authenticator=authenticator)
        )
        yield ReadableStore(
            url=hosted.dataset("ds"),
            missing_url=hosted.dataset("other"),
            options=replace(auth, http=HttpOptions(transport="aiohttp" if name.endswith("aiohttp") else "direct")),
            objects=objects,
            statuses=hosted.statuses,
            is_redirecting=is_redirecting,
        )


def test_every_object_is_read_whole_with_the_size_and_tag_that_its_bucket_says(readable: ReadableStore) -> None:
    newest = readable.newest
    keys = [POINTER_KEY, version_key(1), version_key(2), *map(newest.key, range(len(newest)))]

    async def check(store: Store) -> None:
        for key in keys:
            assert await store.get(key) == readable.objects[key]
            assert await store.head(key) == readable.objects[key][1]

    assert newest.version == 2
    readable.run(check)
    assert (307 in readable.statuses) == readable.is_redirecting


def test_super_samples_are_listed_in_order_below_a_prefix_and_after_a_key(readable: ReadableStore) -> None:
    data = sorted(key for key in readable.objects if key.startswith("data/"))
    run = data[0].rpartition("/")[0]

    async def check(store: Store) -> None:
        assert [info async for info in store.list("data/")] == [readable.objects[key][1] for key in data]
        assert await list_keys(store, "data/", start_after=data[2]) == data[3:]
        assert await list_keys(store, f"{run}/0") == [key for key in data if key.startswith(run)]
        assert await list_keys(store, "datum") == []
        everything = await list_keys(store)
        assert everything == sorted(everything)
        assert {*data, POINTER_KEY, version_key(2)} <= set(everything)
        assert version_key(2) in await list_keys(store, "manifests/")
        assert POINTER_KEY in await list_keys(store, "manifest", start_after=data[-1])

    readable.run(check)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, -1), (5, 5), (-2, -1), (100, 300), (-1, -1)])
def test_a_range_fills_exactly_the_memory_it_was_given(readable: ReadableStore, start: int, end: int) -> None:
    body, info = readable.objects[readable.key]
    start, end = (len(body) + 1 + place if place < 0 else place for place in (start, end))

    async def check(store: Store) -> None:
        surrounded = bytearray(b"\xee" * (end - start + 16))
        into = memoryview(surrounded)[8 : 8 + end - start]
        assert await store.get_range(readable.key, start, end, into=into, tag=info.tag) == info
        assert surrounded == b"\xee" * 8 + body[start:end] + b"\xee" * 8

    readable.run(check)


def test_the_first_byte_is_reported_at_most_once_and_never_for_an_error(readable: ReadableStore) -> None:
    body, _ = readable.objects[readable.key]

    async def check(store: Store) -> None:
        told: list[str] = []
        into = memoryview(bytearray(len(body)))
        await store.get_range(readable.key, 0, len(body), into=into, begun=lambda: told.append("begun"))
        assert told == ([] if store.url.startswith("memory:") else ["begun"])
        told.clear()
        with pytest.raises(NotFoundError):
            await store.get_range(version_key(9), 0, 1, into=into[:1], begun=lambda: told.append("begun"))
        assert told == []

    readable.run(check)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (-1, 1), (0, 2), (1, 1), (10_000, 10_001)])
def test_a_range_beyond_the_end_is_truncated(readable: ReadableStore, start: int, end: int) -> None:
    size = len(readable.objects[readable.key][0])

    async def check(store: Store) -> None:
        with pytest.raises(TruncatedError, match=readable.key):
            await read_range(store, readable.key, size + start, size + end)

    readable.run(check)


def test_a_read_pinned_to_another_tag_is_refused(readable: ReadableStore) -> None:
    async def check(store: Store) -> None:
        for key in (readable.key, POINTER_KEY):
            body, info = readable.objects[key]
            for end in (len(body), 1, 0):
                with pytest.raises(ObjectChangedError):
                    await read_range(store, key, 0, end, "another-store's-tag")
                assert await read_range(store, key, 0, end, info.tag) == body[:end]

    readable.run(check)


def test_a_missing_object_is_not_found_and_its_data_set_is(readable: ReadableStore) -> None:
    keys = ("x", "packs/x", version_key(9), "data/0123456789abcdef/00000000", f"{readable.key[:-8]}99999999")

    async def check(store: Store) -> None:
        for key in keys:
            for read in (store.get(key), store.head(key), read_range(store, key, 0, 1)):
                with pytest.raises(NotFoundError) as caught:
                    await read
                assert not isinstance(caught.value, BucketNotFoundError)

    readable.run(check)


def test_a_missing_data_set_is_distinguished_from_a_missing_object(readable: ReadableStore) -> None:
    async def check(store: Store) -> None:
        for read in (
            store.get(POINTER_KEY),
            store.head(readable.key),
            read_range(store, readable.key, 0, 1),
            list_keys(store),
        ):
            with pytest.raises(BucketNotFoundError):
                await read

    run_check(open_store(readable.missing_url, options=readable.options), check)


def test_many_reads_at_once_do_not_mix_their_bytes(readable: ReadableStore) -> None:
    data = sorted(key for key in readable.objects if key.startswith("data/"))
    ranges = [(key, start, start + 97) for key in data for start in range(0, 200, 20)]

    async def check(store: Store) -> None:
        found = await asyncio.gather(*(read_range(store, *each) for each in ranges))
        assert found == [readable.objects[key][0][start:end] for key, start, end in ranges]

    readable.run(check)


def test_a_cancelled_read_writes_nothing_more_and_harms_no_later_one(readable: ReadableStore) -> None:
    body, _ = readable.objects[readable.key]

    async def check(store: Store) -> None:
        for patience in (0, 1, 5, 25):
            into = bytearray(len(body))
            read = asyncio.ensure_future(store.get_range(readable.key, 0, len(body), into=memoryview(into)))
            for _ in range(patience):
                await asyncio.sleep(0)
            read.cancel()
            await asyncio.wait([read])
            seen = bytes(into)
            await asyncio.sleep(0.01)
            assert into == seen
            assert await read_range(store, readable.key, 0, len(body)) == body

    readable.run(check)


@pytest.mark.parametrize("key", ["", "/absolute", "nul\0", "lone-\ud800", "k" * 1025])
def test_a_key_that_no_bucket_can_hold_is_refused(readable: ReadableStore, key: str) -> None:
    async def check(store: Store) -> None:
        for call in (store.get(key), store.head(key), store.put(key, b""), store.delete(key)):
            with pytest.raises(ConfigError):
                await call

    readable.run(check)


@pytest.mark.parametrize(("start", "end", "room"), [(-1, 1, 2), (2, 1, 0), (0, 4, 3), (0, 4, 5)])
def test_a_range_that_does_not_fit_its_memory_is_refused(
    readable: ReadableStore, start: int, end: int, room: int
) -> None:
    async def check(store: Store) -> None:
        with pytest.raises(ConfigError):
            await store.get_range(readable.key, start, end, into=memoryview(bytearray(room)))
        for text in ({"prefix": "\ud800"}, {"start_after": "\ud800"}):
            with pytest.raises(ConfigError):
                await list_keys(store, **text)

    readable.run(check)


def test_a_closed_store_can_be_used_again_in_this_loop_and_in_another(readable: ReadableStore) -> None:
    store = readable.open()

    async def twice() -> None:
        for _ in range(2):
            assert await store.get(readable.key) == readable.objects[readable.key]
            await store.close()
            await store.close()

    asyncio.run(twice())
    asyncio.run(twice())


def test_a_forked_child_reads_and_leaves_its_parents_connections_alone(readable: ReadableStore) -> None:
    store, wanted = readable.open(), readable.objects[readable.key][0][:4]

    async def read() -> bytes:
        return await read_range(store, readable.key, 0, 4)

    with asyncio.Runner() as runner:
        assert runner.run(read()) == wanted
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the servers under test are threads of ours
            child = os.fork()
        if child == 0:
            status = 1
            try:
                status = int(asyncio.run(read()) != wanted)
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert runner.run(asyncio.wait_for(read(), 60)) == wanted
        runner.run(store.close())
