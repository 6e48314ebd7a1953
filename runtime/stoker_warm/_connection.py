"""What both ends of a connection between the proxy and a node share: the handshake, sending, and how it ends.

Bodies are sent from the memory where they are, in pieces: nothing is joined or buffered here. A peer that does not read
is sent nothing more, and given up in the end.
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
"""Until the peer has proved its identity."""
CLOSE_TIMEOUT_SECONDS = 1.0
"""Until the peer has taken what was sent before a ``close``."""
STALL_TIMEOUT_SECONDS = 120.0
"""Without the peer taking anything of what is to be sent, before the connection is given up."""
MAX_WRITE_BYTES = 1 << 20
"""Given to the transport at a time."""


class PeerConnection(asyncio.BufferedProtocol):
    """One end, for ``loop.create_connection`` or ``create_server``; it can be used once it is ``wait_authenticated``.

    Args:
        handshake: of this end, for this connection only.

    Attributes:
        failure: why the connection has ended or is about to, None while it has not.
        received_seconds: when anything was last received, in the loop's time.
        sent_seconds: when anything was last given to the transport, in the loop's time.
    """

    def __init__(self, handshake: Handshake) -> None:
        self._loop = asyncio.get_running_loop()
        self._handshake = handshake
        self._transport: asyncio.Transport | None = None
        self._address = "the peer"
        self._reader = FrameReader(self._select_frame_buffer)
        self._outbox = deque[OutgoingFrame]()
        self._is_write_paused = False
        self._deadline_timer: asyncio.TimerHandle | None = None  # of the handshake, or of the end
        self._stall_timer: asyncio.TimerHandle | None = None  # of what the peer is to take next
        self._handshake_over = asyncio.Event()  # the peer is known, or will not be
        self._has_ended = asyncio.Event()
        self.failure: StokerError | None = None
        self.received_seconds = self.sent_seconds = self._loop.time()

    @property
    def peer(self) -> Head | None:
        """What the peer has said of itself, once that is proven."""
        return self._handshake.peer

    @property
    def is_open(self) -> bool:
        """Whether the peer is known, and the connection not lost."""
        return self.peer is not None and self.failure is None

    async def wait_authenticated(self) -> Head:
        """Return what the peer has said of itself, once that is proven.

        Raises:
            CredentialsError: one side does not know the secret, or the certificate is another than expected.
            DeadlineError: the handshake took too long.
            WireError: the peer speaks another protocol.
            ConnectionLostError: the connection broke.
        """
        await self._handshake_over.wait()
        if self.peer is None or self.failure is not None:
            raise self._create_error()
        return self.peer

    # What an end does with frames.

    def _select_body_buffer(self, kind: Kind, body_bytes: int) -> memoryview | None:
        """Say where the body of a frame goes, if the frame may come now."""
        raise NotImplementedError

    def _handle_frame(self, frame: Frame) -> None:
        """Deal with a frame that is whole."""
        raise NotImplementedError

    def _on_written(self) -> None:
        """The transport has been given what it takes now."""

    def _on_failure(self) -> None:
        """Nothing is received or sent any more."""

    # Sending and receiving.

    def _send(self, frame: OutgoingFrame) -> None:
        self._outbox.append(frame)
        self._write_queued()

    def _write_queued(self) -> None:
        """Give the transport what it takes now."""
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
            raise WireError(f"a {kind.name} frame came before the handshake was done")
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
            self._send(OutgoingFrame(Kind.FAILED))  # so that the peer knows that it is about the secret
            self._end(error, is_graceful=True)
        else:
            self.abort(error)

    # Ending.

    async def close(self) -> None:
        """End the connection: requests are given up, what the transport has is sent if the peer takes it.

        Waits until nothing is left of it, for ``CLOSE_TIMEOUT_SECONDS`` at most.
        """
        self._end(ConnectionLostError(f"the connection to {self._address} was closed"), is_graceful=True)
        try:
            await self.wait_closed()
        finally:
            self.abort()

    def abort(self, error: StokerError | None = None) -> None:
        """End the connection at once: nothing more is read, written, or sent. ``wait_closed`` waits for the rest.

        Args:
            error: why, for ``failure``.
        """
        self._end(error or ConnectionLostError(f"the connection to {self._address} was closed"), is_graceful=False)

    async def wait_closed(self) -> None:
        """Wait until the connection has ended and nothing is left of it."""
        await self._has_ended.wait()

    def _end(self, error: StokerError, *, is_graceful: bool) -> None:
        """End everything under way; the first error is the reason."""
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
        """Return why there is no connection, for one of those who wanted it."""
        if self.failure is None:
            return ConnectionLostError(f"the connection to {self._address} is not ready")
        if self.peer is None or isinstance(self.failure, ConnectionLostError):
            return type(self.failure)(*self.failure.args)
        loss = ConnectionLostError(f"the connection to {self._address} was given up: {self.failure}")
        loss.__cause__ = self.failure
        return loss

    def _check_stall(self, previous_bytes: float = math.inf) -> None:
        """Give the connection up if no less waits than before, else look again later."""
        waiting_bytes = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if waiting_bytes >= previous_bytes:
            self.abort(DeadlineError(f"{self._address} took nothing for {STALL_TIMEOUT_SECONDS:g} s"))
        else:
            self._stall_timer = self._loop.call_later(STALL_TIMEOUT_SECONDS, self._check_stall, waiting_bytes)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast("asyncio.Transport", transport)
        self._address = _peer_address(transport)
        tls = transport.get_extra_info("ssl_object")
        # Any bytes that wait pause writing, so that hardly any do. A TLS transport takes 0 as always too many.
        self._transport.set_write_buffer_limits(high=0 if tls is None else 1, low=0)
        if self.failure is not None:  # it was given up before
            self._has_ended.clear()
            self._transport.abort()
            return
        late = DeadlineError(f"{self._address} did not end the handshake in {HANDSHAKE_TIMEOUT_SECONDS:g} s")
        self._deadline_timer = self._loop.call_later(HANDSHAKE_TIMEOUT_SECONDS, self.abort, late)
        try:
            message = self._handshake.begin(_peer_fingerprint(tls))
        except StokerError as error:
            self.abort(error)
            return
        if message is not None:
            self._send(OutgoingFrame(*message))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to receive to."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Deal with the frames that are whole."""
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
        """Give the transport no more, until the peer has taken what it has."""
        self._is_write_paused = True
        self._check_stall()

    def resume_writing(self) -> None:
        """Give the transport what waits."""
        self._is_write_paused = False
        _cancel(self._stall_timer)
        self._write_queued()

    def connection_lost(self, exc: Exception | None) -> None:
        """End everything under way."""
        why = "ended" if exc is None else f"broke ({type(exc).__name__}: {exc})"
        self._end(ConnectionLostError(f"the connection to {self._address} {why}"), is_graceful=False)
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
