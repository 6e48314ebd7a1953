"""What one process of a stream data set reads: its worker's share of an epoch, as batches or as samples."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from stoker._fetch.batch_stream import Batch
from stoker._fetch.pipeline import PipelineConfig
from stoker._format.manifest import Manifest
from stoker._order.sharding import LaneShare
from stoker_torch._epoch_board import Seat
from stoker_torch._iteration import Iteration
from stoker_torch._pool import SamplePool
from stoker_torch._resources import LoaderResources

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


class StreamReader:
    """Reads a worker's share in the process that made it; ends with it, or when it is garbage.

    Args:
        resources: of the data set; the reader closes them.
        manifest: the pinned version.
        worker: whose share it is.
        feed_config: of the rank; says whether samples are asked for, not batches.

    Raises:
        ConfigError: the lanes cannot be dealt evenly.
        BudgetError: the memory is too small; names the rank's figure.
    """

    def __init__(
        self, resources: LoaderResources, manifest: Manifest, worker: Worker, feed_config: PipelineConfig
    ) -> None:
        self._pid = os.getpid()
        self.resources, self.is_chunked, self._worker = resources, feed_config.chunks, worker
        feed_config = replace(feed_config, worker=worker.number, workers=worker.count)
        if self.is_chunked:
            feed_config = replace(feed_config, batch_size=_chunk_samples(manifest))
        self.share = feed_config.lane_share(manifest.samples)
        self.feed = resources.current = resources.create_feed(manifest, feed_config)
        config, threads = resources.config, 1 if worker.is_child else os.cpu_count() or 1
        by_sample = bool(config.decode) or config.transform is not None
        collate = list if self.is_chunked and by_sample else None
        resources.pool = SamplePool.of(config, threads=threads, collate=collate)
        self._begun: Progress | None = None
        self._end_epoch: int | None = None
        resources.register_finalizer(self)

    def is_for(self, manifest: Manifest, worker: Worker, lanes: int) -> bool:
        """Return whether it was made in this process, and for this version, worker and lanes."""
        mine = self._pid, self.feed.manifest, self._worker, self.feed.config.order.lanes
        return mine == (os.getpid(), manifest, worker, lanes)

    def iterate(self, progress: Progress) -> Iteration:
        """Return what is left of a share, batch by batch or chunk by chunk, and count it into ``progress``."""
        before, self._begun = self._begun, progress
        is_resumed = progress.share is not self.share
        if before is not None and (is_resumed or progress.epoch in (before.epoch, self._end_epoch)):
            self.feed.stop()  # nothing of what was fetched ahead is what comes now
        # Most worker processes end with their epoch; only one that begins another may look ahead beyond it.
        end_epoch = self._end_epoch = progress.epoch + 1 if self._worker.is_child and before is None else None
        cursor = _ShareCursor(self, progress, end_epoch)
        is_over = self.resources.config.epochs is not None and progress.epoch >= self.resources.config.epochs
        return Iteration(self.resources, cursor, 0 if is_over else progress.share.steps_from(0))

    def close(self) -> None:
        """End fetching and threads and close connections. Idempotent."""
        if self._pid == os.getpid():
            self.resources.close()
            if self.resources.pool is not None:
                self.resources.pool.close()


@dataclass(frozen=True, slots=True)
class _ShareCursor:
    """Where an iteration over a worker's share is.

    Attributes:
        reader: of the share.
        progress: is kept here.
        end_epoch: that the feed does not look ahead into.
    """

    reader: StreamReader
    progress: Progress
    end_epoch: int | None

    def seek(self) -> None:
        """Have the feed deliver what is behind the batch that was taken last, unless it does."""
        reader, progress = self.reader, self.progress
        if reader.feed.place != (progress.epoch, progress.fetched):
            reader.feed.start(progress.epoch, progress.fetched, partition=progress.share, end_epoch=self.end_epoch)
            reader.resources.register_finalizer(reader)

    def commit(self, batch: Batch) -> None:
        """Go behind a batch; of a chunk, each sample that is yielded counts."""
        self.progress.fetched = batch.end
        if not self.reader.is_chunked:
            self.progress.position = batch.end

    def end(self) -> None:
        """Do nothing: the epoch board says which epoch comes next."""

    def fail(self) -> None:
        """Do nothing: the data set goes on from the progress."""


def _chunk_samples(manifest: Manifest) -> int:
    return max(1, min(_CHUNK_SAMPLES, _CHUNK_BYTES * manifest.samples // max(1, manifest.size_bytes)))


def samples_of(chunk: Any, share: LaneShare, start: int, end: int) -> list[Any]:
    """Return the samples of a chunk in the order of the epoch: what the pool made of them, or rows of its columns."""
    if isinstance(chunk, dict):
        values = [value.unbind() if isinstance(value, torch.Tensor) else list(value) for value in chunk.values()]
        chunk = [dict(zip(chunk, row, strict=True)) for row in zip(*values, strict=True)]
    return [chunk[turn] for turn in share.turns(start, end).tolist()]
