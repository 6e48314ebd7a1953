"""Google credentials: access tokens, identity tokens for functions, and signed URLs of Cloud Storage.

The library gcloud-aio signs URLs (V4 signing: https://cloud.google.com/storage/docs/access-control/signed-urls).
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

from stoker._stores.http import ErrorRule, HttpResponse, create_error
from stoker._stores.http_objects import CredentialsInfo, ExpiredCredentialsError, RenewableCredentials
from stoker._stores.options import ServedOptions, create_tls_context, find_proxy, machine_vendor
from stoker.errors import (
    ConnectionLostError,
    CredentialsError,
    PermissionDeniedError,
    ServerError,
    StokerError,
    TransientError,
)

if TYPE_CHECKING:
    from requests import Session  # in the library's annotations; its asyncio half takes aiohttp's


_ENDPOINT = "Google's token endpoint"
_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
_ROLE_WANTED = "log in again, or ask for the role roles/iam.serviceAccountOpenIdTokenCreator"
_VARIABLES = ("GCE_METADATA_HOST", "K_SERVICE", "CLOUD_RUN_JOB")
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_LIFE_SECONDS, _MARGIN_SECONDS = 3600, 300
_MIN_LIFE_SECONDS = 60  # minimum time to keep a token, so that a wrong clock does not fetch one per request
_TIMEOUT_SECONDS = 10
_NO_CREDENTIALS = (
    "no Google credentials were found: set GOOGLE_APPLICATION_CREDENTIALS, run 'gcloud auth application-default "
    "login', or run where a service account is attached"
)
_IAM_URL = "https://iamcredentials.googleapis.com"
_CANNOT = (
    "these Google credentials cannot sign URLs: use a service account's key file, or run where a service account is "
    "attached that may sign for itself (roles/iam.serviceAccountTokenCreator on itself)"
)


def _transient_failure(error: Exception) -> TransientError | None:
    """Return the error for a transient failure of Google's token endpoint; None for a refusal."""
    if isinstance(error, json.JSONDecodeError) or (
        isinstance(error, aiohttp.ClientResponseError) and error.status < 300
    ):
        return ServerError(f"{_ENDPOINT}: the response is not a token; it may come from a proxy or captive portal")
    if isinstance(error, aiohttp.ClientResponseError):
        store_error = create_error(_ENDPOINT, HttpResponse(status=error.status, headers=error.headers or {}), {})
        return store_error if isinstance(store_error, TransientError) else None
    if isinstance(error, aiohttp.ClientError | TimeoutError):
        # With its class, since some of these have no text.
        return ConnectionLostError(f"{_ENDPOINT} could not be reached: {type(error).__name__}: {error}")
    return None


def _is_google_machine() -> bool:
    """Return whether this is a Google machine, container or function, whose metadata service has tokens."""
    return any(map(os.environ.get, _VARIABLES)) or machine_vendor() == "Google"


def create_token_source(file: str | None, scope: str, check: str = _VARIABLE) -> Token:
    """Return a source of tokens; ``check`` is the setting of the credentials file, for messages.

    Raises:
        CredentialsError: The credentials file is malformed.
    """
    try:
        return Token(file, None, [scope])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _credentials_file_error(error, check) from None


def _credentials_file_error(error: Exception, check: str) -> CredentialsError:
    """Return the error for a bad credentials file, without the cause's message, which may quote the file."""
    return CredentialsError(
        f"the Google credentials file is unreadable or malformed ({type(error).__name__}); check {check}"
    )


@asynccontextmanager
async def token_session(
    source: Token,
    no_credentials_message: str,
    *,
    refusal_message: str,
    remedy: str = "log in again",
    check: str = _VARIABLE,
) -> AsyncIterator[aiohttp.ClientSession]:
    """Give ``source`` an HTTP session, and yield the session; errors within are translated.

    The session is separate from those of stores, which do not decompress: token endpoints compress their responses.

    Args:
        source: Source of tokens.
        no_credentials_message: Message if this machine has no credentials; empty if it had some.
        refusal_message: Message if Google refuses; the status follows in parentheses.
        remedy: Remedy for a refusal.
        check: Setting of the credentials file, for messages.
    """
    is_machine = source.token_type is Type.GCE_METADATA
    try:
        # The machine's metadata service is never reached through a proxy.
        proxy = None if is_machine else find_proxy(source.token_uri)
        connector = aiohttp.TCPConnector(ssl=create_tls_context())
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(connector=connector, proxy=proxy, timeout=timeout) as session:
            source.session = AioSession(cast("Session", session))
            yield session
    except StokerError:
        raise
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, jwt.PyJWTError) as error:
        # Not chained, here and below: aiohttp's error holds the request, or a proxy's password.
        is_unreached = isinstance(error, aiohttp.ClientConnectionError | TimeoutError)
        if is_unreached and is_machine and no_credentials_message and not _is_google_machine():
            raise CredentialsError(no_credentials_message) from None
        if (transient := _transient_failure(error)) is not None:
            raise transient from None
        if isinstance(error, aiohttp.ClientResponseError):
            raise CredentialsError(f"{refusal_message} ({error.status}); {remedy}") from None
        raise _credentials_file_error(error, check) from None


class IdentityTokens(RenewableCredentials[str]):
    """Identity tokens for one function, each kept until shortly before its expiry.

    They come from a service account's key, from the machine's metadata service, or from a service account that the user
    may impersonate, since user accounts have no identity tokens of their own.

    Args:
        audience: URL of the function.
        service_account: E-mail address of the service account to impersonate; None for none.
        other_remedies: Other remedies of a user without credentials, appended to the error message.
    """

    margin_seconds = _MARGIN_SECONDS

    def __init__(self, audience: str, service_account: str | None, other_remedies: str = "") -> None:
        super().__init__()
        self._audience, self._service_account, self._other_remedies = audience, service_account, other_remedies

    async def describe(self) -> CredentialsInfo:
        """Describe the credentials, after fetching a token to verify that this works."""
        await self.current()
        return CredentialsInfo(kind="identity tokens of Google's", is_renewed=True)

    async def fetch(self) -> tuple[str, float]:
        """Fetch a token and the time to keep it, in seconds."""
        token = (await self._fetch_token(self._audience)).strip()
        if not (token.isascii() and token.isprintable() and token and " " not in token):
            raise CredentialsError(f"Google's response is not an identity token for {self._audience}")
        return token, _token_life_seconds(token) + _MARGIN_SECONDS

    async def _fetch_token(self, audience: str) -> str:
        source = create_token_source(None, _SCOPE)
        problem = f"Google refused to identify the caller of {audience}"
        no_credentials = "" if self.were_fetched else f"{_NO_CREDENTIALS}{self._other_remedies}"
        async with token_session(source, no_credentials, refusal_message=problem, remedy=_ROLE_WANTED) as session:
            if self._service_account is not None:
                return await _fetch_impersonated_token(source, session, self._service_account, audience)
            if source.token_type is Type.GCE_METADATA:
                return await _fetch_machine_token(session, audience)
            if source.token_type is Type.SERVICE_ACCOUNT:
                return await _fetch_token_by_key(source, session, audience)
        raise CredentialsError(
            f"credentials of kind {source.token_type.value} have no identity tokens; name a service account that you "
            "may impersonate (--function-account, ServedOptions(service_account=...)), or use a service account's key"
        )


class GoogleServedCredentials(IdentityTokens):
    """Google credentials for a function on Cloud Run: adds an identity token for this function to each request.

    The default of functions on Cloud Run. Google Cloud, Cloud Run: "Authenticating service-to-service".
    """

    def __init__(self, url: str, options: ServedOptions, _environment: Mapping[str, str], other_remedies: str) -> None:
        # The audience of tokens is the URL without /v1/NAME.
        super().__init__(url.rsplit("/", 2)[0], options.service_account, other_remedies)

    def headers(
        self, _url: str, headers: Mapping[str, str], credentials: str, _data: bytes | None = None
    ) -> Mapping[str, str]:
        """Return the headers with the token."""
        return {**headers, "Authorization": f"Bearer {credentials}"}

    def rule(self, status: int, _code: str) -> ErrorRule:
        """Return error class and remedy."""
        if status == 401:
            return ExpiredCredentialsError, "Google does not accept the identity token; log in again"
        return PermissionDeniedError, "this Google account may not call the function; it needs roles/run.invoker on it"


def _token_life_seconds(token: str) -> float:
    """Return how long to keep a token, from its expiry, since a metadata service may return an older one.

    The token is decoded without verification, which is up to the function.
    """
    try:
        ends = jwt.decode(token, options={"verify_signature": False}).get("exp")
        left_seconds = float(ends) - time.time() if isinstance(ends, int) else _LIFE_SECONDS
    except (jwt.PyJWTError, OverflowError):
        left_seconds = _LIFE_SECONDS
    return min(max(left_seconds - _MARGIN_SECONDS, _MIN_LIFE_SECONDS), _LIFE_SECONDS - _MARGIN_SECONDS)


async def _fetch_machine_token(session: aiohttp.ClientSession, audience: str) -> str:
    url = GCE_ENDPOINT_ID_TOKEN.format(audience=quote(audience, safe=""))
    async with session.get(url, headers=GCE_METADATA_HEADERS, raise_for_status=True) as response:
        return await response.text()


async def _fetch_token_by_key(source: Token, session: aiohttp.ClientSession, audience: str) -> str:
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


async def _fetch_impersonated_token(
    source: Token, session: aiohttp.ClientSession, service_account: str, audience: str
) -> str:
    access = await source.refresh(timeout=_TIMEOUT_SECONDS)
    url = GCLOUD_ENDPOINT_GENERATE_ID_TOKEN.format(service_account=quote(service_account, safe="@"))
    body: dict[str, Any] = {"audience": audience, "includeEmail": True}
    headers = {"Authorization": f"Bearer {access.value}"}
    async with session.post(url, json=body, headers=headers, raise_for_status=True) as response:
        return str((await response.json())["token"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _SigningAccount:
    """The signing account, in the form of the library's tokens; ``token`` authorises requests to Google's signer."""

    token: str
    service_data: Mapping[str, str]
    token_type: Type = Type.SERVICE_ACCOUNT
    impersonation_uri: str | None = None

    async def get(self) -> str:
        return self.token


async def sign_url(
    bucket: str, key: str, seconds: int, query: Mapping[str, str], *, source: Token, token: str | None
) -> str:
    """Return the URL of a GET, signed by the account of ``source``.

    Args:
        bucket: Name of the bucket.
        key: Key within the bucket.
        seconds: Validity of the URL, in seconds.
        query: Additional query parameters.
        source: Source of the account's tokens.
        token: Access token for Google's signer; None for an account whose key is in a local file.

    Raises:
        CredentialsError: There is no local key of the account, and Google refuses to sign for it.
        ConnectionLostError: Google could not be reached.
    """
    try:
        connector = aiohttp.TCPConnector(ssl=create_tls_context())
        async with aiohttp.ClientSession(connector=connector, proxy=find_proxy(_IAM_URL)) as client:
            identity = await _find_signing_account(source, token or "")
            session = cast("Session", client)
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
        # Not chained, here and below: aiohttp's error holds the request with the token.
        if (transient := _transient_failure(error)) is not None:
            raise transient from None
        if isinstance(error, aiohttp.ClientResponseError):
            raise CredentialsError(f"{_CANNOT} (Google's status: {error.status})") from None
        raise ConnectionLostError(f"Google's signer could not be reached ({type(error).__name__})") from None
    except (ValueError, LookupError, TypeError) as error:
        raise CredentialsError(f"{_CANNOT} ({type(error).__name__})") from None


async def _find_signing_account(source: Token, token: str) -> _SigningAccount:
    """Return the signing account: that of a key file, an impersonated one, or the machine's."""
    service_data: Mapping[str, Any] = source.service_data or {}
    if source.token_type is Type.SERVICE_ACCOUNT:
        return _SigningAccount(
            token=token, service_data={name: service_data[name] for name in ("client_email", "private_key")}
        )
    if source.impersonation_uri:
        _, _, account = source.impersonation_uri.rpartition("/serviceAccounts/")
        return _SigningAccount(token=token, service_data={"client_email": account.partition(":")[0]})
    if source.token_type is not Type.GCE_METADATA:
        raise CredentialsError(_CANNOT)
    return _SigningAccount(token=token, service_data={"client_email": await _fetch_machine_account(source)})


async def _fetch_machine_account(source: Token) -> str:
    """Return the e-mail address of the machine's account from its metadata service, never through a proxy."""
    url = f"{source.token_uri.partition('/token')[0]}/email"
    async with aiohttp.ClientSession() as session:
        answer = await AioSession(cast("Session", session)).get(
            url, headers={"Metadata-Flavor": "Google"}, timeout=_TIMEOUT_SECONDS
        )
        return (await answer.text()).strip()
