"""What one process of a stream data set reads: which epoch, and its worker's share of it, as batches or as samples.

The worker processes that take part in an iteration agree on its epoch, and their parent can say which comes next.
A DataLoader says nothing to its data set when it begins an iteration: it makes processes, or tells those that it has
kept, and each finds out for itself. They share one board in memory. A worker that begins an iteration writes there
which epoch it took. All workers of one iteration know the same random seed, the DataLoader's base seed; so a worker
that finds its seed beside an epoch that it has not taken yet takes that one, and else the epoch that comes next. It
depends on no count of its own: a worker that was ended before it began does not fall behind the others.
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
from stoker._order.sharding import LaneShare
from stoker.errors import ConfigError
from stoker_torch._iteration import Cursor, Iteration, LoaderResources
from stoker_torch._pool import SamplePool, has_functions

_TAG_BITS, _EPOCH_BITS = 20, 24
MAX_EPOCH = (1 << _EPOCH_BITS) - 1
MAX_WORKERS = 512
_KEPT = 4  # iterations over one data set may be under way side by side: a DataLoader zipped with itself
_STATE_TAG = 1


class Turn(NamedTuple):
    """An iteration's place among all.

    Attributes:
        serial: counts the commands of the parent, from 1.
        epoch: from 0.
    """

    serial: int
    epoch: int

    @property
    def word(self) -> int:
        """The turn as a number that rises from one to the next, with room for a tag."""
        return (self.serial << _EPOCH_BITS | self.epoch) << _TAG_BITS

    @classmethod
    def of(cls, word: int) -> Turn:
        """Return the turn that a number stands for, whatever its tag."""
        return cls(word >> _TAG_BITS + _EPOCH_BITS, word >> _TAG_BITS & MAX_EPOCH)


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that a data set is iterated over in.

    Attributes:
        number: of the rank's workers, from 0.
        count: of them; 1 where there is no DataLoader or it has none.
        tag: what all workers of one iteration have alike; 0 where it is no DataLoader's.
    """

    number: int = 0
    count: int = 1
    tag: int = 0

    @classmethod
    def of(cls, number: int, count: int, base_seed: int) -> Worker:
        """Return a worker of a DataLoader.

        Raises:
            ConfigError: the epoch board has no row for it.
        """
        if number >= MAX_WORKERS:
            raise ConfigError(f"worker {number} is not in [0, {MAX_WORKERS}): use fewer workers")
        return cls(number, count, 1 + base_seed % ((1 << _TAG_BITS) - 1))

    @classmethod
    def here(cls) -> Worker:
        """Return the one that this process is.

        Raises:
            ConfigError: there are too many.
        """
        info = get_worker_info()
        return cls() if info is None else cls.of(info.id, info.num_workers, info.seed - info.id)

    @property
    def is_child(self) -> bool:
        """Whether it is a DataLoader's."""
        return self.tag != 0

    @property
    def row(self) -> int:
        """Of the epoch board: 0 for the process that made it, then one a worker."""
        return self.number + 1 if self.is_child else 0


class EpochBoard:
    """Epochs in shared memory: it reaches workers that are forked or spawned, now or later.

    It needs no lock: a word holds turn and tag, is written at once, and each row by one process at a time.
    """

    def __init__(self) -> None:
        self._memory = RawArray(ctypes.c_uint64, 1 + (1 + MAX_WORKERS) * _KEPT)
        self._words[0] = Turn(1, 0).word

    def __getstate__(self) -> object:
        """Return the memory itself for a process that is being spawned, and for a copy what stands there."""
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
    def _ordered(self) -> Turn:
        return Turn.of(int(self._words[0]))

    @property
    def _latest(self) -> Turn:
        return Turn.of(int(self._rows.max()))

    def order(self, epoch: int, *, with_state: bool = False) -> Turn:
        """Make ``epoch`` the next that begins, for all processes, and return its turn.

        Args:
            epoch: from 0.
            with_state: whether it does not begin at its start, but where a state says.
        """
        turn = Turn(max(self._latest, self._ordered).serial + 1, epoch)
        self._words[0] = turn.word | (_STATE_TAG if with_state else 0)
        return turn

    def needs_state(self, turn: Turn) -> bool:
        """Return whether the parent has loaded a state for a turn."""
        return int(self._words[0]) == turn.word | _STATE_TAG

    def coming(self, worker: Worker, epoch: int | None = None) -> Turn:
        """Return the turn that :meth:`begin` would."""
        words, mask = self._words.copy(), np.uint64((1 << _TAG_BITS) - 1)  # once: others begin meanwhile
        rows = _rows_of(words)
        if worker.is_child:
            is_tagged = rows & mask == worker.tag
            mine = max(rows[worker.row][is_tagged[worker.row]].tolist(), default=-1)
            others = [Turn.of(word) for word in rows[is_tagged].tolist() if word > mine]
            joined = min((turn for turn in others if epoch is None or turn.epoch == epoch), default=None)
            if joined is not None:
                return joined
        latest, ordered = Turn.of(int(rows.max())), Turn.of(int(words[0]))
        if epoch is not None:
            return Turn(max(latest, ordered).serial + 1, epoch)
        return ordered if ordered.serial > latest.serial else latest._replace(epoch=latest.epoch + 1)

    def begin(self, worker: Worker, epoch: int | None = None) -> Turn:
        """Take part in an iteration, and return which it is.

        Args:
            worker: this process.
            epoch: that it must be, which a worker's own state says.
        """
        turn = self.coming(worker, epoch)
        row = self._rows[worker.row]
        row[int(np.argmin(row))] = turn.word | worker.tag
        return turn

    def is_ordered(self) -> bool:
        """Return whether nothing has begun since the parent made its last order."""
        return self._ordered.serial > self._latest.serial

    def is_in_workers(self) -> bool:
        """Return whether it was a worker that began the latest iteration."""
        return not self.is_ordered() and Turn.of(int(self._rows[0].max())) < self._latest


def _rows_of(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return words[1:].reshape(1 + MAX_WORKERS, _KEPT)


_CHUNK_BYTES = 1 << 20
_CHUNK_SAMPLES = 256
"""Samples are read in chunks of about so many: small enough that the few that are decoded ahead are little memory,
large enough that what a chunk costs (20 microseconds) is nothing beside them."""


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
        self.feed = resources.current = resources.create_feed(manifest, feed_config)
        assert isinstance(self.feed.partition, LaneShare)  # noqa: S101 - the config names workers
        self.share = self.feed.partition
        config, threads = resources.config, 1 if worker.is_child else os.cpu_count() or 1
        by_sample = bool(config.decode) or config.transform is not None
        collate = list if self.is_chunked and by_sample else None
        if has_functions(config):
            resources.pool = SamplePool(config, threads=threads, collate=collate)
        self._begun_epoch: int | None = None
        self._end_epoch: int | None = None
        resources.register_finalizer(self)

    def is_for(self, manifest: Manifest, worker: Worker, lanes: int) -> bool:
        """Return whether it was made in this process, and for this version, worker and lanes."""
        mine = self._pid, self.feed.manifest, self._worker, self.feed.config.order.lanes
        return mine == (os.getpid(), manifest, worker, lanes)

    def iterate(self, cursor: ShareCursor) -> Iteration:
        """Return what is left of a share, batch by batch or chunk by chunk, which moves the cursor."""
        before, self._begun_epoch = self._begun_epoch, cursor.epoch
        if before is not None and (cursor.share is not self.share or cursor.epoch in (before, self._end_epoch)):
            self.feed.stop()  # nothing of what was fetched ahead is what comes now
        # Most worker processes end with their epoch; only one that begins another may look ahead beyond it.
        cursor.end_epoch = self._end_epoch = cursor.epoch + 1 if self._worker.is_child and before is None else None
        is_over = self.resources.config.epochs is not None and cursor.epoch >= self.resources.config.epochs
        return Iteration(self.resources, cursor, 0 if is_over else cursor.share.steps_from(0))

    def close(self) -> None:
        """End fetching and threads and close connections. Idempotent."""
        if self._pid == os.getpid():
            self.resources.close()
            if self.resources.pool is not None:
                self.resources.pool.close()


@dataclass(slots=True, eq=False)
class ShareCursor(Cursor):
    """Where an iteration over a worker's share is; the epoch board says which epoch comes next.

    Attributes:
        reader: of the share.
        epoch: being iterated over.
        share: of it that is this worker's.
        position: of the share behind what was yielded last.
        fetched: of the share behind the batch or chunk that was taken last.
        end_epoch: that the feed does not look ahead into.
    """

    reader: StreamReader
    epoch: int
    share: LaneShare
    position: int = 0
    fetched: int = 0
    end_epoch: int | None = None

    def seek(self) -> None:
        """Have the feed deliver what is behind the batch that was taken last, unless it does."""
        feed = self.reader.feed
        if feed.place != (self.epoch, self.fetched):
            feed.start(self.epoch, self.fetched, partition=self.share, end_epoch=self.end_epoch)
            self.reader.resources.register_finalizer(self.reader)

    def commit(self, batch: Batch) -> None:
        """Go behind a batch; of a chunk, each sample that is yielded counts."""
        self.fetched = batch.end
        if not self.reader.is_chunked:
            self.position = batch.end


def _chunk_samples(manifest: Manifest) -> int:
    return max(1, min(_CHUNK_SAMPLES, _CHUNK_BYTES * manifest.samples // max(1, manifest.size_bytes)))


def samples_of(chunk: Any, share: LaneShare, start: int, end: int) -> list[Any]:
    """Return the samples of a chunk in the order of the epoch: what the pool made of them, or rows of its columns."""
    if isinstance(chunk, dict):
        values = [value.unbind() if isinstance(value, torch.Tensor) else list(value) for value in chunk.values()]
        chunk = [dict(zip(chunk, row, strict=True)) for row in zip(*values, strict=True)]
    return [chunk[turn] for turn in share.turns(start, end).tolist()]
