"""Scenarios that a person describes in a TOML file; every field is in ``docs/simulator.md``."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker._cache.eviction import policy_names
from stoker._diagnostics.latency import (
    LEAST_MEDIAN_SECONDS,
    LONGEST_SECONDS,
    BucketModel,
    Constant,
    Late,
    Latency,
    LogNormal,
)
from stoker._fetch.config import FetchConfig
from stoker._fetch.feed import FeedConfig
from stoker._fetch.schedule import Continuous, FetchSize, NextBatch, Schedule
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker._order.order import MAX_LANES, OrderConfig
from stoker._stores import open_store
from stoker._trace.recording import read_trace
from stoker.errors import ConfigError
from stoker_sim._models.dataset import described
from stoker_sim._models.reclaim import Reclaim
from stoker_sim._models.recorded import read_durations
from stoker_sim._models.recorded_bucket import recorded_bucket
from stoker_sim._models.simulated_warm import WarmModel
from stoker_sim._models.tier_model import TierModel
from stoker_sim._scenarios.scenario import LEAST_BYTES_PER_SECOND, LONGEST_FIRST_BYTE_SECONDS, Scenario
from stoker_sim._scenarios.section import Section, read_section
from stoker_warm._code import Code
from stoker_warm._settings import WarmConfig

__all__ = ["ScenarioFile", "read_scenario"]

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


def _feed(section: Section, order: OrderConfig, nodes: int, epochs: int) -> FeedConfig:
    schedule, fetch = _schedule(section.within("schedule")), section.within("fetch").config(FetchConfig)
    return section.checked(
        FeedConfig,
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
        policy=section.choice("policy", policy_names(), "next-use"),
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
