"""Conditional and ranged requests: RFC 9110, sections 13 and 14, for objects that have an entity tag and no date."""

from __future__ import annotations

import re
from collections.abc import Mapping

from stoker_functions.serve._messages import Refusal

__all__ = ["asked_range", "is_unchanged"]

_TAG = r'(?:W/)?"[\x21\x23-\x7e]*"'
_TAGS = re.compile(rf"\*|{_TAG}(?:[ \t]*,[ \t]*{_TAG}){{0,31}}", re.ASCII)
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)


def is_unchanged(headers: Mapping[str, str], etag: str) -> bool:
    """Return whether the client has the object already, so that 304 answers it.

    Args:
        headers: of the request.
        etag: of the object, strong and in quotes.

    Raises:
        Refusal: the object is not the one that is wanted (412), or a condition is malformed (400).
    """
    wanted = _tags(headers, "if-match")
    if wanted is not None and "*" not in wanted and etag not in wanted:
        raise Refusal(412, "changed", "the object has another tag than If-Match wants", headers={"ETag": etag})
    known = _tags(headers, "if-none-match")
    return known is not None and ("*" in known or etag in {tag.removeprefix("W/") for tag in known})


def asked_range(headers: Mapping[str, str], size_bytes: int, etag: str) -> tuple[int, int] | None:
    """Return the bytes ``[start, end)`` that a request is for, None if it is for all of them.

    Raises:
        Refusal: it is for bytes beyond the object's end, for several ranges, or malformed (416).
    """
    text = headers.get("range")
    if text is None or not text.startswith("bytes=") or headers.get("if-range", etag) != etag:
        return None
    match = _RANGE.fullmatch(text)
    span = _span(match[1], match[2], size_bytes) if match else None
    if span is None:
        raise Refusal(
            416,
            "bad-range",
            f"one range within the {size_bytes} bytes can be had: bytes=FIRST-LAST, bytes=FIRST- or bytes=-COUNT",
            headers={"Content-Range": f"bytes */{size_bytes}", "ETag": etag},
        )
    return span


def _span(first: str, last: str, size_bytes: int) -> tuple[int, int] | None:
    """Return ``[start, end)``, None if there is no such range."""
    if not first:
        start, end = size_bytes - min(int(last or 0), size_bytes), size_bytes
    else:
        start, end = int(first), size_bytes if not last else min(int(last) + 1, size_bytes)
    is_reversed = bool(first and last) and int(last) < int(first)
    return (start, end) if start < end and not is_reversed else None


def _tags(headers: Mapping[str, str], name: str) -> frozenset[str] | None:
    text = headers.get(name)
    if text is None:
        return None
    if not _TAGS.fullmatch(text):
        raise Refusal(400, "bad-header", f"{name} is neither * nor up to 32 entity tags")
    return frozenset(re.findall(rf"\*|{_TAG}", text))
