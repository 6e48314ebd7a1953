"""What GCS's JSON API says: its errors, its resources, its uploads. No I/O."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

from aiohttp import web

from stoker._base.checksum import crc32c
from stoker_local._objects import StoredObject
from stoker_local._ranges import UnsatisfiableRangeError, byte_range
from stoker_local._s3.model import iso_time

__all__ = [
    "GcsError",
    "byte_span",
    "checksum_of",
    "etag_of",
    "integer",
    "json_object",
    "resource_of",
    "split_upload",
]

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
    """A request that GCS refuses."""

    def __init__(self, status: int, message: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})

    def response(self) -> web.Response:
        """Return the answer in Google's JSON form."""
        reason = _REASONS[self.status]
        details = [{"domain": "global", "reason": reason, "message": str(self)}]
        error = {"code": self.status, "message": str(self), "errors": details}
        return web.json_response({"error": error}, status=self.status, headers=self.headers)


def integer(text: str) -> int:
    """Return a parameter's unsigned integer, or refuse the request."""
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
        raise GcsError(400, f"Invalid unsigned integer value: {text!r}.")
    return int(text)


def json_object(body: bytes) -> dict[str, Any]:
    """Return a request's JSON object, or refuse the request."""
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
    parsed = json_object(resource)
    if sent_type := BytesParser(policy=HTTP).parsebytes(head.lstrip() + b"\r\n\r\n")["Content-Type"]:
        parsed.setdefault("contentType", str(sent_type))
    return parsed, media


def byte_span(header: str, size_bytes: int) -> tuple[int, int] | None:
    """Return the half-open range that a Range header asks for, or None for all.

    Raises:
        GcsError: it holds no byte of the object.
    """
    try:
        return byte_range(header, size_bytes)
    except UnsatisfiableRangeError as error:
        headers = {"Content-Range": error.content_range}
        raise GcsError(416, "Request range not satisfiable", headers=headers) from error


def checksum_of(stored: StoredObject) -> str:
    """Return the object's CRC-32C as GCS writes it: big-endian, base64."""
    return base64.b64encode(crc32c(stored.data).to_bytes(4, "big")).decode()


def etag_of(stored: StoredObject) -> str:
    """Return the object's ETag, which like the cloud's is not a digest of its bytes."""
    return base64.b64encode(stored.tag.encode()).decode()


def resource_of(bucket: str, key: str, stored: StoredObject) -> dict[str, Any]:
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
        "crc32c": checksum_of(stored),
        "etag": etag_of(stored),
        "timeCreated": iso_time(stored.modified_at),
        "updated": iso_time(stored.modified_at),
    }
