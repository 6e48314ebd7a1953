"""An iteration: what is left of one epoch, batch by batch; the pool is kept busy a few batches ahead."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stoker._base.fetch_record import Phase
from stoker._base.recorder import Recorder
from stoker._fetch.batch_stream import Batch
from stoker._fetch.materialized_feed import BatchSource
from stoker._order.random_words import SampleContext
from stoker.errors import StokerError
from stoker_torch._pool import PendingBatch, SamplePool
from stoker_torch._supply import OneAhead, Supply
from stoker_torch._tensors import pinned, to_tensors
from stoker_torch._user_functions import ContextOf

__all__ = [
    "Iteration",
    "IterationParts",
]

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
            pending.append((batch, pool.submit(columns, batch.sample_name, contexts)))


def _gathered(feed: BatchSource, with_ids: bool) -> tuple[Batch, dict[str, Any]] | None:
    batch = feed.next()
    if batch is None:
        return None
    columns: dict[str, Any] = dict(to_tensors(batch.columns, feed.columns))
    if with_ids:
        columns["__id__"] = torch.from_numpy(batch.sample_ids())
    return batch, columns


def _contexts_of(feed: BatchSource, batch: Batch) -> ContextOf:
    ids, seed = batch.sample_ids(), feed.config.order.seed
    return lambda place: SampleContext(seed=seed, epoch=batch.epoch, sample=int(ids[place]))
