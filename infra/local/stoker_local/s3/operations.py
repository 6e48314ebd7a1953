"""S3's operations on objects: read, write, delete, list."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from email.utils import formatdate
from urllib.parse import quote

from stoker_local.http1 import Body, Request, Response
from stoker_local.objects import StoredObject
from stoker_local.ranges import UnsatisfiableRangeError, byte_range
from stoker_local.s3.errors import S3Error
from stoker_local.s3.model import Bucket, Call, element, iso_time, parse_xml, xml_response
from stoker_local.s3.payload import decode_payload

__all__ = [
    "check_write_conditions",
    "delete_object",
    "delete_objects",
    "etag_of",
    "get_object",
    "list_objects",
    "object_headers",
    "put_object",
]

_KEPT_HEADERS = ("cache-control", "content-disposition", "content-language", "content-type", "expires")
_MAX_KEYS = 1000


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
    """GetObject and HeadObject: whole or one range, with conditions."""
    stored = bucket.objects.get(call.key)
    if stored is None:
        raise S3Error("NoSuchKey", "The specified key does not exist.", elements={"Key": call.key})
    asked = call.request.headers
    headers = {
        **stored.headers,
        "ETag": stored.tag,
        "Last-Modified": formatdate(stored.modified_at, usegmt=True),
        "Accept-Ranges": "bytes",
    }
    if "if-match" in asked and not _matches(asked["if-match"], stored.tag):
        raise S3Error("PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
    if "if-none-match" in asked and _matches(asked["if-none-match"], stored.tag):
        return Response(status=304, headers=headers)
    size = len(stored.data)
    span = _span(asked["range"], size) if "range" in asked else None
    if span is None:
        return Response(headers=headers, body=stored.data)
    headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{size}"
    return Response(status=206, headers=headers, body=memoryview(stored.data)[span[0] : span[1]])


def _matches(condition: str, tag: str) -> bool:
    wanted = [part.strip().removeprefix("W/") for part in condition.split(",")]
    return "*" in wanted or tag in wanted or tag.strip('"') in wanted


def _span(header: str, size_bytes: int) -> tuple[int, int] | None:
    try:
        return byte_range(header, size_bytes)
    except UnsatisfiableRangeError as error:
        raise S3Error(
            "InvalidRange",
            "The requested range is not satisfiable",
            elements={"RangeRequested": header, "ActualObjectSize": str(size_bytes)},
            headers={"Content-Range": error.content_range},
        ) from error


def check_write_conditions(bucket: Bucket, call: Call) -> None:
    """Refuse a write whose ``If-None-Match: *`` or ``If-Match`` does not hold.

    Raises:
        S3Error: it does not.
    """
    asked, stored = call.request.headers, bucket.objects.get(call.key)
    if (condition := asked.get("if-none-match")) is not None:
        if condition != "*":
            raise S3Error("NotImplemented", "Writes take no If-None-Match but '*'.")
        if stored is not None:
            raise S3Error("PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
    if (condition := asked.get("if-match")) is not None:
        if stored is None:
            raise S3Error("NoSuchKey", "The specified key does not exist.", elements={"Key": call.key})
        if not _matches(condition, stored.tag):
            raise S3Error("PreconditionFailed", "At least one of the pre-conditions you specified did not hold")


def put_object(bucket: Bucket, call: Call, now: float) -> Response:
    """PutObject: whole, atomic, visible at once."""
    if "x-amz-copy-source" in call.request.headers:
        raise S3Error("NotImplemented", "CopyObject is not implemented.")
    data = decode_payload(call.request, call.body)
    check_write_conditions(bucket, call)
    stored = StoredObject(
        data=memoryview(data).toreadonly(),
        tag=etag_of(data),
        modified_at=now,
        headers=object_headers(call.request),
    )
    bucket.objects[call.key] = stored
    return Response(headers={"ETag": stored.tag})


def delete_object(bucket: Bucket, call: Call, now: float) -> Response:
    """DeleteObject: deleting what is not there succeeds."""
    bucket.objects.pop(call.key, None)
    return Response(status=204)


def delete_objects(bucket: Bucket, call: Call, now: float) -> Response:
    """DeleteObjects: up to 1,000 keys."""
    request = parse_xml(decode_payload(call.request, call.body))
    keys = [node.findtext("Key") or "" for node in request.findall("Object")]
    if not 0 < len(keys) <= _MAX_KEYS or not all(keys):
        raise S3Error("MalformedXML", f"DeleteObjects takes 1 to {_MAX_KEYS} keys.")
    for key in keys:
        bucket.objects.pop(key, None)
    quiet = request.findtext("Quiet") == "true"
    return xml_response(
        "DeleteResult", "" if quiet else "".join(f"<Deleted>{element('Key', key)}</Deleted>" for key in keys)
    )


def list_objects(bucket: Bucket, call: Call, now: float) -> Response:
    """ListObjectsV2: one page; its continuation token is the key where the next one starts."""
    query = call.request.parameters
    prefix, delimiter, token = query.get("prefix", ""), query.get("delimiter", ""), query.get("continuation-token")
    start_after, limit = query.get("start-after", ""), _max_keys(query.get("max-keys", "1000"))
    # The least string after `start_after` is itself and a NUL; an empty one is before every key.
    start = _decode_token(token) if token is not None else start_after and start_after + "\0"
    page = bucket.objects.page(prefix=prefix, delimiter=delimiter, start=start, limit=limit)
    encoded = query.get("encoding-type") == "url"

    def name(tag: str, text: str) -> str:
        return element(tag, quote(text, safe="/-_.~") if encoded else text)

    parts = [element("Name", bucket.spec.name), name("Prefix", prefix), element("MaxKeys", limit)]
    parts += [element("EncodingType", "url")] if encoded else []
    parts += [name("Delimiter", delimiter)] if delimiter else []
    parts += [name("StartAfter", start_after)] if start_after else []
    parts += [element("ContinuationToken", token)] if token is not None else []
    parts.append(element("KeyCount", len(page.keys) + len(page.prefixes)))
    parts.append(element("IsTruncated", "false" if page.next_start is None else "true"))
    if page.next_start is not None:
        parts.append(element("NextContinuationToken", _encode_token(page.next_start)))
    for key in page.keys:
        stored = bucket.objects[key]
        about = element("LastModified", iso_time(stored.modified_at)) + element("ETag", stored.tag)
        about += element("Size", len(stored.data)) + element("StorageClass", "STANDARD")
        parts.append(f"<Contents>{name('Key', key)}{about}</Contents>")
    parts += [f"<CommonPrefixes>{name('Prefix', common)}</CommonPrefixes>" for common in page.prefixes]
    return xml_response("ListBucketResult", "".join(parts))


def _max_keys(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII):
        raise S3Error("InvalidArgument", "Provided max-keys not an integer or within integer range")
    return min(int(text), _MAX_KEYS)


def _encode_token(start: str) -> str:
    return base64.urlsafe_b64encode(start.encode()).decode()


def _decode_token(token: str) -> str:
    try:
        return base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise S3Error("InvalidArgument", "The continuation token provided is incorrect") from error
