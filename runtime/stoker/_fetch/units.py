"""Units of super-samples, for a ``window`` order that permutes runs of rows instead of whole super-samples.

A unit is a group of samples whose rows are consecutive, so :class:`UnitReader` reads it as :mod:`stoker._fetch.groups`
reads groups: one range per large column, each value verified by its checksum. The head of a super-sample is read before
its first unit, and stays in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from stoker._fetch.fetcher import Fetcher
from stoker._fetch.gather import NEW_ARRAYS, BatchArrays
from stoker._fetch.groups import RangedGroupReader
from stoker._fetch.mapped_objects import MappedObjects
from stoker._fetch.range_plan import ReadForecast, ReadLimits, SampleGroup, count_units_read, mean_row_bytes
from stoker._format.manifest import Manifest
from stoker._format.schema import Column
from stoker._memory.budget import UNIT_GAP_SHARE
from stoker._memory.unit_ring import UnitRing
from stoker._order.order import OrderConfig
from stoker._order.sharding import Sharding
from stoker._order.steps import PositionRange, SuperSampleSteps
from stoker._order.units import Units


class UnitReader(RangedGroupReader):
    """Reads items that are units, by number; fetches on the event loop, locates rows on any thread.

    Args:
        manifest: index of the data set.
        columns: name → column, of the wanted columns.
        fetcher: reads bytes.
        ring: ring to read into, which only this reader fills.
        limits: limits of the reads of a unit; their slot is as large as each unit needs.
        units: units of the data set.
        arrays: makes the arrays of batches.
        mapped: objects in memory that processes share, whose ranges are copied; None for none.
    """

    def __init__(
        self,
        manifest: Manifest,
        columns: Mapping[str, Column],
        fetcher: Fetcher,
        ring: UnitRing,
        limits: ReadLimits,
        units: Units,
        arrays: BatchArrays = NEW_ARRAYS,
        mapped: MappedObjects | None = None,
    ) -> None:
        super().__init__(manifest, columns, fetcher, ring, limits, arrays, mapped)
        self._unit_ring, self._units = ring, units

    async def prepare(self) -> None:
        """Do nothing: the head of a super-sample is read before its first unit."""

    def forecast(self, order: OrderConfig, partition: Sharding) -> ReadForecast:
        """Return the expected requests and bytes of the rank's first epoch, which also reads the heads of its units.

        Each column outside the head counts as one request of each unit, unless units are whole super-samples.
        """
        manifest, units = self._manifest, len(self._units)
        count = count_units_read(manifest, order, partition)
        rows = mean_row_bytes(manifest, self.columns)
        ranges = len(rows) if units > len(manifest) else min(1, len(rows))
        share_unread = (1.0 - count / units) ** (units / len(manifest))  # of the super-samples
        heads = round(len(manifest) * (1.0 - share_unread))
        head_bytes = int(manifest.rows.head_bytes.sum(dtype=np.int64)) / len(manifest)
        size_bytes = sum(rows.values()) * manifest.samples / units * count + head_bytes * heads
        return ReadForecast(requests=count * ranges + heads, size_bytes=round(size_bytes))

    def steps(self, positions: PositionRange) -> SuperSampleSteps:
        """Return the steps of a range of the order, whose items are units."""
        self._unit_ring.restart()
        return SuperSampleSteps(self._units, positions)

    async def fetch(self, ref: int, *, urgent: bool = False) -> int:
        """Return a READY slot with the large values of a unit.

        Raises:
            StoreError: the head or a value could not be read.
            FormatError: the head does not match the manifest.
            MemoryBudgetError: the consumer waits for the unit, and those that it uses leave no room for it.
            RingStateError: no slot was free.
        """
        ring = self._unit_ring
        with ring.fill_slot(f"unit {ref}", 0) as slot:
            ring.begin(slot, ref)
            super_sample, rows = self._units.rows_of(ref)
            await self._heads.load_head(self._fetcher, super_sample)
            group = SampleGroup(np.full(len(rows), super_sample), np.arange(rows.start, rows.stop))
            values = self._values(group)
            room_bytes = values.size_bytes + values.size_bytes // UNIT_GAP_SHARE
            reads = values.plan(replace(self._limits, slot_bytes=room_bytes))
            into = await ring.place(slot, reads.size_bytes)
            await self._read(slot, values, reads, into, ring.offset_of(slot), urgent=urgent)
        return slot
