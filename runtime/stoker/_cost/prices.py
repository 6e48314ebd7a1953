"""What clouds charge: a dated file of list prices, the arithmetic on it, and a limit on dollars.

The packaged ``prices.toml`` names its date and its sources. Another file takes its place through :meth:`Prices.load` or
the variable ``STOKER_PRICES``: whole, or with ``overlay = true`` only in what it has. Local folders and memory cost
nothing. A custom endpoint is priced as the store that lists it under ``endpoints``, as Cloudflare R2 does; any other as
the cloud whose protocol it speaks, so an emulator shows what a run would have cost. A file need not have prices of
everything: what is asked for and missing is an error then.
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

from stoker._base.arguments import Bound, NotNegative
from stoker._base.fields import read_record, read_toml, shown
from stoker._base.meter import Egress, Operation, PriceKey, Reading, check_store_name
from stoker.errors import BudgetExceededError, ConfigError, SpendingWarning

GB_BYTES = 1 << 30
_MOST_DOLLARS, _MOST_ACCELERATORS = 10**12, 1 << 16
"""Of one thing; more is a slip of the pen."""
_FREE_SCHEMES = ("file", "memory", "stoker+https", "stoker+http")  # who serves pays
_CLOUD_STORES = ("s3", "s3express", "gs", "gsrapid")
_DIRECTORY_BUCKET = "--x-s3"
_WARN_SHARE = 0.8
_DOLLARS = re.compile(r"\$?\s*(\d[\d_,]*(?:\.\d+)?|\.\d+)\s*(USD)?", re.ASCII | re.IGNORECASE)
_MAX_TEXT = 40
_ROUNDING = 1e-9
"""Of a billing unit: what lies above a whole number of units by less than this is an error of floating point."""

T = TypeVar("T")

Dollars = Annotated[float, Bound(">=", 0), Bound("<=", _MOST_DOLLARS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """Prices as somebody lists them, in dollars.

    Attributes:
        name: of what is paid for: a service and storage class, a function, a machine, a kind of disk.
        region: where these prices hold.
        source: address of the price list.
    """

    name: str
    region: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Storage(_Listed):
    """What data at rest cost.

    Attributes:
        storage_dollars_per_gb_month: of their size.
    """

    storage_dollars_per_gb_month: Dollars

    def storage_dollars(self, size_bytes: float, months: float = 1.0) -> float:
        """Return what ``size_bytes`` cost."""
        return size_bytes / GB_BYTES * self.storage_dollars_per_gb_month * months


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePrices(_Storage):
    """What one storage class costs in one region.

    Attributes:
        read_dollars_per_gb: retrieval, on top of the request.
        write_dollars_per_gb: upload, on top of the request.
        dollars_per_1000_requests: of each operation; a LIST is one page.
        egress_dollars_per_gb: on top of retrieval, by where the reader is.
        endpoints: hosts whose stores have these prices; ``*`` stands for any text. A host with a port matches that
            port only.
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
                raise ConfigError(f"endpoints has {shown(host)}, not a host such as *.example.com or 10.0.0.5:9000")

    def request_dollars(self, operation: Operation) -> float:
        """Return what one request costs."""
        return self.dollars_per_1000_requests[operation] / 1000

    def transfer_dollars(self, *, read_bytes: int, written_bytes: int, egress: Egress) -> float:
        """Return what moving bytes costs, requests aside."""
        out = self.read_dollars_per_gb + self.egress_dollars_per_gb[egress]
        return (read_bytes * out + written_bytes * self.write_dollars_per_gb) / GB_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTier:
    """A price that holds for the part of a month's use above an amount.

    Attributes:
        above_gb_seconds: the amount.
        dollars_per_gb_second: of what is used beyond it.
    """

    above_gb_seconds: NotNegative[float]
    dollars_per_gb_second: Dollars


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionPrices(_Listed):
    """What a serverless function costs in one region.

    Attributes:
        dollars_per_request: of one invocation.
        dollars_per_gb_second: of configured memory.
        dollars_per_vcpu_second: of configured processors, where they are billed apart from memory.
        dollars_per_tmp_gb_second: of a configured ``/tmp`` beyond what is free; None where a function has no disk,
            and its files are in its memory.
        free_tmp_gb: of ``/tmp``, that costs nothing.
        billing_unit_seconds: to a multiple of which the duration of each invocation is rounded up.
        tiers: prices of memory for a month's use above certain amounts, lowest first.
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
        """Return for how long an invocation that ran for ``seconds`` is billed."""
        if not self.billing_unit_seconds:
            return seconds
        return math.ceil(seconds / self.billing_unit_seconds - _ROUNDING) * self.billing_unit_seconds

    def memory_dollars(self, gb_seconds: float) -> float:
        """Return what a month's use of memory costs, by tiers."""
        dollars, rate, above = 0.0, self.dollars_per_gb_second, 0.0
        for tier in self.tiers:
            dollars += rate * (min(gb_seconds, tier.above_gb_seconds) - min(gb_seconds, above))
            rate, above = tier.dollars_per_gb_second, tier.above_gb_seconds
        return dollars + rate * (gb_seconds - min(gb_seconds, above))

    def invocation_dollars(self, *, seconds: float, memory_bytes: int, vcpus: float) -> float:
        """Return what one invocation costs in the first tier; ``seconds`` includes a billed initialisation."""
        rate = memory_bytes / GB_BYTES * self.dollars_per_gb_second + vcpus * self.dollars_per_vcpu_second
        return self.dollars_per_request + self.billed_seconds(seconds) * rate


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPrices(_Storage):
    """What a disk of a machine costs in one region: of its size, whatever is on it.

    Attributes:
        included_mb_per_second: rate that the price of its size includes; None where it depends on size and machine.
    """

    included_mb_per_second: NotNegative[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePrices(_Listed):
    """What a machine costs in one region, whether it computes or waits.

    Attributes:
        dollars_per_hour: of the whole machine.
        accelerators: that it has.
        memory_gb: that it has; 0 where it is not listed.
    """

    dollars_per_hour: Dollars
    accelerators: Annotated[int, Bound(">=", 0), Bound("<=", _MOST_ACCELERATORS)]
    memory_gb: NotNegative[float] = 0.0

    @property
    def dollars_per_accelerator_hour(self) -> float:
        """An accelerator's share of the machine; the whole of one that has none."""
        return self.dollars_per_hour / max(1, self.accelerators)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePrices(_Listed):
    """What a managed Redis or Valkey costs in one region: nodes of one size, or data at rest and bytes moved.

    Attributes:
        dollars_per_node_hour: of one node.
        node_gb: of data that one node holds; 0 where nothing is billed by nodes.
        dollars_per_gb_hour: of the data held.
        dollars_per_gb_moved: of the bytes read and written.
    """

    dollars_per_node_hour: Dollars = 0.0
    node_gb: NotNegative[float] = 0.0
    dollars_per_gb_hour: Dollars = 0.0
    dollars_per_gb_moved: Dollars = 0.0

    def nodes(self, size_bytes: float) -> int:
        """Return how many nodes hold so many bytes; 0 where nothing is billed by nodes."""
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
    """A price file.

    Attributes:
        date: when its prices were looked up.
        stores: ``s3``, ``s3express``, ``gs``, ``gsrapid``, and any other name (``r2``, ``minio``) → prices.
        functions: platform → prices.
        machines: machine → prices.
        disks: kind of disk → prices.
        caches: managed Redis or Valkey → prices.
    """

    date: datetime.date
    stores: Mapping[str, StorePrices]
    functions: Mapping[str, FunctionPrices]
    machines: Mapping[str, MachinePrices] = field(default_factory=dict)
    disks: Mapping[str, DiskPrices] = field(default_factory=dict)
    caches: Mapping[str, CachePrices] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> Prices:
        """Read a price file: ``path``, else the one that ``STOKER_PRICES`` names, else the packaged one.

        What a file with ``overlay = true`` leaves out, down to a single price, is that of the packaged file.

        Raises:
            ConfigError: the file cannot be read, or a price is missing, unknown or not a non-negative number.
        """
        chosen = path or os.environ.get("STOKER_PRICES")
        if not chosen:
            return _packaged()
        document = read_toml(Path(chosen))
        try:
            is_overlay = document.pop("overlay", False)
            if not isinstance(is_overlay, bool):
                raise ConfigError(f"overlay is {shown(is_overlay)}, not true or false")
            return _parsed(_overlaid(_packaged_document(), document) if is_overlay else document)
        except ConfigError as error:
            raise ConfigError(f"price file {chosen}: {error}") from None

    def store(self, store: str | PriceKey) -> StorePrices:
        """Return the prices of a store by its key, or by its URL (``s3://bucket/prefix``), scheme (``s3``) or path.

        A key's name decides; then its endpoint, if a store in the price file lists it; then its URL. A bucket whose
        name ends in ``--x-s3`` is an S3 directory bucket and is priced as Express One Zone. The name of one of GCS does
        not tell its class, so Rapid storage is asked for as ``gsrapid``.

        Raises:
            ConfigError: there are no prices for such stores.
        """
        key = PriceKey(store) if isinstance(store, str) else store
        if key.name in _FREE_SCHEMES:
            return _FREE
        if key.name:
            return _entry(self.stores, key.name, "a store named")
        scheme, separator, rest = key.url.partition("://")
        if not separator and scheme not in _CLOUD_STORES:
            scheme = "file"
        if scheme in _FREE_SCHEMES:
            return _FREE
        if scheme == "s3" and rest.partition("/")[0].endswith(_DIRECTORY_BUCKET):
            scheme = "s3express"
        if key.endpoint:
            scheme = self._name_of(key.endpoint) or scheme
        if scheme not in self.stores:
            raise ConfigError(
                f"there are no prices for {scheme}:// stores, only for {', '.join(self.stores)}; a store of your own "
                "names its prices with an attribute, as prices = 's3', or 'file' for none"
            )
        return self.stores[scheme]

    def _name_of(self, endpoint: str) -> str:
        """Return the name of the store that lists an endpoint; empty if none does."""
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
            ConfigError: there are none.
        """
        return _entry(self.functions, platform, "functions on")

    def machine(self, name: str) -> MachinePrices:
        """Return the prices of a machine.

        Raises:
            ConfigError: there are none.
        """
        return _entry(self.machines, name, "the machine")

    def disk(self, kind: str) -> DiskPrices:
        """Return the prices of a kind of disk.

        Raises:
            ConfigError: there are none.
        """
        return _entry(self.disks, kind, "disks of the kind")

    def request_dollars(self, scheme: str, operation: Operation) -> float:
        """Return what one request costs; ``scheme`` is anything that :meth:`store` takes."""
        return self.store(scheme).request_dollars(operation)

    def dollars(self, reading: Reading) -> float:
        """Return what a store asks for what a meter counted, at most: requests, retrieval and egress, not storage.

        Raises:
            ConfigError: there are no prices for such a store.
        """
        store = self.store(reading.key or reading.url)
        billed = {operation: count - reading.not_billed[operation] for operation, count in reading.requests.items()}
        requests = sum(count * store.request_dollars(operation) for operation, count in billed.items())
        read_bytes = reading.read_bytes + reading.broken_bytes
        return requests + store.transfer_dollars(
            read_bytes=read_bytes, written_bytes=reading.written_bytes, egress=reading.egress
        )


def _entry(table: Mapping[str, T], name: str, what: str) -> T:
    if name not in table:
        known = f"only for {', '.join(table)}" if table else "which the price file leaves out"
        raise ConfigError(f"there are no prices for {what} {name}, {known}")
    return table[name]


def _overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the values of ``above``, and below them, table by table, what it leaves out."""
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        is_table = isinstance(value, dict) and isinstance(under, dict)
        merged[name] = _overlaid(under, value) if is_table else value  # type: ignore[arg-type]  # both are tables
    return merged


def _packaged_document() -> dict[str, Any]:
    return tomllib.loads(resources.files("stoker").joinpath("prices.toml").read_text("utf-8"))


@cache
def _packaged() -> Prices:
    """Return the packaged prices, which take milliseconds to parse."""
    return _parsed(_packaged_document())


def _parsed(document: dict[str, Any]) -> Prices:
    currency = document.pop("currency", None)
    if currency != "USD":
        raise ConfigError(f"currency {shown(currency)} is not USD")
    prices = read_record(Prices, document, "prices")
    for name in prices.stores:
        check_store_name(name)
    return prices


def parse_dollars(text: float | str) -> float:
    """Return an amount of US dollars that is more than nothing.

    Args:
        text: a number, or text such as ``"5 USD"``, ``"$5"`` or ``"0.25"``.

    Raises:
        ConfigError: it is no such amount.
    """
    dollars = math.nan
    if isinstance(text, int | float) and not isinstance(text, bool):
        with suppress(OverflowError):  # an integer of hundreds of digits
            dollars = float(text)
    elif isinstance(text, str) and len(text) <= _MAX_TEXT and (match := _DOLLARS.fullmatch(text.strip())):
        dollars = float(match[1].replace("_", "").replace(",", ""))
    if not 0 < dollars < math.inf:
        raise ConfigError(f"{text!r:.{_MAX_TEXT}} is not an amount of dollars; write for example '5 USD' or 5.0")
    return dollars


class Allowance:
    """What one rank of a job may spend.

    Args:
        budget_dollars: of the whole job.
        takers: how many share it evenly.
    """

    __slots__ = ("_dollars", "_has_warned", "_of")

    def __init__(self, budget_dollars: float, takers: int = 1) -> None:
        self._dollars = budget_dollars / takers
        self._of = f"${self._dollars:.6g}" + (
            f", this rank's part of a budget of ${budget_dollars:.6g} for {takers} ranks" if takers > 1 else ""
        )
        self._has_warned = False

    def check(self, spent_dollars: float) -> None:
        """Warn once when 80% are spent.

        Raises:
            BudgetExceededError: all of it is spent.
        """
        if spent_dollars >= self._dollars:
            raise BudgetExceededError(
                f"${spent_dollars:.6g} are spent of {self._of}. Nothing is lost: save state_dict(), and load it into a "
                "loader with a budget of its own to go on",
                spent_dollars=spent_dollars,
                budget_dollars=self._dollars,
            )
        if not self._has_warned and spent_dollars >= _WARN_SHARE * self._dollars:
            self._has_warned = True
            warnings.warn(f"${spent_dollars:.6g} are spent of {self._of}", SpendingWarning, stacklevel=4)
