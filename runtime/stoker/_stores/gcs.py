"""Google Cloud Storage: objects are read into the caller's memory over HTTP, all else goes through gcloud-aio."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar
from urllib.parse import quote, urlencode

import aiohttp

from stoker._base.operations import PriceKey
from stoker._format.manifest import POINTER_KEY
from stoker._stores.credentials import Endpoint, ExpiredCredentialsError, Identity, with_renewal
from stoker._stores.failures import Failure, Rule, error_of
from stoker._stores.gcs_access import GcsAccess
from stoker._stores.http import Call, Destination, Reply
from stoker._stores.http_session import LEAST_SENT_BYTES_PER_SECOND, translated
from stoker._stores.location import Location, check_conditions, check_empty_range, check_range
from stoker._stores.network import PerLoop
from stoker._stores.options import GcsOptions
from stoker.abc import Buffer, ObjectInfo
from stoker.errors import (
    BucketNotFoundError,
    NotFoundError,
    PermissionDeniedError,
    StokerError,
    StoreError,
    ThrottledError,
    UnexpectedAnswerError,
)

__all__ = ["GcsStore"]

_T = TypeVar("_T")

_REJECTED: Rule = (ExpiredCredentialsError, "the token is missing, expired or not valid; log in again")
_SLOW: Rule = (ThrottledError, "Google asks to slow down; send fewer requests at once")

_BY_CODE: dict[str, Rule] = {
    "401": _REJECTED,
    "authError": _REJECTED,
    "quotaExceeded": _SLOW,
    "rateLimitExceeded": _SLOW,
    "required": _REJECTED,
    "userProjectMissing": (
        PermissionDeniedError,
        "the requester pays for this bucket; use GcsOptions(user_project=...) or --user-project",
    ),
    "userRateLimitExceeded": _SLOW,
}

_NONSENSE = "the answer makes no sense; is this a GCS endpoint?"
# What the client library ends with, since it trusts its endpoint.
_NO_SENSE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_LIST_FIELDS = "items(name,size,generation),nextPageToken"
_MISSING_BUCKET = "The specified bucket does not exist"
_BUCKET_CHECK_SECONDS = 2.0
# Generations are times in microseconds: no object ever had this one.
_NO_GENERATION = "1"


class GcsStore:
    """``gs://bucket/prefix``. Connections are made on first use, one pool per event loop, none shared across a fork."""

    def __init__(self, location: Location, options: GcsOptions) -> None:
        self._at = location
        self._access = PerLoop(lambda: GcsAccess(options))
        self._price_key = PriceKey(location.url, options.endpoint_url or "", options.prices or "")

    @property
    def url(self) -> str:
        """The root as the user wrote it."""
        return self._at.url

    def price_key(self) -> PriceKey:
        """Return by what its prices are found."""
        return self._price_key

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return a whole object."""
        reply = await self._read(key, {}, {})
        return reply.body, await self._info(key, reply)

    async def get_range(
        self,
        key: str,
        start: int,
        end: int,
        *,
        into: memoryview,
        tag: str | None = None,
        begun: Callable[[], None] | None = None,
    ) -> ObjectInfo:
        """Read bytes ``[start, end)`` into ``into``; cancellation closes the connection."""
        check_range(start, end, into)
        if start == end:
            return check_empty_range(self._at, await self.head(key), start, tag)
        condition = {} if tag is None else {"ifGenerationMatch": _generation(tag)}
        headers = {"Range": f"bytes={start}-{end - 1}"}
        return await self._info(key, await self._read(key, condition, headers, Destination(into, start, end, begun)))

    async def head(self, key: str) -> ObjectInfo:
        """Return size and generation."""
        full_key = self._at.full_key(key)
        metadata = await self._control(
            self._at.object_url(key),
            lambda access, headers: access.storage.download_metadata(
                self._at.bucket,
                full_key,
                headers=headers,
                timeout=access.session.timeout,  # type: ignore[arg-type]  # handed on to aiohttp, which takes both
            ),
            key=key,
        )
        return _object_info(key, metadata, self._at.object_url(key))

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield objects, a request per thousand."""
        parameters = {"prefix": self._at.within_bucket(prefix), "fields": _LIST_FIELDS, "maxResults": "1000"}
        if start_after:
            parameters["startOffset"] = self._at.within_bucket(start_after)
        after = start_after.encode()
        while True:
            page = await self._control(
                self.url,
                lambda access, headers: access.storage.list_objects(
                    self._at.bucket,
                    params=parameters,
                    headers=headers,
                    timeout=access.session.timeout,  # type: ignore[arg-type]  # handed on to aiohttp, which takes both
                ),
            )
            for entry in _said(page, "items", list, self.url, []):
                key = self._at.relative(_said(entry, "name", str, self.url))
                if key.encode() > after:  # startOffset itself is among what Google lists
                    yield _object_info(key, entry, self.url)
            if not (following := _said(page, "nextPageToken", str, self.url, "")):
                return
            if following == parameters.get("pageToken"):  # this would go on for ever
                raise UnexpectedAnswerError(f"{self.url}: {_NONSENSE}")
            parameters["pageToken"] = following

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        """Write an object in one request."""
        check_conditions(if_absent=if_absent, if_tag=if_tag)
        full_key, body = self._at.full_key(key), bytes(data)
        condition = {"ifGenerationMatch": "0"} if if_absent else {}
        if if_tag is not None:
            condition = {"ifGenerationMatch": _generation(if_tag)}
        metadata = await self._control(
            self._at.object_url(key),
            lambda access, headers: access.storage.upload(
                self._at.bucket,
                full_key,
                body,
                content_type="application/octet-stream",
                parameters=dict(condition),
                headers=headers,
                force_resumable_upload=False,
                timeout=access.session.timeout,  # type: ignore[arg-type]  # handed on to aiohttp, which takes both
            ),
            sent_bytes=len(body),
            writing=True,
        )
        return _object_info(key, metadata, self._at.object_url(key))

    async def delete(self, key: str) -> None:
        """Delete an object."""
        full_key = self._at.full_key(key)
        try:
            await self._control(
                self._at.object_url(key),
                lambda access, headers: access.storage.delete(
                    self._at.bucket,
                    full_key,
                    headers=headers,
                    timeout=access.session.timeout,  # type: ignore[arg-type]  # handed on to aiohttp, which takes both
                ),
                key=key,
            )
        except BucketNotFoundError:
            raise
        except NotFoundError:
            return

    async def presign(self, key: str, *, seconds: int, tag: str = "") -> str:
        """Return a URL that stands for a GET of the generation ``tag``, or of the newest one."""
        full_key = self._at.full_key(key)
        query = {"generation": _generation(tag)} if tag else {}
        return await self._access.get().presigned(self._at.bucket, full_key, seconds, query)

    async def identity(self) -> Identity:
        """Return whose credentials are used."""
        return await self._access.get().identity()

    async def endpoint(self) -> Endpoint:
        """Return where the bucket is, if these credentials may know."""
        return await self._access.get().endpoint(self._at.bucket)

    async def close(self) -> None:
        """Close the running loop's connections."""
        if (access := self._access.take()) is not None:
            await access.close()

    async def _read(
        self, key: str, parameters: dict[str, str], headers: dict[str, str], destination: Destination | None = None
    ) -> Reply:
        """Send a request for an object's bytes, once more if the token had to be renewed."""
        access, address = self._access.get(), self._at.object_url(key)
        query = urlencode({"alt": "media", **parameters})
        url = f"{access.root_url}/storage/v1/b/{self._at.bucket}/o/{quote(self._at.full_key(key), safe='')}?{query}"

        async def once(token: str | None) -> Reply:
            call = Call(method="GET", url=url, headers=access.headers(token) | headers, address=address)
            if destination is None:
                reply = await access.reader.ask(call)
            else:
                reply = await access.reader.read_into(call, destination)
            if reply.refused:
                failure = _failure(address, reply.status, reply.body.decode(errors="replace"), reply.headers)
                raise await self._error(access, token, failure, key)
            return reply

        return await with_renewal(access, once)

    async def _control(
        self,
        address: str,
        work: Callable[[GcsAccess, dict[str, str]], Awaitable[_T]],
        *,
        key: str = "",
        sent_bytes: int = 0,
        writing: bool = False,
    ) -> _T:
        """Perform a call of the control plane, once more if the token had to be renewed.

        ``key`` is that of the object which may be missing; without one, it can only be the bucket.
        """
        access = self._access.get()

        async def once(token: str | None) -> _T:
            with translated(address):
                try:
                    async with asyncio.timeout(access.patience_seconds + sent_bytes / LEAST_SENT_BYTES_PER_SECOND):
                        return await work(access, access.headers(token))
                except aiohttp.ClientResponseError as error:
                    if error.status < 300:  # of another type than the library reads
                        raise UnexpectedAnswerError(f"{address}: {_NONSENSE}") from None
                    said = error.message.replace(token, "***") if token else error.message
                    failure = _failure(address, error.status, said, error.headers or {}, writing=writing)
                    # Not chained: the client's error holds the request, and so the token.
                    raise await self._error(access, token, failure, key) from None
                except (StokerError, aiohttp.ClientError, OSError):
                    raise
                except _NO_SENSE:
                    raise UnexpectedAnswerError(f"{address}: {_NONSENSE}") from None

        return await with_renewal(access, once)

    async def _error(self, access: GcsAccess, token: str | None, failure: Failure, key: str) -> StoreError:
        """Return the error for a failure.

        A 404 may mean the object or the bucket. Where its text does not say, the bucket is asked for, but only for the
        manifest, which comes first: an object that is not there is usual, and the bucket then known to be.
        """
        if failure.status == 404 and (
            not key
            or failure.text.startswith(_MISSING_BUCKET)
            or (key == POINTER_KEY and not await self._has_bucket(access, token, failure.address))
        ):
            return BucketNotFoundError(f"{failure.address}: the bucket does not exist; check its name")
        return error_of(failure, _BY_CODE)

    async def _has_bucket(self, access: GcsAccess, token: str | None, address: str) -> bool:
        """Return False only where Google says so in time."""
        url = f"{access.root_url}/storage/v1/b/{self._at.bucket}/o?maxResults=1&fields=nextPageToken"
        call = Call(method="GET", url=url, headers=access.headers(token), address=address)
        try:
            async with asyncio.timeout(_BUCKET_CHECK_SECONDS):
                return (await access.reader.ask(call)).status != 404
        except (StokerError, TimeoutError):
            return True

    async def _info(self, key: str, reply: Reply) -> ObjectInfo:
        generation = reply.headers.get("x-goog-generation")
        if generation is None:  # an emulator that leaves the header out
            return await self.head(key)
        return ObjectInfo(key=key, size_bytes=reply.size_bytes, tag=generation)


def _object_info(key: str, metadata: object, address: str) -> ObjectInfo:
    size, generation = (_said(metadata, name, str, address) for name in ("size", "generation"))
    if not re.fullmatch(r"[0-9]{1,18}", size) or not re.fullmatch(r"[0-9]{1,20}", generation):
        raise UnexpectedAnswerError(f"{address}: {_NONSENSE}")
    return ObjectInfo(key=key, size_bytes=int(size), tag=generation)


def _said(document: object, name: str, kind: type[_T], address: str, default: _T | None = None) -> _T:
    """Return a field of an answer, which must be there, unless there is a default, and be of its kind."""
    value = document.get(name, default) if isinstance(document, dict) else None
    if not isinstance(value, kind):
        raise UnexpectedAnswerError(f"{address}: {_NONSENSE}")
    return value


def _generation(tag: str) -> str:
    return tag if tag.isdecimal() and tag != "0" else _NO_GENERATION


def _failure(address: str, status: int, text: str, headers: Mapping[str, str], *, writing: bool = False) -> Failure:
    """Read an error document: JSON, after the client library's own words if it came through that, else plain text."""
    code = ""
    try:
        document = json.loads(text[text.index("{") :])["error"]
        text = str(document["message"])
        code = str(document["errors"][0]["reason"])
    except _NO_SENSE:
        pass
    return Failure(address=address, status=status, code=code, text=text, headers=headers, writing=writing)
