"""S3's three listings of a bucket: ListObjects, ListObjectsV2 and ListObjectVersions."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from urllib.parse import quote

from stoker_local._http1 import Response
from stoker_local._objects import Page, successor
from stoker_local._s3.model import OWNER, Bucket, Call, S3Error, element, iso_time, xml_response

__all__ = ["NULL_VERSION", "list_object_versions", "list_objects", "list_objects_v2", "number_parameter", "url_coder"]

NULL_VERSION = "null"  # the version of every object of a bucket that has never had versioning

Coder = Callable[[str, str], str]


def list_objects_v2(bucket: Bucket, call: Call, now: float) -> Response:
    """ListObjectsV2: one page; its continuation token is the key where the next one starts."""
    query = call.request.parameters
    token, start_after = query.get("continuation-token"), query.get("start-after", "")
    # The least string after `start_after` is itself and a NUL; an empty one is before every key.
    start = _decode_token(token) if token is not None else start_after and start_after + "\0"
    page, parts = _page(bucket, query, start)
    coded = url_coder(query)
    parts += [coded("StartAfter", start_after)] if start_after else []
    parts += [element("ContinuationToken", token)] if token is not None else []
    parts.append(element("KeyCount", len(page.keys) + len(page.prefixes)))
    if page.next_start is not None:
        parts.append(element("NextContinuationToken", _encode_token(page.next_start)))
    owner = OWNER if query.get("fetch-owner") == "true" else ""
    parts += [f"<Contents>{_entry(bucket, key, coded)}{owner}</Contents>" for key in page.keys]
    return xml_response("ListBucketResult", "".join(parts + _common_prefixes(page, coded)))


def list_objects(bucket: Bucket, call: Call, now: float) -> Response:
    """ListObjects (version 1): one page of the keys after ``marker``."""
    query = call.request.parameters
    marker, coded = query.get("marker", ""), url_coder(query)
    page, parts = _page(bucket, query, _after(marker, query))
    parts.append(coded("Marker", marker))
    if page.next_start is not None and query.get("delimiter"):  # else it is the last key, and S3 does not repeat it
        parts.append(coded("NextMarker", _last(page)))
    parts += [f"<Contents>{_entry(bucket, key, coded)}{OWNER}</Contents>" for key in page.keys]
    return xml_response("ListBucketResult", "".join(parts + _common_prefixes(page, coded)))


def list_object_versions(bucket: Bucket, call: Call, now: float) -> Response:
    """ListObjectVersions of a bucket that never had versioning: each object has one version, ``null``."""
    query = call.request.parameters
    marker, version, coded = query.get("key-marker", ""), query.get("version-id-marker", ""), url_coder(query)
    if version and not marker:
        raise S3Error("InvalidArgument", "A version-id marker cannot be specified without a key marker.")
    page, parts = _page(bucket, query, _after(marker, query))
    parts += [coded("KeyMarker", marker), element("VersionIdMarker", version)]
    if page.next_start is not None:
        last = _last(page)
        parts.append(coded("NextKeyMarker", last))
        parts += [element("NextVersionIdMarker", NULL_VERSION)] if last in page.keys else []
    about = element("VersionId", NULL_VERSION) + element("IsLatest", "true") + OWNER
    parts += [f"<Version>{_entry(bucket, key, coded)}{about}</Version>" for key in page.keys]
    return xml_response("ListVersionsResult", "".join(parts + _common_prefixes(page, coded)))


def url_coder(query: dict[str, str]) -> Coder:
    """Return what writes an element that holds a key: percent-encoded if the request asks for it.

    Raises:
        S3Error: it asks for another encoding.
    """
    encoding = query.get("encoding-type")
    if encoding not in (None, "url"):
        raise S3Error("InvalidArgument", "Invalid Encoding Method specified in Request")
    return lambda tag, text: element(tag, quote(text, safe="/-_.~") if encoding else text)


def number_parameter(query: dict[str, str], name: str, *, default: int = 1000, maximum: int = 1000) -> int:
    """Return a numeric parameter, at most ``maximum``.

    Raises:
        S3Error: it is not a number.
    """
    text = query.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII):
        raise S3Error("InvalidArgument", f"Provided {name} not an integer or within integer range")
    return min(int(text), maximum)


def _page(bucket: Bucket, query: dict[str, str], start: str) -> tuple[Page, list[str]]:
    """Return the page from ``start`` on, and the elements that all listings have."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    limit, coded = number_parameter(query, "max-keys"), url_coder(query)
    page = bucket.objects.page(prefix=prefix, delimiter=delimiter, start=start, limit=limit)
    parts = [element("Name", bucket.spec.name), coded("Prefix", prefix), element("MaxKeys", limit)]
    parts += [element("EncodingType", "url")] if "encoding-type" in query else []
    parts += [coded("Delimiter", delimiter)] if delimiter else []
    parts.append(element("IsTruncated", "false" if page.next_start is None else "true"))
    return page, parts


def _entry(bucket: Bucket, key: str, coded: Coder) -> str:
    stored = bucket.objects[key]
    about = element("LastModified", iso_time(stored.modified_at)) + element("ETag", stored.tag)
    return coded("Key", key) + about + element("Size", len(stored.data)) + element("StorageClass", "STANDARD")


def _common_prefixes(page: Page, coded: Coder) -> list[str]:
    return [f"<CommonPrefixes>{coded('Prefix', common)}</CommonPrefixes>" for common in page.prefixes]


def _last(page: Page) -> str:
    return max(page.keys[-1:] + page.prefixes[-1:])


def _after(marker: str, query: dict[str, str]) -> str:
    """Return where a listing starts that follows ``marker``: a common prefix stands for all its keys."""
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
