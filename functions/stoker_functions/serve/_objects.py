"""Answers that are an object of the bucket, or a range of one: its bytes, or where to read them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from stoker._base.checksum import crc32c
from stoker._base.retry import RetryingStore
from stoker._stores import ObjectInfo, Presigner
from stoker.abc import ObjectRef
from stoker.errors import ChecksumError, CredentialsError, ObjectChangedError
from stoker_functions.serve._conditions import asked_range, is_unchanged
from stoker_functions.serve._config import ServeConfig
from stoker_functions.serve._messages import Refusal, Request, Response

__all__ = ["Wanted", "answer_object", "caching"]

_log = logging.getLogger("stoker_functions.serve.objects")


def caching(*, pinned: bool) -> dict[str, str]:
    """Return how long an answer may be kept: for good by the client itself if its version is said, else to compare."""
    return {"Cache-Control": "private, max-age=31536000, immutable" if pinned else "private, no-cache"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An object that is asked for.

    Attributes:
        key: of the object.
        pinned: what the manifest says of it, if it does; then it is read without asking for its tag first.
        headers: more headers of its responses.
    """

    key: str
    pinned: ObjectRef | None = None
    headers: Mapping[str, str]


async def answer_object(store: RetryingStore, wanted: Wanted, request: Request, config: ServeConfig) -> Response:
    """Return the response to a request for an object.

    A copied bucket has other tags than the manifest: it is asked for them then, and before anybody is sent there.

    Raises:
        Refusal: a condition does not hold, the range is none, or the answer is too large and cannot be redirected.
        StoreError: the object could not be had.
    """
    pinned = wanted.pinned
    if request.method == "HEAD" or pinned is None or not pinned.tag:
        return await _answer(store, wanted, request, config, await store.head(wanted.key))
    try:
        info = ObjectInfo(key=pinned.key, size_bytes=pinned.size_bytes, tag=pinned.tag)
        return await _answer(store, wanted, request, config, info)
    except ObjectChangedError:
        return await _answer(store, wanted, request, config, await store.head(wanted.key))


async def _answer(
    store: RetryingStore, wanted: Wanted, request: Request, config: ServeConfig, info: ObjectInfo
) -> Response:
    etag = f'"{info.tag}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", **wanted.headers}
    if is_unchanged(request.headers, etag):
        return Response(status=304, headers=headers)
    headers["Content-Type"] = "application/octet-stream"
    if request.method == "HEAD":
        return Response(status=200, headers={**headers, "Content-Length": str(info.size_bytes)})
    asked = asked_range(request.headers, info.size_bytes, etag)
    start, end = asked or (0, info.size_bytes)
    if end - start > config.answer_bytes:
        told = info if wanted.pinned is None else await store.head(info.key)
        return await _redirect(store, config, told, end - start)
    body = bytearray(end - start)
    if body:
        await store.get_range(info.key, start, end, into=memoryview(body), tag=info.tag)
    if asked is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{info.size_bytes}"
    elif wanted.pinned is not None and crc32c(body) != wanted.pinned.crc32c:
        raise ChecksumError(f"{store.url}/{info.key} is not what was packed: its checksum differs")
    return Response(status=200 if asked is None else 206, headers=headers, body=body)


async def _redirect(store: RetryingStore, config: ServeConfig, info: ObjectInfo, wanted_bytes: int) -> Response:
    """Send the client to the bucket, with the right to read this object for a short time."""
    signer = store.wrapped
    try:
        if not isinstance(signer, Presigner):
            raise CredentialsError(f"{store.url} cannot sign URLs")
        url = await signer.presign(info.key, seconds=config.redirect_seconds, tag=info.tag)
    except CredentialsError as error:
        _log.warning("an answer of %d bytes cannot be redirected: %s", wanted_bytes, error)
        raise Refusal(
            413,
            "too-large",
            f"the answer has {wanted_bytes} bytes, and one request gets at most {config.answer_bytes}: ask for ranges",
        ) from None
    return Response(status=307, headers={"Location": url, "ETag": f'"{info.tag}"', "Cache-Control": "no-store"})
