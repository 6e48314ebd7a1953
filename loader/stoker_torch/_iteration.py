"""An iteration: what is left of one epoch, batch by batch; the next batches are made while the training loop is busy."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from stoker._base.fetch_record import Phase
from stoker._base.recorder import Recorder
from stoker._base.threads import LoopThread
from stoker._fetch.feed import Batch, BatchSource
from stoker._order.random_words import SampleContext
from stoker.errors import StokerError
from stoker_torch._pool import PendingBatch, SamplePool
from stoker_torch._supply import Supply
from stoker_torch._tensors import pinned, to_tensors
from stoker_torch._user_functions import ContextOf

__all__ = ["Iteration", "IterationParts", "OneAhead"]

T = TypeVar("T")

_BUSY_SECONDS = 0.002
"""A loop that comes back sooner does nothing meanwhile: to hand it a batch from another thread would cost it time."""


class OneAhead(Generic[T]):
    """Makes values one after the other, and one ahead while whoever asks for them is busy.

    ``make`` is called by who asks, or by a thread of the loop's executor if :meth:`is_ready` says that it would not
    wait; never by two at a time. A value that could not be made is an error where it would have come, and the last one.
    Whoever closes what ``make`` works with ends this first.

    Args:
        make: returns the next value, None where there is no more.
        count: of values at most.
        is_ready: whether ``make`` would not wait for anything.
        thread: whose event loop has the executor; None makes nothing ahead.
    """

    def __init__(
        self, make: Callable[[], T | None], count: int, is_ready: Callable[[], bool], thread: LoopThread | None
    ) -> None:
        self._make, self._left, self._is_ready, self._thread = make, count, is_ready, thread
        self._pid = os.getpid()
        self._turn = threading.RLock()  # a signal's handler may close this in the thread that is in next()
        self._is_ended = False
        self._made: T | Exception | None = None
        self._handed_seconds: float | None = None
        self._preparing: int | None = None
        self.is_asked = False
        """Whether a thread is in :meth:`next` and nothing was made ahead: it may wait for long."""

    @property
    def is_current(self) -> bool:
        """Whether the caller is the executor's thread at work, which whoever closes the loop waits for."""
        return self._preparing == threading.get_ident()

    def next(self) -> T | None:
        """Return the next value, or None where there is no more."""
        asked_seconds = time.perf_counter()
        with self._turn:
            made, self._made = self._made, None
            if self._is_ended:
                return None
            if made is None:
                self.is_asked = True
                try:
                    made = self._next_made()
                finally:
                    self.is_asked = False
        if isinstance(made, Exception):
            raise made
        was_busy = self._handed_seconds is not None and asked_seconds - self._handed_seconds > _BUSY_SECONDS
        self._handed_seconds = time.perf_counter()
        if was_busy and self._left and self._thread is not None:
            self._thread.call_soon(_prepare_in_executor, weakref.ref(self))
        return made

    def prepare(self) -> None:
        """Make a value ahead, unless there is one, or it would have to be waited for."""
        with self._turn:
            self._preparing = threading.get_ident()
            try:
                if self._made is None and self._left and not self._is_ended and self._is_ready():
                    self._made = self._next_made()
            except Exception as error:  # noqa: BLE001 - raised again to whoever asks for this value
                self._made = error
            finally:
                self._preparing = None

    def _next_made(self) -> T | None:
        left, self._left = self._left, 0
        made = self._make() if left else None
        if made is not None:
            self._left = left - 1
        return made

    def end(self) -> None:
        """Make nothing more, and do not wait for what is being made."""
        self._is_ended = True

    def close(self) -> None:
        """Make nothing more; when this returns, nothing is being made."""
        self.end()
        if self._pid == os.getpid():  # a forked child has none of the threads, and what they locked stays locked
            with self._turn:
                self._made = None


def _prepare_in_executor(reference: weakref.ref[OneAhead[T]]) -> None:
    with suppress(RuntimeError):  # where the interpreter is ending, nobody will ask for another
        asyncio.get_running_loop().run_in_executor(None, _prepare, reference)


def _prepare(reference: weakref.ref[OneAhead[T]]) -> None:
    ahead = reference()
    if ahead is not None:
        ahead.prepare()


_BATCHES_IN_POOL = 3
"""Batches that are worked on ahead of the one asked for: enough to keep the pool busy while a step runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationParts:
    """What an iteration works with.

    Attributes:
        feed: gives the batches.
        go: sends the feed to where the batch to be yielded next begins.
        note: takes note of a batch that is being yielded, and when it was asked for.
        pool: works on samples, None if there is nothing to do.
        with_ids: whether batches have ``"__id__"``.
        pin_memory: whether they are put into page-locked memory.
        supply: of the feed; is told what gathers, so that closing it ends that, too.
        gathers_ahead: whether, where there is no pool, a batch is gathered ahead of a training loop that is busy.
        ended: is called where a loop comes to the end.
        failed: is called where an error ends the iteration, which may be gone on with at its place.
        check: is called before each batch, and may raise to end the iteration there.
        recorder: is told of waits for the pool.
    """

    feed: BatchSource
    go: Callable[[], None]
    note: Callable[[Batch, float], None]
    pool: SamplePool | None
    with_ids: bool
    pin_memory: bool
    supply: Supply
    gathers_ahead: bool = False
    ended: Callable[[], None] = lambda: None
    failed: Callable[[], None] = lambda: None
    check: Callable[[], None] | None = None
    recorder: Recorder | None = None


class Iteration:
    """One epoch being iterated over; threads that share it get different batches.

    A forked child may go on with it: it has its own connections and threads then, and gets the same batches.
    """

    def __init__(self, parts: IterationParts, steps: int) -> None:
        self._parts = parts
        self._left = steps
        self._begin()

    def _begin(self) -> None:
        """Make what belongs to this process."""
        self._pid = os.getpid()
        self._turn = threading.RLock()  # of who asks
        self._decision = threading.RLock()  # whether a batch is yielded, or the iteration was closed before
        self._pending: deque[tuple[Batch, PendingBatch] | Exception] = deque()
        parts = self._parts
        make = partial(_gathered, parts.feed, parts.with_ids)  # lives on in the supply: must not refer to the loader
        thread = parts.supply.thread if parts.gathers_ahead and parts.pool is None else None
        self._ahead = parts.supply.ahead = OneAhead(make, self._left, parts.feed.is_ready, thread)
        if self._left:
            self._parts.go()

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Any:
        asked: float | None = None  # the time in line behind another thread is no wait for data
        try:
            if self._left and self._pid != os.getpid():
                asked = time.perf_counter()
                self._begin()
            with self._turn:
                if self._left and self._parts.check is not None:
                    self._parts.check()
                return self._next(time.perf_counter() if asked is None else asked)
        except StopIteration:
            self._parts.ended()
            self.close()
            raise
        except BaseException:
            with self._decision:
                if self._left:  # nobody else has ended it
                    self._parts.failed()
            self.close()
            raise

    def _next(self, asked: float) -> Any:
        taken = self._taken() if self._left else None
        with self._decision:
            if taken is None or not self._left:
                raise StopIteration
            self._left -= 1
            self._parts.note(taken[0], asked)
        return taken[1]

    def close(self) -> None:
        """Yield nothing more, and have the pool drop what it works on. Waits for nothing."""
        with self._decision:
            self._left = 0
        self._ahead.end()
        if self._pid == os.getpid():
            for pending in list(self._pending):
                if not isinstance(pending, Exception):
                    pending[1].fail(StokerError("the iteration has ended"))
        self._pending = deque()  # another one: a thread may be in the middle of this one

    def _taken(self) -> tuple[Batch, Any] | None:
        """Return the next batch, as gathered and as it is to be yielded, or None where the run ends."""
        parts = self._parts
        if parts.pool is None:
            gathered = self._ahead.next()
            if gathered is None or not parts.pin_memory:
                return gathered
            return gathered[0], pinned(gathered[1])
        pending = self._pending
        self._fill(parts.pool, pending)
        if not pending:
            return None
        oldest = pending.popleft()
        if isinstance(oldest, Exception):
            raise oldest
        return oldest[0], self._result(oldest[1])

    def _result(self, pending: PendingBatch) -> Any:
        asked = time.perf_counter()
        result = pending.result()
        if self._parts.recorder is not None:
            self._parts.recorder.waited(Phase.DECODE, asked, time.perf_counter())
        return result

    def _fill(self, pool: SamplePool, pending: deque[tuple[Batch, PendingBatch] | Exception]) -> None:
        """Have the pool begin with batches that are there; waits for one only if it has none."""
        feed = self._parts.feed
        while len(pending) < _BATCHES_IN_POOL and (not pending or feed.is_ready()):
            try:
                gathered = self._ahead.next()
            except Exception as error:  # noqa: BLE001 - raised again behind the batches that came before it
                pending.append(error)
                return
            if gathered is None:
                return
            batch, columns = gathered
            contexts = _contexts_of(feed, batch)
            pending.append((batch, pool.submit(columns, partial(feed.sample_name, batch), contexts)))


def _gathered(feed: BatchSource, with_ids: bool) -> tuple[Batch, dict[str, Any]] | None:
    batch = feed.next()
    if batch is None:
        return None
    columns: dict[str, Any] = dict(to_tensors(batch.columns, feed.columns))
    if with_ids:
        columns["__id__"] = torch.from_numpy(feed.sample_ids(batch))
    return batch, columns


def _contexts_of(feed: BatchSource, batch: Batch) -> ContextOf:
    ids, seed = feed.sample_ids(batch), feed.config.order.seed
    return lambda place: SampleContext(seed=seed, epoch=batch.epoch, sample=int(ids[place]))
