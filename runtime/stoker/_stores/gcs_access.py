"""Reaching Google Cloud Storage: the endpoint, and the token that goes with each request."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import aiohttp
from gcloud.aio.auth import AioSession, Token
from gcloud.aio.auth.token import Type
from gcloud.aio.storage import Storage
from jwt import PyJWTError

from stoker._stores.credentials import Endpoint, Identity, RenewedCredentials, parse_date
from stoker._stores.google_credentials import Signature, is_google_machine, signed_url, transient_failure
from stoker._stores.http import Call, HttpReader
from stoker._stores.http_session import exchange, open_reader, open_session, translated
from stoker._stores.network import check_endpoint, proxy_of, trusted
from stoker._stores.options import GcsOptions
from stoker.errors import CredentialsError, StokerError, StoreError

if TYPE_CHECKING:
    from requests import Session  # what the library's annotations say; its asyncio half takes aiohttp's

__all__ = ["GcsAccess"]

_GOOGLE = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_LOCATION = re.compile(rb'"location"\s*:\s*"([A-Za-z0-9-]{1,40})"')
_TOKEN_TIMEOUT_SECONDS = 10
# Below five minutes, until when a machine's metadata service gives the old token again; Google's own library has this.
_TOKEN_MARGIN_SECONDS = 225
_NO_CREDENTIALS = (
    "no Google credentials were found: run 'gcloud auth application-default login', set "
    "GOOGLE_APPLICATION_CREDENTIALS, run where a service account is attached, or send none with "
    "GcsOptions(anonymous=True) or --anonymous"
)


class GcsAccess:
    """Connections, token and control-plane client of one store in one event loop.

    Attributes:
        bucket_url: of the JSON API; what stands before ``/o``.
        patience_seconds: that a call of the control plane has for its connection, and for its answer.
        session: for whatever writes, lists or asks for metadata.
        reader: performs reads.
        storage: the client library's, over ``session``.
    """

    def __init__(self, bucket: str, options: GcsOptions) -> None:
        self._bucket, self._options = bucket, options
        self._emulator = _emulator(options, os.environ)
        self._token = RenewedCredentials(self._fetch_token, margin_seconds=_TOKEN_MARGIN_SECONDS)
        self.root_url = self._emulator or _GOOGLE
        self.bucket_url = f"{self.root_url}/storage/v1/b/{bucket}"
        self.patience_seconds = options.http.connect_timeout_seconds + options.http.read_timeout_seconds
        self.session = open_session(options.http, self.root_url)
        self.reader: HttpReader = open_reader(options.http, self.root_url, self.session)
        # A "development" client asks for no token: ours goes into every call's headers.
        self.storage = Storage(
            session=cast("Session", _Unredirected(self.session)),
            api_root=self.root_url,
            api_is_dev=True,
            token=cast("Token", object()),
        )

    async def current(self) -> str | None:
        """Return a token, renewed if it is about to expire; None where requests carry none.

        Raises:
            CredentialsError: there are no credentials, or they were refused.
            TransientError: Google's token endpoint failed, and there is no token that lasts.
        """
        if self._options.token is not None or self._emulator or self._options.anonymous:
            return self._options.token
        return await self._token.get()

    async def renew(self, used: str | None) -> str | None:
        """Get a new token, unless another call has done so since ``used`` was taken or it cannot be had anew."""
        if used is not None:
            self._token.drop(used)
        return await self.current()

    async def identity(self) -> Identity:
        """Return whose token is used, and when it ends.

        Raises:
            CredentialsError: there are no credentials, or they were refused.
        """
        if await self.current() is None:
            return Identity(kind="none: an emulator" if self._emulator else "none")
        if self._options.token is not None:
            return Identity(kind="a ready token")
        left = timedelta(seconds=self._token.life_seconds)
        kind = self._source().token_type.name.lower().replace("_", " ")
        return Identity(kind=kind, expires=datetime.now(UTC) + left, is_renewed=True)

    async def endpoint(self) -> Endpoint:
        """Ask for the bucket's location; to whom that is refused it still says what time it is."""
        url = f"{self.bucket_url}?fields=location"
        with translated(self.root_url):
            call = Call(method="GET", url=url, headers=self.headers(await self.current()), address=self.root_url)
            reply = await exchange(self.session, call)
        location = _LOCATION.search(reply.body) if not reply.refused else None
        return Endpoint(
            address=self.root_url,
            region=location[1].decode().lower() if location else "",
            date=parse_date(reply.headers.get("Date")),
        )

    def headers(self, token: str | None) -> dict[str, str]:
        """Return the headers of a request that ``token`` authorises."""
        headers = {"Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        if self._options.user_project is not None:
            headers["X-Goog-User-Project"] = self._options.user_project
        return headers

    async def presigned(self, key: str, seconds: int, query: Mapping[str, str]) -> str:
        """Return a URL that stands for a GET of an object.

        Raises:
            CredentialsError: these credentials cannot sign.
        """
        if self._emulator or self._options.anonymous or self._options.token is not None:
            raise CredentialsError(
                "emulators, anonymous clients and ready tokens have nothing to sign URLs with; use a service account"
            )
        source = self._source()
        token = None if source.token_type is Type.SERVICE_ACCOUNT else await self.current()
        payer = {"userProject": self._options.user_project} if self._options.user_project else {}
        what = Signature(bucket=self._bucket, key=key, seconds=seconds, query={**query, **payer})
        return await signed_url(what, source, token)

    def _source(self) -> Token:
        """Return where tokens come from.

        Raises:
            CredentialsError: the credentials file is not one.
        """
        file = str(self._options.credentials_file) if self._options.credentials_file else None
        try:
            return Token(file, None, [_SCOPE])
        except (OSError, ValueError, LookupError) as error:
            raise _malformed(error) from None

    async def close(self) -> None:
        """Close the connections; those of calls in progress break."""
        await self.reader.close()
        await self.session.close()

    async def _fetch_token(self) -> tuple[str, float]:
        """Get a token and its life, past the library's own cache, which retries for a minute and leaves a task."""
        source = self._source()
        is_machine = source.token_type is Type.GCE_METADATA
        try:
            # The machine's own account is asked on the machine, never through a proxy.
            proxy = None if is_machine else proxy_of(source.token_uri)
            connector = aiohttp.TCPConnector(ssl=trusted())
            # Not our session: that one leaves bodies as they come, and this endpoint compresses its own.
            async with aiohttp.ClientSession(connector=connector, proxy=proxy) as session:
                source.session = AioSession(cast("Session", session))
                fresh = await source.refresh(timeout=_TOKEN_TIMEOUT_SECONDS)
        except StokerError:
            raise
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, PyJWTError) as error:
            # Not chained: the client's error holds the request, or a proxy's password.
            raise self._token_error(error, is_machine=is_machine) from None
        return fresh.value, fresh.expires_in

    def _token_error(self, error: Exception, *, is_machine: bool) -> StoreError:
        is_unreached = isinstance(error, aiohttp.ClientConnectionError | TimeoutError)
        if is_unreached and is_machine and not (self._token.were_fetched or is_google_machine()):
            return CredentialsError(_NO_CREDENTIALS)
        if (transient := transient_failure(error)) is not None:
            return transient
        if isinstance(error, aiohttp.ClientResponseError):
            return CredentialsError(f"Google refused the credentials ({error.status}); log in again")
        return _malformed(error)


def _malformed(error: Exception) -> CredentialsError:
    """Return our error for what is wrong with a credentials file; the cause may quote it and is not repeated."""
    return CredentialsError(
        f"the Google credentials file is unreadable or malformed ({type(error).__name__}); "
        "check GOOGLE_APPLICATION_CREDENTIALS or GcsOptions(credentials_file=...)"
    )


class _Unredirected:
    """A session whose requests follow no redirect: an endpoint must not send a token, or this machine, elsewhere."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(getattr(self._session, name), allow_redirects=False, raise_for_status=_refuse_redirect)


async def _refuse_redirect(response: aiohttp.ClientResponse) -> None:
    if 300 <= response.status < 400:
        raise aiohttp.ClientResponseError(
            response.request_info, (), status=response.status, message="a redirect", headers=response.headers
        )


def _emulator(options: GcsOptions, environment: Mapping[str, str]) -> str | None:
    """Return the address of an emulator, if one is meant; as in Google's own clients, its scheme may be left out."""
    address = options.endpoint_url or environment.get("STORAGE_EMULATOR_HOST")
    if not address:
        return None
    url = address if "://" in address else f"http://{address}"
    check_endpoint(url, "STORAGE_EMULATOR_HOST")
    return url.rstrip("/")
