"""What one process of a stream data set reads: its worker's share of an epoch, as batches or as samples."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from stoker._fetch.batch_stream import Batch
from stoker._format.manifest import Manifest
from stoker._order.sharding import LaneShare
from stoker_torch._config import StreamConfig
from stoker_torch._epoch_board import Seat
from stoker_torch._iteration import Iteration, IterationParts
from stoker_torch._options import WorkerOptions
from stoker_torch._pool import SamplePool, SampleWork
from stoker_torch._supply import Supply

__all__ = ["Progress", "StreamReader", "Worker", "samples_of"]

_CHUNK_BYTES = 1 << 20
_CHUNK_SAMPLES = 256
"""Samples are read in chunks of about so many: small enough that the few that are decoded ahead are little memory,
large enough that what a chunk costs (20 microseconds) is nothing beside them."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that a data set is iterated over in.

    Attributes:
        number: of the rank's workers, from 0.
        count: of them; 1 where there is no DataLoader or it has none.
        is_child: whether it is a DataLoader's.
        seat: on the board.
    """

    number: int
    count: int
    is_child: bool
    seat: Seat

    @classmethod
    def here(cls) -> Worker:
        """Return the one that this process is.

        Raises:
            ConfigError: there are too many.
        """
        info = get_worker_info()
        if info is None:
            return cls(0, 1, False, Seat())
        return cls(info.id, info.num_workers, True, Seat.of_worker(info.id, info.seed - info.id))


@dataclass(slots=True, eq=False)
class Progress:
    """How far an iteration is.

    Attributes:
        epoch: being iterated over.
        share: of it that is this worker's.
        position: of the share behind what was yielded last.
        fetched: of the share behind the batch or chunk that was taken last.
    """

    epoch: int
    share: LaneShare
    position: int = 0
    fetched: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What of a data set is read, and how.

    Attributes:
        worker: whose share.
        rank: this rank.
        world_size: how many ranks there are.
        lanes: into how many parts the order is cut.
        is_chunked: whether samples are asked for, not batches.
    """

    worker: Worker
    rank: int
    world_size: int
    lanes: int
    is_chunked: bool


class StreamReader:
    """Reads a worker's share in the process that made it; ends with it, or when it is garbage.

    Args:
        supply: of the data set; the reader closes it.
        manifest: the pinned version.
        config: of the data set.
        part: what of it is this worker's.

    Raises:
        ConfigError: the lanes cannot be dealt evenly.
        BudgetError: the memory is too small; names the rank's figure.
    """

    def __init__(self, supply: Supply, manifest: Manifest, config: StreamConfig, part: Part) -> None:
        self._pid = os.getpid()
        self._supply, self._config, self._part = supply, config, part
        feed_config = replace(
            config.feed_config(rank=part.rank, world_size=part.world_size, lanes=part.lanes),
            worker=part.worker.number,
            workers=part.worker.count,
            chunks=part.is_chunked,
            batch_size=config.batch_size or _chunk_samples(manifest),
        )
        self.share = feed_config.lane_share(manifest.samples)
        self.feed = supply.feed = supply.made_feed(manifest, config, feed_config)
        self._pool = self._made_pool()
        self._begun: Progress | None = None
        self._end_epoch: int | None = None
        supply.arm(self)

    def _made_pool(self) -> SamplePool | None:
        config, workers = self._config, WorkerOptions.of(self._config.workers)
        by_sample = bool(config.decode) or config.transform is not None
        work = SampleWork(
            decode=config.decode or {},
            transform=config.transform,
            collate=list if self._part.is_chunked and by_sample else config.collate,
            batch_transform=config.batch_transform,
            timeout_seconds=workers.timeout_seconds or None,
        )
        threads = workers.threads or (1 if self._part.worker.is_child else os.cpu_count() or 1)
        return None if work.is_none else SamplePool(work, threads, workers.max_bad_samples)

    def is_for(self, manifest: Manifest, worker: Worker, lanes: int) -> bool:
        """Return whether it was made in this process, and for this version, worker and lanes."""
        mine = self._pid, self.feed.manifest, self._part.worker, self._part.lanes
        return mine == (os.getpid(), manifest, worker, lanes)

    def iterate(self, progress: Progress) -> Iteration:
        """Return what is left of a share, batch by batch or chunk by chunk, and count it into ``progress``."""
        before, self._begun = self._begun, progress
        is_resumed = progress.share is not self.share
        if before is not None and (is_resumed or progress.epoch in (before.epoch, self._end_epoch)):
            self.feed.stop()  # nothing of what was fetched ahead is what comes now
        # Most worker processes end with their epoch; only one that begins another may look ahead beyond it.
        end_epoch = self._end_epoch = progress.epoch + 1 if self._part.worker.is_child and before is None else None

        def go() -> None:
            if self.feed.place != (progress.epoch, progress.fetched):
                self.feed.start(progress.epoch, progress.fetched, partition=progress.share, end_epoch=end_epoch)
                self._supply.arm(self)

        def note(batch: Batch, _: float) -> None:
            progress.fetched = batch.end
            if not self._part.is_chunked:
                progress.position = batch.end

        parts = IterationParts(
            feed=self.feed,
            go=go,
            note=note,
            pool=self._pool,
            with_ids=self._config.with_ids,
            pin_memory=False,
            supply=self._supply,
        )
        is_over = self._config.epochs is not None and progress.epoch >= self._config.epochs
        return Iteration(parts, 0 if is_over else progress.share.steps_from(0))

    def close(self) -> None:
        """End fetching and threads and close connections. Idempotent."""
        if self._pid == os.getpid():
            self._supply.close()
            if self._pool is not None:
                self._pool.close()


def _chunk_samples(manifest: Manifest) -> int:
    return max(1, min(_CHUNK_SAMPLES, _CHUNK_BYTES * manifest.samples // max(1, manifest.size_bytes)))


def samples_of(chunk: Any, share: LaneShare, start: int, end: int) -> list[Any]:
    """Return the samples of a chunk in the order of the epoch: what the pool made of them, or rows of its columns."""
    if isinstance(chunk, dict):
        values = [value.unbind() if isinstance(value, torch.Tensor) else list(value) for value in chunk.values()]
        chunk = [dict(zip(chunk, row, strict=True)) for row in zip(*values, strict=True)]
    return [chunk[turn] for turn in share.turns(start, end).tolist()]
