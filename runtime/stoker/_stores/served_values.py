"""The request for values of a served data set: ranges of its super-samples, answered by one stream of bytes.

``POST /v1/NAME/values?version=N`` with a line ``ROW START END`` for each range: row of the super-sample in that version
of the manifest, offset of the first byte in the object, offset behind the last one. The answer has the bytes of all
ranges in this order, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

MAX_RANGES = 8192
"""Maximum number of ranges of a request; each is at least one read of the bucket."""
MAX_BODY_BYTES = 40 * MAX_RANGES
ANSWER_BYTES_HEADER = "Stoker-Answer-Bytes"
"""Header of the answers, and of refusals: maximum number of bytes of an answer."""

_LINE = re.compile(rb"(0|[1-9][0-9]{0,9}) (0|[1-9][0-9]{0,12}) ([1-9][0-9]{0,12})\n")


class ValueRange(NamedTuple):
    """Bytes ``[start, end)`` of the super-sample in a row of the manifest."""

    row: int
    start: int
    end: int


def encode_ranges(ranges: Iterable[ValueRange]) -> bytes:
    """Return the body of a request."""
    return "".join([f"{row} {start} {end}\n" for row, start, end in ranges]).encode()


def parse_ranges(body: bytes) -> list[ValueRange]:
    """Parse the body of a request. Only its form is checked, not whether the ranges exist.

    Raises:
        ValueError: the body has no line, too many lines or bytes, or a line is malformed.
    """
    if len(body) > MAX_BODY_BYTES or body.count(b"\n") > MAX_RANGES:
        raise ValueError(f"the body has at most {MAX_RANGES} lines and {MAX_BODY_BYTES} bytes")
    ranges: list[ValueRange] = []
    position = 0
    while position < len(body) or not ranges:
        match = _LINE.match(body, position)
        part = ValueRange(int(match[1]), int(match[2]), int(match[3])) if match else ValueRange(0, 0, 0)
        if match is None or part.start >= part.end:
            raise ValueError(
                f"line {len(ranges) + 1} of the body is not ROW START END in decimal digits, with START below END"
            )
        ranges.append(part)
        position = match.end()
    return ranges


def parse_answer_bytes(headers: Mapping[str, str]) -> int | None:
    """Return the maximum size of an answer according to the headers of one; None if they do not say, or wrongly."""
    text = headers.get(ANSWER_BYTES_HEADER, "")
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,10}", text, re.ASCII) else None
