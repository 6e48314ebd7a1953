"""Brings the samples of a data set that does not fit in memory into another order, in two passes.

The samples in the new order are cut into slices that fit in memory, and the super-samples into scatters. A scatter
reads its super-samples and writes a **cell** for each slice: the samples that belong there, in the slice's order. A
slice then reads one cell of each scatter (Sanders, "Random Permutations on Distributed, External and Hierarchical
Memory", IPL 1998, with a computed permutation instead of random destinations, so that any process finds the same
places).
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker._base.task_group import for_each
from stoker._fetch.fetcher import FetchConfig, Fetcher
from stoker._fetch.range_plan import SampleGroup
from stoker._format.manifest import Manifest, ManifestRows, PackRun, sample_starts
from stoker._memory.ring import Ring
from stoker._order.epoch_layout import EpochLayout
from stoker._pack.part_writer import PartRecord, PartWriter, WriteConfig
from stoker._pack.stored_samples import SampleSource, StoredSamples, TaskMemory, read_whole
from stoker.abc import Readable, Store
from stoker.errors import PackError

_RECORD_CONCURRENCY = 16

ReadSamples = Callable[[int], AsyncGenerator[StoredSamples, None]]
"""Reads the samples of a part, in order, without the given number at its start, which are written already."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scatter:
    """The reading and writing of one permuted data set, in any number of processes.

    Attributes:
        store: store of the data set, without retries of its own.
        folder: folder of the cells and of the scatters' records.
        layout: order of the samples, as rows of the new data set.
        slice_starts: first row of each slice, and the row behind the last, ``int64 [slices + 1]``.
        scatters: number of parts that the super-samples are cut into; 0 if slices read the super-samples themselves.
        object_bytes: limit of the data of a written super-sample.
        memory_bytes: memory that a scatter or a slice may use.
        stop_at_seconds: time on the clock of the event loop after which no more work is begun.
    """

    store: Readable
    folder: Store
    layout: EpochLayout
    slice_starts: NDArray[np.int64]
    scatters: int
    object_bytes: int
    memory_bytes: int
    stop_at_seconds: float = math.inf

    async def write(self, part: int) -> dict[str, Any]:
        """Write the samples of one scatter, sorted by the slices that they belong to; see :func:`write_part`."""
        layout, manifest = self.layout, self.layout.manifest
        first, last = self._scatter_rows[part : part + 2].tolist()
        starts = sample_starts(manifest.rows.samples)
        numbers = np.arange(starts[first], starts[last])
        rows = layout.rows_of(numbers)
        order = np.argsort(rows)
        cells = np.diff(np.searchsorted(rows[order], self.slice_starts))
        sections = [(self._cell_run(part, each), int(count)) for each, count in enumerate(cells) if count]
        wanted = SampleGroup(*layout.order.locate(numbers[order]))

        async def samples(done: int) -> AsyncGenerator[StoredSamples, None]:
            yield await read_whole(self.source(self.store, manifest), wanted[done:])

        return await self.write_part(self.folder, self._scatter_run(part), sections, samples)

    async def read(self, part: int, done: int = 0) -> StoredSamples:
        """Return the samples of a slice without the first ``done``, in order.

        Raises:
            PackError: a scatter is not complete.
            MemoryBudgetError: the slice does not fit in memory.
        """
        if not self.scatters:
            rows = np.arange(self.slice_starts[part] + done, self.slice_starts[part + 1])
            wanted = SampleGroup(*self.layout.order.locate(self.layout.samples_of(rows)))
            return await read_whole(self.source(self.store, self.layout.manifest), wanted)
        cells, wanted = await self._open_cells(part)
        return await read_whole(self.source(self.folder, cells), wanted[done:])

    async def write_part(
        self, folder: Store, run: str, sections: Sequence[tuple[str, int]], samples: ReadSamples
    ) -> dict[str, Any]:
        """Continue to write a part after the samples in its record, as far as there is time; return its progress.

        Args:
            folder: folder of the part's super-samples and record.
            run: name of the record.
            sections: run and number of samples of each section, in order.
            samples: reads the samples of the part.
        """
        dataset = self.layout.dataset
        record = await PartRecord.open(folder, run, dataset)
        config = WriteConfig(
            dataset=dataset,
            schema=self.layout.manifest.schema,
            sections=sections,
            object_bytes=self.object_bytes,
            uploads=self._plan_memory(self.layout.manifest).uploads,
            stop_at_seconds=self.stop_at_seconds,
        )
        async with aclosing(samples(record.samples)) as read:
            await PartWriter(folder, record, config).write(read)
        return {
            "state": "complete" if record.samples == sum(count for _, count in sections) else "packing",
            "run": run,
            "samples": record.samples,
            "objects": len(record),
            "size_bytes": 0 if record.written is None else record.written.size_bytes,
        }

    def source(self, store: Readable, manifest: Manifest) -> SampleSource:
        """Return a data set as a source of samples, with the memory and the time of this one."""
        memory = self._plan_memory(manifest)
        fetcher = Fetcher(
            store,
            ring=Ring(memory.hedges, manifest.largest_bytes),  # for hedges only
            rng=random.Random(os.urandom(8)),  # noqa: S311 - jitter
            config=FetchConfig(hedge_burst=memory.hedges),
        )
        return SampleSource(manifest=manifest, fetcher=fetcher, memory=memory, stop_at_seconds=self.stop_at_seconds)

    def _plan_memory(self, manifest: Manifest) -> TaskMemory:
        return TaskMemory.plan(self.memory_bytes, largest_bytes=manifest.largest_bytes, object_bytes=self.object_bytes)

    def _scatter_run(self, part: int) -> str:
        slices = len(self.slice_starts) - 1
        return self.layout.run_id("scatter", part, self.scatters, slices, self.object_bytes)

    def _cell_run(self, scatter: int, part: int) -> str:
        return self.layout.run_id("cell", self._scatter_run(scatter), part)

    @cached_property
    def _scatter_rows(self) -> NDArray[np.int64]:
        """First super-sample of each scatter, and the end of the last one: ``int64 [scatters + 1]``."""
        return np.arange(self.scatters + 1) * len(self.layout.manifest) // self.scatters

    async def _open_cells(self, part: int) -> tuple[Manifest, SampleGroup]:
        """Return a manifest of the cells of a slice, and the places of the slice's samples in it, in order.

        A cell has the samples that one scatter wrote for one slice, in the order of the slice.
        """
        start, stop = self.slice_starts[part : part + 2].tolist()
        super_samples, _ = self.layout.order.locate(self.layout.samples_of(np.arange(start, stop)))
        scatters = np.searchsorted(self._scatter_rows, super_samples, "right") - 1
        counts = np.bincount(scatters, minlength=self.scatters).tolist()
        arrays: dict[int, list[Any]] = {}

        async def read(scatter: int) -> None:
            record = await PartRecord.open(self.folder, self._scatter_run(scatter), self.layout.dataset)
            arrays[scatter] = _rows_of(record.written, self._cell_run(scatter, part))
            if sum(packed.samples for packed in arrays[scatter]) != counts[scatter]:
                raise PackError(
                    f"scatter {scatter} of {self.scatters} has not written all samples of slice {part} "
                    "yet; complete the scatters first"
                )

        present = [scatter for scatter, count in enumerate(counts) if count]
        await for_each(present, read, concurrency=_RECORD_CONCURRENCY)
        cells = Manifest(
            dataset=self.layout.dataset,
            version=1,
            schema=self.layout.manifest.schema,
            rows=ManifestRows.of([packed for scatter in present for packed in arrays[scatter]]),
            runs=tuple(PackRun(self._cell_run(each, part), 0, len(arrays[each])) for each in present),
        )
        numbers = np.empty(len(scatters), np.int64)
        numbers[np.argsort(scatters, kind="stable")] = np.arange(len(scatters))
        borders = sample_starts(cells.rows.samples)
        rows = np.searchsorted(borders, numbers, "right") - 1
        return cells, SampleGroup(rows, numbers - borders[rows])


def _rows_of(written: Manifest | None, run: str) -> list[Any]:
    """Return the super-samples of a run in a record."""
    row = 0
    for each in () if written is None else written.runs:
        if each.run == run and written is not None:
            return [written.rows.record(row + number, number) for number in range(each.rows)]
        row += each.rows
    return []
