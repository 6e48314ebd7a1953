"""Stores on Google Cloud Storage, over its JSON API, with reads into the caller's memory."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypeVar
from urllib.parse import quote, urlencode

from gcloud.aio.auth import Token
from gcloud.aio.auth.token import Type

from stoker._base.meter import PriceKey
from stoker._format.manifest import POINTER_KEY
from stoker._stores.google_credentials import signed_url, source_of_tokens, token_session
from stoker._stores.http import Call, Reply, Rule, error_of, parse_date
from stoker._stores.http_objects import (
    Asked,
    BucketObjects,
    Endpoint,
    ExpiredCredentialsError,
    Identity,
    ReadyCredentials,
    RenewedCredentials,
)
from stoker._stores.http_session import Connections
from stoker._stores.location import Location
from stoker._stores.options import GcsOptions, check_endpoint
from stoker.abc import Buffer, ObjectInfo
from stoker.errors import (
    BucketNotFoundError,
    CredentialsError,
    NotFoundError,
    PermissionDeniedError,
    StokerError,
    StoreError,
    ThrottledError,
    UnexpectedAnswerError,
)

_T = TypeVar("_T")

_GOOGLE = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_LOCATION = re.compile(rb'"location"\s*:\s*"([A-Za-z0-9-]{1,40})"')
_TOKEN_TIMEOUT_SECONDS = 10
# Below five minutes, before which a machine's metadata service returns the old token; as in Google's own library.
_TOKEN_MARGIN_SECONDS = 225
_CHECK = "GOOGLE_APPLICATION_CREDENTIALS or GcsOptions(credentials_file=...)"
_NO_CREDENTIALS = (
    "no Google credentials were found: run 'gcloud auth application-default login', set "
    "GOOGLE_APPLICATION_CREDENTIALS, run where a service account is attached, or send none with "
    "GcsOptions(anonymous=True) or --anonymous"
)


class GcsTokens(RenewedCredentials[str]):
    """Access tokens of the account in Google's environment, or in a credentials file."""

    margin_seconds = _TOKEN_MARGIN_SECONDS

    def __init__(self, options: GcsOptions) -> None:
        super().__init__()
        self._file = str(options.credentials_file) if options.credentials_file else None

    def source(self) -> Token:
        """Return the source of the tokens."""
        return source_of_tokens(self._file, _SCOPE, _CHECK)

    async def identity(self) -> Identity:
        """Describe the account and the expiry of its token."""
        await self.current()
        kind = self.source().token_type.name.lower().replace("_", " ")
        expires = datetime.now(UTC) + timedelta(seconds=self.life_seconds)
        return Identity(kind=kind, expires=expires, is_renewed=True)

    async def fetch(self) -> tuple[str, float]:
        """Fetch a token and its life, without the library's own cache, which retries for a minute and leaks a task."""
        source, no_credentials = self.source(), "" if self.were_fetched else _NO_CREDENTIALS
        async with token_session(source, no_credentials, refused="Google refused the credentials", check=_CHECK):
            fresh = await source.refresh(timeout=_TOKEN_TIMEOUT_SECONDS)
            return fresh.value, fresh.expires_in


class GcsAccess(Connections):
    """Connections and token of one store in one event loop."""

    def __init__(self, bucket: str, options: GcsOptions) -> None:
        self._bucket, self._options = bucket, options
        emulator = _emulator(options, os.environ)
        self._root_url = emulator or _GOOGLE
        self.credentials: GcsTokens | ReadyCredentials[str | None]
        if options.token is not None:
            self.credentials = ReadyCredentials(options.token, "a ready token")
        elif emulator or options.anonymous:
            self.credentials = ReadyCredentials(None, "none: an emulator" if emulator else "none")
        else:
            self.credentials = GcsTokens(options)
        super().__init__(options.http, self._root_url)

    async def endpoint(self) -> Endpoint:
        """Request the bucket's location; even an error response has the time."""
        url = f"{self._root_url}/storage/v1/b/{self._bucket}?fields=location"
        headers = self.headers(await self.credentials.current())
        reply = await self.reader.read(Call(method="GET", url=url, headers=headers, address=self._root_url))
        location = _LOCATION.search(reply.body) if not reply.refused else None
        return Endpoint(
            address=self._root_url,
            region=location[1].decode().lower() if location else "",
            date=parse_date(reply.headers.get("Date")),
        )

    def call(self, asked: Asked, place: str, proof: str | None, address: str) -> Call:
        """Return a request with the token ``proof``; ``place`` is a key, empty for a listing of the bucket."""
        method, headers = asked.method, self.headers(proof) | asked.headers
        url = f"{self._root_url}/storage/v1/b/{self._bucket}/o"
        query = dict(asked.query or {})
        if place and not query and asked.only_reads:
            query["alt"] = "media"
        if asked.body is not None:
            method, url = "POST", f"{self._root_url}/upload/storage/v1/b/{self._bucket}/o"
            query |= {"uploadType": "media", "name": place}
            headers["Content-Type"] = "application/octet-stream"
        elif place:
            url = f"{url}/{quote(place, safe='')}"
        if asked.tag is not None or asked.is_new:
            query["ifGenerationMatch"] = "0" if asked.tag is None else _generation(asked.tag)
        url = f"{url}?{urlencode(query)}" if query else url
        return Call(method=method, url=url, headers=headers, address=address, data=asked.body)

    def headers(self, token: str | None) -> dict[str, str]:
        """Return the headers of a request with a token."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        if self._options.user_project is not None:
            headers["X-Goog-User-Project"] = self._options.user_project
        return headers

    async def presigned(self, key: str, seconds: int, query: Mapping[str, str]) -> str:
        """Return the URL of a signed GET of an object.

        Raises:
            CredentialsError: The credentials cannot sign.
        """
        if not isinstance(self.credentials, GcsTokens):
            raise CredentialsError(
                "emulators, anonymous clients and given tokens cannot sign URLs; use a service account"
            )
        source = self.credentials.source()
        token = None if source.token_type is Type.SERVICE_ACCOUNT else await self.credentials.current()
        payer = {"userProject": self._options.user_project} if self._options.user_project else {}
        return await signed_url(self._bucket, key, seconds, {**query, **payer}, source=source, token=token)


def _emulator(options: GcsOptions, environment: Mapping[str, str]) -> str | None:
    """Return the URL of a configured emulator, or None; as in Google's own clients, the scheme may be left out."""
    address = options.endpoint_url or environment.get("STORAGE_EMULATOR_HOST")
    if not address:
        return None
    url = address if "://" in address else f"http://{address}"
    check_endpoint(url, "STORAGE_EMULATOR_HOST")
    return url.rstrip("/")


_SLOW: Rule = (ThrottledError, "Google asks to slow down; send fewer requests at once")

_BY_CODE: dict[str, Rule] = {
    "401": (ExpiredCredentialsError, "the token is missing, expired or not valid; log in again"),
    "quotaExceeded": _SLOW,
    "rateLimitExceeded": _SLOW,
    "userProjectMissing": (
        PermissionDeniedError,
        "the requester pays for this bucket; use GcsOptions(user_project=...) or --user-project",
    ),
    "userRateLimitExceeded": _SLOW,
}

_AS_JSON = {"alt": "json"}
_LIST_FIELDS = "items(name,size,generation),nextPageToken"
_MISSING_BUCKET = "The specified bucket does not exist"
_BUCKET_CHECK_SECONDS = 2.0
# Generations are times in microseconds, so no object has this one.
_NO_GENERATION = "1"


class GcsStore(BucketObjects[GcsAccess]):
    """A store in a Google Cloud Storage bucket, ``gs://bucket/prefix``."""

    nonsense = "the response is malformed; check that the endpoint speaks the GCS JSON API"

    def __init__(self, location: Location, options: GcsOptions) -> None:
        super().__init__(location, partial(GcsAccess, location.bucket, options))
        self._price_key = PriceKey(location.url, options.endpoint_url or "", options.prices or "")

    def price_key(self) -> PriceKey:
        """Return the key of the store's prices."""
        return self._price_key

    async def presign(self, key: str, *, seconds: int, tag: str = "") -> str:
        """Return the URL of a signed GET of the generation ``tag``, or of the newest one."""
        query = {"generation": _generation(tag)} if tag else {}
        return await self._access.get().presigned(self._at.full_key(key), seconds, query)

    async def _head(self, key: str) -> ObjectInfo:
        return _object_info(key, *await self._document(Asked("GET", key, query=_AS_JSON)))

    async def _page(self, prefix: str, after: str, token: str) -> tuple[list[ObjectInfo], str]:
        query = {"prefix": prefix, "fields": _LIST_FIELDS, "maxResults": "1000"}
        query |= {name: value for name, value in (("startOffset", after), ("pageToken", token)) if value}
        page, complaint = await self._document(Asked("GET", None, query=query))
        infos = [
            _object_info(self._at.relative(_said(entry, "name", str, complaint)), entry, complaint)
            for entry in _said(page, "items", list, complaint, [])
        ]
        return infos, _said(page, "nextPageToken", str, complaint, "")

    async def _put(self, key: str, data: Buffer, *, if_absent: bool, if_tag: str | None) -> ObjectInfo:
        asked = Asked("PUT", key, tag=if_tag, is_new=if_absent, body=bytes(data))
        return _object_info(key, *await self._document(asked))

    async def _delete(self, key: str) -> None:
        try:
            await self._ask(Asked("DELETE", key))
        except BucketNotFoundError:
            raise
        except NotFoundError:
            return

    async def _document(self, asked: Asked) -> tuple[object, str]:
        """Return the JSON document of a response, and the error message for a malformed one."""
        complaint = f"{self.url if asked.key is None else self._at.object_url(asked.key)}: {self.nonsense}"
        reply = await self._ask(asked)
        try:
            document = json.loads(reply.body)
        except (ValueError, RecursionError):
            raise UnexpectedAnswerError(complaint) from None
        if isinstance(document, Mapping) and "error" in document:  # would look like an empty listing
            raise UnexpectedAnswerError(complaint)
        return document, complaint

    async def _refusal(
        self, access: GcsAccess, asked: Asked, proof: str | None, address: str, reply: Reply
    ) -> StoreError:
        """Return the error for an error response.

        A 404 may mean the object or the bucket. If the text does not say which, another request checks the bucket, but
        only for the manifest, which is read first: after that the bucket is known, and missing objects are common.
        """
        writing, (code, text) = asked.body is not None, _explained(reply)
        if reply.status == 404 and (
            asked.key is None
            or writing
            or text.startswith(_MISSING_BUCKET)
            or (asked.key == POINTER_KEY and not await self._has_bucket(access, proof, address))
        ):
            return BucketNotFoundError(f"{address}: the bucket does not exist; check its name")
        return error_of(address, reply, _BY_CODE, code, text, writing=writing)

    async def _has_bucket(self, access: GcsAccess, token: str | None, address: str) -> bool:
        """Return False only if Google responds in time that there is no such bucket."""
        asked = Asked("GET", None, query={"maxResults": "1", "fields": "nextPageToken"})
        try:
            async with asyncio.timeout(_BUCKET_CHECK_SECONDS):
                return (await access.reader.read(access.call(asked, "", token, address))).status != 404
        except (StokerError, TimeoutError):
            return True

    def _info(self, key: str, reply: Reply) -> ObjectInfo | None:
        generation = reply.headers.get("x-goog-generation")  # some emulators leave it out
        return None if generation is None else ObjectInfo(key=key, size_bytes=reply.size_bytes, tag=generation)


def _object_info(key: str, metadata: object, complaint: str) -> ObjectInfo:
    size, generation = (_said(metadata, name, str, complaint) for name in ("size", "generation"))
    if not re.fullmatch(r"[0-9]{1,18}", size) or not re.fullmatch(r"[0-9]{1,20}", generation):
        raise UnexpectedAnswerError(complaint)
    return ObjectInfo(key=key, size_bytes=int(size), tag=generation)


def _said(document: object, name: str, kind: type[_T], complaint: str, default: _T | None = None) -> _T:
    """Return a field of a JSON document.

    Args:
        document: The document, or a part of it.
        name: Name of the field.
        kind: Required type of the value.
        complaint: Error message.
        default: Value of a missing field; None if the field is required.

    Raises:
        UnexpectedAnswerError: The field is missing, or has another type.
    """
    value = document.get(name, default) if isinstance(document, Mapping) else None
    if not isinstance(value, kind):
        raise UnexpectedAnswerError(complaint)
    return value


def _generation(tag: str) -> str:
    return tag if tag.isdecimal() and tag != "0" else _NO_GENERATION


def _explained(reply: Reply) -> tuple[str, str]:
    """Return the code and the text of an error document, which is JSON or plain text."""
    code, text = "", reply.body.decode(errors="replace")
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        document = json.loads(text)["error"]
        text = str(document["message"])
        code = str(document["errors"][0]["reason"])
    return code, text
