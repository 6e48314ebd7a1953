"""What Google Cloud Storage refuses, from the local GCS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker import GcsOptions, open_store
from stoker._stores.gcs import GcsTokens
from stoker.abc import Store
from stoker.errors import (
    BucketNotFoundError,
    ConnectionLostError,
    CredentialsError,
    NotFoundError,
    PermissionDeniedError,
    ServerError,
    StoreError,
    ThrottledError,
)
from stoker_local import GcsConfig, LocalGcs, running_gcs
from support.stores import run_check
from support.uses import USES, Use, error_of, every_use

TOKEN = "the-right-token"


@pytest.fixture(scope="module")
def gcs() -> Iterator[LocalGcs]:
    config = GcsConfig(buckets=("ours", "closed"), token=TOKEN, forbidden=("closed",))
    with running_gcs(config) as server:
        yield server


def test_a_token_opens_every_use(gcs: LocalGcs) -> None:
    async def check(store: Store) -> None:
        await USES["put"](store)
        for use in USES.values():
            await use(store)

    run_check(open_store("gs://ours", options=GcsOptions(endpoint_url=gcs.url, token=TOKEN)), check)


@every_use
@pytest.mark.parametrize("token", ["a-wrong-token", None])
def test_a_wrong_or_missing_token_is_a_credentials_error_that_does_not_repeat_it(
    gcs: LocalGcs, use: Use, token: str | None
) -> None:
    error = error_of("gs://ours", GcsOptions(endpoint_url=gcs.url, token=token), use)
    assert isinstance(error, CredentialsError)
    assert "a-wrong-token" not in str(error)


@every_use
def test_a_forbidden_bucket_is_a_permission_error(gcs: LocalGcs, use: Use) -> None:
    error = error_of("gs://closed", GcsOptions(endpoint_url=gcs.url, token=TOKEN), use)
    assert isinstance(error, PermissionDeniedError)
    assert "gs://closed" in str(error)


@every_use
def test_a_missing_bucket_is_named(gcs: LocalGcs, use: Use) -> None:
    error = error_of("gs://nowhere", GcsOptions(endpoint_url=gcs.url, token=TOKEN), use)
    assert isinstance(error, BucketNotFoundError)
    assert "gs://nowhere" in str(error)


@every_use
@pytest.mark.parametrize(
    ("status", "kind", "asked"),
    [(429, ThrottledError, 7.0), (503, ThrottledError, 7.0), (500, ServerError, None), (502, ServerError, None)],
)
def test_a_passing_failure_is_transient_and_not_retried_here(
    gcs: LocalGcs, use: Use, status: int, kind: type[StoreError], asked: float | None
) -> None:
    async def check(store: Store) -> None:
        await USES["put"](store)
        gcs.fail_next(status, retry_after_seconds=None if asked is None else int(asked))
        with pytest.raises(kind) as caught:
            await use(store)
        assert getattr(caught.value, "retry_after_seconds", None) == asked
        await use(store)

    run_check(open_store("gs://ours", options=GcsOptions(endpoint_url=gcs.url, token=TOKEN)), check)


@every_use
def test_an_unserved_endpoint_is_a_lost_connection(use: Use) -> None:
    settings = GcsOptions(endpoint_url="http://127.0.0.1:1")
    assert isinstance(error_of("gs://ours", settings, use), ConnectionLostError)


@pytest.mark.parametrize("content", ["not json", "{}", json.dumps({"type": "service_account"}), None])
def test_a_broken_credentials_file_is_a_credentials_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    file = tmp_path / "credentials.json"
    if content is not None:
        file.write_text(content)
    error = error_of("gs://ours", GcsOptions(credentials_file=file), USES["get"])
    assert isinstance(error, CredentialsError)
    assert "GOOGLE_APPLICATION_CREDENTIALS" in str(error)


def test_a_token_is_fetched_once_for_many_and_again_once_it_is_refused(
    gcs: LocalGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued: list[str] = []

    async def fetch(self: GcsTokens) -> tuple[str, float]:
        await asyncio.sleep(0)
        issued.append(f"old-{len(issued)}" if len(issued) == 0 else TOKEN)
        return issued[-1], float("inf")

    monkeypatch.setattr(GcsTokens, "fetch", fetch)
    monkeypatch.setattr("stoker._stores.gcs._find_emulator_url", lambda *_: None)
    monkeypatch.setattr("stoker._stores.gcs._GOOGLE", gcs.url)

    async def check(store: Store) -> None:
        found = await asyncio.gather(*(store.get("none") for _ in range(8)), return_exceptions=True)
        assert all(isinstance(error, NotFoundError) for error in found)
        assert issued == ["old-0", TOKEN]

    run_check(open_store("gs://ours", options=GcsOptions()), check)


def test_the_emulator_variable_is_enough_with_or_without_a_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(store: Store) -> None:
        written = await store.put("x", b"1")
        assert await store.get("x") == (b"1", written)

    with running_gcs() as server:
        for address in (server.url, server.url.removeprefix("http://")):
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
            run_check(open_store("gs://stoker/prefix"), check)
