"""Wire protocol of the warm tier: frames, a parser of received frames, and outgoing frames, without I/O.

A frame is a header of 12 bytes, a head and a body. The header is ``b"SW"``, the version, the kind, and the lengths of
head and body in bytes, as big-endian 32-bit numbers. The head is a flat JSON object of strings, integers and lists of
strings; empty bytes stand for the empty object. The body is opaque.

The proxy sends requests, and a node sends one answer to each, in the same order. A node also sends notices: these have
kinds of their own, answer no request, and may arrive between two answers.

Received data is untrusted, so every length is checked before memory is allocated. The reader owns no socket (see
https://sans-io.readthedocs.io): it returns the memory to receive into, is given the number of bytes received, and
yields frames. So tests need only bytes, and bodies are received directly into their final memory.
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
"""Maximum length of a head from an unauthenticated peer."""
_HEADER_BUFFER_BYTES = 16 << 10
"""Size of the buffer for headers. Body bytes received into it are copied; a larger one copies more bytes."""
_DISCARD_BUFFER = memoryview(bytearray(256 << 10))
"""Receives discarded bodies; shared by all readers, because it is never read."""

Head = Mapping[str, Any]
"""A JSON object whose values are strings, integers and lists of strings."""


class Kind(IntEnum):
    """Kind of a frame."""

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
"""Kind of a request → kinds of its possible answers; kinds that are not keys are not requests."""

NOTICE_KINDS = frozenset({Kind.HERE, Kind.LEAVING})
"""Kinds of notices: a node was invoked again (HERE), or is about to return (LEAVING)."""

_KINDS = {int(kind): kind for kind in Kind}
_BODY_LIMITS = {Kind.SET: MAX_SHARD_BYTES, Kind.FOUND: MAX_SHARD_BYTES}


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that was received completely.

    Attributes:
        kind: Kind of the frame.
        head: Its head.
        body_bytes: Length of its body, which was received into other memory or discarded.
    """

    kind: Kind
    head: Head
    body_bytes: int


BodyBufferSelector = Callable[[Kind, int], memoryview | None]
"""Called with kind and ``body_bytes`` when a head was received. Returns memory of exactly ``body_bytes`` bytes for the
body, or None to discard it. May raise WireError."""


def encode_frame(kind: Kind, head: Head | None = None, body_bytes: int = 0) -> bytes:
    """Return the header and head of a frame; the caller sends the body after them.

    Raises:
        WireError: Head or body is larger than the kind allows, or the head is not flat.
    """
    text = b""
    if head:
        _check_flat(head)
        text = _dumps(head).encode()
    _check_lengths(kind, len(text), body_bytes, MAX_HEAD_BYTES)
    return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, kind, len(text), body_bytes) + text


class FrameReader:
    """Parses received data into frames.

    One receive may complete several small frames. A body is received into the memory that ``select_buffer`` returns,
    except for its first bytes, which may arrive with the head and are copied.

    Args:
        select_buffer: Function that selects the memory for a body; see ``BodyBufferSelector``.

    Attributes:
        max_head_bytes: Maximum length of a head; 4 KiB, until it is raised for an authenticated peer.
    """

    def __init__(self, select_buffer: BodyBufferSelector) -> None:
        self.max_head_bytes = _MAX_GREETING_BYTES
        self._select_buffer = select_buffer
        self._header_buffer = memoryview(bytearray(_HEADER_BUFFER_BYTES))
        self._start = 0  # of the unparsed bytes in ``_buffer``
        self._end = 0
        self._buffer = self._header_buffer  # receives headers and heads; larger memory for one larger head
        self._frame: Frame | None = None  # the frame whose body is being received
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
        """Yield the frames that are complete after ``count_bytes`` were received into the buffer.

        Handle each frame before requesting the next: ``select_buffer`` may depend on it. Exhaust the iterator.

        Raises:
            WireError: The data does not follow the protocol. All further data is discarded then.
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
        """Discard all data received from now on; the memory of a body is not written to any more."""
        self._is_closed = True
        self._frame = self._body = None

    def discard_body(self) -> None:
        """Discard the rest of the body that is being received, if there is one."""
        self._body = None

    def _begin_frame(self) -> Frame | None:
        """Begin the next frame if its header and head were received; its body may follow later."""
        received = self._buffer[self._start : self._end]
        if len(received) < HEADER_BYTES:
            self._make_room(HEADER_BYTES)
            return None
        kind, head_bytes, body_bytes = _parse_header(received, self.max_head_bytes)
        whole = HEADER_BYTES + head_bytes
        if len(received) < whole:
            self._make_room(whole)
            return None
        head = _parse_head(bytes(received[HEADER_BYTES:whole])) if head_bytes else {}
        self._start += whole
        self._body = self._select_buffer(kind, body_bytes)
        self._remaining_bytes = body_bytes
        self._frame = Frame(kind, head, body_bytes)
        self._copy_buffered_body()
        return self._frame

    def _copy_buffered_body(self) -> None:
        """Copy the body bytes that were received with the head."""
        received = self._buffer[self._start : self._end][: self._remaining_bytes]
        if self._body is not None:
            self._body[: len(received)] = received
        self._remaining_bytes -= len(received)
        self._start += len(received)
        if self._start == self._end:  # start at the beginning again, and release the memory of a large head
            self._buffer, self._start, self._end = self._header_buffer, 0, 0

    def _make_room(self, needed_bytes: int) -> None:
        """Move the unparsed bytes to the beginning of memory with room for ``needed_bytes``."""
        if not self._start and needed_bytes <= len(self._buffer):
            return
        received = bytes(self._buffer[self._start : self._end])
        if needed_bytes > len(self._buffer):
            self._buffer = memoryview(bytearray(needed_bytes))
        self._buffer[: len(received)] = received
        self._start, self._end = 0, len(received)


def _parse_header(data: memoryview, max_head_bytes: int) -> tuple[Kind, int, int]:
    magic, version, number, head_bytes, body_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise WireError(f"a frame begins with {magic!r}, not {_MAGIC!r}: the peer uses another protocol")
    if version != PROTOCOL_VERSION:
        raise WireError(
            f"a frame of protocol version {version} arrived, not {PROTOCOL_VERSION}; deploy one release everywhere"
        )
    kind = _KINDS.get(number)
    if kind is None:
        raise WireError(f"a frame has the unknown kind {number}")
    _check_lengths(kind, head_bytes, body_bytes, max_head_bytes)
    return kind, head_bytes, body_bytes


def _check_lengths(kind: Kind, head_bytes: int, body_bytes: int, max_head_bytes: int) -> None:
    for name, size_bytes, max_bytes in (
        ("head", head_bytes, max_head_bytes),
        ("body", body_bytes, _BODY_LIMITS.get(kind, 0)),
    ):
        if size_bytes > max_bytes:
            raise WireError(f"the {name} of a {kind.name} frame has {size_bytes} bytes; at most {max_bytes} fit")


def _parse_head(data: bytes) -> Head:
    try:
        head = _loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"a head of {len(data)} bytes is not valid JSON: {error}") from None
    if not isinstance(head, dict):
        raise WireError(f"a head must be a JSON object, not {type(head).__name__}")
    _check_flat(head)
    return head


def _check_flat(head: Head) -> None:
    for name, value in head.items():
        is_list = type(value) is list and set(map(type, value)) <= {str}
        if not is_list and type(value) not in (str, int):
            raise WireError(f"the field {name!r:.80} of a head is not a string, an integer or a list of strings")


_loads = json.JSONDecoder().decode
_dumps = json.JSONEncoder(separators=(",", ":")).encode


Buffer = bytes | bytearray | memoryview
"""Contiguous bytes of a body."""

_MAX_JOINED_BYTES = 16 << 10
"""Maximum length of a body that is joined with its head: copying it costs less than another call."""


class OutgoingFrame:
    """A frame to send. A large body is not copied, so do not change its memory.

    Attributes:
        has_begun: Whether ``next_chunk`` has returned a part of it.
        is_complete: Whether ``next_chunk`` has returned all of it.
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
        """Return the next bytes to send: header, head and a small body in one piece, otherwise views of the body."""
        part = self._parts.popleft()
        if self.has_begun and len(part) > max_bytes:
            self._parts.appendleft(part[max_bytes:])
            part = part[:max_bytes]
        self.has_begun, self.is_complete = True, not self._parts
        return part
