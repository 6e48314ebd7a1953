"""Usage and its cost: data at rest, requests, machines, functions and a warm tier.

DELI's model has disks, machines and two kinds of request. This module adds the other lines of a bill: every operation,
retrieval and egress, machines that wait, functions, and functions that keep data in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from stoker._base.arguments import BoundedConfig, Positive
from stoker._base.meter import Egress, Operation
from stoker._base.sizes import format_count
from stoker._cost.prices import GB_BYTES, DiskPrices, FunctionPrices, MachinePrices, StorePrices
from stoker._pack.record import max_record_writes
from stoker.errors import ConfigError

HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class BillLine:
    """A line of a bill.

    Attributes:
        name: what is billed.
        quantity: billed amount, in ``unit``.
        unit: unit of the quantity.
        dollars: price of the quantity.

    Raises:
        ConfigError: the quantity or the price is not finite.
    """

    name: str
    quantity: float
    unit: str
    dollars: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.quantity) or not math.isfinite(self.dollars):
            raise ConfigError(f"{self.name}: {self.quantity} {self.unit} for ${self.dollars} are not finite")


def _storage_line(name: str, size_bytes: float, months: float, prices: StorePrices | DiskPrices) -> BillLine:
    return BillLine(name, size_bytes / GB_BYTES * months, "GB-months", prices.storage_dollars(size_bytes, months))


def total_dollars(parts: Sequence[BillLine]) -> float:
    """Return the sum of the lines, in dollars."""
    return math.fsum(part.dollars for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Usage(BoundedConfig):
    """Base of usage records; all their numbers are finite and not negative."""

    def __post_init__(self) -> None:
        BoundedConfig.__post_init__(self)  # super() does not know a class with slots
        for each in fields(self):
            value = getattr(self, each.name)
            numbers = value.values() if isinstance(value, Mapping) else [value]
            if any(isinstance(number, int | float) and not 0 <= number < math.inf for number in numbers):
                raise ConfigError(f"{each.name} must be a finite number of at least 0, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageUsage(_Usage):
    """Data in a bucket.

    Attributes:
        size_bytes: size of the stored data, in bytes.
        months: time for which it is stored, in months.
    """

    size_bytes: float
    months: float = 1.0

    def bill_lines(self, store: StorePrices) -> list[BillLine]:
        """Return the lines of the bill."""
        return [_storage_line("data at rest", self.size_bytes, self.months, store)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic(_Usage):
    """Requests to a bucket and the bytes that they transfer.

    Attributes:
        requests: operation → number of requests; a LIST is one page.
        read_bytes: bytes read in total.
        written_bytes: bytes written in total.
        egress: place of the reader.
    """

    requests: Mapping[Operation, float] = field(default_factory=dict)
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    egress: Egress = "same_region"

    def __add__(self, other: Traffic) -> Traffic:
        """Return the sum of both; they must have the same ``egress``."""
        if self.egress != other.egress:
            raise ConfigError(f"cannot add traffic with egress {self.egress} and {other.egress}")
        operations = dict.fromkeys([*self.requests, *other.requests])
        return Traffic(
            requests={each: self.requests.get(each, 0) + other.requests.get(each, 0) for each in operations},
            read_bytes=self.read_bytes + other.read_bytes,
            written_bytes=self.written_bytes + other.written_bytes,
            egress=self.egress,
        )

    def bill_lines(self, store: StorePrices) -> list[BillLine]:
        """Return the lines of the bill: one per operation, and one per price of bytes that is not 0."""
        lines = [
            BillLine(f"{operation} requests", count, "requests", count * store.request_dollars(operation))
            for operation, count in self.requests.items()
        ]
        for name, size_bytes, dollars_per_gb in (
            ("retrieval", self.read_bytes, store.read_dollars_per_gb),
            ("upload", self.written_bytes, store.write_dollars_per_gb),
            (f"egress, {self.egress.replace('_', ' ')}", self.read_bytes, store.egress_dollars_per_gb[self.egress]),
        ):
            if dollars_per_gb:
                lines.append(BillLine(name, size_bytes / GB_BYTES, "GB", size_bytes / GB_BYTES * dollars_per_gb))
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUsage(_Usage):
    """Training machines: n nodes for R = t_compute + t_wait, each with a disk of S.

    Attributes:
        nodes: number of machines.
        accelerators: number of accelerators of each machine that the job uses, and pays the share of; None for all.
        compute_hours: hours that each machine computes.
        wait_hours: hours that each machine waits for data, idle but billed.
        disk_bytes: disk size of each machine, in bytes.
        disk_months: time for which the disks exist, in months.
    """

    nodes: float
    accelerators: int | None = None
    compute_hours: float = 0.0
    wait_hours: float = 0.0
    disk_bytes: float = 0.0
    disk_months: float = 1.0

    def time_lines(self, machine: MachinePrices) -> list[BillLine]:
        """Return the lines of the machines' hours.

        Raises:
            ConfigError: ``accelerators`` is more than the machine has, or less than 1.
        """
        dollars_per_hour = machine.dollars_per_hour
        if self.accelerators is not None:
            if not 1 <= self.accelerators <= machine.accelerators:
                has = format_count(machine.accelerators, "accelerator")
                raise ConfigError(f"the machine {machine.name} has {has}, not {self.accelerators}")
            dollars_per_hour = self.accelerators * machine.dollars_per_accelerator_hour
        return [
            BillLine(name, self.nodes * hours, "node-hours", self.nodes * hours * dollars_per_hour)
            for name, hours in (("computing", self.compute_hours), ("waiting for data", self.wait_hours))
        ]

    def disk_lines(self, disk: DiskPrices) -> list[BillLine]:
        """Return the line of the machines' disks."""
        return [_storage_line("disks", self.nodes * self.disk_bytes, self.disk_months, disk)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionUsage(_Usage):
    """Calls of functions.

    Attributes:
        calls: number of calls.
        seconds: duration of each call without initialisation, in seconds.
        memory_bytes: configured memory, in bytes.
        vcpus: configured CPUs, if they are billed separately.
        cold_starts: number of calls that start an instance.
        init_seconds: billed initialisation time of a cold start, in seconds.
        tmp_bytes: configured size of ``/tmp``, in bytes.
        months: time over which the calls are spread, in months; prices fall with the use per month.
    """

    calls: float
    seconds: float
    memory_bytes: float
    vcpus: float = 0.0
    cold_starts: float = 0.0
    init_seconds: float = 0.0
    tmp_bytes: float = 0.0
    months: float = 1.0

    def bill_lines(self, prices: FunctionPrices, name: str = "functions") -> list[BillLine]:
        """Return the lines of the bill; each call, with its INIT, is rounded up to the platform's billing unit.

        Raises:
            ConfigError: ``tmp_bytes`` is set, but the platform has no ``/tmp``.
        """
        memory_gb = self.memory_bytes / GB_BYTES
        billed_seconds = prices.billed_seconds(self.seconds)
        run = self.calls * billed_seconds
        init = self.cold_starts * (prices.billed_seconds(self.seconds + self.init_seconds) - billed_seconds)
        run_dollars, all_dollars = (self._memory_dollars(prices, each) for each in (run, run + init))
        lines = [
            BillLine(f"{name}: requests", self.calls, "requests", self.calls * prices.dollars_per_request),
            BillLine(f"{name}: running", run * memory_gb, "GB-s", run_dollars),
        ]
        if init:
            lines.append(BillLine(f"{name}: INIT", init * memory_gb, "GB-s", all_dollars - run_dollars))
        if prices.dollars_per_vcpu_second:
            used = (run + init) * self.vcpus
            lines.append(BillLine(f"{name}: processors", used, "vCPU-s", used * prices.dollars_per_vcpu_second))
        if self.tmp_bytes:
            lines.append(self._tmp_line(prices, run + init, name))
        return lines

    def _memory_dollars(self, prices: FunctionPrices, seconds: float) -> float:
        return self.months * prices.memory_dollars(seconds * self.memory_bytes / GB_BYTES / self.months)

    def _tmp_line(self, prices: FunctionPrices, seconds: float, name: str) -> BillLine:
        if prices.dollars_per_tmp_gb_second is None:
            raise ConfigError(f"{prices.name}: there is no price of /tmp, files are in memory; add them to its size")
        used = seconds * max(0.0, self.tmp_bytes / GB_BYTES - prices.free_tmp_gb)
        return BillLine(f"{name}: /tmp", used, "GB-s", used * prices.dollars_per_tmp_gb_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmTierUsage(_Usage):
    """Functions that keep data in memory because they are called regularly.

    A. Wang et al., "InfiniCache" (FAST 2020), section 4.3: cost of serving, and of keeping functions warm.

    Attributes:
        functions: number of functions.
        memory_bytes: memory of each function, in bytes.
        hours: time for which they are kept, in hours.
        vcpus: CPUs of each function, if they are billed separately.
        warm_every_seconds: maximum time between two calls of a function, in seconds.
        warm_seconds: duration of a call that keeps a function warm, in seconds.
        served_bytes: bytes that all functions serve.
        serve_bytes_per_second: rate at which each function serves.
        serve_calls: number of calls that serve.
    """

    functions: int
    memory_bytes: float
    hours: float
    vcpus: float = 0.0
    warm_every_seconds: Positive[float] = 60.0
    warm_seconds: float = 0.002
    served_bytes: float = 0.0
    serve_bytes_per_second: Positive[float] = 75e6
    serve_calls: float = 0.0

    def bill_lines(self, prices: FunctionPrices) -> list[BillLine]:
        """Return the lines of the bill."""
        calls = self.functions * self.hours * 3600 / self.warm_every_seconds
        lines = self._call_lines(calls, self.warm_seconds, prices, "keeping warm")
        if self.served_bytes or self.serve_calls:
            seconds = self.served_bytes / self.serve_bytes_per_second / max(1.0, self.serve_calls)
            lines += self._call_lines(max(1.0, self.serve_calls), seconds, prices, "serving")
        return lines

    def _call_lines(self, calls: float, seconds: float, prices: FunctionPrices, name: str) -> list[BillLine]:
        used = FunctionUsage(
            calls=calls,
            seconds=seconds,
            memory_bytes=self.memory_bytes,
            vcpus=self.vcpus,
            months=max(1.0, self.hours / HOURS_PER_MONTH),
        )
        return used.bill_lines(prices, f"warm tier, {name}")


_MANIFEST_WRITES, _TRIAL_WRITES = 2, 1
"""Writes of the manifest and its copy; and the trial write, which a store that honours conditions refuses."""


def training_traffic(
    super_samples: int,
    size_bytes: int,
    *,
    epochs: int,
    ranks: int,
    hit_rate: float = 0.0,
    held_share: float = 0,
    egress: Egress = "same_region",
) -> Traffic:
    """Return the requests of a training run that reads super-samples whole.

    An epoch reads every super-sample once, and twice if two ranks share it. Retries and hedges are not counted; a
    loader never lists.

    Args:
        super_samples: number of super-samples of the data set.
        size_bytes: size of all super-samples, in bytes.
        epochs: number of epochs.
        ranks: number of ranks that share each epoch; each reads the manifest once.
        hit_rate: fraction of reads after the first epoch that a cache of one rank or node serves, 0 to 1.
        held_share: fraction of the super-samples that are read once in all, since a cache of all nodes keeps them.
        egress: place of the ranks.

    Raises:
        ConfigError: ``epochs``, ``ranks``, ``hit_rate`` or ``held_share`` is out of range.
    """
    if min(epochs, ranks) < 1 or not 0 <= hit_rate <= 1 or not 0 <= held_share <= 1:
        raise ConfigError(
            f"epochs ({epochs}) and ranks ({ranks}) must be at least 1, and hit_rate ({hit_rate}) and held_share "
            f"({held_share}) from 0 to 1"
        )
    uses = super_samples + (min(ranks, super_samples) - 1 if super_samples else 0)
    reads = held_share * super_samples + (1 - held_share) * uses * (1 + (epochs - 1) * (1 - hit_rate))
    mean_bytes = size_bytes / max(1, super_samples)
    return Traffic(requests={Operation.GET: ranks + reads}, read_bytes=reads * mean_bytes, egress=egress)


def packing_traffic(super_samples: int, size_bytes: int, *, egress: Egress = "same_region") -> Traffic:
    """Return the writes of packing a data set in one run: super-samples, pack records, the manifest and its copy.

    An upper bound: uploads that end at the same time share a pack record.
    """
    writes = super_samples + max_record_writes(super_samples) + _MANIFEST_WRITES + _TRIAL_WRITES
    return Traffic(requests={Operation.PUT: writes}, written_bytes=size_bytes, egress=egress)
