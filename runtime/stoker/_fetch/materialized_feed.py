"""The feed of a run whose epochs are materialized: each is read from its own objects if it has any, else as ``full``.

The two deliver the same: positions are dealt by lanes in both, and a position is the same sample. So it is decided
anew for every epoch and every start, by each rank for itself, and in the middle of an epoch if its objects are lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from stoker._base.meter import FolderStore
from stoker._base.recorder import Recorder
from stoker._base.sizes import counted
from stoker._base.threads import LoopThread
from stoker._cache.keeper import Nearer
from stoker._fetch.batch_stream import Batch, Origin
from stoker._fetch.fetcher import FetchStatistics
from stoker._fetch.forecast import Forecast
from stoker._fetch.gather import GatherRows, gather_rows
from stoker._fetch.materialized_epochs import read_epoch
from stoker._fetch.pipeline import BatchPipeline, PipelineConfig, PipelineStatistics
from stoker._format.manifest import Manifest
from stoker._format.schema import Column
from stoker._memory.budget import SlotPlan
from stoker._memory.ring import anonymous_memory
from stoker._order.order import MAX_EPOCH, EpochLayout
from stoker._order.sharding import Dealing
from stoker.abc import Store
from stoker.errors import (
    BudgetError,
    ChecksumError,
    FormatError,
    NotFoundError,
    ObjectChangedError,
    PermissionDeniedError,
    StokerError,
)

__all__ = ["BatchSource", "MaterializedPipeline"]

_log = logging.getLogger("stoker")
_AHEAD_SECONDS = 2.0
"""In which the next epoch's manifest must be read while a gathered batch waits for it."""


_Epoch = tuple[EpochLayout, Manifest]
"""An epoch with objects of its own, and the manifest that lists them."""


class _LentMemory:
    """One block of memory that feeds have one after the other; a forked process has its own."""

    def __init__(self) -> None:
        self._memory: tuple[int, memoryview] | None = None

    def take(self, size_bytes: int) -> memoryview:
        if self._memory is None or self._memory[0] != os.getpid() or len(self._memory[1]) < size_bytes:
            self._memory = os.getpid(), anonymous_memory(size_bytes)
        return self._memory[1][:size_bytes]


class MaterializedPipeline:
    """Batches of one rank, like those of a :class:`~stoker._fetch.pipeline.BatchPipeline`.

    Args:
        store: where the data set is.
        manifest: the pinned version of its index.
        config: what to deliver and how, of an order that is ``full`` and dealt by lanes.
        thread: runs the fetching; the store must only be used on it.
        rows: how rows are copied out of the ring.
        check: is given the feed of an epoch that is about to be read as ``full``; raises BudgetError to refuse.
        recorder: follows fetches, and is told of waits.
        nearer: where the data set's super-samples are looked for first; an epoch's own objects, which are read once,
            are not.

    Raises:
        BudgetError: the memory is too small for an epoch's own objects, if these are as large as the data set's.
        ConfigError: a column is not in the schema.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        config: PipelineConfig,
        thread: LoopThread,
        rows: GatherRows = gather_rows,
        check: Callable[[BatchPipeline], object] = lambda feed: None,
        recorder: Recorder | None = None,
        nearer: Nearer | None = None,
    ) -> None:
        self.store, self.manifest, self.config = store, manifest, config
        self.partition = config.dealing(manifest.samples)
        self._thread, self._rows, self._check, self._recorder = thread, rows, check, recorder
        self._nearer = nearer
        self._memory = _LentMemory()
        self._source: _Epoch | None = None  # what the feed reads, if not the data set itself
        self._feed = self._epoch_feed(store, manifest)  # until the first start, what an epoch will be like
        self._ended: PipelineStatistics | None = None
        self._place = (0, 0)
        self._is_stopped = False
        self._epoch: int | None = None  # that the feed reads
        self._dealing: Dealing | None = None
        self._end_epoch = config.end_epoch

    def _epoch_feed(self, store: Store, manifest: Manifest, origin: Origin | None = None) -> BatchPipeline:
        """Return a feed of an epoch's own objects, which lie in its order."""
        config = replace(
            self.config, order=replace(self.config.order, shuffle="none"), held_bytes=self.manifest.file_bytes
        )
        try:
            return self._made(store, manifest, config, origin=origin)
        except BudgetError as error:
            raise BudgetError(f"an epoch's own objects are read in their order: {error}") from None

    def _made(
        self,
        store: Store,
        manifest: Manifest,
        config: PipelineConfig,
        nearer: Nearer | None = None,
        origin: Origin | None = None,
    ) -> BatchPipeline:
        allocate, recorder = self._memory.take, self._recorder
        return BatchPipeline(store, manifest, config, self._thread, self._rows, allocate, recorder, nearer, origin)

    # What is being read, and how.

    @property
    def columns(self) -> dict[str, Column]:
        """The columns that are delivered."""
        return self._feed.columns

    @property
    def slots(self) -> SlotPlan:
        """How the memory is spent on the epoch under way."""
        return self._feed.slots

    @property
    def is_materialized(self) -> bool:
        """Whether the epoch under way is read from objects of its own."""
        return self._source is not None

    def forecast(self) -> Forecast:
        """Return what an epoch like the one under way takes."""
        return self._feed.forecast()

    @property
    def place(self) -> tuple[int, int] | None:
        """The epoch and position that would be delivered next, None if nothing is under way or its epoch has ended."""
        place = self._feed.place
        return place if place is not None and place[0] == self._epoch else None

    # Walking.

    def start(
        self, epoch: int, position: int = 0, *, partition: Dealing | None = None, end_epoch: int | None = None
    ) -> None:
        """Go to a position of an epoch; fetching begins. What is under way is ended.

        Raises:
            BudgetError: the epoch has no objects of its own, and to read it as ``full`` takes too much.
            StokerError: what must be read before anything else could not be had.
        """
        self._feed.stop()
        self._is_stopped = False
        self._begin(epoch, position, partition, self.config.end_epoch if end_epoch is None else end_epoch)

    def _begin(self, epoch: int, position: int, partition: Dealing | None, end_epoch: int | None) -> None:
        self._place, self._dealing, self._epoch = (epoch, position), partition, None
        self._end_epoch = end_epoch
        if self._is_over:
            return
        source = self._found(epoch)
        if source is None:
            self._tell_missing(epoch)
        self._read(source)

    def _tell_missing(self, epoch: int) -> None:
        url, version, order = self.store.url, self.manifest.version, self.config.order
        if url.startswith("stoker+"):
            _log.warning("%s: a function serves no materialized epochs; epoch %d is read as 'full'", url, epoch)
            return
        _log.warning(
            "%s has no materialized epoch %d of version %d for seed %d and %s: it is read as 'full'. To make it: "
            "stoker shuffle %s --at %d --seed %d --lanes %d --epoch %d",
            *(url, epoch, version, order.seed, counted(order.lanes, "lane")),
            *(url, version, order.seed, order.lanes, epoch),
        )

    @property
    def _is_over(self) -> bool:
        return self._end_epoch is not None and self._place[0] >= self._end_epoch

    def _found(self, epoch: int, timeout_seconds: float | None = None) -> _Epoch | None:
        """Return an epoch that has objects of its own, None if it has none.

        Raises:
            TimeoutError: the bucket has not answered in time.
            StoreError: the store failed.
        """
        if epoch > MAX_EPOCH:
            return None
        order = self.config.order
        layout = EpochLayout(self.manifest, seed=order.seed, lanes=order.lanes, epoch=epoch)

        async def read() -> Manifest | None:
            async with asyncio.timeout(timeout_seconds):
                return await read_epoch(self.store, layout)

        manifest = self._thread.run(read())
        return None if manifest is None else (layout, manifest)

    def _read(self, source: _Epoch | None) -> None:
        """Read from the place on: an epoch's own objects, or else ``full``."""
        if self._is_stopped:
            raise StokerError("the feed was stopped: its loader was closed, or iterates anew")
        if source is None:
            feed = self._full_feed()
        else:
            layout, manifest = source
            folder = FolderStore(self.store, layout.folder)
            feed = self._epoch_feed(folder, manifest, Origin(folder.url, manifest, layout))
        self._feed.stop()
        self._ended = self.statistics()
        self._feed, self._source = feed, source
        epoch, position = self._place
        self._feed.start(epoch, position, partition=self._dealing, end_epoch=epoch + 1)
        self._epoch = epoch

    def _full_feed(self) -> BatchPipeline:
        try:
            feed = self._made(self.store, self.manifest, self.config, self._nearer)
            self._check(feed)
        except BudgetError as error:
            raise BudgetError(
                f"epoch {self._place[0]} has no objects of its own, and cannot be read as 'full' instead: {error}"
            ) from None
        return feed

    def next(self) -> Batch | None:
        """Return the next batch, or None where the run ends, or had nothing left of the epoch that it was started in.

        Objects of an epoch that are gone, or not what its manifest says, are done without: the rest of the epoch is
        read as ``full``.

        Raises:
            StokerError: a super-sample that the batch needs could not be had; names it.
        """
        if self.place is None:
            self._begin(*self._place, self._dealing, self._end_epoch)
        if self._is_over:
            self._feed.stop()
            return None
        try:
            batch = self._feed.next()
        except StokerError as error:
            if self._source is None or not _is_lost(error):
                raise
            _log.warning("the rest of epoch %d, from position %d on, is read as 'full': %s", *self._place, error)
            self._read(None)
            batch = self._feed.next()
        if batch is None:
            return None
        self._place = batch.next_place
        if batch.is_last:
            self._dealing = None
            self._go_ahead()
        return batch

    def _go_ahead(self) -> None:
        """Begin with the next epoch while the last batch of the one before is used, if it has objects of its own.

        One that has none may yet be made before it is asked for: then that is decided, and told. The last batch is not
        kept back for long by a bucket that is out, and never lost by what fails here.
        """
        if self._is_over:
            return
        try:
            source = self._found(self._place[0], timeout_seconds=_AHEAD_SECONDS)
            if source is not None:
                self._read(source)
        except Exception as error:  # noqa: BLE001 - a batch is to be given out; whoever asks for the epoch meets it too
            _log.info("epoch %d is not begun ahead: %s: %s", self._place[0], type(error).__name__, error)

    def is_ready(self) -> bool:
        """Return whether :meth:`next` would neither wait for the bucket nor fail."""
        return self.place is not None and self._feed.is_ready()

    def stop(self) -> None:
        """End what is under way, if anything: nothing is fetched any more until :meth:`start`. Idempotent.

        From any thread: one that is in :meth:`next` gets a StokerError.
        """
        self._is_stopped = True
        self._feed.stop()

    def statistics(self) -> PipelineStatistics:
        """Return a snapshot, over all epochs."""
        now = self._feed.statistics()
        return now if self._ended is None else _added(self._ended, now)


BatchSource = BatchPipeline | MaterializedPipeline
"""What gives the batches of one rank."""


def _is_lost(error: StokerError) -> bool:
    """Return whether an object is gone, replaced or spoilt: then others than it may still be had.

    Those who may not list a bucket are told that they may not read what is gone.
    """
    lost = NotFoundError, PermissionDeniedError, ObjectChangedError, FormatError, ChecksumError
    return isinstance(error, lost) or isinstance(error.__cause__, ChecksumError)


def _added(ended: PipelineStatistics, now: PipelineStatistics) -> PipelineStatistics:
    """Return the counts of two feeds that follow each other."""
    names = ("batches", "samples", "repeated", "look_ups", "misses", "wait_seconds")
    counts: Mapping[str, Any] = {name: getattr(ended, name) + getattr(now, name) for name in names}
    first = now.first_batch_seconds if ended.first_batch_seconds is None else ended.first_batch_seconds
    caches = {**ended.caches, **now.caches}  # of the same tiers, which count on
    fetch = _added_fetches(ended.fetch, now.fetch)
    return PipelineStatistics(**counts, first_batch_seconds=first, fetch=fetch, caches=caches)


def _added_fetches(ended: FetchStatistics, now: FetchStatistics) -> FetchStatistics:
    """Return the counts of both, and the later one's estimates."""
    changes: dict[str, Any] = {}
    for each in fields(FetchStatistics):
        if each.name in ("concurrency", "in_flight", "tier_states"):
            continue
        first, second = getattr(ended, each.name), getattr(now, each.name)
        if isinstance(first, Mapping):
            changes[each.name] = Counter(first) + Counter(second)
        elif isinstance(first, int):
            changes[each.name] = first + second
    return replace(now, **changes)
