"""Google's tokens: who calls a function, for that function alone; and signatures of URLs of Cloud Storage.

The V4 signing process: https://cloud.google.com/storage/docs/access-control/signed-urls; the library performs it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import aiohttp
import jwt
from gcloud.aio.auth import AioSession, IamClient, Token
from gcloud.aio.auth.token import GCE_ENDPOINT_ID_TOKEN, GCE_METADATA_HEADERS, GCLOUD_ENDPOINT_GENERATE_ID_TOKEN, Type
from gcloud.aio.storage import Blob, Bucket, Storage

from stoker._stores.http import Reply, Rule, error_of
from stoker._stores.http_objects import ExpiredCredentialsError, Identity, RenewedCredentials
from stoker._stores.options import ServedOptions, machine_vendor, proxy_of, trusted
from stoker.errors import (
    ConnectionLostError,
    CredentialsError,
    PermissionDeniedError,
    ServerError,
    StokerError,
    TransientError,
)

if TYPE_CHECKING:
    from requests import Session  # what the library's annotations say; its asyncio half takes aiohttp's


_ENDPOINT = "Google's token endpoint"
_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
_ROLE_WANTED = "log in again, or ask for the role roles/iam.serviceAccountOpenIdTokenCreator"
_VARIABLES = ("GCE_METADATA_HOST", "K_SERVICE", "CLOUD_RUN_JOB")
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_LIFE_SECONDS, _MARGIN_SECONDS = 3600, 300
_LEAST_SECONDS = 60  # that a token is kept: a clock that is off must not make each request ask for another
_TIMEOUT_SECONDS = 10
_NO_CREDENTIALS = (
    "no Google credentials were found: set GOOGLE_APPLICATION_CREDENTIALS, run 'gcloud auth application-default "
    "login', or run where a service account is attached"
)
_IAM_URL = "https://iamcredentials.googleapis.com"
_CANNOT = (
    "these Google credentials cannot sign URLs: use a service account, its key file, or run where one is attached that "
    "may sign for itself (roles/iam.serviceAccountTokenCreator on itself)"
)


def _transient_failure(error: Exception) -> TransientError | None:
    """Return our error for a failure of Google's token endpoint that may pass; None for a refusal."""
    if isinstance(error, json.JSONDecodeError) or (
        isinstance(error, aiohttp.ClientResponseError) and error.status < 300
    ):
        return ServerError(f"{_ENDPOINT}: the answer is no token; a proxy or portal on the way may have given it")
    if isinstance(error, aiohttp.ClientResponseError):
        found = error_of(_ENDPOINT, Reply(status=error.status, headers=error.headers or {}), {})
        return found if isinstance(found, TransientError) else None
    if isinstance(error, aiohttp.ClientError | TimeoutError):
        # Its class and text, since some of these have no text.
        return ConnectionLostError(f"{_ENDPOINT} could not be reached: {type(error).__name__}: {error}")
    return None


def _is_google_machine() -> bool:
    """Return whether this is a machine, container or function of Google's, which has an account to ask for tokens."""
    return any(map(os.environ.get, _VARIABLES)) or machine_vendor() == "Google"


def source_of_tokens(file: str | None, scope: str, check: str = _VARIABLE) -> Token:
    """Return where tokens come from; ``check`` says where a credentials file is configured.

    Raises:
        CredentialsError: the credentials file is not one.
    """
    try:
        return Token(file, None, [scope])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _malformed(error, check) from None


def _malformed(error: Exception, check: str) -> CredentialsError:
    """Return our error for what is wrong with a credentials file; the cause may quote it and is not repeated."""
    return CredentialsError(
        f"the Google credentials file is unreadable or malformed ({type(error).__name__}); check {check}"
    )


@asynccontextmanager
async def token_session(
    source: Token, no_credentials: str, *, refused: str, remedy: str = "log in again", check: str = _VARIABLE
) -> AsyncIterator[aiohttp.ClientSession]:
    """Give ``source`` a session to ask for tokens with, and yield it; what fails within becomes one of our errors.

    The session is none of a store's, which leave bodies as they come: token endpoints compress their own.

    Args:
        source: of tokens.
        no_credentials: what to say if this machine has none; empty if it had some.
        refused: what to say if Google refuses; the status follows in parentheses.
        remedy: what the user can do then.
        check: where a credentials file is configured.
    """
    is_machine = source.token_type is Type.GCE_METADATA
    try:
        # The machine's own account is asked on the machine, never through a proxy.
        proxy = None if is_machine else proxy_of(source.token_uri)
        connector = aiohttp.TCPConnector(ssl=trusted())
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(connector=connector, proxy=proxy, timeout=timeout) as session:
            source.session = AioSession(cast("Session", session))
            yield session
    except StokerError:
        raise
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, jwt.PyJWTError) as error:
        # Not chained, here and below: the client's error holds the request, or a proxy's password.
        is_unreached = isinstance(error, aiohttp.ClientConnectionError | TimeoutError)
        if is_unreached and is_machine and no_credentials and not _is_google_machine():
            raise CredentialsError(no_credentials) from None
        if (transient := _transient_failure(error)) is not None:
            raise transient from None
        if isinstance(error, aiohttp.ClientResponseError):
            raise CredentialsError(f"{refused} ({error.status}); {remedy}") from None
        raise _malformed(error, check) from None


class IdentityTokens(RenewedCredentials[str]):
    """Tokens for one function, each kept until shortly before its end.

    A service account's key signs for itself, and a machine with an account is asked for it. People have no such tokens
    of their own: they get one of a service account that they may act for.

    Args:
        audience: URL of the function.
        service_account: the e-mail address of the account to act for.
        otherwise: what else a user without credentials can do; the message ends with it.
    """

    margin_seconds = _MARGIN_SECONDS

    def __init__(self, audience: str, service_account: str | None, otherwise: str = "") -> None:
        super().__init__()
        self._audience, self._service_account, self._otherwise = audience, service_account, otherwise

    async def identity(self) -> Identity:
        """Get a token, to know that one can be had; others follow it."""
        await self.current()
        return Identity(kind="identity tokens of Google's", is_renewed=True)

    async def fetch(self) -> tuple[str, float]:
        """Get a token, and for how long it is kept."""
        token = (await self._fresh(self._audience)).strip()
        if not (token.isascii() and token.isprintable() and token and " " not in token):
            raise CredentialsError(f"what Google answered is no identity token for {self._audience}")
        return token, _good_seconds(token) + _MARGIN_SECONDS

    async def _fresh(self, audience: str) -> str:
        source = source_of_tokens(None, _SCOPE)
        refused = f"Google refused to identify the caller of {audience}"
        no_credentials = "" if self.were_fetched else f"{_NO_CREDENTIALS}{self._otherwise}"
        async with token_session(source, no_credentials, refused=refused, remedy=_ROLE_WANTED) as session:
            if self._service_account is not None:
                return await _impersonated(source, session, self._service_account, audience)
            if source.token_type is Type.GCE_METADATA:
                return await _of_this_machine(session, audience)
            if source.token_type is Type.SERVICE_ACCOUNT:
                return await _self_signed(source, session, audience)
        raise CredentialsError(
            f"credentials of kind {source.token_type.value} identify no caller; name a service account that you may "
            "act for (--function-account, ServedOptions(service_account=...)), or use a service account's key"
        )


class GoogleCaller(IdentityTokens):
    """Who has Google credentials: each request carries an identity token for this function alone.

    The default of functions on Cloud Run. Google Cloud, Cloud Run: "Authenticating service-to-service".
    """

    def __init__(self, url: str, options: ServedOptions, _environment: Mapping[str, str], otherwise: str) -> None:
        # All but /v1/NAME is what tokens are made out to.
        super().__init__(url.rsplit("/", 2)[0], options.service_account, otherwise)

    def headers(self, _url: str, headers: Mapping[str, str], proof: str) -> Mapping[str, str]:
        """Return the headers with the token."""
        return {**headers, "Authorization": f"Bearer {proof}"}

    def rule(self, status: int, _code: str) -> Rule:
        """Say what is missing."""
        if status == 401:
            return ExpiredCredentialsError, "Google does not take the identity token; log in again"
        return PermissionDeniedError, "this Google account may not call the function; it needs roles/run.invoker on it"


def _good_seconds(token: str) -> float:
    """Return how long a token is kept. A machine's may be an older one, so it is asked for its end.

    It is read, not verified: that is the business of who gets it.
    """
    try:
        ends = jwt.decode(token, options={"verify_signature": False}).get("exp")
        left_seconds = float(ends) - time.time() if isinstance(ends, int) else _LIFE_SECONDS
    except (jwt.PyJWTError, OverflowError):
        left_seconds = _LIFE_SECONDS
    return min(max(left_seconds - _MARGIN_SECONDS, _LEAST_SECONDS), _LIFE_SECONDS - _MARGIN_SECONDS)


async def _of_this_machine(session: aiohttp.ClientSession, audience: str) -> str:
    url = GCE_ENDPOINT_ID_TOKEN.format(audience=quote(audience, safe=""))
    async with session.get(url, headers=GCE_METADATA_HEADERS, raise_for_status=True) as response:
        return await response.text()


async def _self_signed(source: Token, session: aiohttp.ClientSession, audience: str) -> str:
    account, now = source.service_data, int(time.time())
    claims = {
        "iss": account["client_email"],
        "sub": account["client_email"],
        "aud": source.token_uri,
        "iat": now,
        "exp": now + _LIFE_SECONDS,
        "target_audience": audience,
    }
    form = {"grant_type": _GRANT, "assertion": jwt.encode(claims, account["private_key"], algorithm="RS256")}
    async with session.post(source.token_uri, data=form, raise_for_status=True) as response:
        return str((await response.json())["id_token"])


async def _impersonated(source: Token, session: aiohttp.ClientSession, service_account: str, audience: str) -> str:
    access = await source.refresh(timeout=_TIMEOUT_SECONDS)
    url = GCLOUD_ENDPOINT_GENERATE_ID_TOKEN.format(service_account=quote(service_account, safe="@"))
    asked: dict[str, Any] = {"audience": audience, "includeEmail": True}
    headers = {"Authorization": f"Bearer {access.value}"}
    async with session.post(url, json=asked, headers=headers, raise_for_status=True) as response:
        return str((await response.json())["token"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """Who signs, as the library looks at one of its tokens; ``token`` authorises the request to Google's signer."""

    token: str
    service_data: Mapping[str, str]
    token_type: Type = Type.SERVICE_ACCOUNT
    impersonation_uri: str | None = None

    async def get(self) -> str:
        return self.token


async def signed_url(
    bucket: str, key: str, seconds: int, query: Mapping[str, str], *, source: Token, token: str | None
) -> str:
    """Return a URL that stands for a GET by the account that ``source`` is of.

    Args:
        bucket: its name.
        key: within the bucket.
        seconds: that the URL holds.
        query: more parameters of the request.
        source: of the account's tokens.
        token: authorises the request to Google's signer; None for an account whose key is here.

    Raises:
        CredentialsError: that account has no key here, and Google does not sign for it either.
        ConnectionLostError: Google could not be asked.
    """
    try:
        connector = aiohttp.TCPConnector(ssl=trusted())
        async with aiohttp.ClientSession(connector=connector, proxy=proxy_of(_IAM_URL)) as client:
            identity, session = await _identity(source, token or ""), cast("Session", client)
            stand_in = cast("Token", identity)
            storage = Storage(session=session, api_is_dev=True, token=stand_in)
            url: str = await Blob(Bucket(storage, bucket), key, {"size": 0}).get_signed_url(
                seconds,
                query_params=dict(query),
                iam_client=IamClient(token=stand_in, session=session),
                service_account_email=identity.service_data["client_email"],
                token=stand_in,
                session=session,
            )
            return url
    except StokerError:
        raise
    except (aiohttp.ClientError, OSError, json.JSONDecodeError) as error:
        # Not chained, here and below: the client's error holds the request, and so the token.
        if (transient := _transient_failure(error)) is not None:
            raise transient from None
        if isinstance(error, aiohttp.ClientResponseError):
            raise CredentialsError(f"{_CANNOT} (Google answered {error.status})") from None
        raise ConnectionLostError(f"Google could not be asked to sign ({type(error).__name__})") from None
    except (ValueError, LookupError, TypeError) as error:
        raise CredentialsError(f"{_CANNOT} ({type(error).__name__})") from None


async def _identity(source: Token, token: str) -> _Identity:
    """Return who signs: the account in a key file, the one that is impersonated, or the machine's."""
    said: Mapping[str, Any] = source.service_data or {}
    if source.token_type is Type.SERVICE_ACCOUNT:
        return _Identity(token=token, service_data={name: said[name] for name in ("client_email", "private_key")})
    if source.impersonation_uri:
        _, _, account = source.impersonation_uri.rpartition("/serviceAccounts/")
        return _Identity(token=token, service_data={"client_email": account.partition(":")[0]})
    if source.token_type is not Type.GCE_METADATA:
        raise CredentialsError(_CANNOT)
    return _Identity(token=token, service_data={"client_email": await _machine_account(source)})


async def _machine_account(source: Token) -> str:
    """Ask this machine, never through a proxy, what its account is called."""
    url = f"{source.token_uri.partition('/token')[0]}/email"
    async with aiohttp.ClientSession() as session:
        answer = await AioSession(cast("Session", session)).get(
            url, headers={"Metadata-Flavor": "Google"}, timeout=_TIMEOUT_SECONDS
        )
        return (await answer.text()).strip()
