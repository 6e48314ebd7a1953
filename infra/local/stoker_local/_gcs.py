"""An in-memory Google Cloud Storage server: the part of its JSON API that stoker and gcloud-aio-storage use.

Unlike other emulators it follows GCS exactly in three respects: generations only increase, preconditions are checked,
and ranges end at the right byte.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.parser import BytesParser
from email.policy import HTTP
from io import BytesIO
from typing import Any

from aiohttp import web

from stoker._base.checksum import crc32c
from stoker._stores.options import is_loopback
from stoker_local._host import running_server, serve_application
from stoker_local._s3.model import ObjectCreated, ObjectMap, StoredObject, iso_time, parse_byte_range

_MAX_RESULTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsConfig:
    """Configuration of a local GCS: its address, buckets and access token.

    Attributes:
        host: address to listen on; if other machines can reach it, ``token`` is required.
        port: port to listen on; 0 chooses a free port.
        buckets: names of the buckets that exist from the start.
        token: bearer token that requests must carry; empty accepts every request.
        forbidden: buckets whose requests are all answered with 403.
        max_object_bytes: largest accepted request body, in bytes (default 1 GiB).

    Example:
        >>> GcsConfig(buckets=("data",), forbidden=("closed",)).host
        '127.0.0.1'
    """

    host: str = "127.0.0.1"
    port: int = 0
    buckets: tuple[str, ...] = ("stoker",)
    token: str = ""
    forbidden: tuple[str, ...] = ()
    max_object_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if not self.token and not is_loopback(self.host):
            raise ValueError(f"host={self.host!r} is open to other machines; set token= to a secret of your own")


class LocalGcs:
    """A GCS endpoint on this machine: an async context manager that serves from entry to exit.

    Leaving the context closes every connection, frees the port and discards the objects.

    Args:
        config: configuration; default ``GcsConfig()``.
        clock: returns the current time in POSIX seconds; default ``time.time``.

    Attributes:
        buckets: bucket name → key → object; live. An object's ``tag`` is its generation.
        requests: number of answered requests by ``METHOD status``.
        watchers: functions that are called with every object that a request creates, before the response is sent.

    Example:
        >>> import asyncio
        >>> async def main() -> list[str]:
        ...     async with LocalGcs() as gcs:
        ...         return list(gcs.environment())
        >>> asyncio.run(main())
        ['STORAGE_EMULATOR_HOST']
    """

    def __init__(self, config: GcsConfig | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self.config = config or GcsConfig()
        self.buckets = {name: ObjectMap() for name in self.config.buckets}
        self.requests: Counter[str] = Counter()
        self.watchers: list[Callable[[ObjectCreated], None]] = []
        self._clock = clock
        self._generation = 0
        self._upload_sessions: list[_UploadSession] = []
        self._injected_errors: list[GcsError] = []
        self._url = ""

    @property
    def url(self) -> str:
        """URL of the endpoint, without a trailing slash."""
        if not self._url:
            raise RuntimeError("the local GCS is not running; enter it with `async with`")
        return self._url

    def environment(self) -> dict[str, str]:
        """Return the environment variables that point Google's and gcloud-aio's clients to this endpoint."""
        return {"STORAGE_EMULATOR_HOST": self.url}

    def fail_next(self, status: int, *, times: int = 1, retry_after_seconds: int | None = None) -> None:
        """Make the next requests fail.

        Args:
            status: HTTP status of the responses (401, 403, 429, 503 …).
            times: number of requests that fail.
            retry_after_seconds: value of the ``Retry-After`` header, in seconds; None sends no such header.
        """
        headers = {} if retry_after_seconds is None else {"Retry-After": str(retry_after_seconds)}
        self._injected_errors += [GcsError(status, "This failure was injected by fail_next.", headers=headers)] * times

    async def __aenter__(self) -> LocalGcs:
        app = web.Application(client_max_size=self.config.max_object_bytes, middlewares=[self._check_request])
        for root in ("", "/storage/v1"):
            app.router.add_post(f"{root}/b", self._create_bucket)
            app.router.add_get(f"{root}/b/{{bucket}}", self._get_bucket)
            app.router.add_get(f"{root}/b/{{bucket}}/o", self._list)
            app.router.add_get(f"{root}/b/{{bucket}}/o/{{key:.+}}", self._get, allow_head=False)
            app.router.add_delete(f"{root}/b/{{bucket}}/o/{{key:.+}}", self._delete)
        app.router.add_get("/download/storage/v1/b/{bucket}/o/{key:.+}", self._get_media, allow_head=False)
        app.router.add_post("/upload/storage/v1/b/{bucket}/o", self._upload)
        app.router.add_put("/upload/storage/v1/b/{bucket}/o", self._continue_upload)
        app.router.add_delete("/upload/storage/v1/b/{bucket}/o", self._cancel_upload)
        self._server_context = serve_application(app, self.config.host, self.config.port)
        self._url = f"http://{await self._server_context.__aenter__()}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._url = ""
        await self._server_context.__aexit__(None, None, None)

    @web.middleware
    async def _check_request(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        """Authenticate, inject failures, and turn errors into Google's JSON."""
        try:
            if self._injected_errors:
                raise self._injected_errors.pop(0)
            if self.config.token and request.headers.get("Authorization") != f"Bearer {self.config.token}":
                raise GcsError(401, "Invalid Credentials", headers={"WWW-Authenticate": "Bearer"})
            if request.match_info.get("bucket") in self.config.forbidden:
                raise GcsError(403, "The caller does not have access to the bucket.")
            response: web.StreamResponse = await handler(request)
        except GcsError as refusal:
            response = refusal.response()
        self.requests[f"{request.method} {response.status}"] += 1
        return response

    # Buckets.

    def _bucket(self, request: web.Request) -> ObjectMap:
        bucket = self.buckets.get(request.match_info["bucket"])
        if bucket is None:
            raise GcsError(404, "The specified bucket does not exist.")
        return bucket

    async def _create_bucket(self, request: web.Request) -> web.Response:
        name = parse_json_object(await request.read()).get("name")
        if not isinstance(name, str) or not name or "/" in name:
            raise GcsError(400, "A bucket needs a name.")
        if name in self.buckets:
            raise GcsError(409, "Your previous request to create the named bucket succeeded.")
        self.buckets[name] = ObjectMap()
        return web.json_response({"kind": "storage#bucket", "name": name})

    async def _get_bucket(self, request: web.Request) -> web.Response:
        self._bucket(request)
        return web.json_response({"kind": "storage#bucket", "name": request.match_info["bucket"]})

    async def _list(self, request: web.Request) -> web.Response:
        bucket, query = self._bucket(request), request.query
        limit = min(parse_unsigned(query.get("maxResults", str(_MAX_RESULTS))), _MAX_RESULTS)
        start = query.get("startOffset", "")
        if token := query.get("pageToken"):
            try:
                start = base64.urlsafe_b64decode(token.encode()).decode()
            except ValueError as error:
                raise GcsError(400, "Invalid pageToken.") from error
        page = bucket.page(
            prefix=query.get("prefix", ""), delimiter=query.get("delimiter", ""), start=start, limit=limit
        )
        listing: dict[str, Any] = {"kind": "storage#objects"}
        if page.keys:
            name = request.match_info["bucket"]
            listing["items"] = [object_resource(name, key, bucket[key]) for key in page.keys]
        if page.prefixes:
            listing["prefixes"] = list(page.prefixes)
        if page.next_start is not None:
            listing["nextPageToken"] = base64.urlsafe_b64encode(page.next_start.encode()).decode()
        return web.json_response(listing)

    # Objects.

    def _object(self, request: web.Request) -> StoredObject:
        stored = self._bucket(request).get(request.match_info["key"])
        generation = request.query.get("generation")
        if stored is None or (generation is not None and generation != stored.tag):
            raise GcsError(404, f"No such object: {request.match_info['bucket']}/{request.match_info['key']}")
        _check_generation(request.query, stored)
        return stored

    async def _get(self, request: web.Request) -> web.Response:
        if request.query.get("alt") == "media":
            return await self._get_media(request)
        stored = self._object(request)
        return web.json_response(object_resource(request.match_info["bucket"], request.match_info["key"], stored))

    async def _get_media(self, request: web.Request) -> web.Response:
        stored = self._object(request)
        headers = {
            "Content-Type": stored.headers["content-type"],
            "ETag": generation_etag(stored),
            "x-goog-generation": stored.tag,
            "x-goog-hash": f"crc32c={crc32c_base64(stored)}",
            "x-goog-stored-content-length": str(len(stored.data)),
        }
        span = parse_byte_range(request.headers.get("Range", ""), len(stored.data))
        # As a stream: aiohttp warns about large bodies of type bytes.
        if span is None:
            return web.Response(body=BytesIO(stored.data), headers=headers)
        if span[0] >= span[1]:
            range_headers = {"Content-Range": f"bytes */{len(stored.data)}"}
            raise GcsError(416, "Request range not satisfiable", headers=range_headers)
        headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{len(stored.data)}"
        part = memoryview(stored.data)[span[0] : span[1]]
        return web.Response(status=206, body=BytesIO(part), headers=headers)

    async def _delete(self, request: web.Request) -> web.Response:
        self._object(request)
        del self._bucket(request)[request.match_info["key"]]
        return web.Response(status=204)

    async def _upload(self, request: web.Request) -> web.Response:
        """Upload in one request (media, multipart), or begin a resumable upload, which the next request completes."""
        self._bucket(request)
        bucket = request.match_info["bucket"]
        kind = request.query.get("uploadType")
        content_type = request.headers.get("Content-Type", "")
        body = await request.read()
        if kind == "media":
            return self._store(bucket, request.query, {"contentType": content_type}, body)
        if kind == "multipart":
            return self._store(bucket, request.query, *split_upload(content_type, body))
        if kind != "resumable":
            raise GcsError(400, f"uploadType {kind!r} is not one of media, multipart and resumable.")
        resource = parse_json_object(body)
        resource.setdefault("contentType", request.headers.get("X-Upload-Content-Type"))
        name = str(resource.get("name") or request.query.get("name"))
        _check_generation(request.query, self.buckets[bucket].get(name))  # checked again when the bytes arrive
        self._upload_sessions.append(_UploadSession(request.query, resource))
        location = f"{self.url}{request.path}?uploadType=resumable&upload_id={len(self._upload_sessions) - 1}"
        return web.Response(headers={"Location": location})

    def _session(self, request: web.Request) -> _UploadSession:
        number = parse_unsigned(request.query.get("upload_id", ""))
        if number >= len(self._upload_sessions) or self._upload_sessions[number].is_cancelled:
            raise GcsError(404, "No such upload session.")
        return self._upload_sessions[number]

    async def _continue_upload(self, request: web.Request) -> web.Response:
        """Receive all bytes of a resumable upload, or a chunk of them; the last chunk creates the object."""
        session, body = self._session(request), await request.read()
        if session.created is not None:
            return web.json_response(session.created)
        if not session.receive(request.headers.get("Content-Range", f"bytes 0-{len(body) - 1}/{len(body)}"), body):
            return web.Response(status=308, headers=session.received_range)
        bucket = request.match_info["bucket"]
        response = self._store(bucket, session.query, session.resource, bytes(session.data))
        session.created = json.loads(response.text or "")
        session.data.clear()
        return response

    async def _cancel_upload(self, request: web.Request) -> web.Response:
        session = self._session(request)
        session.is_cancelled = True
        session.data.clear()
        return web.Response(status=499)

    def _store(self, bucket: str, query: Mapping[str, str], resource: dict[str, Any], body: bytes) -> web.Response:
        objects, key = self.buckets[bucket], resource.get("name") or query.get("name")
        if not isinstance(key, str) or not 0 < len(key.encode()) <= 1024:
            raise GcsError(400, "An object needs a name of 1 to 1024 bytes.")
        _check_generation(query, objects.get(key))
        # As in GCS, generations look like microseconds and never repeat.
        self._generation = max(self._generation + 1, int(self._clock() * 1e6))
        headers = {"content-type": str(resource.get("contentType") or "application/octet-stream")}
        stored = StoredObject(data=body, tag=str(self._generation), modified_at=self._clock(), headers=headers)
        objects[key] = stored
        for watch in self.watchers:
            watch(ObjectCreated(bucket=bucket, key=key, event="OBJECT_FINALIZE", stored=stored))
        return web.json_response(object_resource(bucket, key, stored))


_CHUNK_UNIT_BYTES = 256 << 10
_CHUNK = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15})", re.ASCII)


@dataclass(slots=True)
class _UploadSession:
    """A resumable upload: its parameters, the bytes so far, and the resource once the object was created."""

    query: Mapping[str, str]
    resource: dict[str, Any]
    data: bytearray = field(default_factory=bytearray)
    created: dict[str, Any] | None = None
    is_cancelled: bool = False

    @property
    def received_range(self) -> dict[str, str]:
        """The header that says which bytes were received; none if there are none."""
        return {"Range": f"bytes=0-{len(self.data) - 1}"} if self.data else {}

    def receive(self, content_range: str, body: bytes) -> bool:
        """Append a chunk, except for bytes that were received before; return whether it was the last one."""
        if re.fullmatch(r"bytes \*/[0-9]{1,15}", content_range):
            return False
        match = _CHUNK.fullmatch(content_range)
        if body and (match is None or int(match[2]) - int(match[1]) + 1 != len(body)):
            raise GcsError(400, f"Content-Range {content_range!r} does not have the {len(body)} bytes of the chunk.")
        start, total = (int(match[1]), int(match[3])) if match else (0, 0)
        is_last = start + len(body) == total
        if not is_last and len(body) % _CHUNK_UNIT_BYTES:
            raise GcsError(400, "Every chunk but the last must be a multiple of 256 KiB.")
        if start > len(self.data):
            raise GcsError(503, "A chunk must begin where the last one ended.")
        self.data += body[len(self.data) - start :]
        return is_last


def _check_generation(query: Mapping[str, str], stored: StoredObject | None) -> None:
    """Refuse a request whose ``ifGenerationMatch`` does not hold; 0 means that the object must not exist."""
    wanted = query.get("ifGenerationMatch")
    if wanted is not None and parse_unsigned(wanted) != (0 if stored is None else int(stored.tag)):
        raise GcsError(412, "At least one of the pre-conditions you specified did not hold.")


_REASONS = {
    400: "invalid",
    401: "authError",
    403: "forbidden",
    404: "notFound",
    409: "conflict",
    412: "conditionNotMet",
    416: "requestedRangeNotSatisfiable",
    429: "rateLimitExceeded",
    500: "backendError",
    501: "notImplemented",
    503: "backendError",
}


class GcsError(Exception):
    """A GCS error response."""

    def __init__(self, status: int, message: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})

    def response(self) -> web.Response:
        """Return the response in Google's JSON format."""
        reason = _REASONS[self.status]
        details = [{"domain": "global", "reason": reason, "message": str(self)}]
        error = {"code": self.status, "message": str(self), "errors": details}
        return web.json_response({"error": error}, status=self.status, headers=self.headers)


def parse_unsigned(text: str) -> int:
    """Parse a parameter as an unsigned integer; raise a 400 :class:`GcsError` if it is not one."""
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
        raise GcsError(400, f"Invalid unsigned integer value: {text!r}.")
    return int(text)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse a request body as a JSON object; raise a 400 :class:`GcsError` if it is not one."""
    try:
        value = json.loads(body)
    except ValueError as error:
        raise GcsError(400, "Parse Error") from error
    if not isinstance(value, dict):
        raise GcsError(400, "Parse Error")
    return value


def split_upload(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """Split a ``multipart/related`` body into the object's resource and its bytes (RFC 2387)."""
    header = BytesParser(policy=HTTP).parsebytes(f"Content-Type: {content_type}\r\n\r\n".encode("utf-8", "replace"))
    boundary = header.get_boundary()
    if not boundary:
        raise GcsError(400, "A multipart upload needs a boundary.")
    mark = b"\r\n--" + boundary.encode()
    parts = (b"\r\n" + body).split(mark, 2)
    if len(parts) != 3 or not (end := parts[2].rfind(mark)) > 0:
        raise GcsError(400, "A multipart upload has two parts: the resource and the bytes.")
    _, _, resource = parts[1].partition(b"\r\n\r\n")
    head, _, media = parts[2][:end].partition(b"\r\n\r\n")
    parsed = parse_json_object(resource)
    if sent_type := BytesParser(policy=HTTP).parsebytes(head.lstrip() + b"\r\n\r\n")["Content-Type"]:
        parsed.setdefault("contentType", str(sent_type))
    return parsed, media


def crc32c_base64(stored: StoredObject) -> str:
    """Return the object's CRC-32C in GCS's format: big-endian, base64."""
    return base64.b64encode(crc32c(stored.data).to_bytes(4, "big")).decode()


def generation_etag(stored: StoredObject) -> str:
    """Return the object's ETag; as in GCS, it is not a digest of the bytes."""
    return base64.b64encode(stored.tag.encode()).decode()


def object_resource(bucket: str, key: str, stored: StoredObject) -> dict[str, Any]:
    """Return the object's metadata as JSON."""
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{key}/{stored.tag}",
        "name": key,
        "bucket": bucket,
        "generation": stored.tag,
        "metageneration": "1",
        "contentType": stored.headers["content-type"],
        "size": str(len(stored.data)),
        "crc32c": crc32c_base64(stored),
        "etag": generation_etag(stored),
        "timeCreated": iso_time(stored.modified_at),
        "updated": iso_time(stored.modified_at),
    }


@contextmanager
def running_gcs(config: GcsConfig | None = None) -> Iterator[LocalGcs]:
    """Run a local GCS in a separate thread, for synchronous code.

    Args:
        config: configuration of the server; default ``GcsConfig()``.

    Example:
        >>> with running_gcs() as gcs:
        ...     sorted(gcs.buckets)
        ['stoker']
    """
    with running_server(lambda: LocalGcs(config)) as gcs:
        yield gcs
