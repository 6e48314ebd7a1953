"""Signed URLs: each permits to read one object, for a limited time, and nothing else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import aiohttp
import pytest
from aiohttp import web
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from yarl import URL

from stoker import GcsOptions, S3Options, open_store
from stoker.abc import Presigner, Store
from stoker.errors import ConfigError, ConnectionLostError, CredentialsError
from stoker_local import LocalBucket
from support.local_bucket import s3_options
from support.stores import run_check
from support.web import served

ODD_KEY = "a b/ü+%2F?&=~'*"


@pytest.fixture
def s3(local_bucket: LocalBucket) -> S3Options:
    return s3_options(local_bucket)


async def presigned(store: Store, key: str, seconds: int = 60, tag: str = "") -> str:
    assert isinstance(store, Presigner)
    return await store.presign(key, seconds=seconds, tag=tag)


async def fetched(url: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, URL(url, encoded=True), headers=headers) as response,
    ):
        return response.status, await response.read()


def test_the_url_alone_suffices_to_read_the_object_or_a_range_of_it(s3: S3Options) -> None:
    async def check(store: Store) -> None:
        await store.put(ODD_KEY, b"0123456789")
        url = await presigned(store, ODD_KEY)
        assert await fetched(url) == (200, b"0123456789")
        assert await fetched(url, Range="bytes=2-4") == (206, b"234")
        assert "stoker-secret" not in url

    run_check(open_store("s3://stoker/presigned", options=s3), check)


def test_the_url_is_good_for_nothing_else(s3: S3Options) -> None:
    async def check(store: Store) -> None:
        await store.put("x", b"1")
        await store.put("y", b"2")
        url = await presigned(store, "x")
        assert (await fetched(url.replace("/x?", "/y?")))[0] == 403
        assert (await fetched(url.replace("X-Amz-Expires=60", "X-Amz-Expires=600000")))[0] == 403
        assert (await fetched(url[:-1] + ("0" if url[-1] != "0" else "1")))[0] == 403
        for method in ("PUT", "DELETE"):
            assert (await fetched(url, method))[0] == 403
        assert (await store.get("x"))[0] == b"1"

    run_check(open_store("s3://stoker/presigned", options=s3), check)


def test_a_session_token_and_who_pays_are_part_of_the_url(s3: S3Options) -> None:
    async def check(store: Store) -> None:
        query = dict(parse_qsl(urlsplit(await presigned(store, "x")).query))
        assert query["X-Amz-Security-Token"] == "session+token/="
        assert query["x-amz-request-payer"] == "requester"
        assert query["X-Amz-Expires"] == "60"

    run_check(open_store("s3://b", options=replace(s3, session_token="session+token/=", requester_pays=True)), check)


def test_without_credentials_nothing_is_signed(s3: S3Options, tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        with pytest.raises(CredentialsError):
            await presigned(store, "x")
        with pytest.raises(ConfigError):
            await presigned(store, "/x")

    anonymous = S3Options(endpoint_url=s3.endpoint_url, anonymous=True)
    run_check(open_store("s3://b", options=anonymous), check)
    user = tmp_path / "user.json"
    user.write_text(
        json.dumps({"type": "authorized_user", "client_id": "c", "client_secret": "s", "refresh_token": "r"})
    )
    broken = tmp_path / "broken.json"
    broken.write_text("MARKER")
    for options in (
        GcsOptions(endpoint_url="http://127.0.0.1:9"),
        GcsOptions(anonymous=True),
        GcsOptions(token="t"),
        GcsOptions(credentials_file=broken),
    ):
        run_check(open_store("gs://b", options=options), check)


# --- Google -----------------------------------------------------------------------------------------------------

EMAIL = "packer@project.iam.gserviceaccount.com"


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture
def key_file(key: rsa.RSAPrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    file = tmp_path / "account.json"
    file.write_text(json.dumps({"type": "service_account", "client_email": EMAIL, "private_key": pem}))
    return file


def check_signature(url: str, key: rsa.RSAPrivateKey) -> dict[str, str]:
    """Verify a V4 signature of Google's as documented; return the query."""
    parts = urlsplit(url)
    signed, _, signature = parts.query.partition("&X-Goog-Signature=")
    query = dict(parse_qsl(signed, keep_blank_values=True))
    assert [name for name, _ in parse_qsl(signed)] == sorted(query)
    canonical = "\n".join(("GET", parts.path, signed, f"host:{parts.netloc}\n", "host", "UNSIGNED-PAYLOAD"))
    scope = query["X-Goog-Credential"].removeprefix(f"{EMAIL}/")
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(("GOOG4-RSA-SHA256", query["X-Goog-Date"], scope, digest))
    key.public_key().verify(bytes.fromhex(signature), text.encode(), padding.PKCS1v15(), hashes.SHA256())
    return query


def test_a_service_account_signs_with_its_own_key_without_a_request(key: rsa.RSAPrivateKey, key_file: Path) -> None:
    async def check(store: Store) -> None:
        url = await presigned(store, ODD_KEY, tag="1234567890")
        query = check_signature(url, key)
        assert unquote(urlsplit(url).path) == f"/bucket/prefix/{ODD_KEY}"
        assert urlsplit(url).path == quote(f"/bucket/prefix/{ODD_KEY}", safe="/~")
        assert urlsplit(url).netloc == "storage.googleapis.com"
        assert (query["generation"], query["X-Goog-Expires"], query["userProject"]) == ("1234567890", "60", "payer")
        assert "generation" not in check_signature(await presigned(store, "x"), key)

    options = GcsOptions(credentials_file=key_file, user_project="payer")
    run_check(open_store("gs://bucket/prefix", options=options), check)


def on_a_machine_of_google(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    sign: Callable[[web.Request], Awaitable[web.Response]],
    check: Callable[[Store], Awaitable[None]],
) -> None:
    """Run ``check`` where the machine's account is ``EMAIL`` and Google's signer is ``sign``."""

    async def token(_: web.Request) -> web.Response:
        return web.json_response({"access_token": "MARKER-token", "expires_in": 3600})

    async def email(request: web.Request) -> web.Response:
        assert request.headers["Metadata-Flavor"] == "Google"
        return web.Response(text=EMAIL)

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/account/token", token)
        app.router.add_get("/account/email", email)
        app.router.add_post("/{path:.*}", sign)
        async with served(app) as root:
            monkeypatch.setattr("gcloud.aio.auth.token.GCE_ENDPOINT_TOKEN", f"{root}/account/token?recursive=true")
            monkeypatch.setattr("gcloud.aio.auth.iam.API_ROOT_IAM_CREDENTIALS", root)
            store = open_store("gs://bucket", options=GcsOptions())
            try:
                await check(store)
            finally:
                await store.close()

    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(folder))
    asyncio.run(main())


def test_for_a_machines_own_account_google_signs(
    key: rsa.RSAPrivateKey, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    async def sign(request: web.Request) -> web.Response:
        asked.append(request.path)
        assert request.headers["Authorization"] == "Bearer MARKER-token"
        payload = base64.urlsafe_b64decode((await request.json())["payload"])
        signature = key.sign(payload, padding.PKCS1v15(), hashes.SHA256())
        return web.json_response({"signedBlob": base64.b64encode(signature).decode()})

    async def check(store: Store) -> None:
        query = check_signature(await presigned(store, "x", tag="7"), key)
        assert query["generation"] == "7"
        assert asked == [f"/projects/-/serviceAccounts/{EMAIL}:signBlob"]

    on_a_machine_of_google(monkeypatch, tmp_path, sign, check)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (403, {"error": {"message": "MARKER"}}, CredentialsError),
        (200, {}, CredentialsError),
        (200, [], CredentialsError),
        (0, {}, ConnectionLostError),
    ],
)
def test_a_missing_permission_to_sign_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, body: Any, kind: type[Exception]
) -> None:
    async def sign(request: web.Request) -> web.Response:
        if not status:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(body, status=status or 200)

    async def check(store: Store) -> None:
        with pytest.raises(kind) as caught:
            await presigned(store, "x")
        assert "MARKER" not in str(caught.value)
        if kind is CredentialsError:
            assert "serviceAccountTokenCreator" in str(caught.value)

    on_a_machine_of_google(monkeypatch, tmp_path, sign, check)
