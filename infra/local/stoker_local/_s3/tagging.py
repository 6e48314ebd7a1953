"""S3's object tags: up to ten names with values beside an object, which change neither its ETag nor its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stoker_local._http1 import Response, parse_query
from stoker_local._s3.errors import S3Error
from stoker_local._s3.model import Bucket, Call, element, parse_xml, xml_response
from stoker_local._s3.payload import decode_payload

__all__ = ["delete_tags", "get_tags", "put_tags", "tags_of_header"]

_MAX_TAGS = 10
_MAX_NAME_CHARACTERS = 128
_MAX_VALUE_CHARACTERS = 256


def tags_of_header(header: str) -> Mapping[str, str]:
    """Return the tags in an ``x-amz-tagging`` header, which are encoded like a query.

    Raises:
        S3Error: they are not, or S3 does not take them.
    """
    try:
        pairs = parse_query(header)
    except UnicodeDecodeError as error:
        raise S3Error(
            "InvalidArgument", "The header 'x-amz-tagging' shall be encoded as UTF-8 then URLEncoded."
        ) from error
    return _checked(pairs)


def get_tags(bucket: Bucket, call: Call, now: float) -> Response:
    """GetObjectTagging."""
    tags = bucket.stored_object(call.key).tags
    listed = (f"<Tag>{element('Key', name)}{element('Value', value)}</Tag>" for name, value in sorted(tags.items()))
    return xml_response("Tagging", f"<TagSet>{''.join(listed)}</TagSet>")


def put_tags(bucket: Bucket, call: Call, now: float) -> Response:
    """PutObjectTagging: replaces all tags."""
    stored = bucket.stored_object(call.key)
    nodes = parse_xml(decode_payload(call.request, call.body)).findall("TagSet/Tag")
    tags = _checked(tuple((node.findtext("Key") or "", node.findtext("Value") or "") for node in nodes))
    bucket.objects[call.key] = replace(stored, tags=tags)
    return Response()


def delete_tags(bucket: Bucket, call: Call, now: float) -> Response:
    """DeleteObjectTagging."""
    bucket.objects[call.key] = replace(bucket.stored_object(call.key), tags={})
    return Response(status=204)


def _checked(pairs: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
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
