"""The loader: a data set in a bucket as an iterable of batches, one iteration an epoch."""

from __future__ import annotations

import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from stoker._base.arguments import takes_settings
from stoker._base.closeable import Closeable
from stoker._base.recorder import Recorder
from stoker._base.sizes import format_bytes, parse_bytes
from stoker._cost.prices import CostBudget, parse_dollars
from stoker._fetch.batch_stream import Batch
from stoker._fetch.pipeline import BatchPipeline
from stoker._format.display import describe_manifest, html_table
from stoker._format.manifest import Manifest
from stoker._format.schema import Column
from stoker._order.order import format_window
from stoker._stores import url_of
from stoker._trace.chrome import ChromeTrace
from stoker.errors import ConfigError, StateError
from stoker_torch._config import LoaderArguments
from stoker_torch._device_images import device_decoders
from stoker_torch._devices import check_available, open_device
from stoker_torch._iteration import BatchIteration, Cursor, LoaderResources
from stoker_torch._options import Budget, validate_integer
from stoker_torch._pool import SamplePool, batch_failure, has_functions
from stoker_torch._ranks import compare_ranks, confirm_rank, find_rank
from stoker_torch._staging import Staging
from stoker_torch._state import RunState
from stoker_torch._statistics import LoaderPlan, LoaderStatistics, LoopStatistics
from stoker_torch._tensors import BufferPool, can_pin_memory

_log = logging.getLogger("stoker")


class EpochCursor(Cursor):
    """The position of a loader's run: an epoch, and a position in it over all ranks.

    Args:
        resources: open data set with the batch pipeline.

    Attributes:
        position: epoch and position; one value, so that a signal handler never sees half a change.
        is_fresh: whether the next iteration begins at ``position``, and not with the epoch after it.
        is_resumed: whether a state was loaded.
        is_share_over: whether this rank has delivered its share of the epoch; other ranks may have one batch more.
    """

    def __init__(self, resources: LoaderResources) -> None:
        self._resources = resources
        self.position = (0, 0)
        self.is_fresh, self.is_resumed, self.is_share_over = True, False, False

    @property
    def is_abandoned(self) -> bool:
        """Whether the loop began the epoch and left it before its end."""
        return not self.is_fresh and self.position[1] > 0

    def begin(self) -> None:
        """Begin an iteration: of the next epoch if this one was abandoned."""
        if self.is_abandoned:
            self.position = (self.position[0] + 1, 0)
        self.is_fresh = False

    def set_epoch(self, epoch: int) -> None:
        """Set the position to the start of an epoch."""
        self.position, self.is_fresh, self.is_share_over = (epoch, 0), True, False

    def resume(self, epoch: int, position: int) -> None:
        """Set the position to that of a state; at an epoch's end, to the start of the next epoch.

        Rank 0, which has at least as many batches as any rank, decides whether the epoch is over, since all ranks must
        go to the same position.
        """
        self.position = (epoch, position) if not position or self._has_samples_after(position) else (epoch + 1, 0)
        self.is_fresh, self.is_resumed, self.is_share_over = True, True, False

    def _has_samples_after(self, position: int) -> bool:
        feed = self._resources.pipeline
        return replace(feed.config.sharding(feed.manifest.samples), rank=0).count_steps(position) > 0

    def seek(self) -> None:
        """Start the batch pipeline at ``position``, unless it is there already."""
        feed = self._resources.pipeline
        if feed.position != self.position:
            feed.start(*self.position)
            self._resources.register_finalizer(self)

    def commit(self, batch: Batch) -> None:
        """Set the position to the end of a batch; after the last batch of all ranks, to the next epoch."""
        self.position, self.is_share_over = (batch.epoch, batch.end), batch.is_last
        if batch.is_last and not (self._resources.config.evaluation and self._has_samples_after(batch.end)):
            self.end()

    def end(self) -> None:
        """Go to the next epoch if this rank has delivered its share."""
        if self.is_share_over:
            self.position, self.is_share_over = (self.position[0] + 1, 0), False

    def fail(self) -> None:
        """Make the next iteration continue at ``position``."""
        self.is_fresh = True


def _finish_on_device(
    resources: LoaderResources, function: Callable[[Any], Any] | None, batch: Batch, staged: Any
) -> Any:
    cache = resources.device_cache
    values = staged if cache is None else staged[-1]
    for name in resources.device_decoders:
        if name in values:
            values[name] = values[name].decode(resources.accelerator)
    if cache is not None:
        values = cache.complete(staged[0], staged[1], values)
    if function is None:
        return values
    try:
        return function(values)
    except Exception as error:
        raise batch_failure(batch.sample_name, "batch_transform", error) from error


class Loader(Closeable):
    """Iterates over a packed data set; each ``for`` is one epoch, each batch a dictionary of tensors.

    ``batch[name]`` is a tensor ``[samples, *shape]`` of the column's dtype, or a :class:`RaggedColumn`. Batches own
    their memory. (manifest version, seed, epoch, shuffle, window, lanes, unit, sticky) fixes the order, which is the
    same on every machine. Over all ranks an epoch delivers every sample exactly once, and every rank gets the same
    number of batches.

    Fetching starts with the first iteration, runs on its own thread and continues across epochs. Leaving a loop early
    (``break``) abandons the epoch: the next iteration is the next epoch. After an error of the loader itself, the next
    iteration continues at the batch that failed. With ``epochs=E``, a loop after the last epoch is empty and warns each
    time; it raises if a ``break`` or ``next()`` abandoned that epoch and no state was loaded. :meth:`state_dict` is
    the position after the last batch yielded. Construction reads only the manifest.

    The arguments are the URL of a data set and the settings of a :class:`LoaderConfig`.

    Raises:
        ConfigError: a setting is wrong.
        NotFoundError: there is no data set at the URL.
        MemoryBudgetError: the memory is too small, or the order would cost more than the limit; the message has the
            figure that fits.

    Example:
        >>> loader = Loader("s3://bucket/train", batch_size=64, epochs=2)
        >>> for epoch in range(2):
        ...     for batch in loader:
        ...         train_step(batch["image"], batch["label"])
        >>> state = loader.state_dict()  # load_state_dict(state) resumes on any number of ranks
        >>> loader.close()
    """

    @takes_settings(LoaderArguments)
    def __init__(self, config: LoaderArguments) -> None:
        begun_seconds = time.perf_counter()
        self.config, self._budget = config, Budget.of(config.budget)
        self.rank, self.world_size = find_rank(config.rank, config.world_size, config.mesh)
        # Ranks that differ in other dimensions of a mesh are processes of their own.
        self._process, self._processes = (self.rank, self.world_size) if config.mesh is None else find_rank(None, None)
        self.url = url_of(config.url)
        pins_memory = config.pin_memory and can_pin_memory()
        self._buffers = BufferPool(pinned=pins_memory) if config.reuse_buffers else None
        self._resources = resources = LoaderResources.open(config.url, config)
        resources.pins_memory, resources.gathers_ahead = pins_memory, self._buffers is None
        if self._buffers is not None:
            resources.arrays = self._buffers
        host_config = config
        if (accelerator := config.accelerator()) is not None:
            resources.gpu_cache_bytes = None if config.gpu_cache is None else parse_bytes(config.gpu_cache)
            resources.accelerator = accelerator
            has_transform = config.transform is not None or config.collate is not None
            on_device = device_decoders(config.decode, accelerator, has_transform=has_transform)
            resources.device_decoders = on_device
            resources.staging = self._create_staging(accelerator)
            if config.batch_transform is not None or on_device or config.gpu_cache is not None:
                resources.finish = partial(_finish_on_device, resources, config.batch_transform)
            resources.gathers_on_request = config.batch_transform is None and not config.static
            decode = {name: each for name, each in (config.decode or {}).items() if name not in on_device}
            host_config = replace(config, decode=decode, batch_transform=None)
        if has_functions(host_config):
            resources.pool = SamplePool(host_config, threads=os.cpu_count() or 1, pin_memory=pins_memory)
        elif resources.staging is not None:
            resources.arrays = resources.staging.buffers
        if self._budget.dollars is not None:
            resources.cost_budget = CostBudget(parse_dollars(self._budget.dollars), self._processes)
        try:
            self._trace = self._create_trace()
            self._recorder = Recorder([*config.sinks(), *([] if self._trace is None else [self._trace])])
            resources.recorder = self._recorder
            if resources.staging is not None and self._recorder.wants_copies:
                resources.staging.on_copy = self._recorder.add_copy
            lanes = self.world_size if config.lanes is None else config.lanes
            resources.active_pipeline = self._create_pipeline(
                resources.read_manifest(config.version, self._processes), lanes
            )
            plan = self.plan
            plan.check_dollars(self._budget.max_dollars_per_epoch)
        except BaseException:
            resources.close()
            raise
        self._cursor = EpochCursor(resources)
        resources.register_finalizer(self._cursor)  # an iteration holds it, too, and may outlive the loader
        self._empty_loops = 0
        self._iteration: weakref.ref[BatchIteration] | None = None
        self._statistics = LoopStatistics(self._recorder)
        self._statistics.construction_seconds = time.perf_counter() - begun_seconds
        _log.info("%s, rank %d of %d: %s", self.url, self.rank, self.world_size, plan)

    # Data set and plan.

    @property
    def manifest(self) -> Manifest:
        """The pinned version of the data set's index."""
        return self._resources.pipeline.manifest

    @property
    def plan(self) -> LoaderPlan:
        """The plan of an epoch: steps, lanes, bytes, GETs, dollars and memory; ``str()`` makes one line."""
        return self._resources.plan()

    def _columns(self) -> dict[str, Column]:
        return self.manifest.schema.select(self.config.columns)

    def __repr__(self) -> str:
        epoch, position = self._cursor.position
        return (
            f"<Loader {self.url} rank {self.rank} of {self.world_size}: "
            f"{describe_manifest(self.manifest, self._columns())}; {self._format_batches()}; "
            f"epoch {epoch}, position {position}>"
        )

    def _format_batches(self) -> str:
        return f"{len(self):,} batches of {self.config.batch_size:,} an epoch"

    def _repr_html_(self) -> str:
        epoch, position = self._cursor.position
        manifest = self.manifest
        window = format_window(self.config.window, self.config.order(lanes=1).unit_bytes, self.config.sticky)
        rows = [
            ("data set", f"version {manifest.version}: {describe_manifest(manifest, self._columns())}"),
            ("rank", f"{self.rank} of {self.world_size}"),
            ("batches", self._format_batches()),
            ("order", f"shuffle {self.config.shuffle}, seed {self.config.seed}, {window}"),
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
            "DataLoader a StreamDataset(url); for samples by number, use stoker.open(url)"
        )

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank."""
        return self._resources.pipeline.partition.count_steps(0)

    @property
    def remaining(self) -> int:
        """Number of batches that are left of the current epoch on this rank."""
        return self._resources.pipeline.partition.count_steps(self._cursor.position[1])

    def _create_pipeline(self, manifest: Manifest, lanes: int) -> BatchPipeline:
        config = self.config.feed_config(rank=self.rank, world_size=self.world_size, lanes=lanes)
        return self._resources.create_pipeline(manifest, config)

    def _create_staging(self, accelerator: torch.device) -> Staging:
        check_available(accelerator)
        config = self.config
        return Staging(partial(open_device, accelerator), ahead=config.ahead, is_static=config.static)

    def _create_trace(self) -> ChromeTrace | None:
        path = self.config.trace
        if not isinstance(path, str | os.PathLike):
            return None
        file = Path(path)
        if self._processes > 1:
            file = file.with_name(f"{file.stem}.rank{self._process}{file.suffix}")
        return ChromeTrace(file, name=f"stoker rank {self._process} of {self._processes}")

    # Iteration.

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or continue at a loaded state. An earlier iteration ends.

        Raises:
            ConfigError: torch.distributed, initialized after the loader was constructed, has another rank for this
                process; or the previous iteration abandoned the last of ``epochs``.
            RankMismatchError: under torch.distributed, the ranks disagree on the data set, the order or the position.
            CostBudgetError: ``budget`` is spent; during an epoch, the next batch raises it.
        """
        if self.config.rank is None and self.config.mesh is None:
            confirm_rank(self.rank, self.world_size)
        resources, cursor = self._resources, self._cursor
        resources.check_spending()  # raises before the position changes, so that the state can still be saved
        self._end_iteration()
        cursor.end()
        epoch = cursor.position[0] + cursor.is_abandoned
        is_over = self.config.epochs is not None and epoch >= self.config.epochs
        if is_over:
            self._warn_after_last_epoch(epoch, raises=cursor.is_abandoned and not cursor.is_resumed)
        cursor.begin()
        compare_ranks(self._state().comparison_values(self.config), self.world_size, self.config.mesh)
        started = time.perf_counter()
        iteration = BatchIteration(resources, cursor, 0 if is_over else self.remaining, self._statistics)
        self._statistics.record_begin(started)
        cursor.is_share_over = not is_over and not self.remaining  # nothing for this rank
        self._iteration = weakref.ref(iteration)
        return iteration

    def _warn_after_last_epoch(self, epoch: int, *, raises: bool) -> None:
        """Warn that a loop began after the last epoch.

        Raises:
            ConfigError: ``raises`` is true.
        """
        self._empty_loops += 1
        left, position = self._cursor.position
        over = f"the limit epochs={self.config.epochs} is reached: the next would be epoch {epoch}, counted from 0"
        if raises:
            raise ConfigError(
                f"{over}, since the loop before this one left epoch {left} at position {position} (by "
                f"next(iter(loader)) or a break). Set epochs={epoch + 1} or leave it out; or call set_epoch("
                f"{left}) to begin that epoch again, or load_state_dict(loader.state_dict()) to continue it"
            )
        warnings.warn(
            f"{over}. This loop, number {self._empty_loops} after the last epoch, is empty: set epochs= to the number "
            "of epochs that the training loops over, or leave it out; or call set_epoch() to begin an epoch again",
            UserWarning,
            stacklevel=3,
        )

    def _end_iteration(self) -> None:
        """End the current iteration, if any."""
        iteration = None if self._iteration is None else self._iteration()
        if iteration is not None:
            iteration.close()
        self._iteration = None
        self._resources.end_gathering()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        The iteration begins at the start of the epoch, or at the position of a state of this epoch that was just
        loaded. If ``epoch`` comes next anyway, nothing that was fetched ahead is lost.

        Raises:
            ConfigError: ``epoch`` is not an integer of at least 0.
        """
        epoch = validate_integer("epoch", epoch, 0)
        if self._cursor.is_fresh and epoch == self._cursor.position[0]:
            return
        self._end_iteration()
        self._cursor.set_epoch(epoch)

    # State.

    def _state(self) -> RunState:
        epoch, position = self._cursor.position
        lanes = self._resources.pipeline.config.order.lanes
        return RunState.of_config(self.config, self.manifest, lanes, epoch=epoch, position=position)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch yielded, and everything that fixes the order, as plain values.

        The state is fit for JSON, and the same on every rank. At an epoch's end it is the start of the next epoch; with
        ``evaluation=True``, a rank with one batch less than others gets there when its loop has ended.
        """
        return self._state().to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue where the state was taken, with any world size and batch size.

        The loader adopts the state's manifest version and lanes.

        Raises:
            StateError: the state is of another data set or order than this loader's settings.
            NotFoundError: the manifest version was deleted.
        """
        loaded = RunState.from_dict(state)
        current = self._state()
        loaded.check(current, self.config)
        manifest, feed = self.manifest, self._resources.pipeline
        if loaded.version != manifest.version:
            manifest = self._resources.read_manifest(loaded.version, self._processes)
            self._resources.register_finalizer(self._cursor)
        if (loaded.version, loaded.lanes) != (current.version, current.lanes):
            feed = self._create_pipeline(manifest, loaded.lanes)
        if loaded.position > feed.partition.samples:
            raise StateError(
                f"the state's position {loaded.position} is beyond the {feed.partition.samples} samples of an epoch; "
                "load a state of this data set"
            )
        self._end_iteration()
        if feed is not self._resources.pipeline:
            self._resources.pipeline.stop()
            self._resources.active_pipeline = feed
        self._cursor.resume(loaded.epoch, loaded.position)

    # Closing.

    def stats(self) -> LoaderStatistics:
        """Return the statistics so far: waits, requests, bytes, retries, hedges, dollars."""
        resources = self._resources
        bad_samples = 0 if resources.pool is None else resources.pool.bad_samples
        reading = resources.store.meter.snapshot()
        statistics = self._statistics.snapshot(resources.pipeline, reading, resources.prices, bad_samples)
        return replace(statistics, hedges=statistics.hedges + resources.manifest_hedges)

    def close(self) -> None:
        """End fetching, threads and connections. Idempotent; a new iteration starts them again."""
        self._end_iteration()
        self._resources.close()
        if self._resources.pool is not None:
            self._resources.pool.close()
        self._recorder.flush()
        if self._trace is not None:
            self._trace.close()
