"""The tasks that make a materialized epoch, as events of a function, and their execution.

A task scatters super-samples, writes a slice, or commits the epoch, in a function or elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from stoker._base.fields import JsonFields
from stoker._base.meter import FolderStore
from stoker._base.retry import RetryingReader
from stoker._fetch.materialized_pipeline import read_epoch
from stoker._fetch.range_plan import MAX_GROUP_SAMPLES, SampleGroup
from stoker._format.supersample import MAX_TARGET_BYTES
from stoker._format.versions import read_manifest
from stoker._order.epoch_layout import MAX_EPOCH, MAX_SLICES, EpochLayout
from stoker._order.order import MAX_LANES
from stoker._pack.scatter import Scatter
from stoker._pack.stored_samples import StoredSamples, read_groups, usable_bytes
from stoker.abc import Store
from stoker.errors import ConfigError, NotFoundError, PackError
from stoker_functions._deployment import Deployment, InvocationDeadline
from stoker_functions._shuffle_job.epochs import SCATTERED_FOLDER, commit_epoch

Step = Literal["scatter", "slice", "commit"]
Way = Literal["ranged", "streamed", "scattered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleTask:
    """One task, whose result is the same however often, and by however many processes at a time, it is executed.

    Attributes:
        dataset: URL of the data set.
        version: version of its manifest.
        seed: seed of the order.
        epoch: number of the epoch, from 0.
        lanes: number of parts that the order of the epoch is cut into.
        way: how a slice reads: ``ranged`` by ranges, ``streamed`` all super-samples, ``scattered`` the scatters' cells.
        slices: number of parts that the epoch is cut into for writing.
        scatters: number of parts that the super-samples are cut into for scattering; 0 except with ``scattered``.
        object_bytes: limit of the data of a written super-sample.
        step: ``scatter`` some super-samples to slices, write a ``slice``, or ``commit`` all slices.
        part: number of the scatter or slice, from 0; 0 for a commit.
        keep: number of earlier epochs of the run that a commit keeps; it deletes older ones. Default: keep all.

    Raises:
        ConfigError: values contradict each other.
    """

    dataset: str
    version: int
    seed: int
    epoch: int
    lanes: int
    way: Way
    slices: int
    scatters: int
    object_bytes: int
    step: Step
    part: int
    keep: int = MAX_EPOCH

    def __post_init__(self) -> None:
        if (self.way == "scattered") != (self.scatters > 0):
            raise ConfigError(
                f"the way {self.way!r} does not go with {self.scatters} scatters: only 'scattered' has any, at least 1"
            )
        parts = {"scatter": self.scatters, "slice": self.slices, "commit": 1}[self.step]
        if not 0 <= self.part < parts:
            raise ConfigError(f"part {self.part} of a {self.step} is not in [0, {parts})")

    def to_event(self) -> dict[str, Any]:
        """Return the task as a JSON object."""
        return asdict(self)

    @classmethod
    def from_event(cls, event: object) -> ShuffleTask:
        """Return the task of an event.

        Raises:
            EventError: the event is not a task; the message names the field.
            ConfigError: its values contradict each other.
        """
        fields = JsonFields(event, "shuffle event")
        values: Mapping[str, Any] = {
            "dataset": fields.text("dataset"),
            "version": fields.integer("version", min_value=1),
            "seed": fields.integer("seed", max_value=(1 << 64) - 1),
            "epoch": fields.integer("epoch", max_value=MAX_EPOCH),
            "lanes": fields.integer("lanes", min_value=1, max_value=MAX_LANES),
            "way": fields.choice("way", get_args(Way)),
            "slices": fields.integer("slices", min_value=1, max_value=MAX_SLICES),
            "scatters": fields.integer("scatters", max_value=MAX_SLICES, default=0),
            "object_bytes": fields.integer("object_bytes", min_value=1, max_value=MAX_TARGET_BYTES),
            "step": fields.choice("step", get_args(Step)),
            "part": fields.integer("part", max_value=MAX_SLICES, default=0),
            "keep": fields.integer("keep", max_value=MAX_EPOCH, default=MAX_EPOCH),
        }
        fields.check_no_fields_left()
        return cls(**values)


async def shuffle(event: object, deployment: Deployment, deadline: InvocationDeadline) -> dict[str, Any]:
    """Execute the task in an event, which may arrive any number of times, also at the same time.

    Returns:
        ``state``: ``complete``, or ``packing`` if the deadline came first, and the same event continues; and counts.

    Raises:
        DeadlineError: there is too little time; the same event may be tried again.
        EventError: the event is not a task, or the settings do not allow its data set.
        StokerError: the task failed; see :func:`perform`.
    """
    task = ShuffleTask.from_event(event)
    store = deployment.dataset_store(task.dataset)
    memory_bytes = usable_bytes(deployment.settings.memory_bytes)
    name = f"{task.step} {task.part} of epoch {task.epoch}"
    slow = "could not stop in time, since the bucket is slow; the recorded progress is kept"
    async with deadline.limit(name, slow, late=True):
        with deployment.count_requests() as requests:
            done = await perform(store, task, memory_bytes=memory_bytes, stop_at_seconds=deadline.stop_at_seconds)
        return {**done, "requests": requests}


async def perform(
    store: Store, task: ShuffleTask, *, memory_bytes: int, stop_at_seconds: float = math.inf
) -> dict[str, Any]:
    """Execute a task, and return its progress as a JSON object: ``state`` is ``complete`` or ``packing``.

    After a cancellation, the same task continues with the objects that were written.

    Args:
        store: store of the data set.
        task: task to execute.
        memory_bytes: memory that the task may use.
        stop_at_seconds: time on the clock of the event loop after which no more work is begun; an incomplete task
            continues when it is executed again. Default: no limit.

    Raises:
        NotFoundError: there is no such version of the data set.
        MemoryBudgetError: the memory is too small.
        DeadlineError: the time is too short.
        PackError: an earlier task is not complete, or another object is where the epoch belongs.
        StoreError: the store failed.
    """
    plain = store.wrapped if isinstance(store, RetryingReader) else store  # the fetcher retries by itself
    manifest = await read_manifest(plain, task.version)
    layout = EpochLayout(manifest, seed=task.seed, lanes=task.lanes, epoch=task.epoch)
    work = _TaskRun(plain, task, layout, memory_bytes, stop_at_seconds)
    if task.step == "commit":
        return await work.commit()
    try:
        return await (work.scatter() if task.step == "scatter" else work.slice())
    except (PackError, NotFoundError):
        if await read_epoch(plain, layout) is None:
            raise
        return {"state": "complete"}  # another process has committed the epoch, and deleted the scattered samples


@dataclass(frozen=True, eq=False)
class _TaskRun:
    store: Store
    task: ShuffleTask
    layout: EpochLayout
    memory_bytes: int
    stop_at_seconds: float

    # Folders, runs and rows.

    @property
    def _folder(self) -> FolderStore:
        return FolderStore(self.store, self.layout.folder)

    def _slice_run(self, part: int) -> str:
        starts = self.layout.slice_starts(self.task.slices).tolist()
        return self.layout.run_id("slice", starts[part], starts[part + 1], self.task.object_bytes)

    @cached_property
    def _scatter(self) -> Scatter:
        task = self.task
        return Scatter(
            store=self.store,
            folder=FolderStore(self.store, self.layout.folder + SCATTERED_FOLDER),
            layout=self.layout,
            slice_starts=self.layout.slice_starts(task.slices),
            scatters=task.scatters,
            object_bytes=task.object_bytes,
            memory_bytes=self.memory_bytes,
            stop_at_seconds=self.stop_at_seconds,
        )

    # The steps.

    async def commit(self) -> dict[str, Any]:
        """Make the epoch visible, if all slices are complete."""
        starts = self.layout.slice_starts(self.task.slices)
        runs = [self._slice_run(part) for part in np.flatnonzero(np.diff(starts)).tolist()]
        return await commit_epoch(
            self.store, self.layout, runs, keep=self.task.keep, stop_at_seconds=self.stop_at_seconds
        )

    async def scatter(self) -> dict[str, Any]:
        """Write the samples of some super-samples, sorted by the slices that they belong to."""
        if await read_epoch(self.store, self.layout) is not None:  # its scattered samples are deleted
            return {"state": "complete"}
        result = await self._scatter.write(self.task.part)
        return {name if name in ("state", "run") else f"scattered_{name}": value for name, value in result.items()}

    async def slice(self) -> dict[str, Any]:
        """Write the samples of a slice, in their order."""
        run = self._slice_run(self.task.part)
        sections = [(run, count) for count in self.layout.lane_row_counts(*self._rows)]
        read = self._read_ranges if self.task.way == "ranged" else self._read_whole
        return await self._scatter.write_part(self._folder, run, sections, read)

    @property
    def _rows(self) -> tuple[int, int]:
        """First row of the slice, and the row behind its last."""
        start, stop = self.layout.slice_starts(self.task.slices)[self.task.part : self.task.part + 2].tolist()
        return start, stop

    # The ways to read the samples of a slice, without the first ones, which are written.

    def _read_ranges(self, done: int) -> AsyncGenerator[StoredSamples, None]:
        start, stop = self._rows
        return read_groups(
            self._scatter.source(self.store, self.layout.manifest), self._iterate_blocks(start + done, stop)
        )

    def _iterate_blocks(self, start: int, stop: int) -> Iterator[SampleGroup]:
        for begin in range(start, stop, MAX_GROUP_SAMPLES):
            rows = np.arange(begin, min(begin + MAX_GROUP_SAMPLES, stop))
            yield SampleGroup(*self.layout.order.locate(self.layout.samples_of(rows)))

    async def _read_whole(self, done: int) -> AsyncGenerator[StoredSamples, None]:
        yield await self._scatter.read(self.task.part, done)
