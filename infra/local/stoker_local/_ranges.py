"""HTTP's Range header, as both clouds read it: one plain range, else the header is ignored."""

from __future__ import annotations

import re

__all__ = ["UnsatisfiableRangeError", "byte_range"]

_RANGE = re.compile(r"bytes=(?:([0-9]{1,18})-([0-9]{1,18})?|-([0-9]{1,18}))", re.ASCII)


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
