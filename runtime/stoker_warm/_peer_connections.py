"""Client and server side of a connection: the proxy sends requests, and a node answers each at once, in order.

The body of an answer is received directly into the caller's memory. A cancelled request releases its memory at once;
the node is not notified, and its answer is received and discarded.

Memory is bounded regardless of the peer: a node reads no requests while answers are queued, and the proxy accepts
only answers to its requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker.errors import DeadlineError, ServerError, StokerError, WireError
from stoker_warm._auth import Handshake
from stoker_warm._connection import PeerConnection
from stoker_warm._frames import NOTICE_KINDS, REPLY_KINDS, Buffer, Frame, Head, Kind, OutgoingFrame

_log = logging.getLogger("stoker.warm.serving")

MAX_OPEN_REQUESTS = 64
"""Maximum number of unanswered requests on a connection; further requests wait."""
_SHOWN_CHARACTERS = 500
"""Maximum length of the text of a node's error."""


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """A request that waits for its answer; it is cancelled if ``result`` is done."""

    kind: Kind
    frame: OutgoingFrame
    into: memoryview | None
    result: asyncio.Future[Frame | StokerError]


class ProxyConnection(PeerConnection):
    """The proxy's end of a connection, which sends requests.

    Args:
        handshake: This end's side of the handshake, used for this connection only.
        on_notice: Callback for each notice, with this connection, kind and head. Its WireError ends the connection.
    """

    def __init__(self, handshake: Handshake, on_notice: Callable[[ProxyConnection, Kind, Head], None]) -> None:
        super().__init__(handshake)
        self._on_notice = on_notice
        self._request_slots = asyncio.Semaphore(MAX_OPEN_REQUESTS)
        self._requests = deque[_PendingRequest]()  # in the order in which they are sent and answered

    async def request(
        self,
        kind: Kind,
        head: Head | None = None,
        *,
        body: Sequence[Buffer] = (),
        into: memoryview | None = None,
        timeout_seconds: float | None = None,
    ) -> Frame:
        """Send a request to the node, and return its answer, which arrives after those to all earlier requests.

        Once this returns or raises, even if cancelled, nothing writes to ``into`` any more.

        Args:
            kind: Kind of the request, a key of ``REPLY_KINDS``.
            head: Head of the request.
            body: Parts of the body, sent in order. Do not change their memory: it may be sent later.
            into: Memory for the body of the answer, which may be shorter; None discards the body.
            timeout_seconds: Timeout in seconds, including the wait for a free slot and the sending; None waits forever.

        Returns:
            An answer of a kind in ``REPLY_KINDS`` other than FAILED.

        Raises:
            ConnectionLostError: The connection is not open, or broke.
            DeadlineError: There was no answer in time. The connection stays open.
            ServerError: The node answered FAILED.
            WireError: The request cannot be encoded.
        """
        deadline = asyncio.timeout(timeout_seconds)
        try:
            async with deadline:
                return await self._send_request(kind, head, body, into)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineError(f"{self._address} did not answer {kind.name} within {timeout_seconds:g} s") from None
        finally:
            # It refers to the task, whose cancellation refers to this frame: a cycle that would keep the memory alive.
            del deadline

    async def _send_request(
        self, kind: Kind, head: Head | None, body: Sequence[Buffer], into: memoryview | None
    ) -> Frame:
        if kind not in REPLY_KINDS:
            raise WireError(f"{kind.name} is not a request")
        target = into.cast("B") if into is not None else None
        request = _PendingRequest(kind, OutgoingFrame(kind, head, body), target, self._loop.create_future())
        await self._request_slots.acquire()
        if not self.is_open:
            self._request_slots.release()
            raise self._create_error()
        self._requests.append(request)
        self._send(request.frame)
        try:
            outcome = await request.result
        except asyncio.CancelledError:
            self._cancel_request(request)
            raise
        if isinstance(outcome, Frame):
            return outcome
        raise outcome

    def _cancel_request(self, request: _PendingRequest) -> None:
        """Release a cancelled request's memory, and remove it from the queue if sending has not begun."""
        request.into = None
        if not request.frame.has_begun and self.failure is None:
            self._outbox.remove(request.frame)
            self._requests.remove(request)
            self._request_slots.release()
        elif self._requests and self._requests[0] is request:
            self._reader.discard_body()

    def _select_body_buffer(self, kind: Kind, body_bytes: int) -> memoryview | None:
        if kind in NOTICE_KINDS:
            return None
        request = self._requests[0] if self._requests else None
        if request is None or not request.frame.is_complete or kind not in REPLY_KINDS[request.kind]:
            raise WireError(f"a {kind.name} frame arrived that answers no open request")
        if request.into is None:
            return None
        if body_bytes > len(request.into):
            raise WireError(f"a {kind.name} frame has a body of {body_bytes} bytes, at most {len(request.into)} fit")
        return request.into[:body_bytes]

    def _handle_frame(self, frame: Frame) -> None:
        if frame.kind in NOTICE_KINDS:
            self._on_notice(self, frame.kind, frame.head)
            return
        request = self._requests.popleft()
        self._request_slots.release()
        if request.result.done():  # it was cancelled
            return
        if frame.kind is Kind.FAILED:
            text = str(frame.head.get("error"))[:_SHOWN_CHARACTERS]
            reason = "".join(each if each.isprintable() else "?" for each in text)  # it may be shown on a terminal
            request.result.set_result(ServerError(f"{self._address} failed at {request.kind.name}: {reason}"))
        else:
            request.result.set_result(frame)

    def _on_failure(self) -> None:
        for request in self._requests:
            self._request_slots.release()
            if not request.result.done():  # as a result: an exception might never be retrieved
                request.result.set_result(self._create_error())
        self._requests.clear()


ReplyParts = tuple[Kind, Head, Sequence[Buffer]]
"""Kind, head and body of an answer. The memory of the body must not change any more."""

RequestHandler = Callable[[Kind, Head, bytearray], ReplyParts]
"""Handles a request, and may keep its body. The proxy receives the message of a StokerError that it raises."""


class NodeConnection(PeerConnection):
    """A node's end of a connection, which answers requests.

    Args:
        handshake: This end's side of the handshake, used for this connection only.
        handler: Handler of the proxy's requests.
    """

    def __init__(self, handshake: Handshake, handler: RequestHandler) -> None:
        super().__init__(handshake)
        self._handler = handler
        self._body = bytearray()  # of the request that is being received
        self._is_read_paused = False
        self._has_flushed = asyncio.Event()

    @property
    def is_sending(self) -> bool:
        """Whether answers wait to be sent, because the proxy has not received earlier data yet."""
        return bool(self._outbox)

    def notify(self, kind: Kind, head: Head) -> None:
        """Send a notice, of a kind in ``NOTICE_KINDS``.

        Raises:
            ConnectionLostError: The connection is not open.
        """
        if not self.is_open:
            raise self._create_error()
        self._send(OutgoingFrame(kind, head))

    async def flush(self) -> None:
        """Wait until all queued data was written to the transport, and without TLS, also to the kernel.

        Raises:
            ConnectionLostError: The connection broke before.
        """
        while (self._outbox or self._is_write_paused) and self.failure is None:
            self._has_flushed.clear()
            await self._has_flushed.wait()
        if self.failure is not None:
            raise self._create_error()

    def _select_body_buffer(self, kind: Kind, body_bytes: int) -> memoryview | None:
        if kind not in REPLY_KINDS:
            raise WireError(f"a {kind.name} frame arrived, which is not a request")
        self._body = bytearray(body_bytes)
        return memoryview(self._body)

    def _handle_frame(self, frame: Frame) -> None:
        body, self._body = self._body, bytearray()
        try:
            kind, head, parts = self._handler(frame.kind, frame.head, body)
            if kind not in REPLY_KINDS[frame.kind]:
                raise WireError(f"{kind.name} is not an answer to {frame.kind.name}")
            answer = OutgoingFrame(kind, head, parts)
        except StokerError as error:
            answer = _create_failure(f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - a task boundary: reported to the proxy and the log
            _log.exception("a %s request of the proxy failed", frame.kind.name)
            answer = _create_failure(type(error).__name__)
        self._send(answer)

    def _on_written(self) -> None:
        """Pause reading while answers wait to be sent."""
        if not self._outbox:
            self._has_flushed.set()
        if self._transport is None or self._transport.is_closing() or self._is_read_paused == self.is_sending:
            return
        self._is_read_paused = self.is_sending
        if self._is_read_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _on_failure(self) -> None:
        self._body = bytearray()
        self._has_flushed.set()


def _create_failure(message: str) -> OutgoingFrame:
    return OutgoingFrame(Kind.FAILED, {"error": message[:_SHOWN_CHARACTERS]})
