"""Scenarios that a person describes in a TOML file; every field is in ``docs/simulator.md``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stoker.cache.policies import POLICIES
from stoker.errors import ConfigError
from stoker.feed import FeedConfig
from stoker.fetch.config import FetchConfig
from stoker.manifest import Manifest
from stoker.order import OrderConfig
from stoker.plan.bucket import BucketModel
from stoker.plan.dataset import described
from stoker.plan.latency import Constant, Late, Latency, LogNormal
from stoker.plan.recorded import read_durations
from stoker.plan.recorded_bucket import recorded_bucket
from stoker.plan.scenario import Scenario
from stoker.plan.section import Section, read_section
from stoker.plan.tier_model import TierModel
from stoker.schedule import Continuous, FetchSize, NextBatch, Schedule
from stoker.store import open_store
from stoker.trace.recording import read_trace
from stoker.versions import read_manifest

__all__ = ["ScenarioFile", "read_scenario"]

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
    title, nodes, epochs = top.text("title", path.stem), top.integer("nodes", 1), top.integer("epochs", 1)
    seed, in_step = top.integer("seed", 0, least=0), top.boolean("in_step", default=False)
    dataset, order, bucket, node = (top.within(name) for name in ("dataset", "order", "bucket", "node"))
    top.end()
    url = dataset.text("url") if "url" in dataset else ""
    prices_of = bucket.text("prices_of", url or "s3")
    compute = _latency(node.within("compute"), lambda: Constant(0.0))
    network = node.number("network_bytes_per_second", float("inf"))
    caches = [_cache(section) for section in node.each("caches")]
    return ScenarioFile(
        title=title,
        url=prices_of,
        scenario=top.checked(
            Scenario,
            bucket=_bucket(bucket),
            feed=_feed(node, _order(order, nodes), nodes, epochs),
            manifest=_manifest(dataset, url),
            compute=compute,
            node_bytes_per_second=network,
            caches=caches,
            epochs=epochs,
            in_step=in_step,
            seed=seed,
        ),
    )


def _manifest(section: Section, url: str) -> Manifest:
    if url:
        version = section.integer("version") if "version" in section else None
        section.end()
        return asyncio.run(_pinned(url, version))
    return section.checked(
        described,
        super_samples=section.integer("super_samples"),
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
    first_byte = _latency(section.within("first_byte"), lambda: usual.first_byte)
    told = ("connection_bytes_per_second", "total_bytes_per_second")
    given = {name: getattr(usual, name) for name in told if name not in section}
    return section.config(BucketModel, first_byte=first_byte, **given)


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


def _cache(section: Section) -> TierModel:
    kind = section.choice("kind", tuple(_DEVICES), "disk")
    rate, seconds = _DEVICES[kind]
    latency = _latency(section.within("latency"), lambda: Constant(seconds))
    return section.checked(
        TierModel,
        name=section.text("name", kind),
        limit_bytes=section.size("limit_bytes"),
        policy=section.choice("policy", tuple(POLICIES), "next-use"),
        bytes_per_second=section.number("bytes_per_second", rate),
        latency=latency,
    )


def _latency(section: Section, default: Callable[[], Latency]) -> Latency:
    """Return a distribution: constant, lognormal, or what a file has; a part of it may be late."""
    usual = _usual(section, default)
    if "late_fraction" not in section:
        section.end()
        return usual
    fraction, seconds = section.number("late_fraction"), section.number("late_seconds")
    return section.checked(Late, usual=usual, fraction=fraction, seconds=seconds)


def _usual(section: Section, default: Callable[[], Latency]) -> Latency:
    if "seconds" in section:
        return Constant(section.number("seconds"))
    if "median_seconds" in section:
        median, p99 = section.number("median_seconds"), section.number("p99_seconds")
        try:
            return LogNormal(median, p99)
        except ConfigError as error:
            raise section.wrong("p99_seconds", p99, f"what a distribution has: {error}") from None
    if "recorded" in section:
        path, event = section.folder / section.text("recorded"), section.text("event", "first_byte")
        return read_durations(path, event)
    return default()
