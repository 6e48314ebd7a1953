"""One process of a stream data set: it finds its epoch, and reads its worker's share as batches or samples.

The worker processes of an iteration agree on its epoch, and their parent can set the next one. A DataLoader does not
notify its data set when it begins an iteration: it starts processes, or signals persistent ones, and each process has
to find the epoch itself. They share one board in memory, where each worker that begins an iteration writes its epoch.
All workers of one iteration know the same random seed, the DataLoader's base seed. So a worker that finds its seed
beside an epoch that it has not begun yet begins that epoch, else the next one. No worker counts for itself, so a worker
that was ended before it began does not fall behind the others.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, replace
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from stoker._fetch.batch_stream import Batch
from stoker._fetch.config import PipelineConfig
from stoker._format.manifest import Manifest
from stoker._order.sharding import WorkerSharding
from stoker.errors import ConfigError
from stoker_torch._iteration import BatchIteration, Cursor, LoaderResources
from stoker_torch._pool import SamplePool, has_functions
from stoker_torch._shared_batches import SharedBuffers

_TAG_BITS, _EPOCH_BITS = 20, 24
MAX_EPOCH = (1 << _EPOCH_BITS) - 1
MAX_WORKERS = 512
_TURNS_PER_WORKER = 4  # entries per worker: several iterations may run at a time, as of a DataLoader zipped with itself
_STATE_TAG = 1


class EpochTurn(NamedTuple):
    """The serial number and epoch of an iteration; turns compare in their order.

    Attributes:
        serial: number of the last command of the parent, from 1.
        epoch: number of the epoch, from 0.
    """

    serial: int
    epoch: int

    @property
    def word(self) -> int:
        """The turn as an integer that increases from turn to turn, with 20 low bits for a tag."""
        return (self.serial << _EPOCH_BITS | self.epoch) << _TAG_BITS

    @classmethod
    def of(cls, word: int) -> EpochTurn:
        """Return the turn of a word, ignoring its tag."""
        return cls(word >> _TAG_BITS + _EPOCH_BITS, word >> _TAG_BITS & MAX_EPOCH)


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that iterates over a data set.

    Attributes:
        number: number of the worker in its rank, from 0.
        count: number of workers of the rank; 1 without worker processes.
        tag: number that all workers of one iteration have in common; 0 if this is no worker process.
    """

    number: int = 0
    count: int = 1
    tag: int = 0

    @classmethod
    def of(cls, number: int, count: int, base_seed: int) -> Worker:
        """Return a worker of a DataLoader.

        Raises:
            ConfigError: the epoch board has no row for a worker with this number.
        """
        if number >= MAX_WORKERS:
            raise ConfigError(f"worker {number} is beyond the limit of {MAX_WORKERS} workers; use fewer")
        return cls(number, count, 1 + base_seed % ((1 << _TAG_BITS) - 1))

    @classmethod
    def current(cls) -> Worker:
        """Return the worker that this process is.

        Raises:
            ConfigError: there are too many workers.
        """
        info = get_worker_info()
        return cls() if info is None else cls.of(info.id, info.num_workers, info.seed - info.id)

    @property
    def is_child(self) -> bool:
        """Whether this is a worker process of a DataLoader."""
        return self.tag != 0

    @property
    def row(self) -> int:
        """The row of the epoch board: 0 for the process that made it, then one per worker."""
        return self.number + 1 if self.is_child else 0


class EpochBoard:
    """The epochs that workers have begun, in memory shared with forked and spawned workers.

    It needs no lock: a word holds turn and tag and is written atomically, and one process at a time writes to a row.
    """

    def __init__(self) -> None:
        self._memory = RawArray(ctypes.c_uint64, 1 + (1 + MAX_WORKERS) * _TURNS_PER_WORKER)
        self._words[0] = EpochTurn(1, 0).word

    def __getstate__(self) -> object:
        """Return the shared memory for a process that is being spawned, else a copy of its values."""
        return self._memory if get_spawning_popen() is not None else self._words.copy()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, np.ndarray):
            self.__init__()  # type: ignore[misc]
            self._words[:] = state
        else:
            self._memory = state

    @property
    def _words(self) -> NDArray[np.uint64]:
        return np.ctypeslib.as_array(self._memory)

    @property
    def _rows(self) -> NDArray[np.uint64]:
        return _rows_of(self._words)

    @property
    def _next_set(self) -> EpochTurn:
        return EpochTurn.of(int(self._words[0]))

    @property
    def _last_begun(self) -> EpochTurn:
        return EpochTurn.of(int(self._rows.max()))

    def set_next(self, epoch: int, *, with_state: bool = False) -> EpochTurn:
        """Set the epoch of the next iteration for all processes, and return its turn.

        Args:
            epoch: number of the epoch, from 0.
            with_state: whether the epoch begins at the position of a state.
        """
        turn = EpochTurn(max(self._last_begun, self._next_set).serial + 1, epoch)
        self._words[0] = turn.word | (_STATE_TAG if with_state else 0)
        return turn

    def needs_state(self, turn: EpochTurn) -> bool:
        """Return whether the parent loaded a state for a turn."""
        return int(self._words[0]) == turn.word | _STATE_TAG

    def next_turn(self, worker: Worker, epoch: int | None = None) -> EpochTurn:
        """Return the turn that :meth:`begin` would return, without beginning it."""
        words, mask = self._words.copy(), np.uint64((1 << _TAG_BITS) - 1)  # a copy, since others may begin meanwhile
        rows = _rows_of(words)
        if worker.is_child:
            is_tagged = rows & mask == worker.tag
            newest = max(rows[worker.row][is_tagged[worker.row]].tolist(), default=-1)
            others = [EpochTurn.of(word) for word in rows[is_tagged].tolist() if word > newest]
            joined = min((turn for turn in others if epoch is None or turn.epoch == epoch), default=None)
            if joined is not None:
                return joined
        latest, ordered = EpochTurn.of(int(rows.max())), EpochTurn.of(int(words[0]))
        if epoch is not None:
            return EpochTurn(max(latest, ordered).serial + 1, epoch)
        return ordered if ordered.serial > latest.serial else latest._replace(epoch=latest.epoch + 1)

    def begin(self, worker: Worker, epoch: int | None = None) -> EpochTurn:
        """Join or begin an iteration, and return its turn.

        Args:
            worker: this process.
            epoch: epoch of the iteration, from a state of this worker; None takes the next one.
        """
        turn = self.next_turn(worker, epoch)
        row = self._rows[worker.row]
        row[int(np.argmin(row))] = turn.word | worker.tag
        return turn

    def has_next(self) -> bool:
        """Return whether no iteration has begun since the last call of :meth:`set_next`."""
        return self._next_set.serial > self._last_begun.serial

    def is_in_workers(self) -> bool:
        """Return whether a worker process began the latest iteration."""
        return not self.has_next() and EpochTurn.of(int(self._rows[0].max())) < self._last_begun


def _rows_of(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return words[1:].reshape(1 + MAX_WORKERS, _TURNS_PER_WORKER)


_MAX_CHUNK_BYTES = 1 << 20
_MAX_CHUNK_SAMPLES = 256
"""Maximum number of samples of a chunk: small enough that chunks decoded ahead take little memory, large enough that
the cost of a chunk (20 microseconds) does not matter."""


class StreamReader:
    """Reads a worker's share in one process, and closes its resources when it is garbage or the process ends.

    Args:
        resources: resources of the data set, which the reader closes.
        manifest: pinned version of the manifest.
        worker: worker whose share is read.
        pipeline_config: settings of the rank's batch pipeline; ``chunks`` asks for chunks of samples instead of
            batches.

    Raises:
        ConfigError: the lanes cannot be divided evenly among the workers.
        MemoryBudgetError: the memory is too small; the message has the figure for the rank.
    """

    def __init__(
        self, resources: LoaderResources, manifest: Manifest, worker: Worker, pipeline_config: PipelineConfig
    ) -> None:
        self._pid = os.getpid()
        self.resources, self.is_chunked, self._worker = resources, pipeline_config.chunks, worker
        pipeline_config = replace(pipeline_config, worker=worker.number, workers=worker.count)
        if self.is_chunked:
            pipeline_config = replace(pipeline_config, batch_size=_chunk_samples(manifest))
        self.buffers = SharedBuffers() if worker.is_child and not self.is_chunked else None
        if self.buffers is not None and not has_functions(resources.config):
            resources.arrays = self.buffers
        self.pipeline = resources.active_pipeline = resources.create_pipeline(manifest, pipeline_config)
        assert isinstance(self.pipeline.partition, WorkerSharding)  # noqa: S101 - the config names workers
        self.share = self.pipeline.partition
        config = resources.config
        threads = 1 if worker.is_child else os.cpu_count() or 1
        by_sample = bool(config.decode) or config.transform is not None
        collate = list if self.is_chunked and by_sample else None
        if has_functions(config):
            resources.pool = SamplePool(config, threads=threads, collate=collate)
        self._last_epoch: int | None = None
        self._end_epoch: int | None = None
        resources.register_finalizer(self)

    def is_for(self, manifest: Manifest, worker: Worker, lanes: int) -> bool:
        """Return whether the reader was made in this process, for this version, worker and number of lanes."""
        current = self._pid, self.pipeline.manifest, self._worker, self.pipeline.config.order.lanes
        return current == (os.getpid(), manifest, worker, lanes)

    def iterate(self, cursor: ShareCursor) -> BatchIteration:
        """Return an iteration over the rest of a share by batches or chunks, which advances the cursor."""
        before, self._last_epoch = self._last_epoch, cursor.epoch
        if before is not None and (cursor.share is not self.share or cursor.epoch in (before, self._end_epoch)):
            self.pipeline.stop()  # the data that was fetched ahead is not what comes next
        # Most worker processes end with their epoch; only one that begins a second epoch fetches beyond it.
        cursor.end_epoch = self._end_epoch = cursor.epoch + 1 if self._worker.is_child and before is None else None
        is_over = self.resources.config.epochs is not None and cursor.epoch >= self.resources.config.epochs
        return BatchIteration(self.resources, cursor, 0 if is_over else cursor.share.count_steps(0))

    def close(self) -> None:
        """End fetching and threads and close connections. Idempotent."""
        if self._pid == os.getpid():
            self.resources.close()
            if self.resources.pool is not None:
                self.resources.pool.close()


@dataclass(slots=True, eq=False)
class ShareCursor(Cursor):
    """The position of an iteration over a worker's share; the epoch board has the next epoch.

    Attributes:
        reader: reader of the share.
        epoch: epoch of the iteration.
        share: this worker's share of the epoch.
        position: number of samples of the share that were yielded.
        fetched_position: position in the share after the last batch or chunk that the pipeline delivered.
        end_epoch: epoch at which fetching ahead ends, None for no end.
    """

    reader: StreamReader
    epoch: int
    share: WorkerSharding
    position: int = 0
    fetched_position: int = 0
    end_epoch: int | None = None

    def seek(self) -> None:
        """Start the batch pipeline after the last batch that it delivered, unless it is there already."""
        feed = self.reader.pipeline
        if feed.position != (self.epoch, self.fetched_position):
            feed.start(self.epoch, self.fetched_position, partition=self.share, end_epoch=self.end_epoch)
            self.reader.resources.register_finalizer(self.reader)

    def commit(self, batch: Batch) -> None:
        """Advance to the end of a batch; within a chunk, the data set advances the position by each sample."""
        self.fetched_position = batch.end
        if not self.reader.is_chunked:
            self.position = batch.end


def _chunk_samples(manifest: Manifest) -> int:
    return max(1, min(_MAX_CHUNK_SAMPLES, _MAX_CHUNK_BYTES * manifest.samples // max(1, manifest.size_bytes)))


def split_samples(chunk: Any, share: WorkerSharding, start: int, end: int) -> list[Any]:
    """Return the samples of a chunk in the order of the epoch: results of the pool, or rows of its columns."""
    if isinstance(chunk, dict):
        values = [value.unbind() if isinstance(value, torch.Tensor) else list(value) for value in chunk.values()]
        chunk = [dict(zip(chunk, row, strict=True)) for row in zip(*values, strict=True)]
    return [chunk[turn] for turn in share.delivery_order(start, end).tolist()]
