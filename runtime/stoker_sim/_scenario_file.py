"""Scenarios that a person describes in a TOML file, and what is told of their runs.

Every field is in ``docs/simulator.md``. A run is told as a table by epochs, with its totals, and a picture.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from stoker._base.meter import Operation
from stoker._base.sizes import counted
from stoker._cache.eviction import policy_names
from stoker._cost.prices import Prices
from stoker._diagnostics.latency import (
    LEAST_MEDIAN_SECONDS,
    LONGEST_SECONDS,
    BucketModel,
    Constant,
    Late,
    Latency,
    LogNormal,
)
from stoker._fetch.config import Continuous, FetchConfig, FetchSize, NextBatch, PipelineConfig, Schedule
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker._order.order import MAX_LANES, OrderConfig
from stoker._stores import open_store
from stoker._trace.recording import read_trace
from stoker.errors import ConfigError
from stoker_sim._bucket import described, read_durations, recorded_bucket
from stoker_sim._caches import REPLICA_AWARE, TierModel
from stoker_sim._experiments.outcome import Cell, Outcome, Panel, Series, Table
from stoker_sim._scenario import (
    LEAST_BYTES_PER_SECOND,
    LONGEST_FIRST_BYTE_SECONDS,
    EpochResult,
    Run,
    Scenario,
)
from stoker_sim._section import Section, read_section
from stoker_sim._simulated_warm import WarmModel, WarmTally
from stoker_sim._warm_fleet import Reclaim
from stoker_warm._code import Code
from stoker_warm._settings import WarmConfig

__all__ = ["ScenarioFile", "outcome", "read_scenario"]

_MOST_SUPER_SAMPLES = 10_000_000
"""What a model keeps of one is some hundred bytes."""
_MOST_EVENTS = 500_000_000
_MOST_PUT_BACK = 1_000
_LEAST_REQUESTS_PER_SECOND = 0.001
_DEVICES = {"memory": (10e9, 0.0), "disk": (2e9, 0.0001)}
"""Kind of cache → bytes a second and seconds before the first one, where the file does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioFile:
    """What a file describes.

    Attributes:
        title: for the results.
        url: whose prices the bucket has.
        scenario: to simulate.
    """

    title: str
    url: str
    scenario: Scenario


def read_scenario(path: Path) -> ScenarioFile:
    """Read a scenario. A data set that is named by its URL is asked for its manifest, and for nothing else.

    Raises:
        ConfigError: the file cannot be read, or a field is missing, unknown or out of bounds; names it.
        StoreError: the manifest could not be read.
    """
    top = read_section(path)
    title, epochs = top.text("title", path.stem), top.integer("epochs", 1)
    nodes = top.integer("nodes", 1, most=MAX_LANES)  # each has a lane of its own at least
    seed, in_step = top.integer("seed", 0, least=0), top.boolean("in_step", default=False)
    dataset, order, bucket, node = (top.within(name) for name in ("dataset", "order", "bucket", "node"))
    warm = _warm(top.within("warm")) if "warm" in top else None
    top.end()
    url = dataset.text("url") if "url" in dataset else ""
    prices_of = bucket.text("prices_of", url or "s3")
    compute = _latency(node.within("compute"), lambda: Constant(0.0))
    network = _rate(node, "network_bytes_per_second", math.inf)
    sections = node.each("caches")
    caches = [_cache(section) for section in sections]
    bucket_model, feed = _bucket(bucket), _feed(node, _order(order, nodes), nodes, epochs)
    manifest = _manifest(dataset, url)
    for section, cache in zip(sections, caches, strict=True):
        if cache.limit_bytes < manifest.largest_bytes:  # which a loader refuses, too
            wanted = f"at least {manifest.largest_bytes}, the size of the largest super-sample"
            raise section.wrong("limit_bytes", cache.limit_bytes, wanted)
    scenario = top.checked(
        Scenario,
        manifest=manifest,
        feed=feed,
        bucket=bucket_model,
        compute=compute,
        node_bytes_per_second=network,
        epochs=epochs,
        in_step=in_step,
        caches=caches,
        warm=warm,
        seed=seed,
    )
    _check_length(path, scenario)
    return ScenarioFile(title=title, url=prices_of, scenario=scenario)


def _check_length(path: Path, scenario: Scenario) -> None:
    """Refuse what would be simulated for days, or for ever."""
    feed, manifest = scenario.feed, scenario.manifest
    steps = feed.dealing(manifest.samples).steps_from(0) * feed.world_size
    events = scenario.epochs * (steps + len(manifest))
    if events > _MOST_EVENTS:
        raise ConfigError(
            f"{path}: epochs {scenario.epochs:,} of {steps:,} batches and {len(manifest):,} super-samples each "
            f"are more than the {_MOST_EVENTS:,} that are simulated in a day; take fewer epochs, nodes or "
            "super_samples, or a larger batch_size"
        )


def _manifest(section: Section, url: str) -> Manifest:
    if url:
        version = section.integer("version") if "version" in section else None
        section.end()
        return asyncio.run(_pinned(url, version))
    return section.checked(
        described,
        super_samples=section.integer("super_samples", most=_MOST_SUPER_SAMPLES),
        samples=section.integer("samples"),
        super_sample_bytes=section.size("super_sample_bytes"),
    )


async def _pinned(url: str, version: int | None) -> Manifest:
    store = open_store(url)
    try:
        return await read_manifest(store, version)
    finally:
        await store.close()


def _bucket(section: Section) -> BucketModel:
    """Return a bucket, one that a trace tells of if there is one; what the file says goes before that."""
    usual = BucketModel()
    if "trace" in section:
        usual = recorded_bucket(read_trace(section.folder / section.text("trace")))
    first_byte = _latency(section.within("first_byte"), lambda: usual.first_byte, LONGEST_FIRST_BYTE_SECONDS)
    told = ("connection_bytes_per_second", "total_bytes_per_second")
    rates = {name: _rate(section, name, getattr(usual, name)) for name in told}
    requests = section.number("requests_per_second", math.inf, least=_LEAST_REQUESTS_PER_SECOND)
    return section.config(BucketModel, first_byte=first_byte, requests_per_second=requests, **rates)


def _order(section: Section, nodes: int) -> OrderConfig:
    shuffle = section.choice("shuffle", ("none", "block", "window", "full"), "window")
    given = {"lanes": nodes} if "lanes" not in section else {}
    return section.config(OrderConfig, shuffle=shuffle, **given)


def _feed(section: Section, order: OrderConfig, nodes: int, epochs: int) -> PipelineConfig:
    schedule, fetch = _schedule(section.within("schedule")), section.within("fetch").config(FetchConfig)
    return section.checked(
        PipelineConfig,
        order=order,
        batch_size=section.integer("batch_size"),
        world_size=nodes,
        memory_bytes=section.size("memory_bytes", 512 << 20),
        drop_last=section.boolean("drop_last", default=False),
        schedule=schedule,
        fetch=fetch,
        end_epoch=epochs,
    )


def _schedule(section: Section) -> Schedule:
    match section.choice("kind", ("continuous", "fetch-size", "next-batch"), "continuous"):
        case "fetch-size":
            size, threshold = section.integer("fetch_size"), section.integer("threshold", 0, least=0)
            return section.checked(FetchSize, fetch_size=size, threshold=threshold)
        case "next-batch":
            return section.checked(NextBatch, depth=section.integer("depth", 1))
        case _:
            return section.checked(Continuous)


def _rate(section: Section, name: str, default: float) -> float:
    return section.number(name, default, least=LEAST_BYTES_PER_SECOND)


def _cache(section: Section) -> TierModel:
    kind = section.choice("kind", tuple(_DEVICES), "disk")
    rate, seconds = _DEVICES[kind]
    latency = _latency(section.within("latency"), lambda: Constant(seconds))
    return section.checked(
        TierModel,
        name=section.text("name", kind),
        limit_bytes=section.size("limit_bytes"),
        policy=section.choice("policy", (*policy_names(), REPLICA_AWARE), "next-use"),
        bytes_per_second=_rate(section, "bytes_per_second", rate),
        latency=latency,
    )


def _warm(section: Section) -> WarmModel:
    usual, config = WarmModel(), WarmConfig()
    latency = _latency(section.within("latency"), lambda: usual.latency)
    reclaim = None
    if "mean_life_seconds" in section:
        life_seconds = section.number("mean_life_seconds", least=60.0, most=LONGEST_SECONDS * 365)
        reclaim = Reclaim(mean_life_seconds=life_seconds, together=section.number("together", 0.0, most=1.0))
    memory_bytes = section.size("memory_bytes", usual.memory_bytes)
    backup_seconds = section.number("backup_seconds", least=1.0) if "backup_seconds" in section else None
    shape: dict[str, Any] = {
        "nodes": section.integer("nodes", config.nodes),
        "code": _code(section, str(config.code)),
        "keep_warm_seconds": section.number("keep_warm_seconds", config.keep_warm_seconds, least=1.0),
        "backup_seconds": backup_seconds,
        "linger_seconds": section.number("linger_seconds", config.linger_seconds, most=LONGEST_SECONDS),
        "put_back": section.integer("put_back", config.put_back, least=0, most=_MOST_PUT_BACK),
    }
    limit_bytes = section.size("limit_bytes", memory_bytes * 3 // 4)
    rate = _rate(section, "bytes_per_second", usual.bytes_per_second)
    return section.checked(
        lambda: WarmModel(
            config=WarmConfig(**shape),
            memory_bytes=memory_bytes,
            limit_bytes=limit_bytes,
            bytes_per_second=rate,
            latency=latency,
            reclaim=reclaim,
        )
    )


def _code(section: Section, default: str) -> Code:
    text = section.text("code", default)
    try:
        return Code.parse(text)
    except ConfigError as error:
        raise section.wrong("code", text, f"a code: {error}") from None


def _latency(section: Section, default: Callable[[], Latency], most_seconds: float = LONGEST_SECONDS) -> Latency:
    """Return a distribution: constant, lognormal, or what a file has; a part of it may be late."""
    usual = _usual(section, default, most_seconds)
    if "late_fraction" not in section:
        section.end()
        return usual
    fraction, seconds = section.number("late_fraction", most=1.0), section.number("late_seconds", most=LONGEST_SECONDS)
    return section.checked(Late, usual=usual, fraction=fraction, seconds=seconds)


def _usual(section: Section, default: Callable[[], Latency], most_seconds: float) -> Latency:
    if "seconds" in section:
        return Constant(section.number("seconds", most=most_seconds))
    if "median_seconds" in section:
        median = section.number("median_seconds", least=LEAST_MEDIAN_SECONDS, most=most_seconds)
        p99 = section.number("p99_seconds", most=LONGEST_SECONDS)
        try:
            return LogNormal(median, p99)
        except ConfigError as error:
            raise section.wrong("p99_seconds", p99, f"what a distribution has: {error}") from None
    if "recorded" in section:
        path, event = section.folder / section.text("recorded"), section.text("event", "first_byte")
        return read_durations(path, event)
    return default()


_PLATFORM = "lambda"
"""Whose prices functions have."""
_COLUMNS = (
    "epoch",
    "seconds",
    "wait s, mean",
    "wait s, least",
    "wait s, most",
    "stall",
    "look-ups",
    "misses",
    "requests",
    "hedges",
    "read GB",
    "request dollars",
)


def outcome(name: str, scenario: Scenario, run: Run, *, prices: Prices, url: str) -> Outcome:
    """Return a run's table, a line an epoch and one for all, and its picture.

    Args:
        name: of the table.
        scenario: what was simulated.
        run: what it took.
        prices: of requests,
        url: to a store like this one.
    """
    dollars = prices.request_dollars(url, Operation.GET)
    tiers = sorted({tier for each in run.epochs for tier in each.tier_hits})
    epochs = [run.of_epoch(epoch) for epoch in range(scenario.epochs)]
    rows = [_row(epoch, results, tiers, dollars) for epoch, results in enumerate(epochs)]
    rows.append(_row("all", run.epochs, tiers, dollars, seconds=run.seconds))
    first = max(each.first_batch_seconds for each in run.of_epoch(0) if each.first_batch_seconds is not None)
    nodes = counted(scenario.feed.world_size, "node")
    remarks: tuple[str, ...] = (
        f"{nodes}, {counted(len(scenario.manifest), 'super-sample')}; waits are of a node.",
        f"The first batch was there after {first:.3g} s on the last of the nodes.",
        f"A GET costs ${dollars:.3g} ({url}, {prices.date}); look-ups, requests and bytes are of all nodes together.",
    )
    if run.warm is not None:
        remarks = (*remarks, *_warm_remarks(run.warm, run.seconds, prices, dollars))
    table = Table(name, (*_COLUMNS, *(f"from {tier}" for tier in tiers)), rows)
    return Outcome([table], _panels(epochs, tiers), remarks)


def _warm_remarks(warm: WarmTally, seconds: float, prices: Prices, get_dollars: float) -> tuple[str, ...]:
    config, bill = warm.model.config, warm.bill(prices.function(_PLATFORM), get_dollars)
    gone = sum(len(each.losses) for each in warm.lives)
    reads, dollars = counted(warm.hits + warm.losses, "read"), f"${bill.dollars:.3g} at {_PLATFORM}'s prices"
    parts = f"reads and writes ${bill.read_dollars:.3g}, upkeep ${bill.upkeep_dollars:.3g}"
    rate = warm.bucket_bytes / 1e6 / max(1e-12, seconds)
    gets = f"by {counted(warm.bucket_requests, 'GET')}, ${bill.bucket_dollars:.3g}, {rate:.3g} MB/s on average"
    return (
        f"The warm tier: {counted(config.nodes, 'function')}, {config.code} shards; {warm.evicted} went for others.",
        f"Of {reads} of what it held, {warm.losses} found too many shards lost; {warm.rebuilt} were put back by reads.",
        *([f"{counted(warm.put_back, 'shard')} went back from the bucket {gets}."] if config.put_back else []),
        f"Its functions lost their memory {gone} times in {seconds / 3600:.3g} h. All costs {dollars}: {parts}.",
    )


def _row(
    epoch: int | str, nodes: Sequence[EpochResult], tiers: Sequence[str], dollars: float, seconds: float | None = None
) -> tuple[Cell, ...]:
    waits = [each.wait_seconds for each in nodes]
    requests = sum(each.requests for each in nodes)
    hits = sum((each.tier_hits for each in nodes), Counter[str]())
    return (
        epoch,
        max(each.seconds for each in nodes) if seconds is None else seconds,
        fmean(waits),
        min(waits),
        max(waits),
        sum(waits) / max(1e-12, sum(each.seconds for each in nodes)),
        sum(each.look_ups for each in nodes),
        sum(each.misses for each in nodes),
        requests,
        sum(each.hedges for each in nodes),
        sum(each.read_bytes for each in nodes) / 1e9,
        requests * dollars,
        *(hits[tier] for tier in tiers),
    )


def _panels(epochs: Sequence[Sequence[EpochResult]], tiers: Sequence[str]) -> list[Panel]:
    numbers = list(range(len(epochs)))
    waits = [[each.wait_seconds for each in nodes] for nodes in epochs]
    sources = {"the bucket, in requests": [sum(each.requests for each in nodes) for nodes in epochs]}
    sources |= {tier: [sum(each.tier_hits[tier] for each in nodes) for nodes in epochs] for tier in tiers}
    return [
        Panel(
            "Wait for data",
            "epoch",
            "seconds of a node",
            [
                Series("slowest node", numbers, [max(each) for each in waits]),
                Series("mean", numbers, [fmean(each) for each in waits]),
            ],
        ),
        Panel(
            "Where super-samples came from",
            "epoch",
            "number, of all nodes",
            [Series(name, numbers, numbers_of) for name, numbers_of in sources.items()],
        ),
    ]
