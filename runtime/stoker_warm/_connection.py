"""One connection of the warm tier: requests and answers in pipelines, over any asyncio transport.

The body of an answer is received straight into the memory of the caller, and a body is sent from the memory where it
is, in pieces: nothing is joined or buffered here. A request that is cancelled lets go of its memory at once; the peer
is not told, and its answer is read and thrown away.

Memory is bounded whatever the peer does. One that does not read gets nothing more, and one that asks faster than it is
served is not read until answers have gone out; so only one side of a connection should ask in bulk, or both could wait
for each other until their deadlines.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import cast

from stoker.errors import ConfigError, ConnectionLostError, DeadlineError, StokerError, WireError
from stoker_warm._auth import Handshake, Peer
from stoker_warm._frames import ANSWERS, NOTICES, Buffer, Frame, FrameReader, Head, Kind, Outgoing
from stoker_warm._requests import ClientSide, Reply, Serve, ServerSide

_HANDSHAKE = (Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME, Kind.FAILED)

Notice = Callable[[Kind, Head], None]
"""Is called with a frame that answers nothing."""

Room = Callable[[int], bytearray | None]
"""Is called with the bytes of a request's body, more than 0, before any has arrived. Returns exactly that much memory,
or None to throw the body away and be served without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """Limits of a connection.

    Attributes:
        open_requests: requests of this side without an answer, at most; more wait for their turn.
        serving_requests: requests of the peer that are served, from which on it is not read any more.
        serving_bytes: bytes of their bodies, from which on it is not read any more.
        handshake_seconds: until the peer has proved its identity.
        close_seconds: until the peer has taken what was sent before a ``close``.
        piece_bytes: sent at a time.
        stall_seconds: without the peer taking anything of what is to be sent, before the connection is given up.

    Raises:
        ConfigError: one of them is not positive.
    """

    open_requests: int = 64
    serving_requests: int = 64
    serving_bytes: int = 128 << 20
    handshake_seconds: float = 5.0
    close_seconds: float = 1.0
    piece_bytes: int = 1 << 20
    stall_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of a connection is {getattr(self, name)}, and must be more than 0")


@dataclass(frozen=True, slots=True)
class ConnectionStatistics:
    """Counters of a connection.

    Attributes:
        sent_bytes: given to the transport.
        received_bytes: taken from it.
        open_requests: of this side, without an answer, cancelled ones included.
        serving_requests: of the peer, until their answers were given to the transport.
        serving_bytes: of the bodies of those.
        heard_seconds: when something was last received, in the loop's time.
    """

    sent_bytes: int
    received_bytes: int
    open_requests: int
    serving_requests: int
    serving_bytes: int
    heard_seconds: float


class Connection(asyncio.BufferedProtocol):
    """One peer. Give it to ``loop.create_connection`` or ``create_server``, and wait until it is ``ready``.

    Args:
        handshake: of this side, for this connection only.
        serve: answers the peer's requests.
        notice: takes frames that answer nothing; without, they are ignored.
        room: makes the memory for a request's body.
        config: its limits.
    """

    def __init__(
        self,
        handshake: Handshake,
        serve: Serve,
        *,
        notice: Notice | None = None,
        room: Room = bytearray,
        config: ConnectionConfig | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._handshake, self._notice, self._room = handshake, notice, room
        self._config = config or ConnectionConfig()
        self._transport: asyncio.Transport | None = None
        self._address = "the peer"
        self._reader = FrameReader(self._begin)
        self._outbox = deque[Outgoing]()
        self._client = ClientSide(
            self._config.open_requests,
            self._outbox,
            send=self._send,
            discard_body=self._reader.discard_body,
            loss=lambda: None if self.is_open else self._loss(),
        )
        self._server = ServerSide(serve, send=self._send, changed=self._balance_reading)
        self._body = bytearray()
        self._is_write_paused = self._is_read_paused = False
        self._watch: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._failure: StokerError | None = None
        self._changed = asyncio.Event()
        self._is_over = False
        self._has_closed = asyncio.Event()  # not set by every frame, as _changed is
        self._sent_bytes = self._received_bytes = 0
        self._heard_seconds = self._loop.time()

    @property
    def peer(self) -> Peer | None:
        """The identity of the peer, once that is proven."""
        return self._handshake.peer

    @property
    def is_open(self) -> bool:
        """Whether requests can be made: the peer is known, and the connection not lost."""
        return self.peer is not None and self._failure is None

    @property
    def failure(self) -> StokerError | None:
        """Why the connection has ended or is about to, None while it has not."""
        return self._failure

    @property
    def received_seconds(self) -> float:
        """When anything was last received, in the loop's time."""
        return self._heard_seconds

    def statistics(self) -> ConnectionStatistics:
        """Return a snapshot of its counters."""
        return ConnectionStatistics(
            self._sent_bytes,
            self._received_bytes,
            len(self._client),
            len(self._server),
            self._server.body_bytes,
            self._heard_seconds,
        )

    async def ready(self) -> Peer:
        """Return the identity of the peer, once that is proven.

        Raises:
            CredentialsError: one side does not know the secret, or the certificate is another than expected.
            DeadlineError: the handshake took too long.
            WireError: the peer speaks another protocol.
            ConnectionLostError: the connection broke.
        """
        await self._until(lambda: self.peer is not None or self._failure is not None)
        if self.peer is None or self._failure is not None:
            raise self._loss()
        return self.peer

    # Requests of this side.

    async def request(
        self,
        kind: Kind,
        head: Head | None = None,
        *,
        body: Sequence[Buffer] = (),
        into: memoryview | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """Ask the peer, and return its answer. Requests may be answered in any order.

        When this returns or raises, cancelled too, nothing writes to ``into`` any more.

        Args:
            kind: a key of ``ANSWERS``.
            head: of the request.
            body: parts that are sent one behind the other. Their memory is never changed: it may be sent later.
            into: memory for the body of the answer, which may be shorter; without, it is thrown away.
            timeout: in seconds, the wait for its turn and the sending included.

        Raises:
            ConnectionLostError: the connection is not open, or broke.
            DeadlineError: there was no answer in time. The connection stays open.
            ServerError: the peer says that it failed.
            WireError: the request cannot be sent.
        """
        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                return await self._client.request(kind, head, body, into)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineError(f"{self._address} did not answer {kind.name} within {timeout:g} s") from None
        finally:
            # It refers to the task, whose cancellation refers to this frame: a circle that would keep the memory.
            del deadline

    # Sending and receiving.

    def _balance_reading(self) -> None:
        """Read as long as there are not too many requests to serve."""
        self._wake()
        if self._transport is None or self._transport.is_closing():
            return
        config, serving = self._config, self._server
        is_full = len(serving) >= config.serving_requests or serving.body_bytes >= config.serving_bytes
        if is_full and not self._is_read_paused:
            self._transport.pause_reading()
        elif not is_full and self._is_read_paused:
            self._transport.resume_reading()
        self._is_read_paused = is_full

    def notify(self, kind: Kind, head: Head | None = None) -> None:
        """Send a frame that needs no answer: a kind of ``NOTICES``.

        Raises:
            ConnectionLostError: the connection is not open.
        """
        if not self.is_open:
            raise self._loss()
        self._send(Outgoing(kind, 0, head))

    async def flush(self) -> None:
        """Wait until all that was to be sent is with the transport and, but for TLS, with the kernel.

        Raises:
            ConnectionLostError: the connection broke before.
        """
        await self._until(lambda: not (self._outbox or self._is_write_paused) or self._failure is not None)
        if self._failure is not None:
            raise self._loss()

    def _send(self, frame: Outgoing) -> None:
        self._outbox.append(frame)
        self._pump()

    def _pump(self) -> None:
        """Give the transport what it takes now."""
        transport = self._transport
        while self._outbox and not self._is_write_paused and transport is not None and not transport.is_closing():
            frame = self._outbox[0]
            piece = frame.next_piece(self._config.piece_bytes)
            if frame.is_over:
                self._outbox.popleft()
            self._sent_bytes += len(piece)
            transport.write(piece)
            if frame.is_over:
                self._server.sent(frame)
        self._wake()

    def _begin(self, kind: Kind, request: int, head: Head, body_bytes: int) -> memoryview | None:
        """Say where the body of a frame goes, if the frame may come now."""
        if self.peer is None:
            if request or body_bytes or kind not in _HANDSHAKE:
                raise WireError(f"a {kind.name} frame came before the handshake was done")
            return None
        if kind in ANSWERS:
            if not request or request in self._server:
                raise WireError(f"a {kind.name} frame has the number {request}, which is 0 or in use")
            body = self._room(body_bytes) if body_bytes else None
            self._body = bytearray() if body is None else body
            return None if body is None else memoryview(body)
        if not request and kind in NOTICES:
            return None
        return self._client.destination(kind, request, body_bytes)

    def _take(self, frame: Frame) -> None:
        if self.peer is None:
            message = self._handshake.received(frame.kind, frame.head)
            if message is not None:
                self._send(Outgoing(message[0], 0, message[1]))
            if self.is_open:
                self._stop_timers()
                self._wake()
        elif frame.kind in ANSWERS:
            body, self._body = self._body, bytearray()
            self._server.take(frame, body)
        elif frame.request:
            self._client.answered(frame, self._address)
        elif self._notice is not None:
            self._notice(frame.kind, frame.head)

    # Ending.

    async def close(self) -> None:
        """End the connection: requests of both sides are given up, what the transport has is sent if the peer takes it.

        Waits until nothing is left of it, for ``close_seconds`` at most.
        """
        self._end(ConnectionLostError(f"the connection to {self._address} was closed"), is_gentle=True)
        patience = self._loop.call_later(self._config.close_seconds, self.abort)
        try:
            await self.closed()
        finally:
            patience.cancel()
            self.abort()

    def abort(self, error: StokerError | None = None) -> None:
        """End the connection at once: nothing more is read, written, or sent. ``closed`` waits for the rest.

        Args:
            error: why, for ``failure``.
        """
        self._end(error or ConnectionLostError(f"the connection to {self._address} was closed"), is_gentle=False)

    async def closed(self) -> None:
        """Wait until the connection has ended and nothing is left of it. Not to be called by what it serves."""
        while not (self._is_over and not self._server):
            self._has_closed.clear()
            await self._has_closed.wait()

    def _end(self, error: StokerError, *, is_gentle: bool) -> None:
        """End everything under way; the first error is the reason."""
        if self._failure is None:
            self._failure = error
            self._stop_timers()
            self._outbox.clear()
            self._reader.close()
            self._body = bytearray()
            self._client.end()
            self._server.end()
        if self._transport is None:
            self._is_over = True
        elif is_gentle:
            self._transport.close()
        else:
            self._transport.abort()
        self._wake()

    def _loss(self) -> StokerError:
        """Return why there is no connection, for one of those who wanted it."""
        if self._failure is None:
            return ConnectionLostError(f"the connection to {self._address} is not ready")
        if self.peer is None and not isinstance(self._failure, ConnectionLostError):
            return type(self._failure)(*self._failure.args)
        if isinstance(self._failure, ConnectionLostError):
            return ConnectionLostError(str(self._failure))
        loss = ConnectionLostError(f"the connection to {self._address} was given up: {self._failure}")
        loss.__cause__ = self._failure
        return loss

    def _watch_for_stall(self) -> None:
        assert self._transport is not None  # noqa: S101 - it has paused us
        waiting_bytes = self._transport.get_write_buffer_size()
        self._stall = self._loop.call_later(self._config.stall_seconds, self._is_stalled, waiting_bytes)

    def _is_stalled(self, waiting_bytes: int) -> None:
        """Give the connection up if as much waits as before, else look again later."""
        if self._transport is not None and self._transport.get_write_buffer_size() < waiting_bytes:
            self._watch_for_stall()
        else:
            self.abort(DeadlineError(f"{self._address} took nothing for {self._config.stall_seconds:g} s"))

    def _stop_timers(self) -> None:
        for timer in (self._watch, self._stall):
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()
        if self._is_over and not self._server:
            self._has_closed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast("asyncio.Transport", transport)
        self._address = _address_of(transport)
        tls = transport.get_extra_info("ssl_object")
        # Any bytes that wait pause writing, so that hardly any do. A TLS transport takes 0 as always too many.
        self._transport.set_write_buffer_limits(high=0 if tls is None else 1, low=0)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # Its buffers are left to the kernel, which lets them grow further than we may; over loopback, no fixed size
            # was faster.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._failure is not None:  # it was given up before
            self._is_over = False
            self._transport.abort()
            return
        seconds = self._config.handshake_seconds
        late = DeadlineError(f"{self._address} did not end the handshake in {seconds:g} s")
        self._watch = self._loop.call_later(seconds, self.abort, late)
        try:
            self._handshake.saw(_fingerprint_of(tls))
        except StokerError as error:
            self.abort(error)
            return
        if (message := self._handshake.begin()) is not None:
            self._send(Outgoing(message[0], 0, message[1]))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to receive to."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Deal with the frames that are whole."""
        self._received_bytes += nbytes
        self._heard_seconds = self._loop.time()
        try:
            for frame in self._reader.received(nbytes):
                self._take(frame)
        except StokerError as error:
            self._refuse(error)

    def _refuse(self, error: StokerError) -> None:
        if self._failure is None and self.peer is None and not isinstance(error, WireError):
            self._send(Outgoing(Kind.FAILED, 0))  # so that the peer knows that it is about the secret
            self._end(error, is_gentle=True)
            self._watch = self._loop.call_later(self._config.close_seconds, self.abort)
        else:
            self.abort(error)

    def pause_writing(self) -> None:
        """Give the transport no more, until the peer has taken what it has."""
        self._is_write_paused = True
        self._watch_for_stall()

    def resume_writing(self) -> None:
        """Give the transport what waits."""
        self._is_write_paused = False
        if self._stall is not None:
            self._stall.cancel()
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        """End everything under way."""
        why = "ended" if exc is None else f"broke ({type(exc).__name__}: {exc})"
        self._end(ConnectionLostError(f"the connection to {self._address} {why}"), is_gentle=False)
        self._stop_timers()
        self._is_over = True
        self._wake()


def _address_of(transport: asyncio.BaseTransport) -> str:
    name = transport.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name or "the peer")


def _fingerprint_of(tls: ssl.SSLObject | None) -> str:
    certificate = tls.getpeercert(binary_form=True) if tls is not None else None
    return sha256(certificate).hexdigest() if certificate else ""
