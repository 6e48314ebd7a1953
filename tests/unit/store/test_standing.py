"""What stores say of whose credentials they use, without saying the credentials."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from stoker.errors import ConnectionLostError
from stoker.store import GcsOptions, S3Options, StoreOptions, open_store
from stoker.store.standing import Endpoint, Identity, Introduced, parse_date

KEYS: dict[str, Any] = {"access_key_id": "MARKER", "secret_access_key": "MARKER"}


def introduced(url: str, options: StoreOptions, *, endpoint: bool = False) -> Identity | Endpoint:
    async def ask() -> Identity | Endpoint:
        store = open_store(url, options=options)
        try:
            assert isinstance(store, Introduced)
            return await (store.endpoint() if endpoint else store.identity())
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
    ],
)
def test_the_kind_of_credentials_is_told_and_nothing_else(url: str, options: StoreOptions, kind: str) -> None:
    assert introduced(url, options) == Identity(kind=kind)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b/x", S3Options(endpoint_url="http://127.0.0.1:9", **KEYS)),
        ("gs://b/x", GcsOptions(endpoint_url="http://127.0.0.1:9")),
    ],
)
def test_an_endpoint_that_is_not_there_is_a_lost_connection(url: str, options: StoreOptions) -> None:
    with pytest.raises(ConnectionLostError) as raised:
        introduced(url, options, endpoint=True)
    assert "MARKER" not in str(raised.value)


def test_a_date_header_is_read_and_nonsense_is_none() -> None:
    assert parse_date("Sat, 21 Nov 2026 21:10:32 GMT") == datetime(2026, 11, 21, 21, 10, 32, tzinfo=UTC)
    assert [parse_date(text) for text in (None, "", "yesterday", "Sat, 99 Nov 2026 99:10:32 GMT")] == [None] * 4
