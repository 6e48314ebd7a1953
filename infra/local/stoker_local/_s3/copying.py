"""S3's copies within the endpoint: CopyObject and UploadPartCopy."""

from __future__ import annotations

import re
from urllib.parse import unquote

from stoker_local._http1 import Body, Response
from stoker_local._objects import StoredObject
from stoker_local._s3.conditions import COPY_SOURCE_IF, Outcome, check_write_conditions, failed, read_outcome
from stoker_local._s3.errors import S3Error
from stoker_local._s3.listings import NULL_VERSION
from stoker_local._s3.model import Bucket, Call, CopySource, UploadedPart, element, iso_time, xml_response
from stoker_local._s3.multipart import open_upload, part_number
from stoker_local._s3.operations import etag_of, object_headers
from stoker_local._s3.tagging import tags_of_header

__all__ = ["COPY_SOURCE", "copy_object", "parse_copy_source", "upload_part_copy"]

COPY_SOURCE = "x-amz-copy-source"
_DIRECTIVES = ("COPY", "REPLACE")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})", re.ASCII)


def parse_copy_source(header: str) -> tuple[str, str]:
    """Return the bucket and the key that an ``x-amz-copy-source`` names: ``[/]bucket/key[?versionId=null]``, encoded.

    Raises:
        S3Error: it is malformed, or names a version.
    """
    path, _, query = header.partition("?")
    try:
        bucket, _, key = unquote(path, errors="strict").removeprefix("/").partition("/")
    except UnicodeDecodeError as error:
        raise S3Error("InvalidArgument", "Invalid copy source encoding") from error
    if not bucket or not key:
        message = "Copy Source must mention the source bucket and key: sourcebucket/sourcekey"
        raise S3Error("InvalidArgument", message, elements={"ArgumentName": COPY_SOURCE, "ArgumentValue": header})
    if query and query != f"versionId={NULL_VERSION}":
        raise S3Error("NoSuchVersion", "The specified version does not exist.", elements={"Key": key})
    return bucket, key


def copy_object(bucket: Bucket, call: Call, source: CopySource, now: float) -> Response:
    """CopyObject: metadata and tags are the source's, or, where their directive is ``REPLACE``, the request's."""
    headers = call.request.headers
    replaces_metadata = _directive(call, "metadata") == "REPLACE"
    replaces_tags = _directive(call, "tagging") == "REPLACE"
    if (source.bucket, source.key) == (call.bucket, call.key) and not replaces_metadata:
        raise S3Error(
            "InvalidRequest",
            "This copy request is illegal because it is trying to copy an object to itself without changing the "
            "object's metadata, storage class, website redirect location or encryption attributes.",
        )
    _check_source_conditions(call, source)
    check_write_conditions(bucket, call)
    copied = StoredObject(
        data=source.stored.data,
        tag=etag_of(source.stored.data) if source.stored.part_bytes else source.stored.tag,
        modified_at=now,
        headers=object_headers(call.request) if replaces_metadata else source.stored.headers,
        tags=tags_of_header(headers.get("x-amz-tagging", "")) if replaces_tags else source.stored.tags,
    )
    bucket.objects[call.key] = copied
    return _copy_response("CopyObjectResult", copied.tag, now)


def upload_part_copy(bucket: Bucket, call: Call, source: CopySource, now: float) -> Response:
    """UploadPartCopy: a part that is an object, or a range of one."""
    upload, number = open_upload(bucket, call), part_number(call)
    _check_source_conditions(call, source)
    data = _copied_bytes(call.request.headers.get(f"{COPY_SOURCE}-range"), source.stored.data)
    part = UploadedPart(data=data, tag=etag_of(data), modified_at=now)
    upload.parts[number] = part
    return _copy_response("CopyPartResult", part.tag, now)


def _directive(call: Call, what: str) -> str:
    directive = call.request.headers.get(f"x-amz-{what}-directive", "COPY")
    if directive not in _DIRECTIVES:
        raise S3Error("InvalidArgument", f"Unknown {what} directive.")
    return directive


def _check_source_conditions(call: Call, source: CopySource) -> None:
    headers = call.request.headers
    outcome = read_outcome(headers, source.stored, prefix=COPY_SOURCE_IF)
    if outcome is not Outcome.HOLD:  # a copy has no 304
        raise failed(next(name for name in headers if name.startswith(COPY_SOURCE_IF)))


def _copied_bytes(header: str | None, data: Body) -> Body:
    """Return the range of ``data`` to copy; unlike a read's range, it is never cut to the object."""
    if header is None:
        return data
    match = _RANGE.fullmatch(header)
    if match is None:
        message = (
            f"The {COPY_SOURCE}-range value must be of the form bytes=first-last where first and last are the "
            "zero-based offsets of the first and last bytes to copy"
        )
        raise S3Error("InvalidArgument", message, elements={"ArgumentValue": header})
    first, last = int(match[1]), int(match[2])
    if not first <= last < len(data):
        message = f"Range specified is not valid for source object of size: {len(data)}"
        raise S3Error("InvalidArgument", message, elements={"ArgumentValue": header})
    return memoryview(data)[first : last + 1]


def _copy_response(root: str, tag: str, now: float) -> Response:
    return xml_response(root, element("LastModified", iso_time(now)) + element("ETag", tag))
