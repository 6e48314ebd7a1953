"""Cloud prices: a dated file of list prices, the arithmetic on it, and a limit on dollars.

The packaged ``prices.toml`` names its date and its sources. :meth:`Prices.load` or the variable ``STOKER_PRICES``
selects another file, which replaces it or, with ``overlay = true``, only the entries that it contains. Local folders
and memory cost nothing. A custom endpoint has the prices of the store that lists it under ``endpoints``, like
Cloudflare R2; any other endpoint has those of the cloud whose protocol it speaks, so a run against an emulator shows
what it would have cost. A file may be incomplete: looking up a missing price is an error.
"""

from __future__ import annotations

import datetime
import fnmatch
import itertools
import math
import os
import re
import tomllib
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args
from urllib.parse import urlsplit

from stoker._base.arguments import NotNegative, NumberBound
from stoker._base.fields import quote_value, read_record, read_toml
from stoker._base.meter import Egress, MeterReading, Operation, PriceKey, check_store_name
from stoker.errors import ConfigError, CostBudgetError, SpendingWarning

GB_BYTES = 1 << 30
_MAX_DOLLARS, _MAX_ACCELERATORS = 10**12, 1 << 16
"""Maximum price and number of accelerators of one entry; more is a typing error."""
_FREE_SCHEMES = ("file", "memory", "stoker+https", "stoker+http")  # a served data set is billed to its server
_CLOUD_STORES = ("s3", "s3express", "gs", "gsrapid")
_DIRECTORY_BUCKET = "--x-s3"
_WARN_SHARE = 0.8
_DOLLARS = re.compile(r"\$?\s*(\d[\d_,]*(?:\.\d+)?|\.\d+)\s*(USD)?", re.ASCII | re.IGNORECASE)
_MAX_TEXT = 40
_ROUNDING_TOLERANCE = 1e-9
"""Fraction of a billing unit up to which an excess over whole units is a floating-point error."""

T = TypeVar("T")

Dollars = Annotated[float, NumberBound(">=", 0), NumberBound("<=", _MAX_DOLLARS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ListPrices:
    """Base of all list prices, which are in US dollars.

    Attributes:
        name: name of the product: a service and storage class, a function, a machine, a kind of disk.
        region: region of these prices.
        source: URL of the price list.
    """

    name: str
    region: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoragePrices(_ListPrices):
    """Price of data at rest.

    Attributes:
        storage_dollars_per_gb_month: price of stored data, in dollars per GiB and month.
    """

    storage_dollars_per_gb_month: Dollars

    def storage_dollars(self, size_bytes: float, months: float = 1.0) -> float:
        """Return the cost of storing ``size_bytes`` for ``months``, in dollars."""
        return size_bytes / GB_BYTES * self.storage_dollars_per_gb_month * months


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePrices(_StoragePrices):
    """Prices of one storage class in one region.

    Attributes:
        read_dollars_per_gb: price of retrieval per GiB, in addition to the request.
        write_dollars_per_gb: price of upload per GiB, in addition to the request.
        dollars_per_1000_requests: operation → price of 1,000 requests; a LIST is one page.
        egress_dollars_per_gb: place of the reader → price of egress per GiB, in addition to retrieval.
        endpoints: hosts whose stores have these prices; ``*`` matches any text. A host with a port matches only that
            port.
    """

    read_dollars_per_gb: Dollars
    write_dollars_per_gb: Dollars
    dollars_per_1000_requests: Mapping[Operation, Dollars]
    egress_dollars_per_gb: Mapping[Egress, Dollars]
    endpoints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if missing := [*(set(Operation) - self.dollars_per_1000_requests.keys())]:
            raise ConfigError(f"dollars_per_1000_requests has no {', '.join(sorted(missing))}")
        if absent := {*get_args(Egress)} - self.egress_dollars_per_gb.keys():
            raise ConfigError(f"egress_dollars_per_gb has no {', '.join(sorted(absent))}")
        for host in self.endpoints:
            if not host or "/" in host:
                raise ConfigError(
                    f"endpoints has {quote_value(host)}, not a host such as *.example.com or 10.0.0.5:9000"
                )

    def request_dollars(self, operation: Operation) -> float:
        """Return the price of one request, in dollars."""
        return self.dollars_per_1000_requests[operation] / 1000

    def transfer_dollars(self, *, read_bytes: int, written_bytes: int, egress: Egress) -> float:
        """Return the cost of transferred bytes, without requests, in dollars."""
        out = self.read_dollars_per_gb + self.egress_dollars_per_gb[egress]
        return (read_bytes * out + written_bytes * self.write_dollars_per_gb) / GB_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTier:
    """Price of a month's memory use above a threshold.

    Attributes:
        above_gb_seconds: threshold, in GiB-seconds per month.
        dollars_per_gb_second: price of use above the threshold, per GiB-second.
    """

    above_gb_seconds: NotNegative[float]
    dollars_per_gb_second: Dollars


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionPrices(_ListPrices):
    """Prices of a serverless function in one region.

    Attributes:
        dollars_per_request: price of one invocation.
        dollars_per_gb_second: price of configured memory, per GiB-second.
        dollars_per_vcpu_second: price of configured CPUs, per second; 0 where memory includes them.
        dollars_per_tmp_gb_second: price of ``/tmp`` beyond the free part, per GiB-second; None if a function has no
            disk and keeps files in memory.
        free_tmp_gb: free part of ``/tmp``, in GiB.
        billing_unit_seconds: unit to which the duration of an invocation is rounded up, in seconds; 0 for none.
        tiers: prices of memory above certain amounts of use per month, lowest threshold first.
    """

    dollars_per_request: Dollars
    dollars_per_gb_second: Dollars
    dollars_per_vcpu_second: Dollars
    dollars_per_tmp_gb_second: Dollars | None = None
    free_tmp_gb: NotNegative[float] = 0.0
    billing_unit_seconds: NotNegative[float] = 0.001
    tiers: tuple[PriceTier, ...] = ()

    def __post_init__(self) -> None:
        above = [0.0, *(tier.above_gb_seconds for tier in self.tiers)]
        if any(low >= high for low, high in itertools.pairwise(above)):
            raise ConfigError(f"the tiers of {self.name} are not in rising order of above_gb_seconds, from above 0")

    def billed_seconds(self, seconds: float) -> float:
        """Return the billed duration of an invocation that ran for ``seconds``, in seconds."""
        if not self.billing_unit_seconds:
            return seconds
        return math.ceil(seconds / self.billing_unit_seconds - _ROUNDING_TOLERANCE) * self.billing_unit_seconds

    def memory_dollars(self, gb_seconds: float) -> float:
        """Return the cost of a month's use of memory, by price tiers, in dollars."""
        dollars, rate, above = 0.0, self.dollars_per_gb_second, 0.0
        for tier in self.tiers:
            dollars += rate * (min(gb_seconds, tier.above_gb_seconds) - min(gb_seconds, above))
            rate, above = tier.dollars_per_gb_second, tier.above_gb_seconds
        return dollars + rate * (gb_seconds - min(gb_seconds, above))

    def invocation_dollars(self, *, seconds: float, memory_bytes: int, vcpus: float) -> float:
        """Return the cost of one invocation in the first price tier; ``seconds`` includes a billed initialisation."""
        rate = memory_bytes / GB_BYTES * self.dollars_per_gb_second + vcpus * self.dollars_per_vcpu_second
        return self.dollars_per_request + self.billed_seconds(seconds) * rate


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPrices(_StoragePrices):
    """Prices of a machine's disk in one region; the provisioned size is billed.

    Attributes:
        included_mb_per_second: throughput that the price includes, in MB/s; None if it depends on size and machine.
    """

    included_mb_per_second: NotNegative[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePrices(_ListPrices):
    """Price of a machine in one region, computing or idle.

    Attributes:
        dollars_per_hour: price of the whole machine per hour.
        accelerators: number of its accelerators.
        memory_gb: its memory, in GiB; 0 if not listed.
    """

    dollars_per_hour: Dollars
    accelerators: Annotated[int, NumberBound(">=", 0), NumberBound("<=", _MAX_ACCELERATORS)]
    memory_gb: NotNegative[float] = 0.0

    @property
    def dollars_per_accelerator_hour(self) -> float:
        """Price of one accelerator's share of the machine, or of the whole machine if it has none."""
        return self.dollars_per_hour / max(1, self.accelerators)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePrices(_ListPrices):
    """Prices of a managed Redis or Valkey in one region, either by node or by stored and transferred data.

    Attributes:
        dollars_per_node_hour: price of one node per hour.
        node_gb: data that one node holds, in GiB; 0 if nodes are not billed.
        dollars_per_gb_hour: price of stored data, per GiB and hour.
        dollars_per_gb_moved: price of data read and written, per GiB.
    """

    dollars_per_node_hour: Dollars = 0.0
    node_gb: NotNegative[float] = 0.0
    dollars_per_gb_hour: Dollars = 0.0
    dollars_per_gb_moved: Dollars = 0.0

    def nodes(self, size_bytes: float) -> int:
        """Return the number of nodes that hold ``size_bytes``; 0 if nodes are not billed."""
        return math.ceil(size_bytes / GB_BYTES / self.node_gb) if self.node_gb else 0


_FREE = StorePrices(
    name="this machine",
    region="local",
    source="",
    storage_dollars_per_gb_month=0.0,
    read_dollars_per_gb=0.0,
    write_dollars_per_gb=0.0,
    dollars_per_1000_requests=dict.fromkeys(Operation, 0.0),
    egress_dollars_per_gb=dict.fromkeys(get_args(Egress), 0.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The prices of a price file.

    Example:
        >>> from stoker import Operation, Prices
        >>> f"{1e6 * Prices.load().request_dollars('s3', Operation.GET):.2f} USD"
        '0.40 USD'

    Attributes:
        date: day on which the prices were looked up.
        stores: ``s3``, ``s3express``, ``gs``, ``gsrapid``, or any other name (``r2``, ``minio``) → prices.
        functions: name of the platform → prices.
        machines: type of the machine → prices.
        disks: kind of disk → prices.
        caches: name of the managed Redis or Valkey → prices.
    """

    date: datetime.date
    stores: Mapping[str, StorePrices]
    functions: Mapping[str, FunctionPrices]
    machines: Mapping[str, MachinePrices] = field(default_factory=dict)
    disks: Mapping[str, DiskPrices] = field(default_factory=dict)
    caches: Mapping[str, CachePrices] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> Prices:
        """Read a price file: ``path``, else the file that ``STOKER_PRICES`` names, else the packaged one.

        A file with ``overlay = true`` takes each price that it does not contain from the packaged file.

        Raises:
            ConfigError: the file cannot be read, or a price is missing, unknown or not a non-negative number.
        """
        chosen = path or os.environ.get("STOKER_PRICES")
        if not chosen:
            return _load_packaged()
        document = read_toml(Path(chosen))
        try:
            is_overlay = document.pop("overlay", False)
            if not isinstance(is_overlay, bool):
                raise ConfigError(f"overlay must be true or false, not {quote_value(is_overlay)}")
            return _parse_prices(_merge_tables(_read_packaged(), document) if is_overlay else document)
        except ConfigError as error:
            raise ConfigError(f"price file {chosen}: {error}") from None

    def store(self, store: str | PriceKey) -> StorePrices:
        """Return the prices of a store by its key, or by its URL (``s3://bucket/prefix``), scheme (``s3``) or path.

        The key's name takes precedence, then its endpoint if a store in the price file lists it, then its URL. A bucket
        whose name ends in ``--x-s3`` is an S3 directory bucket, with the prices of Express One Zone. The name of a GCS
        bucket does not show its storage class: use ``gsrapid`` for Rapid storage.

        Raises:
            ConfigError: the file has no prices for such stores.
        """
        key = PriceKey(store) if isinstance(store, str) else store
        if key.name in _FREE_SCHEMES:
            return _FREE
        if key.name:
            return _lookup(self.stores, key.name, "a store named")
        scheme, separator, rest = key.url.partition("://")
        if not separator and scheme not in _CLOUD_STORES:
            scheme = "file"
        if scheme in _FREE_SCHEMES:
            return _FREE
        if scheme == "s3" and rest.partition("/")[0].endswith(_DIRECTORY_BUCKET):
            scheme = "s3express"
        if key.endpoint:
            scheme = self._find_by_endpoint(key.endpoint) or scheme
        if scheme not in self.stores:
            raise ConfigError(
                f"there are no prices for {scheme}:// stores, only for {', '.join(self.stores)}; give a store class of "
                "your own an attribute that names its prices, such as prices = 's3', or 'file' for none"
            )
        return self.stores[scheme]

    def _find_by_endpoint(self, endpoint: str) -> str:
        """Return the name of the store that lists an endpoint, or an empty string."""
        parts = urlsplit(endpoint)
        host = parts.hostname or ""
        hosts = (host, parts.netloc.rpartition("@")[2].lower())
        for name, prices in self.stores.items():
            if any(fnmatch.fnmatchcase(each, pattern.lower()) for pattern in prices.endpoints for each in hosts):
                return name
        return ""

    def function(self, platform: str) -> FunctionPrices:
        """Return the prices of functions on a platform.

        Raises:
            ConfigError: the file has none.
        """
        return _lookup(self.functions, platform, "functions on")

    def machine(self, name: str) -> MachinePrices:
        """Return the prices of a machine.

        Raises:
            ConfigError: the file has none.
        """
        return _lookup(self.machines, name, "the machine")

    def disk(self, kind: str) -> DiskPrices:
        """Return the prices of a kind of disk.

        Raises:
            ConfigError: the file has none.
        """
        return _lookup(self.disks, kind, "disks of the kind")

    def request_dollars(self, scheme: str, operation: Operation) -> float:
        """Return the price of one request, in dollars; ``scheme`` is anything that :meth:`store` accepts."""
        return self.store(scheme).request_dollars(operation)

    def dollars(self, reading: MeterReading) -> float:
        """Return the maximum cost of the requests, retrieval and egress that a meter counted, without storage.

        Raises:
            ConfigError: the file has no prices for such a store.
        """
        store = self.store(reading.key or reading.url)
        billed = {operation: count - reading.not_billed[operation] for operation, count in reading.requests.items()}
        requests = sum(count * store.request_dollars(operation) for operation, count in billed.items())
        read_bytes = reading.read_bytes + reading.broken_bytes
        return requests + store.transfer_dollars(
            read_bytes=read_bytes, written_bytes=reading.written_bytes, egress=reading.egress
        )


def _lookup(table: Mapping[str, T], name: str, what: str) -> T:
    if name not in table:
        known = f"only for {', '.join(table)}" if table else "which the price file omits"
        raise ConfigError(f"there are no prices for {what} {name}, {known}")
    return table[name]


def _merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the values of ``above`` and, in each table, those of ``below`` that it lacks."""
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        is_table = isinstance(value, dict) and isinstance(under, dict)
        merged[name] = _merge_tables(under, value) if is_table else value  # type: ignore[arg-type]  # both are tables
    return merged


def _read_packaged() -> dict[str, Any]:
    return tomllib.loads(resources.files("stoker").joinpath("prices.toml").read_text("utf-8"))


@cache
def _load_packaged() -> Prices:
    """Return the packaged prices, which take milliseconds to parse."""
    return _parse_prices(_read_packaged())


def _parse_prices(document: dict[str, Any]) -> Prices:
    currency = document.pop("currency", None)
    if currency != "USD":
        raise ConfigError(f'currency must be "USD", not {quote_value(currency)}')
    prices = read_record(Prices, document, "prices")
    for name in prices.stores:
        check_store_name(name)
    return prices


def parse_dollars(text: float | str) -> float:
    """Return a positive amount of US dollars.

    Args:
        text: number, or text such as ``"5 USD"``, ``"$5"`` or ``"0.25"``.

    Raises:
        ConfigError: ``text`` is not a positive amount.
    """
    dollars = math.nan
    if isinstance(text, int | float) and not isinstance(text, bool):
        with suppress(OverflowError):  # an integer of hundreds of digits
            dollars = float(text)
    elif isinstance(text, str) and len(text) <= _MAX_TEXT and (match := _DOLLARS.fullmatch(text.strip())):
        dollars = float(match[1].replace("_", "").replace(",", ""))
    if not 0 < dollars < math.inf:
        raise ConfigError(f"dollars must be a positive amount such as 5.0 or '5 USD', not {text!r:.{_MAX_TEXT}}")
    return dollars


class CostBudget:
    """Spending limit of one rank of a job.

    Args:
        budget_dollars: budget of the whole job, in dollars.
        ranks: number of ranks that share it evenly.
    """

    __slots__ = ("_description", "_dollars", "_has_warned")

    def __init__(self, budget_dollars: float, ranks: int = 1) -> None:
        self._dollars = budget_dollars / ranks
        self._description = f"${self._dollars:.6g}" + (
            f", this rank's share of a budget of ${budget_dollars:.6g} for {ranks} ranks" if ranks > 1 else ""
        )
        self._has_warned = False

    def check(self, spent_dollars: float) -> None:
        """Warn once when 80% of the limit are spent.

        Raises:
            CostBudgetError: the limit is spent.
        """
        if spent_dollars >= self._dollars:
            raise CostBudgetError(
                f"${spent_dollars:.6g} of {self._description} has been spent; to continue, save state_dict() and load "
                "it into a loader with a new budget",
                spent_dollars=spent_dollars,
                budget_dollars=self._dollars,
            )
        if not self._has_warned and spent_dollars >= _WARN_SHARE * self._dollars:
            self._has_warned = True
            warnings.warn(f"${spent_dollars:.6g} of {self._description} has been spent", SpendingWarning, stacklevel=4)
