"""Requests of both sides of a connection.

Those of this side have numbers, places where their answers go, and an end. For each request of the other side there is
a task, until its answer was given to the transport.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count

from stoker.errors import ServerError, StokerError, WireError
from stoker_warm._wire import ANSWERS, MAX_REQUEST, Buffer, Frame, Head, Kind, Outbox, Outgoing

_SHOWN_CHARACTERS = 500
"""Of what the peer says about its failure."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the peer answered.

    Attributes:
        kind: one of ``ANSWERS`` of what was asked; never FAILED, which is raised.
        head: its head.
        body_bytes: how many bytes its body had: the first of ``into``, if there was one.
    """

    kind: Kind
    head: Head
    body_bytes: int


@dataclass(slots=True, eq=False)
class _Request:
    kind: Kind
    frame: Outgoing
    into: memoryview | None
    outcome: asyncio.Future[Reply | StokerError]


class Asking:
    """The requests without an answer. A number is used again only once the peer has answered it, cancelled or not.

    Args:
        most: how many there may be; more wait for their turn.
        outbox: where their frames are put.
        pump: sends what is in it.
        redirect: throws away the rest of an answer's body, if it is under way.
        loss: returns why nothing can be asked, None while it can.
    """

    def __init__(
        self,
        most: int,
        outbox: Outbox,
        *,
        pump: Callable[[], None],
        redirect: Callable[[int], None],
        loss: Callable[[], StokerError | None],
    ) -> None:
        self._outbox = outbox
        self._pump = pump
        self._redirect = redirect
        self._loss = loss
        self._permits = asyncio.Semaphore(most)
        self._numbers = count(1)
        self._requests: dict[int, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    async def ask(self, kind: Kind, head: Head | None, body: Sequence[Buffer], into: memoryview | None) -> Reply:
        """See ``Connection.request``; without a deadline."""
        if kind not in ANSWERS:
            raise WireError(f"{kind.name} is no request")
        await self._permits.acquire()
        try:
            if (loss := self._loss()) is not None:
                raise loss
            number = self._free_number()
            frame = Outgoing(kind, number, head, body)
        except BaseException:
            self._permits.release()
            raise
        outcome: asyncio.Future[Reply | StokerError] = asyncio.get_running_loop().create_future()
        request = self._requests[number] = _Request(kind, frame, into.cast("B") if into is not None else None, outcome)
        self._outbox.add(frame)
        self._pump()
        try:
            ended = await outcome
        except asyncio.CancelledError:
            self._give_up(number, request)
            raise
        if isinstance(ended, Reply):
            return ended
        raise ended

    def destination(self, kind: Kind, number: int, body_bytes: int) -> memoryview | None:
        """Return where the body of an answer goes, None if nobody wants it.

        Raises:
            WireError: this was not asked, or not so much.
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
        """End a request with an answer that has arrived whole."""
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
        """End all with the loss."""
        for number in list(self._requests):
            request = self._retire(number)
            if not request.outcome.done() and (loss := self._loss()) is not None:
                # A result, not an exception: nobody may be left to retrieve that.
                request.outcome.set_result(loss)

    def _free_number(self) -> int:
        while True:
            number = next(self._numbers) & MAX_REQUEST
            if number and number not in self._requests:
                return number

    def _give_up(self, number: int, request: _Request) -> None:
        """Let go of a request's memory, and tell the peer, if it knows of the request."""
        if self._requests.get(number) is not request:  # answered or lost meanwhile
            return
        request.into = None
        self._redirect(number)
        if self._outbox.withdraw(request.frame):
            self._retire(number)
        else:
            self._outbox.add(Outgoing(Kind.CANCEL, number))
            self._pump()

    def _retire(self, number: int) -> _Request:
        self._permits.release()
        return self._requests.pop(number)


_LOG = logging.getLogger("stoker.warm.serving")
_TOLD_CHARACTERS = 500

Answer = tuple[Kind, Head, Sequence[Buffer]]
"""Kind, head and body of an answer. The memory of the body stays as it is until it was sent."""

Serve = Callable[[Kind, Head, bytearray], Answer | Awaitable[Answer]]
"""Answers a request of the peer, at once or in a task of its own, which is cancelled if the peer no longer wants the
answer or the connection ends. The body belongs to it from then on. A StokerError that it raises is told to the peer."""


@dataclass(slots=True, eq=False)
class _Service:
    body_bytes: int
    task: asyncio.Future[Answer] | None = None
    answer: Outgoing | None = None


class Serving:
    """The requests that are served.

    Args:
        serve: answers them.
        outbox: where answers are put.
        pump: sends what is in it.
        changed: is called when there are more or fewer.
    """

    def __init__(self, serve: Serve, outbox: Outbox, *, pump: Callable[[], None], changed: Callable[[], None]) -> None:
        self._serve = serve
        self._outbox = outbox
        self._pump = pump
        self._changed = changed
        self._services: dict[int, _Service] = {}
        self._has_ended = False
        self.body_bytes = 0  # of all of them

    def __len__(self) -> int:
        return len(self._services)

    def __contains__(self, number: int) -> bool:
        return number in self._services

    def take(self, frame: Frame, body: bytearray) -> None:
        """Serve a request. What needs no waiting for is answered before this returns, which saves a task."""
        service = self._services[frame.request] = _Service(frame.body_bytes)
        self.body_bytes += frame.body_bytes
        try:
            served = self._serve(frame.kind, frame.head, body)
        except Exception as error:  # noqa: BLE001 - a boundary: the peer is told, and whoever runs this process
            self._answer(service, _refusal(frame, error))
            return
        if isinstance(served, tuple):
            self._answer(service, _outgoing(frame, served))
            return
        service.task = asyncio.ensure_future(served)
        service.task.add_done_callback(lambda task: self._is_served(frame, task))
        self._changed()

    def cancel(self, number: int) -> None:
        """Serve a request no more. It is answered all the same, by FAILED if nothing of another answer was sent."""
        service = self._services.get(number)
        if service is None:  # its answer has crossed the cancellation
            return
        if service.answer is None:
            if service.task is not None:
                service.task.cancel()
        elif self._outbox.withdraw(service.answer):
            self._answer(service, _failed(number, "cancelled"))

    def sent(self, frame: Outgoing) -> None:
        """Forget the request of which this is the answer, if it is one."""
        service = self._services.get(frame.request)
        if service is not None and service.answer is frame:
            self._forget(frame.request)

    def end(self) -> None:
        """Serve nothing more; tasks that still run are cancelled, and counted until they have ended."""
        self._has_ended = True
        for number, service in list(self._services.items()):
            if service.answer is not None:
                self._forget(number)
            elif service.task is not None:
                service.task.cancel()

    def _is_served(self, frame: Frame, task: asyncio.Future[Answer]) -> None:
        if task.cancelled():
            answer = _failed(frame.request, "cancelled")
        elif (error := task.exception()) is not None:
            answer = _refusal(frame, error)
        else:
            answer = _outgoing(frame, task.result())
        if self._has_ended:
            self._forget(frame.request)
        else:
            self._answer(self._services[frame.request], answer)

    def _answer(self, service: _Service, answer: Outgoing) -> None:
        service.answer = answer
        self._outbox.add(answer)
        self._pump()

    def _forget(self, number: int) -> None:
        self.body_bytes -= self._services.pop(number).body_bytes
        self._changed()


def _outgoing(frame: Frame, answer: Answer) -> Outgoing:
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
    _LOG.error("a %s request of a peer failed", frame.kind.name, exc_info=error)
    return _failed(frame.request, type(error).__name__)


def _failed(number: int, why: str) -> Outgoing:
    return Outgoing(Kind.FAILED, number, {"error": why[:_TOLD_CHARACTERS]})
