"""What servers and clients of a shared tier agree on: paths, headers, and the form of batch reads.

A batch read has names and ranges in one request, and their bytes in one stream. The request has a line
``<name> <start> <end>`` for each part, the end exclusive. The answer has for each, in the same order, a head of eight
bytes, which is a signed number in network order, and as many bytes of the object as it says; -1 says that the object is
not here, and nothing of it follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from stoker._cache.keeper import size_of
from stoker.errors import TruncatedError, UnexpectedAnswerError

OBJECTS_PATH, BATCH_PATH, METRICS_PATH = "/objects/", "/objects", "/metrics"
METRIC_PREFIX = "stoker_tier_"
GROUP_HEADER = "Stoker-Group"
"""Header of a PUT: which data set the object is of; see :meth:`~stoker._shared.secret.TierSecret.group`."""
MAX_PARTS = 1024
MAX_REQUEST_BYTES = 64 * MAX_PARTS
MAX_BATCH_BYTES = 256 << 20
"""Of the parts of one request, unless it is a single one."""
HEAD = Struct(">q")
MISSING = -1

_LINE = re.compile(rb"([0-9a-f]{32}) ([0-9]{1,10}) ([0-9]{1,10})\n")


class Part(NamedTuple):
    """Bytes ``[start, end)`` of the object with a name."""

    name: str
    start: int
    end: int


class PartInto(NamedTuple):
    """A range of the object with a name, and the memory of its size that it goes into."""

    name: str
    start: int
    into: memoryview


def encode_request(parts: Iterable[PartInto]) -> bytes:
    """Return the body of a request."""
    return "".join(f"{name} {start} {start + into.nbytes}\n" for name, start, into in parts).encode()


def parse_request(body: bytes) -> list[Part]:
    """Return what a request asks for.

    Raises:
        ValueError: it is none, too large, or asks for what no object of a name has.
    """
    lines = body.splitlines(keepends=True)
    if not 0 < len(lines) <= MAX_PARTS:
        raise ValueError(f"a batch has 1 to {MAX_PARTS} lines, not {len(lines)}")
    parts = []
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        part = Part(match[1].decode(), int(match[2]), int(match[3])) if match else Part("", 0, 0)
        if not match or not part.start < part.end <= size_of(part.name):
            raise ValueError(f"line {number} is not NAME START END with a range within the object")
        parts.append(part)
    if len(parts) > 1 and sum(part.end - part.start for part in parts) > MAX_BATCH_BYTES:
        raise ValueError(f"a batch has at most {MAX_BATCH_BYTES} bytes")
    return parts


def split(parts: Iterable[PartInto]) -> Iterator[list[PartInto]]:
    """Yield the parts of one request after the other."""
    batch, batch_bytes = list[PartInto](), 0
    for part in parts:
        if batch and (len(batch) == MAX_PARTS or batch_bytes + part.into.nbytes > MAX_BATCH_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(part)
        batch_bytes += part.into.nbytes
    if batch:
        yield batch


class BatchAnswer:
    """Puts the parts of a stream where they belong.

    Args:
        address: of the server, for messages.
        parts: that were asked for.
    """

    def __init__(self, address: str, parts: Sequence[PartInto]) -> None:
        self._address, self._memories = address, [part.into for part in parts]
        self._head = bytearray()
        self._left = memoryview(b"")
        self._found: list[bool] = []

    def take(self, data: bytes | bytearray) -> None:
        """Take the next bytes of the stream.

        Raises:
            UnexpectedAnswerError: they are not what was asked for.
        """
        rest = memoryview(data)
        while rest:
            if self._left:
                count = min(len(self._left), len(rest))
                self._left[:count] = rest[:count]
                self._left = self._left[count:]
            else:
                count = min(HEAD.size - len(self._head), len(rest))
                self._head += rest[:count]
                if len(self._head) == HEAD.size:
                    self._begin_part()
            rest = rest[count:]

    def _begin_part(self) -> None:
        (length,) = HEAD.unpack(self._head)
        self._head.clear()
        number = len(self._found)
        if number == len(self._memories):
            raise UnexpectedAnswerError(f"{self._address}: the tier server sends more than {number} parts asked for")
        wanted = self._memories[number]
        if length not in (MISSING, wanted.nbytes):
            raise UnexpectedAnswerError(
                f"{self._address}: the tier server sends {length} bytes for a part of {wanted.nbytes}"
            )
        self._found.append(length != MISSING)
        self._left = wanted if length != MISSING else self._left

    def finish(self) -> list[bool]:
        """Return of each part whether it came; called when the stream has ended.

        Raises:
            TruncatedError: the stream ended before.
        """
        if self._left or self._head or len(self._found) < len(self._memories):
            raise TruncatedError(
                f"{self._address}: the tier server's stream ended in part {len(self._found)} of {len(self._memories)}"
            )
        return self._found
