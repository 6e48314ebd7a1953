"""The resources of a loader in one process, and an iteration over the rest of one epoch, batch by batch.

The next batch is gathered while the training loop is busy, so that the loop does not wait for the copy; if there are
worker threads, they work a few batches ahead.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch

from stoker._base.fetch_record import Phase
from stoker._base.recorder import Recorder
from stoker._base.retry import RetryingReader
from stoker._base.sizes import format_bytes
from stoker._base.threads import LoopThread
from stoker._cache.index import TierSet
from stoker._cache.tiers import create_tiers
from stoker._cost.prices import CostBudget, Prices
from stoker._fetch.batch_stream import Batch
from stoker._fetch.config import PipelineConfig
from stoker._fetch.gather import BatchArrays
from stoker._fetch.materialized_pipeline import MaterializedPipeline
from stoker._fetch.pipeline import BatchPipeline
from stoker._format.manifest import Manifest
from stoker._order.random_words import SampleContext
from stoker._stores import open_reader
from stoker._stores.object_store import ObjectStore, with_meter
from stoker.abc import RangeReadable
from stoker.errors import ConfigError, CostBudgetError, StokerError
from stoker_torch._cached_batches import CachedBatches
from stoker_torch._config import StreamConfig
from stoker_torch._device_cache import DeviceCache
from stoker_torch._device_images import DeviceImageDecoder, EncodedImages, like_decoded
from stoker_torch._options import Budget
from stoker_torch._pool import PendingBatch, SamplePool
from stoker_torch._ranks import has_twins
from stoker_torch._readahead import Readahead
from stoker_torch._shared_manifest import bucket_url, read_manifest_once
from stoker_torch._staging import StagedIteration, Staging, Transform
from stoker_torch._statistics import LoaderPlan, LoopStatistics
from stoker_torch._tensors import map_tensors, pin_batch, to_tensors
from stoker_torch._user_functions import ContextOf, ThreadPool


@dataclass(slots=True, kw_only=True)
class LoaderResources:
    """The open data set of a loader, with all that reads from it. The first read connects to the store.

    Attributes:
        config: settings of the loader or stream data set.
        store: store of the data set, with a meter of its requests.
        thread: thread with the event loop, the only one that uses the store.
        prices: prices of the stores.
        pool: worker threads of the user's functions, None without functions.
        recorder: records fetches and waits; None for a stream data set.
        arrays: makes the arrays of batches.
        pins_memory: whether batches are put into page-locked memory.
        gathers_ahead: whether a batch is gathered ahead of a busy training loop, if there is no pool.
        staging: copies batches to a device, None for batches in host memory.
        finish: function of a staged batch, run on the staging stream; None for none.
        gathers_on_request: whether a batch whose samples all stay on the device is gathered when the loop asks for it,
            on the loop's stream: ``finish`` has nothing else to do.
        accelerator: device that batches are copied to; None without.
        device_decoders: column → decoder that works on the device.
        gpu_cache_bytes: size of the part of the data set that stays on the device; None without.
        device_cache: samples that stay on the device; None if there are none.
        cost_budget: dollars that this rank may spend, None without a limit.
        active_pipeline: batch pipeline in use, None before there is one.
        tiers: tiers that are read before the bucket, for one pipeline after the other; None before there is one.
        readahead: readahead that gathers from the pipeline, for an iteration that may be garbage, or None.
        bucket_url: URL of the data set in a bucket; empty if it is elsewhere.
        manifest_hedges: number of second requests for manifests that were late.
    """

    config: StreamConfig
    store: ObjectStore
    thread: LoopThread
    prices: Prices = field(default_factory=Prices.load)
    pool: SamplePool | None = None
    recorder: Recorder | None = None
    arrays: BatchArrays = field(default_factory=BatchArrays)
    pins_memory: bool = False
    gathers_ahead: bool = False
    staging: Staging | None = None
    finish: Transform | None = None
    gathers_on_request: bool = False
    accelerator: torch.device | None = None
    device_decoders: Mapping[str, DeviceImageDecoder] = field(default_factory=dict)
    gpu_cache_bytes: int | None = None
    device_cache: DeviceCache | None = None
    cost_budget: CostBudget | None = None
    active_pipeline: BatchPipeline | None = None
    tiers: TierSet | None = None
    readahead: Readahead[Any] | None = None
    _own_tiers: TierSet = field(
        default_factory=TierSet
    )  # tiers that this object closes: all but one that the caller made
    _closing: threading.RLock = field(default_factory=threading.RLock)
    bucket_url: str = ""
    manifest_hedges: int = 0
    _gather_thread: ThreadPool | None = None
    _finalizer: weakref.finalize[..., Any] | None = None
    _process_finalizer: Finalize | None = None

    @classmethod
    def open(cls, location: str | os.PathLike[str] | RangeReadable, config: StreamConfig) -> LoaderResources:
        """Open the data set at a path or URL, or in a store."""
        store = with_meter(open_reader(location, options=config.options), egress=Budget.of(config.budget).egress)
        thread = LoopThread("stoker-loader", on_close=store.close)
        return cls(config=config, store=store, thread=thread, bucket_url=bucket_url(location))

    @property
    def pipeline(self) -> BatchPipeline:
        """The batch pipeline in use."""
        assert self.active_pipeline is not None  # noqa: S101 - its owner creates it before it is used
        return self.active_pipeline

    def read_manifest(self, version: int | None, processes: int) -> Manifest:
        """Return a version of the manifest, or the newest one for None.

        Args:
            version: version number.
            processes: number of processes of the job that read.

        Raises:
            NotFoundError: there is no data set, or no such version.
        """
        reader = RetryingReader(self.store)
        try:
            return self.thread.run(
                read_manifest_once(reader, version, url=self.bucket_url, config=self.config, processes=processes)
            )
        finally:
            self.manifest_hedges += reader.hedges

    def create_pipeline(self, manifest: Manifest, pipeline_config: PipelineConfig) -> BatchPipeline:
        """Return a new batch pipeline, which is not in use yet.

        Raises:
            ConfigError: a column is not in the data set, or the lanes cannot be divided among the ranks.
            MemoryBudgetError: the memory or a cache is too small.
        """
        config = self.config
        unknown = [name for name in config.decode or () if name not in manifest.schema]
        if unknown:
            raise ConfigError(
                f"decode has unknown columns {', '.join(unknown)}; the data set has the columns "
                f"{', '.join(manifest.schema)}"
            )
        tier_set = self.tiers = self.tiers or self._open_tiers(manifest, pipeline_config)
        arguments = self.store, manifest, pipeline_config, self.thread
        if self.gpu_cache_bytes is not None and (
            self.device_cache is None or self.device_cache.manifest.version != manifest.version
        ):
            self.device_cache = DeviceCache(manifest, self.gpu_cache_bytes)
        options: dict[str, Any] = {"arrays": self.arrays, "recorder": self.recorder, "tier_set": tier_set}
        if self.device_cache is not None:
            options["residents"] = self.device_cache
        if config.shuffle != "materialized":
            return BatchPipeline(*arguments, **options)
        budget = Budget.of(config.budget)
        pipeline = MaterializedPipeline(*arguments, **options)

        def check(epoch: BatchPipeline) -> None:
            LoaderPlan.of(epoch, self.prices, budget.egress).check_dollars(budget.max_dollars_per_epoch)

        pipeline.check_fallback = check
        return pipeline

    def _open_tiers(self, manifest: Manifest, pipeline_config: PipelineConfig) -> TierSet:
        config = self.config
        caches = config.caches()
        tiers = create_tiers(caches, manifest, config.sharers(pipeline_config)) if caches else ()
        shared = config.shared_tier(self.store, pipeline_config.world_size * (pipeline_config.workers or 1))
        limit_bytes: int | None = getattr(shared, "max_object_bytes", None)
        if limit_bytes is not None and manifest.largest_bytes > limit_bytes:
            raise ConfigError(
                f"tier= keeps objects of at most {format_bytes(limit_bytes)}, and the largest super-sample has "
                f"{format_bytes(manifest.largest_bytes)}: use a code with more data shards"
            )
        is_lent = shared is not None and shared in (config.tier, config.warm)
        cluster = config.cluster_tier(is_shared=has_twins(pipeline_config.world_size))
        self._own_tiers = TierSet(tiers, cluster, None if is_lent else shared)
        return TierSet(tiers, cluster, shared)

    def plan(self) -> LoaderPlan:
        """Return the plan of an epoch of the batch pipeline in use."""
        plan = LoaderPlan.of(self.pipeline, self.prices, Budget.of(self.config.budget).egress)
        return replace(plan, shuffle=self.config.shuffle)

    def check_spending(self) -> None:
        """Warn when most of the dollar budget is spent; when all of it is, stop fetching.

        Raises:
            CostBudgetError: the budget is spent.
        """
        if self.cost_budget is None:
            return
        try:
            self.cost_budget.check(self.prices.dollars(self.store.meter.snapshot()))
        except CostBudgetError:
            if self.active_pipeline is not None:
                self.active_pipeline.stop()
            raise

    def register_finalizer(self, owner: object) -> None:
        """Close everything when ``owner`` is garbage or the process ends, also a worker process of a DataLoader.

        Call it after each start of the thread, in the process where it runs: at exit the finalizer registered last runs
        first, and it needs the running thread.
        """
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(owner, self.close)
        if multiprocessing.parent_process() is not None:  # if it was forked, it ends without what atexit has
            if self._process_finalizer is not None:
                self._process_finalizer.cancel()
            self._process_finalizer = Finalize(None, self._finalizer, exitpriority=0)

    @property
    def gather_thread(self) -> ThreadPool | None:
        """The thread of this process that gathers batches ahead; None if none is to be gathered ahead."""
        if not self.gathers_ahead or self.pool is not None or self.staging is not None:
            return None
        if self._gather_thread is None or self._gather_thread.pid != os.getpid():
            self._gather_thread = ThreadPool(1, "stoker-gather")
        return self._gather_thread

    def end_gathering(self) -> None:
        """End gathering from the batch pipeline, and wait for it; the pipeline continues to fetch ahead."""
        ahead = self.readahead
        if ahead is None:
            return
        ahead.end()
        if ahead.is_waiting and self.active_pipeline is not None:
            self.active_pipeline.stop()  # or close() would wait until the bucket has answered
        ahead.close()
        self.readahead = None

    def close(self) -> None:
        """End fetching, the thread and the connections. Idempotent; a batch pipeline may start again."""
        ahead = self.readahead
        if self.thread.is_current or (ahead is not None and ahead.is_current):
            # Garbage collection runs in any thread; in this one, close() would wait for itself.
            threading.Thread(target=self.close, name="stoker-close").start()
            return
        with self._closing:
            if self._process_finalizer is not None:
                self._process_finalizer.cancel()
            if ahead is not None:
                ahead.end()
            if self.staging is not None:
                self.staging.close()  # waits for a batch that is being staged
                if self.device_cache is not None:
                    self.device_cache.clear()
            threads, self._gather_thread = self._gather_thread, None
            try:
                if threads is not None:
                    threads.close()  # waits for a batch that is being gathered
                if self.active_pipeline is not None:
                    self.active_pipeline.stop()
                if self.thread.is_running:
                    self.thread.run(self._own_tiers.close())
            finally:
                self.thread.close()


_BATCHES_IN_POOL = 3
"""Batches in the pool at a time: enough to keep its threads busy while a training step runs."""


class Cursor(ABC):
    """The position of an iteration, which starts the batch pipeline there and advances with the batches yielded."""

    @abstractmethod
    def seek(self) -> None:
        """Start the batch pipeline at the batch to be yielded next, unless it is there already."""

    @abstractmethod
    def commit(self, batch: Batch) -> None:
        """Advance to the end of a batch that is being yielded."""

    def end(self) -> None:  # noqa: B027 - optional: a cursor may have nothing to do
        """React to the end of the loop."""

    def fail(self) -> None:  # noqa: B027 - as above
        """React to an error that ended the iteration, so that the next iteration may continue it."""


class BatchIteration:
    """One iteration over an epoch; threads that share it get different batches.

    A forked child may continue it, with its own connections and threads, and gets the same batches.
    """

    def __init__(
        self, resources: LoaderResources, cursor: Cursor, steps: int, statistics: LoopStatistics | None = None
    ) -> None:
        self._resources, self._cursor, self._statistics = resources, cursor, statistics
        self._remaining = steps
        self._begin()

    def _begin(self) -> None:
        """Create the locks and buffers of this process."""
        self._pid = os.getpid()
        self._next_lock = threading.RLock()  # one thread at a time waits for a batch
        self._yield_lock = threading.RLock()  # decides whether a batch is yielded or the iteration was closed before
        resources, feed = self._resources, self._resources.pipeline
        make = partial(_gather_next, feed, resources.config.with_ids)
        threads = resources.gather_thread
        buffer = resources.readahead = Readahead(make, self._remaining, feed.is_ready, threads)
        self._batches = HostBatches(resources, buffer)
        self._staged: StagedIteration[Batch] | CachedBatches | None = None
        if self._remaining:
            self._cursor.seek()
            if resources.staging is not None:
                self._staged = self._stage(resources.staging)
                resources.readahead = self._staged.readahead

    def _stage(self, staging: Staging) -> StagedIteration[Batch] | CachedBatches:
        resources, batches = self._resources, self._batches
        cache = resources.device_cache
        if cache is not None and cache.is_complete and resources.gathers_on_request:
            return CachedBatches(cache, resources.pipeline, staging, self._remaining)
        return staging.iterate(
            batches.next_to_stage, resources.finish, count=self._remaining, is_ready=batches.is_ready
        )

    def __iter__(self) -> BatchIteration:
        return self

    def __next__(self) -> Any:
        started: float | None = None  # waiting for another thread does not count as waiting for data
        try:
            if self._remaining and self._pid != os.getpid():
                started = time.perf_counter()
                self._begin()
            with self._next_lock:
                if self._remaining:
                    self._resources.check_spending()
                return self._next(time.perf_counter() if started is None else started)
        except StopIteration:
            self._cursor.end()
            self.close()
            raise
        except BaseException:
            with self._yield_lock:
                if self._remaining:  # no other thread has ended it
                    self._cursor.fail()
            self.close()
            raise

    def _next(self, started: float) -> Any:
        source = self._batches if self._staged is None else self._staged
        prepared = source.next() if self._remaining else None
        with self._yield_lock:
            if prepared is None or not self._remaining:
                raise StopIteration
            self._remaining -= 1
            self._cursor.commit(prepared[0])
            if self._statistics is not None:
                self._statistics.record_yield(prepared[0], started)
        return prepared[1]

    def close(self) -> None:
        """End the iteration and drop the batches ahead, without waiting."""
        with self._yield_lock:
            self._remaining = 0
        if self._staged is not None and self._pid == os.getpid():
            self._staged.readahead.end()
        self._batches.end(is_forked=self._pid != os.getpid())


class HostBatches:
    """The batches of one iteration in host memory. It must not refer to the cursor, which it may outlive.

    Args:
        resources: open data set with the batch pipeline.
        readahead: readahead that gathers from the pipeline.
    """

    def __init__(self, resources: LoaderResources, readahead: Readahead[tuple[Batch, dict[str, Any]]]) -> None:
        self._resources, self._readahead = resources, readahead
        self._pending: deque[tuple[Batch, PendingBatch] | Exception] = deque()

    def next(self) -> tuple[Batch, Any] | None:
        """Return the next batch, as gathered and as yielded, or None at the end of the run."""
        resources = self._resources
        if resources.pool is None:
            gathered = self._readahead.next()
            if gathered is None or not resources.pins_memory:
                return gathered
            return gathered[0], pin_batch(gathered[1])
        pending = self._pending
        self._fill_pool(resources.pool, pending)
        if not pending:
            return None
        oldest = pending.popleft()
        if isinstance(oldest, Exception):
            raise oldest
        started = time.perf_counter()
        result = oldest[1].result()
        if resources.recorder is not None:
            resources.recorder.add_wait(Phase.DECODE, started, time.perf_counter())
        return oldest[0], result

    def is_ready(self) -> bool:
        """Return whether the next batch can be returned without waiting."""
        if not self._pending:
            return self._resources.pipeline.is_ready()
        oldest = self._pending[0]
        return isinstance(oldest, Exception) or oldest[1].is_done

    def next_to_stage(self) -> tuple[Batch, Any] | None:
        """Return the next batch as :meth:`next` does; the gathered one no longer refers to its values."""
        taken = self.next()
        if taken is None:
            return None
        batch, values = taken
        resources, read = self._resources, batch.read_part()
        contexts = _context_function(resources.pipeline, read) if resources.device_decoders else None
        for name, decoder in resources.device_decoders.items():
            if name in values:
                values[name] = EncodedImages(decoder, values[name], read.sample_name, contexts)
        cache = resources.device_cache
        if cache is not None:
            decoded = map_tensors(lambda tensor: tensor, values, like_decoded)
            values = *cache.plan(batch, decoded), values
        return replace(batch, columns={}), values

    def _fill_pool(self, pool: SamplePool, pending: deque[tuple[Batch, PendingBatch] | Exception]) -> None:
        """Submit batches that are ready to the pool; wait for one only if the pool has none."""
        feed = self._resources.pipeline
        while len(pending) < _BATCHES_IN_POOL and (not pending or feed.is_ready()):
            try:
                gathered = self._readahead.next()
            except Exception as error:  # noqa: BLE001 - raised again after the batches before it
                pending.append(error)
                return
            if gathered is None:
                return
            batch, columns = gathered
            read = batch.read_part()
            contexts = _context_function(feed, read)
            pending.append((batch, pool.submit(columns, read.sample_name, contexts)))

    def end(self, *, is_forked: bool) -> None:
        """Gather no more batches, and drop those in the pool; a forked process has none."""
        self._readahead.end()
        if not is_forked:
            for pending in list(self._pending):
                if not isinstance(pending, Exception):
                    pending[1].fail(StokerError("the iteration has ended"))
        self._pending = deque()  # a new one, since another thread may be using the old one


def _gather_next(feed: BatchPipeline, with_ids: bool) -> tuple[Batch, dict[str, Any]] | None:
    batch = feed.next()
    if batch is None:
        return None
    columns: dict[str, Any] = dict(to_tensors(batch.columns, feed.source.columns))
    if with_ids:
        columns["__id__"] = torch.from_numpy(batch.read_part().sample_ids())
    return batch, columns


def _context_function(feed: BatchPipeline, batch: Batch) -> ContextOf:
    ids, seed = batch.sample_ids(), feed.config.order.seed
    return lambda row: SampleContext(seed=seed, epoch=batch.epoch, sample=int(ids[row]))
