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

from stoker._base.meter import Operation, PriceKey
from stoker._format.manifest import POINTER_KEY
from stoker._stores.gcs_upload import GcsUpload, session_of
from stoker._stores.google_credentials import create_token_source, sign_url, token_session
from stoker._stores.http import ErrorRule, HttpRequest, HttpResponse, create_error, parse_date
from stoker._stores.http_objects import (
    CredentialsInfo,
    EndpointInfo,
    ExpiredCredentialsError,
    HttpBucketStore,
    ObjectOperation,
    RenewableCredentials,
    StaticCredentials,
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


class GcsTokens(RenewableCredentials[str]):
    """Access tokens of the account in Google's environment, or in a credentials file."""

    margin_seconds = _TOKEN_MARGIN_SECONDS

    def __init__(self, options: GcsOptions) -> None:
        super().__init__()
        self._file = str(options.credentials_file) if options.credentials_file else None

    def source(self) -> Token:
        """Return the source of the tokens."""
        return create_token_source(self._file, _SCOPE, _CHECK)

    async def describe(self) -> CredentialsInfo:
        """Describe the account and the expiry of its token."""
        await self.current()
        kind = self.source().token_type.name.lower().replace("_", " ")
        expires = datetime.now(UTC) + timedelta(seconds=self.life_seconds)
        return CredentialsInfo(kind=kind, expires=expires, is_renewed=True)

    async def fetch(self) -> tuple[str, float]:
        """Fetch a token and its life, without the library's own cache, which retries for a minute and leaks a task."""
        source = self.source()
        no_credentials = "" if self.were_fetched else _NO_CREDENTIALS
        async with token_session(
            source, no_credentials, refusal_message="Google refused the credentials", check=_CHECK
        ):
            fresh = await source.refresh(timeout=_TOKEN_TIMEOUT_SECONDS)
            return fresh.value, fresh.expires_in


class GcsStoreClient(Connections):
    """Connections and token of one store in one event loop."""

    def __init__(self, bucket: str, options: GcsOptions) -> None:
        self._bucket, self._options = bucket, options
        emulator = _find_emulator_url(options, os.environ)
        self._root_url = emulator or _GOOGLE
        self.credentials: GcsTokens | StaticCredentials[str | None]
        if options.token is not None:
            self.credentials = StaticCredentials(options.token, "a ready token")
        elif emulator or options.anonymous:
            self.credentials = StaticCredentials(None, "none: an emulator" if emulator else "none")
        else:
            self.credentials = GcsTokens(options)
        super().__init__(options.http, self._root_url)

    async def describe_endpoint(self) -> EndpointInfo:
        """Request the bucket's location; even an error response has the time."""
        url = f"{self._root_url}/storage/v1/b/{self._bucket}?fields=location"
        headers = self.headers(await self.credentials.current())
        reply = await self.reader.send(HttpRequest(method="GET", url=url, headers=headers, address=self._root_url))
        location = _LOCATION.search(reply.body) if not reply.is_error else None
        return EndpointInfo(
            address=self._root_url,
            region=location[1].decode().lower() if location else "",
            date=parse_date(reply.headers.get("Date")),
        )

    def create_request(
        self, operation: ObjectOperation, full_key: str, credentials: str | None, address: str
    ) -> HttpRequest:
        """Return a request with the token ``credentials``; ``full_key`` is a key, empty for a listing of the bucket."""
        method = operation.method
        headers = self.headers(credentials) | operation.headers
        url = f"{self._root_url}/storage/v1/b/{self._bucket}/o"
        query = dict(operation.query or {})
        if full_key and not query and operation.is_read:
            query["alt"] = "media"
        if operation.body is not None or "upload_id" in query:
            method = operation.method if "upload_id" in query else "POST"
            url = f"{self._root_url}/upload/storage/v1/b/{self._bucket}/o"
            query = {"uploadType": "resumable" if "upload_id" in query else "media", "name": full_key} | query
            is_begin = query["uploadType"] == "resumable" and "upload_id" not in query
            headers["Content-Type"] = "application/json" if is_begin else "application/octet-stream"
        elif full_key:
            url = f"{url}/{quote(full_key, safe='')}"
        if operation.tag is not None or operation.is_new:
            query["ifGenerationMatch"] = "0" if operation.tag is None else _generation(operation.tag)
        url = f"{url}?{urlencode(query)}" if query else url
        return HttpRequest(method=method, url=url, headers=headers, address=address, data=operation.body)

    def headers(self, token: str | None) -> dict[str, str]:
        """Return the headers of a request with a token."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        if self._options.user_project is not None:
            headers["X-Goog-User-Project"] = self._options.user_project
        return headers

    async def presign(self, key: str, seconds: int, query: Mapping[str, str]) -> str:
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
        return await sign_url(self._bucket, key, seconds, {**query, **payer}, source=source, token=token)


def _find_emulator_url(options: GcsOptions, environment: Mapping[str, str]) -> str | None:
    """Return the URL of a configured emulator, or None; as in Google's own clients, the scheme may be left out."""
    address = options.endpoint_url or environment.get("STORAGE_EMULATOR_HOST")
    if not address:
        return None
    url = address if "://" in address else f"http://{address}"
    check_endpoint(url, "STORAGE_EMULATOR_HOST")
    return url.rstrip("/")


_SLOW: ErrorRule = (ThrottledError, "Google asks to slow down; send fewer requests at once")

_BY_CODE: dict[str, ErrorRule] = {
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


class GcsStore(HttpBucketStore[GcsStoreClient]):
    """A store in a Google Cloud Storage bucket, ``gs://bucket/prefix``."""

    malformed_message = "the response is malformed; check that the endpoint speaks the GCS JSON API"

    def __init__(self, location: Location, options: GcsOptions) -> None:
        super().__init__(location, partial(GcsStoreClient, location.bucket, options))
        self._price_key = PriceKey(location.url, options.endpoint_url or "", options.prices or "")

    def price_key(self) -> PriceKey:
        """Return the key of the store's prices."""
        return self._price_key

    async def presign(self, key: str, *, seconds: int, tag: str = "") -> str:
        """Return the URL of a signed GET of the generation ``tag``, or of the newest one."""
        query = {"generation": _generation(tag)} if tag else {}
        return await self._clients.get().presign(self._location.full_key(key), seconds, query)

    async def _head(self, key: str) -> ObjectInfo:
        return _object_info(key, *await self._request_json(ObjectOperation("GET", key, query=_AS_JSON)))

    async def _page(self, prefix: str, after: str, token: str) -> tuple[list[ObjectInfo], str]:
        query = {"prefix": prefix, "fields": _LIST_FIELDS, "maxResults": "1000"}
        query |= {name: value for name, value in (("startOffset", after), ("pageToken", token)) if value}
        page, complaint = await self._request_json(ObjectOperation("GET", None, query=query))
        infos = [
            _object_info(self._location.relative(_read_field(entry, "name", str, complaint)), entry, complaint)
            for entry in _read_field(page, "items", list, complaint, [])
        ]
        return infos, _read_field(page, "nextPageToken", str, complaint, "")

    async def _put(self, key: str, data: Buffer, *, if_absent: bool, if_tag: str | None) -> ObjectInfo:
        operation = ObjectOperation("PUT", key, tag=if_tag, is_new=if_absent, body=bytes(data))
        return _object_info(key, *await self._request_json(operation))

    async def begin_upload(self, key: str, size_bytes: int) -> GcsUpload:
        """Begin a resumable upload of an object that must not exist."""
        operation = ObjectOperation("POST", key, is_new=True, query={"uploadType": "resumable"}, body=b"{}")
        with self.meter.count_request(Operation.PUT):
            session = session_of(await self._perform(operation), self._location.object_url(key))

        def parse_info(reply: HttpResponse) -> ObjectInfo:
            return _object_info(key, *self._parse_json(operation, reply))

        return GcsUpload(key, size_bytes, session, self._perform, parse_info, self.meter)

    async def _delete(self, key: str) -> None:
        try:
            await self._perform(ObjectOperation("DELETE", key))
        except BucketNotFoundError:
            raise
        except NotFoundError:
            return

    async def _request_json(self, operation: ObjectOperation) -> tuple[object, str]:
        """Send a request; return the JSON document of the response, and the error message for a malformed one."""
        return self._parse_json(operation, await self._perform(operation))

    def _parse_json(self, operation: ObjectOperation, reply: HttpResponse) -> tuple[object, str]:
        """Return the JSON document of a response, and the error message for a malformed one."""
        url = self.url if operation.key is None else self._location.object_url(operation.key)
        complaint = f"{url}: {self.malformed_message}"
        try:
            document = json.loads(reply.body)
        except (ValueError, RecursionError):
            raise UnexpectedAnswerError(complaint) from None
        if isinstance(document, Mapping) and "error" in document:  # would look like an empty listing
            raise UnexpectedAnswerError(complaint)
        return document, complaint

    async def _response_error(
        self, access: GcsStoreClient, operation: ObjectOperation, proof: str | None, address: str, reply: HttpResponse
    ) -> StoreError:
        """Return the error for an error response.

        A 404 may mean the object or the bucket. If the text does not say which, another request checks the bucket, but
        only for the manifest, which is read first: after that the bucket is known, and missing objects are common.
        """
        writing, (code, text) = operation.body is not None, _parse_error(reply)
        if reply.status in (404, 410) and operation.content_range:
            return NotFoundError(f"{address}: the resumable upload has expired; pack again to resume")
        if reply.status == 404 and (
            operation.key is None
            or writing
            or text.startswith(_MISSING_BUCKET)
            or (operation.key == POINTER_KEY and not await self._has_bucket(access, proof, address))
        ):
            return BucketNotFoundError(f"{address}: the bucket does not exist; check its name")
        return create_error(address, reply, _BY_CODE, code, text, is_write=writing)

    async def _has_bucket(self, access: GcsStoreClient, token: str | None, address: str) -> bool:
        """Return False only if Google responds in time that there is no such bucket."""
        operation = ObjectOperation("GET", None, query={"maxResults": "1", "fields": "nextPageToken"})
        try:
            async with asyncio.timeout(_BUCKET_CHECK_SECONDS):
                return (await access.reader.send(access.create_request(operation, "", token, address))).status != 404
        except (StokerError, TimeoutError):
            return True

    def _info(self, key: str, reply: HttpResponse) -> ObjectInfo | None:
        generation = reply.headers.get("x-goog-generation")  # some emulators leave it out
        return None if generation is None else ObjectInfo(key=key, size_bytes=reply.size_bytes, tag=generation)


def _object_info(key: str, metadata: object, message: str) -> ObjectInfo:
    size, generation = (_read_field(metadata, name, str, message) for name in ("size", "generation"))
    if not re.fullmatch(r"[0-9]{1,18}", size) or not re.fullmatch(r"[0-9]{1,20}", generation):
        raise UnexpectedAnswerError(message)
    return ObjectInfo(key=key, size_bytes=int(size), tag=generation)


def _read_field(document: object, name: str, kind: type[_T], message: str, default: _T | None = None) -> _T:
    """Return a field of a JSON document.

    Args:
        document: The document, or a part of it.
        name: Name of the field.
        kind: Required type of the value.
        message: Error message.
        default: Value of a missing field; None if the field is required.

    Raises:
        UnexpectedAnswerError: The field is missing, or has another type.
    """
    value = document.get(name, default) if isinstance(document, Mapping) else None
    if not isinstance(value, kind):
        raise UnexpectedAnswerError(message)
    return value


def _generation(tag: str) -> str:
    return tag if tag.isdecimal() and tag != "0" else _NO_GENERATION


def _parse_error(reply: HttpResponse) -> tuple[str, str]:
    """Return the code and the text of an error document, which is JSON or plain text."""
    code, text = "", reply.body.decode(errors="replace")
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        document = json.loads(text)["error"]
        text = str(document["message"])
        code = str(document["errors"][0]["reason"])
    return code, text
