"""What is used, and what each of it costs: data at rest, requests, machines, functions and a warm tier.

DELI's model has disks, machines and two kinds of request. Here are the rest of a bill's lines: every operation, bytes
that are retrieved or leave the region, machines that wait, functions, and functions that keep data in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from stoker._base.arguments import Bounded, Positive
from stoker._base.meter import Egress, Operation
from stoker._base.sizes import counted
from stoker._cost.prices import GB_BYTES, DiskPrices, FunctionPrices, MachinePrices, StorePrices
from stoker._pack.record import record_writes
from stoker.errors import ConfigError

HOURS_A_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class Part:
    """A line of a bill.

    Attributes:
        name: what is paid for.
        quantity: how much of it.
        unit: of the quantity.
        dollars: for all of it.

    Raises:
        ConfigError: it is more than a number can hold.
    """

    name: str
    quantity: float
    unit: str
    dollars: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.quantity) or not math.isfinite(self.dollars):
            raise ConfigError(f"{self.name}: {self.quantity} {self.unit} for ${self.dollars} are beyond counting")


def _rest(name: str, size_bytes: float, months: float, prices: StorePrices | DiskPrices) -> Part:
    return Part(name, size_bytes / GB_BYTES * months, "GB-months", prices.storage_dollars(size_bytes, months))


def total_dollars(parts: Sequence[Part]) -> float:
    """Return what all lines come to."""
    return math.fsum(part.dollars for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use(Bounded):
    """Something that is used; all numbers of it are finite and not negative."""

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)  # super() does not know a class with slots
        for each in fields(self):
            value = getattr(self, each.name)
            numbers = value.values() if isinstance(value, Mapping) else [value]
            if any(isinstance(number, int | float) and not 0 <= number < math.inf for number in numbers):
                raise ConfigError(f"{each.name} is a number from 0, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(_Use):
    """Data in a bucket.

    Attributes:
        size_bytes: at rest,
        months: for so long.
    """

    size_bytes: float
    months: float = 1.0

    def parts(self, store: StorePrices) -> list[Part]:
        """Return the lines."""
        return [_rest("data at rest", self.size_bytes, self.months, store)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic(_Use):
    """Requests to a bucket and the bytes that they move.

    Attributes:
        requests: by operation; a LIST is one page.
        read_bytes: by all reads.
        written_bytes: by all writes.
        egress: where the reader is.
    """

    requests: Mapping[Operation, float] = field(default_factory=dict)
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    egress: Egress = "same_region"

    def __add__(self, other: Traffic) -> Traffic:
        """Return both together, which must have the same reader."""
        if self.egress != other.egress:
            raise ConfigError(f"egress is {self.egress} of the one and {other.egress} of the other")
        operations = dict.fromkeys([*self.requests, *other.requests])
        return Traffic(
            requests={each: self.requests.get(each, 0) + other.requests.get(each, 0) for each in operations},
            read_bytes=self.read_bytes + other.read_bytes,
            written_bytes=self.written_bytes + other.written_bytes,
            egress=self.egress,
        )

    def parts(self, store: StorePrices) -> list[Part]:
        """Return the lines: one for each operation, and for bytes what is not free."""
        lines = [
            Part(f"{operation} requests", count, "requests", count * store.request_dollars(operation))
            for operation, count in self.requests.items()
        ]
        for name, size_bytes, dollars_per_gb in (
            ("retrieval", self.read_bytes, store.read_dollars_per_gb),
            ("upload", self.written_bytes, store.write_dollars_per_gb),
            (f"egress, {self.egress.replace('_', ' ')}", self.read_bytes, store.egress_dollars_per_gb[self.egress]),
        ):
            if dollars_per_gb:
                lines.append(Part(name, size_bytes / GB_BYTES, "GB", size_bytes / GB_BYTES * dollars_per_gb))
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines(_Use):
    """Machines that train: n nodes for R = t_compute + t_wait, each with a disk of S.

    Attributes:
        nodes: how many.
        accelerators: of each that the job has, and pays its share for; None all of the machine's.
        compute_hours: of each.
        wait_hours: of each, for data: the accelerator is paid and idle.
        disk_bytes: of each.
        disk_months: for so long.
    """

    nodes: float
    accelerators: int | None = None
    compute_hours: float = 0.0
    wait_hours: float = 0.0
    disk_bytes: float = 0.0
    disk_months: float = 1.0

    def time_parts(self, machine: MachinePrices) -> list[Part]:
        """Return the lines of the machines' hours.

        Raises:
            ConfigError: the machine has fewer accelerators.
        """
        dollars_per_hour = machine.dollars_per_hour
        if self.accelerators is not None:
            if not 1 <= self.accelerators <= machine.accelerators:
                has = counted(machine.accelerators, "accelerator")
                raise ConfigError(f"{machine.name}, has {has}, not {self.accelerators}")
            dollars_per_hour = self.accelerators * machine.dollars_per_accelerator_hour
        return [
            Part(name, self.nodes * hours, "node-hours", self.nodes * hours * dollars_per_hour)
            for name, hours in (("computing", self.compute_hours), ("waiting for data", self.wait_hours))
        ]

    def disk_parts(self, disk: DiskPrices) -> list[Part]:
        """Return the line of the machines' disks."""
        return [_rest("disks", self.nodes * self.disk_bytes, self.disk_months, disk)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls(_Use):
    """Calls of functions.

    Attributes:
        calls: how many.
        seconds: of each, INIT aside.
        memory_bytes: as configured.
        vcpus: as configured, where they are billed apart.
        cold_starts: of the calls, how many start an instance.
        init_seconds: that a start takes; it is billed.
        tmp_bytes: of ``/tmp``, as configured.
        months: over which the calls are spread; prices fall with what is used in a month.
    """

    calls: float
    seconds: float
    memory_bytes: float
    vcpus: float = 0.0
    cold_starts: float = 0.0
    init_seconds: float = 0.0
    tmp_bytes: float = 0.0
    months: float = 1.0

    def parts(self, prices: FunctionPrices, name: str = "functions") -> list[Part]:
        """Return the lines. Each call is rounded up to what the platform bills by, its INIT with it.

        Raises:
            ConfigError: there is a ``/tmp`` where the platform has none.
        """
        memory_gb, billed_seconds = self.memory_bytes / GB_BYTES, prices.billed_seconds(self.seconds)
        run = self.calls * billed_seconds
        init = self.cold_starts * (prices.billed_seconds(self.seconds + self.init_seconds) - billed_seconds)
        run_dollars, all_dollars = (self._memory_dollars(prices, each) for each in (run, run + init))
        lines = [
            Part(f"{name}: requests", self.calls, "requests", self.calls * prices.dollars_per_request),
            Part(f"{name}: running", run * memory_gb, "GB-s", run_dollars),
        ]
        if init:
            lines.append(Part(f"{name}: INIT", init * memory_gb, "GB-s", all_dollars - run_dollars))
        if prices.dollars_per_vcpu_second:
            used = (run + init) * self.vcpus
            lines.append(Part(f"{name}: processors", used, "vCPU-s", used * prices.dollars_per_vcpu_second))
        if self.tmp_bytes:
            lines.append(self._tmp_part(prices, run + init, name))
        return lines

    def _memory_dollars(self, prices: FunctionPrices, seconds: float) -> float:
        return self.months * prices.memory_dollars(seconds * self.memory_bytes / GB_BYTES / self.months)

    def _tmp_part(self, prices: FunctionPrices, seconds: float, name: str) -> Part:
        if prices.dollars_per_tmp_gb_second is None:
            raise ConfigError(f"{prices.name}: there is no price of /tmp, files are in memory; count them in that")
        used = seconds * max(0.0, self.tmp_bytes / GB_BYTES - prices.free_tmp_gb)
        return Part(f"{name}: /tmp", used, "GB-s", used * prices.dollars_per_tmp_gb_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmTier(_Use):
    """Functions that keep data in memory because they are called again and again.

    A. Wang et al., "InfiniCache" (FAST 2020), section 4.3: what is served, and what keeps functions warm.

    Attributes:
        functions: how many.
        memory_bytes: of each.
        hours: for so long.
        vcpus: of each, where they are billed apart.
        warm_every_seconds: a function is called at least so often.
        warm_seconds: of such a call.
        served_bytes: that they hand out,
        serve_bytes_per_second: each at this rate,
        serve_calls: in so many calls.
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

    def parts(self, prices: FunctionPrices) -> list[Part]:
        """Return the lines."""
        calls = self.functions * self.hours * 3600 / self.warm_every_seconds
        lines = self._calls(calls, self.warm_seconds, prices, "keeping warm")
        if self.served_bytes or self.serve_calls:
            seconds = self.served_bytes / self.serve_bytes_per_second / max(1.0, self.serve_calls)
            lines += self._calls(max(1.0, self.serve_calls), seconds, prices, "serving")
        return lines

    def _calls(self, calls: float, seconds: float, prices: FunctionPrices, name: str) -> list[Part]:
        used = Calls(
            calls=calls,
            seconds=seconds,
            memory_bytes=self.memory_bytes,
            vcpus=self.vcpus,
            months=max(1.0, self.hours / HOURS_A_MONTH),
        )
        return used.parts(prices, f"warm tier, {name}")


_MANIFESTS, _TRIALS = 2, 1
"""The manifest and its copy; and the write that a store must refuse if it honours conditions."""


def training_traffic(
    super_samples: int,
    size_bytes: int,
    *,
    epochs: int,
    ranks: int,
    hit_rate: float = 0.0,
    egress: Egress = "same_region",
) -> Traffic:
    """Return the requests of a run whose super-samples are read whole.

    An epoch reads every super-sample once, and those that the order cuts between two ranks twice. Retries and hedges
    are not counted; start-up never lists.

    Args:
        super_samples: of the data set.
        size_bytes: of them all.
        epochs: how many.
        ranks: that share each epoch; each reads the manifest once.
        hit_rate: of look-ups behind the first epoch, that a cache answers.
        egress: where the ranks are.

    Raises:
        ConfigError: a figure cannot be.
    """
    if min(epochs, ranks) < 1 or not 0 <= hit_rate <= 1:
        raise ConfigError(f"epochs {epochs} and ranks {ranks} are at least 1, and hit_rate {hit_rate} is from 0 to 1")
    reads = super_samples + (min(ranks, super_samples) - 1 if super_samples else 0)
    times = 1 + (epochs - 1) * (1 - hit_rate)
    mean_bytes = size_bytes / max(1, super_samples)
    return Traffic(
        requests={Operation.GET: ranks + reads * times}, read_bytes=reads * mean_bytes * times, egress=egress
    )


def packing_traffic(super_samples: int, size_bytes: int, *, egress: Egress = "same_region") -> Traffic:
    """Return the writes that make a data set in one run: super-samples, pack records, the manifest and its copy.

    Uploads that end at the same time share a record, so there may be fewer of these.
    """
    writes = super_samples + record_writes(super_samples) + _MANIFESTS + _TRIALS
    return Traffic(requests={Operation.PUT: writes}, written_bytes=size_bytes, egress=egress)
