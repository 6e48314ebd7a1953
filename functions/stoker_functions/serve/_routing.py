"""What a request asks for, read strictly: every part has one spelling, and anything else is refused.

Nothing is percent-decoded: names and numbers need no escapes, so what has one means nothing here. What comes out are
names and numbers within bounds, never a part of an object's key.

Conditional and ranged requests are those of RFC 9110, sections 13 and 14, for objects that have an entity tag and no
date.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from stoker._order.order import OrderConfig, Shuffle
from stoker._stores.access_token import DATASET_NAME
from stoker_functions.serve._messages import Refusal, Request

__all__ = ["BatchAsk", "ManifestAsk", "SuperSampleAsk", "asked_range", "is_unchanged", "parse"]

MAX_URL_CHARACTERS = 1024
MAX_SIZE = 16_384
MAX_LANES = 1024
MAX_WINDOW = 64
_NUMBER = re.compile(r"0|[1-9][0-9]{0,19}", re.ASCII)
_PATH = re.compile(rf"/v1/({DATASET_NAME.pattern})/(manifest|super-samples|batches)(?:/({_NUMBER.pattern}))?", re.ASCII)
_MOST: Mapping[str, int] = {
    "version": 999_999_999,
    "size": MAX_SIZE,
    "seed": (1 << 64) - 1,
    "epoch": (1 << 32) - 1,
    "window": MAX_WINDOW,
    "lanes": MAX_LANES,
}
_AT_LEAST_ONE = ("version", "size", "window", "lanes")
_SHUFFLES = ("none", "block", "window", "full")
_TAG = r'(?:W/)?"[\x21\x23-\x7e]*"'
_TAGS = re.compile(rf"\*|{_TAG}(?:[ \t]*,[ \t]*{_TAG}){{0,31}}", re.ASCII)
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is asked of a data set.

    Attributes:
        dataset: its name.
        version: of its manifest; None is the newest.
    """

    dataset: str
    version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestAsk(Ask):
    """The manifest itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperSampleAsk(Ask):
    """The super-sample in a row of the manifest."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAsk(Ask):
    """The samples at positions ``[position, position + size)`` of an epoch."""

    position: int
    size: int
    epoch: int
    order: OrderConfig


def parse(request: Request) -> ManifestAsk | SuperSampleAsk | BatchAsk:
    """Return what a request asks for.

    Raises:
        Refusal: the method is another than GET and HEAD (405), the URL is too long (414), there is nothing at the path
            (404), or a parameter is unknown, repeated, missing or out of bounds (400).
    """
    if request.method not in ("GET", "HEAD"):
        raise Refusal(405, "method-not-allowed", "only GET and HEAD are answered", headers={"Allow": "GET, HEAD"})
    if len(request.path) + len(request.query) > MAX_URL_CHARACTERS:
        raise Refusal(414, "too-long", f"path and query have more than {MAX_URL_CHARACTERS} characters")
    match = _PATH.fullmatch(request.path)
    if match is None or (match[2] == "manifest") != (match[3] is None):
        raise Refusal(
            404, "not-found", "there is /v1/NAME/manifest, /v1/NAME/super-samples/NUMBER and /v1/NAME/batches/POSITION"
        )
    dataset, what, number = match[1], match[2], int(match[3] or 0)
    if what == "batches":
        return _batch(dataset, number, _parameters(request.query, (*_MOST, "shuffle")))
    version = _version(_parameters(request.query, ("version",)))
    if what == "manifest":
        return ManifestAsk(dataset=dataset, version=version)
    return SuperSampleAsk(dataset=dataset, version=version, number=number)


def _batch(dataset: str, position: int, given: Mapping[str, str]) -> BatchAsk:
    shuffle = given.get("shuffle", OrderConfig().shuffle)
    if shuffle not in _SHUFFLES:
        raise Refusal(400, "bad-parameter", f"shuffle is one of {', '.join(_SHUFFLES)}")
    if "size" not in given:
        raise Refusal(400, "bad-parameter", "size is missing: how many samples the batch is to have")
    order = OrderConfig(
        seed=_number(given, "seed", 0),
        shuffle=cast("Shuffle", shuffle),
        window=_number(given, "window", OrderConfig().window),
        lanes=_number(given, "lanes", 1),
    )
    return BatchAsk(
        dataset=dataset,
        version=_version(given),
        position=position,
        size=_number(given, "size", 0),
        epoch=_number(given, "epoch", 0),
        order=order,
    )


def _parameters(query: str, known: tuple[str, ...]) -> dict[str, str]:
    """Return the parameters of a query by name."""
    found: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        name, _, value = pair.partition("=")
        if name not in known or name in found:
            raise Refusal(400, "bad-parameter", f"the parameters are, each at most once: {', '.join(known)}")
        found[name] = value
    return found


def _version(given: Mapping[str, str]) -> int | None:
    return _number(given, "version", 0) or None


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    if name not in given:
        return default
    least, most = int(name in _AT_LEAST_ONE), _MOST[name]
    text = given[name]
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise Refusal(400, "bad-parameter", f"{name} is a whole number from {least} to {most}, without leading zeros")
    return int(text)


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
