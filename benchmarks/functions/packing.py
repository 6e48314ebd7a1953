"""The cost of packing, compared with a copy of each sample to an object of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks.document import table
from benchmarks.functions.quiet import Patience
from benchmarks.functions.stage import MEMORY_BYTES, Stage, Usage, function, gb_seconds, pack_event, stage
from stoker import Operation, Prices
from stoker.abc import ObjectInfo
from stoker_local import PROFILES

__all__ = ["Figure", "packing"]

ROUNDS = 3
MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of raw samples."""

    name: str
    samples: int
    size_bytes: int


KINDS = (Kind(name="3 KB", samples=10_000, size_bytes=3_000), Kind(name="110 KB", samples=2_000, size_bytes=110_000))
WAYS = {"pack": "`pack`", "one-by-one": "a GET and a PUT each"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Figures of one warm invocation.

    Attributes:
        samples: number of samples.
        raw_bytes: size of these samples.
        seconds: duration.
        cpu_seconds: processor time of its process.
        other_cpu_seconds: processor time of the bucket and the function cloud.
        gb_seconds: billed GB-seconds.
        gets: number of GET and HEAD requests.
        puts: number of other requests.
    """

    samples: int
    raw_bytes: int
    seconds: float
    cpu_seconds: float
    other_cpu_seconds: float
    gb_seconds: float
    gets: int
    puts: int

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def mb_per_second(self) -> float:
        return self.raw_bytes / self.seconds / 1e6

    @property
    def samples_per_gb_second(self) -> float:
        return self.samples / self.gb_seconds

    @property
    def mb_per_gb_second(self) -> float:
        return self.raw_bytes / self.gb_seconds / 1e6

    def function_dollars(self, prices: Prices) -> float:
        """Return the cost of functions for a million samples, in dollars."""
        each = prices.functions["lambda"].invocation_dollars(
            seconds=self.gb_seconds * (1 << 30) / MEMORY_BYTES, memory_bytes=MEMORY_BYTES, vcpus=0
        )
        return each * MILLION / self.samples

    def request_dollars(self, prices: Prices) -> float:
        """Return the cost of the bucket's requests for a million samples, in dollars."""
        store = prices.store("s3")
        each = self.gets * store.request_dollars(Operation.GET) + self.puts * store.request_dollars(Operation.PUT)
        return each * MILLION / self.samples


async def packing(patience: Patience) -> str:
    """Measure, and return the table."""
    functions = [function("pack"), function("one-by-one", "benchmarks.functions.handlers.one_by_one")]
    found: dict[tuple[str, str], list[Figure]] = {(kind.name, way): [] for kind in KINDS for way in WAYS}
    async with stage(*functions, shape=PROFILES["cloud"]) as place:
        raws = {kind.name: place.put_raw(kind.name, kind.samples, kind.size_bytes) for kind in KINDS}
        for kind in KINDS:
            for way in WAYS:  # a small one first, to warm up the instance
                await place.invoke(way, pack_event(kind.name, raws[kind.name][:10], "warming"))
        for number in range(ROUNDS):
            for kind in KINDS:
                for way in WAYS:
                    one = partial(measure, place, kind, raws[kind.name], way)
                    found[kind.name, way].append(await patience.measure(one))
                    print(f"round {number}, {kind.name}, {way}: {found[kind.name, way][-1]}", flush=True)
    return text(found)


async def measure(place: Stage, kind: Kind, objects: Sequence[ObjectInfo], way: str) -> Figure:
    """Measure one invocation, on a new data set."""
    event = pack_event(kind.name, objects, f"{kind.name}-{way}")
    with place.measure() as usage:
        outcome = await place.invoke(way, event)
    place.bucket.objects["data"].clear()
    return figure(kind, usage, outcome.seconds, gb_seconds(outcome))


def figure(kind: Kind, usage: Usage, seconds: float, billed_gb_seconds: float) -> Figure:
    """Return the figures of one invocation; every request that is neither GET nor HEAD is billed as a PUT."""
    gets = usage.requests["GetObject"] + usage.requests["HeadObject"]
    return Figure(
        samples=kind.samples,
        raw_bytes=kind.samples * kind.size_bytes,
        seconds=seconds,
        cpu_seconds=usage.function_cpu_seconds,
        other_cpu_seconds=usage.other_cpu_seconds,
        gb_seconds=billed_gb_seconds,
        gets=gets,
        puts=usage.requests.total() - gets,
    )


def text(found: dict[tuple[str, str], list[Figure]]) -> str:
    """Return the table of medians."""
    prices = Prices.load()
    head = ["samples", "samples/s", "MB/s", "of a processor: it, the bucket", "samples per GB-s", "MB per GB-s"]
    head += ["GETs", "PUTs", "functions, $", "requests, $", "a million samples, $"]
    rows = []
    for (kind, way), figures in found.items():
        functions = median(each.function_dollars(prices) for each in figures)
        requests = median(each.request_dollars(prices) for each in figures)
        busy = median(each.cpu_seconds / each.seconds for each in figures)
        others = median(each.other_cpu_seconds / each.seconds for each in figures)
        rows.append(
            [
                f"{kind}, {WAYS[way]}",
                f"{median(each.samples_per_second for each in figures):,.0f}",
                f"{median(each.mb_per_second for each in figures):.1f}",
                f"{busy:.0%}, {others:.0%}",
                f"{median(each.samples_per_gb_second for each in figures):,.0f}",
                f"{median(each.mb_per_gb_second for each in figures):.1f}",
                f"{median(each.gets for each in figures):,.0f}",
                f"{median(each.puts for each in figures):,.0f}",
                f"{functions:.3f}",
                f"{requests:.3f}",
                f"{functions + requests:.2f}",
            ]
        )
    return table(head, rows)
