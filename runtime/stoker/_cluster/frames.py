"""The frames between a cache process and its clients, over a Unix socket or, between machines, over TCP.

Each frame has a head of fixed size, and some have a body. It is no protocol between releases: all sides of a job are of
one, and a frame that makes no sense ends the connection.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from collections import deque
from typing import NamedTuple, cast

from stoker._cache.index import is_name

HELLO = b"stoker-cluster-3"
"""First bytes from the process, followed by the size of the arena, and with its descriptor if it can be mapped."""
HELLO_SIZE = struct.Struct("<Q")
PROTOCOL = 3
"""Number of the protocol between machines."""
NONCE_BYTES = MAC_BYTES = 32
PROOF_BYTES = NONCE_BYTES + MAC_BYTES
MAX_TEXT_BYTES = 1 << 20
"""Maximum size of a body that is a text."""
MAX_PARTS_BYTES = 32 << 20
"""Maximum size of the parts of objects that one answer has; the store reads larger ones by several requests."""
PART = struct.Struct("<32sQQ")
"""A part of an object in a list: the object's name, and the offsets of its first byte and behind its last one."""
_HEAD = struct.Struct("<BI32sQ")
_PIECE_BYTES = 256 << 10
"""Bytes that a transport, which copies what the system does not take at once, gets at a time."""
_SCRATCH = memoryview(bytearray(256 << 10))  # of bytes that nobody needs


class Kind(enum.IntEnum):
    """What a frame is; numbers below 16 are from a client."""

    OPEN = 0
    """The client has mapped the arena if the number is 1; else it wants bodies."""
    ASK = 1
    """The number says what the client needs; see :class:`Need`."""
    PEEK = 2
    """Like ASK, but without a lease, and without waiting."""
    GIVE = 3
    """A body follows, of the size in the name."""
    RELEASE = 4
    CANCEL = 5
    REJECT = 6
    LISTEN = 7
    """Accept clients of a job's other machines; the body, of as many bytes as the number says, has what that takes."""
    JOIN = 8
    """Record members of a job; they are in the body, of as many bytes as the number says."""
    PROVE = 9
    """A body of :data:`PROOF_BYTES` follows, which proves that a client of another machine has the secret."""
    PARTS = 10
    """The body, of as many bytes as the number says, lists ranges of objects that the client needs now."""
    HIT = 16
    """The number is the offset in the arena; a body follows if the client has not mapped it."""
    LEASE = 17
    FULL = 18
    WAIT = 19
    """Another client fetches the object; the answer follows."""
    LACKING = 20
    """Answer to PEEK: the object is not here, and there is room for it."""
    PASS = 21
    """The object is here for a while; a body follows."""
    LISTENS = 22
    """Answer to LISTEN; the body, of as many bytes as the number says, has what is known of the job."""
    MEMBERS = 23
    """Answer to JOIN; the body, of as many bytes as the number says, has all members that are known here."""
    CHALLENGE = 24
    """First frame from a process over TCP; a body of :data:`NONCE_BYTES` follows. The number is :data:`PROTOCOL`."""
    WELCOME = 25
    """Answer to PROVE; the body, of :data:`MAC_BYTES`, proves that the process has the secret, too."""
    RANGES = 26
    """Answer to PARTS; the body, of as many bytes as the number says, has a byte for each part, and then the ranges of
    objects that are here."""


_NAMELESS = {
    *(Kind.OPEN, Kind.LISTEN, Kind.JOIN, Kind.PROVE, Kind.PARTS),
    *(Kind.LISTENS, Kind.MEMBERS, Kind.CHALLENGE, Kind.WELCOME, Kind.RANGES),
}


class Need(enum.IntFlag):
    """What a client that asks for an object needs."""

    SHARED = 1
    """Other clients need the object at about the same time."""
    PASSING = 2
    """The object has another owner, and only passes here."""


class Frame(NamedTuple):
    """The head of a frame.

    Attributes:
        kind: what it is.
        request: number of the request that it is or answers; 0 for none.
        name: name of an object; empty if the frame is not about one.
        number: see :class:`Kind`.
    """

    kind: Kind
    request: int = 0
    name: str = ""
    number: int = 0

    def encode(self) -> bytes:
        """Return the head's bytes."""
        return _HEAD.pack(self.kind, self.request, self.name.encode("ascii"), self.number)

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Frame:
        """Return the frame of a head.

        Raises:
            ValueError: it makes no sense.
        """
        kind, request, name, number = _HEAD.unpack(data)
        text = name.rstrip(b"\0").decode("ascii")
        frame = cls(Kind(kind), request, text, number)
        if text if frame.kind in _NAMELESS else not is_name(text):
            raise ValueError(f"{text!r:.40} is not the name of an object")
        return frame


class FrameProtocol(asyncio.BufferedProtocol):
    """One side of a connection, which receives bodies into memory that it chooses."""

    def __init__(self) -> None:
        self._head, self._filled = bytearray(_HEAD.size), 0
        self._frame: Frame | None = None
        self._body: memoryview | None = None
        self._left = 0
        self._unsent: deque[memoryview] = deque()
        self._is_paused = self._has_ended = False
        self.transport: asyncio.Transport | None = None

    # To be overridden.

    def frame_received(self, frame: Frame) -> tuple[int, memoryview | None]:
        """Process a head; return the size of its body, and memory for it, None to skip the body.

        Raises:
            ValueError: the frame makes no sense here.
        """
        raise NotImplementedError

    def body_received(self, frame: Frame, body: memoryview) -> None:
        """Process a body that has arrived, in the memory that was chosen for it.

        Raises:
            ValueError: it makes no sense.
        """

    # Sending.

    def send(self, frame: Frame, body: bytes | memoryview = b"") -> None:
        """Send a frame, unless the connection ends; the memory of the body must not change afterwards."""
        if self.transport is not None and not self.transport.is_closing() and not self._has_ended:
            self._unsent.append(memoryview(frame.encode()))
            if body:
                self._unsent.append(memoryview(body))
            self._write()

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes that the system has not taken yet."""
        held_bytes = 0 if self.transport is None else self.transport.get_write_buffer_size()
        return held_bytes + sum(map(len, self._unsent))

    def end(self) -> None:
        """Send nothing more; the other side ends the connection once all has arrived."""
        if not self._has_ended:
            self._has_ended = True
            self._write()

    def _write(self) -> None:
        """Give the transport what it takes without a copy of much."""
        while self._unsent and not self._is_paused and self.transport is not None:
            piece = self._unsent[0][:_PIECE_BYTES]
            if len(piece) == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][_PIECE_BYTES:]
            self.transport.write(piece)
        if self._has_ended and not self._unsent and self.transport is not None:
            if self.transport.can_write_eof():
                self.transport.write_eof()  # also where a forked process has the socket, too
            else:  # TLS
                self.transport.close()

    def abort(self) -> None:
        """End the connection: nothing is written to memory any more."""
        self._body = None
        self._unsent.clear()
        if self.transport is not None:
            self.transport.abort()

    def send_text(self, kind: Kind, request: int, text: bytes) -> None:
        """Send a frame whose body is a text."""
        self.send(Frame(kind, request, "", len(text)), text)

    def skip_body(self, request: int) -> None:
        """Have the rest of a body that answers a request go nowhere."""
        if self._frame is not None and self._frame.request == request:
            self._body = None

    @staticmethod
    def text_memory(frame: Frame, limit_bytes: int = MAX_TEXT_BYTES) -> tuple[int, memoryview]:
        """Return the size of a body that is a text, and memory for it.

        Raises:
            ValueError: it is empty, or longer than the limit.
        """
        if not 0 < frame.number <= limit_bytes:
            raise ValueError(f"a text of {frame.number} bytes")
        return frame.number, memoryview(bytearray(frame.number))

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(_PIECE_BYTES)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._write()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._frame is None:
            return memoryview(self._head)[self._filled :]
        if self._body is None:
            return _SCRATCH[: self._left]
        return self._body[len(self._body) - self._left :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._frame is None:
            self._filled += nbytes
            if self._filled < len(self._head):
                return
            self._filled = 0
            try:
                self._frame = Frame.decode(self._head)
                self._left, self._body = self.frame_received(self._frame)
                if self._body is not None and len(self._body) != self._left:
                    raise ValueError(f"{self._frame.kind.name} with a body of another size")
            except ValueError:
                self.abort()
                return
        else:
            self._left -= nbytes
        if not self._left:
            frame, body, self._frame, self._body = self._frame, self._body, None, None
            if body is not None:
                try:
                    self.body_received(frame, body)
                except ValueError:
                    self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unsent.clear()
        self._body = self.transport = None
