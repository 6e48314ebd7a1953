"""S3's preconditions on reads, copies, writes and deletes, in one place.

Source: the S3 API reference, which refers to RFC 7232 (now RFC 9110, section 13): a comparison of ETags takes
precedence over the comparison of times of the same kind. Times are compared in whole seconds, as ``Last-Modified``
states them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum

from stoker_local._objects import StoredObject
from stoker_local._s3.errors import S3Error
from stoker_local._s3.model import Bucket, Call

__all__ = ["COPY_SOURCE_IF", "Outcome", "check_delete_condition", "check_write_conditions", "failed", "read_outcome"]

COPY_SOURCE_IF = "x-amz-copy-source-if-"


class Outcome(Enum):
    """What the conditions of a read come to."""

    HOLD = "hold"
    NOT_MODIFIED = "not modified"  # the client has this version: 304 for a read
    FAILED = "failed"  # 412


def read_outcome(headers: Mapping[str, str], stored: StoredObject, *, prefix: str = "if-") -> Outcome:
    """Return what a read's conditions come to; ``prefix`` is ``COPY_SOURCE_IF`` for those on the source of a copy.

    ``…match`` that holds makes ``…unmodified-since`` void, and ``…none-match`` makes ``…modified-since`` void. A time
    that is not a valid HTTP date is ignored (RFC 9110, section 13.1.3).
    """
    modified_at = int(stored.modified_at)
    if (tags := headers.get(prefix + "match")) is not None:
        if not _matches(tags, stored.tag):
            return Outcome.FAILED
    elif (time := _posix_time(headers.get(prefix + "unmodified-since"))) is not None and modified_at > time:
        return Outcome.FAILED
    if (tags := headers.get(prefix + "none-match")) is not None:
        if _matches(tags, stored.tag):
            return Outcome.NOT_MODIFIED
    elif (time := _posix_time(headers.get(prefix + "modified-since"))) is not None and modified_at <= time:
        return Outcome.NOT_MODIFIED
    return Outcome.HOLD


def check_write_conditions(bucket: Bucket, call: Call) -> None:
    """Refuse a write whose ``If-None-Match: *`` or ``If-Match`` does not hold, where the bucket heeds them.

    Raises:
        S3Error: it does not hold, or is one that S3 does not implement: ``If-None-Match`` with an ETag, or both.
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
            raise failed("If-None-Match")
    check_delete_condition(bucket, call.key, headers.get("if-match"))


def check_delete_condition(bucket: Bucket, key: str, tag: str | None) -> None:
    """Refuse to replace or delete an object that does not have the ETag ``tag``, or, for ``*``, is not there.

    Raises:
        S3Error: it does not hold.
    """
    if tag is None:
        return
    if not _matches(tag, bucket.stored_object(key).tag):
        raise failed("If-Match")


def failed(condition: str) -> S3Error:
    """Return the error of a condition that does not hold; ``condition`` is its header."""
    message = "At least one of the pre-conditions you specified did not hold"
    return S3Error("PreconditionFailed", message, elements={"Condition": condition})


def _matches(condition: str, tag: str) -> bool:
    wanted = [part.strip().removeprefix("W/") for part in condition.split(",")]
    return "*" in wanted or tag in wanted or tag.strip('"') in wanted


def _posix_time(date: str | None) -> int | None:
    if date is None:
        return None
    try:
        parsed = parsedate_to_datetime(date)
        return int((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        return None
