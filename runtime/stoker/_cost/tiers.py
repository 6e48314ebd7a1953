"""Compares the cost of the same reads from a bucket and from each kind of tier, over some hours.

Every tier is filled from the bucket by one GET per object, and is in the same region as the trainers: egress from the
bucket's region is paid once per object for a tier, and for every read of the bucket. Storage in the bucket is not
included, since the bucket exists in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from stoker._base.meter import Egress, Operation
from stoker._cost.prices import (
    GB_BYTES,
    CachePrices,
    DiskPrices,
    FunctionPrices,
    MachinePrices,
    Prices,
    StorePrices,
)
from stoker._cost.usage import HOURS_PER_MONTH, BillLine, MachineUsage, StorageUsage, Traffic, total_dollars
from stoker._cost.workload import ReadWorkload, WarmFunctions

Priced = TypeVar("Priced", StorePrices, MachinePrices, DiskPrices, CachePrices)

ZONAL_STORES, DISKS = ("s3express", "gsrapid"), ("gp3", "pd-balanced")
"""Names in the price file, by preference; only those with prices in the region are compared."""
SERVER_MEMORY_FRACTION = 0.9
"""Fraction of a server's memory for objects; the rest is for the system, the process and transfers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCost:
    """Cost of a workload that reads from one place.

    Attributes:
        place: the bucket or kind of tier that holds the data.
        of: name of the billed product in the price list; empty if there is none.
        region: region of the prices.
        count: number of billed products, such as nodes or disks.
        work: the workload.
        parts: lines of the bill; None if the price file has no price.
        limit: what limits this place, as a short phrase.
    """

    place: str
    of: str = ""
    region: str = ""
    count: int = 1
    work: ReadWorkload
    parts: tuple[BillLine, ...] | None
    limit: str

    @property
    def dollars(self) -> float | None:
        """Cost of the whole workload; None without a price."""
        return None if self.parts is None else total_dollars(self.parts)

    @property
    def dollars_per_read(self) -> float | None:
        """Cost of the workload divided by its reads; None without a price."""
        return None if self.dollars is None else self.dollars / self.work.reads


@dataclass(frozen=True, slots=True, kw_only=True)
class TierComparison:
    """Compares the bucket and the tiers at the prices of the functions' region.

    Attributes:
        work: the workload.
        prices: all prices.
        store: prices of the bucket.
        functions: prices of the functions.
        disk: prices of the trainers' disks; None for the region's usual kind.
        trainer: prices and memory of the trainers' machine; None if unknown.
        warm: settings of warm functions.
    """

    work: ReadWorkload
    prices: Prices
    store: StorePrices
    functions: FunctionPrices
    disk: DiskPrices | None = None
    trainer: MachinePrices | None = None
    warm: WarmFunctions = field(default_factory=WarmFunctions)

    def costs(self) -> list[TierCost]:
        """Return the cost of each place: the bucket first, then the tiers."""
        return [
            self._bucket(),
            *self._zonal(),
            self._disks(),
            self._memory(),
            self._servers(),
            self._cache(),
            self._warm(),
        ]

    def _bucket(self) -> TierCost:
        return self._cost(
            "bucket",
            tuple(self._read_lines(self.work.reads, self.store, self.work.egress)),
            "time to the first byte",
            self.store,
        )

    def _zonal(self) -> Iterable[TierCost]:
        """Yield the cost of a zonal bucket, unless the bucket itself is zonal."""
        store = next(iter(self._in_region(_select_entries(self.prices.stores, ZONAL_STORES))), None)
        if store is None:
            yield self._unpriced("bucket in one zone")
        elif store is not self.store:
            months = self.work.hours / HOURS_PER_MONTH
            written = Traffic(requests={Operation.PUT: self.work.shared_fill_objects}, written_bytes=self._filled_bytes)
            lines = [
                *self._fill_lines(self.work.shared_fill_objects),
                *written.bill_lines(store),
                *StorageUsage(size_bytes=self.work.size_bytes, months=months).bill_lines(store),
                *self._read_lines(self.work.reads, store),
            ]
            limit = "one zone; reads are billed by the byte" if store.read_dollars_per_gb else "one zone"
            yield self._cost("bucket in one zone", tuple(lines), limit, store)

    def _disks(self) -> TierCost:
        disk = self.disk or next(iter(self._in_region(_select_entries(self.prices.disks, DISKS))), None)
        if disk is None:
            return self._unpriced("disk of each trainer")
        months = self.work.hours / HOURS_PER_MONTH
        trainers = MachineUsage(nodes=self.work.trainers, disk_bytes=self._own_bytes, disk_months=months)
        rate = disk.included_mb_per_second
        limit = "the disk's rate" if rate is None else f"{rate:g} MB/s a disk"
        return self._cost(
            "disk of each trainer",
            (*self._fill_lines(self._own_objects), *trainers.disk_lines(disk)),
            f"{limit}; each trainer fills its own",
            disk,
            self.work.trainers,
        )

    def _memory(self) -> TierCost:
        """Return the cost of the trainers' own memory: only the reads that fill it."""
        limit = f"{self._own_bytes / GB_BYTES:.3g} GiB of free memory on each trainer"
        if self.trainer is not None and self.trainer.memory_gb:
            limit += f", which has {self.trainer.memory_gb:g} GiB"
        return self._cost("memory of each trainer", tuple(self._fill_lines(self._own_objects)), limit)

    def _servers(self) -> TierCost:
        """Return the cost of the cheapest machines without accelerators whose memory holds all objects."""
        fitting = [
            (math.ceil(self.work.size_bytes / (SERVER_MEMORY_FRACTION * machine.memory_gb * GB_BYTES)), machine)
            for machine in self._in_region(self.prices.machines.values())
            if machine.memory_gb and not machine.accelerators
        ]
        if not fitting:
            return self._unpriced("stoker tier serve")
        count, machine = min(fitting, key=lambda each: (each[0] * each[1].dollars_per_hour, each[0]))
        hours = count * self.work.hours
        return self._cost(
            "stoker tier serve",
            (
                *self._fill_lines(self.work.shared_fill_objects),
                BillLine("servers", hours, "node-hours", hours * machine.dollars_per_hour),
            ),
            "one core and the network of each server",
            machine,
            count,
        )

    def _cache(self) -> TierCost:
        """Return the cost of the cheapest managed cache that holds all objects."""
        caches = self._in_region(self.prices.caches.values())
        if not caches:
            return self._unpriced("managed Valkey or Redis")
        lines = {cache.name: self._cache_lines(cache) for cache in caches}
        cache = min(caches, key=lambda each: total_dollars(lines[each.name]))
        return self._cost(
            "managed Valkey or Redis",
            (*self._fill_lines(self.work.shared_fill_objects), *lines[cache.name]),
            "needs a Tier of your own",
            cache,
            max(1, cache.nodes(self.work.size_bytes)),
        )

    def _cache_lines(self, cache: CachePrices) -> list[BillLine]:
        """Return the lines of a cache that is billed by node, or by stored and transferred data."""
        if nodes := cache.nodes(self.work.size_bytes):
            hours = nodes * self.work.hours
            return [BillLine("cache nodes", hours, "node-hours", hours * cache.dollars_per_node_hour)]
        gb_hours = self.work.size_bytes / GB_BYTES * self.work.hours
        moved_gb = self.work.read_bytes / GB_BYTES
        return [
            BillLine("cached data", gb_hours, "GB-hours", gb_hours * cache.dollars_per_gb_hour),
            BillLine("cached data: moved", moved_gb, "GB", moved_gb * cache.dollars_per_gb_moved),
        ]

    def _warm(self) -> TierCost:
        lines = (*self._fill_lines(self.work.shared_fill_objects), *self.warm.bill_lines(self.work, self.functions))
        limit = f"{self.warm.shards} functions per read; the platform reclaims instances"
        return self._cost("warm functions", lines, limit, self.functions, self.warm.nodes(self.work))

    @property
    def _filled_bytes(self) -> float:
        return min(self.work.size_bytes, self.work.shared_fill_objects * self.work.object_bytes)

    @property
    def _own_bytes(self) -> float:
        """Bytes in each trainer's own cache, which keeps everything that the trainer has read."""
        return min(self.work.size_bytes, self.work.own_fill_objects * self.work.object_bytes)

    @property
    def _own_objects(self) -> float:
        """Number of objects that all trainers read from the bucket, each for its own cache."""
        return self.work.trainers * self.work.own_fill_objects

    def _in_region(self, table: Iterable[Priced]) -> list[Priced]:
        """Return the entries with prices in the functions' region."""
        return [each for each in table if each.region == self.functions.region]

    def _fill_lines(self, objects: float) -> list[BillLine]:
        """Return the lines of reading ``objects`` objects from the bucket once."""
        parts = self._read_lines(objects, self.store, self.work.egress)
        return [replace(part, name=f"filling: {part.name}") for part in parts]

    def _read_lines(self, reads: float, store: StorePrices, egress: Egress = "same_region") -> list[BillLine]:
        read_bytes = reads * self.work.object_bytes
        return Traffic(requests={Operation.GET: reads}, read_bytes=read_bytes, egress=egress).bill_lines(store)

    def _cost(
        self,
        place: str,
        parts: tuple[BillLine, ...],
        limit: str,
        product: StorePrices | DiskPrices | MachinePrices | CachePrices | FunctionPrices | None = None,
        count: int = 1,
    ) -> TierCost:
        name, region = ("", "") if product is None else (product.name, product.region)
        return TierCost(place=place, of=name, region=region, count=count, work=self.work, parts=parts, limit=limit)

    def _unpriced(self, place: str) -> TierCost:
        limit = f"the price file has no price for {self.functions.region}"
        return TierCost(place=place, work=self.work, parts=None, limit=limit)


def _select_entries(table: Mapping[str, Priced], names: Iterable[str]) -> list[Priced]:
    """Return the entries of ``names`` that are in the table."""
    return [table[name] for name in names if name in table]
