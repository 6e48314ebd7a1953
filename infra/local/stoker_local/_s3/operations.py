"""S3's operations on objects and their tags, with preconditions, and its three listings of a bucket.

Source of the preconditions: the S3 API reference, which refers to RFC 7232 (now RFC 9110, section 13): a comparison of
ETags takes precedence over the comparison of times of the same kind. Times are compared in whole seconds, as
``Last-Modified`` states them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC
from email.utils import formatdate, parsedate_to_datetime
from http import HTTPStatus
from urllib.parse import quote

from stoker_local._http1 import Body, ServerRequest, ServerResponse, parse_query
from stoker_local._s3.model import (
    OWNER,
    BucketState,
    ListingPage,
    S3Call,
    S3Error,
    StoredObject,
    element,
    iso_time,
    parse_byte_range,
    parse_xml,
    successor,
    xml_response,
)
from stoker_local._s3.signature import decode_payload

COPY_SOURCE_IF = "x-amz-copy-source-if-"
_MAX_TAGS = 10
_MAX_NAME_CHARACTERS = 128
_MAX_VALUE_CHARACTERS = 256
_STORED_HEADERS = ("cache-control", "content-disposition", "content-language", "content-type", "expires")
_OVERRIDABLE = (*_STORED_HEADERS, "content-encoding")
_MAX_KEYS = 1000
_PART_NUMBER = re.compile(r"[0-9]{1,5}", re.ASCII)


def evaluate_read_conditions(headers: Mapping[str, str], stored: StoredObject, *, prefix: str = "if-") -> HTTPStatus:
    """Evaluate a read's conditions: 200 if they hold, 304 if the client has this version, otherwise 412.

    ``prefix`` is ``COPY_SOURCE_IF`` for the conditions on the source of a copy.

    ``…match`` takes precedence over ``…unmodified-since``, and ``…none-match`` over ``…modified-since``. A time that is
    not a valid HTTP date is ignored (RFC 9110, section 13.1.3).
    """
    modified_at = int(stored.modified_at)
    if (tags := headers.get(prefix + "match")) is not None:
        if not _matches(tags, stored.tag):
            return HTTPStatus.PRECONDITION_FAILED
    elif (time := _parse_http_date(headers.get(prefix + "unmodified-since"))) is not None and modified_at > time:
        return HTTPStatus.PRECONDITION_FAILED
    if (tags := headers.get(prefix + "none-match")) is not None:
        if _matches(tags, stored.tag):
            return HTTPStatus.NOT_MODIFIED
    elif (time := _parse_http_date(headers.get(prefix + "modified-since"))) is not None and modified_at <= time:
        return HTTPStatus.NOT_MODIFIED
    return HTTPStatus.OK


def check_write_conditions(bucket: BucketState, call: S3Call) -> None:
    """Check ``If-None-Match: *`` and ``If-Match`` of a write, unless the bucket ignores conditions.

    Raises:
        S3Error: a condition does not hold, or S3 does not implement it: ``If-None-Match`` with an ETag, or both.
    """
    headers = call.request.headers
    if bucket.spec.ignores_conditions:
        return
    absent = headers.get("if-none-match")
    if absent is not None:
        if absent != "*" or "if-match" in headers:
            message = "A header you provided implies functionality that is not implemented"
            raise S3Error("NotImplemented", message, elements={"Header": "If-None-Match"})
        if call.key in bucket.objects:
            raise precondition_error("If-None-Match")
    check_delete_condition(bucket, call.key, headers.get("if-match"))


def check_delete_condition(bucket: BucketState, key: str, tag: str | None) -> None:
    """Check that an object has the ETag ``tag`` before it is replaced or deleted; ``*`` only requires it to exist.

    Raises:
        S3Error: the object does not exist or has another ETag.
    """
    if tag is None:
        return
    if not _matches(tag, bucket.stored_object(key).tag):
        raise precondition_error("If-Match")


def precondition_error(condition: str) -> S3Error:
    """Return the error for a condition that does not hold; ``condition`` is the name of its header."""
    message = "At least one of the pre-conditions you specified did not hold"
    return S3Error("PreconditionFailed", message, elements={"Condition": condition})


def _matches(condition: str, tag: str) -> bool:
    tags = [part.strip().removeprefix("W/") for part in condition.split(",")]
    return "*" in tags or tag in tags or tag.strip('"') in tags


def _parse_http_date(date: str | None) -> int | None:
    if date is None:
        return None
    try:
        parsed = parsedate_to_datetime(date)
        return int((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        return None


def parse_tag_header(header: str) -> Mapping[str, str]:
    """Parse the tags in an ``x-amz-tagging`` header, which are encoded like a query.

    Raises:
        S3Error: the header is malformed, or S3 does not allow the tags.
    """
    try:
        pairs = parse_query(header)
    except UnicodeDecodeError as error:
        raise S3Error(
            "InvalidArgument", "The header 'x-amz-tagging' shall be encoded as UTF-8 then URLEncoded."
        ) from error
    return _validate_tags(pairs)


def get_tags(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """GetObjectTagging."""
    tags = bucket.stored_object(call.key).tags
    elements = (f"<Tag>{element('Key', name)}{element('Value', value)}</Tag>" for name, value in sorted(tags.items()))
    return xml_response("Tagging", f"<TagSet>{''.join(elements)}</TagSet>")


def put_tags(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """PutObjectTagging: replaces all tags."""
    stored = bucket.stored_object(call.key)
    nodes = parse_xml(decode_payload(call.request, call.body)).findall("TagSet/Tag")
    tags = _validate_tags(tuple((node.findtext("Key") or "", node.findtext("Value") or "") for node in nodes))
    bucket.objects[call.key] = replace(stored, tags=tags)
    return ServerResponse()


def delete_tags(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """DeleteObjectTagging."""
    bucket.objects[call.key] = replace(bucket.stored_object(call.key), tags={})
    return ServerResponse(status=204)


def _validate_tags(pairs: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    tags = dict(pairs)
    if len(pairs) > _MAX_TAGS:
        raise S3Error("BadRequest", f"Object tags cannot be greater than {_MAX_TAGS}")
    if len(tags) < len(pairs):
        raise S3Error("InvalidTag", "Cannot provide multiple Tags with the same key")
    if any(not 0 < len(name) <= _MAX_NAME_CHARACTERS for name in tags):
        raise S3Error("InvalidTag", "The TagKey you have provided is invalid")
    if any(len(value) > _MAX_VALUE_CHARACTERS for value in tags.values()):
        raise S3Error("InvalidTag", "The TagValue you have provided is invalid")
    return tags


def md5_etag(data: Body) -> str:
    """Return the ETag of an object that was uploaded in one request: its quoted MD5."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def object_headers(request: ServerRequest) -> dict[str, str]:
    """Return the headers of a write that are stored with the object and returned by reads."""
    headers = {n: v for n, v in request.headers.items() if n in _STORED_HEADERS or n.startswith("x-amz-meta-")}
    codings = [c.strip() for c in request.headers.get("content-encoding", "").split(",")]
    if coding := ",".join(c for c in codings if c not in ("", "aws-chunked")):
        headers["content-encoding"] = coding
    return {"content-type": "binary/octet-stream", **headers}


def get_object(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """GetObject and HeadObject: the whole object, one range or one part, with conditions."""
    stored = bucket.stored_object(call.key)
    headers = {
        **stored.headers,
        "ETag": stored.tag,
        "Last-Modified": formatdate(stored.modified_at, usegmt=True),
        "Accept-Ranges": "bytes",
    }
    if stored.tags:
        headers["x-amz-tagging-count"] = str(len(stored.tags))
    match evaluate_read_conditions(call.request.headers, stored):
        case HTTPStatus.PRECONDITION_FAILED:
            raise precondition_error("If-Match" if "if-match" in call.request.headers else "If-Unmodified-Since")
        case HTTPStatus.NOT_MODIFIED:
            return ServerResponse(status=304, headers=headers)
    span = _requested_range(call, stored)
    if call.request.query:
        headers |= _query_headers(call, stored)
    if span is None:
        return ServerResponse(headers=headers, body=stored.data)
    headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{len(stored.data)}"
    return ServerResponse(status=206, headers=headers, body=memoryview(stored.data)[span[0] : span[1]])


def _requested_range(call: S3Call, stored: StoredObject) -> tuple[int, int] | None:
    """Return the half-open range that ``Range`` or ``partNumber`` requests; None is the whole object."""
    header = call.request.headers.get("range")
    number = call.request.parameters.get("partNumber")
    if number is not None:
        if header is not None:
            raise S3Error("InvalidRequest", "Cannot specify both Range header and partNumber query parameter")
        return _part_range(number, stored)
    size = len(stored.data)
    span = parse_byte_range(header or "", size)
    if span is not None and span[0] >= span[1]:
        raise S3Error(
            "InvalidRange",
            "The requested range is not satisfiable",
            elements={"RangeRequested": header or "", "ActualObjectSize": str(size)},
            headers={"Content-Range": f"bytes */{size}"},
        )
    return span


def _part_range(number: str, stored: StoredObject) -> tuple[int, int] | None:
    """Return the range of a part of the upload; an object that was uploaded in one request has one part."""
    sizes = stored.part_bytes or (len(stored.data),)
    if not _PART_NUMBER.fullmatch(number) or int(number) < 1:
        raise S3Error("InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive")
    if int(number) > len(sizes):
        raise S3Error("InvalidPartNumber", "The requested partnumber is not satisfiable")
    start = sum(sizes[: int(number) - 1])
    return (start, start + sizes[int(number) - 1]) if stored.data else None


def _query_headers(call: S3Call, stored: StoredObject) -> dict[str, str]:
    """Return the headers that the query requests: overrides (``response-content-type=…``) and the number of parts."""
    query = call.request.parameters
    headers = {n: query[f"response-{n}"] for n in _OVERRIDABLE if f"response-{n}" in query}
    if any(not value.isascii() or not value.isprintable() for value in headers.values()):  # it could end the header
        raise S3Error("InvalidArgument", "A response header override holds characters that a header cannot hold.")
    if headers and "authorization" not in call.request.headers and "X-Amz-Signature" not in query:
        raise S3Error("InvalidRequest", "Request specific response headers cannot be used for anonymous GET requests.")
    if "partNumber" in query and stored.part_bytes:
        headers["x-amz-mp-parts-count"] = str(len(stored.part_bytes))
    return headers


def put_object(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """PutObject: replaces the object atomically; it is visible at once."""
    data = decode_payload(call.request, call.body)
    tags = parse_tag_header(call.request.headers.get("x-amz-tagging", ""))
    check_write_conditions(bucket, call)
    stored = StoredObject(
        data=memoryview(data).toreadonly(),
        tag=md5_etag(data),
        modified_at=now,
        headers=object_headers(call.request),
        tags=tags,
    )
    bucket.objects[call.key] = stored
    return ServerResponse(headers={"ETag": stored.tag})


def delete_object(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """DeleteObject: succeeds if the object does not exist, unless the request has a condition."""
    check_delete_condition(bucket, call.key, call.request.headers.get("if-match"))
    bucket.objects.pop(call.key, None)
    return ServerResponse(status=204)


def delete_objects(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """DeleteObjects: deletes up to 1,000 keys, each with its own condition and result."""
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


NULL_VERSION = "null"  # version id of every object in a bucket without versioning

ElementWriter = Callable[[str, str], str]


def list_objects_v2(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """ListObjectsV2: returns one page; its continuation token encodes the key at which the next page starts."""
    query = call.request.parameters
    token, start_after = query.get("continuation-token"), query.get("start-after", "")
    # The smallest string greater than `start_after` is `start_after` plus NUL; an empty one precedes every key.
    start = _decode_token(token) if token is not None else start_after and start_after + "\0"
    page, parts = _listing_page(bucket, query, start)
    coded = key_element_writer(query)
    parts += [coded("StartAfter", start_after)] if start_after else []
    parts += [element("ContinuationToken", token)] if token is not None else []
    parts.append(element("KeyCount", len(page.keys) + len(page.prefixes)))
    if page.next_start is not None:
        parts.append(element("NextContinuationToken", _encode_token(page.next_start)))
    owner = OWNER if query.get("fetch-owner") == "true" else ""
    parts += [f"<Contents>{_object_elements(bucket, key, coded)}{owner}</Contents>" for key in page.keys]
    return xml_response("ListBucketResult", "".join(parts + _common_prefixes(page, coded)))


def list_objects(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """ListObjects (version 1): returns one page of the keys after ``marker``."""
    query = call.request.parameters
    marker, coded = query.get("marker", ""), key_element_writer(query)
    page, parts = _listing_page(bucket, query, _start_after(marker, query))
    parts.append(coded("Marker", marker))
    if page.next_start is not None and query.get("delimiter"):  # otherwise it equals the last key, and S3 omits it
        parts.append(coded("NextMarker", _last_name(page)))
    parts += [f"<Contents>{_object_elements(bucket, key, coded)}{OWNER}</Contents>" for key in page.keys]
    return xml_response("ListBucketResult", "".join(parts + _common_prefixes(page, coded)))


def list_object_versions(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """ListObjectVersions: returns one page of a bucket without versioning; each object has one version, ``null``."""
    query = call.request.parameters
    marker = query.get("key-marker", "")
    version = query.get("version-id-marker", "")
    coded = key_element_writer(query)
    if version and not marker:
        raise S3Error("InvalidArgument", "A version-id marker cannot be specified without a key marker.")
    page, parts = _listing_page(bucket, query, _start_after(marker, query))
    parts += [coded("KeyMarker", marker), element("VersionIdMarker", version)]
    if page.next_start is not None:
        last = _last_name(page)
        parts.append(coded("NextKeyMarker", last))
        parts += [element("NextVersionIdMarker", NULL_VERSION)] if last in page.keys else []
    about = element("VersionId", NULL_VERSION) + element("IsLatest", "true") + OWNER
    parts += [f"<Version>{_object_elements(bucket, key, coded)}{about}</Version>" for key in page.keys]
    return xml_response("ListVersionsResult", "".join(parts + _common_prefixes(page, coded)))


def key_element_writer(query: dict[str, str]) -> ElementWriter:
    """Return the function that writes XML elements with keys, percent-encoded if the request sets ``encoding-type``.

    Raises:
        S3Error: ``encoding-type`` is not ``url``.
    """
    encoding = query.get("encoding-type")
    if encoding not in (None, "url"):
        raise S3Error("InvalidArgument", "Invalid Encoding Method specified in Request")
    return lambda tag, text: element(tag, quote(text, safe="/-_.~") if encoding else text)


def int_parameter(query: dict[str, str], name: str, *, default: int = 1000, maximum: int = 1000) -> int:
    """Return an integer parameter, reduced to ``maximum`` if it is larger.

    Raises:
        S3Error: the parameter is not an integer.
    """
    text = query.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII):
        raise S3Error("InvalidArgument", f"Provided {name} not an integer or within integer range")
    return min(int(text), maximum)


def _listing_page(bucket: BucketState, query: dict[str, str], start: str) -> tuple[ListingPage, list[str]]:
    """Return the page that starts at ``start``, and the XML elements that all listings have."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    limit, coded = int_parameter(query, "max-keys"), key_element_writer(query)
    page = bucket.objects.page(prefix=prefix, delimiter=delimiter, start=start, limit=limit)
    parts = [element("Name", bucket.spec.name), coded("Prefix", prefix), element("MaxKeys", limit)]
    parts += [element("EncodingType", "url")] if "encoding-type" in query else []
    parts += [coded("Delimiter", delimiter)] if delimiter else []
    parts.append(element("IsTruncated", "false" if page.next_start is None else "true"))
    return page, parts


def _object_elements(bucket: BucketState, key: str, coded: ElementWriter) -> str:
    stored = bucket.objects[key]
    about = element("LastModified", iso_time(stored.modified_at)) + element("ETag", stored.tag)
    return coded("Key", key) + about + element("Size", len(stored.data)) + element("StorageClass", "STANDARD")


def _common_prefixes(page: ListingPage, coded: ElementWriter) -> list[str]:
    return [f"<CommonPrefixes>{coded('Prefix', common)}</CommonPrefixes>" for common in page.prefixes]


def _last_name(page: ListingPage) -> str:
    return max(page.keys[-1:] + page.prefixes[-1:])


def _start_after(marker: str, query: dict[str, str]) -> str:
    """Return the start of a listing after ``marker``; a marker that is a common prefix skips all its keys."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    cut = marker.find(delimiter, len(prefix)) if delimiter and marker.startswith(prefix) else -1
    if cut >= 0 and cut + len(delimiter) == len(marker):
        return successor(marker)
    return marker and marker + "\0"


def _encode_token(start: str) -> str:
    return base64.urlsafe_b64encode(start.encode()).decode()


def _decode_token(token: str) -> str:
    try:
        return base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise S3Error("InvalidArgument", "The continuation token provided is incorrect") from error
