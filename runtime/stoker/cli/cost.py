"""``stoker cost``: what a run costs, from figures, from a data set's manifest, or from both."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stoker._base.operations import Operation, PriceKey
from stoker._cost.prices import FunctionPrices, Prices, StorePrices
from stoker._cost.usage import (
    Calls,
    Machines,
    Part,
    Stored,
    Traffic,
    WarmTier,
    packing_traffic,
    total_dollars,
    training_traffic,
)
from stoker._format.versions import read_manifest
from stoker._stores.metered import price_key
from stoker.cli.cost_figures import add_figures, figures
from stoker.cli.flags import add_store_options, add_version, opened
from stoker.cli.output import json_text, printable, table
from stoker.errors import ConfigError

__all__ = ["configure", "run"]

_FUNCTION_BYTES = 1769 << 20
_WARM_BYTES = 1536 << 20
_OF_BUCKET = {"size", "gets", "puts", "lists", "read", "written"}


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    where = "of a data set whose size and super-samples are to be reckoned with"
    parser.add_argument("url", metavar="URL", nargs="?", help=where)
    add_version(parser)
    parser.add_argument("--json", action="store_true", help="write JSON")
    add_figures(parser)
    add_store_options(parser)


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    given, prices = figures(args, has_dataset=args.url is not None), Prices.load()
    if args.url is None and not given:
        raise ConfigError("there is nothing to reckon: give the URL of a data set, or figures (--gets, --machine, …)")
    bill = _Bill(prices, given)
    if args.url is not None or _OF_BUCKET & given.keys():
        super_samples, size_bytes, key = (0, 0, PriceKey("s3")) if args.url is None else asyncio.run(_read(args))
        name = given.get("store") or args.prices
        store = prices.store(replace(key, name=name) if name else key)
        bill.add_bucket(store, super_samples, size_bytes)
    bill.add_machines()
    bill.add_functions()
    bill.show(as_json=args.json)
    return 0


async def _read(args: Namespace) -> tuple[int, int, PriceKey]:
    """Return how many super-samples a data set has, their bytes, and by what the prices of its store are found."""
    async with opened(args) as store:
        manifest = await read_manifest(store, args.at)
        return len(manifest), manifest.size_bytes, price_key(store)


class _Bill:
    """Lines, and whose prices they are reckoned with."""

    def __init__(self, prices: Prices, given: Mapping[str, Any]) -> None:
        self._prices, self._given = prices, given
        self._parts: list[Part] = []
        self._sources: dict[str, None] = {}

    def _number(self, name: str, default: Any = 0) -> Any:
        return self._given.get(name, default)

    def _add(self, parts: Sequence[Part], source: Any) -> None:
        used = [part for part in parts if part.quantity]
        self._parts += used
        if used:
            self._sources[f"{source.name} ({source.region})"] = None

    def add_bucket(self, store: StorePrices, super_samples: int, size_bytes: int) -> None:
        """Add data at rest, and the requests that were given and those that a data set takes."""
        given, number, egress = self._given, self._number, self._number("egress", "same_region")
        traffic = Traffic(
            requests={Operation.GET: number("gets"), Operation.PUT: number("puts"), Operation.LIST: number("lists")},
            read_bytes=number("read"),
            written_bytes=number("written"),
            egress=egress,
        )
        if super_samples:
            traffic += training_traffic(
                super_samples,
                size_bytes,
                epochs=number("epochs", 1),
                ranks=self._ranks(),
                hit_rate=number("hit_rate"),
                egress=egress,
            )
        if given.get("packing"):
            traffic += packing_traffic(super_samples, size_bytes, egress=egress)
        stored = Stored(size_bytes=number("size", size_bytes), months=number("months", 1.0))
        self._add([*stored.parts(store), *traffic.parts(store)], store)

    def _ranks(self) -> int:
        """Return how many share an epoch: one for each accelerator."""
        machine, accelerators = self._given.get("machine"), self._given.get("accelerators")
        if accelerators is None:
            accelerators = 1 if machine is None else max(1, self._prices.machine(machine).accelerators)
        return int(self._number("nodes", 1) * accelerators)

    def add_machines(self) -> None:
        """Add the hours of machines and their disks."""
        given, number = self._given, self._number
        compute_hours, stall = number("compute_hours"), number("stall")
        machines = Machines(
            nodes=number("nodes", 1),
            accelerators=given.get("accelerators"),
            compute_hours=compute_hours,
            wait_hours=number("wait_hours", compute_hours * stall / (1 - stall)),
            disk_bytes=number("disk_size"),
            disk_months=number("months", 1.0),
        )
        if "machine" in given:
            machine = self._prices.machine(given["machine"])
            self._add(machines.time_parts(machine), machine)
        if "disk" in given:
            disk = self._prices.disk(given["disk"])
            self._add(machines.disk_parts(disk), disk)

    def add_functions(self) -> None:
        """Add calls of functions and a warm tier."""
        given, number = self._given, self._number
        if not {"calls", "warm_functions"} & given.keys():
            return
        prices = self._prices.function(given.get("function", "lambda"))
        vcpus = self._vcpus(prices)
        calls = Calls(
            calls=number("calls"),
            seconds=number("call_seconds"),
            memory_bytes=number("function_memory", _FUNCTION_BYTES),
            vcpus=vcpus,
            tmp_bytes=number("function_tmp"),
            cold_starts=number("cold_starts"),
            init_seconds=number("init_seconds"),
        )
        warm = WarmTier(
            functions=number("warm_functions"),
            memory_bytes=number("warm_memory", _WARM_BYTES),
            hours=number("warm_hours"),
            vcpus=vcpus,
            served_bytes=number("served"),
            serve_calls=number("serve_calls"),
            back_up_every_seconds=given.get("back_up_every"),
            back_up_seconds=number("back_up_seconds"),
        )
        self._add([*calls.parts(prices), *warm.parts(prices)], prices)

    def _vcpus(self, prices: FunctionPrices) -> float:
        """Return the processors of a function that are billed apart from its memory: one, unless told otherwise."""
        if prices.dollars_per_vcpu_second:
            return float(self._number("function_vcpus", 1))
        if self._number("function_vcpus"):
            raise ConfigError(f"function_vcpus means nothing to {prices.name}: processors come with the memory")
        return 0.0

    def show(self, *, as_json: bool) -> None:
        """Print the lines and what they come to."""
        dollars = total_dollars(self._parts)
        if as_json:
            parts = [
                {"name": part.name, "quantity": part.quantity, "unit": part.unit, "dollars": part.dollars}
                for part in self._parts
            ]
            document = {"prices": {"date": str(self._prices.date), "of": list(self._sources)}, "parts": parts}
            print(json_text({**document, "dollars": dollars}))
            return
        rows = [(part.name, _quantity(part.quantity), part.unit, _dollars(part.dollars)) for part in self._parts]
        rows.append(("total", "", "", _dollars(dollars)))
        widths = [max(len(row[column]) for row in rows) for column in (1, 3)]
        print(table([(row[0], row[1].rjust(widths[0]), row[2], row[3].rjust(widths[1])) for row in rows], indent=""))
        if self._sources:
            print(f"list prices of {self._prices.date}: {printable('; '.join(self._sources))}")


def _quantity(quantity: float) -> str:
    return f"{quantity:,.0f}" if quantity == int(quantity) or quantity >= 1000 else f"{quantity:.4g}"


def _dollars(dollars: float) -> str:
    if 0 < dollars < 1e-6:
        return "<$0.000001"
    return f"${dollars:,.2f}" if dollars >= 100 else f"${dollars:.6f}"
