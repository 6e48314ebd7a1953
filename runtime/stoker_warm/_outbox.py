"""What is to be sent over one connection of the warm tier: frames in order, given out in pieces. Does no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from stoker_warm._wire import Head, Kind, encode_frame

__all__ = ["Buffer", "Outbox", "Outgoing"]

Buffer = bytes | bytearray | memoryview
"""Bytes of a body, contiguous."""

_JOINED_BYTES = 16 << 10
"""Up to so many bytes of a body are sent in one piece with their head: a copy costs less than another call."""


class Outgoing:
    """A frame that is to be sent. Its body is not copied, so its memory must stay as it is until ``is_over``.

    Attributes:
        kind: what it is.
        request: its number.
        has_begun: some of it was given out.
        is_over: all of it was, or it will never be.
    """

    __slots__ = ("_body", "_head", "has_begun", "is_over", "kind", "request")

    def __init__(self, kind: Kind, request: int, head: Head | None = None, body: Iterable[Buffer] = ()) -> None:
        parts = (memoryview(part).cast("B") for part in body)
        self._body = deque(part for part in parts if len(part))
        self._head = encode_frame(kind, request, head, sum(map(len, self._body)))
        self.kind = kind
        self.request = request
        self.has_begun = False
        self.is_over = False

    def release(self) -> None:
        """Copy what of the body is left, so that its memory may be used for something else."""
        self._body = deque([memoryview(b"".join(self._body))]) if self._body else self._body

    def next_piece(self, most_bytes: int) -> Buffer:
        """Return what is to be sent next; head and small body in one, then views of the body."""
        if not self.has_begun:
            self.has_begun = True
            piece: Buffer = self._head
            if sum(map(len, self._body)) <= _JOINED_BYTES:
                piece = b"".join((piece, *self._body))
                self._body.clear()
        else:
            part = self._body.popleft()
            piece = part[:most_bytes]
            if len(part) > most_bytes:
                self._body.appendleft(part[most_bytes:])
        self.is_over = not self._body
        return piece


class Outbox:
    """Frames in the order in which they are to be sent.

    Args:
        piece_bytes: how large a piece of a body may be.
    """

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._frames: deque[Outgoing] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, frame: Outgoing) -> None:
        """Send a frame behind all others."""
        self._frames.append(frame)

    def next_piece(self) -> tuple[Buffer, Outgoing]:
        """Return the next piece of the first frame, and that. There must be one."""
        frame = self._frames[0]
        piece = frame.next_piece(self._piece_bytes)
        if frame.is_over:
            self._frames.popleft()
        return piece, frame

    def withdraw(self, frame: Outgoing) -> bool:
        """Do not send a frame. Of one that has begun the rest is copied and sent, since its length was promised.

        Returns: whether nothing of it was or will be sent.
        """
        if frame.is_over:
            return False
        if frame.has_begun:
            frame.release()
            return False
        self._frames.remove(frame)
        frame.is_over = True
        return True

    def clear(self) -> None:
        """Send nothing more."""
        for frame in self._frames:
            frame.is_over = True
        self._frames.clear()
