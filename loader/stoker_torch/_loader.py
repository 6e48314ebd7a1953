"""The loader: a data set in a bucket as an iterable of batches, one iteration an epoch."""

from __future__ import annotations

import logging
import os
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from stoker._base.arguments import takes_settings
from stoker._base.recorder import Recorder
from stoker._base.sizes import format_bytes
from stoker._cost.prices import Prices
from stoker._cost.spending import Allowance, parse_dollars
from stoker._fetch.batch_stream import Batch
from stoker._fetch.gather import gather_rows
from stoker._fetch.materialized_feed import BatchSource
from stoker._format.display import describe_manifest, html_table
from stoker._format.manifest import Manifest
from stoker._format.schema import Column
from stoker._stores import url_of
from stoker._trace.chrome import ChromeTrace
from stoker.errors import BudgetExceededError, ConfigError, StateError
from stoker_torch._config import LoaderArguments
from stoker_torch._figures import LoaderPlan, LoaderStatistics, LoopTimes, statistics
from stoker_torch._iteration import Iteration, IterationParts
from stoker_torch._options import Budget, WorkerOptions
from stoker_torch._pool import SamplePool, SampleWork
from stoker_torch._ranks import compare_ranks, confirm_rank, find_rank
from stoker_torch._state import RunState, SourceState
from stoker_torch._supply import Supply
from stoker_torch._tensors import BufferPool, can_pin_memory

__all__ = ["Loader"]

_log = logging.getLogger("stoker")
_ALIKE = ("batch_size", "drop_last", "evaluation", "epochs")
"""Settings that all ranks must have alike, besides those that a state names."""


class Loader:
    """Iterates over a packed data set; each ``for`` is one epoch, each batch a dictionary of tensors.

    ``batch[name]`` is a tensor ``[samples, *shape]`` of the column's dtype, or a :class:`RaggedColumn`. Batches own
    their memory. The order is fixed by (manifest version, seed, epoch, shuffle, window, lanes), the same on every
    machine; over all ranks an epoch delivers every sample exactly once, and every rank the same number of batches.

    Fetching starts with the first iteration, runs on a thread of its own and goes on across epochs; leaving a loop
    early (``break``) abandons the epoch, and the next iteration is the next epoch. Behind an error of the loader's own,
    the next iteration goes on at the batch that could not be had. With ``epochs=E``, a loop behind the last epoch is
    empty and warns each time; it raises where that epoch was abandoned by a ``break`` or ``next()`` and no state was
    loaded. :meth:`state_dict` gives the place
    behind the batch yielded last. Construction reads the manifest, and nothing else.

    Its arguments are the URL of a data set and the settings of a :class:`LoaderConfig`.

    Raises:
        ConfigError: a setting is wrong.
        NotFoundError: there is no data set at the URL.
        BudgetError: the memory is too small, or the order would cost more than the limit; names the figure that fits.
    """

    @takes_settings(LoaderArguments)
    def __init__(self, config: LoaderArguments) -> None:
        begun_seconds = time.perf_counter()
        self.config, self._budget = config, Budget.of(config.budget)
        self.rank, self.world_size = find_rank(self.config.rank, self.config.world_size)
        self.url = url_of(config.url)
        self._prices = Prices.load()
        dollars = self._budget.dollars
        self._allowance = None if dollars is None else Allowance(parse_dollars(dollars), self.world_size)
        self._lanes = self.world_size if self.config.lanes is None else self.config.lanes
        self._pins_memory = self.config.pin_memory and can_pin_memory()
        self._buffers = BufferPool(pinned=self._pins_memory) if self.config.reuse_buffers else None
        self._pool = self._made_pool()
        self._supply = Supply.open(config.url, config)
        try:
            self._manifest = self._supply.read_manifest(self.config.version)
            self._trace = self._made_trace()
            self._recorder = Recorder([*self.config.sinks(), *([] if self._trace is None else [self._trace])])
            self._feed = self._made_feed(self._manifest, self._lanes)
            plan = self.plan
            plan.check_dollars(self._budget.max_dollars_per_epoch)
        except BaseException:
            self._supply.close()
            raise
        self._supply.feed = self._feed
        self._supply.arm(self)
        self._place = (0, 0)  # epoch and position; one value, so that a signal's handler never sees half a change
        self._is_fresh = True  # whether the next iteration begins at the place, or behind what was abandoned there
        self._is_resumed = False
        self._is_share_over = False  # of the epoch of the place: other ranks may still have a batch of it
        self._empty_loops = 0
        self._batches = self._samples = 0
        self._iteration: weakref.ref[Iteration] | None = None
        self._times = LoopTimes(time.perf_counter() - begun_seconds)
        _log.info("%s, rank %d of %d: %s", self.url, self.rank, self.world_size, plan)

    # What is being read, and how.

    @property
    def manifest(self) -> Manifest:
        """The pinned version of the data set's index."""
        return self._manifest

    @property
    def plan(self) -> LoaderPlan:
        """What an epoch takes: steps, lanes, bytes, GETs, dollars and memory; its text is one line."""
        return replace(LoaderPlan.of(self._feed, self._prices, self._budget.egress), shuffle=self.config.shuffle)

    def _columns(self) -> dict[str, Column]:
        return self._manifest.schema.chosen(self.config.columns)

    def __repr__(self) -> str:
        epoch, position = self._place
        return (
            f"<Loader {self.url} rank {self.rank} of {self.world_size}: "
            f"{describe_manifest(self._manifest, self._columns())}; {self._batches_of()}; "
            f"epoch {epoch}, position {position}>"
        )

    def _batches_of(self) -> str:
        return f"{len(self):,} batches of {self.config.batch_size:,} an epoch"

    def _repr_html_(self) -> str:
        epoch, position = self._place
        manifest = self._manifest
        rows = [
            ("data set", f"version {manifest.version}: {describe_manifest(manifest, self._columns())}"),
            ("rank", f"{self.rank} of {self.world_size}"),
            ("batches", self._batches_of()),
            ("order", f"shuffle {self.config.shuffle}, seed {self.config.seed}, window {self.config.window}"),
            ("memory", format_bytes(self.config.memory_bytes())),
            ("next", f"epoch {epoch}, position {position:,}"),
        ]
        return html_table(f"Loader {self.url}", rows)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Loader cannot be pickled or copied: construct one in the process that uses it, and give it this one's "
            "state_dict()"
        )

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            "a Loader has no samples by number: iterate over the Loader itself, in place of a DataLoader, or give the "
            "DataLoader a StreamDataset(url); samples by number are in stoker.open(url)"
        )

    def __len__(self) -> int:
        """Return how many batches a whole epoch has on this rank."""
        return self._feed.partition.steps_from(0)

    @property
    def remaining(self) -> int:
        """How many batches the current epoch has left on this rank."""
        return self._feed.partition.steps_from(self._place[1])

    def _made_feed(self, manifest: Manifest, lanes: int) -> BatchSource:
        config = self.config.feed_config(rank=self.rank, world_size=self.world_size, lanes=lanes)
        rows = gather_rows if self._buffers is None else self._buffers.gather_rows
        return self._supply.made_feed(manifest, self.config, config, rows, self._recorder)

    def _made_trace(self) -> ChromeTrace | None:
        path = self.config.trace
        if not isinstance(path, str | os.PathLike):
            return None
        file = Path(path)
        if self.world_size > 1:
            file = file.with_name(f"{file.stem}.rank{self.rank}{file.suffix}")
        return ChromeTrace(file, name=f"stoker rank {self.rank} of {self.world_size}")

    def _made_pool(self) -> SamplePool | None:
        config, workers = self.config, WorkerOptions.of(self.config.workers)
        work = SampleWork(
            decode=config.decode or {},
            transform=config.transform,
            collate=config.collate,
            batch_transform=config.batch_transform,
            timeout_seconds=workers.timeout_seconds or None,
            pin_memory=self._pins_memory,
        )
        return (
            None if work.is_none else SamplePool(work, workers.threads or os.cpu_count() or 1, workers.max_bad_samples)
        )

    # Iterating.

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on where a loaded state says. An older iteration ends.

        Raises:
            ConfigError: torch.distributed, initialized since the loader was made, says that this is another rank; or
                the iteration before this one abandoned the last of ``epochs``.
            RankMismatchError: under torch.distributed, the ranks disagree on the data set, the order or the place.
            BudgetExceededError: ``budget`` is spent; the next batch raises it where that happens during an epoch.
        """
        if self.config.rank is None:
            confirm_rank(self.rank, self.world_size)
        self._check_spending()  # the place stays where it is for a state to be saved
        self._leave()
        self._end_epoch()
        is_abandoned = not self._is_fresh and self._place[1] > 0
        epoch = self._place[0] + is_abandoned
        is_over = self.config.epochs is not None and epoch >= self.config.epochs
        if is_over:
            self._tell_over(epoch, raises=is_abandoned and not self._is_resumed)
        if is_abandoned:
            self._place = (epoch, 0)
        self._is_fresh = False
        compare_ranks(asdict(self._state()) | {name: getattr(self.config, name) for name in _ALIKE}, self.world_size)
        parts = IterationParts(
            feed=self._feed,
            go=self._go,
            note=self._note,
            pool=self._pool,
            with_ids=self.config.with_ids,
            pin_memory=self._pins_memory,
            check=None if self._allowance is None else self._check_spending,
            supply=self._supply,
            gathers_ahead=self._buffers is None,  # buffers know the asking thread's stream
            recorder=self._recorder,
            ended=self._end_epoch,
            failed=self._keep_place,
        )
        asked = time.perf_counter()
        iteration = Iteration(parts, 0 if is_over else self.remaining)
        now = time.perf_counter()
        self._times.begun(asked, now)
        self._recorder.begun(asked, now)
        self._is_share_over = not is_over and not self.remaining  # nothing for this rank
        self._iteration = weakref.ref(iteration)
        return iteration

    def _tell_over(self, epoch: int, *, raises: bool) -> None:
        """Warn, each time, of a loop behind the last epoch.

        Raises:
            ConfigError: ``raises``.
        """
        self._empty_loops += 1
        over = f"epochs={self.config.epochs} are over: the next would be epoch {epoch}, counted from 0"
        if raises:
            raise ConfigError(
                f"{over}, since the loop before this one left epoch {self._place[0]} at position {self._place[1]} (by "
                f"next(iter(loader)) or a break). Give epochs={epoch + 1} or none at all; or call set_epoch("
                f"{self._place[0]}) to begin that epoch again, or load_state_dict(loader.state_dict()) to go on with it"
            )
        warnings.warn(
            f"{over}. This loop, number {self._empty_loops} behind the last epoch, is empty: give epochs= as many "
            "epochs as are looped over, or none at all; or call set_epoch() to begin an epoch again",
            UserWarning,
            stacklevel=3,
        )

    def _others_have_more(self, batch: Batch) -> bool:
        """Return whether another rank has a batch behind this one, so that the epoch is not over."""
        if not batch.is_last or not self.config.evaluation:
            return not batch.is_last
        return replace(self._feed.config.partition(self._manifest.samples), rank=0).steps_from(batch.end) > 0

    def _end_epoch(self) -> None:
        """Go to the next epoch, if this rank has come to the end of its share."""
        if self._is_share_over:
            self._place, self._is_share_over = (self._place[0] + 1, 0), False

    def _keep_place(self) -> None:
        """Have the next iteration go on where this one is."""
        self._is_fresh = True

    def _leave(self) -> None:
        """End the iteration that is under way, if any."""
        iteration = None if self._iteration is None else self._iteration()
        if iteration is not None:
            iteration.close()
        self._iteration = None
        self._supply.leave()

    def _go(self) -> None:
        """Have the feed fetch from the loader's place on, unless it does."""
        if self._feed.place != self._place:
            self._feed.start(*self._place)
            self._supply.arm(self)

    def _note(self, batch: Batch, asked: float) -> None:
        """Take note of a batch that is being yielded."""
        self._place = (batch.epoch, batch.end)
        self._is_share_over = batch.is_last
        if not self._others_have_more(batch):
            self._end_epoch()
        self._batches += 1
        self._samples += len(batch)
        now = time.perf_counter()
        self._times.yielded(asked, now)
        self._recorder.yielded(batch.epoch, asked, now)

    def _check_spending(self) -> None:
        """Warn of the end of the budget; at its end, fetch nothing more.

        Raises:
            BudgetExceededError: it is spent.
        """
        if self._allowance is None:
            return
        try:
            self._allowance.check(self._prices.dollars(self._supply.store.meter.reading()))
        except BudgetExceededError:
            self._feed.stop()
            raise

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next iteration begins.

        It begins at its start, but where a state was just loaded that is of this epoch: that goes on at its place.
        Costs nothing where it names the epoch that comes next anyway: what was fetched ahead is kept.

        Raises:
            ConfigError: it is not a number from 0.
        """
        if not isinstance(epoch, int | np.integer) or epoch < 0:
            raise ConfigError(f"epoch {epoch!r} is not an integer from 0")
        if self._is_fresh and epoch == self._place[0]:
            return
        self._leave()
        self._place, self._is_fresh, self._is_share_over = (int(epoch), 0), True, False

    # State.

    def _state(self) -> RunState:
        manifest = self._manifest
        source = SourceState.of_config(
            self.config, dataset=manifest.dataset, version=manifest.version, lanes=self._lanes
        )
        return RunState(epoch=self._place[0], position=self._place[1], **asdict(source))

    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the batch yielded last, with all that fixes the order: plain values, fit for JSON.

        The state of any rank is the state of all. At an epoch's end it is the start of the next one; with
        ``evaluation=True`` a rank that has a batch less than others says so when its loop has ended.
        """
        return self._state().to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on where the state was taken, on any world size and batch size.

        The state's manifest version and lanes are taken over.

        Raises:
            StateError: the state is of another data set or order than this loader's settings.
            NotFoundError: the manifest version is gone.
        """
        loaded = RunState.from_dict(state)
        loaded.check(self._state(), self.config)
        manifest, feed = self._manifest, self._feed
        if loaded.version != manifest.version:
            manifest = self._supply.read_manifest(loaded.version)
            self._supply.arm(self)
        if (loaded.version, loaded.lanes) != (self._manifest.version, self._lanes):
            feed = self._made_feed(manifest, loaded.lanes)
        if loaded.position > feed.partition.samples:
            raise StateError(f"the state's position {loaded.position} is behind {feed.partition.samples} samples")
        self._leave()
        if feed is not self._feed:
            self._feed.stop()
            self._manifest, self._lanes, self._feed, self._supply.feed = manifest, loaded.lanes, feed, feed
        # Whether anything is left is asked for rank 0, which has as much as any: all ranks must go to the same place.
        is_left = replace(feed.config.partition(manifest.samples), rank=0).steps_from(loaded.position)
        self._place = (loaded.epoch, loaded.position) if is_left or not loaded.position else (loaded.epoch + 1, 0)
        self._is_fresh, self._is_resumed, self._is_share_over = True, True, False

    # The end.

    def stats(self) -> LoaderStatistics:
        """Return what was done so far: waits, requests, bytes, retries, hedges, dollars."""
        found = statistics(
            self._feed.statistics(),
            self._supply.store.meter.reading(),
            self._prices,
            self._times,
            (self._batches, self._samples),
            0 if self._pool is None else self._pool.bad_samples,
            self._recorder,
        )
        return replace(found, hedges=found.hedges + self._supply.manifest_hedges)

    def close(self) -> None:
        """End fetching and threads and close connections. Idempotent; iterating again starts anew."""
        self._leave()
        self._supply.close()
        if self._pool is not None:
            self._pool.close()
        self._recorder.flush()
        if self._trace is not None:
            self._trace.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
