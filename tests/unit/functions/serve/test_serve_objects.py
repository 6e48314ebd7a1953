"""Manifests and super-samples as they are answered: bytes, ranges, conditions, redirects and errors."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import stoker
from stoker import Operation, open_store
from stoker._format.manifest import POINTER_KEY, Manifest, version_key
from stoker._format.versions import read_manifest
from stoker.abc import ObjectInfo, Store
from stoker.errors import (
    CredentialsError,
    FetchError,
    NotFoundError,
    PermissionDeniedError,
    ServerError,
    StokerError,
    StoreError,
    ThrottledError,
)
from stoker.testing import WatchedStore
from stoker_functions.serve import Request, Response, Service
from support.datasets import SCHEMA, pack_numbers, sample_of
from support.places import with_store
from support.served_requests import ask, error_of, serving, with_service

FOR_GOOD, TO_COMPARE = "private, max-age=31536000, immutable", "private, no-cache"


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(100, super_sample_bytes=1200)


@pytest.fixture(scope="module")
def manifest(url: str) -> Manifest:
    found: Manifest = with_store(url, read_manifest)
    return found


def stored(url: str, key: str) -> tuple[bytes, ObjectInfo]:
    found: tuple[bytes, ObjectInfo] = with_store(url, lambda store: store.get(key))
    return found


def test_a_manifest_is_served_unchanged(url: str) -> None:
    body, info = stored(url, POINTER_KEY)
    response = ask(serving(url), "/v1/ds/manifest")
    assert (response.status, response.body) == (200, body)
    assert response.headers["ETag"] == f'"{info.tag}"'
    assert response.headers["Content-Type"] == "application/octet-stream"
    assert response.headers["Cache-Control"] == TO_COMPARE
    pinned = ask(serving(url), "/v1/ds/manifest", "version=1")
    assert (pinned.status, pinned.body) == (200, body)
    assert pinned.headers["Cache-Control"] == FOR_GOOD


def test_a_super_sample_is_a_row_of_the_manifest(url: str, manifest: Manifest) -> None:
    for row in range(len(manifest)):
        body, info = stored(url, manifest.key(row))
        response = ask(serving(url), f"/v1/ds/super-samples/{row}", "version=1")
        assert (response.status, response.body, response.headers["ETag"]) == (200, body, f'"{info.tag}"')
        assert response.headers["Cache-Control"] == FOR_GOOD
        assert response.headers["Stoker-Version"] == "1"
    newest = ask(serving(url), "/v1/ds/super-samples/0")
    assert (newest.headers["Cache-Control"], newest.headers["Stoker-Version"]) == (TO_COMPARE, "1")


def test_a_head_has_the_length_and_no_body(url: str, manifest: Manifest) -> None:
    for path in ("/v1/ds/manifest", "/v1/ds/super-samples/1", "/v1/ds/batches/0"):
        query = "size=9" if "batches" in path else ""
        got = ask(serving(url), path, query)
        response = ask(serving(url), path, query, method="HEAD", headers={"range": "bytes=0-1"})
        assert (response.status, response.body) == (200, b"")
        assert response.headers["Content-Length"] == str(len(got.body))
        assert response.headers["ETag"] == got.headers["ETag"]
    assert ask(serving(url), "/v1/ds/super-samples/999", method="HEAD").body == b""


def test_a_range_is_answered_with_its_place_in_the_object(url: str, manifest: Manifest) -> None:
    body, info = stored(url, manifest.key(2))
    response = ask(serving(url), "/v1/ds/super-samples/2", headers={"range": "bytes=10-19"})
    assert (response.status, response.body) == (206, body[10:20])
    assert response.headers["Content-Range"] == f"bytes 10-19/{info.size_bytes}"
    beyond = ask(serving(url), "/v1/ds/super-samples/2", headers={"range": "bytes=999999-"})
    assert (beyond.status, error_of(beyond)) == (416, "bad-range")
    assert beyond.headers["Content-Range"] == f"bytes */{info.size_bytes}"


def test_a_client_with_the_manifest_gets_not_modified(url: str) -> None:
    for path, query in (("/v1/ds/manifest", ""), ("/v1/ds/super-samples/1", ""), ("/v1/ds/batches/3", "size=2")):
        etag = ask(serving(url), path, query).headers["ETag"]
        response = ask(serving(url), path, query, headers={"if-none-match": etag})
        assert (response.status, response.body, response.headers["ETag"]) == (304, b"", etag)
        assert ask(serving(url), path, query, headers={"if-match": etag}).status == 200
        changed = ask(serving(url), path, query, headers={"if-match": '"another"'})
        assert (changed.status, error_of(changed)) == (412, "changed")


@pytest.mark.parametrize(
    ("path", "query", "status", "code"),
    [
        ("/v1/other/manifest", "", 404, "no-such-dataset"),
        ("/v1/DS/manifest", "", 404, "no-such-dataset"),
        ("/v1/ds/manifest", "version=2", 404, "not-found"),
        ("/v1/ds/super-samples/0", "version=2", 404, "not-found"),
        ("/v1/ds/super-samples/9999", "", 404, "no-such-super-sample"),
        ("/v1/ds/super-samples/99999999999999999999", "", 404, "no-such-super-sample"),
        ("/v1/ds/batches/100", "size=1", 404, "no-such-position"),
        ("/v1/ds/batches/99999999999999999999", "size=1", 404, "no-such-position"),
        ("/v1/ds/../manifest", "", 404, "not-found"),
        ("/v1/ds/manifest", "version=x", 400, "bad-parameter"),
        ("/v1/ds/manifest", "x=" + "y" * 2000, 414, "too-long"),
    ],
)
def test_what_is_not_there_or_not_understood_is_a_json_error(
    url: str, path: str, query: str, status: int, code: str
) -> None:
    response = ask(serving(url), path, query)
    assert (response.status, error_of(response)) == (status, code)
    assert url.encode() not in response.body


def test_every_response_tells_browsers_to_make_nothing_of_it(url: str) -> None:
    for response in (
        ask(serving(url), "/v1/ds/manifest"),
        ask(serving(url), "/"),
        ask(serving(url), "/", method="X"),
    ):
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert response.headers["Referrer-Policy"] == "no-referrer"


class Signing(WatchedStore):
    """A bucket that signs URLs."""

    async def presign(self, key: str, *, seconds: int, tag: str = "") -> str:
        return f"https://bucket.example/{key}?seconds={seconds}&tag={tag}"


class NotSigning(WatchedStore):
    """A bucket whose credentials cannot sign."""

    async def presign(self, key: str, *, seconds: int, tag: str = "") -> str:
        raise CredentialsError("MARKER cannot sign")


def test_what_is_larger_than_an_answer_is_to_be_read_from_the_bucket(url: str, manifest: Manifest) -> None:
    config = serving(url, answer_bytes=500, redirect_seconds=30)
    body, info = stored(url, manifest.key(1))
    assert len(body) > 500

    def signing(at: str) -> Store:
        return Signing(open_store(at))

    response = ask(config, "/v1/ds/super-samples/1", "version=1", store=signing)
    assert (response.status, response.body) == (307, b"")
    assert response.headers["Location"] == f"https://bucket.example/{info.key}?seconds=30&tag={info.tag}"
    assert response.headers["Cache-Control"] == "no-store"
    some = ask(config, "/v1/ds/super-samples/1", headers={"range": "bytes=0-499"}, store=signing)
    assert (some.status, some.body) == (206, body[:500])
    assert ask(config, "/v1/ds/super-samples/1", headers={"range": "bytes=0-500"}, store=signing).status == 307
    assert ask(config, "/v1/ds/super-samples/1", method="HEAD", store=signing).status == 200
    gone = ask(config, "/v1/ds/super-samples/1", headers={"if-match": '"x"'}, store=signing)
    assert gone.status == 412


@pytest.mark.parametrize("store", [open_store, lambda url: NotSigning(open_store(url))])
def test_without_signed_urls_clients_are_asked_to_request_ranges(
    url: str, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    response = ask(serving(url, answer_bytes=500), "/v1/ds/super-samples/1", store=store)
    assert (response.status, error_of(response)) == (413, "too-large")
    assert b"at most 500" in response.body
    assert b"MARKER" not in response.body
    assert "cannot" in caplog.text


class Failing(WatchedStore):
    """A bucket with one kind of failure for all requests for one kind of object."""

    error: StokerError = StoreError("")
    beginning = ""

    async def before(self, number: int, operation: str, key: str) -> None:
        if key.startswith(self.beginning):
            raise self.error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ThrottledError("MARKER", retry_after_seconds=7.2), 503, "unavailable"),
        (ServerError("MARKER"), 503, "unavailable"),
        (FetchError("MARKER"), 503, "unavailable"),
        (NotFoundError("MARKER"), 404, "not-found"),
        (PermissionDeniedError("MARKER"), 500, "failed"),
        (CredentialsError("MARKER"), 500, "failed"),
        (StoreError("MARKER"), 500, "failed"),
    ],
)
@pytest.mark.parametrize(("beginning", "path"), [("manifest", "manifest"), ("data/", "super-samples/0")])
def test_what_goes_wrong_behind_is_an_error_that_tells_nothing_of_it(
    url: str,
    error: StokerError,
    status: int,
    code: str,
    beginning: str,
    path: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(at: str) -> Store:
        store = Failing(open_store(at))
        store.error, store.beginning = error, beginning
        return store

    caplog.set_level(logging.WARNING)
    response = ask(serving(url), f"/v1/ds/{path}", store=failing)
    assert (response.status, error_of(response)) == (status, code)
    assert b"MARKER" not in response.body
    assert ("MARKER" in caplog.text) == (status != 404)
    if status == 503:
        assert response.headers["Retry-After"] == ("8" if isinstance(error, ThrottledError) else "1")


class Unlisted(WatchedStore):
    """A bucket that may not be listed: S3 denies then what does not exist."""

    may_read_nothing = False

    async def _perform(self, operation: Operation, key: str, request: Any) -> Any:
        if self.may_read_nothing:
            raise PermissionDeniedError(f"{key} may not be read")
        try:
            return await super()._perform(operation, key, request)
        except NotFoundError:
            raise PermissionDeniedError(f"{key} may not be read, or does not exist") from None


@pytest.mark.parametrize("path", ["manifest", "super-samples/0", "batches/0"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_version_that_does_not_exist_is_not_found_without_the_right_to_list(url: str, path: str, method: str) -> None:
    def unlisted(at: str) -> Store:
        return Unlisted(open_store(at))

    size = "&size=1" if path.startswith("batches") else ""
    for version, status in ((1, 200), (2, 404)):
        response = ask(serving(url), f"/v1/ds/{path}", f"version={version}{size}", store=unlisted, method=method)
        assert response.status == status

    def denied(at: str) -> Store:
        store = Unlisted(open_store(at))
        store.may_read_nothing = True
        return store

    assert ask(serving(url), f"/v1/ds/{path}", f"version=1{size}", store=denied, method=method).status == 500


def test_unexpected_errors_are_left_to_the_platform(url: str) -> None:
    def broken(_: str) -> Store:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ask(serving(url), "/v1/ds/manifest", store=broken)


class Silent(WatchedStore):
    """A bucket that never answers."""

    async def before(self, number: int, operation: str, key: str) -> None:
        await asyncio.Event().wait()


def test_a_bucket_that_never_answers_is_given_up(url: str) -> None:
    config = serving(url, answer_seconds=1.0)
    response = ask(config, "/v1/ds/manifest", store=lambda at: Silent(open_store(at)))
    assert (response.status, error_of(response)) == (503, "unavailable")


def test_a_super_sample_that_is_not_what_was_packed_is_not_answered_as_if_it_were() -> None:
    url = pack_numbers(40)

    async def damage(store: Store) -> None:
        key = (await read_manifest(store)).key(0)
        body, _ = await store.get(key)
        await store.put(key, body[:-1] + bytes([body[-1] ^ 1]))

    with_store(url, damage)
    assert ask(serving(url), "/v1/ds/super-samples/0").status == 503


def test_a_copied_bucket_is_answered_from_under_its_own_tags(url: str, manifest: Manifest) -> None:
    copy = f"{url}-copy"

    async def copy_to(store: Store) -> None:
        other = open_store(copy)
        await other.put("before", b"so that the writes are numbered otherwise")
        async for info in store.list():
            await other.put(info.key, (await store.get(info.key))[0])

    with_store(url, copy_to)
    body, info = stored(copy, manifest.key(1))
    assert info.tag != manifest.rows.tag(1)
    response = ask(serving(copy), "/v1/ds/super-samples/1")
    assert (response.status, response.body, response.headers["ETag"]) == (200, body, f'"{info.tag}"')
    pinned = {"if-match": f'"{manifest.rows.tag(1)}"'}
    assert ask(serving(copy), "/v1/ds/super-samples/1", headers=pinned).status == 412
    sent_on = ask(serving(copy, answer_bytes=500), "/v1/ds/super-samples/1", store=lambda at: Signing(open_store(at)))
    assert sent_on.headers["Location"].endswith(f"&tag={info.tag}"), "another generation cannot be read there"


def test_there_is_no_redirect_to_a_missing_object(url: str, manifest: Manifest) -> None:
    def emptied(at: str) -> Store:
        store = Failing(Signing(open_store(at)))
        store.error, store.beginning = NotFoundError("MARKER"), "data/"
        return store

    assert ask(serving(url, answer_bytes=500), "/v1/ds/super-samples/1", store=emptied).status == 404


def append(url: str) -> None:
    with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=1200, mode="append") as packer:
        packer.extend(map(sample_of, range(50)))


def get(service: Service, path: str, query: str = "") -> Any:
    return service.answer(Request(method="GET", path=path, query=query))


def test_the_next_request_gets_a_new_version_and_old_ones_stay() -> None:
    url = pack_numbers(30)

    async def use(service: Service) -> None:
        first: Response = await get(service, "/v1/ds/super-samples/0")
        assert first.headers["Stoker-Version"] == "1"
        await asyncio.to_thread(append, url)
        assert (await get(service, "/v1/ds/super-samples/0")).headers["Stoker-Version"] == "2"
        assert (await get(service, "/v1/ds/super-samples/0", "version=1")).headers["Stoker-Version"] == "1"

    with_service(serving(url), use)


def test_a_manifest_is_read_once_however_many_request_it(url: str) -> None:
    watched = WatchedStore(open_store(url))

    async def use(service: Service) -> None:
        await asyncio.gather(*(get(service, "/v1/ds/super-samples/0", "version=1") for _ in range(10)))
        assert watched.calls.count(f"get {version_key(1)}") == 1
        await asyncio.gather(*(get(service, "/v1/ds/super-samples/0") for _ in range(10)))
        await get(service, "/v1/ds/super-samples/0")
        assert watched.calls.count(f"get {POINTER_KEY}") == 1
        assert watched.calls.count(f"head {POINTER_KEY}") == 11
        super_samples = [call for call in watched.calls if "data/" in call]
        assert len(super_samples) == 21, "one GET each: size and tag are the manifest's"

    with_service(serving(url), use, store=lambda _: watched)


def test_a_request_for_a_cached_version_does_not_wait_for_another_read() -> None:
    url = pack_numbers(30)
    append(url)

    class Held(WatchedStore):
        """A bucket of which one object comes when it may."""

        reading, may_come = asyncio.Event(), asyncio.Event()

        async def before(self, number: int, operation: str, key: str) -> None:
            if (operation, key) == ("get", version_key(1)):
                self.reading.set()
                await self.may_come.wait()

    async def use(service: Service) -> None:
        assert (await get(service, "/v1/ds/super-samples/0")).headers["Stoker-Version"] == "2"
        async with asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(get(service, "/v1/ds/super-samples/0", "version=1"))
            await Held.reading.wait()
            for query in ("version=2", ""):
                assert (await get(service, "/v1/ds/super-samples/0", query)).headers["Stoker-Version"] == "2"
            assert not slow.done()
            Held.may_come.set()
        assert slow.result().headers["Stoker-Version"] == "1"

    with_service(serving(url), use, store=lambda at: Held(open_store(at)))


def test_manifests_are_kept_while_there_is_room(url: str) -> None:
    other = pack_numbers(30)
    append(other)
    watched = WatchedStore(open_store(other))

    async def use(service: Service) -> None:
        for _ in range(2):
            for version in (1, 2):
                await get(service, "/v1/ds/super-samples/0", f"version={version}")
        assert watched.calls.count(f"get {version_key(1)}") == 2

    with_service(serving(other, memory_bytes=1000), use, store=lambda _: watched)


def test_a_first_commit_that_was_cut_off_is_found_without_its_pointer() -> None:
    url = pack_numbers(30)
    with_store(url, lambda store: store.delete(POINTER_KEY))
    assert ask(serving(url), "/v1/ds/super-samples/0").headers["Stoker-Version"] == "1"


@pytest.mark.parametrize("query", ["", "version=1"])
@pytest.mark.parametrize("path", ["manifest", "super-samples/1", "batches/0"])
def test_a_cancelled_request_leaves_nothing_behind_and_harms_no_later_one(url: str, path: str, query: str) -> None:
    query = "&".join(filter(None, (query, "size=40" if path.startswith("batches") else "")))
    wanted = ask(serving(url), f"/v1/ds/{path}", query).body

    async def use(service: Service) -> None:
        patience, is_done = 0, False
        while not is_done:
            request = asyncio.ensure_future(get(service, f"/v1/ds/{path}", query))
            for _ in range(patience):
                await asyncio.sleep(0)
            is_done = not request.cancel()
            await asyncio.wait([request])
            assert asyncio.all_tasks() == {asyncio.current_task()}
            patience += 1
        assert patience > 2
        assert (await get(service, f"/v1/ds/{path}", query)).body == wanted

    with_service(serving(url), use)
