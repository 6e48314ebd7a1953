"""A served data set as a store: the answers that it trusts, where it sends its token, and wrong answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker import HttpOptions, ServedOptions, open_store
from stoker._format import versions
from stoker._format.manifest import POINTER_KEY, Manifest, version_key
from stoker._stores.google_credentials import IdentityTokens
from stoker._stores.location import parse_url
from stoker._stores.served_index import RowIndex
from stoker._stores.served_store import BearerCredentials, ServedStoreClient
from stoker.abc import Store
from stoker.errors import (
    BucketNotFoundError,
    ConfigError,
    ConnectionLostError,
    CredentialsError,
    DeadlineError,
    NotFoundError,
    ObjectChangedError,
    PermissionDeniedError,
    RangeBeyondEndError,
    ServerError,
    StokerError,
    StoreError,
    ThrottledError,
    TruncatedError,
    UnexpectedAnswerError,
)
from stoker_local import KeyPair
from support.authenticators import enter
from support.cases import for_each
from support.datasets import pack_numbers
from support.places import with_store
from support.scripted_server import Server, serving
from support.serving_host import running_service
from support.stores import list_keys, read_range, run_check
from support.tls import make_authority

TOKEN = "MARKER-token"
BODY = b"0123456789" * 10
Answer = Callable[[bytes], bytes]


def reply(*headers: str, status: str = "200 OK", body: bytes = b"") -> bytes:
    length = f"Content-Length: {len(body)}"
    return "\r\n".join((f"HTTP/1.1 {status}", length, *headers, "", "")).encode() + body


def ranged(head: bytes, tag: str = '"t"') -> bytes:
    """Answer as a bucket would that holds BODY."""
    wanted = [line for line in head.decode().split("\r\n") if line.startswith("Range: ")]
    if not wanted:
        return reply(f"ETag: {tag}", body=BODY)
    start, end = (int(place) for place in wanted[0].removeprefix("Range: bytes=").split("-"))
    place = f"Content-Range: bytes {start}-{end}/{len(BODY)}"
    return reply(f"ETag: {tag}", place, status="206 Partial Content", body=BODY[start : end + 1])


def refusal(status: str, code: str, message: str = "because", *headers: str) -> bytes:
    return reply(*headers, status=status, body=json.dumps({"error": code, "message": message}).encode())


@dataclass
class Meeting:
    """The result of a use of a store, and the requests to its servers: the function, and a bucket."""

    result: Any = None
    error: StokerError | None = None
    function: list[bytes] = field(default_factory=list)
    bucket: list[bytes] = field(default_factory=list)


def meet(
    use: Callable[[Store], Awaitable[Any]],
    function: Callable[[bytes, str], bytes],
    bucket: Answer = ranged,
    *,
    token: str | None = TOKEN,
    http: HttpOptions | None = None,
    **identity: Any,
) -> Meeting:
    """Use a store whose function answers ``function(head, URL of the bucket)``."""
    meeting = Meeting()

    async def talk(reader: Any, writer: Any, asked: list[bytes], answer: Answer) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            asked.append(head)
            said = answer(head)
            if not said:  # silence
                await reader.read()
                return
            writer.write(said)
            await writer.drain()

    async def main() -> None:
        async with AsyncExitStack() as stack:

            def speaking(asked: list[bytes], answer: Answer) -> Any:
                async def speak(_: Server, reader: Any, writer: Any) -> None:
                    await talk(reader, writer, asked, answer)

                return speak

            behind = await stack.enter_async_context(serving(speaking(meeting.bucket, bucket)))
            at = await stack.enter_async_context(
                serving(speaking(meeting.function, lambda head: function(head, behind.url)))
            )
            options = ServedOptions(token=None if identity else token, http=http or HttpOptions(), **identity)
            store = open_store(f"stoker+{at.url}/v1/ds", options=options)
            try:
                meeting.result = await use(store)
            except StokerError as error:
                meeting.error = error
            finally:
                await store.close()

    asyncio.run(main())
    return meeting


def read_pointer(store: Store) -> Awaitable[bytes]:
    return read_range(store, POINTER_KEY, 10, 20, "t")


def redirecting(location: str) -> Callable[[bytes, str], bytes]:
    return lambda _, bucket: reply(f"Location: {location.replace('BUCKET', bucket)}", status="307 Temporary Redirect")


# --- redirects --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["direct", "aiohttp"])
def test_a_redirect_is_followed_with_the_range_and_without_the_token(transport: Any) -> None:
    met = meet(read_pointer, redirecting("BUCKET/key?X-Amz-Signature=abc%2F"), http=HttpOptions(transport=transport))
    assert met.result == BODY[10:20]
    (asked,), (sent_on,) = met.function, met.bucket
    assert asked.startswith(b"GET /v1/ds/manifest HTTP/1.1\r\n")
    assert f"Authorization: Bearer {TOKEN}\r\n".encode() in asked
    assert b'If-Match: "t"\r\n' in asked
    assert sent_on.startswith(b"GET /key?X-Amz-Signature=abc%2F HTTP/1.1\r\n")
    assert b"Range: bytes=10-19\r\n" in sent_on
    assert b"authorization" not in sent_on.lower()
    assert b"MARKER" not in sent_on
    assert b"if-match" not in sent_on.lower()


@pytest.mark.parametrize("transport", ["direct", "aiohttp"])
@pytest.mark.parametrize("identity", [{"auth": "aws", "region": "eu-west-1"}, {"auth": "google"}], ids=str)
def test_credentials_are_sent_only_to_the_function(
    monkeypatch: pytest.MonkeyPatch, identity: dict[str, Any], transport: Any
) -> None:
    async def token(_: IdentityTokens) -> str:
        return "MARKER-identity"

    monkeypatch.setattr(IdentityTokens, "current", token)
    enter(monkeypatch, KeyPair(access_key="key", secret_key="MARKER-secret", session_token="MARKER-session"))
    met = meet(read_pointer, redirecting("BUCKET/key"), http=HttpOptions(transport=transport), **identity)
    assert met.result == BODY[10:20]
    (asked,), (sent_on,) = met.function, met.bucket
    assert b"MARKER-secret" not in asked
    assert (b"MARKER-identity" in asked, b"MARKER-session" in asked) == (
        identity["auth"] == "google",
        identity["auth"] == "aws",
    )
    names = {line.partition(b":")[0].lower() for line in sent_on.split(b"\r\n")[1:] if line}
    assert names <= {b"host", b"range", b"accept", b"accept-encoding", b"user-agent"}


def test_answers_of_the_bucket_are_compared_with_the_requested_tag() -> None:
    met = meet(read_pointer, redirecting("BUCKET/key"), lambda head: ranged(head, '"another"'))
    assert isinstance(met.error, ObjectChangedError)


def test_of_googles_bucket_the_generation_is_the_tag() -> None:
    def google(head: bytes) -> bytes:
        return ranged(head, '"md5"\r\nx-goog-generation: 17')

    met = meet(lambda store: store.head(POINTER_KEY), redirecting("BUCKET/key"), google)
    assert met.result.tag == "17"
    assert meet(lambda store: read_range(store, POINTER_KEY, 0, 1, "17"), redirecting("BUCKET/key"), google).result


UNSAFE = [
    "",
    "/v1/other",
    "//127.0.0.1/x",
    "http://bucket.example/x?secret",
    "http://169.254.169.254/latest/meta-data",
    "ftp://127.0.0.1/x",
    "file:///etc/passwd",
    "https://",
    "https://user:secret@bucket.example/x",
    "https://bucket.example/x#secret",
    "https://bucket.example\\@127.0.0.1/secret",
    "https://bucket.example/" + "secret" * 2000,
    "https://[::1/secret",
    "https://bucket.example:99999/secret",
    "javascript:alert(1)",
]


@pytest.mark.parametrize("location", UNSAFE)
def test_a_redirect_to_where_it_must_not_lead_is_not_followed_nor_repeated(location: str) -> None:
    met = meet(read_pointer, redirecting(location))
    assert isinstance(met.error, StoreError)
    assert met.bucket == []
    assert len(met.function) == 1
    assert "secret" not in str(met.error)


@pytest.mark.parametrize("transport", ["direct", "aiohttp"])
def test_a_function_is_reached_over_tls_that_is_verified_and_cannot_send_us_to_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: Any
) -> None:
    authority = make_authority(tmp_path)
    asked: list[bytes] = []

    async def speak(_: Server, reader: Any, writer: Any) -> None:
        for answer in (
            ranged,
            lambda _: reply("Location: http://bucket.example/secret", status="307 Temporary Redirect"),
        ):
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer(asked[-1]))
            await writer.drain()
        await reader.read()

    async def main() -> None:
        async with serving(speak, tls=authority.server) as server:
            url = f"stoker+{server.url}/v1/ds"
            options = ServedOptions(token=TOKEN, http=HttpOptions(transport=transport))
            store = open_store(url, options=options)
            try:
                with pytest.raises(StoreError, match="not trusted"):
                    await read_pointer(store)
                assert asked == []
                monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.bundle))
                await store.close()
                assert await read_pointer(store) == BODY[10:20]
                with pytest.raises(StoreError, match="unsafe") as caught:
                    await read_pointer(store)
                assert "secret" not in str(caught.value)
            finally:
                await store.close()

    asyncio.run(main())
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("function", "location", "is_followed"),
    [
        ("https://function.example/v1/ds", "https://bucket.example/x", True),
        ("https://function.example/v1/ds", "https://127.0.0.1:9/x", True),
        ("https://function.example/v1/ds", "http://127.0.0.1:9/x", False),
        ("https://function.example/v1/ds", "http://localhost/x", False),
        ("http://127.0.0.1:8/v1/ds", "http://localhost:9/x", True),
        ("http://localhost:8/v1/ds", "http://bucket.example/x", False),
        ("http://localhost:8/v1/ds", "https://bucket.example/x", True),
    ],
)
def test_only_a_function_on_this_machine_sends_us_to_this_machine_without_tls(
    function: str, location: str, is_followed: bool
) -> None:
    access = ServedStoreClient(function, BearerCredentials(None), HttpOptions())
    if is_followed:
        assert access._check_redirect(location, "") == location
    else:
        with pytest.raises(StoreError, match="only https"):
            access._check_redirect(location, "")


def test_a_redirect_of_a_redirect_is_not_followed() -> None:
    met = meet(read_pointer, redirecting("BUCKET/key"), lambda _: reply("Location: /x", status="307 Again"))
    assert isinstance(met.error, StoreError)
    assert "again" in str(met.error)
    assert (len(met.function), len(met.bucket)) == (1, 1)


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_signed_url_that_the_bucket_does_not_take_any_more_may_be_had_anew(status: int) -> None:
    expired = b"<Error><Code>AccessDenied</Code><Message>Request has expired MARKER-url</Message></Error>"
    met = meet(read_pointer, redirecting("BUCKET/key"), lambda _: reply(status=f"{status} No", body=expired))
    assert type(met.error) is ServerError, "which is tried again"
    assert "signed" in str(met.error)
    assert "MARKER" not in str(met.error)


@pytest.mark.parametrize("status", [301, 302, 303, 308])
def test_no_other_redirect_is_followed(status: int) -> None:
    met = meet(read_pointer, lambda _, bucket: reply(f"Location: {bucket}/key", status=f"{status} X"))
    assert type(met.error) is StoreError
    assert met.bucket == []


def test_a_function_cannot_send_us_to_ever_more_hosts() -> None:
    async def many(store: Store) -> None:
        for _ in range(20):
            with suppress(ConnectionLostError):
                await store.head(POINTER_KEY)

    ports = iter(range(1, 100))
    met = meet(many, lambda _, __: reply(f"Location: http://127.0.0.1:{next(ports)}/x", status="307 X"))
    assert "more than 7 hosts" in str(met.error)
    assert len(met.function) < 12


# --- refusals and lies ------------------------------------------------------------------------------------------


@for_each(
    ("answer", "kind", "says"),
    [
        (refusal("401 No", "unauthorized"), CredentialsError, "STOKER_TOKEN"),
        (refusal("403 No", "forbidden"), PermissionDeniedError, "other data sets"),
        (refusal("404 No", "not-found"), NotFoundError, "does not exist"),
        (refusal("412 No", "changed"), ObjectChangedError, "overwritten"),
        (refusal("413 No", "too-large"), StoreError, "too large for a function's response"),
        (refusal("416 No", "bad-range"), RangeBeyondEndError, "end"),
        (refusal("500 No", "failed"), StoreError, "its log says why"),
        (reply(status="500 No", body=b"<html>"), ServerError, "try again"),
        (refusal("503 No", "unavailable", "x", "Retry-After: 3"), ThrottledError, "slow down"),
        (reply(status="502 Bad Gateway", body=b"<html>"), ServerError, "502"),
        (reply(status="403 Forbidden", body=b'{"Message":"Forbidden"}'), PermissionDeniedError, "403"),
        (reply(status="404 No", body=b"[" * 60_000), NotFoundError, "404"),
        (reply(status="404 No", body=b'{"error": {}, "message": []}'), NotFoundError, "404"),
        (reply(status="404 No", body=b"\xff\xfe"), NotFoundError, "404"),
        (reply(status="204 No Content"), StoreError, "204"),
    ],
)
def test_a_refusal_is_a_typed_error_that_names_the_object(answer: bytes, kind: type[StoreError], says: str) -> None:
    met = meet(read_pointer, lambda _, __: answer)
    assert type(met.error) is kind
    assert says in str(met.error)
    assert POINTER_KEY in str(met.error)
    if isinstance(met.error, ThrottledError):
        assert met.error.retry_after_seconds == 3


def test_a_data_set_that_is_not_served_is_named_once_and_not_by_what_was_asked_of_it() -> None:
    met = meet(versions.read_manifest, lambda _, __: refusal("404 No", "no-such-dataset"))
    assert type(met.error) is BucketNotFoundError
    said = str(met.error)
    assert "no data set of that name; check the address, which ends with /v1/NAME" in said
    assert POINTER_KEY not in said
    assert said.count("/v1/ds") == 1


@pytest.mark.parametrize("transport", ["direct", "aiohttp"])
@pytest.mark.parametrize("host", ["127.0.0.1:1", "no-such-host.invalid"])
def test_where_nothing_answers_the_message_says_what_to_check(host: str, transport: Any) -> None:
    options = ServedOptions(http=HttpOptions(transport=transport))

    async def read(store: Store) -> None:
        await store.get(POINTER_KEY)

    with pytest.raises(ConnectionLostError, match="could not be made; check the address, and whether a server is run"):
        run_check(open_store(f"stoker+https://{host}/v1/x", options=options), read)


def test_an_echo_of_the_token_is_not_repeated_and_nothing_writes_to_a_terminal() -> None:
    def echo(head: bytes, _: str) -> bytes:
        token = next(line for line in head.decode().split("\r\n") if line.startswith("Authorization"))
        return refusal("401 No", "unauthorized", f"you said {token} \x1b[31m")

    met = meet(read_pointer, echo)
    assert "MARKER" not in str(met.error)
    assert "\x1b" not in str(met.error)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (reply('ETag: "t"', body=BODY), UnexpectedAnswerError),  # the range ignored
        (reply('ETag: "t"', "Content-Range: bytes 11-20/100", status="206 P", body=BODY[11:21]), UnexpectedAnswerError),
        (reply('ETag: "t"', "Content-Range: bytes 10-14/15", status="206 P", body=BODY[10:15]), RangeBeyondEndError),
        (reply('ETag: "t"', "Content-Range: bytes 10-19/100", status="206 P", body=BODY[10:15]), TruncatedError),
        (reply("Content-Range: bytes 10-19/100", status="206 P", body=BODY[10:20]), UnexpectedAnswerError),  # no tag
        (reply('ETag: "u"', "Content-Range: bytes 10-19/100", status="206 P", body=BODY[10:20]), ObjectChangedError),
        (b"SSH-2.0-OpenSSH\r\n\r\n", ServerError),
        (b"", DeadlineError),
    ],
    ids=["ignored", "shifted", "shorter", "short-body", "no-tag", "another-tag", "no-http", "silence"],
)
def test_wrong_answers_of_a_function_are_refused(answer: bytes, kind: type[StoreError]) -> None:
    http = HttpOptions(read_timeout_seconds=20 if answer else 0.2)
    met = meet(read_pointer, lambda _, __: answer, http=http)
    assert type(met.error) is kind


def test_what_is_no_manifest_is_not_taken_for_one() -> None:
    for use in (lambda store: store.get(f"data/{'0' * 16}/00000000"), list_keys):
        met = meet(use, lambda _, __: reply('ETag: "t"', body=b"\x08\0\0\0\0\0\0\0{}      "))
        assert type(met.error) is UnexpectedAnswerError
        assert "is not a manifest" in str(met.error)
    met = meet(lambda store: store.get(POINTER_KEY), lambda _, __: reply('ETag: "t"', body=b"anything"))
    assert met.result[0] == b"anything", "the reader checks it"


# --- keys and versions ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shrunk() -> Iterator[tuple[str, Manifest, Manifest]]:
    """A served data set whose version 2 has other objects than version 1: as after a compaction."""
    url, other = pack_numbers(30), pack_numbers(50, super_sample_bytes=4000)
    old: Manifest = with_store(url, versions.read_manifest)
    new = replace(with_store(other, versions.read_manifest), version=2)

    async def move(store: Store) -> None:
        source = open_store(other)
        for row in range(len(new)):
            await store.put(new.key(row), (await source.get(new.key(row)))[0])
        await versions.publish(store, new)

    with_store(url, move)
    with running_service({"ds": url}) as hosted:
        yield hosted.dataset("ds"), old, new


def test_an_object_of_a_version_that_was_read_is_found_when_the_newest_has_it_no_more(
    shrunk: tuple[str, Manifest, Manifest],
) -> None:
    url, old, new = shrunk

    async def whole(store: Store) -> None:
        with pytest.raises(NotFoundError):
            await store.head(old.key(0))
        assert (await versions.read_manifest(store, 1)).version == 1
        for manifest in (old, new):
            for row in range(len(manifest)):
                assert (await store.head(manifest.key(row))).size_bytes == manifest.ref(row).size_bytes

    async def by_range(store: Store) -> None:
        await read_range(store, version_key(1), 0, 9)
        assert (await store.head(old.key(1))).size_bytes == old.ref(1).size_bytes

    run_check(open_store(url), whole)
    run_check(open_store(url), by_range)


def test_a_request_for_a_missing_version_does_no_harm(shrunk: tuple[str, Manifest, Manifest]) -> None:
    url, _, new = shrunk

    async def check(store: Store) -> None:
        for read in (store.head(version_key(7)), store.get(version_key(8)), read_range(store, version_key(9), 0, 1)):
            with pytest.raises(NotFoundError):
                await read
        assert (await store.head(new.key(0))).size_bytes == new.ref(0).size_bytes

    run_check(open_store(url), check)


def test_an_object_is_requested_by_the_newest_version_that_has_it() -> None:
    def version(number: int, *runs: tuple[str, int, int]) -> Any:
        stretches = [SimpleNamespace(run=run, first_number=first, rows=rows) for run, first, rows in runs]
        return SimpleNamespace(version=number, runs=stretches)

    first, second = "0" * 15 + "1", "0" * 15 + "2"
    old = version(1, (first, 0, 10))
    new = version(2, (second, 0, 3), (first, 0, 4), (first, 8, 2))  # what lay between is compacted
    for order in ((old, new), (new, old)):
        index = RowIndex()
        for manifest in order:
            index.learn(manifest)
        for number, path in {0: "3?version=2", 3: "6?version=2", 4: "4?version=1", 9: "8?version=2"}.items():
            assert index.path_of(f"data/{first}/{number:08d}") == f"super-samples/{path}"
        assert index.path_of(f"data/{second}/00000002") == "super-samples/2?version=2"
        assert index.path_of(f"data/{first}/00000010") is None
        assert index.path_of(f"data/{second}/00000003") is None


@pytest.mark.parametrize(
    "key",
    [
        "x",
        "manifest",
        "manifests/00000000.safetensors",
        "manifests/1.safetensors",
        "manifests/000000001.safetensors",
        "manifests/\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661.safetensors",
        "data/../manifest.safetensors",
        "data/0123456789abcdef/../../manifest",
        "data/0123456789ABCDEF/00000000",
        "../v1/other/manifest",
        "manifest.safetensors?version=1",
        "super-samples/0",
    ],
)
def test_a_key_that_no_data_set_has_is_not_found_and_names_no_path(
    shrunk: tuple[str, Manifest, Manifest], key: str
) -> None:
    async def check(store: Store) -> None:
        with pytest.raises(NotFoundError):
            await store.get(key)

    run_check(open_store(shrunk[0]), check)


def test_of_many_that_request_objects_one_reads_the_manifest() -> None:
    url = pack_numbers(30)
    manifest: Manifest = with_store(url, versions.read_manifest)

    async def check(store: Store) -> None:
        await asyncio.gather(*(store.head(manifest.key(row)) for row in range(len(manifest))))

    with running_service({"ds": url}) as hosted:
        run_check(open_store(hosted.dataset("ds")), check)
        assert [each.path for each in hosted.requests].count("/v1/ds/manifest") == 1


def test_nothing_can_be_written(shrunk: tuple[str, Manifest, Manifest]) -> None:
    async def check(store: Store) -> None:
        for write in (store.put("x", b""), store.put(POINTER_KEY, b"", if_absent=True), store.delete(POINTER_KEY)):
            with pytest.raises(PermissionDeniedError, match="read-only"):
                await write
        with pytest.raises(ConfigError):
            await store.put("x", b"", if_absent=True, if_tag="t")

    run_check(open_store(shrunk[0]), check)


# --- addresses and tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("stoker+https://host/v1/train", "host", "v1/train"),
        ("stoker+https://host.example:8443/prod/v1/train/", "host.example:8443", "prod/v1/train"),
        ("stoker+http://127.0.0.1:80/v1/a-b_c", "127.0.0.1:80", "v1/a-b_c"),
        ("stoker+http://localhost/v1/t", "localhost", "v1/t"),
        ("stoker+http://[::1]:9/v1/t", "[::1]:9", "v1/t"),
        ("stoker+https://host/stage~1.x/v1/t", "host", "stage~1.x/v1/t"),
    ],
)
def test_a_served_data_set_has_an_address(url: str, bucket: str, prefix: str) -> None:
    location = parse_url(url)
    assert (location.bucket, location.prefix, location.url) == (bucket, prefix, url.rstrip("/"))


@for_each(
    "url",
    [
        "stoker+https://",
        "stoker+https://host",
        "stoker+https://host/",
        "stoker+https:///v1/train",
        "stoker+https://user:MARKER@host/v1/train",
        "stoker+https://MARKER@host/v1/train",
        "stoker+https://host/v1/train?token=MARKER",
        "stoker+https://host/v1/train#MARKER",
        "stoker+https://host?x=MARKER/v1/train",
        "stoker+https://host/v1/../train",
        "stoker+https://host/v1/%2e%2e/train",
        "stoker+https://host//v1/train",
        "stoker+https://host/v1/tr ain",
        "stoker+https://host/v1/train.x",
        "stoker+https://host/v1/träin",
        "stoker+https://ho st/v1/train",
        "stoker+https://host:0/v1/train",
        "stoker+https://host:x/v1/train",
        "stoker+https://host\n/v1/train",
        "stoker+http://host/v1/train",
        "stoker+http://169.254.169.254/v1/train",
        "stoker+http://127.0.0.1.example/v1/train",
        "stoker+ftp://host/v1/train",
        "https://host/v1/train",
    ],
)
def test_an_address_that_is_none_or_holds_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert "MARKER" not in str(caught.value)


def test_the_token_comes_from_the_option_else_the_environment_else_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STOKER_TOKEN", "from-the-environment")
    assert b"Bearer MARKER-token\r\n" in meet(read_pointer, lambda head, _: ranged(head)).function[0]
    assert b"Bearer from-the-environment\r\n" in meet(read_pointer, lambda h, _: ranged(h), token=None).function[0]
    monkeypatch.delenv("STOKER_TOKEN")
    assert b"authorization" not in meet(read_pointer, lambda h, _: ranged(h), token=None).function[0].lower()
    assert TOKEN not in repr(ServedOptions(token=TOKEN))


@pytest.mark.parametrize("token", ["MARKER\n", " MARKER", "MARKER\r\nX: y", "MARKER-é"])
def test_a_token_that_no_header_can_carry_is_refused_without_repeating_it(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as caught:
        ServedOptions(token=token)
    assert "MARKER" not in str(caught.value)
    monkeypatch.setenv("STOKER_TOKEN", token)
    met = meet(read_pointer, lambda head, _: ranged(head), token=None)
    assert isinstance(met.error, ConfigError)
    assert "MARKER" not in str(met.error)
    assert met.function == []
