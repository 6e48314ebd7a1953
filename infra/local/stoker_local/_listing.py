"""One page of a bucket's listing, as a pure function of its sorted keys; S3 and GCS list the same way."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Page", "list_page", "successor"]

_LAST = chr(sys.maxunicode)


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
