"""Base class of both ends of a connection between the proxy and a node: handshake, sending and closing.

Bodies are sent in pieces from the caller's memory, without joining or buffering them here. If the peer stops reading,
sending stops, and after a timeout the connection is aborted.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import deque
from hashlib import sha256
from typing import cast

from stoker.errors import ConnectionLostError, DeadlineError, StokerError, WireError
from stoker_warm._auth import Handshake
from stoker_warm._frames import MAX_HEAD_BYTES, Frame, FrameReader, Head, Kind, OutgoingFrame

_HANDSHAKE = (Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME, Kind.FAILED)

HANDSHAKE_TIMEOUT_SECONDS = 5.0
"""Timeout of the handshake."""
CLOSE_TIMEOUT_SECONDS = 1.0
"""Maximum time that ``close`` waits for the peer to receive the data sent before."""
STALL_TIMEOUT_SECONDS = 120.0
"""Time in which the peer must receive some of the queued data; otherwise the connection is aborted."""
MAX_WRITE_BYTES = 1 << 20
"""Maximum size of one write to the transport."""


class PeerConnection(asyncio.BufferedProtocol):
    """One end of a connection, for ``loop.create_connection`` or ``create_server``; usable once authenticated.

    Args:
        handshake: This end's side of the handshake, used for this connection only.

    Attributes:
        failure: Reason why the connection has ended or is ending; None while it is open.
        received_seconds: Loop time at which data was last received.
        sent_seconds: Loop time at which data was last written to the transport.
    """

    def __init__(self, handshake: Handshake) -> None:
        self._loop = asyncio.get_running_loop()
        self._handshake = handshake
        self._transport: asyncio.Transport | None = None
        self._address = "the peer"
        self._reader = FrameReader(self._select_frame_buffer)
        self._outbox = deque[OutgoingFrame]()
        self._is_write_paused = False
        self._deadline_timer: asyncio.TimerHandle | None = None  # of the handshake, or of closing
        self._stall_timer: asyncio.TimerHandle | None = None  # of sending while the peer does not read
        self._handshake_over = asyncio.Event()  # the handshake has succeeded or failed
        self._has_ended = asyncio.Event()
        self.failure: StokerError | None = None
        self.received_seconds = self.sent_seconds = self._loop.time()

    @property
    def peer(self) -> Head | None:
        """Fields of the peer's greeting; None until the peer is authenticated."""
        return self._handshake.peer

    @property
    def is_open(self) -> bool:
        """Whether the peer is authenticated and the connection has not failed."""
        return self.peer is not None and self.failure is None

    async def wait_authenticated(self) -> Head:
        """Wait until the peer is authenticated, and return the fields of its greeting.

        Raises:
            CredentialsError: One side does not know the secret, or the certificate is not the expected one.
            DeadlineError: The handshake took longer than ``HANDSHAKE_TIMEOUT_SECONDS``.
            WireError: The peer does not follow the protocol.
            ConnectionLostError: The connection broke.
        """
        await self._handshake_over.wait()
        if self.peer is None or self.failure is not None:
            raise self._create_error()
        return self.peer

    # Hooks of the subclasses.

    def _select_body_buffer(self, kind: Kind, body_bytes: int) -> memoryview | None:
        """Return the memory for the body of a frame, None to discard it; raise WireError if the frame is unexpected."""
        raise NotImplementedError

    def _handle_frame(self, frame: Frame) -> None:
        """Handle a complete frame."""
        raise NotImplementedError

    def _on_written(self) -> None:
        """Called after the transport has received as much of the queued data as it accepts."""

    def _on_failure(self) -> None:
        """Called once when the connection ends; nothing is received or sent any more."""

    # Sending and receiving.

    def _send(self, frame: OutgoingFrame) -> None:
        self._outbox.append(frame)
        self._write_queued()

    def _write_queued(self) -> None:
        """Write queued frames until the transport pauses writing."""
        transport = self._transport
        while self._outbox and not self._is_write_paused and transport is not None and not transport.is_closing():
            frame = self._outbox[0]
            piece = frame.next_chunk(MAX_WRITE_BYTES)
            if frame.is_complete:
                self._outbox.popleft()
            self.sent_seconds = self._loop.time()
            transport.write(piece)
        self._on_written()

    def _select_frame_buffer(self, kind: Kind, body_bytes: int) -> memoryview | None:
        if self.peer is not None:
            return self._select_body_buffer(kind, body_bytes)
        if kind not in _HANDSHAKE:
            raise WireError(f"a {kind.name} frame arrived before the handshake had ended")
        return None

    def _handle_handshake(self, frame: Frame) -> None:
        message = self._handshake.receive(frame.kind, frame.head)
        if message is not None:
            self._send(OutgoingFrame(*message))
        if self.is_open:
            self._reader.max_head_bytes = MAX_HEAD_BYTES
            _cancel(self._deadline_timer)
            self._handshake_over.set()

    def _handle_error(self, error: StokerError) -> None:
        if self.failure is None and self.peer is None and not isinstance(error, WireError):
            self._send(OutgoingFrame(Kind.FAILED))  # tells the peer that authentication has failed
            self._end(error, is_graceful=True)
        else:
            self.abort(error)

    # Closing.

    async def close(self) -> None:
        """Cancel all requests, send buffered data, and close; abort after ``CLOSE_TIMEOUT_SECONDS``."""
        self._end(ConnectionLostError(f"the connection to {self._address} was closed"), is_graceful=True)
        try:
            await self.wait_closed()
        finally:
            self.abort()

    def abort(self, error: StokerError | None = None) -> None:
        """End the connection at once, and discard buffered data; use ``wait_closed`` to wait until it has ended.

        Args:
            error: Reason, for ``failure``.
        """
        self._end(error or ConnectionLostError(f"the connection to {self._address} was closed"), is_graceful=False)

    async def wait_closed(self) -> None:
        """Wait until the connection has ended and its transport is closed."""
        await self._has_ended.wait()

    def _end(self, error: StokerError, *, is_graceful: bool) -> None:
        """Fail pending requests and close the transport; the first error becomes ``failure``."""
        if self.failure is None:
            self.failure = error
            _cancel(self._deadline_timer)
            _cancel(self._stall_timer)
            self._outbox.clear()
            self._reader.close()
            self._handshake_over.set()
            self._on_failure()
            if is_graceful:
                self._deadline_timer = self._loop.call_later(CLOSE_TIMEOUT_SECONDS, self.abort)
        if self._transport is None:
            self._has_ended.set()
        elif is_graceful:
            self._transport.close()
        else:
            self._transport.abort()

    def _create_error(self) -> StokerError:
        """Return a new exception with the reason why there is no connection, for one caller."""
        if self.failure is None:
            return ConnectionLostError(f"the connection to {self._address} is not ready")
        if self.peer is None or isinstance(self.failure, ConnectionLostError):
            return type(self.failure)(*self.failure.args)
        loss = ConnectionLostError(f"the connection to {self._address} was aborted: {self.failure}")
        loss.__cause__ = self.failure
        return loss

    def _check_stall(self, previous_bytes: float = math.inf) -> None:
        """Abort the connection if no queued data was sent since the last check; otherwise schedule the next check."""
        waiting_bytes = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if waiting_bytes >= previous_bytes:
            self.abort(DeadlineError(f"{self._address} received no data for {STALL_TIMEOUT_SECONDS:g} s"))
        else:
            self._stall_timer = self._loop.call_later(STALL_TIMEOUT_SECONDS, self._check_stall, waiting_bytes)

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast("asyncio.Transport", transport)
        self._address = _peer_address(transport)
        tls = transport.get_extra_info("ssl_object")
        # Writing pauses as soon as bytes are buffered, so that few are. A TLS transport would treat 0 as always paused.
        self._transport.set_write_buffer_limits(high=0 if tls is None else 1, low=0)
        if self.failure is not None:  # it was aborted before it was established
            self._has_ended.clear()
            self._transport.abort()
            return
        late = DeadlineError(f"{self._address} did not complete the handshake in {HANDSHAKE_TIMEOUT_SECONDS:g} s")
        self._deadline_timer = self._loop.call_later(HANDSHAKE_TIMEOUT_SECONDS, self.abort, late)
        try:
            message = self._handshake.begin(_peer_fingerprint(tls))
        except StokerError as error:
            self.abort(error)
            return
        if message is not None:
            self._send(OutgoingFrame(*message))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return memory to receive into."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the frames that are complete."""
        self.received_seconds = self._loop.time()
        try:
            for frame in self._reader.receive(nbytes):
                if self.peer is None:
                    self._handle_handshake(frame)
                else:
                    self._handle_frame(frame)
        except StokerError as error:
            self._handle_error(error)

    def pause_writing(self) -> None:
        """Stop writing until the transport has sent its buffered data."""
        self._is_write_paused = True
        self._check_stall()

    def resume_writing(self) -> None:
        """Write the queued data."""
        self._is_write_paused = False
        _cancel(self._stall_timer)
        self._write_queued()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail pending requests."""
        reason = "ended" if exc is None else f"broke ({type(exc).__name__}: {exc})"
        self._end(ConnectionLostError(f"the connection to {self._address} {reason}"), is_graceful=False)
        _cancel(self._deadline_timer)
        _cancel(self._stall_timer)
        self._has_ended.set()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _peer_address(transport: asyncio.BaseTransport) -> str:
    name = transport.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name or "the peer")


def _peer_fingerprint(tls: ssl.SSLObject | None) -> str:
    certificate = tls.getpeercert(binary_form=True) if tls is not None else None
    return sha256(certificate).hexdigest() if certificate else ""
