"""What stores say of whose credentials they use, without saying the credentials."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from stoker import GcsOptions, S3Options, ServedOptions, StoreOptions, open_store
from stoker._stores.access_token import Grant
from stoker._stores.http import HttpRequest, HttpResponse, parse_date
from stoker._stores.http_objects import CredentialsInfo, EndpointInfo, HttpObjectStore
from stoker._stores.served_store import ServedStoreClient
from stoker.errors import ConnectionLostError
from stoker_functions.serve import TokenKeys

KEYS: dict[str, Any] = {"access_key_id": "MARKER", "secret_access_key": "MARKER"}


def introduced(url: str, options: StoreOptions, *, endpoint: bool = False) -> CredentialsInfo | EndpointInfo:
    async def ask() -> CredentialsInfo | EndpointInfo:
        store = open_store(url, options=options)
        try:
            assert isinstance(store, HttpObjectStore)
            return await (store.describe_endpoint() if endpoint else store.describe_credentials())
        finally:
            await store.close()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("url", "options", "kind"),
    [
        ("s3://b/x", S3Options(**KEYS), "given keys"),
        ("s3://b/x", S3Options(**KEYS, session_token="MARKER"), "given keys, temporary"),
        ("s3://b/x", S3Options(anonymous=True), "none"),
        ("gs://b/x", GcsOptions(token="MARKER"), "a ready token"),
        ("gs://b/x", GcsOptions(anonymous=True), "none"),
        ("gs://b/x", GcsOptions(endpoint_url="http://127.0.0.1:9"), "none: an emulator"),
        ("stoker+https://b/v1/x", ServedOptions(token="MARKER"), "a ready token"),
        ("stoker+https://b/v1/x", ServedOptions(anonymous=True), "none"),
    ],
)
def test_only_the_kind_of_the_credentials_is_reported(url: str, options: StoreOptions, kind: str) -> None:
    assert introduced(url, options) == CredentialsInfo(kind=kind)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b/x", S3Options(endpoint_url="http://127.0.0.1:9", **KEYS)),
        ("gs://b/x", GcsOptions(endpoint_url="http://127.0.0.1:9")),
        ("stoker+http://127.0.0.1:9/v1/x", ServedOptions(token="MARKER")),
    ],
)
def test_an_endpoint_that_is_not_there_is_a_lost_connection(url: str, options: StoreOptions) -> None:
    with pytest.raises(ConnectionLostError) as raised:
        introduced(url, options, endpoint=True)
    assert "MARKER" not in str(raised.value)


def test_a_token_of_ours_tells_its_end_and_no_more() -> None:
    grant = Grant(datasets=("MARKER",), not_before_seconds=1_000_000_000, expires_seconds=1_000_003_600)
    token = TokenKeys({"MARKER": b"MARKER" * 6}).sign(grant)
    found = introduced("stoker+https://b/v1/x", ServedOptions(token=token))
    assert found == CredentialsInfo(kind="a token of stoker's", expires=datetime(2001, 9, 9, 2, 46, 40, tzinfo=UTC))


def test_the_region_of_a_lambda_function_is_in_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(self: ServedStoreClient, call: HttpRequest, destination: object) -> HttpResponse:
        assert "Authorization" not in call.headers
        return HttpResponse(status=403, headers={"Date": "Sat, 21 Nov 2026 21:10:32 GMT"})

    monkeypatch.setattr(ServedStoreClient, "_send_to_origin", answer)
    options = ServedOptions(token="MARKER")
    url = "https://abc.lambda-url.eu-west-3.on.aws/v1/x"
    date = datetime(2026, 11, 21, 21, 10, 32, tzinfo=UTC)
    assert introduced(f"stoker+{url}", options, endpoint=True) == EndpointInfo(
        address=url, region="eu-west-3", date=date
    )


def test_a_date_header_is_read_and_nonsense_is_none() -> None:
    assert parse_date("Sat, 21 Nov 2026 21:10:32 GMT") == datetime(2026, 11, 21, 21, 10, 32, tzinfo=UTC)
    assert [parse_date(text) for text in (None, "", "yesterday", "Sat, 99 Nov 2026 99:10:32 GMT")] == [None] * 4
