"""An iteration: what is left of one epoch, batch by batch; the pool is kept busy a few batches ahead."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from stoker._base.fetch_record import Phase
from stoker._fetch.batch_stream import Batch
from stoker._fetch.materialized_feed import BatchSource
from stoker._order.random_words import SampleContext
from stoker.errors import StokerError
from stoker_torch._figures import LoopStatistics
from stoker_torch._pool import PendingBatch, SamplePool
from stoker_torch._resources import LoaderResources, OneAhead
from stoker_torch._tensors import pinned, to_tensors
from stoker_torch._user_functions import ContextOf

__all__ = ["Cursor", "Iteration", "RunCursor"]

_BATCHES_IN_POOL = 3
"""Batches that are worked on ahead of the one asked for: enough to keep the pool busy while a step runs."""


class Cursor(Protocol):
    """Where an iteration is: it sends the feed there, and follows the batches that are yielded."""

    def seek(self) -> None:
        """Have the feed deliver what is to be yielded next, unless it does."""
        ...

    def commit(self, batch: Batch) -> None:
        """Go behind a batch that is being yielded."""
        ...

    def end(self) -> None:
        """Take note that the loop has come to the end."""
        ...

    def fail(self) -> None:
        """Take note that an error ended the iteration, which the next one may go on with."""
        ...


class RunCursor:
    """Where a loader's run is: a position of an epoch, over all ranks.

    Args:
        resources: have the feed.

    Attributes:
        place: epoch and position; one value, so that a signal's handler never sees half a change.
        is_fresh: whether the next iteration begins at the place, or behind what was abandoned there.
        is_resumed: whether a state was loaded.
        is_share_over: whether this rank has come to the end of its share of the epoch; others may have a batch more.
    """

    def __init__(self, resources: LoaderResources) -> None:
        self._resources = resources
        self.place = (0, 0)
        self.is_fresh, self.is_resumed, self.is_share_over = True, False, False

    @property
    def is_abandoned(self) -> bool:
        """Whether the epoch was begun and left."""
        return not self.is_fresh and self.place[1] > 0

    def begin(self) -> None:
        """Have an iteration begin: with the next epoch, if this one was abandoned."""
        if self.is_abandoned:
            self.place = (self.place[0] + 1, 0)
        self.is_fresh = False

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.place, self.is_fresh, self.is_share_over = (epoch, 0), True, False

    def resume(self, epoch: int, position: int) -> None:
        """Go where a state was taken; at an epoch's end, to the start of the next one.

        Whether anything is left is asked for rank 0, which has as much as any: all ranks must go to the same place.
        """
        self.place = (epoch, position) if not position or self._is_left(position) else (epoch + 1, 0)
        self.is_fresh, self.is_resumed, self.is_share_over = True, True, False

    def _is_left(self, position: int) -> bool:
        feed = self._resources.feed
        return replace(feed.config.partition(feed.manifest.samples), rank=0).steps_from(position) > 0

    def seek(self) -> None:
        """Have the feed deliver from the place on, unless it does."""
        feed = self._resources.feed
        if feed.place != self.place:
            feed.start(*self.place)
            self._resources.register_finalizer(self)

    def commit(self, batch: Batch) -> None:
        """Go behind a batch; behind the last one of all ranks, to the next epoch."""
        self.place, self.is_share_over = (batch.epoch, batch.end), batch.is_last
        if batch.is_last and not (self._resources.config.evaluation and self._is_left(batch.end)):
            self.end()

    def end(self) -> None:
        """Go to the next epoch, if this rank has come to the end of its share."""
        if self.is_share_over:
            self.place, self.is_share_over = (self.place[0] + 1, 0), False

    def fail(self) -> None:
        """Have the next iteration go on at the place."""
        self.is_fresh = True


class Iteration:
    """One epoch being iterated over; threads that share it get different batches.

    A forked child may go on with it: it has its own connections and threads then, and gets the same batches.
    """

    def __init__(
        self, resources: LoaderResources, cursor: Cursor, steps: int, statistics: LoopStatistics | None = None
    ) -> None:
        self._resources, self._cursor, self._statistics = resources, cursor, statistics
        self._left = steps
        self._begin()

    def _begin(self) -> None:
        """Make what belongs to this process."""
        self._pid = os.getpid()
        self._turn = threading.RLock()  # of who asks
        self._decision = threading.RLock()  # whether a batch is yielded, or the iteration was closed before
        self._pending: deque[tuple[Batch, PendingBatch] | Exception] = deque()
        resources, feed = self._resources, self._resources.feed
        make = partial(_gathered, feed, resources.config.with_ids)  # outlives this: must not refer to the cursor
        thread = resources.thread if resources.gathers_ahead and resources.pool is None else None
        self._ahead = resources.ahead = OneAhead(make, self._left, feed.is_ready, thread)
        if self._left:
            self._cursor.seek()

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Any:
        asked: float | None = None  # the time in line behind another thread is no wait for data
        try:
            if self._left and self._pid != os.getpid():
                asked = time.perf_counter()
                self._begin()
            with self._turn:
                if self._left:
                    self._resources.check_spending()
                return self._next(time.perf_counter() if asked is None else asked)
        except StopIteration:
            self._cursor.end()
            self.close()
            raise
        except BaseException:
            with self._decision:
                if self._left:  # nobody else has ended it
                    self._cursor.fail()
            self.close()
            raise

    def _next(self, asked: float) -> Any:
        taken = self._taken() if self._left else None
        with self._decision:
            if taken is None or not self._left:
                raise StopIteration
            self._left -= 1
            self._cursor.commit(taken[0])
            if self._statistics is not None:
                self._statistics.yielded(taken[0], asked)
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
        resources = self._resources
        if resources.pool is None:
            gathered = self._ahead.next()
            if gathered is None or not resources.pins_memory:
                return gathered
            return gathered[0], pinned(gathered[1])
        pending = self._pending
        self._fill(resources.pool, pending)
        if not pending:
            return None
        oldest = pending.popleft()
        if isinstance(oldest, Exception):
            raise oldest
        return oldest[0], self._result(oldest[1])

    def _result(self, pending: PendingBatch) -> Any:
        asked = time.perf_counter()
        result = pending.result()
        if self._resources.recorder is not None:
            self._resources.recorder.waited(Phase.DECODE, asked, time.perf_counter())
        return result

    def _fill(self, pool: SamplePool, pending: deque[tuple[Batch, PendingBatch] | Exception]) -> None:
        """Have the pool begin with batches that are there; waits for one only if it has none."""
        feed = self._resources.feed
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
