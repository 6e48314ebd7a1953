"""A packed data set for torch's DataLoader, read by its worker processes."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from stoker._base.arguments import check_picklable, takes_settings
from stoker._format.manifest import Manifest
from stoker._order.sharding import WorkerSharding
from stoker._stores import url_of
from stoker.errors import ConfigError, StateError
from stoker_torch._config import StreamArguments
from stoker_torch._iteration import BatchIteration, LoaderResources
from stoker_torch._options import Budget
from stoker_torch._ranks import (
    check_no_resharding,
    compare_ranks,
    confirm_rank,
    find_rank,
    uses_loader_length,
    warn_about_length,
)
from stoker_torch._shared_batches import SharedBatch, forget_ended_workers
from stoker_torch._state import SourceState, StreamState
from stoker_torch._statistics import LoaderPlan
from stoker_torch._stream_reader import (
    MAX_EPOCH,
    EpochBoard,
    EpochTurn,
    ShareCursor,
    StreamReader,
    Worker,
    split_samples,
)

_UNPICKLED_ATTRIBUTES = ("_manifest", "_reader", "_iteration", "_cursor")
"""Attributes that are open in one process, and are left out of a pickle."""


@dataclass(frozen=True, slots=True)
class _LoadedState:
    """A state that was loaded, for one turn of all processes; in a worker, for the turn that it begins next (None)."""

    state: StreamState
    turn: EpochTurn | None


class StreamDataset(IterableDataset[Any]):
    """Iterates over a packed data set in a ``DataLoader``, with any number of workers; each ``for`` is one epoch.

    Over all ranks and workers an epoch delivers every sample exactly once. Each worker reads its own **lanes**, whole
    parts of the order, so that no super-sample is fetched by two workers. Each fetches ahead on its own thread, into
    its part of the rank's memory. (manifest version, seed, epoch, shuffle, window, lanes, unit, sticky) fixes a
    worker's order. ``lanes`` defaults to the number of workers of all ranks, and must be a multiple of it.

    With ``batch_size=None`` it yields samples: dictionaries of column → tensor, ``bytes`` or ``str``, after ``decode``
    and ``transform``, or the results of ``transform``. With ``batch_size=`` it yields batches as a
    :class:`~stoker_torch.Loader` does, for ``DataLoader(dataset, batch_size=None)``; that saves the collating, and a
    worker's last batch may be smaller.

    All ranks yield the same number of samples or batches: if a worker of one rank has a sample less than the same
    worker of another, it repeats its last one (less than one repeat per rank and epoch, none on a single rank).
    ``drop_last=True`` drops samples instead; ``evaluation=True`` neither repeats nor drops.

    Leaving a loop early abandons the epoch: the next iteration is the next epoch, also in worker processes that a
    DataLoader starts again. After an error with ``num_workers=0``, the next iteration continues at the same position;
    worker processes begin the next epoch, as after a ``break``, since the samples that they read ahead are lost: load a
    state to continue. With ``epochs=E``, an iteration after the last epoch is empty and warns each time; it never
    raises, since no process knows whether the loop left the last epoch early.

    Construction pins the manifest version, and leaves nothing open. Under torch.distributed it is a collective
    operation, in which the ranks compare their settings; for one rank alone, give ``rank=0, world_size=1``. Counts of
    requests and waits belong to each process and are not collected. There is no ``trace``, since only the DataLoader's
    queue knows whether the training loop waits. There is no ``budget``, since workers, which a DataLoader starts again
    for each epoch, do not know what the others spent; ``max_dollars_per_epoch`` works.

    The arguments are the URL of a data set and the settings of a :class:`StreamConfig`. ``memory`` is for the rank and
    is divided by its workers; ``workers`` is the number of threads of each process, and each process counts its own bad
    samples. ``collate`` and ``batch_transform`` need a ``batch_size``.

    Raises:
        ConfigError: a setting is wrong.
        NotFoundError: there is no data set at the URL.
        MemoryBudgetError: the memory is too small for one worker; iterating raises it if it is too small for several.
        RankMismatchError: the ranks disagree on the data set or the settings.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> dataset = StreamDataset("s3://bucket/train", columns=["image", "label"])
        >>> for batch in DataLoader(dataset, batch_size=64):
        ...     train_step(batch["image"], batch["label"])
    """

    _manifest: Manifest | None = None
    _reader: StreamReader | None = None
    _iteration: BatchIteration | None = None
    _cursor: ShareCursor | None = None

    @takes_settings(StreamArguments)
    def __init__(self, config: StreamArguments) -> None:
        self.url = url_of(config.url)
        self.batch_size = config.batch_size
        self.config = config
        self._budget = Budget.of(config.budget)
        self._check_settings()
        self.rank, self.world_size = find_rank(config.rank, config.world_size, config.mesh)
        if config.mesh is not None:  # which worker processes cannot get
            self.config = replace(config, rank=self.rank, world_size=self.world_size, mesh=None)
        self._version, self._lanes = self.config.version, self.config.lanes
        self._board = EpochBoard()
        self._loaded_state: _LoadedState | None = None
        self._is_length_trusted = False
        weakref.finalize(self, forget_ended_workers).atexit = False
        try:
            self.plan.check_dollars(self._budget.max_dollars_per_epoch)
        finally:
            self.close()  # it is safer to fork workers while no thread runs
        source = SourceState.of_config(self.config, self.manifest, self._lanes or 0)
        compare_ranks(source.comparison_values(self.config), self.world_size, config.mesh)

    def _check_settings(self) -> None:
        if self._budget.dollars is not None:
            raise ConfigError(
                "budget is for a Loader: worker processes do not know what the others spend, nor what those of earlier "
                "epochs spent; to limit the planned price of an epoch, use budget=Budget(max_dollars_per_epoch=…)"
            )
        for name in ("collate", "batch_transform"):
            if self.batch_size is None and getattr(self.config, name) is not None:
                raise ConfigError(f"{name} is for batches: give batch_size=, or the DataLoader a collate_fn")

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a spawned worker needs, without connections."""
        self._check_sharding()
        check_picklable(self.config.url, "a store")
        check_picklable(self.config.tier or self.config.warm, "a tier")
        return {name: value for name, value in self.__dict__.items() if name not in _UNPICKLED_ATTRIBUTES}

    def __repr__(self) -> str:
        return f"<StreamDataset {self.url} rank {self.rank} of {self.world_size}>"

    def __len__(self) -> int:
        """Return the number of samples of an epoch on this rank, for any number of workers.

        A DataLoader's ``len()`` is computed from it, and does not count that each of several workers ends with its own
        incomplete batch; under frameworks that rely on ``len()`` a worker warns.

        Raises:
            TypeError: the data set yields batches, whose number depends on the workers.
        """
        if self.batch_size is not None:
            raise TypeError(
                "a StreamDataset with batch_size= has no len(): the number of batches depends on the number of workers"
            )
        self._is_length_trusted = uses_loader_length()
        samples = self.manifest.samples if self.config.limit is None else min(self.manifest.samples, self.config.limit)
        like = self.rank if self.config.evaluation else self.world_size - 1 if self.config.drop_last else 0
        return len(range(like, samples, self.world_size))

    @property
    def manifest(self) -> Manifest:
        """The pinned version of the data set's index."""
        if self._manifest is None:
            self._open_reader(Worker.current())
        assert self._manifest is not None  # noqa: S101 - opening has read it
        return self._manifest

    @property
    def plan(self) -> LoaderPlan:
        """The plan of an epoch in this process (outside workers: of the rank); ``str()`` makes one line."""
        return self._open_reader(Worker.current()).resources.plan()

    def _open_reader(self, worker: Worker) -> StreamReader:
        """Return the reader of this process; open it if there is none for this worker, version and lanes."""
        lanes = self._lanes or self.world_size * worker.count
        if self._reader is not None:
            if self._manifest is not None and self._reader.is_for(self._manifest, worker, lanes):
                return self._reader
            self._reader.close()
        resources = LoaderResources.open(self.config.url, self.config)
        try:
            if self._manifest is None:
                self._manifest = resources.read_manifest(self._version, self.world_size)
                self._version = self._manifest.version
            feed_config = self.config.feed_config(rank=self.rank, world_size=self.world_size, lanes=lanes)
            feed_config = replace(feed_config, chunks=self.batch_size is None)
            self._reader = StreamReader(resources, self._manifest, worker, feed_config)
        except BaseException:
            resources.close()
            raise
        return self._reader

    # Iteration.

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or continue at a loaded state. An earlier iteration in the same process ends."""
        worker = Worker.current()
        if not worker.is_child:  # begun lazily: StatefulDataLoader makes iterators that it never uses
            return self._iterate(None)
        try:
            return self._iterate(self._begin(worker))
        except Exception as error:  # noqa: BLE001 - raised when asked for data: torch would end a kept worker here
            return self._iterate(error)

    def _iterate(self, iteration: BatchIteration | Exception | None) -> Iterator[Any]:
        """Yield the values of an iteration; after an error outside a worker, the next one continues at its position."""
        if isinstance(iteration, Exception):
            raise iteration
        iteration = self._begin(Worker.current()) if iteration is None else iteration
        cursor = self._cursor
        assert cursor is not None  # noqa: S101 - the iteration has just begun
        buffers = cursor.reader.buffers
        try:
            for batch in iteration:
                if self.batch_size is not None:
                    yield SharedBatch(batch, buffers) if type(batch) is dict and buffers is not None else batch
                    continue
                for sample in split_samples(batch, cursor.share, cursor.position, cursor.fetched_position):
                    if self._cursor is not cursor:
                        return
                    cursor.position += 1
                    yield sample
        except Exception:
            if self._cursor is cursor and not Worker.current().is_child:
                self.load_state_dict(self._state(cursor))
            raise

    def _check_sharding(self) -> None:
        """Check that the samples are divided among the ranks exactly once.

        Raises:
            ConfigError: this is another rank now, or Accelerate divides the samples again.
        """
        if self.config.rank is None:
            confirm_rank(self.rank, self.world_size)
        check_no_resharding(self, self.rank, self.world_size)

    def _begin(self, worker: Worker) -> BatchIteration:
        """Begin the iteration that the epoch board assigns to this worker."""
        self._check_sharding()
        if self._is_length_trusted and worker.count > 1 and worker.number == 0:
            warn_about_length(worker.count)
        self._end_iteration()
        turn, state = self._turn_of(worker, self._board.begin)
        if self.config.epochs is not None and turn.epoch >= self.config.epochs and worker.number == 0:
            warnings.warn(
                f"the limit epochs={self.config.epochs} is reached: epoch {turn.epoch}, counted from 0, is empty. "
                "Set epochs= to the number of epochs that the training loops over, or leave it out; or call "
                "set_epoch() to begin an epoch again",
                UserWarning,
                stacklevel=3,
            )
        if self._loaded_state is not None and self._loaded_state.turn is None:
            self._loaded_state = None
        reader = self._open_reader(worker)
        self._cursor = ShareCursor(reader, turn.epoch, self._remaining_share(reader, state))
        self._iteration = reader.iterate(self._cursor)
        return self._iteration

    def _end_iteration(self) -> None:
        """End the current iteration, if any."""
        if self._iteration is not None:
            self._iteration.close()
        self._iteration = self._cursor = None

    def _turn_of(
        self, worker: Worker, find: Callable[[Worker, int | None], EpochTurn]
    ) -> tuple[EpochTurn, StreamState | None]:
        """Return the turn from the epoch board, and the state that was loaded for it, if any.

        Args:
            worker: this process.
            find: method of the epoch board that returns the turn.

        Raises:
            StateError: a state was loaded for the turn and did not reach this process.
        """
        loaded = self._loaded_state
        if loaded is not None and loaded.turn is None:
            return find(worker, loaded.state.epoch), loaded.state
        turn = find(worker, None)
        if loaded is not None and loaded.turn == turn:
            return turn, loaded.state
        if self._board.needs_state(turn):
            raise StateError(
                "a state was loaded while this worker was running, and did not reach it; load the state before the "
                "first iteration over a DataLoader with persistent_workers, or construct a new DataLoader"
            )
        return turn, None

    def _remaining_share(self, reader: StreamReader, state: StreamState | None) -> WorkerSharding:
        """Return this worker's share of an epoch; with a state, the rest of it."""
        share = reader.share
        if state is None:
            return share
        missing = [lane for lane in share.own_lanes.tolist() if lane not in state.delivered]
        if missing:
            raise StateError(
                f"the state lacks lanes {missing} of {share.lanes}, which other workers or ranks have; combine the "
                "states of all with merge_states()"
            )
        return share.resume_at(state.delivered, state.repeated)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also in persistent workers.

        The iteration begins at the start of the epoch, or at the position of a state of this epoch that was just
        loaded.

        Raises:
            ConfigError: ``epoch`` is not an integer in [0, 2**24), or Accelerate divides the samples again.
        """
        if not isinstance(epoch, int | np.integer) or not 0 <= epoch <= MAX_EPOCH:
            raise ConfigError(f"epoch must be an integer in [0, {MAX_EPOCH}], not {epoch!r}")
        self._check_sharding()  # Accelerate calls this on every rank, and iterates on one
        loaded = None if self._loaded_state is None else self._loaded_state.turn
        if loaded is not None and loaded.epoch == epoch and self._board.has_next():
            return
        self._end_iteration()
        self._loaded_state = None
        self._board.set_next(int(epoch))

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the position of each lane of this worker, and everything that fixes the order, as plain values.

        The state is fit for JSON. In a worker, torchdata's ``StatefulDataLoader`` puts it into its own state.

        Raises:
            StateError: worker processes read the epoch, so this process does not know the position.
        """
        worker = Worker.current()
        if not worker.is_child and self._board.is_in_workers():
            raise StateError(
                "only the DataLoader knows which samples of its workers have reached the training loop, and torch's "
                "does not say: use torchdata's StatefulDataLoader and its state_dict(), or stoker_torch.Loader"
            )
        if self._cursor is None or (not worker.is_child and self._board.has_next()):
            return self._next_state(worker)
        return self._state(self._cursor)

    def _next_state(self, worker: Worker) -> dict[str, Any]:
        """Return the state of an iteration that has not begun."""
        turn, state = self._turn_of(worker, self._board.next_turn)
        if state is not None:
            return state.to_dict()
        reader = self._open_reader(worker)
        return self._state(ShareCursor(reader, turn.epoch, reader.share))

    def _state(self, cursor: ShareCursor) -> dict[str, Any]:
        share, position = cursor.share, cursor.position
        delivered, repeated = share.progress(position)
        attributes = {"epoch": cursor.epoch, "delivered": delivered, "repeated": repeated}
        state = StreamState.of_config(
            self.config, self.manifest, share.lanes, **attributes, is_complete=not share.count_steps(position)
        )
        return (state if Worker.current().is_child else state.advance_epoch()).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue where the state was taken.

        The state comes from a data set with the same lanes for each worker, or from :func:`merge_states`, which joins
        the states of all workers. The data set adopts its manifest version and lanes. If it is loaded before an
        iteration over a DataLoader, it reaches all workers. A StatefulDataLoader gives each worker its own state; then
        the data set must have been constructed with the version and lanes of that state.

        Raises:
            StateError: the state is of another data set or order than this data set's settings.
            ConfigError: its lanes cannot be divided among the ranks.
            NotFoundError: the manifest version was deleted.
        """
        loaded = StreamState.from_dict(state)
        worker = Worker.current()
        loaded.check(SourceState.of_config(self.config, self.manifest, loaded.lanes), self.config)
        if worker.is_child:
            lanes = self._lanes or self.world_size * worker.count
            for name, expected in {"version": self.manifest.version, "lanes": lanes}.items():
                if (theirs := getattr(loaded, name)) != expected:  # workers of later epochs would not know it
                    raise StateError(
                        f"the state was taken with {name}={theirs}, but this data set has {expected}; construct it "
                        f"with {name}={theirs}"
                    )
            self._loaded_state = _LoadedState(loaded, None)
            return
        self._end_iteration()
        if loaded.version != self.manifest.version:
            self._version, self._manifest = loaded.version, None
        self._lanes = loaded.lanes
        share = self._open_reader(worker).share.resume_at(loaded.delivered, loaded.repeated)
        if not share.count_steps(0):  # an epoch that is over
            self.set_epoch(loaded.epoch + 1)
            return
        self._loaded_state = _LoadedState(loaded, self._board.set_next(loaded.epoch, with_state=True))

    # Closing.

    def close(self) -> None:
        """End fetching, threads and connections of this process. Idempotent; a new iteration starts them again."""
        self._end_iteration()
        if self._reader is not None:
            self._reader.close()
