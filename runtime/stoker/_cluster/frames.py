"""The frames between a cache process and its clients on one machine, over a Unix socket.

Each frame has a head of fixed size, and some have a body. It is no protocol between machines or releases: both sides
are of one installation, and a frame that makes no sense ends the connection.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from typing import NamedTuple, cast

from stoker._cache.index import is_name

HELLO = b"stoker-cluster-2"
"""First bytes from the process, followed by the size of the arena, and with its descriptor if it can be mapped."""
HELLO_SIZE = struct.Struct("<Q")
_HEAD = struct.Struct("<BI32sQ")
_SCRATCH = memoryview(bytearray(256 << 10))  # of bytes that nobody needs


class Kind(enum.IntEnum):
    """What a frame is; numbers below 16 are from a client."""

    OPEN = 0
    """The client has mapped the arena if the number is 1; else it wants bodies."""
    ASK = 1
    """The number is 1 if other clients need the object at about the same time."""
    PEEK = 2
    """Like ASK, but without a lease, and without waiting."""
    GIVE = 3
    """A body follows, of the size in the name."""
    RELEASE = 4
    CANCEL = 5
    REJECT = 6
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


class Frame(NamedTuple):
    """The head of a frame.

    Attributes:
        kind: what it is.
        request: number of the request that it is or answers; 0 for none.
        name: name of an object; empty in OPEN.
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
        if not is_name(text) and (frame.kind is not Kind.OPEN or text):
            raise ValueError(f"{text!r:.40} is not the name of an object")
        return frame


class FrameProtocol(asyncio.BufferedProtocol):
    """One side of a connection, which receives bodies into memory that it chooses."""

    def __init__(self) -> None:
        self._head, self._filled = bytearray(_HEAD.size), 0
        self._frame: Frame | None = None
        self._body: memoryview | None = None
        self._left = 0
        self._has_ended = False
        self.transport: asyncio.Transport | None = None

    # To be overridden.

    def frame_received(self, frame: Frame) -> tuple[int, memoryview | None]:
        """Process a head; return the size of its body, and memory for it, None to skip the body.

        Raises:
            ValueError: the frame makes no sense here.
        """
        raise NotImplementedError

    def body_received(self, frame: Frame) -> None:
        """Process a body that has arrived."""

    # Sending.

    def send(self, frame: Frame, body: bytes | memoryview = b"") -> None:
        """Send a frame, unless the connection ends; the memory of the body must not change afterwards."""
        if self.transport is not None and not self.transport.is_closing() and not self._has_ended:
            self.transport.write(frame.encode())
            if body:
                self.transport.write(body)

    def end(self) -> None:
        """Send nothing more; the other side ends the connection once all has arrived."""
        if self.transport is not None and not self._has_ended:
            self._has_ended = True
            self.transport.write_eof()  # also where a forked process has the socket, too

    def abort(self) -> None:
        """End the connection: nothing is written to memory any more."""
        self._body = None
        if self.transport is not None:
            self.transport.abort()

    def skip_body(self, request: int) -> None:
        """Have the rest of a body that answers a request go nowhere."""
        if self._frame is not None and self._frame.request == request:
            self._body = None

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

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
            except ValueError:
                self.abort()
                return
        else:
            self._left -= nbytes
        if not self._left:
            frame, body, self._frame, self._body = self._frame, self._body, None, None
            if body is not None:
                self.body_received(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._body = self.transport = None
