"""The loader: a data set in a bucket as an iterable of batches, one iteration an epoch."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Unpack

import torch

from stoker.catalog import read_manifest
from stoker.errors import ConfigError, StateError
from stoker.feed import Batch, Feed, FeedConfig
from stoker.gather import gather_rows
from stoker.loop_thread import LoopThread
from stoker.manifest import Manifest
from stoker.meter import Meter
from stoker.order import OrderConfig
from stoker.prices import Prices
from stoker.store import open_store
from stoker.store.metered import MeteredStore
from stoker_torch.buffers import BufferPool
from stoker_torch.config import LoaderConfig, Settings
from stoker_torch.plan import LoaderPlan
from stoker_torch.pool import PendingBatch, SamplePool, SampleWork
from stoker_torch.ranks import compare_ranks, find_rank
from stoker_torch.state import RunState
from stoker_torch.statistics import LoaderStatistics, LoopTimes, statistics
from stoker_torch.tensors import to_tensors

__all__ = ["Loader"]

_log = logging.getLogger("stoker")
_BATCHES_IN_POOL = 4
"""Batches that are worked on ahead of the one asked for: enough to keep the pool busy while a step runs."""


class Loader:
    """Iterates over a packed data set; each ``for`` is one epoch, each batch a dictionary of tensors.

    ``batch[name]`` is a tensor ``[samples, *shape]`` of the column's dtype, or a :class:`RaggedColumn`. Batches own
    their memory. The order is fixed by (manifest version, seed, epoch, shuffle, window, lanes), the same on every
    machine; over all ranks an epoch delivers every sample exactly once, and every rank the same number of batches.

    Fetching starts with the first iteration, runs on a thread of its own and goes on across epochs; leaving a loop
    early (``break``) abandons the epoch, and the next iteration is the next epoch. :meth:`state_dict` gives the place
    behind the batch yielded last. Construction reads the manifest, and nothing else.

    Args:
        url: of the data set: a path, ``file://``, ``s3://``, ``gs://`` or ``memory://``.
        settings: see :class:`LoaderConfig`.

    Raises:
        ConfigError: a setting is wrong.
        NotFoundError: there is no data set at the URL.
        BudgetError: the memory is too small, or the order would cost more than the limit; names the figure that fits.
    """

    def __init__(self, url: str | os.PathLike[str], **settings: Unpack[Settings]) -> None:
        self._times = LoopTimes(time.perf_counter())
        self.config = LoaderConfig(**settings)
        self.rank, self.world_size = find_rank(self.config.rank, self.config.world_size)
        self.url = os.fspath(url)
        self._pid = os.getpid()
        self._thread = LoopThread("stoker-loader")
        inner = open_store(url, options=self.config.options)
        self._store = MeteredStore(inner, Meter(inner.url))
        self._prices = Prices.load()
        self._buffers = BufferPool(pinned=self.config.pin_memory) if self.config.reuse_buffers else None
        self._lanes = self.world_size if self.config.lanes is None else self.config.lanes
        self._resources = _Resources(self._thread, self._store)
        try:
            self._manifest = self._thread.run(read_manifest(self._store, self.config.version))
            self._feed = self._made_feed()
            self.plan.check_dollars(self.config.max_dollars_per_epoch)
        except BaseException:
            self._resources.close()
            raise
        # Made after the thread's start, so that at exit it runs while the thread still does.
        weakref.finalize(self, self._resources.close)
        self._pool = self._made_pool()
        self._epoch = self._position = 0
        self._is_fresh = True
        self._batches = self._samples = 0
        self._iteration: weakref.ref[_Iteration] | None = None
        _log.info("%s", self.plan)

    # What is being read, and how.

    @property
    def manifest(self) -> Manifest:
        """The pinned version of the data set's index."""
        return self._manifest

    @property
    def plan(self) -> LoaderPlan:
        """What an epoch takes: steps, lanes, bytes, GETs, dollars and memory; its text is one line."""
        return LoaderPlan.of(self._feed, self._prices)

    def __repr__(self) -> str:
        place = f"epoch {self._epoch}, position {self._position}"
        return f"<Loader {self.url} rank {self.rank} of {self.world_size}, {place}>"

    def __len__(self) -> int:
        """Return how many batches a whole epoch has on this rank."""
        return self._feed.partition.steps_from(0)

    @property
    def remaining(self) -> int:
        """How many batches the current epoch has left on this rank."""
        return self._feed.partition.steps_from(self._position)

    def _made_feed(self) -> Feed:
        config = self.config
        unknown = [name for name in config.decode if name not in self._manifest.schema]
        if unknown:
            raise ConfigError(f"decode names {', '.join(unknown)}; the columns are {', '.join(self._manifest.schema)}")
        self._resources.feed = Feed(
            self._store,
            self._manifest,
            FeedConfig(
                order=OrderConfig(seed=config.seed, shuffle=config.shuffle, window=config.window, lanes=self._lanes),
                batch_size=config.batch_size,
                rank=self.rank,
                world_size=self.world_size,
                drop_last=config.drop_last,
                evaluation=config.evaluation,
                limit=config.limit,
                columns=None if config.columns is None else tuple(config.columns),
                memory_bytes=config.memory_bytes(),
                end_epoch=config.epochs,
                schedule=config.schedule,
                fetch=config.fetch,
            ),
            self._thread,
            gather_rows if self._buffers is None else self._buffers.gather_rows,
        )
        return self._resources.feed

    def _made_pool(self) -> SamplePool | None:
        config = self.config
        if not config.by_sample and config.batch_transform is None:
            return None
        work = SampleWork(
            decode=config.decode,
            transform=config.transform,
            collate=config.collate,
            batch_transform=config.batch_transform,
        )
        return SamplePool(work, config.workers or os.cpu_count() or 1, config.max_bad_samples)

    # Iterating.

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on where a loaded state says. An older iteration ends.

        Raises:
            RankMismatchError: under torch.distributed, the ranks disagree on the data set, the order or the place.
        """
        self._leave()
        if not self._is_fresh and self._position:
            self._epoch, self._position = self._epoch + 1, 0  # the last iteration was left early
        self._is_fresh = False
        if self._pool is not None and self._pid != os.getpid():
            self._pool = self._made_pool()
        self._pid = os.getpid()
        settings = asdict(self._state()) | {"batch_size": self.config.batch_size, "drop_last": self.config.drop_last}
        compare_ranks(settings, self.world_size)
        if self._feed.place != (self._epoch, self._position) and self.remaining:
            self._feed.start(self._epoch, self._position)
        iteration = _Iteration(self)
        self._iteration = weakref.ref(iteration)
        return iteration

    def _leave(self) -> None:
        """End the iteration that is under way, if any."""
        iteration = None if self._iteration is None else self._iteration()
        if iteration is not None:
            iteration.close()
        self._iteration = None

    def _tensors(self, batch: Batch) -> dict[str, Any]:
        columns: dict[str, Any] = to_tensors(batch.columns, self._feed.columns)
        if self.config.with_ids:
            columns["__id__"] = torch.from_numpy(self._feed.sample_ids(batch))
        if self.config.pin_memory:
            columns = {name: values if values.is_pinned() else values.pin_memory() for name, values in columns.items()}
        return columns

    def _name(self, batch: Batch, place: int) -> str:
        """Name a sample of a batch, for errors."""
        super_sample, row = int(batch.super_samples[place]), int(batch.rows[place])
        sample = int(self._feed.sample_ids(batch)[place])
        return f"sample {sample} (row {row} of {self.url}/{self._manifest.key(super_sample)})"

    def _note(self, batch: Batch, asked: float) -> None:
        """Take note of a batch that is being yielded."""
        self._epoch, self._position = (batch.epoch + 1, 0) if batch.is_last else (batch.epoch, batch.end)
        self._batches += 1
        self._samples += len(batch)
        self._times.yielded(asked, time.perf_counter())

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next iteration begins, from its start."""
        self._leave()
        self._epoch, self._position, self._is_fresh = epoch, 0, True

    # State.

    def _state(self) -> RunState:
        config = self.config
        return RunState(
            epoch=self._epoch,
            position=self._position,
            dataset=self._manifest.dataset,
            version=self._manifest.version,
            seed=config.seed,
            shuffle=config.shuffle,
            window=config.window,
            lanes=self._lanes,
            limit=config.limit,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the batch yielded last, with all that fixes the order: plain values, fit for JSON.

        The state of any rank is the state of all.
        """
        return self._state().to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on where the state was taken, on any world size and batch size.

        The state's manifest version and lanes are taken over.

        Raises:
            StateError: the state is of another data set or order than this loader's settings.
            NotFoundError: the manifest version is gone.
        """
        loaded, mine = RunState.from_dict(state), self._state()
        for name in ("dataset", "seed", "shuffle", "window", "limit"):
            if getattr(loaded, name) != getattr(mine, name):
                raise StateError(
                    f"the state was taken with {name}={getattr(loaded, name)!r}, this loader has "
                    f"{getattr(mine, name)!r}; construct it with the same"
                )
        for name in ("lanes", "version"):
            wanted = getattr(self.config, name)
            if wanted is not None and wanted != getattr(loaded, name):
                raise StateError(
                    f"the state was taken with {name}={getattr(loaded, name)}, this loader was given {wanted}; "
                    "leave it out"
                )
        if (loaded.version, loaded.lanes) != (mine.version, mine.lanes):
            self._feed.stop()
            if loaded.version != mine.version:
                self._manifest = self._thread.run(read_manifest(self._store, loaded.version))
            self._lanes = loaded.lanes
            self._feed = self._made_feed()
        self._leave()
        self._epoch, self._position, self._is_fresh = loaded.epoch, loaded.position, True
        if not self.remaining and loaded.position:
            self._epoch, self._position = loaded.epoch + 1, 0

    # The end.

    def stats(self) -> LoaderStatistics:
        """Return what was done so far: waits, requests, bytes, retries, hedges, dollars."""
        bad = 0 if self._pool is None else self._pool.bad.count
        return statistics(
            self._feed.statistics(),
            self._store.meter.reading(),
            self._prices,
            self._times,
            (self._batches, self._samples),
            bad,
        )

    def close(self) -> None:
        """End fetching and threads and close connections. Idempotent; iterating again starts anew."""
        self._leave()
        self._resources.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = self._made_pool()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(slots=True)
class _Resources:
    """What must be released when a loader goes, however it goes."""

    thread: LoopThread
    store: MeteredStore
    feed: Feed | None = None

    def close(self) -> None:
        if self.feed is not None:
            self.feed.stop()
        if self.thread.is_running:
            self.thread.run(self.store.close())
            self.thread.close()


class _Iteration:
    """One epoch being iterated over; an older one of the same loader is over when a new one begins."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._pending: deque[tuple[Batch, PendingBatch]] = deque()
        self._left = loader.remaining
        self._unplanned = self._left

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        if not self._left:
            raise StopIteration
        asked = time.perf_counter()
        try:
            taken = self._taken()
        except BaseException:
            self.close()
            raise
        if taken is None:
            self.close()
            raise StopIteration
        self._left -= 1
        self._loader._note(taken[0], asked)  # noqa: SLF001 - one unit, in two classes
        return taken[1]

    def close(self) -> None:
        """Yield nothing more."""
        self._left = 0
        self._pending.clear()

    def _taken(self) -> tuple[Batch, Any] | None:
        """Return the next batch, as gathered and as it is to be yielded, or None where the run ends."""
        loader = self._loader
        if loader._pool is None:  # noqa: SLF001
            batch = loader._feed.next()  # noqa: SLF001
            return None if batch is None else (batch, loader._tensors(batch))  # noqa: SLF001
        while self._unplanned and len(self._pending) < _BATCHES_IN_POOL:
            if self._pending and not loader._feed.is_ready():  # noqa: SLF001
                break
            batch = loader._feed.next()  # noqa: SLF001
            if batch is None:
                self._unplanned = 0
                break
            self._unplanned -= 1
            work = loader._pool.submit(loader._tensors(batch), partial(loader._name, batch))  # noqa: SLF001
            self._pending.append((batch, work))
        if not self._pending:
            return None
        batch, work = self._pending.popleft()
        return batch, work.result()
