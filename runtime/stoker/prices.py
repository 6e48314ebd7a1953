"""What clouds charge: a dated file of list prices, and the arithmetic on it.

The packaged ``prices.toml`` names its date and its sources. Another file takes its place whole through
:meth:`Prices.load` or the variable ``STOKER_PRICES``. Local folders and memory cost nothing. A custom endpoint is
priced as the cloud whose protocol it speaks, so an emulator shows what a run would have cost. A file need not have
prices of everything: what is asked for and missing is an error then.
"""

from __future__ import annotations

import datetime
import enum
import os
import tomllib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from stoker.errors import ConfigError
from stoker.fields import shown
from stoker.text_file import read_toml

__all__ = ["GB_BYTES", "DiskPrices", "Egress", "FunctionPrices", "MachinePrices", "Operation", "Prices", "StorePrices"]

GB_BYTES = 1 << 30
_MOST_DOLLARS, _MOST_ACCELERATORS = 1e12, 1 << 16
"""Of one thing; more is a slip of the pen."""
_FREE_SCHEMES = ("file", "memory", "stoker+https", "stoker+http")  # who serves pays
_DIRECTORY_BUCKET = "--x-s3"

T = TypeVar("T")

Egress = Literal["same_region", "other_region", "internet"]


class Operation(enum.StrEnum):
    """A kind of request to a store, as stores bill them."""

    GET = "GET"
    HEAD = "HEAD"
    PUT = "PUT"
    LIST = "LIST"
    DELETE = "DELETE"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePrices:
    """What one storage class costs in one region, in dollars.

    Attributes:
        name: of the service and storage class.
        region: where these prices hold.
        source: address of the price list.
        storage_dollars_per_gb_month: at rest.
        read_dollars_per_gb: retrieval, on top of the request.
        write_dollars_per_gb: upload, on top of the request.
        dollars_per_1000_requests: of each operation; a LIST is one page.
        egress_dollars_per_gb: on top of retrieval, by where the reader is.
    """

    name: str
    region: str
    source: str
    storage_dollars_per_gb_month: float
    read_dollars_per_gb: float
    write_dollars_per_gb: float
    dollars_per_1000_requests: Mapping[Operation, float]
    egress_dollars_per_gb: Mapping[Egress, float]

    def request_dollars(self, operation: Operation) -> float:
        """Return what one request costs."""
        return self.dollars_per_1000_requests[operation] / 1000

    def transfer_dollars(self, *, read_bytes: int, written_bytes: int, egress: Egress) -> float:
        """Return what moving bytes costs, requests aside."""
        out = self.read_dollars_per_gb + self.egress_dollars_per_gb[egress]
        return (read_bytes * out + written_bytes * self.write_dollars_per_gb) / GB_BYTES

    def storage_dollars(self, size_bytes: int, months: float = 1.0) -> float:
        """Return what ``size_bytes`` at rest cost."""
        return size_bytes / GB_BYTES * self.storage_dollars_per_gb_month * months


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionPrices:
    """What a serverless function costs in one region, in dollars.

    Attributes:
        name: of the service.
        region: where these prices hold.
        source: address of the price list.
        dollars_per_request: of one invocation.
        dollars_per_gb_second: of configured memory.
        dollars_per_vcpu_second: of configured processors, where they are billed apart from memory.
    """

    name: str
    region: str
    source: str
    dollars_per_request: float
    dollars_per_gb_second: float
    dollars_per_vcpu_second: float

    def invocation_dollars(self, *, seconds: float, memory_bytes: int, vcpus: float) -> float:
        """Return what one invocation costs; ``seconds`` includes a billed initialisation."""
        rate = memory_bytes / GB_BYTES * self.dollars_per_gb_second + vcpus * self.dollars_per_vcpu_second
        return self.dollars_per_request + seconds * rate


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPrices:
    """What a disk of a machine costs in one region, in dollars.

    Attributes:
        name: of the kind of disk.
        region: where these prices hold.
        source: address of the price list.
        storage_dollars_per_gb_month: of its size, whatever is on it.
    """

    name: str
    region: str
    source: str
    storage_dollars_per_gb_month: float

    def storage_dollars(self, size_bytes: float, months: float = 1.0) -> float:
        """Return what a disk of ``size_bytes`` costs."""
        return size_bytes / GB_BYTES * self.storage_dollars_per_gb_month * months


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePrices:
    """What a machine costs in one region, in dollars, whether it computes or waits.

    Attributes:
        name: of the machine and its accelerators.
        region: where these prices hold.
        source: address of the price list.
        dollars_per_hour: of the whole machine.
        accelerators: that it has.
    """

    name: str
    region: str
    source: str
    dollars_per_hour: float
    accelerators: int

    @property
    def dollars_per_accelerator_hour(self) -> float:
        """An accelerator's share of the machine; the whole of one that has none."""
        return self.dollars_per_hour / max(1, self.accelerators)


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
        stores: ``s3``, ``s3express``, ``gs``, ``gsrapid`` → prices.
        functions: platform → prices.
        machines: machine → prices.
        disks: kind of disk → prices.
    """

    date: datetime.date
    stores: Mapping[str, StorePrices]
    functions: Mapping[str, FunctionPrices]
    machines: Mapping[str, MachinePrices] = field(default_factory=dict)
    disks: Mapping[str, DiskPrices] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> Prices:
        """Read a price file: ``path``, else the one that ``STOKER_PRICES`` names, else the packaged one.

        Raises:
            ConfigError: the file cannot be read, or a price is missing, unknown or not a non-negative number.
        """
        chosen = path or os.environ.get("STOKER_PRICES")
        if not chosen:
            return _parsed(tomllib.loads(resources.files("stoker").joinpath("prices.toml").read_text("utf-8")))
        document = read_toml(Path(chosen))
        try:
            return _parsed(document)
        except ConfigError as error:
            raise ConfigError(f"price file {chosen}: {error}") from None

    def store(self, url: str) -> StorePrices:
        """Return the prices of a store by its URL (``s3://bucket/prefix``), its scheme (``s3``) or a path.

        A bucket whose name ends in ``--x-s3`` is an S3 directory bucket and is priced as Express One Zone. The name of
        one of GCS does not tell its class, so Rapid storage is asked for as ``gsrapid``.

        Raises:
            ConfigError: there are no prices for such stores.
        """
        scheme, separator, rest = url.partition("://")
        if not separator and scheme not in _STORES:
            scheme = "file"
        if scheme == "s3" and rest.partition("/")[0].endswith(_DIRECTORY_BUCKET):
            scheme = "s3express"
        if scheme in _FREE_SCHEMES:
            return _FREE
        if scheme not in self.stores:
            raise ConfigError(f"there are no prices for {scheme}:// stores, only for {', '.join(self.stores)}")
        return self.stores[scheme]

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


def _entry(table: Mapping[str, T], name: str, what: str) -> T:
    if name not in table:
        known = f"only for {', '.join(table)}" if table else "which the price file leaves out"
        raise ConfigError(f"there are no prices for {what} {name}, {known}")
    return table[name]


def _parsed(document: Mapping[str, Any]) -> Prices:
    _check_keys(document, {"currency", "date", "stores", "functions"}, "the file", {"machines", "disks"})
    if document["currency"] != "USD":
        raise ConfigError(f"currency {shown(document['currency'])} is not USD")
    date = document["date"]
    if type(date) is not datetime.date:
        raise ConfigError(f"date {shown(date)} is not a date like 2026-11-21")
    _check_keys(_table(document["stores"], "stores"), set(), "stores", _STORES)
    return Prices(date=date, **{name: _records(kind, document.get(name, {}), name) for name, kind in _KINDS.items()})


_STORES = {"s3", "s3express", "gs", "gsrapid"}
_KINDS: dict[str, type[Any]] = {
    "stores": StorePrices,
    "functions": FunctionPrices,
    "machines": MachinePrices,
    "disks": DiskPrices,
}


def _records(kind: type[Any], entries: object, where: str) -> dict[str, Any]:
    return {name: _record(kind, entry, f"{where}.{name}") for name, entry in _table(entries, where).items()}


def _record(kind: type[Any], entry: object, where: str) -> Any:
    """Return a record of ``kind``: texts, prices, and tables of prices, as its fields are named."""
    values = _table(entry, where)
    _check_keys(values, {field.name for field in fields(kind)}, where)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name in ("name", "region", "source"):
            if not isinstance(value, str):
                raise ConfigError(f"{where}.{name} is {shown(value)}, not text")
            checked[name] = value
        elif name == "accelerators":
            if type(value) is not int or not 0 <= value <= _MOST_ACCELERATORS:
                raise ConfigError(f"{where}.{name} is {shown(value)}, not a number of accelerators")
            checked[name] = value
        elif name in _TABLES:
            table = _table(value, f"{where}.{name}")
            _check_keys(table, set(map(str, _TABLES[name])), f"{where}.{name}")
            checked[name] = {key: _price(table[key], f"{where}.{name}.{key}") for key in _TABLES[name]}
        else:
            checked[name] = _price(value, f"{where}.{name}")
    return kind(**checked)


_TABLES: dict[str, tuple[str, ...]] = {
    "dollars_per_1000_requests": tuple(Operation),
    "egress_dollars_per_gb": get_args(Egress),
}


def _table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {shown(value)}, not a table")
    return value


def _price(value: object, where: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST_DOLLARS:  # type: ignore[operator]
        raise ConfigError(f"{where} is {shown(value)}, not a price from 0 to {_MOST_DOLLARS:,.0f} dollars")
    return float(value)  # type: ignore[arg-type]


def _check_keys(
    table: Mapping[str, Any], expected: set[str], where: str, optional: AbstractSet[str] = frozenset()
) -> None:
    if missing := expected - table.keys():
        raise ConfigError(f"{where} has no {', '.join(sorted(missing))}")
    if unknown := table.keys() - expected - optional:
        raise ConfigError(f"{where} has unknown {', '.join(sorted(unknown))}")
