"""Requests of both sides of a connection: those of this side that wait for an answer, and those of the peer.

A number is used again only once the peer has answered it, cancelled or not: the answer to a cancelled request is read
and thrown away.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count

from stoker.errors import ServerError, StokerError, WireError
from stoker_warm._frames import ANSWERS, MAX_REQUEST, Buffer, Frame, Head, Kind, Outgoing

_log = logging.getLogger("stoker.warm.serving")

_SHOWN_CHARACTERS = 500
"""Of what one side tells the other about its failure."""

Answer = tuple[Kind, Head, Sequence[Buffer]]
"""Kind, head and body of an answer. The memory of the body is not changed any more."""

Serve = Callable[[Kind, Head, bytearray], Answer | Awaitable[Answer]]
"""Answers a request of the peer, at once or in a task, which is cancelled when the connection ends. The body belongs to
it. A StokerError that it raises is told to the peer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the peer.

    Attributes:
        kind: one of ``ANSWERS`` of what was asked; never FAILED, which is raised.
        head: its head.
        body_bytes: length of its body: the first bytes of ``into``, if that was given.
    """

    kind: Kind
    head: Head
    body_bytes: int


@dataclass(slots=True, eq=False)
class _Request:
    """A request of this side without an answer; cancelled if its outcome is done."""

    kind: Kind
    frame: Outgoing
    into: memoryview | None
    outcome: asyncio.Future[Reply | StokerError]


class ClientSide:
    """Requests of this side without an answer.

    Args:
        limit: requests at a time; more wait for their turn.
        outbox: of the connection, from which what was not begun is withdrawn.
        send: puts a frame into it.
        discard_body: throws away the rest of the body of an answer, if that is under way.
        loss: returns why nothing can be asked, None while it can.
    """

    def __init__(
        self,
        limit: int,
        outbox: deque[Outgoing],
        *,
        send: Callable[[Outgoing], None],
        discard_body: Callable[[int], None],
        loss: Callable[[], StokerError | None],
    ) -> None:
        self._outbox, self._send, self._discard_body, self._loss = outbox, send, discard_body, loss
        self._turns = asyncio.Semaphore(limit)
        self._numbers = count(1)
        self._requests = dict[int, _Request]()

    def __len__(self) -> int:
        return len(self._requests)

    async def request(self, kind: Kind, head: Head | None, body: Sequence[Buffer], into: memoryview | None) -> Reply:
        """See ``Connection.request``; without a deadline."""
        if kind not in ANSWERS:
            raise WireError(f"{kind.name} is no request")
        await self._turns.acquire()
        try:
            if (loss := self._loss()) is not None:
                raise loss
            number = self._free_number()
            frame = Outgoing(kind, number, head, body)
        except BaseException:
            self._turns.release()
            raise
        outcome: asyncio.Future[Reply | StokerError] = asyncio.get_running_loop().create_future()
        target = into.cast("B") if into is not None else None
        request = self._requests[number] = _Request(kind, frame, target, outcome)
        self._send(frame)
        try:
            ended = await outcome
        except asyncio.CancelledError:
            self._give_up(number, request)
            raise
        if isinstance(ended, Reply):
            return ended
        raise ended

    def _free_number(self) -> int:
        while True:
            number = next(self._numbers) & MAX_REQUEST
            if number and number not in self._requests:
                return number

    def _give_up(self, number: int, request: _Request) -> None:
        """Let go of a request's memory. Its number is used again only once the peer has answered, if it was sent."""
        if self._requests.get(number) is not request:  # answered or lost meanwhile
            return
        request.into = None
        self._discard_body(number)
        if not request.frame.has_begun:
            self._outbox.remove(request.frame)
            self._retire(number)

    def _retire(self, number: int) -> _Request:
        self._turns.release()
        return self._requests.pop(number)

    def destination(self, kind: Kind, number: int, body_bytes: int) -> memoryview | None:
        """Return where the body of an answer goes, None if its request was cancelled.

        Raises:
            WireError: this was not asked for, or is larger than asked for.
        """
        request = self._requests.get(number)
        if request is None or not request.frame.is_over or kind not in ANSWERS[request.kind]:
            raise WireError(f"a {kind.name} frame has the number {number}, with which it was not asked for")
        if request.into is None:
            return None
        if body_bytes > len(request.into):
            raise WireError(f"a {kind.name} frame has a body of {body_bytes} bytes, room is for {len(request.into)}")
        return request.into[:body_bytes]

    def answered(self, frame: Frame, address: str) -> None:
        """End a request with an answer that has arrived whole, from a peer at an address."""
        request = self._retire(frame.request)
        if request.outcome.done():  # it was cancelled
            return
        if frame.kind is Kind.FAILED:
            said = str(frame.head.get("error"))[:_SHOWN_CHARACTERS]
            why = "".join(each if each.isprintable() else "?" for each in said)  # it may end up on a terminal
            request.outcome.set_result(ServerError(f"{address} failed at {request.kind.name}: {why}"))
        else:
            request.outcome.set_result(Reply(frame.kind, frame.head, frame.body_bytes))

    def end(self) -> None:
        """End all with the loss: as a result, not an exception, which might never be retrieved."""
        for number in list(self._requests):
            request = self._retire(number)
            if not request.outcome.done() and (loss := self._loss()) is not None:
                request.outcome.set_result(loss)


class ServerSide:
    """Requests of the peer that are served.

    Args:
        serve: answers them.
        send: sends an answer.
        changed: is called when there are more or fewer.
    """

    def __init__(self, serve: Serve, *, send: Callable[[Outgoing], None], changed: Callable[[], None]) -> None:
        self._serve, self._send, self._changed = serve, send, changed
        self._body_bytes = dict[int, int]()  # by number, until the answer was given to the transport
        self._tasks = dict[int, asyncio.Future[Answer]]()
        self._has_ended = False
        self.body_bytes = 0
        """Of all of them."""

    def __len__(self) -> int:
        return len(self._body_bytes)

    def __contains__(self, number: int) -> bool:
        return number in self._body_bytes

    def take(self, frame: Frame, body: bytearray) -> None:
        """Serve a request. One that needs no waiting is answered before this returns, which saves a task."""
        self._body_bytes[frame.request] = frame.body_bytes
        self.body_bytes += frame.body_bytes
        try:
            served = self._serve(frame.kind, frame.head, body)
        except Exception as error:  # noqa: BLE001 - a boundary: the peer gets it, and the log
            self._send(_refusal(frame, error))
            return
        if isinstance(served, tuple):
            self._send(_answer(frame, served))
            return
        task = self._tasks[frame.request] = asyncio.ensure_future(served)
        task.add_done_callback(lambda task: self._has_served(frame, task))
        self._changed()

    def sent(self, frame: Outgoing) -> None:
        """Forget the request of which this is the answer, if it is one."""
        if frame.kind not in ANSWERS and frame.request in self._body_bytes:
            self._forget(frame.request)

    def end(self) -> None:
        """Serve nothing more; tasks that still run are cancelled, and counted until they have ended."""
        self._has_ended = True
        for number in list(self._body_bytes):
            if number in self._tasks:
                self._tasks[number].cancel()
            else:
                self._forget(number)

    def _has_served(self, frame: Frame, task: asyncio.Future[Answer]) -> None:
        del self._tasks[frame.request]
        if task.cancelled():
            answer = _failed(frame.request, "cancelled")
        elif (error := task.exception()) is not None:
            answer = _refusal(frame, error)
        else:
            answer = _answer(frame, task.result())
        if self._has_ended:
            self._forget(frame.request)
        else:
            self._send(answer)

    def _forget(self, number: int) -> None:
        self.body_bytes -= self._body_bytes.pop(number)
        self._changed()


def _answer(frame: Frame, answer: Answer) -> Outgoing:
    kind, head, parts = answer
    try:
        if kind not in ANSWERS[frame.kind]:
            raise WireError(f"{kind.name} is no answer to {frame.kind.name}")
        return Outgoing(kind, frame.request, head, parts)
    except StokerError as error:
        return _refusal(frame, error)


def _refusal(frame: Frame, error: BaseException) -> Outgoing:
    if isinstance(error, StokerError):
        return _failed(frame.request, f"{type(error).__name__}: {error}")
    _log.error("a %s request of a peer failed", frame.kind.name, exc_info=error)
    return _failed(frame.request, type(error).__name__)


def _failed(number: int, why: str) -> Outgoing:
    return Outgoing(Kind.FAILED, number, {"error": why[:_SHOWN_CHARACTERS]})
