from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from stoker import GcsOptions
from stoker._stores.gcs import GcsStoreClient
from stoker.errors import ConnectionLostError, CredentialsError, DeadlineError, ServerError, StoreError, ThrottledError
from support.web import served


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setattr("stoker._stores.google_credentials.machine_vendor", lambda: "QEMU")


def user_file(folder: Path, token_url: str) -> Path:
    file = folder / "user.json"
    fields = {"client_id": "c", "client_secret": "hush", "refresh_token": "r", "token_uri": token_url}
    file.write_text(json.dumps({"type": "authorized_user", **fields}))
    return file


def with_token_server(
    folder: Path, answers: list[web.Response], check: Callable[[GcsStoreClient], Awaitable[None]]
) -> None:
    """Run ``check`` on an access whose tokens come from a server that gives ``answers``, one after the other."""

    async def answer(_: web.Request) -> web.Response:
        return answers.pop(0)

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/token", answer)
        async with served(app) as root:
            access = GcsStoreClient("bucket", GcsOptions(credentials_file=user_file(folder, f"{root}/token")))
            try:
                await check(access)
            finally:
                await access.close()

    asyncio.run(main())


def token(value: str, seconds: int = 3600) -> web.Response:
    body = gzip.compress(json.dumps({"access_token": value, "expires_in": seconds}).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    return web.Response(body=body, headers=headers)


def test_many_requests_share_one_token(tmp_path: Path) -> None:
    async def check(access: GcsStoreClient) -> None:
        assert set(await asyncio.gather(*(access.credentials.current() for _ in range(8)))) == {"one"}
        assert access.headers("one")["Authorization"] == "Bearer one"

    with_token_server(tmp_path, [token("one")], check)


def test_a_token_about_to_end_is_replaced_before_it_does(tmp_path: Path) -> None:
    async def check(access: GcsStoreClient) -> None:
        assert await access.credentials.current() == "short"
        assert await access.credentials.current() == "long"
        assert await access.credentials.current() == "long"

    with_token_server(tmp_path, [token("short", seconds=30), token("long")], check)


def test_a_refused_token_is_renewed_once_for_all_its_users(tmp_path: Path) -> None:
    async def check(access: GcsStoreClient) -> None:
        used = await access.credentials.current()
        assert used is not None
        assert await asyncio.gather(*(access.credentials.renew(used) for _ in range(8))) == ["two"] * 8
        assert await access.credentials.renew(used) == "two"

    with_token_server(tmp_path, [token("one"), token("two")], check)


def test_a_cancelled_wait_for_a_token_leaves_the_others_theirs(tmp_path: Path) -> None:
    async def check(access: GcsStoreClient) -> None:
        waits = [asyncio.ensure_future(access.credentials.current()) for _ in range(3)]
        await asyncio.sleep(0)
        waits[0].cancel()
        found = await asyncio.gather(*waits, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert len(set(found[1:])) == 1

    with_token_server(tmp_path, [token("one"), token("two")], check)


def test_refused_credentials_are_a_credentials_error_without_secrets(tmp_path: Path) -> None:
    async def check(access: GcsStoreClient) -> None:
        with pytest.raises(CredentialsError, match="400") as caught:
            await access.credentials.current()
        assert "hush" not in str(caught.value)
        assert await access.credentials.current() == "later"

    refusal = web.json_response({"error": "invalid_grant hush"}, status=400)
    with_token_server(tmp_path, [refusal, token("later")], check)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (web.Response(status=503, headers={"Retry-After": "7"}), ThrottledError),
        (web.Response(status=429), ThrottledError),
        (web.Response(status=408), DeadlineError),
        (web.Response(status=500), ServerError),
        (web.Response(status=520), ServerError),
        (web.Response(text="<html>", content_type="text/html"), ServerError),
        (web.Response(text="<html>", content_type="application/json"), ServerError),
        (web.Response(status=401), CredentialsError),
        (web.json_response({}), CredentialsError),
        (web.json_response([]), CredentialsError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else f"{value.status}-{value.content_type}",
)
def test_a_failure_of_the_token_endpoint_that_may_pass_is_transient(
    tmp_path: Path, answer: web.Response, kind: type[StoreError]
) -> None:
    async def check(access: GcsStoreClient) -> None:
        with pytest.raises(kind) as caught:
            await access.credentials.current()
        if answer.headers.get("Retry-After"):
            assert getattr(caught.value, "retry_after_seconds", None) == 7.0
        assert await access.credentials.current() == "later"

    with_token_server(tmp_path, [answer, token("later")], check)


def test_a_token_that_lasts_is_used_while_the_endpoint_fails(tmp_path: Path) -> None:
    async def check(access: GcsStoreClient) -> None:
        assert [await access.credentials.current() for _ in range(3)] == ["lasting"] * 3
        assert (await access.credentials.describe()).is_renewed

    with_token_server(tmp_path, [token("lasting", seconds=120), web.Response(status=503)], check)


@pytest.mark.parametrize("variable", ["K_SERVICE", "CLOUD_RUN_JOB", "GCE_METADATA_HOST"])
def test_a_machine_of_googles_whose_metadata_service_is_out_may_have_a_token_later(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv(variable, "mine")
    monkeypatch.setattr("gcloud.aio.auth.token.GCE_ENDPOINT_TOKEN", "http://127.0.0.1:1/token")

    async def main() -> None:
        access = GcsStoreClient("bucket", GcsOptions())
        try:
            with pytest.raises(ConnectionLostError):
                await access.credentials.current()
        finally:
            await access.close()

    asyncio.run(main())


def test_an_unreachable_token_server_is_a_lost_connection(tmp_path: Path) -> None:
    async def main() -> None:
        file = user_file(tmp_path, "http://127.0.0.1:1/token")
        access = GcsStoreClient("bucket", GcsOptions(credentials_file=file))
        try:
            with pytest.raises(ConnectionLostError):
                await access.credentials.current()
        finally:
            await access.close()

    asyncio.run(main())


def test_a_machine_without_any_account_says_how_to_give_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setattr("gcloud.aio.auth.token.GCE_ENDPOINT_TOKEN", "http://127.0.0.1:1/token")

    async def main() -> None:
        access = GcsStoreClient("bucket", GcsOptions())
        try:
            with pytest.raises(CredentialsError, match="gcloud auth application-default login"):
                await access.credentials.current()
        finally:
            await access.close()

    asyncio.run(main())


@pytest.mark.parametrize("options", [GcsOptions(anonymous=True), GcsOptions(endpoint_url="http://emulator")])
def test_anonymous_and_emulated_requests_carry_no_token(options: GcsOptions) -> None:
    async def main() -> None:
        access = GcsStoreClient("bucket", options)
        try:
            assert await access.credentials.current() is None
            assert "Authorization" not in access.headers(None)
        finally:
            await access.close()

    asyncio.run(main())


def test_the_project_to_bill_goes_with_every_request() -> None:
    async def main() -> None:
        access = GcsStoreClient("bucket", GcsOptions(anonymous=True, user_project="payer"))
        try:
            assert access.headers(None)["X-Goog-User-Project"] == "payer"
        finally:
            await access.close()

    asyncio.run(main())
