from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from stoker._stores import google_credentials as google_identity
from stoker._stores.google_credentials import IdentityTokens
from stoker.errors import ConnectionLostError, CredentialsError, TransientError
from support.web import served

FUNCTION = "https://europe-west1-mine.cloudfunctions.net/stoker-pack"
KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
Handler = Callable[[web.Request], Awaitable[web.Response]]


@asynccontextmanager
async def google(handler: Handler) -> AsyncIterator[str]:
    """A server in place of Google's; all requests go to one handler."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with served(app) as url:
        yield url


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "no-gcloud"))
    monkeypatch.setattr("stoker._stores.google_credentials.machine_vendor", lambda: "QEMU")


def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **account: Any) -> None:
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))


def service_account(token_uri: str) -> dict[str, Any]:
    key = KEY.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    email = "packer@mine.iam.gserviceaccount.com"
    return {"type": "service_account", "client_email": email, "private_key": key, "token_uri": token_uri}


def test_a_service_accounts_key_signs_for_the_function_and_the_token_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    claims: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        form = await request.post()
        claims.append(jwt.decode(str(form["assertion"]), KEY.public_key(), ["RS256"], audience=f"{url}/token"))
        return web.json_response({"id_token": f"token-{len(claims)}"})

    url = ""

    async def tokens() -> list[str]:
        nonlocal url
        async with google(handler) as url:
            use(monkeypatch, tmp_path, **service_account(f"{url}/token"))
            mine, others = IdentityTokens(FUNCTION, None), IdentityTokens(f"{FUNCTION}-other", None)
            taken = [await mine.current(), await mine.current(), await others.current()]
            mine.discard("token-1")
            return [*taken, await mine.current()]

    assert asyncio.run(tokens()) == ["token-1", "token-1", "token-2", "token-3"]
    assert [each["target_audience"] for each in claims] == [FUNCTION, f"{FUNCTION}-other", FUNCTION]
    assert claims[0]["exp"] - claims[0]["iat"] == 3600


def test_a_refused_token_is_dropped_once_however_many_calls_it_was_refused_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = itertools.count(1)

    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"id_token": f"token-{next(given)}"})

    async def tokens() -> list[str]:
        async with google(handler) as url:
            use(monkeypatch, tmp_path, **service_account(f"{url}/token"))
            mine, taken = IdentityTokens(FUNCTION, None), []
            for _ in range(3):  # all of them had sent the first one
                taken.append(await mine.current())
                mine.discard("token-1")
            return [*taken, await mine.current()]

    assert asyncio.run(tokens()) == ["token-1", "token-2", "token-2", "token-2"]


@pytest.mark.parametrize(
    ("left_seconds", "kept_seconds"),
    [(3600, 3300), (1000, 700), (310, 60), (20, 60), (-7200, 60), (10**7, 3300), (10**400, 3300), (None, 3300)],
    ids=str,
)
def test_a_token_is_kept_until_shortly_before_the_end_that_it_names(
    left_seconds: int | None, kept_seconds: float
) -> None:
    named = {} if left_seconds is None else {"exp": int(time.time()) + left_seconds}
    token = jwt.encode(named, "k" * 32, algorithm="HS256")
    assert google_identity._token_life_seconds(token) == pytest.approx(kept_seconds, abs=5)


@pytest.mark.parametrize("token", ["", "opaque", "a.b.c", "\u00e9.x.y"])
def test_of_a_token_that_names_no_end_the_usual_life_is_assumed(token: str) -> None:
    assert google_identity._token_life_seconds(token) == 3300


def test_calls_at_once_request_one_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = 0

    async def handler(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.01)
        return web.json_response({"id_token": "one"})

    async def tokens() -> set[str]:
        async with google(handler) as url:
            use(monkeypatch, tmp_path, **service_account(f"{url}/token"))
            mine = IdentityTokens(FUNCTION, None)
            return set(await asyncio.gather(*(mine.current() for _ in range(20))))

    assert asyncio.run(tokens()) == {"one"}
    assert asked == 1


def test_a_machine_with_an_account_is_requested_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.headers["Metadata-Flavor"] == "Google"
        assert request.query["audience"] == FUNCTION
        return web.Response(text="of-the-machine")

    async def token() -> str:
        async with google(handler) as url:
            place = url + "/identity?audience={audience}&format=full"
            monkeypatch.setattr(google_identity, "GCE_ENDPOINT_ID_TOKEN", place)
            return await IdentityTokens(FUNCTION, None).current()

    assert asyncio.run(token()) == "of-the-machine"


@pytest.mark.parametrize("answer", ["", "\n", "two lines\nX-Header: a", "identit\u00e9"])
def test_a_malformed_token_is_reported_and_not_sent(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text=answer)

    async def token() -> str:
        async with google(handler) as url:
            monkeypatch.setattr(google_identity, "GCE_ENDPOINT_ID_TOKEN", url + "/{audience}")
            return await IdentityTokens(FUNCTION, None).current()

    with pytest.raises(CredentialsError, match="is not an identity token"):
        asyncio.run(token())


def test_the_line_end_behind_a_token_is_not_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text="of-the-machine\r\n")

    async def token() -> str:
        async with google(handler) as url:
            monkeypatch.setattr(google_identity, "GCE_ENDPOINT_ID_TOKEN", url + "/{audience}")
            return await IdentityTokens(FUNCTION, None).current()

    assert asyncio.run(token()) == "of-the-machine"


def test_a_person_acts_for_a_service_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.path == "/token":
            return web.json_response({"access_token": "of-the-person", "expires_in": 3600})
        assert request.path == "/packer@mine.iam"
        assert request.headers["Authorization"] == "Bearer of-the-person"
        assert (await request.json())["audience"] == FUNCTION
        return web.json_response({"token": "of-the-account"})

    async def token() -> str:
        async with google(handler) as url:
            person = {"client_id": "a", "client_secret": "b", "refresh_token": "c", "token_uri": f"{url}/token"}
            use(monkeypatch, tmp_path, type="authorized_user", **person)
            monkeypatch.setattr(google_identity, "GCLOUD_ENDPOINT_GENERATE_ID_TOKEN", url + "/{service_account}")
            return await IdentityTokens(FUNCTION, "packer@mine.iam").current()

    assert asyncio.run(token()) == "of-the-account"


def test_user_credentials_alone_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path, type="authorized_user", client_id="a", client_secret="b", refresh_token="c")
    with pytest.raises(CredentialsError, match="name a service account that you may impersonate"):
        asyncio.run(IdentityTokens(FUNCTION, None).current())


def test_a_refusal_of_google_repeats_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=403, text=str(await request.post()))

    async def refused() -> None:
        async with google(handler) as url:
            use(monkeypatch, tmp_path, **service_account(f"{url}/token"))
            await IdentityTokens(FUNCTION, None).current()

    with pytest.raises(CredentialsError, match=r"\(403\); log in again") as caught:
        asyncio.run(refused())
    assert "assertion" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("status", [408, 429, 500, 503, 524])
def test_a_failure_that_may_pass_is_transient_and_a_token_that_lasts_is_used_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    ends = int(time.time()) + 200  # within the margin before its end
    lasting = jwt.encode({"exp": ends}, "k" * 32, algorithm="HS256")
    answers = [
        web.Response(status=status),
        web.json_response({"id_token": lasting}),
        web.Response(status=status),
    ]

    async def handler(_: web.Request) -> web.Response:
        return answers.pop(0)

    async def main() -> None:
        async with google(handler) as url:
            use(monkeypatch, tmp_path, **service_account(f"{url}/token"))
            mine = IdentityTokens(FUNCTION, None)
            with pytest.raises(TransientError):
                await mine.current()
            assert await mine.current() == lasting
            mine._renew_at_seconds = 0.0  # the minute that a token is kept at least is over
            assert await mine.current() == lasting
            assert answers == []

    asyncio.run(main())


def test_a_token_endpoint_that_cannot_be_reached_may_be_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path, **service_account("http://127.0.0.1:9/token"))
    with pytest.raises(ConnectionLostError, match="could not be reached"):
        asyncio.run(IdentityTokens(FUNCTION, None).current())


def test_a_machine_without_an_account_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(google_identity, "GCE_ENDPOINT_ID_TOKEN", "http://127.0.0.1:9/{audience}")
    with pytest.raises(CredentialsError, match="no Google credentials were found"):
        asyncio.run(IdentityTokens(FUNCTION, None).current())


@pytest.mark.parametrize(
    "account",
    [
        {"type": "nonsense"},
        {"type": "service_account", "client_email": "x", "token_uri": "http://127.0.0.1:9"},
        {"type": "service_account", "client_email": "x", "private_key": "secret", "token_uri": "http://127.0.0.1:9"},
        {"client_email": "x"},
    ],
    ids=str,
)
def test_malformed_credentials_are_reported_without_their_content(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, account: dict[str, str]
) -> None:
    use(monkeypatch, tmp_path, **account)
    with pytest.raises(CredentialsError, match="unreadable or malformed") as caught:
        asyncio.run(IdentityTokens(FUNCTION, None).current())
    assert "secret" not in str(caught.value)


def test_missing_named_credentials_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/file")
    with pytest.raises(CredentialsError, match="unreadable or malformed"):
        asyncio.run(IdentityTokens(FUNCTION, None).current())
