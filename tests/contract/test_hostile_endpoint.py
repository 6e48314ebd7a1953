"""Endpoints that answer wrongly, echo, redirect or never end: a typed error without secrets, no other request."""

from __future__ import annotations

import asyncio
import gzip
import logging
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stoker import GcsOptions, HttpOptions, S3Options, StoreOptions, open_store
from stoker.abc import Store
from stoker.errors import PermissionDeniedError, ServerError, StokerError, StoreError, ThrottledError, TruncatedError
from support.scripted_server import Server, serving
from support.stores import read_range
from support.uses import USES, Use, every_use

SECRETS = {"secret_access_key": "MARKER-secret-key", "session_token": "MARKER-session/token+=="}
TOKEN = "MARKER-bearer.token=="
STARTS = ("/storage/v1/", "/upload/storage/v1/", "/download/storage/v1/")

Answer = Callable[[bytes], bytes]
every_store = pytest.mark.parametrize("scheme", ["s3", "gs"])


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))


@asynccontextmanager
async def endpoint(answer: Answer, asked: list[bytes], *, endless: bool = False) -> AsyncIterator[str]:
    """Serve ``answer(request head)`` to every request, each on its own connection, and record the requests.

    ``endless`` continues with zeros until the client disconnects.
    """

    async def speak(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head)
        writer.write(answer(head))
        while endless:
            writer.write(bytes(1 << 16))
            await writer.drain()
        writer.write_eof()
        await writer.drain()
        while await reader.read(1 << 16):
            pass

    async with serving(speak) as server:
        yield server.url


def options(scheme: str, url: str) -> StoreOptions:
    http = HttpOptions(read_timeout_seconds=30)
    if scheme == "s3":
        return S3Options(endpoint_url=url, region="us-east-1", access_key_id="AK", http=http, **SECRETS)  # type: ignore[arg-type]
    return GcsOptions(endpoint_url=url, token=TOKEN, http=http)


def meet(scheme: str, answer: Answer, use: Use, *, endless: bool = False) -> tuple[BaseException | None, list[bytes]]:
    """Return the error that ``use`` ends with, if it does, and the requests that were made."""
    asked: list[bytes] = []

    async def main() -> BaseException | None:
        async with endpoint(answer, asked, endless=endless) as url:
            store = open_store(f"{scheme}://bucket", options=options(scheme, url))
            try:
                await use(store)
            except StokerError as error:
                return error
            finally:
                await store.close()
        return None

    return asyncio.run(main()), asked


def reply(status: str, *headers: str, body: bytes = b"") -> bytes:
    lines = (f"HTTP/1.1 {status}", *headers, "Connection: close", f"Content-Length: {len(body)}", "", "")
    return "\r\n".join(lines).encode("latin-1") + body


def everything_said(error: BaseException) -> str:
    """All that a log, a terminal or a crash report shows of an error."""
    shown = "".join(traceback.format_exception(error))
    while error.__cause__ is not None:
        error = error.__cause__
        shown += repr(error)
    return shown + repr(error) + repr(vars(error))


def echo_body(head: bytes) -> bytes:
    text = head.replace(b"\r\n", b" ").replace(b"<", b" ").replace(b'"', b" ")
    if any(f" {start}".encode() in head for start in STARTS):
        return b'{"error": {"message": "%s", "errors": [{"reason": "%s"}]}}' % (text, text)
    return b"<Error><Code>%s</Code><Message>%s</Message><Region>%s</Region></Error>" % (text, text, text)


def secret_lines(head: bytes) -> bytes:
    lines = head.split(b"\r\n")
    return b" ".join(line for line in lines if line.lower().startswith((b"authorization", b"x-amz-security-token")))


ECHOES: dict[str, Answer] = {
    **{
        f"{status}-body": lambda head, status=status: reply(f"{status} No", body=echo_body(head))  # type: ignore[misc]
        for status in (301, 307, 400, 401, 403, 404, 409, 412, 416, 429, 500, 501, 503)
    },
    "good-body": lambda head: reply("200 OK", "ETag: x", "x-goog-generation: 1", body=echo_body(head)),
    "reason": lambda head: reply("403 " + secret_lines(head).decode()),
    "range": lambda head: reply("206 OK", "Content-Range: " + secret_lines(head).decode(), body=b"0123"),
    "etag": lambda head: reply("412 No", "ETag: " + secret_lines(head).decode(), "Retry-After: MARKER"),
    "region": lambda head: reply("301 No", "x-amz-bucket-region: " + secret_lines(head).decode()),
    "status-line": lambda head: b"HTTP/1.1 " + secret_lines(head) + b"\r\n\r\n",
    "no-http": secret_lines,
    "cut": lambda head: reply("200 OK", "ETag: x", body=echo_body(head))[:-9],
}


@every_store
@every_use
@pytest.mark.parametrize("answer", ECHOES.values(), ids=ECHOES.keys())
def test_an_endpoint_that_echoes_requests_puts_no_secret_into_an_error_or_a_log(
    scheme: str, use: Use, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="stoker"):
        error, asked = meet(scheme, answer, use)
    assert b"MARKER" in asked[0]  # it was sent, so it could have been echoed
    signatures = [head.partition(b"Signature=")[2][:64].decode() for head in asked]
    said = caplog.text + (everything_said(error) if error is not None else "")
    assert not [secret for secret in ("MARKER", *filter(None, signatures)) if secret in said]


@every_store
@every_use
@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(scheme: str, use: Use, status: int) -> None:
    elsewhere: list[bytes] = []

    async def main() -> None:
        async with (
            endpoint(lambda _: reply("200 OK"), elsewhere) as metadata,
            endpoint(lambda _: reply(f"{status} Go", f"Location: {metadata}/latest/meta-data"), []) as url,
        ):
            store = open_store(f"{scheme}://bucket", options=options(scheme, url))
            try:
                with pytest.raises(StoreError):
                    await use(store)
            finally:
                await store.close()

    asyncio.run(main())
    assert elsewhere == []


NONSENSE = [b"", b"{}", b"[]", b"null", b'{"items": 3}', b'{"items": [7]}', b'{"items": [{"name": "x", "size": "-1"}]}']
NONSENSE += [b'{"name": "x", "size": "1", "generation": "\\u0661"}', b'{"name": "x", "size": "1", "generation": ""}']
NONSENSE += [b'{"name": "x", "size": "1e9", "generation": "1"}', b"\xff\xfe", b"<a>", b"<!DOCTYPE a []><b/>"]
NONSENSE += [b"<ListBucketResult><Contents><Key>x</Key></Contents></ListBucketResult>"]
NONSENSE += [b"<ListBucketResult><Contents><Key>x</Key><ETag>1</ETag><Size>no</Size></Contents></ListBucketResult>"]
NONSENSE += [b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>", b"[" * 100_000]


@every_store
@every_use
@pytest.mark.parametrize("body", NONSENSE, ids=lambda body: body[:40].decode("latin-1"))
def test_an_answer_without_sense_is_a_typed_error_or_none(scheme: str, use: Use, body: bytes) -> None:
    error, asked = meet(scheme, lambda _: reply("200 OK", body=body), use)  # any other error fails the test
    assert asked
    if use is USES["range"]:
        assert isinstance(error, StoreError)


WHOLE = b"HTTP/1.1 200 OK\r\nETag: x\r\nx-goog-generation: 1\r\n\r\n"
RANGE = b"HTTP/1.1 206 OK\r\nETag: x\r\nx-goog-generation: 1\r\nContent-Range: bytes 0-3/10\r\n\r\n"


@pytest.mark.parametrize(("scheme", "use"), [("s3", "get"), ("s3", "list"), ("s3", "put"), ("gs", "get")])
def test_an_answer_that_never_ends_has_a_limit(scheme: str, use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker._stores.http._MAX_WHOLE_BYTES", 1 << 20)
    error, _ = meet(scheme, lambda _: WHOLE, USES[use], endless=True)
    assert isinstance(error, StoreError)
    assert "too many to read at once" in str(error)


@pytest.mark.parametrize(
    ("scheme", "page"),
    [
        ("gs", b'{"nextPageToken": "same"}'),
        (
            "s3",
            (
                b"<ListBucketResult><IsTruncated>true</IsTruncated>"
                b"<NextContinuationToken>same</NextContinuationToken></ListBucketResult>"
            ),
        ),
    ],
)
def test_a_listing_that_leads_back_to_itself_is_found_out(scheme: str, page: bytes) -> None:
    error, asked = meet(scheme, lambda _: reply("200 OK", body=page), USES["list"])
    assert isinstance(error, ServerError)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("scheme", "page"),
    [
        ("s3", b"<Error><Code>SlowDown</Code></Error>"),
        ("s3", b"<html><body/></html>"),
        ("gs", b'{"error": {"code": 503}}'),
    ],
)
def test_what_is_no_listing_is_not_an_empty_one(scheme: str, page: bytes) -> None:
    error, _ = meet(scheme, lambda _: reply("200 OK", body=page), USES["list"])
    assert isinstance(error, ServerError)


@every_store
def test_a_range_that_never_ends_is_cut_at_its_end(scheme: str) -> None:
    error, _ = meet(scheme, lambda _: RANGE, USES["range"], endless=True)
    assert isinstance(error, TruncatedError)


@every_store
def test_a_refusal_that_never_ends_is_cut(scheme: str) -> None:
    error, _ = meet(scheme, lambda _: WHOLE.replace(b"200 OK", b"403 No"), USES["range"], endless=True)
    assert isinstance(error, PermissionDeniedError)


@every_store
def test_a_compressed_answer_is_not_unpacked(scheme: str) -> None:
    bomb = gzip.compress(bytes(16 << 20))
    asked = f"Content-Range: bytes 0-{len(bomb) - 1}/{len(bomb)}"
    headers = ("ETag: x", "x-goog-generation: 1", "Content-Encoding: gzip", asked)

    async def use(store: Store) -> None:
        assert await read_range(store, "x", 0, len(bomb)) == bomb
        assert (await store.get("x"))[0] == bomb

    error, _ = meet(scheme, lambda _: reply("206 OK", *headers, body=bomb), use)
    assert error is None


@every_store
@every_use
def test_a_header_without_end_is_a_typed_error(scheme: str, use: Use) -> None:
    error, _ = meet(scheme, lambda _: b"HTTP/1.1 200 OK\r\nA: " + b"x" * (1 << 20), use)
    assert isinstance(error, StoreError)


@every_store
@pytest.mark.parametrize("wait", ["MARKER", "-1", "1e308", "9" * 400, "\u0663", "inf"])
def test_a_wait_that_is_no_number_of_seconds_is_not_taken(scheme: str, wait: str) -> None:
    answer = reply("503 No", f"Retry-After: {wait}".encode().decode("latin-1"))
    error, _ = meet(scheme, lambda _: answer, USES["range"])
    assert isinstance(error, ThrottledError)
    assert error.retry_after_seconds is None


@every_store
def test_what_a_bucket_says_writes_nothing_to_the_terminal(scheme: str) -> None:
    text = b"a\x1b[2Jb\r\nINFO: all is well\xe2\x80\xae"
    body = {"gs": b'{"error": {"message": "%s"}}' % text, "s3": b"<Code>X</Code><Message>%s</Message>" % text}[scheme]
    error, _ = meet(scheme, lambda _: reply("400 No", body=body), USES["range"])
    assert str(error).isprintable()
    assert "all is well" in str(error)


def test_an_unrequested_google_listing_is_detected() -> None:
    listed = b'{"items": [{"name": "\\ud800", "size": "1", "generation": "1"}]}'
    error, _ = meet("gs", lambda _: reply("200 OK", body=listed), USES["list"])
    assert isinstance(error, StoreError)
    assert not isinstance(error, ServerError)
