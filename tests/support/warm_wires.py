"""Pairs of asyncio transports in memory, on any event loop: a network in virtual time, with injected faults.

``Link`` connects two protocols as a TCP connection does: bytes arrive in order, after a latency, within a bandwidth, in
segments with arbitrary borders. A window bounds the bytes that are sent and not yet read, like the kernel's two
socket buffers; further bytes wait in the sender's transport, which then pauses its protocol. A link can be cut at any
byte or split silently, and each of its ends can be frozen like a stopped process.

``Network`` creates links by address, as ``loop.create_server`` and ``loop.create_connection`` create sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["End", "Link", "LinkConfig", "Network"]

P = TypeVar("P", bound=asyncio.BaseProtocol)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Latency, bandwidth and buffers of a link, equal in both directions.

    Attributes:
        latency_seconds: time from one end to the other.
        bytes_per_second: bandwidth of each direction; None for no limit.
        window_bytes: maximum number of unread bytes in each direction.
        segment_bytes: maximum size of a segment.
    """

    latency_seconds: float = 0.0005
    bytes_per_second: float | None = None
    window_bytes: int = 256 << 10
    segment_bytes: int = 64 << 10


class End(asyncio.Transport):
    """The transport of one end of a link.

    Attributes:
        sent_bytes: number of bytes sent by this end.
        read_bytes: number of bytes that its protocol received.
        tamper: function that changes the bytes that this end sends, but not their number.
    """

    def __init__(self, link: Link, name: str) -> None:
        super().__init__({"peername": (name, 0)})
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._protocol: asyncio.BaseProtocol | None = None
        self._other: End = self
        self._waiting = bytearray()  # written, not sent
        self._unread: deque[bytes] = deque()
        self._flight_bytes = 0  # sent by this end, not read by the other
        self._free_seconds = 0.0  # time at which all sent bytes have arrived
        self._high, self._low = 64 << 10, 16 << 10
        self._is_paused = False  # reading
        self._is_frozen = False
        self._is_full = False  # the protocol has been paused
        self._is_closing = False
        self._is_lost = False
        self._is_broken = False  # and the protocol has not been told
        self._ends_here = False  # the other end has closed, and sent everything
        self._cut_at: int | None = None
        self.sent_bytes = 0
        self.read_bytes = 0
        self.tamper: Callable[[bytes], bytes] = bytes

    # Faults.

    def freeze(self) -> None:
        """Stop the process at this end: it neither reads nor sends, and its socket stays open."""
        self._is_frozen = True

    def thaw(self) -> None:
        """Continue the process."""
        self._is_frozen = False
        if self._unread or self._ends_here:
            self._soon(self._read)
        if self._is_broken:
            self._soon(self._is_reset)
        elif self._waiting:
            self._soon(self._send)

    def cut_after(self, sent_bytes: int) -> None:
        """Cut the link when this end has sent ``sent_bytes`` in total, and the other has received them."""
        self._cut_at = sent_bytes
        self._soon(self._send)
        self._soon(self._cut_if_due)

    # Methods for protocols.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, or copy into the buffer until there is room."""
        if self._is_closing or self._is_lost:
            return
        self._waiting += data
        self._send()
        if len(self._waiting) > self._high and not self._is_full:
            self._is_full = True
            self._writer.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the sizes of the buffer at which the protocol is paused and resumed."""
        self._high = 64 << 10 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that were written and not sent."""
        return len(self._waiting)

    def pause_reading(self) -> None:
        """Stop delivering data to the protocol."""
        self._is_paused = True

    def resume_reading(self) -> None:
        """Deliver buffered and further data to the protocol."""
        self._is_paused = False
        self._soon(self._read)

    def is_reading(self) -> bool:
        """Return whether data is delivered to the protocol."""
        return not (self._is_paused or self._is_closing)

    def is_closing(self) -> bool:
        """Return whether it is closing or closed."""
        return self._is_closing

    def can_write_eof(self) -> bool:
        """Return False: like a connection with TLS, it cannot be closed in one direction only."""
        return False

    def close(self) -> None:
        """Send the buffer, then end of file; read nothing more."""
        if not self._is_closing:
            self._is_closing = True
            self._send()

    def abort(self) -> None:
        """Close at once; the other end is reset, unless this one had closed before."""
        if self._is_lost:
            return
        if self._link.is_split:
            self._lose(None)
        else:
            self._link.reset(self)

    # Implementation.

    @property
    def _writer(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def _start(self, other: End, protocol: asyncio.BaseProtocol) -> None:
        self._other, self._protocol = other, protocol

    def _soon(self, call: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon(call, *args)

    def _send(self) -> None:
        """Send the bytes that the window and a cut allow."""
        config = self._link.config
        while self._waiting and not self._is_frozen and not self._is_lost:
            room = min(config.segment_bytes, config.window_bytes - self._flight_bytes)
            if self._cut_at is not None:
                room = min(room, self._cut_at - self.sent_bytes)
            if room <= 0:
                break
            segment = bytes(self._waiting[:room])
            del self._waiting[:room]
            self._flight_bytes += len(segment)
            self.sent_bytes += len(segment)
            self._carry(segment)
        if self._is_full and len(self._waiting) <= self._low and not self._is_lost:
            self._is_full = False
            self._writer.resume_writing()
        if self._is_closing and not self._waiting and not self._is_lost:
            self._carry(b"")
            self._lose(None)

    def _carry(self, segment: bytes) -> None:
        config = self._link.config
        start = max(self._loop.time(), self._free_seconds)
        self._free_seconds = start + (len(segment) / config.bytes_per_second if config.bytes_per_second else 0.0)
        self._loop.call_at(self._free_seconds + config.latency_seconds, self._other._arrived, self.tamper(segment))

    def _arrived(self, segment: bytes) -> None:
        if self._link.is_split or self._is_lost:
            return
        if segment:
            self._unread.append(segment)
        else:
            self._ends_here = True
        self._read()

    def _read(self) -> None:
        """Deliver the arrived bytes to the protocol, one segment at a time."""
        while self._unread and self.is_reading() and not self._is_frozen and not self._is_lost:
            segment = self._unread.popleft()
            taken = len(segment)
            if isinstance(self._protocol, asyncio.BufferedProtocol):
                buffer = memoryview(self._protocol.get_buffer(-1))
                taken = min(len(buffer), len(segment))
                assert taken, "a protocol gave an empty buffer"
                buffer[:taken] = segment[:taken]
                if taken < len(segment):
                    self._unread.appendleft(segment[taken:])
                self.read_bytes += taken
                self._protocol.buffer_updated(taken)
            else:
                assert isinstance(self._protocol, asyncio.Protocol)
                self.read_bytes += taken
                self._protocol.data_received(segment)
            self._other._flight_bytes -= taken
            if self._other._waiting:
                self._other._soon(self._other._send)
            self._other._cut_if_due()
        if self._ends_here and not self._unread and not self._is_frozen and not self._is_lost:
            self._is_closing = True
            self._lose(None)

    def _cut_if_due(self) -> None:
        if self._cut_at is not None and self._other.read_bytes >= self._cut_at:
            self._link.cut()

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self._waiting.clear()
            self._soon(self._writer.connection_lost, error)

    def _is_reset(self) -> None:
        """Handle a reset by the other end; a frozen process does when it continues."""
        self._is_broken = True
        if not self._is_frozen:
            self._lose(ConnectionResetError("the link was cut"))


class Link:
    """A connection of two protocols. Create it in a running event loop, then ``join`` them.

    Attributes:
        config: latency, bandwidth and buffers.
        ends: transports of the first and of the second protocol.
        is_split: whether all bytes are lost silently.
    """

    def __init__(self, config: LinkConfig | None = None, *, names: tuple[str, str] = ("first", "second")) -> None:
        self.config = config or LinkConfig()
        self.ends = (End(self, names[1]), End(self, names[0]))  # the name that its protocol sees: that of the other end
        self.is_split = False

    def join(self, first: asyncio.BaseProtocol, second: asyncio.BaseProtocol) -> None:
        """Connect two protocols."""
        for end, other, protocol in zip(self.ends, reversed(self.ends), (first, second), strict=True):
            end._start(other, protocol)
        for end, protocol in zip(self.ends, (first, second), strict=True):
            protocol.connection_made(end)

    def cut(self) -> None:
        """Break it: both ends learn of it at once, a frozen one when it is thawed."""
        for end in self.ends:
            end._is_reset()

    def reset(self, end: End) -> None:
        """Break it from one end, which learns at once; the other does after the latency."""
        other = end._other
        end._lose(None)
        end._loop.call_later(self.config.latency_seconds, other._is_reset)

    def split(self) -> None:
        """Lose all bytes silently from now on, as when a machine is switched off."""
        self.is_split = True


class Network:
    """Links by address.

    Attributes:
        config: configuration of new links.
        links: created links, in order.
    """

    def __init__(self, config: LinkConfig | None = None) -> None:
        self.config = config or LinkConfig()
        self.links: list[Link] = []
        self._listening: dict[str, Callable[[], asyncio.BaseProtocol]] = {}

    def listen(self, address: str, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        """Accept links at an address, each with a new protocol."""
        self._listening[address] = protocol

    def stop(self, address: str) -> None:
        """Accept no more links; existing ones stay."""
        del self._listening[address]

    async def dial(self, address: str, protocol: Callable[[], P], *, name: str = "dialler") -> tuple[End, P]:
        """Connect to an address after a round trip.

        Raises:
            ConnectionRefusedError: there is no listener.
        """
        await asyncio.sleep(2 * self.config.latency_seconds)
        made = self._listening.get(address)
        if made is None:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        link, mine = Link(self.config, names=(name, address)), protocol()
        self.links.append(link)
        link.join(mine, made())
        return link.ends[0], mine
