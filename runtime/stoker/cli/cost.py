"""``stoker cost``: estimates what a run costs, from figures, from a data set's manifest, or from both."""

from __future__ import annotations

import asyncio
import warnings
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from stoker._base.fields import quote_value, read_toml
from stoker._base.meter import Egress, Operation, PriceKey
from stoker._base.sizes import format_bytes, format_count
from stoker._cost.cluster import ClusterCapacity
from stoker._cost.prices import DiskPrices, FunctionPrices, MachinePrices, Prices, StorePrices
from stoker._cost.tiers import TierComparison
from stoker._cost.usage import (
    BillLine,
    FunctionUsage,
    MachineUsage,
    StorageUsage,
    Traffic,
    WarmTierUsage,
    packing_traffic,
    total_dollars,
    training_traffic,
)
from stoker._format.versions import read_manifest
from stoker._stores.object_store import price_key
from stoker.cli.compare_tiers import create_comparison, format_comparison
from stoker.cli.flags import (
    add_json,
    add_store_options,
    add_version,
    cluster_spec,
    number_from,
    open_store_from_args,
    positive,
    size,
    size_from,
)
from stoker.cli.output import json_text, make_printable, table
from stoker.errors import ConfigError

_FUNCTION_BYTES = 1769 << 20
_WARM_BYTES = 1536 << 20
_BUCKET_FIGURES = {"size", "gets", "puts", "lists", "read", "written"}
_FUNCTIONS = "calls warm_functions compare_tiers"
_BUCKET = "URL size gets puts lists read written"


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    where = "a data set that gives the size and the number of super-samples"
    parser.add_argument("url", metavar="URL", nargs="?", help=where)
    add_version(parser)
    add_json(parser)
    parser.set_defaults(example="stoker cost s3://bucket/dataset --machine g6.xlarge --compute-hours 10")
    _add_figures(parser)
    add_store_options(parser)


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    given = _collect_figures(args, has_dataset=args.url is not None)
    prices = Prices.load()
    if args.url is None and not given:
        raise ConfigError("there is nothing to estimate: give the URL of a data set, or figures (--gets, --machine, …)")
    if given["compare_tiers"]:
        print(format_comparison(_create_comparison(args, given, prices), as_json=args.json))
        return 0
    bucket, comparison = None, None
    if args.url is not None or _BUCKET_FIGURES & given.keys():
        bucket = _read_bucket(args, given, prices)
        comparison = _compare_cluster(given, prices, *bucket)
    parts: list[BillLine] = []
    sources: dict[str, None] = {}
    for each, source in _estimate_parts(given, prices, bucket):
        if used := [part for part in each if part.quantity]:
            parts += used
            sources[f"{source.name} ({source.region})"] = None
    dollars = total_dollars(parts)
    if args.json:
        sources_json = {"date": str(prices.date), "of": list(sources)}
        document = {"prices": sources_json, "parts": [asdict(part) for part in parts], "dollars": dollars}
        print(json_text(document | ({} if comparison is None else {"cluster": asdict(comparison)})))
        return 0
    rows = [(part.name, _format_quantity(part.quantity), part.unit, _format_dollars(part.dollars)) for part in parts]
    rows.append(("total", "", "", _format_dollars(dollars)))
    print(table(rows, indent="", right=(1, 3)))
    if sources:
        print(f"list prices of {prices.date}: {make_printable('; '.join(sources))}")
    if comparison is not None:
        print("\n".join(comparison.as_text()))
    return 0


async def _read_size(args: Namespace) -> tuple[int, int, PriceKey]:
    """Return a data set's number of super-samples, its size in bytes and the price key of its store."""
    async with open_store_from_args(args) as store:
        manifest = await read_manifest(store, args.at)
        return len(manifest), manifest.size_bytes, price_key(store)


class _Figures(dict[str, Any]):
    """Figure → value; a missing figure is 0."""

    def __missing__(self, name: str) -> int:
        return 0


_PriceGroup = StorePrices | MachinePrices | DiskPrices | FunctionPrices


def _estimate_parts(
    given: _Figures, prices: Prices, bucket: tuple[int, int, StorePrices] | None
) -> Iterator[tuple[Sequence[BillLine], _PriceGroup]]:
    """Yield the cost parts of each billed resource, with the prices that apply."""
    if bucket is not None:
        super_samples, size_bytes, store = bucket
        usage = StorageUsage(size_bytes=given.get("size", size_bytes), months=given.get("months", 1.0))
        yield (
            [*usage.bill_lines(store), *_estimate_traffic(given, prices, super_samples, size_bytes).bill_lines(store)],
            store,
        )
    compute_hours, stall = given["compute_hours"], given["stall"]
    machines = MachineUsage(
        nodes=given.get("nodes", 1),
        accelerators=given.get("accelerators"),
        compute_hours=compute_hours,
        wait_hours=given.get("wait_hours", compute_hours * stall / (1 - stall)),
        disk_bytes=given["disk_size"],
        disk_months=given.get("months", 1.0),
    )
    if "machine" in given:
        machine = prices.machine(given["machine"])
        yield machines.time_lines(machine), machine
    if "disk" in given:
        disk = prices.disk(given["disk"])
        yield machines.disk_lines(disk), disk
    if {"calls", "warm_functions"} & given.keys():
        functions = prices.function(given.get("function", "lambda"))
        yield _estimate_function_parts(given, functions), functions


def _read_bucket(args: Namespace, given: _Figures, prices: Prices) -> tuple[int, int, StorePrices]:
    """Return the data set's number of super-samples and bytes (0 without a data set), and the prices of its bucket."""
    super_samples, size_bytes, key = (0, 0, PriceKey("s3")) if args.url is None else asyncio.run(_read_size(args))
    name = given.get("store") or args.prices
    return super_samples, size_bytes, prices.store(replace(key, name=name) if name else key)


def _create_comparison(args: Namespace, given: _Figures, prices: Prices) -> TierComparison:
    super_samples, size_bytes, store = _read_bucket(args, given, prices)
    traffic = _estimate_traffic(given, prices, super_samples, size_bytes)
    return create_comparison(given, prices, store, super_samples=super_samples, size_bytes=size_bytes, traffic=traffic)


def _estimate_traffic(given: _Figures, prices: Prices, super_samples: int, size_bytes: int) -> Traffic:
    """Return the given requests plus those of reading the data set, with one rank per accelerator."""
    egress = given.get("egress", "same_region")
    traffic = Traffic(
        requests={Operation.GET: given["gets"], Operation.PUT: given["puts"], Operation.LIST: given["lists"]},
        read_bytes=given["read"],
        written_bytes=given["written"],
        egress=egress,
    )
    if super_samples:
        accelerators = given.get("accelerators")
        if accelerators is None:
            accelerators = max(1, prices.machine(given["machine"]).accelerators) if "machine" in given else 1
        ranks = given.get("nodes", 1) * accelerators
        options = {"epochs": given.get("epochs", 1), "ranks": ranks, "hit_rate": given["hit_rate"]}
        if "cluster" in given:
            options["held_share"] = _cluster_capacity(given).held_share(super_samples, size_bytes)
        traffic += training_traffic(super_samples, size_bytes, **options, egress=egress)
    if given.get("packing"):
        traffic += packing_traffic(super_samples, size_bytes, egress=egress)
    return traffic


def _cluster_capacity(given: _Figures) -> ClusterCapacity:
    return ClusterCapacity(machines=given.get("nodes", 1), limit_bytes=given["cluster"].limit_bytes)


@dataclass(frozen=True, slots=True)
class _ReadCost:
    """What is read from the bucket: requests, bytes, and their price."""

    requests: float
    read_bytes: float
    dollars: float


@dataclass(frozen=True, slots=True)
class _ClusterComparison:
    """Cost of a run's reads with a cluster cache, which holds a fraction of the data set, and without it."""

    held_share: float
    with_cluster: _ReadCost
    without: _ReadCost
    limit_bytes: int
    sufficient_bytes: int
    nodes: int

    def as_text(self) -> list[str]:
        """Return the lines of the text output."""
        limit, enough = format_bytes(self.limit_bytes), format_bytes(self.sufficient_bytes)
        more = "" if self.limit_bytes >= self.sufficient_bytes else f"; {enough} a node is enough for all of it"
        columns = (self.without, self.with_cluster)
        saved = (before - after for before, after in zip(*map(astuple, columns), strict=True))
        rows = [("reads of the bucket", "without cluster cache", "with it", "saved")]
        formats = (lambda count: f"{count:,.0f}", format_bytes, _format_dollars)
        names = ("GET requests", "bytes", "requests, retrieval and egress")
        for name, show, *values in zip(names, formats, *map(astuple, columns), saved, strict=True):
            rows.append((name, *map(show, values)))
        nodes = format_count(self.nodes, "node")
        return [
            f"cluster cache of {limit} a node: {self.held_share:.1%} of the data set on {nodes}{more}",
            *table(rows, indent="", right=(1, 2, 3)).splitlines(),
        ]


def _compare_cluster(
    given: _Figures, prices: Prices, super_samples: int, size_bytes: int, store: StorePrices
) -> _ClusterComparison | None:
    """Return the cost of reads with the cluster cache and without it; None if there is none.

    Raises:
        ConfigError: the cache would hold no super-sample.
    """
    if "cluster" not in given:
        return None
    capacity = _cluster_capacity(given)
    held_share = capacity.held_share(super_samples, size_bytes)
    if super_samples and not held_share:
        average = format_bytes(size_bytes / super_samples)
        raise ConfigError(
            f"a cluster cache of {format_bytes(capacity.limit_bytes)} on each node keeps no super-sample of "
            f"{average}: give a larger limit="
        )

    def cost(figures: _Figures) -> _ReadCost:
        traffic = _estimate_traffic(figures, prices, super_samples, size_bytes)
        gets = traffic.requests[Operation.GET]
        reads = replace(traffic, requests={Operation.GET: gets}, written_bytes=0.0)
        return _ReadCost(gets, reads.read_bytes, total_dollars(reads.bill_lines(store)))

    return _ClusterComparison(
        held_share=held_share,
        with_cluster=cost(given),
        without=cost(_Figures({name: value for name, value in given.items() if name != "cluster"})),
        limit_bytes=capacity.limit_bytes,
        sufficient_bytes=capacity.sufficient_bytes(super_samples, size_bytes),
        nodes=capacity.machines,
    )


def _estimate_function_parts(given: _Figures, prices: FunctionPrices) -> list[BillLine]:
    """Return the cost parts of calls and of a warm tier; by default a function has 1 vCPU if these are billed apart."""
    vcpus = float(given.get("function_vcpus", 1)) if prices.dollars_per_vcpu_second else 0.0
    if given["function_vcpus"] and not prices.dollars_per_vcpu_second:
        raise ConfigError(f"function_vcpus has no effect for {prices.name}, which bills processors with the memory")
    calls = FunctionUsage(
        calls=given["calls"],
        seconds=given["call_seconds"],
        memory_bytes=given.get("function_memory", _FUNCTION_BYTES),
        vcpus=vcpus,
        tmp_bytes=given["function_tmp"],
        cold_starts=given["cold_starts"],
        init_seconds=given["init_seconds"],
    )
    warm = WarmTierUsage(
        functions=given["warm_functions"],
        memory_bytes=given.get("warm_memory", _WARM_BYTES),
        hours=given["warm_hours"],
        vcpus=vcpus,
        served_bytes=given["served"],
        serve_calls=given["serve_calls"],
    )
    return [*calls.bill_lines(prices), *warm.bill_lines(prices)]


def _format_quantity(quantity: float) -> str:
    return f"{quantity:,.0f}" if quantity == int(quantity) or quantity >= 1000 else f"{quantity:.4g}"


def _format_dollars(dollars: float) -> str:
    if 0 < dollars < 1e-6:
        return "<$0.000001"
    return f"${dollars:,.2f}" if dollars >= 100 else f"${dollars:.6f}"


_parse_number = number_from(0.0, 1e15)
"""Parses a number, for figures that are neither a size nor a share nor a positive count."""


def _parse_share(text: str) -> float:
    number = _parse_number(text)
    if number >= 1:
        raise ArgumentTypeError(f"{text!r} is not a share from 0 to less than 1")
    return number


def _parse_egress(text: str) -> str:
    if text not in get_args(Egress):
        raise ArgumentTypeError(f"{text!r} is not one of {', '.join(get_args(Egress))}")
    return text


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure of the estimate: a flag ``--a-name`` and a key ``a_name`` of the file.

    Attributes:
        name: key of the figure.
        kind: parser of the value, and metavar; None for a switch.
        help: description of the figure.
        needs: names of figures, separated by blanks; at least one of them must be given too.
    """

    name: str
    kind: tuple[Callable[[str], Any], str] | None
    help: str
    needs: str = ""


_COUNT, _NUMBER, _SHARE, _NAME = (positive, "N"), (_parse_number, "N"), (_parse_share, "SHARE"), (str, "NAME")
_SIZE, _HOURS, _SECONDS = (size, "SIZE"), (_parse_number, "H"), (_parse_number, "S")
_GROUPS: dict[str, tuple[_Figure, ...]] = {
    "the data set (size from the manifest at URL)": (
        _Figure("epochs", _COUNT, "epochs that read it (default: 1)", "URL"),
        _Figure("hit_rate", _SHARE, "cache hit rate after the first epoch (default: 0)", "URL"),
        _Figure(
            "cluster",
            (cluster_spec, "SPEC"),
            "cache of all --nodes, such as memory:?limit=64GB, the limit of each node; compares the cost without it",
            "URL",
        ),
        _Figure("packing", None, "include the requests that pack it", "URL"),
    ),
    "the bucket": (
        _Figure(
            "store",
            _NAME,
            "s3, s3express, gs, gsrapid, r2, minio or another of the price file (default: the URL's, else s3)",
            _BUCKET,
        ),
        _Figure(
            "egress",
            (_parse_egress, "WHERE"),
            "location of the reader: same_region (default), other_region, internet",
            _BUCKET,
        ),
        _Figure("size", _SIZE, "stored data (default: the data set's size)"),
        _Figure("months", _NUMBER, "months of storage of data and disks (default: 1)", "URL size disk_size"),
        _Figure("gets", _NUMBER, "GET requests in addition to the data set's"),
        _Figure("puts", _NUMBER, "PUT requests in addition to the data set's"),
        _Figure("lists", _NUMBER, "LIST requests (pages)"),
        _Figure("read", _SIZE, "data read in addition to the data set's"),
        _Figure("written", _SIZE, "data written in addition to the data set's"),
    ),
    "the machines": (
        _Figure(
            "machine",
            _NAME,
            "machine type: g6.xlarge, p5.48xlarge, cloud-run-l4, …",
            "compute_hours wait_hours compare_tiers",
        ),
        _Figure(
            "nodes",
            _COUNT,
            "machines that share each epoch, with one rank per accelerator (default: 1)",
            "URL machine disk compare_tiers",
        ),
        _Figure("accelerators", _COUNT, "accelerators of each machine that the job uses (default: all)", "machine"),
        _Figure("compute_hours", _HOURS, "hours of computation per machine", "machine"),
        _Figure("wait_hours", _HOURS, "hours of waiting for data per machine", "machine"),
        _Figure("stall", _SHARE, "share of the hours that a machine waits, instead of --wait-hours", "compute_hours"),
        _Figure(
            "disk", (str, "KIND"), "disk of each machine: gp3, pd-standard, pd-balanced", "disk_size compare_tiers"
        ),
        _Figure("disk_size", _SIZE, "size of each disk", "disk"),
    ),
    "functions": (
        _Figure("function", (str, "PLATFORM"), "lambda (the default), lambda-arm or cloud-run", _FUNCTIONS),
        _Figure("calls", _NUMBER, "number of calls"),
        _Figure("call_seconds", _SECONDS, "duration of a call", "calls"),
        _Figure("function_memory", _SIZE, "memory of a function (default: 1769MiB)", "calls"),
        _Figure("function_vcpus", _NUMBER, "vCPUs of a function, if billed apart (default: 1)", _FUNCTIONS),
        _Figure(
            "function_tmp", _SIZE, "size of a function's /tmp (default: 512 MB, which are free on Lambda)", "calls"
        ),
        _Figure("cold_starts", _NUMBER, "calls that start an instance", "calls"),
        _Figure("init_seconds", _SECONDS, "duration of a cold start", "cold_starts"),
    ),
    "a warm tier (on the same platform)": (
        _Figure("warm_functions", _COUNT, "functions that keep data in memory", "warm_hours"),
        _Figure("warm_hours", _HOURS, "hours that they keep it", "warm_functions"),
        _Figure("warm_memory", _SIZE, "memory of each (default: 1536MiB)", "warm_functions compare_tiers"),
        _Figure("served", _SIZE, "data that they serve, at 75 MB/s each", "warm_functions"),
        _Figure("serve_calls", _NUMBER, "calls that serve the data", "served"),
        _Figure("back_up_every", (number_from(0.001, 1e15), "S"), SUPPRESS),
        _Figure("back_up_seconds", _SECONDS, SUPPRESS),
    ),
    "where data is kept (with --size, --gets and --hours, or a data set, --epochs and --hours)": (
        _Figure("compare_tiers", None, "compare the same reads from a bucket, disks, memory, servers, functions, …"),
        _Figure("hours", _HOURS, "hours in which the data is kept and read", "compare_tiers"),
        _Figure("object_size", (size_from(1), "SIZE"), "size of a super-sample (default: 8MiB)", "compare_tiers"),
        _Figure("linger", (number_from(0.01, 900), "S"), "linger of a warm function (default: 0.25)", "compare_tiers"),
    ),
}
_FIGURES = {figure.name: figure for group in _GROUPS.values() for figure in group}
_REMOVED_FIGURES = ("back_up_every", "back_up_seconds")
"""Figures of earlier releases, accepted with a warning."""


def _add_figures(parser: ArgumentParser) -> None:
    """Add a flag for each figure, and the file of figures."""
    where = "TOML file of figures, with the flags' names and underscores as keys; flags override it"
    parser.add_argument("--figures", type=Path, metavar="FILE", help=where)
    for title, group in _GROUPS.items():
        section = parser.add_argument_group(title)
        for figure in group:
            options: dict[str, Any] = {"action": "store_true", "default": None}
            if figure.kind is not None:
                options = dict(zip(("type", "metavar"), figure.kind, strict=True))
            flags = [f"--{figure.name.replace('_', '-')}", *(["--accelerator"] if figure.name == "machine" else [])]
            section.add_argument(*flags, dest=figure.name, help=figure.help, **options)


def _collect_figures(args: Namespace, *, has_dataset: bool) -> _Figures:
    """Return the given figures by name; flags override the file.

    Raises:
        ConfigError: the file cannot be read, a key or value in it is invalid, or a figure needs another one.
    """
    flags = {name: value for name in _FIGURES if (value := getattr(args, name)) is not None}
    given = _Figures({**(_read_figures(args.figures) if args.figures else {}), **flags})
    for name in _REMOVED_FIGURES:
        if given.pop(name, None) is not None:
            text = f"{name} has no effect: no tier of stoker makes back-ups; leave it out"
            warnings.warn(text, DeprecationWarning, stacklevel=1)
    names = given.keys() | ({"URL"} if has_dataset else set())
    for name in given:
        needed = _FIGURES[name].needs.split()
        if needed and not names & set(needed):
            spell = _flag_of if name in flags else str
            raise ConfigError(f"{spell(name)} has no effect without {' or '.join(map(spell, needed))}")
    if {"stall", "wait_hours"} <= given.keys():
        raise ConfigError("stall and wait_hours both give the waiting time; give one of them")
    return given


def _flag_of(figure: str) -> str:
    return figure if figure == "URL" else f"--{figure.replace('_', '-')}"


def _read_figures(path: Path) -> dict[str, Any]:
    figures = {}
    for name, value in read_toml(path).items():
        figure = _FIGURES.get(name)
        if figure is None:
            names = ", ".join(name for name in _FIGURES if name not in _REMOVED_FIGURES)
            raise ConfigError(f"{path} has the unknown figure {quote_value(name)}; the figures are {names}")
        if figure.kind is None and not isinstance(value, bool):
            raise ConfigError(f"{path}: {name} must be true or false, not {quote_value(value)}")
        try:
            figures[name] = value if figure.kind is None else figure.kind[0](str(value))
        except (ArgumentTypeError, ValueError) as error:  # ValueError: an integer of thousands of digits
            raise ConfigError(f"{path}: {name}: {error}") from None
    return figures
