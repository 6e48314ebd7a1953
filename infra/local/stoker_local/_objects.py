"""Buckets of objects in memory, their listing and the ranges of an object: what S3 and GCS share."""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stoker_local._http1 import Body

__all__ = [
    "ObjectCreated",
    "ObjectMap",
    "Page",
    "StoredObject",
    "UnsatisfiableRangeError",
    "byte_range",
    "list_page",
    "successor",
]

_LAST = chr(sys.maxunicode)
_RANGE = re.compile(r"bytes=(?:([0-9]{1,18})-([0-9]{1,18})?|-([0-9]{1,18}))", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object: immutable, replaced as a whole.

    Attributes:
        data: read-only, the buffer it was received in.
        tag: the store's identity of the content: a quoted MD5 (S3) or a decimal generation (GCS).
        modified_at: POSIX seconds.
        headers: to be sent with the object (``Content-Type``, ``x-amz-meta-…``).
        tags: S3's object tags.
        part_bytes: sizes of the parts that it was uploaded in; empty if it was uploaded whole.
    """

    data: Body
    tag: str
    modified_at: float
    headers: dict[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    part_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectCreated:
    """An object that a request has just made or replaced.

    Attributes:
        event: S3's name of what happened, such as ``ObjectCreated:Put``.
    """

    bucket: str
    key: str
    event: str
    stored: StoredObject


class ObjectMap(UserDict[str, StoredObject]):
    """A bucket's objects by key; lists in ascending order of UTF-8 bytes."""

    _sorted: list[str] | None = None

    def __setitem__(self, key: str, stored: StoredObject) -> None:
        if key not in self.data:
            self._sorted = None
        self.data[key] = stored

    def __delitem__(self, key: str) -> None:
        del self.data[key]
        self._sorted = None

    def page(self, *, prefix: str, delimiter: str = "", start: str = "", limit: int) -> Page:
        """Return one page of the listing; see :func:`~stoker_local._objects.list_page`."""
        if self._sorted is None:
            self._sorted = sorted(self.data)
        return list_page(self._sorted, prefix=prefix, delimiter=delimiter, start=start, limit=limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of keys and of common prefixes, both ascending.

    Attributes:
        next_start: where the next page starts, inclusive; None if this was the last.
    """

    keys: tuple[str, ...]
    prefixes: tuple[str, ...]
    next_start: str | None


def list_page(sorted_keys: Sequence[str], *, prefix: str, delimiter: str = "", start: str = "", limit: int) -> Page:
    """Return at most ``limit`` keys and common prefixes at or after ``start`` (inclusive) under ``prefix``.

    Keys ascend by code point, which is the order of their UTF-8 bytes. Keys that share the part up to the first
    ``delimiter`` after the prefix count as one common prefix; its keys are skipped by bisection, not one by one.
    """
    keys: list[str] = []
    prefixes: list[str] = []
    position = bisect_left(sorted_keys, max(start, prefix))
    while position < len(sorted_keys) and (key := sorted_keys[position]).startswith(prefix):
        if len(keys) + len(prefixes) == limit:
            return Page(keys=tuple(keys), prefixes=tuple(prefixes), next_start=key if limit else None)
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        if cut < 0:
            keys.append(key)
            position += 1
        else:
            prefixes.append(key[: cut + len(delimiter)])
            position = bisect_left(sorted_keys, successor(prefixes[-1]), position)
    return Page(keys=tuple(keys), prefixes=tuple(prefixes), next_start=None)


def successor(prefix: str) -> str:
    """Return the least string greater than every string that starts with ``prefix``."""
    stem = prefix.rstrip(_LAST)
    if not stem:
        return _LAST * (len(prefix) + 1024)
    code = ord(stem[-1]) + 1
    return stem[:-1] + chr(0xE000 if code == 0xD800 else code)


class UnsatisfiableRangeError(Exception):
    """The range holds no byte of the object; to be answered with 416 and ``content_range``."""

    def __init__(self, header: str, size_bytes: int) -> None:
        super().__init__(f"{header} of {size_bytes} bytes")
        self.content_range = f"bytes */{size_bytes}"


def byte_range(header: str, size_bytes: int) -> tuple[int, int] | None:
    """Return the half-open range that ``header`` asks for, cut to the object, or None for the whole object.

    ``a-b`` includes b, ``a-`` goes to the end, ``-n`` is the last n bytes.

    Raises:
        UnsatisfiableRangeError: the range is well-formed and empty.
    """
    match = _RANGE.fullmatch(header.replace(" ", ""))
    if match is None:
        return None
    first, last, suffix = (None if digits is None else int(digits) for digits in match.groups())
    if suffix is not None:
        start, end = max(0, size_bytes - suffix), size_bytes
    else:
        start = first or 0
        if last is not None and last < start:
            return None
        end = size_bytes if last is None else min(last + 1, size_bytes)
    if start >= end:
        raise UnsatisfiableRangeError(header, size_bytes)
    return start, end
