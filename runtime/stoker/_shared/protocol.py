"""The protocol of shared tiers: paths, headers, and the format of batch reads.

A batch read requests many ranges at once. The request has a line ``<name> <start> <end>`` per range, the end exclusive.
The response has, for each range in the same order, its length as a signed 64-bit integer in network byte order,
followed by that many bytes of the object; the length -1 means that the server does not have the object.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from stoker._cache.index import size_of
from stoker.errors import TruncatedError, UnexpectedAnswerError

OBJECTS_PATH, BATCH_PATH, METRICS_PATH = "/objects/", "/objects", "/metrics"
METRIC_PREFIX = "stoker_tier_"
GROUP_HEADER = "Stoker-Group"
"""Header of a PUT with the group of the object's data set; see :meth:`~stoker._shared.secret.TierSecret.group`."""
MAX_RANGES = 1024
MAX_REQUEST_BYTES = 64 * MAX_RANGES
MAX_BATCH_BYTES = 256 << 20
"""Maximum size of the ranges of one request together; a single range may be larger."""
LENGTH = Struct(">q")
MISSING_LENGTH = -1

_LINE = re.compile(rb"([0-9a-f]{32}) ([0-9]{1,10}) ([0-9]{1,10})\n")


class ObjectRange(NamedTuple):
    """Bytes ``[start, end)`` of the object with a name."""

    name: str
    start: int
    end: int


class RangeInto(NamedTuple):
    """A range of the object with a name: its offset, and the memory of its size to receive it."""

    name: str
    start: int
    into: memoryview


def encode_request(parts: Iterable[RangeInto]) -> bytes:
    """Return the body of a batch request."""
    return "".join(f"{name} {start} {start + into.nbytes}\n" for name, start, into in parts).encode()


def parse_request(body: bytes) -> list[ObjectRange]:
    """Parse the body of a batch request.

    Raises:
        ValueError: The body is malformed or too large, or a range exceeds its object.
    """
    lines = body.splitlines(keepends=True)
    if not 0 < len(lines) <= MAX_RANGES:
        raise ValueError(f"a batch has 1 to {MAX_RANGES} lines, not {len(lines)}")
    parts = []
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        part = ObjectRange(match[1].decode(), int(match[2]), int(match[3])) if match else ObjectRange("", 0, 0)
        if not match or not part.start < part.end <= size_of(part.name):
            raise ValueError(f"line {number} is not NAME START END with a range within the object")
        parts.append(part)
    if len(parts) > 1 and sum(part.end - part.start for part in parts) > MAX_BATCH_BYTES:
        raise ValueError(f"a batch has at most {MAX_BATCH_BYTES} bytes")
    return parts


def split_requests(parts: Iterable[RangeInto]) -> Iterator[list[RangeInto]]:
    """Split ranges into requests within the limits."""
    batch, batch_bytes = list[RangeInto](), 0
    for part in parts:
        if batch and (len(batch) == MAX_RANGES or batch_bytes + part.into.nbytes > MAX_BATCH_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(part)
        batch_bytes += part.into.nbytes
    if batch:
        yield batch


class BatchResponse:
    """Parses the response to a batch request, and copies each range to its memory.

    Args:
        address: URL of the server, for messages.
        parts: The requested ranges.
    """

    def __init__(self, address: str, parts: Sequence[RangeInto]) -> None:
        self._address, self._memories = address, [part.into for part in parts]
        self._head = bytearray()
        self._left = memoryview(b"")
        self._found: list[bool] = []

    def receive(self, data: bytes | bytearray) -> None:
        """Receive the next bytes of the stream.

        Raises:
            UnexpectedAnswerError: The stream does not fit the request.
        """
        rest = memoryview(data)
        while rest:
            if self._left:
                count = min(len(self._left), len(rest))
                self._left[:count] = rest[:count]
                self._left = self._left[count:]
            else:
                count = min(LENGTH.size - len(self._head), len(rest))
                self._head += rest[:count]
                if len(self._head) == LENGTH.size:
                    self._begin_part()
            rest = rest[count:]

    def _begin_part(self) -> None:
        (length,) = LENGTH.unpack(self._head)
        self._head.clear()
        number = len(self._found)
        if number == len(self._memories):
            raise UnexpectedAnswerError(
                f"{self._address}: the tier server sent more than the {number} ranges asked for"
            )
        wanted = self._memories[number]
        if length not in (MISSING_LENGTH, wanted.nbytes):
            raise UnexpectedAnswerError(
                f"{self._address}: the tier server sent {length} bytes for a range of {wanted.nbytes}"
            )
        self._found.append(length != MISSING_LENGTH)
        self._left = wanted if length != MISSING_LENGTH else self._left

    def finish(self) -> list[bool]:
        """Return for each range whether the server has its object; called at the end of the stream.

        Raises:
            TruncatedError: The stream ended too early.
        """
        if self._left or self._head or len(self._found) < len(self._memories):
            raise TruncatedError(
                f"{self._address}: the tier server's stream ended in range {len(self._found)} of {len(self._memories)}"
            )
        return self._found
