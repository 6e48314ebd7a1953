"""Signed URLs of Google Cloud Storage: by a service account's own key, or by Google for the account of this machine.

The V4 signing process: https://cloud.google.com/storage/docs/access-control/signed-urls; the library performs it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import aiohttp
from gcloud.aio.auth import AioSession, IamClient, Token
from gcloud.aio.auth.token import Type
from gcloud.aio.storage import Blob, Bucket, Storage

from stoker._stores.google_tokens import transient_failure
from stoker._stores.network import proxy_of, trusted
from stoker.errors import ConnectionLostError, CredentialsError, StokerError

if TYPE_CHECKING:
    from requests import Session  # what the library's annotations say; its asyncio half takes aiohttp's

__all__ = ["Signature", "signed_url"]

_IAM_URL = "https://iamcredentials.googleapis.com"
_TIMEOUT_SECONDS = 10
_CANNOT = (
    "these Google credentials cannot sign URLs: use a service account, its key file, or run where one is attached that "
    "may sign for itself (roles/iam.serviceAccountTokenCreator on itself)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What is signed.

    Attributes:
        bucket: its name.
        key: within the bucket.
        seconds: that the URL holds.
        query: more parameters of the request.
    """

    bucket: str
    key: str
    seconds: int
    query: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """Who signs, as the library looks at one of its tokens; ``token`` authorises the request to Google's signer."""

    token: str
    service_data: Mapping[str, str]
    token_type: Type = Type.SERVICE_ACCOUNT
    impersonation_uri: str | None = None

    async def get(self) -> str:
        return self.token


async def signed_url(what: Signature, source: Token, token: str | None) -> str:
    """Return a URL that stands for a GET by the account that ``source`` is of; ``token`` is its access token.

    Raises:
        CredentialsError: that account has no key here, and Google does not sign for it either.
        ConnectionLostError: Google could not be asked.
    """
    try:
        connector = aiohttp.TCPConnector(ssl=trusted())
        async with aiohttp.ClientSession(connector=connector, proxy=proxy_of(_IAM_URL)) as session:
            identity = await _identity(source, token or "")
            return await _signed(what, identity, cast("Session", session))
    except StokerError:
        raise
    except (aiohttp.ClientError, OSError, json.JSONDecodeError) as error:
        # Not chained, here and below: the client's error holds the request, and so the token.
        if (transient := transient_failure(error)) is not None:
            raise transient from None
        if isinstance(error, aiohttp.ClientResponseError):
            raise CredentialsError(f"{_CANNOT} (Google answered {error.status})") from None
        raise ConnectionLostError(f"Google could not be asked to sign ({type(error).__name__})") from None
    except (ValueError, LookupError, TypeError) as error:
        raise CredentialsError(f"{_CANNOT} ({type(error).__name__})") from None


async def _signed(what: Signature, identity: _Identity, session: Session) -> str:
    stand_in = cast("Token", identity)
    storage = Storage(session=session, api_is_dev=True, token=stand_in)
    blob = Blob(Bucket(storage, what.bucket), what.key, {"size": 0})
    url: str = await blob.get_signed_url(
        what.seconds,
        query_params=dict(what.query),
        iam_client=IamClient(token=stand_in, session=session),
        service_account_email=identity.service_data["client_email"],
        token=stand_in,
        session=session,
    )
    return url


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
