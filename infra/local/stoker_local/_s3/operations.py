"""S3's operations on objects: read, write, delete."""

from __future__ import annotations

import hashlib
import re
from email.utils import formatdate

from stoker_local._http1 import Body, Request, Response
from stoker_local._objects import StoredObject
from stoker_local._ranges import UnsatisfiableRangeError, byte_range
from stoker_local._s3.conditions import Outcome, check_delete_condition, check_write_conditions, failed, read_outcome
from stoker_local._s3.errors import S3Error
from stoker_local._s3.listings import NULL_VERSION
from stoker_local._s3.model import Bucket, Call, element, parse_xml, xml_response
from stoker_local._s3.payload import decode_payload
from stoker_local._s3.tagging import tags_of_header

__all__ = ["delete_object", "delete_objects", "etag_of", "get_object", "object_headers", "put_object"]

_KEPT_HEADERS = ("cache-control", "content-disposition", "content-language", "content-type", "expires")
_OVERRIDABLE = (*_KEPT_HEADERS, "content-encoding")
_MAX_KEYS = 1000
_PART_NUMBER = re.compile(r"[0-9]{1,5}", re.ASCII)


def etag_of(data: Body) -> str:
    """Return the ETag of an object that was put whole: its quoted MD5."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def object_headers(request: Request) -> dict[str, str]:
    """Return the headers of a write that reads give back."""
    kept = {n: v for n, v in request.headers.items() if n in _KEPT_HEADERS or n.startswith("x-amz-meta-")}
    codings = [c.strip() for c in request.headers.get("content-encoding", "").split(",")]
    if coding := ",".join(c for c in codings if c not in ("", "aws-chunked")):
        kept["content-encoding"] = coding
    return {"content-type": "binary/octet-stream", **kept}


def get_object(bucket: Bucket, call: Call, now: float) -> Response:
    """GetObject and HeadObject: whole, one range or one part, with conditions."""
    stored = bucket.stored_object(call.key)
    headers = {
        **stored.headers,
        "ETag": stored.tag,
        "Last-Modified": formatdate(stored.modified_at, usegmt=True),
        "Accept-Ranges": "bytes",
    }
    if stored.tags:
        headers["x-amz-tagging-count"] = str(len(stored.tags))
    match read_outcome(call.request.headers, stored):
        case Outcome.FAILED:
            raise failed("If-Match" if "if-match" in call.request.headers else "If-Unmodified-Since")
        case Outcome.NOT_MODIFIED:
            return Response(status=304, headers=headers)
    span = _span(call, stored)
    if call.request.query:
        headers |= _query_headers(call, stored)
    if span is None:
        return Response(headers=headers, body=stored.data)
    headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{len(stored.data)}"
    return Response(status=206, headers=headers, body=memoryview(stored.data)[span[0] : span[1]])


def _span(call: Call, stored: StoredObject) -> tuple[int, int] | None:
    """Return the half-open range that is asked for, by ``Range`` or ``partNumber``; None is the whole object."""
    header, number = call.request.headers.get("range"), call.request.parameters.get("partNumber")
    if number is not None:
        if header is not None:
            raise S3Error("InvalidRequest", "Cannot specify both Range header and partNumber query parameter")
        return _part_span(number, stored)
    size = len(stored.data)
    try:
        return None if header is None else byte_range(header, size)
    except UnsatisfiableRangeError as error:
        raise S3Error(
            "InvalidRange",
            "The requested range is not satisfiable",
            elements={"RangeRequested": header or "", "ActualObjectSize": str(size)},
            headers={"Content-Range": error.content_range},
        ) from error


def _part_span(number: str, stored: StoredObject) -> tuple[int, int] | None:
    """Return the range of a part as it was uploaded; an object that was put whole is its own only part."""
    sizes = stored.part_bytes or (len(stored.data),)
    if not _PART_NUMBER.fullmatch(number) or int(number) < 1:
        raise S3Error("InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive")
    if int(number) > len(sizes):
        raise S3Error("InvalidPartNumber", "The requested partnumber is not satisfiable")
    start = sum(sizes[: int(number) - 1])
    return (start, start + sizes[int(number) - 1]) if stored.data else None


def _query_headers(call: Call, stored: StoredObject) -> dict[str, str]:
    """Return the headers that parameters ask for: ``response-content-type=…`` and its like, and the number of parts."""
    query = call.request.parameters
    headers = {n: query[f"response-{n}"] for n in _OVERRIDABLE if f"response-{n}" in query}
    if any(not value.isascii() or not value.isprintable() for value in headers.values()):  # it could end the header
        raise S3Error("InvalidArgument", "A response header override holds characters that a header cannot hold.")
    if headers and "authorization" not in call.request.headers and "X-Amz-Signature" not in query:
        raise S3Error("InvalidRequest", "Request specific response headers cannot be used for anonymous GET requests.")
    if "partNumber" in query and stored.part_bytes:
        headers["x-amz-mp-parts-count"] = str(len(stored.part_bytes))
    return headers


def put_object(bucket: Bucket, call: Call, now: float) -> Response:
    """PutObject: whole, atomic, visible at once."""
    data = decode_payload(call.request, call.body)
    tags = tags_of_header(call.request.headers.get("x-amz-tagging", ""))
    check_write_conditions(bucket, call)
    stored = StoredObject(
        data=memoryview(data).toreadonly(),
        tag=etag_of(data),
        modified_at=now,
        headers=object_headers(call.request),
        tags=tags,
    )
    bucket.objects[call.key] = stored
    return Response(headers={"ETag": stored.tag})


def delete_object(bucket: Bucket, call: Call, now: float) -> Response:
    """DeleteObject: deleting what is not there succeeds, unless the request has a condition."""
    check_delete_condition(bucket, call.key, call.request.headers.get("if-match"))
    bucket.objects.pop(call.key, None)
    return Response(status=204)


def delete_objects(bucket: Bucket, call: Call, now: float) -> Response:
    """DeleteObjects: up to 1,000 keys, each with its own condition and outcome."""
    request = parse_xml(decode_payload(call.request, call.body))
    nodes = request.findall("Object")
    if not 0 < len(nodes) <= _MAX_KEYS or not all(node.findtext("Key") for node in nodes):
        raise S3Error("MalformedXML", f"DeleteObjects takes 1 to {_MAX_KEYS} keys.")
    quiet, parts = request.findtext("Quiet") == "true", []
    for node in nodes:
        key, version = node.findtext("Key") or "", node.findtext("VersionId")
        about = element("Key", key) + ("" if version is None else element("VersionId", version))
        try:
            if version not in (None, NULL_VERSION):
                raise S3Error("NoSuchVersion", "The specified version does not exist.")
            check_delete_condition(bucket, key, node.findtext("ETag"))
        except S3Error as error:
            parts.append(f"<Error>{about}{element('Code', error.code)}{element('Message', error.message)}</Error>")
            continue
        bucket.objects.pop(key, None)
        parts += [] if quiet else [f"<Deleted>{about}</Deleted>"]
    return xml_response("DeleteResult", "".join(parts))
