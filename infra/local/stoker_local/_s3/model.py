"""Data model of the S3 server: buckets, calls, errors and XML; and stored objects, which the GCS server uses, too."""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from stoker_local._http1 import Body, ServerRequest, ServerResponse

_LAST_CHARACTER = chr(sys.maxunicode)
_RANGE = re.compile(r"bytes=(?:([0-9]{1,18})-([0-9]{1,18})?|-([0-9]{1,18}))", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """A stored object; immutable, since writes replace an object as a whole.

    Attributes:
        data: content; read-only, the buffer that received it.
        tag: version of the content: a quoted MD5 (S3) or a decimal generation (GCS).
        modified_at: time of the last write, in POSIX seconds.
        headers: response headers that are sent with the object (``Content-Type``, ``x-amz-meta-…``).
        tags: S3 object tags.
        part_bytes: sizes of the parts of a multipart upload, in bytes; empty if the object was uploaded in one request.
    """

    data: Body
    tag: str
    modified_at: float
    headers: dict[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    part_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectCreated:
    """An object that a request has created or replaced.

    Attributes:
        event: name of the event, such as ``ObjectCreated:Put``.
    """

    bucket: str
    key: str
    event: str
    stored: StoredObject


class ObjectMap(UserDict[str, StoredObject]):
    """A bucket's objects by key; :meth:`page` lists them in ascending order of UTF-8 bytes."""

    _sorted: list[str] | None = None

    def __setitem__(self, key: str, stored: StoredObject) -> None:
        if key not in self.data:
            self._sorted = None
        self.data[key] = stored

    def __delitem__(self, key: str) -> None:
        del self.data[key]
        self._sorted = None

    def page(self, *, prefix: str, delimiter: str = "", start: str = "", limit: int) -> ListingPage:
        """Return one page of the listing; see :func:`~stoker_local._s3.model.list_page`."""
        if self._sorted is None:
            self._sorted = sorted(self.data)
        return list_page(self._sorted, prefix=prefix, delimiter=delimiter, start=start, limit=limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingPage:
    """One page of a listing.

    Attributes:
        keys: keys in ascending order, as are the common ``prefixes``.
        next_start: name at which the next page starts, inclusive; None if this is the last page.
    """

    keys: tuple[str, ...]
    prefixes: tuple[str, ...]
    next_start: str | None


def list_page(
    sorted_keys: Sequence[str], *, prefix: str, delimiter: str = "", start: str = "", limit: int
) -> ListingPage:
    """Return at most ``limit`` keys and common prefixes at or after ``start`` (inclusive) under ``prefix``.

    Keys ascend by code point, which is the order of their UTF-8 bytes. Keys that agree up to the first ``delimiter``
    after the prefix count as one common prefix; its keys are skipped by bisection.
    """
    keys: list[str] = []
    prefixes: list[str] = []
    position = bisect_left(sorted_keys, max(start, prefix))
    while position < len(sorted_keys) and (key := sorted_keys[position]).startswith(prefix):
        if len(keys) + len(prefixes) == limit:
            return ListingPage(keys=tuple(keys), prefixes=tuple(prefixes), next_start=key if limit else None)
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        if cut < 0:
            keys.append(key)
            position += 1
        else:
            prefixes.append(key[: cut + len(delimiter)])
            position = bisect_left(sorted_keys, successor(prefixes[-1]), position)
    return ListingPage(keys=tuple(keys), prefixes=tuple(prefixes), next_start=None)


def successor(prefix: str) -> str:
    """Return the least string greater than every string that starts with ``prefix``."""
    stem = prefix.rstrip(_LAST_CHARACTER)
    if not stem:
        return _LAST_CHARACTER * (len(prefix) + 1024)
    code = ord(stem[-1]) + 1
    return stem[:-1] + chr(0xE000 if code == 0xD800 else code)


def parse_byte_range(header: str, size_bytes: int) -> tuple[int, int] | None:
    """Parse a ``Range`` header into a half-open range, clipped to the object; None means the whole object.

    ``a-b`` includes b, ``a-`` extends to the end, ``-n`` is the last n bytes. For a well-formed range that contains no
    byte of the object, start ≥ end: the response must be 416.
    """
    match = _RANGE.fullmatch(header.replace(" ", ""))
    if match is None:
        return None
    first, last, suffix = (None if digits is None else int(digits) for digits in match.groups())
    if suffix is not None:
        return max(0, size_bytes - suffix), size_bytes
    if last is not None and last < (first or 0):
        return None
    return first or 0, size_bytes if last is None else min(last + 1, size_bytes)


_STATUS_BY_CODE = {
    code: status
    for status, codes in {
        301: "PermanentRedirect",
        403: "AccessDenied InvalidAccessKeyId RequestTimeTooSkewed SignatureDoesNotMatch",
        404: "NoSuchBucket NoSuchKey NoSuchUpload NoSuchVersion",
        409: "BucketAlreadyOwnedByYou BucketNotEmpty",
        412: "PreconditionFailed",
        416: "InvalidPartNumber InvalidRange",
        500: "InternalError",
        501: "NotImplemented",
        503: "SlowDown",
    }.items()
    for code in codes.split()
}
"""Error code → HTTP status; all other errors have status 400."""
OWNER = "<Owner><ID>stoker</ID><DisplayName>stoker</DisplayName></Owner>"  # of every bucket and object
_REGION = re.compile(r"[a-z0-9-]{1,32}")
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class S3Error(Exception):
    """An S3 error response.

    Attributes:
        code: S3's error code, such as ``NoSuchKey``.
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

    def response(self, resource: str) -> ServerResponse:
        """Return the error as an HTTP response; ``resource`` is the request's path."""
        fields = {"Code": self.code, "Message": self.message, **self.elements, "Resource": resource}
        inner = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items())
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{inner}</Error>'
        headers = {"Content-Type": "application/xml", **self.headers}
        return ServerResponse(status=_STATUS_BY_CODE.get(self.code, 400), headers=headers, body=body.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """A bucket of a :class:`BucketConfig`.

    Attributes:
        name: name of the bucket: 3 to 63 of a-z, 0-9, '.' and '-'.
        region: region of the bucket; None is the endpoint's region.
        anonymous: whether unsigned requests may read the bucket.
        requester_pays: whether requests must carry ``x-amz-request-payer: requester``.
        ignores_conditions: whether writes ignore ``If-None-Match`` and ``If-Match``, as some S3-compatible stores do.

    Example:
        >>> BucketSpec(name="public", anonymous=True).region is None
        True
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


@dataclass(slots=True, kw_only=True)
class MultipartUpload:
    """A multipart upload in progress; ``parts`` maps part numbers to parts with their bytes, quoted MD5 and time."""

    key: str
    initiated_at: float
    headers: dict[str, str]
    tags: Mapping[str, str]
    parts: dict[int, StoredObject] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadCompletion:
    """A completed multipart upload, kept because S3 answers a repeated completion with the same success.

    Attributes:
        parts: number and unquoted ETag of each part, in the order of the request.
        tag: ETag of the completed object.
    """

    key: str
    parts: tuple[tuple[int, str], ...]
    tag: str


@dataclass(slots=True, kw_only=True)
class BucketState:
    """A bucket's contents: objects by key, and multipart uploads in progress and completed by upload id."""

    spec: BucketSpec
    region: str
    created_at: float
    objects: ObjectMap = field(default_factory=ObjectMap)
    uploads: dict[str, MultipartUpload] = field(default_factory=dict)
    completions: dict[str, UploadCompletion] = field(default_factory=dict)
    next_upload_number: int = 1

    def stored_object(self, key: str) -> StoredObject:
        """Return an object.

        Raises:
            S3Error: the bucket has no object with this key.
        """
        stored = self.objects.get(key)
        if stored is None:
            raise S3Error("NoSuchKey", "The specified key does not exist.", elements={"Key": key})
        return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Call:
    """One S3 operation that a client requests.

    Attributes:
        operation: name of the operation, such as ``GetObject``.
        bucket: name of the bucket; empty for ``ListBuckets``.
        key: key of the object; empty for operations on buckets.
        body: request body as received; aws-chunked encoding is not yet decoded.
    """

    operation: str
    bucket: str
    key: str
    request: ServerRequest
    body: Body = b""


def element(name: str, text: object) -> str:
    """Return one XML element with escaped text."""
    return f"<{name}>{escape(str(text))}</{name}>"


def xml_response(root: str, inner: str) -> ServerResponse:
    """Return a 200 response whose body is ``inner`` within the element ``root``, in S3's namespace."""
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<{root} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}</{root}>'
    )
    return ServerResponse(headers={"Content-Type": "application/xml"}, body=body.encode())


def parse_xml(body: Body) -> ElementTree.Element:
    """Parse a request's XML and remove the elements' namespaces.

    Raises:
        S3Error: the body is not XML, or contains a document type, which could define expanding entities.
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
    """Return a time in the format of S3's XML."""
    return datetime.fromtimestamp(posix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
