"""Reader of scenario files in TOML; ``docs/simulator.md`` lists all fields.

The type and the bounds of each field are checked. Unknown fields are errors, since most are misspelled names of fields
that have a default. Every error names the field by its whole path.
"""

from __future__ import annotations

import asyncio
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from stoker._base.fields import read_toml, shown
from stoker._base.sizes import MOST_BYTES, parse_bytes
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
from stoker._fetch.config import Continuous, FetchConfig, FetchSize, NextBatch, PipelineConfig, Schedule
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker._order.order import MAX_LANES, OrderConfig
from stoker._stores import open_store
from stoker._trace.recording import read_trace
from stoker.errors import ConfigError
from stoker_sim._bucket import described, read_durations, recorded_bucket
from stoker_sim._caches import REPLICA_AWARE, TierModel
from stoker_sim._scenario import LEAST_BYTES_PER_SECOND, LONGEST_FIRST_BYTE_SECONDS, Scenario
from stoker_sim._simulated_warm import WarmModel
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import Code

Config = TypeVar("Config")
_SIZED = ("_bytes", "_bytes_per_second")
_MOST_INTEGER = (1 << 63) - 1
"""TOML's limit on integers, which Python's parser does not enforce."""


def read_section(path: Path) -> Section:
    """Return the top-level section of a file.

    Raises:
        ConfigError: the file cannot be read, is too large, or is not TOML.
    """
    return Section(read_toml(path), str(path))


class Section:
    """A table of the file, whose methods remove and return a field, or raise ConfigError if it is invalid.

    Args:
        values: values of the fields by name.
        file: path of the file.
        path: path of the section in the file, such as ``bucket.first_byte``; empty for the top-level section.
    """

    def __init__(self, values: Mapping[str, Any], file: str, path: str = "") -> None:
        self._left, self._file, self._path = dict(values), file, path

    def __contains__(self, name: str) -> bool:
        return name in self._left

    @property
    def folder(self) -> Path:
        """Folder of the file, to which paths in the file are relative."""
        return Path(self._file).parent

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = _MOST_INTEGER) -> int:
        """Return an integer from ``least`` to ``most``."""
        value = self._take(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, value, f"an integer {_range(least, most, _MOST_INTEGER)}")
        return value

    def number(self, name: str, default: float | None = None, *, least: float = 0.0, most: float = math.inf) -> float:
        """Return a number from ``least`` to ``most``; fields of bytes may have a unit, such as ``"90MB"``."""
        value = self._take(name, default)
        number = self._size(name, value) if isinstance(value, str) and name.endswith(_SIZED) else value
        if not isinstance(number, int | float) or isinstance(number, bool) or not least <= number <= most:
            raise self.wrong(name, value, f"a number {_range(least, most, math.inf)}")
        return float(number)

    def size(self, name: str, default: int | None = None) -> int:
        """Return a number of bytes, which may have a unit, such as ``"8MiB"``."""
        return self._size(name, self._take(name, default))

    def boolean(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a non-empty text."""
        value = self._take(name, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, value, "a text")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        """Return one of the texts in ``choices``."""
        value = self._take(name, default)
        if value not in choices:
            raise self.wrong(name, value, f"one of {', '.join(choices)}")
        return str(value)

    def within(self, name: str) -> Section:
        """Return the section of this name, empty if the file has none."""
        value = self._left.pop(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, value, f"a table, [{self._named(name)}]")
        return Section(value, self._file, self._named(name))

    def each(self, name: str) -> list[Section]:
        """Return the sections of an array of tables, an empty list if the file has none."""
        value = self._left.pop(name, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.wrong(name, value, f"an array of tables, [[{self._named(name)}]]")
        return [Section(one, self._file, f"{self._named(name)}[{place}]") for place, one in enumerate(value)]

    def config(self, kind: type[Config], **given: Any) -> Config:
        """Return a frozen dataclass with ``given`` and, for its other numbers and booleans, this section's fields.

        Fields that are left out have the dataclass's default.
        """
        readers: dict[type, Callable[[str], Any]]
        readers = {int: partial(self.integer, least=0), float: self.number, bool: partial(self.boolean, default=False)}
        for name, type_ in get_type_hints(kind).items():
            if name in self._left and name not in given and type_ in readers:
                given[name] = readers[type_](name)
        return self.checked(kind, **given)

    def checked(self, make: Callable[..., Config], **given: Any) -> Config:
        """Return ``make(**given)``; a ConfigError that it raises gets the file and this section's path.

        All fields of the section must have been read before.
        """
        self.end()
        try:
            return make(**given)
        except ConfigError as error:
            raise ConfigError(f"{self._file}: {self._path + ': ' if self._path else ''}{error}") from None

    def end(self) -> None:
        """Raise ConfigError if fields are left that were not read."""
        if self._left:
            raise ConfigError(
                f"{self._file}: {self._named(min(self._left))} means nothing here: leave it out, or check the spelling"
            )

    def wrong(self, name: str, value: object, wanted: str) -> ConfigError:
        """Return the error for a field with an invalid value.

        Args:
            name: name of the field.
            value: its value.
            wanted: description of the values that are valid.
        """
        return ConfigError(f"{self._file}: {self._named(name)} is {shown(value)}, not {wanted}")

    def _size(self, name: str, value: Any) -> int:
        try:
            size_bytes = parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{self._file}: {self._named(name)}: {error}") from None
        if size_bytes > MOST_BYTES:
            raise self.wrong(name, value, f"a number of bytes of at most {MOST_BYTES} (1 EiB)")
        return size_bytes

    def _take(self, name: str, default: object) -> Any:
        if name in self._left:
            value = self._left.pop(name)
            if isinstance(value, int) and not -_MOST_INTEGER <= value <= _MOST_INTEGER:
                raise self.wrong(name, value, "a number of 64 bits, which is TOML's limit")
            return value
        if default is None:
            raise ConfigError(f"{self._file}: {self._named(name)} is missing")
        return default

    def _named(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def _range(least: float, most: float, endless: float) -> str:
    return f"of at least {least:g}" if most == endless else f"from {least:g} to {most:,.15g}"


_MOST_SUPER_SAMPLES = 10_000_000
"""Maximum number of super-samples; the simulator holds a few hundred bytes for each."""
_MOST_EVENTS = 500_000_000
_LEAST_REQUESTS_PER_SECOND = 0.001
_DEVICES = {"memory": (10e9, 0.0), "disk": (2e9, 0.0001)}
"""Kind of cache → default rate in bytes a second, and default latency in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioFile:
    """The content of a scenario file.

    Attributes:
        title: title of the results.
        url: URL of the store whose request prices are used.
        scenario: the scenario to simulate.
    """

    title: str
    url: str
    scenario: Scenario


def read_scenario(path: Path) -> ScenarioFile:
    """Read a scenario file; of a data set given by its URL only the manifest is read.

    Raises:
        ConfigError: the file cannot be read, or a field is missing, unknown or out of bounds; the error names it.
        StoreError: the manifest could not be read.
    """
    top = read_section(path)
    title, epochs = top.text("title", path.stem), top.integer("epochs", 1)
    nodes = top.integer("nodes", 1, most=MAX_LANES)  # each node needs at least one lane
    dataset, order, bucket, node = (top.within(name) for name in ("dataset", "order", "bucket", "node"))
    url = dataset.text("url") if "url" in dataset else ""
    prices_of, sections = bucket.text("prices_of", url or "s3"), node.each("caches")
    caches = [_cache(section) for section in sections]
    settings = {
        "seed": top.integer("seed", 0, least=0),
        "in_step": top.boolean("in_step", default=False),
        "warm": _warm(top.within("warm")) if "warm" in top else None,
        "compute": _latency(node.within("compute"), Constant(0.0)),
        "node_bytes_per_second": _rate(node, "network_bytes_per_second", math.inf),
        "bucket": _bucket(bucket),
        "feed": _feed(node, _order(order, nodes), nodes, epochs),
    }
    top.end()
    manifest = _manifest(dataset, url)
    for section, cache in zip(sections, caches, strict=True):
        if cache.limit_bytes < manifest.largest_bytes:  # a loader refuses such a cache, too
            wanted = f"at least {manifest.largest_bytes}, the size of the largest super-sample"
            raise section.wrong("limit_bytes", cache.limit_bytes, wanted)
    scenario = top.checked(Scenario, manifest=manifest, epochs=epochs, caches=caches, **settings)
    _check_length(path, scenario)
    return ScenarioFile(title=title, url=prices_of, scenario=scenario)


def _check_length(path: Path, scenario: Scenario) -> None:
    """Raise ConfigError if the simulation would take days."""
    feed, manifest = scenario.feed, scenario.manifest
    steps = feed.dealing(manifest.samples).steps_from(0) * feed.world_size
    events = scenario.epochs * (steps + len(manifest))
    if events > _MOST_EVENTS:
        raise ConfigError(
            f"{path}: epochs {scenario.epochs:,} of {steps:,} batches and {len(manifest):,} super-samples each "
            f"are more than the {_MOST_EVENTS:,} that can be simulated in a day: take fewer epochs, nodes or "
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
    """Return the bucket model; figures in the file take precedence over those of a trace."""
    usual = BucketModel()
    if "trace" in section:
        usual = recorded_bucket(read_trace(section.folder / section.text("trace")))
    first_byte = _latency(section.within("first_byte"), usual.first_byte, LONGEST_FIRST_BYTE_SECONDS)
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
    latency = _latency(section.within("latency"), Constant(seconds))
    return section.checked(
        TierModel,
        name=section.text("name", kind),
        limit_bytes=section.size("limit_bytes"),
        policy=section.choice("policy", (*policy_names(), REPLICA_AWARE), "next-use"),
        bytes_per_second=_rate(section, "bytes_per_second", rate),
        latency=latency,
    )


_REMOVED = ("backup_seconds", "put_back", "together")
"""Fields of earlier releases that are accepted with a warning and ignored."""


def _warm(section: Section) -> WarmModel:
    usual, config = WarmModel(), WarmConfig()
    latency = _latency(section.within("latency"), usual.latency)
    life_seconds = None
    if "mean_life_seconds" in section:
        life_seconds = section.number("mean_life_seconds", least=60.0, most=LONGEST_SECONDS * 365)
    _warn_of_removed(section)
    memory_bytes = section.size("memory_bytes", usual.memory_bytes)
    shape: dict[str, Any] = {
        "nodes": section.integer("nodes", config.nodes),
        "code": _code(section, str(config.code)),
        "keep_warm_seconds": section.number("keep_warm_seconds", config.keep_warm_seconds, least=1.0),
        "linger_seconds": section.number("linger_seconds", config.linger_seconds, most=LONGEST_SECONDS),
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
            mean_life_seconds=life_seconds,
        )
    )


def _warn_of_removed(section: Section) -> None:
    for name in _REMOVED:
        if name in section:
            section.number(name)
            text = f"warm.{name} has no effect, since only reads rewrite lost shards; leave it out"
            warnings.warn(text, DeprecationWarning, stacklevel=2)


def _code(section: Section, default: str) -> Code:
    text = section.text("code", default)
    try:
        return Code.parse(text)
    except ConfigError as error:
        raise section.wrong("code", text, f"a code: {error}") from None


def _latency(section: Section, default: Latency, most_seconds: float = LONGEST_SECONDS) -> Latency:
    """Return a distribution: constant, log-normal, or measured values of a file; a fraction of it may be late."""
    usual = _usual(section, default, most_seconds)
    if "late_fraction" not in section:
        section.end()
        return usual
    fraction, seconds = section.number("late_fraction", most=1.0), section.number("late_seconds", most=LONGEST_SECONDS)
    return section.checked(Late, usual=usual, fraction=fraction, seconds=seconds)


def _usual(section: Section, default: Latency, most_seconds: float) -> Latency:
    if "seconds" in section:
        return Constant(section.number("seconds", most=most_seconds))
    if "median_seconds" in section:
        median = section.number("median_seconds", least=LEAST_MEDIAN_SECONDS, most=most_seconds)
        p99 = section.number("p99_seconds", most=LONGEST_SECONDS)
        try:
            return LogNormal(median, p99)
        except ConfigError as error:
            raise section.wrong("p99_seconds", p99, f"a valid 99th percentile: {error}") from None
    if "recorded" in section:
        path, event = section.folder / section.text("recorded"), section.text("event", "first_byte")
        return read_durations(path, event)
    return default
