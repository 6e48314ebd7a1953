"""Reads groups of samples from anywhere into ring slots, range by range, each value verified by its checksum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker._fetch.batch_source import ReadingParts
from stoker._fetch.forecast import Forecast, forecast_groups
from stoker._fetch.group_plan import ReadLimits
from stoker._fetch.group_steps import Group, GroupSteps
from stoker._fetch.head_memory import HeadMemory
from stoker._fetch.values import Values, read_values
from stoker._format.schema import Column
from stoker._format.supersample import is_small
from stoker._memory.ring import RingStateError
from stoker._order.order import OrderConfig
from stoker._order.partition import Dealing
from stoker._order.steps import Stretch

__all__ = ["GroupReading"]


class GroupReading:
    """A :class:`~stoker._fetch.batch_source.Reading` whose items are groups; all heads stay in memory.

    Args:
        parts: what to read with.
        limits: what a group may take.
    """

    def __init__(self, parts: ReadingParts, limits: ReadLimits) -> None:
        self._parts = parts
        self._limits = limits
        self._heads = HeadMemory(parts.manifest, parts.columns)
        self._large = [name for name, column in parts.columns.items() if not is_small(column)]
        self._placed: dict[int, tuple[Group, NDArray[np.int64]]] = {}

    async def prepare(self) -> None:
        """Read all heads, the first time.

        Raises:
            StoreError: one could not be had.
            FormatError: one is not what the manifest says.
        """
        await self._heads.load(self._parts.fetcher)

    def forecast(self, order: OrderConfig, partition: Dealing) -> Forecast:
        """Return what an epoch of the rank will take, with the heads, which only the first one reads."""
        return forecast_groups(self._parts.manifest, self._parts.columns, self._limits, partition)

    def steps(self, stretch: Stretch) -> GroupSteps:
        """Return the steps of a stretch."""
        samples = self._parts.manifest.rows.samples
        return GroupSteps(samples, stretch, self._sizes_of, self._limits.payload_bytes)

    def _extents(self, group: Group) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return first byte and end of every value to read, ``int64 [large columns, samples]``."""
        extents = np.empty((2, len(self._large), len(group)), np.int64)
        for number, name in enumerate(self._large):
            extents[:, number] = self._heads.extents(name, group.super_samples, group.rows)
        return extents[0], extents[1]

    def _sizes_of(self, group: Group) -> NDArray[np.int64]:
        starts, ends = self._extents(group)
        sizes: NDArray[np.int64] = (ends - starts).sum(axis=0)
        return sizes

    async def fetch(self, ref: Group, *, urgent: bool = False) -> int:
        """Return a READY slot with the large values of a group.

        Raises:
            StoreError: one could not be had.
            RingStateError: no slot was free.
        """
        ring = self._parts.ring
        slot = ring.acquire()
        if slot is None:
            raise RingStateError(f"no free slot for {len(ref)} samples: {ring!r}")
        try:
            starts, ends = self._extents(ref)
            wanted = [self._heads.checksums(name, ref.super_samples, ref.rows) for name in self._large]
            values = Values(
                samples=ref,
                columns=self._large,
                starts=starts,
                ends=ends,
                checksums=np.array(wanted, np.uint32).reshape(starts.shape),
            )
            reads = values.plan(self._limits)
            manifest, fetcher, into = self._parts.manifest, self._parts.fetcher, ring.view(slot, ring.slot_bytes)
            addresses = await read_values(values, reads, into, manifest=manifest, fetcher=fetcher, urgent=urgent)
        except BaseException:
            ring.abort(slot)
            raise
        self._placed[slot] = ref, addresses
        ring.commit(slot)
        return slot

    def picked(self, slots: Sequence[int], which: NDArray[np.int64], rows: NDArray[np.int64]) -> GroupRows:
        """Return where samples of groups lie; ``rows`` are their places in the group."""
        ring = self._parts.ring
        placed = [self._placed[slot] for slot in slots]
        firsts = np.cumsum([0, *(len(group) for group, _ in placed)])
        places = firsts[which] + rows
        addresses = np.concatenate(
            [addresses + ring.offset(slot) for slot, (_, addresses) in zip(slots, placed, strict=True)], axis=1
        )[:, places]
        return GroupRows(
            memory=ring.memory,
            heads=self._heads,
            addresses=dict(zip(self._large, addresses, strict=True)),
            super_samples=np.concatenate([group.super_samples for group, _ in placed])[places],
            rows=np.concatenate([group.rows for group, _ in placed])[places],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRows:
    """Samples of groups in slots: :class:`~stoker._fetch.gather.PickedRows`.

    Attributes:
        memory: that large values lie in.
        heads: in which the small ones lie.
        addresses: large column → ``int64 [samples]``, where in the memory each value starts.
        super_samples: ``int64 [samples]``, each sample's manifest row.
        rows: ``int64 [samples]``, its row in that super-sample.
    """

    memory: memoryview
    heads: HeadMemory
    addresses: Mapping[str, NDArray[np.int64]]
    super_samples: NDArray[np.int64]
    rows: NDArray[np.int64]

    def fixed(self, name: str, column: Column) -> tuple[memoryview, NDArray[np.int64]]:
        """Return the memory and the address of each value."""
        if name in self.addresses:
            return self.memory, self.addresses[name]
        return self.heads.memory, self.heads.addresses(name, self.super_samples, self.rows, column.element_bytes)

    def ragged(self, name: str, column: Column) -> tuple[memoryview, NDArray[np.int64], NDArray[np.int64]]:
        """Return the memory, the address of each value and its length in elements."""
        starts, ends = self.heads.extents(name, self.super_samples, self.rows)
        return self.memory, self.addresses[name], (ends - starts) // column.element_bytes
