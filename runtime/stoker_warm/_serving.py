"""Requests of the other side of a connection: a task for each, until its answer was given to the transport."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from stoker.errors import StokerError, WireError
from stoker_warm._wire import ANSWERS, Buffer, Frame, Head, Kind, Outbox, Outgoing

__all__ = ["Answer", "Serve", "Serving"]

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
