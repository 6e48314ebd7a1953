"""What S3's operations work on, and the XML they speak."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from stoker_local._http1 import Body, Request, Response
from stoker_local._objects import ObjectMap, StoredObject
from stoker_local._s3.errors import S3Error

__all__ = [
    "OWNER",
    "Bucket",
    "BucketSpec",
    "Call",
    "Completion",
    "CopySource",
    "Upload",
    "UploadedPart",
    "element",
    "iso_time",
    "parse_xml",
    "xml_response",
]

OWNER = "<Owner><ID>stoker</ID><DisplayName>stoker</DisplayName></Owner>"  # of every bucket and object

_REGION = re.compile(r"[a-z0-9-]{1,32}")
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


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
