"""AWS credentials from an endpoint of the container's: refreshed, used while they last, and what a failure means."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from botocore.utils import ContainerMetadataFetcher

from stoker import S3Options, open_store
from stoker._stores import aws_credentials
from stoker._stores.aws_credentials import AwsCredentials
from stoker.errors import ConnectionLostError, CredentialsError, StoreError, TransientError
from support.scripted_server import Server, serving

Say = Callable[[], bytes]


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0)


def keys(name: str, life: timedelta = timedelta(hours=1)) -> bytes:
    said = {"AccessKeyId": name, "SecretAccessKey": "hush", "Token": "t"}
    body = json.dumps({**said, "Expiration": (datetime.now(UTC) + life).isoformat()}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def refusal(status: int, body: bytes = b"no") -> bytes:
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


def with_endpoint(say: Say, use: Callable[[str], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def speak(_: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(say())
            await writer.drain()

    async def main() -> None:
        async with serving(speak) as server:
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{server.url}/keys")
            await use(server.url)

    asyncio.run(main())


def found() -> AwsCredentials:
    return AwsCredentials(profile=None, other_remedies="")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refusal(503), TransientError),
        (refusal(429), TransientError),
        (refusal(500), TransientError),
        (refusal(403), CredentialsError),
        (refusal(404), CredentialsError),
        (refusal(200, b"<html>"), TransientError),
        (refusal(200, b"{}"), TransientError),
        (refusal(200, b"[]"), TransientError),
        (refusal(200, b"\xff"), TransientError),
        (keys("old", timedelta(hours=-1)), StoreError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", TransientError),
        (b"nonsense", TransientError),
        (b"", TransientError),
    ],
    ids=lambda value: value[:60].decode("latin-1") if isinstance(value, bytes) else value.__name__,
)
def test_what_an_endpoint_says_is_a_typed_error(
    answer: bytes, kind: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(_: str) -> None:
        with pytest.raises(kind) as caught:
            await found().current()
        assert "hush" not in str(caught.value)

    with_endpoint(lambda: answer, use, monkeypatch)


def test_an_endpoint_that_is_not_there_is_transient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:1/keys")
    with pytest.raises(TransientError):
        asyncio.run(found().current())


def test_keys_that_last_are_used_while_the_endpoint_fails_by_reads_and_by_writes_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = [keys("first", timedelta(minutes=5))]
    monkeypatch.setattr("stoker._stores.http_objects._RENEWAL_PAUSE_SECONDS", 0.0)

    async def use(_: str) -> None:
        store = open_store("s3://bucket", options=S3Options(endpoint_url="http://127.0.0.1:1"))
        mine = found()
        assert (await mine.current()).keys.access_key == "first"
        said[0] = refusal(503)
        assert (await mine.current()).keys.access_key == "first"
        with pytest.raises(TransientError):  # there are none yet
            await store.put("x", b"")
        said[0] = keys("second", timedelta(minutes=5))
        with pytest.raises(ConnectionLostError, match="connection could not be made"):  # signed, and sent
            await store.put("x", b"")
        said[0] = refusal(503)
        for use in (store.get("x"), store.put("x", b"")):
            with pytest.raises(ConnectionLostError, match="connection could not be made"):
                await use
        await store.close()

    with_endpoint(lambda: said[0], use, monkeypatch)


def test_keys_that_were_refused_are_looked_for_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [keys("first")]

    async def use(_: str) -> None:
        mine = found()
        used = await mine.current()
        said[0] = keys("second")
        assert (await mine.renew(used)).keys.access_key == "second"
        assert (await mine.renew(used)).keys.access_key == "second"

    with_endpoint(lambda: said[0], use, monkeypatch)


def test_no_credentials_at_all_say_what_to_do() -> None:
    with pytest.raises(CredentialsError, match="AWS_ACCESS_KEY_ID"):
        asyncio.run(found().current())


@pytest.mark.parametrize(("vendor", "kind"), [("Amazon EC2", ConnectionLostError), ("QEMU", CredentialsError)])
def test_on_a_machine_of_amazons_a_silent_metadata_service_may_answer_later(
    vendor: str, kind: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(aws_credentials, "machine_vendor", lambda: vendor)
    monkeypatch.setattr(aws_credentials, "_METADATA_ADDRESS", ("127.0.0.1", 1))
    with pytest.raises(kind):
        asyncio.run(found().current())


def test_static_keys_never_end() -> None:
    async def main() -> None:
        mine = AwsCredentials(profile=None, keys=("AK", "SK", None), other_remedies="")
        assert (await mine.current()).keys.access_key == "AK"
        assert mine.life_seconds == float("inf")
        identity = await mine.describe()
        assert (identity.kind, identity.expires) == ("given keys", None)

    asyncio.run(main())
