"""The wire of the warm tier: frames, a reader of them and what is to be sent of them, without I/O.

A frame is a header of 12 bytes, a head and a body. The header is ``b"SW"``, a version, a kind, and as big-endian
32-bit numbers the head's bytes and the body's. The head is a flat JSON object of texts, integers and lists of texts,
or nothing, which is the empty object. The body is opaque.

The proxy sends requests, and a node one answer to each, in the same order. A node also sends notices: kinds of their
own, which answer nothing and may stand between two answers.

What arrives comes from anywhere, so every length is checked before anything is allocated. The reader owns no socket
(see https://sans-io.readthedocs.io): it says where to receive to, is told how much came, and gives out frames. So it
is tested with bytes alone, and what is received goes straight to where it is wanted.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from stoker.errors import WireError

PROTOCOL_VERSION = 3
MAX_HEAD_BYTES = 64 << 10
MAX_SHARD_BYTES = 16 << 20

_MAGIC = b"SW"
_HEADER = struct.Struct(">2sBBII")
HEADER_BYTES = _HEADER.size
_MAX_GREETING_BYTES = 4 << 10
"""Of a head from an unauthenticated peer."""
_HEADER_BUFFER_BYTES = 16 << 10
"""Received at a time where a header is expected. What of it is body is copied; what does not fit costs a receive."""
_DISCARD_BUFFER = memoryview(bytearray(256 << 10))
"""Receives bodies that are thrown away: one for all readers, since it is never read."""

Head = Mapping[str, Any]
"""A JSON object whose values are texts, integers and lists of texts."""


class Kind(IntEnum):
    """What a frame is."""

    CHALLENGE = 1
    PROOF = 2
    WELCOME = 3
    PING = 16
    PONG = 17
    GET = 18
    FOUND = 19
    MISSING = 20
    SET = 21
    STORED = 22
    REFUSED = 23
    DELETE = 24
    INDEX = 25
    LISTED = 26
    STOP = 28
    BYE = 29
    FAILED = 30
    HERE = 32
    LEAVING = 33


REPLY_KINDS: Mapping[Kind, tuple[Kind, ...]] = {
    Kind.PING: (Kind.PONG, Kind.FAILED),
    Kind.GET: (Kind.FOUND, Kind.MISSING, Kind.FAILED),
    Kind.SET: (Kind.STORED, Kind.REFUSED, Kind.FAILED),
    Kind.DELETE: (Kind.STORED, Kind.FAILED),
    Kind.INDEX: (Kind.LISTED, Kind.FAILED),
    Kind.STOP: (Kind.BYE, Kind.FAILED),
}
"""How each request may be answered; a kind that is not here is no request."""

NOTICE_KINDS = frozenset({Kind.HERE, Kind.LEAVING})
"""What a node says unasked: that it is here again, and that it goes."""

_KINDS = {int(kind): kind for kind in Kind}
_BODY_LIMITS = {Kind.SET: MAX_SHARD_BYTES, Kind.FOUND: MAX_SHARD_BYTES}


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that has arrived whole.

    Attributes:
        kind: what it is.
        head: what it says.
        body_bytes: how long its body is, wherever that went.
    """

    kind: Kind
    head: Head
    body_bytes: int


BodyBufferSelector = Callable[[Kind, int], memoryview | None]
"""Is called with kind and ``body_bytes`` once a head has arrived. Returns memory of exactly ``body_bytes`` bytes for
the body, or None to throw it away. May raise WireError."""


def encode_frame(kind: Kind, head: Head | None = None, body_bytes: int = 0) -> bytes:
    """Return header and head of a frame; its body is to be sent behind them.

    Raises:
        WireError: a part of it is larger than its kind allows, or the head is not flat.
    """
    text = b""
    if head:
        _check_flat(head)
        text = _dumps(head).encode()
    _check_lengths(kind, len(text), body_bytes, MAX_HEAD_BYTES)
    return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, kind, len(text), body_bytes) + text


class FrameReader:
    """Makes frames of what is received.

    Several small frames may come at once; a body is received where ``select_buffer`` says, but for its first bytes,
    which came with its head and are copied.

    Args:
        select_buffer: is asked where a body is to go; see ``BodyBufferSelector``.

    Attributes:
        max_head_bytes: of a frame; few, until it is raised for a peer that is known.
    """

    def __init__(self, select_buffer: BodyBufferSelector) -> None:
        self.max_head_bytes = _MAX_GREETING_BYTES
        self._select_buffer = select_buffer
        self._header_buffer = memoryview(bytearray(_HEADER_BUFFER_BYTES))
        self._start = 0  # of what has not been read yet in the memory where headers and heads are received
        self._end = 0
        self._buffer = self._header_buffer  # or memory for one head that is larger
        self._frame: Frame | None = None  # whose body is under way
        self._body: memoryview | None = None
        self._remaining_bytes = 0
        self._is_closed = False
        self._error = ""

    def get_buffer(self) -> memoryview:
        """Return memory to receive into, never empty; valid until the next call of any method."""
        if self._is_closed:
            return _DISCARD_BUFFER
        if self._frame is None:
            return self._buffer[self._end :]
        if self._body is None:
            return _DISCARD_BUFFER[: self._remaining_bytes]
        return self._body[-self._remaining_bytes :]

    def receive(self, count_bytes: int) -> Iterator[Frame]:
        """Yield the frames that are whole now that ``count_bytes`` were received into the buffer.

        Each must be dealt with before the next is asked for, whose ``begin`` may depend on it. All must be asked for.

        Raises:
            WireError: this is not the protocol. Nothing more is read then, and all that follows is thrown away.
        """
        if self._error:
            raise WireError(self._error)
        if self._frame is not None:
            self._remaining_bytes -= count_bytes
        else:
            self._end += count_bytes
        try:
            while not self._is_closed:
                frame = self._frame or self._begin_frame()
                if frame is None or self._remaining_bytes:
                    return
                self._frame = self._body = None
                yield frame
        except WireError as error:
            self._error = str(error)
            self.close()
            raise

    def close(self) -> None:
        """Read nothing more: what is received from here on is thrown away, and no memory of a body is written to."""
        self._is_closed = True
        self._frame = self._body = None

    def discard_body(self) -> None:
        """Throw away the rest of the body that is under way, if one is."""
        self._body = None

    def _begin_frame(self) -> Frame | None:
        """Begin the next frame, whose body may still have to come, if its header and head have arrived."""
        there = self._buffer[self._start : self._end]
        if len(there) < HEADER_BYTES:
            self._make_room(HEADER_BYTES)
            return None
        kind, head_bytes, body_bytes = _parse_header(there, self.max_head_bytes)
        whole = HEADER_BYTES + head_bytes
        if len(there) < whole:
            self._make_room(whole)
            return None
        head = _parse_head(bytes(there[HEADER_BYTES:whole])) if head_bytes else {}
        self._start += whole
        self._body, self._remaining_bytes = self._select_buffer(kind, body_bytes), body_bytes
        self._frame = Frame(kind, head, body_bytes)
        self._copy_buffered_body()
        return self._frame

    def _copy_buffered_body(self) -> None:
        """Take what of the body came with the head."""
        there = self._buffer[self._start : self._end][: self._remaining_bytes]
        if self._body is not None:
            self._body[: len(there)] = there
        self._remaining_bytes -= len(there)
        self._start += len(there)
        if self._start == self._end:  # so that the next header has all the room, and a large head's memory goes
            self._buffer, self._start, self._end = self._header_buffer, 0, 0

    def _make_room(self, needed_bytes: int) -> None:
        """Move what is there to the beginning of memory that has room for ``needed_bytes``."""
        if not self._start and needed_bytes <= len(self._buffer):
            return
        there = bytes(self._buffer[self._start : self._end])
        if needed_bytes > len(self._buffer):
            self._buffer = memoryview(bytearray(needed_bytes))
        self._buffer[: len(there)] = there
        self._start, self._end = 0, len(there)


def _parse_header(data: memoryview, max_head_bytes: int) -> tuple[Kind, int, int]:
    magic, version, number, head_bytes, body_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise WireError(f"a frame begins with {magic!r}, not {_MAGIC!r}: the peer speaks another protocol")
    if version != PROTOCOL_VERSION:
        raise WireError(
            f"a frame of protocol version {version} arrived, this is {PROTOCOL_VERSION}: deploy both sides alike"
        )
    kind = _KINDS.get(number)
    if kind is None:
        raise WireError(f"a frame is of kind {number}, which is none")
    _check_lengths(kind, head_bytes, body_bytes, max_head_bytes)
    return kind, head_bytes, body_bytes


def _check_lengths(kind: Kind, head_bytes: int, body_bytes: int, max_head_bytes: int) -> None:
    for what, size_bytes, most in (
        ("head", head_bytes, max_head_bytes),
        ("body", body_bytes, _BODY_LIMITS.get(kind, 0)),
    ):
        if size_bytes > most:
            raise WireError(f"the {what} of a {kind.name} frame has {size_bytes} bytes; at most {most} are allowed")


def _parse_head(data: bytes) -> Head:
    try:
        head = _loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"a head of {len(data)} bytes is no JSON: {error}") from None
    if not isinstance(head, dict):
        raise WireError(f"a head is a JSON {type(head).__name__}, not an object")
    _check_flat(head)
    return head


def _check_flat(head: Head) -> None:
    for name, value in head.items():
        is_list = type(value) is list and set(map(type, value)) <= {str}
        if not is_list and type(value) not in (str, int):
            raise WireError(f"the field {name!r:.80} of a head is no text, integer or list of texts")


_loads = json.JSONDecoder().decode
_dumps = json.JSONEncoder(separators=(",", ":")).encode


Buffer = bytes | bytearray | memoryview
"""Bytes of a body, contiguous."""

_MAX_JOINED_BYTES = 16 << 10
"""Up to this many bytes of a body are sent in one piece with their head: a copy costs less than another call."""


class OutgoingFrame:
    """A frame that is to be sent. Its body is not copied, so its memory is never changed.

    Attributes:
        has_begun: some of it was given out.
        is_complete: all of it was.
    """

    __slots__ = ("_parts", "has_begun", "is_complete")

    def __init__(self, kind: Kind, head: Head | None = None, body: Iterable[Buffer] = ()) -> None:
        parts = [part for part in (memoryview(part).cast("B") for part in body) if len(part)]
        body_bytes = sum(map(len, parts))
        first = encode_frame(kind, head, body_bytes)
        joined = [memoryview(b"".join([first, *parts]))] if body_bytes <= _MAX_JOINED_BYTES else None
        self._parts = deque(joined or [memoryview(first), *parts])
        self.has_begun = self.is_complete = False

    def next_chunk(self, max_bytes: int) -> memoryview:
        """Return what is to be sent next: header, head and a small body in one, else views of the body."""
        part = self._parts.popleft()
        if self.has_begun and len(part) > max_bytes:
            self._parts.appendleft(part[max_bytes:])
            part = part[:max_bytes]
        self.has_begun, self.is_complete = True, not self._parts
        return part
