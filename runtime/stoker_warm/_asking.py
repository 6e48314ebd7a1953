"""Requests of this side of a connection: their numbers, where their answers go, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from stoker.errors import ServerError, StokerError, WireError
from stoker_warm._wire import ANSWERS, MAX_REQUEST, Buffer, Frame, Head, Kind, Outbox, Outgoing

__all__ = ["Asking", "Reply"]

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
