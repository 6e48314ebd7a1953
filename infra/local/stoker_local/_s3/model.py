"""What S3's operations work on: buckets, calls, errors, the XML they speak, and the bytes that clients send."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from stoker._base.checksum import crc32c
from stoker_local._http1 import Body, Request, Response
from stoker_local._objects import ObjectMap, StoredObject

__all__ = [
    "OWNER",
    "Bucket",
    "BucketSpec",
    "Call",
    "Completion",
    "CopySource",
    "S3Error",
    "Upload",
    "UploadedPart",
    "decode_payload",
    "element",
    "iso_time",
    "parse_xml",
    "xml_response",
]

_STATUS = {
    "AccessDenied": 403,
    "BucketAlreadyExists": 409,
    "BucketAlreadyOwnedByYou": 409,
    "BucketNotEmpty": 409,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidPartNumber": 416,
    "InvalidRange": 416,
    "MethodNotAllowed": 405,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "NoSuchVersion": 404,
    "NotImplemented": 501,
    "PermanentRedirect": 301,
    "PreconditionFailed": 412,
    "RequestTimeTooSkewed": 403,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
}
"""Of the errors that are not answered 400."""
OWNER = "<Owner><ID>stoker</ID><DisplayName>stoker</DisplayName></Owner>"  # of every bucket and object
_REGION = re.compile(r"[a-z0-9-]{1,32}")
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_UNSIGNED = ("UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER")
_MAX_CHUNK_HEAD_BYTES = 1024
_CHECKSUMS: dict[str, Callable[[Body], bytes]] = {
    "x-amz-checksum-crc32": lambda data: zlib.crc32(data).to_bytes(4, "big"),
    "x-amz-checksum-crc32c": lambda data: crc32c(data).to_bytes(4, "big"),
    "x-amz-checksum-sha1": lambda data: hashlib.sha1(data, usedforsecurity=False).digest(),
    "x-amz-checksum-sha256": lambda data: hashlib.sha256(data).digest(),
    "content-md5": lambda data: hashlib.md5(data, usedforsecurity=False).digest(),
}


class S3Error(Exception):
    """A request that S3 refuses.

    Attributes:
        code: S3's name of the error.
        elements: further XML elements, such as ``Region``.
        headers: further response headers.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        elements: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.elements = elements or {}
        self.headers = headers or {}

    def response(self, resource: str) -> Response:
        """Return the answer that S3 gives; ``resource`` is the path that was asked for."""
        fields = {"Code": self.code, "Message": self.message, **self.elements, "Resource": resource}
        inner = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items())
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{inner}</Error>'
        headers = {"Content-Type": "application/xml", **self.headers}
        return Response(status=_STATUS.get(self.code, 400), headers=headers, body=body.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """A bucket and who may read it.

    Attributes:
        region: where it lives; None is where the server is.
        anonymous: unsigned requests may read it.
        requester_pays: requests must say ``x-amz-request-payer: requester``.
        ignores_conditions: writes heed neither ``If-None-Match`` nor ``If-Match``, as in stores that lack them.
    """

    name: str
    region: str | None = None
    anonymous: bool = False
    requester_pays: bool = False
    ignores_conditions: bool = False

    def __post_init__(self) -> None:
        if not _BUCKET_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a bucket name: 3 to 63 of a-z, 0-9, '.' and '-'")
        if self.region and not _REGION.fullmatch(self.region):  # it is sent as a header
            raise ValueError(f"{self.region!r} is not a region: up to 32 of a-z, 0-9 and '-'")


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedPart:
    """A part of an upload; ``tag`` is its quoted MD5."""

    data: Body
    tag: str
    modified_at: float


@dataclass(slots=True, kw_only=True)
class Upload:
    """A multipart upload in progress: its parts by number."""

    key: str
    initiated_at: float
    headers: dict[str, str]
    tags: Mapping[str, str]
    parts: dict[int, UploadedPart] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A multipart upload that was completed: S3 answers the same completion again with the same success.

    Attributes:
        parts: number and ETag, without quotes, of each part that the request named, in order.
        tag: the ETag of the object that it made.
    """

    key: str
    parts: tuple[tuple[int, str], ...]
    tag: str


@dataclass(slots=True, kw_only=True)
class Bucket:
    """A bucket's contents; ``uploads`` and ``completions`` are by upload id."""

    spec: BucketSpec
    region: str
    created_at: float
    objects: ObjectMap = field(default_factory=ObjectMap)
    uploads: dict[str, Upload] = field(default_factory=dict)
    completions: dict[str, Completion] = field(default_factory=dict)
    next_upload: int = 1

    def stored_object(self, key: str) -> StoredObject:
        """Return an object.

        Raises:
            S3Error: there is none under ``key``.
        """
        stored = self.objects.get(key)
        if stored is None:
            raise S3Error("NoSuchKey", "The specified key does not exist.", elements={"Key": key})
        return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operation that a client asks for.

    Attributes:
        operation: S3's name of it.
        bucket: the bucket's name; empty for ``ListBuckets``.
        key: the object's; empty for operations on buckets.
        body: what follows the head, still aws-chunked if it was sent so.
    """

    operation: str
    bucket: str
    key: str
    request: Request
    body: Body = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySource:
    """The object that a copy reads: its place, and its state when the copy was asked for."""

    bucket: str
    key: str
    stored: StoredObject


def element(name: str, text: object) -> str:
    """Return one XML element with escaped text."""
    return f"<{name}>{escape(str(text))}</{name}>"


def xml_response(root: str, inner: str) -> Response:
    """Return a 200 whose body is ``inner`` within ``root``, in S3's namespace."""
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<{root} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}</{root}>'
    )
    return Response(headers={"Content-Type": "application/xml"}, body=body.encode())


def parse_xml(body: Body) -> ElementTree.Element:
    """Parse a request's XML; its elements lose their namespace.

    Raises:
        S3Error: it is not XML, or holds a document type (which could define expanding entities).
    """
    try:
        text = bytes(body).decode("utf-8")
        if "<!DOCTYPE" in text:
            raise S3Error("MalformedXML", "Document types are not accepted.")
        root = ElementTree.fromstring(text)  # noqa: S314  (no document type, so no entities to expand)
    except (ElementTree.ParseError, ValueError) as error:
        raise S3Error("MalformedXML", "The XML you provided was not well-formed.") from error
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
    return root


def iso_time(posix_seconds: float) -> str:
    """Return a time as S3 writes it in XML."""
    return datetime.fromtimestamp(posix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def decode_payload(request: Request, body: Body) -> Body:
    """Return the object's bytes that ``body`` carries; not aws-chunked, it is returned as it is.

    The checksums that the client announced are verified, in headers or in the trailer (CRC-64/NVME excepted, which
    is taken on trust). Chunk signatures are not implemented.

    Raises:
        S3Error: the coding is malformed, or a length or a digest does not match.
    """
    declared = request.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
    digests: Mapping[str, str] = request.headers
    if declared.startswith("STREAMING-AWS4"):
        raise S3Error("NotImplemented", "Signed chunks are not implemented; send an unsigned trailer instead.")
    if declared.startswith("STREAMING-") or "aws-chunked" in request.headers.get("content-encoding", ""):
        body, trailer = _decode_chunks(body)
        digests = {**request.headers, **trailer}
        if request.headers.get("x-amz-decoded-content-length", str(len(body))) != str(len(body)):
            raise S3Error("InvalidRequest", "The body is not as long as x-amz-decoded-content-length says.")
    elif declared not in _UNSIGNED and hashlib.sha256(body).hexdigest() != declared:
        raise S3Error("XAmzContentSHA256Mismatch", "The provided x-amz-content-sha256 is not the body's.")
    _verify_digests(digests, body)
    return body


def _verify_digests(digests: Mapping[str, str], body: Body) -> None:
    for name, digest in _CHECKSUMS.items():
        if name not in digests:
            continue
        try:
            sent = base64.b64decode(digests[name], validate=True)
        except (binascii.Error, ValueError):
            sent = b""
        expected = digest(body)
        if len(sent) != len(expected):
            raise S3Error("InvalidDigest", f"The {name} you specified is not valid.")
        if sent != expected:
            raise S3Error("BadDigest", f"The {name} you specified did not match what we received.")


def _decode_chunks(body: Body) -> tuple[Body, dict[str, str]]:
    """Undo ``size[;extension]CRLF data CRLF … 0 CRLF [name:value CRLF]… CRLF``; one chunk is decoded without a copy."""
    view = memoryview(body)
    chunks: list[memoryview] = []
    position = 0
    while True:
        line, position = _line(body, position)
        digits = line.partition(b";")[0]
        if not 0 < len(digits) <= 15 or digits.strip(b"0123456789abcdefABCDEF"):
            raise S3Error("InvalidRequest", "The aws-chunked body is malformed: bad chunk size.")
        size = int(digits, 16)
        if size == 0:
            break
        chunks.append(view[position : position + size])
        position += size
        if bytes(view[position : position + 2]) != b"\r\n":
            raise S3Error("InvalidRequest", "The aws-chunked body is malformed: a chunk has a wrong length.")
        position += 2
    return (chunks[0] if len(chunks) == 1 else b"".join(chunks)), _trailer(body, position)


def _trailer(body: Body, position: int) -> dict[str, str]:
    trailer: dict[str, str] = {}
    while position < len(body):
        line, position = _line(body, position)
        if not line:
            break
        name, _, value = line.decode("latin-1").partition(":")
        trailer[name.strip().lower()] = value.strip()
    return trailer


def _line(body: Body, position: int) -> tuple[bytes, int]:
    head = bytes(memoryview(body)[position : position + _MAX_CHUNK_HEAD_BYTES])
    end = head.find(b"\r\n")
    if end < 0:
        raise S3Error("InvalidRequest", "The aws-chunked body is malformed: a line has no end.")
    return head[:end], position + end + 2
