"""The tasks of which a materialized epoch is made, as events that a function takes, and how one is carried out.

In a function or elsewhere, a task scatters super-samples, writes a slice, or commits the epoch.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from stoker._base.fields import Fields
from stoker._base.meter import FolderStore
from stoker._base.retry import RetryingReader
from stoker._base.task_group import for_each
from stoker._fetch.fetcher import FetchConfig, Fetcher
from stoker._fetch.materialized_pipeline import read_epoch
from stoker._fetch.range_plan import MOST_SAMPLES, Group
from stoker._format.manifest import Manifest, PackRun, Rows
from stoker._format.supersample import MAX_SUPER_SAMPLE_BYTES
from stoker._format.versions import read_manifest
from stoker._memory.ring import Ring
from stoker._order.order import MAX_EPOCH, MAX_LANES, MAX_SLICES, EpochLayout
from stoker.abc import Readable, Store
from stoker.errors import ConfigError, NotFoundError, PackError
from stoker_functions._deployment import Deadline, Deployment
from stoker_functions._shuffle_job.epochs import SCATTERED_FOLDER, PartRecord, commit_epoch
from stoker_functions._shuffle_job.samples import (
    PartWriter,
    Samples,
    SampleSource,
    TaskMemory,
    WriteConfig,
    read_groups,
    read_whole,
    usable_bytes,
)

Step = Literal["scatter", "slice", "commit"]
Way = Literal["ranged", "streamed", "scattered"]
_RECORDS_AT_ONCE = 16

_Read = Callable[[int], AsyncGenerator[Samples, None]]
"""Reads the samples of a part, in order, without so many at its start, which are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleTask:
    """One task. Whoever carries it out, how often, and at the same time as whom, makes no difference to its result.

    Attributes:
        dataset: URL of the data set.
        version: of its manifest.
        seed: of the order.
        epoch: from 0.
        lanes: into how many parts the epoch is cut.
        way: how a slice reads: by ranges, all super-samples streamed past, or what was scattered before.
        slices: into how many parts the epoch is cut to be written.
        scatters: into how many parts the super-samples are cut to be scattered; 0 but for the way ``scattered``.
        object_bytes: limit of a super-sample's data that is written.
        step: ``scatter`` some super-samples to slices, write a ``slice``, or ``commit`` what all slices have written.
        part: which scatter or slice; 0 for a commit.
        keep: commits keep so many epochs of the run before this one, and delete older ones; by default they keep all.

    Raises:
        ConfigError: values do not go together.
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
            raise ConfigError(f"the way {self.way!r} does not go with {self.scatters} scatters")
        parts = {"scatter": self.scatters, "slice": self.slices, "commit": 1}[self.step]
        if not 0 <= self.part < parts:
            raise ConfigError(f"part {self.part} is not in [0, {parts}), of which a {self.step} is one")

    def to_event(self) -> dict[str, Any]:
        """Return the task as a JSON object."""
        return asdict(self)

    @classmethod
    def from_event(cls, event: object) -> ShuffleTask:
        """Return the task that an event asks for.

        Raises:
            EventError: it is not one; names the field.
            ConfigError: its values do not go together.
        """
        fields = Fields(event, "shuffle event")
        values: Mapping[str, Any] = {
            "dataset": fields.text("dataset"),
            "version": fields.integer("version", least=1),
            "seed": fields.integer("seed", most=(1 << 64) - 1),
            "epoch": fields.integer("epoch", most=MAX_EPOCH),
            "lanes": fields.integer("lanes", least=1, most=MAX_LANES),
            "way": fields.choice("way", get_args(Way)),
            "slices": fields.integer("slices", least=1, most=MAX_SLICES),
            "scatters": fields.integer("scatters", most=MAX_SLICES, default=0),
            "object_bytes": fields.integer("object_bytes", least=1, most=MAX_SUPER_SAMPLE_BYTES),
            "step": fields.choice("step", get_args(Step)),
            "part": fields.integer("part", most=MAX_SLICES, default=0),
            "keep": fields.integer("keep", most=MAX_EPOCH, default=MAX_EPOCH),
        }
        fields.end()
        return cls(**values)


async def shuffle(event: object, deployment: Deployment, deadline: Deadline) -> dict[str, Any]:
    """Carry out the task that the event is, which may come any number of times, also at the same time.

    Returns:
        ``state``: ``complete``, or ``packing`` where the deadline came first and the same event goes on; and counts.

    Raises:
        DeadlineError: there is too little time; the same event may be tried again.
        EventError: the event is not a task, or of a data set that is none of this deployment's.
        StokerError: the task cannot be carried out; see :func:`perform`.
    """
    task = ShuffleTask.from_event(event)
    store = deployment.dataset(task.dataset)
    memory_bytes = usable_bytes(deployment.settings.memory_bytes)
    name = f"{task.step} {task.part} of epoch {task.epoch}"
    slow = "could not stop in time: the bucket is slow; what was recorded stays"
    async with deadline.limit(name, slow, late=True):
        with deployment.counted() as requests:
            done = await perform(store, task, memory_bytes=memory_bytes, stop_at_seconds=deadline.stop_at_seconds)
        return {**done, "requests": requests}


async def perform(
    store: Store, task: ShuffleTask, *, memory_bytes: int, stop_at_seconds: float = math.inf
) -> dict[str, Any]:
    """Carry out a task, and return how far it is as a JSON object: ``state`` is ``complete``, or else ``packing``.

    Args:
        store: where the data set is.
        task: what to do.
        memory_bytes: that may be used.
        stop_at_seconds: on the clock of the event loop, when nothing else is begun. A task that is not complete then
            goes on when it is carried out again.

    Cancelling leaves nothing behind but what the same task, carried out again, makes use of.

    Raises:
        NotFoundError: there is no such version of the data set.
        BudgetError: the memory is too small.
        DeadlineError: the time is too short.
        PackError: what must be done before is not done, or something else stands where the epoch belongs.
        StoreError: the store failed.
    """
    plain = store.wrapped if isinstance(store, RetryingReader) else store  # the fetcher has a patience of its own
    manifest = await read_manifest(plain, task.version)
    layout = EpochLayout(manifest, seed=task.seed, lanes=task.lanes, epoch=task.epoch)
    work = _Work(plain, task, layout, memory_bytes, stop_at_seconds)
    if task.step == "commit":
        return await work.commit()
    try:
        return await (work.scatter() if task.step == "scatter" else work.slice())
    except (PackError, NotFoundError):
        if await read_epoch(plain, layout) is None:
            raise
        return {"state": "complete"}  # somebody else has committed the epoch, and deleted what was scattered for it


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    store: Store
    task: ShuffleTask
    layout: EpochLayout
    memory_bytes: int
    stop_at_seconds: float

    # Where things are.

    @property
    def _folder(self) -> FolderStore:
        return FolderStore(self.store, self.layout.folder)

    @property
    def _scattered(self) -> FolderStore:
        return FolderStore(self.store, self.layout.folder + SCATTERED_FOLDER)

    def _slice_run(self, part: int) -> str:
        starts = self.layout.slice_starts(self.task.slices).tolist()
        return self.layout.run_id("slice", starts[part], starts[part + 1], self.task.object_bytes)

    def _scatter_run(self, part: int) -> str:
        task = self.task
        return self.layout.run_id("scatter", part, task.scatters, task.slices, task.object_bytes)

    def _cell_run(self, scatter: int, part: int) -> str:
        return self.layout.run_id("cell", self._scatter_run(scatter), part)

    def _scatter_rows(self) -> NDArray[np.int64]:
        """Return the first super-sample of each scatter, and the one behind the last: ``int64 [scatters + 1]``."""
        count = self.task.scatters
        return np.arange(count + 1) * len(self.layout.manifest) // count

    # The steps.

    async def commit(self) -> dict[str, Any]:
        """Make the epoch visible, once all slices are there."""
        starts = self.layout.slice_starts(self.task.slices)
        runs = [self._slice_run(part) for part in np.flatnonzero(np.diff(starts)).tolist()]
        return await commit_epoch(
            self.store, self.layout, runs, keep=self.task.keep, stop_at_seconds=self.stop_at_seconds
        )

    async def scatter(self) -> dict[str, Any]:
        """Write the samples of some super-samples, sorted by the slices that they belong to."""
        layout, manifest, part = self.layout, self.layout.manifest, self.task.part
        if await read_epoch(self.store, layout) is not None:  # and what was scattered for it is deleted
            return {"state": "complete"}
        first, last = self._scatter_rows()[part : part + 2].tolist()
        starts = np.concatenate([[0], np.cumsum(manifest.rows.samples, dtype=np.int64)])
        numbers = np.arange(starts[first], starts[last])
        rows = layout.rows_of(numbers)
        order = np.argsort(rows)
        cells = np.diff(np.searchsorted(rows[order], layout.slice_starts(self.task.slices)))
        sections = [(self._cell_run(part, each), int(count)) for each, count in enumerate(cells) if count]
        wanted = Group(*layout.order.locate(numbers[order]))

        async def samples(done: int) -> AsyncGenerator[Samples, None]:
            yield await read_whole(self._source(self.store, manifest), wanted[done:])

        result = await self._write(self._scattered, self._scatter_run(part), sections, samples)
        return {name if name in ("state", "run") else f"scattered_{name}": value for name, value in result.items()}

    async def slice(self) -> dict[str, Any]:
        """Write the samples of a slice, in their order."""
        layout = self.layout
        start, stop = layout.slice_starts(self.task.slices)[self.task.part : self.task.part + 2].tolist()
        run = self._slice_run(self.task.part)
        sections = [(run, count) for count in layout.lanes_within(start, stop)]
        read = {"ranged": self._by_ranges, "streamed": self._streamed, "scattered": self._gathered}[self.task.way]
        return await self._write(self._folder, run, sections, lambda done: read(start, done, stop))

    # The ways to read the samples at rows [start, stop) of the epoch, without the first ones, which are written.

    def _by_ranges(self, start: int, done: int, stop: int) -> AsyncGenerator[Samples, None]:
        return read_groups(self._source(self.store, self.layout.manifest), self._blocks(start + done, stop))

    def _blocks(self, start: int, stop: int) -> Iterator[Group]:
        for begin in range(start, stop, MOST_SAMPLES):
            rows = np.arange(begin, min(begin + MOST_SAMPLES, stop))
            yield Group(*self.layout.order.locate(self.layout.samples_of(rows)))

    async def _streamed(self, start: int, done: int, stop: int) -> AsyncGenerator[Samples, None]:
        wanted = Group(*self.layout.order.locate(self.layout.samples_of(np.arange(start + done, stop))))
        yield await read_whole(self._source(self.store, self.layout.manifest), wanted)

    async def _gathered(self, start: int, done: int, stop: int) -> AsyncGenerator[Samples, None]:
        cells, wanted = await self._cells(start, stop)
        yield await read_whole(self._source(self._scattered, cells), wanted[done:])

    async def _cells(self, start: int, stop: int) -> tuple[Manifest, Group]:
        """Return what was scattered to this slice, as a manifest, and where in it the slice's samples are, in order.

        A cell has the samples that one scatter had for one slice, in the order of the slice.
        """
        super_samples, _ = self.layout.order.locate(self.layout.samples_of(np.arange(start, stop)))
        scatters = np.searchsorted(self._scatter_rows(), super_samples, "right") - 1
        counts = np.bincount(scatters, minlength=self.task.scatters).tolist()
        found: dict[int, list[Any]] = {}

        async def read(scatter: int) -> None:
            record = await PartRecord.opened(self._scattered, self._scatter_run(scatter), self.layout.dataset)
            found[scatter] = _rows_of(record.written, self._cell_run(scatter, self.task.part))
            if sum(packed.samples for packed in found[scatter]) != counts[scatter]:
                raise PackError(f"scatter {scatter} of {self.task.scatters} has not come to slice {self.task.part} yet")

        present = [scatter for scatter, count in enumerate(counts) if count]
        await for_each(present, read, concurrency=_RECORDS_AT_ONCE)
        cells = Manifest(
            dataset=self.layout.dataset,
            version=1,
            schema=self.layout.manifest.schema,
            rows=Rows.of([packed for scatter in present for packed in found[scatter]]),
            runs=tuple(PackRun(self._cell_run(each, self.task.part), 0, len(found[each])) for each in present),
        )
        numbers = np.empty(len(scatters), np.int64)
        numbers[np.argsort(scatters, kind="stable")] = np.arange(len(scatters))
        borders = np.concatenate([[0], np.cumsum(cells.rows.samples, dtype=np.int64)])
        rows = np.searchsorted(borders, numbers, "right") - 1
        return cells, Group(rows, numbers - borders[rows])

    # What they have in common.

    async def _write(
        self, folder: FolderStore, run: str, sections: list[tuple[str, int]], samples: _Read
    ) -> dict[str, Any]:
        """Write a part from where its record says that it has come, as far as there is time."""
        record = await PartRecord.opened(folder, run, self.layout.dataset)
        config = WriteConfig(
            dataset=self.layout.dataset,
            schema=self.layout.manifest.schema,
            sections=sections,
            object_bytes=self.task.object_bytes,
            uploads=self._memory(self.layout.manifest).uploads,
            stop_at_seconds=self.stop_at_seconds,
        )
        async with aclosing(samples(record.samples)) as read:
            await PartWriter(folder, record, config).write(read)
        written = record.written
        return {
            "state": "complete" if record.samples == sum(count for _, count in sections) else "packing",
            "run": run,
            "samples": record.samples,
            "objects": len(record),
            "size_bytes": 0 if written is None else written.size_bytes,
        }

    def _memory(self, manifest: Manifest) -> TaskMemory:
        return TaskMemory.plan(
            self.memory_bytes, largest_bytes=manifest.largest_bytes, object_bytes=self.task.object_bytes
        )

    def _source(self, store: Readable, manifest: Manifest) -> SampleSource:
        memory = self._memory(manifest)
        fetcher = Fetcher(
            store,
            ring=Ring(memory.hedges, manifest.largest_bytes),  # for hedges only
            rng=random.Random(os.urandom(8)),  # noqa: S311 - jitter
            config=FetchConfig(hedge_burst=memory.hedges),
        )
        return SampleSource(
            manifest=manifest,
            fetcher=fetcher,
            memory=memory,
            stop_at_seconds=self.stop_at_seconds,
        )


def _rows_of(written: Manifest | None, run: str) -> list[Any]:
    """Return the super-samples of a run that a record has."""
    row = 0
    for each in () if written is None else written.runs:
        if each.run == run and written is not None:
            return [written.rows.packed(row + number, number) for number in range(each.rows)]
        row += each.rows
    return []
