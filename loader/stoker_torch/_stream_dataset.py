"""A packed data set for torch's DataLoader, read by its worker processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from stoker._base.arguments import check_picklable, takes_settings
from stoker._format.manifest import Manifest
from stoker._order.sharding import LaneShare
from stoker._stores import url_of
from stoker.errors import ConfigError, StateError
from stoker_torch._config import Budget, StreamArguments
from stoker_torch._figures import LoaderPlan
from stoker_torch._iteration import Iteration, LoaderResources
from stoker_torch._ranks import compare_ranks, confirm_rank, find_rank, refuse_resharding, trusts_length, warn_of_length
from stoker_torch._state import SourceState, StreamState
from stoker_torch._stream_reader import MAX_EPOCH, EpochBoard, ShareCursor, StreamReader, Turn, Worker, samples_of

_OF_PROCESS = ("_manifest", "_reader", "_iteration", "_cursor")
"""What a data set has open in its process, and leaves behind where it is pickled."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A state that was loaded: for a turn of all processes, or in a worker for the one that it begins next."""

    state: StreamState
    turn: Turn | None


class StreamDataset(IterableDataset[Any]):
    """Iterates over a packed data set in a ``DataLoader``, with any number of workers; each ``for`` is one epoch.

    ``DataLoader(StreamDataset(url), batch_size=64, num_workers=4)``: over all ranks and workers an epoch delivers every
    sample exactly once. Each worker reads **lanes** of its own, whole parts of the order, so that no super-sample is
    fetched by two; each fetches ahead on a thread of its own, into its part of the rank's memory. The order within a
    worker is fixed by (manifest version, seed, epoch, shuffle, window, lanes). ``lanes`` defaults to the workers of all
    ranks, and must be a multiple of their number.

    With ``batch_size=None`` it yields samples: dictionaries of column → tensor, ``bytes`` or ``str``, after ``decode``
    and ``transform``, or what ``transform`` returns. With ``batch_size=`` it yields batches as a
    :class:`~stoker_torch.Loader` does, for ``DataLoader(dataset, batch_size=None)``; that saves the collating, and a
    worker's last batch may be smaller.

    All ranks yield the same number of samples or batches: where a worker of one rank has a sample less than the same
    worker of another, it delivers its last one again (so less than one a rank and epoch, and none on a single rank);
    ``drop_last=True`` drops instead, and ``evaluation=True`` does neither.

    Leaving a loop early abandons the epoch; the next iteration is the next one, also in worker processes that a
    DataLoader makes anew each time. Behind an error, the next iteration goes on at the place where the data set is read
    in the process of the loop (``num_workers=0``); worker processes begin the next epoch, as behind a ``break``, since
    what they had read ahead is lost with them: load a state to go on. With ``epochs=E``, an iteration behind the last
    epoch is empty, and warns each time; it never raises, since no process knows whether the loop left the last epoch
    early. The manifest version is pinned when the data set is made, and nothing that it
    opened then is kept open. Under torch.distributed construction is a collective operation: the ranks compare what
    they were given; a data set for one rank alone is made with ``rank=0, world_size=1``. Counts of requests and waits
    are each process's own and not collected. So there is no ``trace``: whether the training loop waits is known where
    the DataLoader's queue is, and nowhere else. And there is no ``budget``: a DataLoader makes its workers anew each
    epoch, and none knows what another has spent; ``max_dollars_per_epoch`` holds.

    Its arguments are the URL of a data set and the settings of a :class:`StreamConfig`. ``memory`` is the rank's and
    divided by its workers; ``workers`` are threads a process, and samples that may fail are counted by process, too.
    Unless there is a ``batch_size``, ``collate`` and ``batch_transform`` have no place.

    Raises:
        ConfigError: a setting is wrong.
        NotFoundError: there is no data set at the URL.
        BudgetError: the memory is too small even for one worker; iterating raises it where it is for several.
        RankMismatchError: the ranks disagree on the data set or the settings.
    """

    _manifest: Manifest | None = None
    _reader: StreamReader | None = None
    _iteration: Iteration | None = None
    _cursor: ShareCursor | None = None

    @takes_settings(StreamArguments)
    def __init__(self, config: StreamArguments) -> None:
        self.url, self.batch_size, self.config = url_of(config.url), config.batch_size, config
        self._budget = Budget.of(config.budget)
        self._check_settings()
        self.rank, self.world_size = find_rank(self.config.rank, self.config.world_size)
        self._version, self._lanes = self.config.version, self.config.lanes
        self._board = EpochBoard()
        self._loaded: _Loaded | None = None
        self._is_length_trusted = False
        try:
            self.plan.check_dollars(self._budget.max_dollars_per_epoch)
        finally:
            self.close()  # a worker is best forked where no thread runs
        source = SourceState.of_config(self.config, self.manifest, self._lanes or 0)
        compare_ranks(source.compared(self.config), self.world_size)

    def _check_settings(self) -> None:
        if self._budget.dollars is not None:
            raise ConfigError(
                "budget is for a Loader: worker processes do not know what the others spend, nor what those of earlier "
                "epochs spent; max_dollars_per_epoch bounds what is planned: budget=Budget(max_dollars_per_epoch=…)"
            )
        for name in ("collate", "batch_transform"):
            if self.batch_size is None and getattr(self.config, name) is not None:
                raise ConfigError(f"{name} is for batches: give batch_size=, or the DataLoader a collate_fn")

    def __getstate__(self) -> dict[str, Any]:
        """Return what a spawned worker needs: no connection goes with it."""
        self._check_dealing()
        check_picklable(self.config.url, "a store")
        check_picklable(self.config.tier or self.config.warm, "a tier")
        return {name: value for name, value in self.__dict__.items() if name not in _OF_PROCESS}

    def __repr__(self) -> str:
        return f"<StreamDataset {self.url} rank {self.rank} of {self.world_size}>"

    def __len__(self) -> int:
        """Return how many samples an epoch has on this rank, whatever the number of workers is.

        A DataLoader's ``len()``, which comes from it, does not count that each of several workers ends with a batch of
        its own; under frameworks that trust it a worker warns.

        Raises:
            TypeError: it yields batches, whose number depends on the workers.
        """
        if self.batch_size is not None:
            raise TypeError("how many batches a StreamDataset has depends on the number of workers: it has no len()")
        self._is_length_trusted = trusts_length()
        samples = self.manifest.samples if self.config.limit is None else min(self.manifest.samples, self.config.limit)
        like = self.rank if self.config.evaluation else self.world_size - 1 if self.config.drop_last else 0
        return len(range(like, samples, self.world_size))

    @property
    def manifest(self) -> Manifest:
        """The pinned version of the data set's index."""
        if self._manifest is None:
            self._opened(Worker.here())
        assert self._manifest is not None  # noqa: S101 - opening has read it
        return self._manifest

    @property
    def plan(self) -> LoaderPlan:
        """What an epoch of this process takes: of the rank, where that is no worker; its text is one line."""
        return self._opened(Worker.here()).resources.plan()

    def _opened(self, worker: Worker) -> StreamReader:
        """Return the reader of this process."""
        lanes = self._lanes or self.world_size * worker.count
        if self._reader is not None:
            if self._manifest is not None and self._reader.is_for(self._manifest, worker, lanes):
                return self._reader
            self._reader.close()
        resources = LoaderResources.open(self.config.url, self.config)
        try:
            if self._manifest is None:
                self._manifest = resources.read_manifest(self._version)
                self._version = self._manifest.version
            feed_config = self.config.feed_config(rank=self.rank, world_size=self.world_size, lanes=lanes)
            feed_config = replace(feed_config, chunks=self.batch_size is None)
            self._reader = StreamReader(resources, self._manifest, worker, feed_config)
        except BaseException:
            resources.close()
            raise
        return self._reader

    # Iterating.

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on where a loaded state says. An older iteration in the same process ends."""
        worker = Worker.here()
        if not worker.is_child:  # where an iterator that nobody uses, as StatefulDataLoader makes one, skips no epoch
            return self._values(None)
        try:
            return self._values(self._begin(worker))
        except Exception as error:  # noqa: BLE001 - raised when asked for data: torch would end a kept worker here
            return self._values(error)

    def _values(self, begun: Iteration | Exception | None) -> Iterator[Any]:
        """Yield an iteration's values; an error makes the next one go on at its place, if this is no worker."""
        if isinstance(begun, Exception):
            raise begun
        iteration = self._begin(Worker.here()) if begun is None else begun
        cursor = self._cursor
        assert cursor is not None  # noqa: S101 - the iteration has just begun
        try:
            for batch in iteration:
                if self.batch_size is not None:
                    yield batch
                    continue
                for sample in samples_of(batch, cursor.share, cursor.position, cursor.fetched):
                    if self._cursor is not cursor:
                        return
                    cursor.position += 1
                    yield sample
        except Exception:
            if self._cursor is cursor and not Worker.here().is_child:
                self.load_state_dict(self._state(cursor))
            raise

    def _check_dealing(self) -> None:
        """Check that the samples are dealt to the ranks, and once.

        Raises:
            ConfigError: they are not.
        """
        if self.config.rank is None:
            confirm_rank(self.rank, self.world_size)
        refuse_resharding(self, self.rank, self.world_size)

    def _begin(self, worker: Worker) -> Iteration:
        """Begin the iteration whose turn it is."""
        self._check_dealing()
        if self._is_length_trusted and worker.count > 1 and worker.number == 0:
            warn_of_length(worker.count)
        self._leave()
        turn, state = self._turn_of(worker, self._board.begin)
        if self.config.epochs is not None and turn.epoch >= self.config.epochs and worker.number == 0:
            warnings.warn(
                f"epochs={self.config.epochs} are over: this is epoch {turn.epoch}, counted from 0, and it is empty. "
                "Give epochs= as many epochs as are looped over, or none at all; or call set_epoch() to begin an epoch "
                "again",
                UserWarning,
                stacklevel=3,
            )
        if self._loaded is not None and self._loaded.turn is None:
            self._loaded = None
        reader = self._opened(worker)
        self._cursor = ShareCursor(reader, turn.epoch, self._share(reader, state))
        self._iteration = reader.iterate(self._cursor)
        return self._iteration

    def _leave(self) -> None:
        """End the iteration that is under way, if any."""
        if self._iteration is not None:
            self._iteration.close()
        self._iteration = self._cursor = None

    def _turn_of(self, worker: Worker, find: Callable[[Worker, int | None], Turn]) -> tuple[Turn, StreamState | None]:
        """Return the turn that the epoch board finds, and the state that was loaded for it, if any.

        Raises:
            StateError: there is one, and it did not come to this process.
        """
        loaded = self._loaded
        if loaded is not None and loaded.turn is None:
            return find(worker, loaded.state.epoch), loaded.state
        turn = find(worker, None)
        if loaded is not None and loaded.turn == turn:
            return turn, loaded.state
        if self._board.needs_state(turn):
            raise StateError(
                "a state was loaded when this worker was running already, and did not reach it; load it before a "
                "DataLoader with persistent_workers is iterated over, or make a new DataLoader"
            )
        return turn, None

    def _share(self, reader: StreamReader, state: StreamState | None) -> LaneShare:
        """Return what is left of an epoch for this worker."""
        share = reader.share
        if state is None:
            return share
        missing = [lane for lane in share.own_lanes.tolist() if lane not in state.delivered]
        if missing:
            raise StateError(
                f"the state says nothing of lanes {missing} of {share.lanes}: other workers or ranks took theirs; put "
                "the states of all together with merge_states()"
            )
        return share.resumed(state.delivered, state.repeated)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next iteration begins, also in workers that are kept.

        It begins at its start, but where a state was just loaded that is of this epoch: that goes on at its place.

        Raises:
            ConfigError: it is not an epoch's number, or Accelerate deals the samples out again.
        """
        if not isinstance(epoch, int | np.integer) or not 0 <= epoch <= MAX_EPOCH:
            raise ConfigError(f"epoch {epoch!r} is not an integer in [0, {MAX_EPOCH}]")
        self._check_dealing()  # Accelerate calls this on every rank, and iterates on one
        loaded = None if self._loaded is None else self._loaded.turn
        if loaded is not None and loaded.epoch == epoch and self._board.is_ordered():
            return
        self._leave()
        self._loaded = None
        self._board.order(int(epoch))

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return how far each lane of this worker has come, with all that fixes the order: plain values, fit for JSON.

        In a DataLoader's worker that is what torchdata's ``StatefulDataLoader`` asks for and puts into its own state.

        Raises:
            StateError: the epoch is read by worker processes, and only they know.
        """
        worker = Worker.here()
        if not worker.is_child and self._board.is_in_workers():
            raise StateError(
                "which samples of a DataLoader with workers have reached the training loop only it could know, and "
                "torch's does not say: use torchdata's StatefulDataLoader and its state_dict(), or stoker_torch.Loader"
            )
        if self._cursor is None or (not worker.is_child and self._board.is_ordered()):
            return self._coming(worker)
        return self._state(self._cursor)

    def _coming(self, worker: Worker) -> dict[str, Any]:
        """Return the state of an iteration that has not begun."""
        turn, state = self._turn_of(worker, self._board.coming)
        if state is not None:
            return state.to_dict()
        reader = self._opened(worker)
        return self._state(ShareCursor(reader, turn.epoch, reader.share))

    def _state(self, cursor: ShareCursor) -> dict[str, Any]:
        share, position = cursor.share, cursor.position
        delivered, repeated = share.progress(position)
        place = {"epoch": cursor.epoch, "delivered": delivered, "repeated": repeated}
        state = StreamState.of_config(
            self.config, self.manifest, share.lanes, **place, is_complete=not share.steps_from(position)
        )
        return (state if Worker.here().is_child else state.behind_end()).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration go on where the state was taken.

        It may be a state that a data set with the same lanes for each worker gave, or what :func:`merge_states` made of
        the states of all. Its manifest version and lanes are taken over. Loaded before a DataLoader is iterated over,
        it reaches all of its workers. A StatefulDataLoader hands each worker its own; the data set must have been made
        with the version and the lanes of that one.

        Raises:
            StateError: the state is of another data set or order than this one's settings.
            ConfigError: its lanes cannot be dealt to the ranks.
            NotFoundError: the manifest version is gone.
        """
        loaded = StreamState.from_dict(state)
        worker = Worker.here()
        loaded.check(SourceState.of_config(self.config, self.manifest, loaded.lanes), self.config)
        if worker.is_child:
            lanes = self._lanes or self.world_size * worker.count
            for name, mine in {"version": self.manifest.version, "lanes": lanes}.items():
                if (theirs := getattr(loaded, name)) != mine:  # which the workers of later epochs would not know
                    raise StateError(
                        f"the state was taken with {name}={theirs}, this data set has {mine}; give it {name}={theirs}"
                    )
            self._loaded = _Loaded(loaded, None)
            return
        self._leave()
        if loaded.version != self.manifest.version:
            self._version, self._manifest = loaded.version, None
        self._lanes = loaded.lanes
        share = self._opened(worker).share.resumed(loaded.delivered, loaded.repeated)
        if not share.steps_from(0):  # an epoch that is over
            self.set_epoch(loaded.epoch + 1)
            return
        self._loaded = _Loaded(loaded, self._board.order(loaded.epoch, with_state=True))

    # The end.

    def close(self) -> None:
        """End what this process fetches, with its threads and connections. Idempotent; iterating again starts anew."""
        self._leave()
        if self._reader is not None:
            self._reader.close()
