"""Google Cloud Storage: objects are read into the caller's memory over HTTP, all else goes through gcloud-aio."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
from gcloud.aio.storage import Storage

from stoker._base.meter import PriceKey
from stoker._format.manifest import POINTER_KEY
from stoker._stores.credentials import ExpiredCredentialsError, with_renewal
from stoker._stores.failures import Failure, Rule, error_of
from stoker._stores.gcs_access import GcsAccess
from stoker._stores.http import Call, Reply
from stoker._stores.http_objects import Asked, BucketObjects, said_in
from stoker._stores.http_session import LEAST_SENT_BYTES_PER_SECOND, translated
from stoker._stores.location import Location
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


class GcsStore(BucketObjects[GcsAccess]):
    """``gs://bucket/prefix``."""

    nonsense = _NONSENSE

    def __init__(self, location: Location, options: GcsOptions) -> None:
        super().__init__(location, partial(GcsAccess, location.bucket, options))
        self._price_key = PriceKey(location.url, options.endpoint_url or "", options.prices or "")

    def price_key(self) -> PriceKey:
        """Return by what its prices are found."""
        return self._price_key

    async def presign(self, key: str, *, seconds: int, tag: str = "") -> str:
        """Return a URL that stands for a GET of the generation ``tag``, or of the newest one."""
        query = {"generation": _generation(tag)} if tag else {}
        return await self._access.get().presigned(self._at.full_key(key), seconds, query)

    async def _head(self, key: str) -> ObjectInfo:
        full_key, address = self._at.full_key(key), self._at.object_url(key)
        metadata = await self._control(
            address, lambda storage, extra: storage.download_metadata(self._at.bucket, full_key, **extra), key=key
        )
        return _object_info(key, metadata, address)

    async def _page(self, prefix: str, after: str, token: str) -> tuple[list[ObjectInfo], str]:
        wanted = {"prefix": prefix, "fields": _LIST_FIELDS, "maxResults": "1000"}
        wanted |= {name: value for name, value in (("startOffset", after), ("pageToken", token)) if value}
        page = await self._control(
            self.url, lambda storage, extra: storage.list_objects(self._at.bucket, params=wanted, **extra)
        )
        complaint = f"{self.url}: {_NONSENSE}"
        infos = [
            _object_info(self._at.relative(said_in(entry, "name", str, complaint)), entry, self.url)
            for entry in said_in(page, "items", list, complaint, [])
        ]
        return infos, said_in(page, "nextPageToken", str, complaint, "")

    async def _put(self, key: str, data: Buffer, *, if_absent: bool, if_tag: str | None) -> ObjectInfo:
        full_key, address, body = self._at.full_key(key), self._at.object_url(key), bytes(data)
        condition = {"ifGenerationMatch": "0"} if if_absent else {}
        if if_tag is not None:
            condition = {"ifGenerationMatch": _generation(if_tag)}
        metadata = await self._control(
            address,
            lambda storage, extra: storage.upload(
                self._at.bucket,
                full_key,
                body,
                content_type="application/octet-stream",
                parameters=dict(condition),
                force_resumable_upload=False,
                **extra,
            ),
            sent_bytes=len(body),
            writing=True,
        )
        return _object_info(key, metadata, address)

    async def _delete(self, key: str) -> None:
        full_key = self._at.full_key(key)
        try:
            await self._control(
                self._at.object_url(key),
                lambda storage, extra: storage.delete(self._at.bucket, full_key, **extra),
                key=key,
            )
        except BucketNotFoundError:
            raise
        except NotFoundError:
            return

    def _call(self, access: GcsAccess, asked: Asked, proof: str | None, address: str) -> Call:
        condition = {} if asked.tag is None else {"ifGenerationMatch": _generation(asked.tag)}
        path = f"{access.bucket_url}/o/{quote(self._at.full_key(asked.key), safe='')}"
        url = f"{path}?{urlencode({'alt': 'media', **condition})}"
        return Call(method=asked.method, url=url, headers=access.headers(proof) | asked.headers, address=address)

    async def _refusal(
        self, access: GcsAccess, asked: Asked, proof: str | None, address: str, reply: Reply
    ) -> StoreError:
        failure = _failure(address, reply.status, reply.body.decode(errors="replace"), reply.headers)
        return await self._error(access, proof, failure, asked.key)

    def _info(self, key: str, reply: Reply) -> ObjectInfo | None:
        generation = reply.headers.get("x-goog-generation")  # which some emulators leave out
        return None if generation is None else ObjectInfo(key=key, size_bytes=reply.size_bytes, tag=generation)

    async def _control(
        self,
        address: str,
        work: Callable[[Storage, dict[str, Any]], Awaitable[_T]],
        *,
        key: str = "",
        sent_bytes: int = 0,
        writing: bool = False,
    ) -> _T:
        """Perform a call of the control plane, once more if the token had to be renewed.

        Args:
            address: of the object or bucket, for messages.
            work: makes the call; it hands the keyword arguments on to the client library.
            key: of the object that may be missing; without one, it can only be the bucket.
            sent_bytes: of the body.
            writing: whether a condition that failed is a lost race.
        """
        access = self._access.get()

        async def once(token: str | None) -> _T:
            extra = {"headers": access.headers(token), "timeout": access.session.timeout}
            with translated(address):
                try:
                    async with asyncio.timeout(access.patience_seconds + sent_bytes / LEAST_SENT_BYTES_PER_SECOND):
                        return await work(access.storage, extra)
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
        url = f"{access.bucket_url}/o?maxResults=1&fields=nextPageToken"
        call = Call(method="GET", url=url, headers=access.headers(token), address=address)
        try:
            async with asyncio.timeout(_BUCKET_CHECK_SECONDS):
                return (await access.reader.read(call)).status != 404
        except (StokerError, TimeoutError):
            return True


def _object_info(key: str, metadata: object, address: str) -> ObjectInfo:
    complaint = f"{address}: {_NONSENSE}"
    size, generation = (said_in(metadata, name, str, complaint) for name in ("size", "generation"))
    if not re.fullmatch(r"[0-9]{1,18}", size) or not re.fullmatch(r"[0-9]{1,20}", generation):
        raise UnexpectedAnswerError(complaint)
    return ObjectInfo(key=key, size_bytes=int(size), tag=generation)


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
