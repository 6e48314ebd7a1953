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
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from stoker._base.fields import quote_value, read_toml
from stoker._base.sizes import MAX_BYTES, parse_bytes
from stoker._cache.eviction import RENAMED_POLICIES, policy_names, present_policy
from stoker._deprecation import RENAMED
from stoker._diagnostics.latency import (
    MAX_SECONDS,
    MIN_MEDIAN_SECONDS,
    BucketModel,
    Constant,
    Latency,
    LateTail,
    LogNormal,
)
from stoker._fetch.config import Continuous, FetchConfig, FetchSize, NextBatch, PipelineConfig, Schedule
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker._order.order import MAX_LANES, OrderConfig
from stoker._stores import open_store
from stoker._trace.recording import read_trace
from stoker.errors import ConfigError
from stoker_sim._bucket import read_durations, recorded_bucket, synthetic_manifest
from stoker_sim._caches import REPLICA_AWARE, CacheModel
from stoker_sim._cluster import COPY_BYTES_PER_SECOND, NETWORK_BYTES_PER_SECOND, ClusterModel
from stoker_sim._scenario import MAX_FIRST_BYTE_SECONDS, MIN_BYTES_PER_SECOND, Scenario
from stoker_sim._simulated_warm import WarmTierModel
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode

Config = TypeVar("Config")
_SIZE_SUFFIXES = ("_bytes", "_bytes_per_second")
_MAX_INTEGER = (1 << 63) - 1
"""TOML's limit on integers, which Python's parser does not enforce."""


def read_section(path: Path) -> TomlSection:
    """Return the top-level section of a file.

    Raises:
        ConfigError: the file cannot be read, is too large, or is not TOML.
    """
    return TomlSection(read_toml(path), str(path))


def field_types(kind: type[Any]) -> dict[str, Any]:
    """Return the type of each field of a dataclass, by its present name and by its deprecated one if it has one.

    For a field that may also be None, which a file expresses by leaving it out, that is the other type.
    """
    types = {name: _without_none(hint) for name, hint in get_type_hints(kind).items()}
    return types | {old: types[new] for old, new in RENAMED.get(kind.__name__, {}).items()}


def _without_none(hint: Any) -> Any:
    """Return the type in a hint ``type | None``, or the hint."""
    others = [each for each in get_args(hint) if each is not NoneType]
    return others[0] if NoneType in get_args(hint) and len(others) == 1 else hint


class TomlSection:
    """A table of the file, whose methods remove and return a field, or raise ConfigError if it is invalid.

    Args:
        values: values of the fields by name.
        file: path of the file.
        path: path of the section in the file, such as ``bucket.first_byte``; empty for the top-level section.
    """

    def __init__(self, values: Mapping[str, Any], file: str, path: str = "") -> None:
        self._unread, self._file, self._path = dict(values), file, path

    def __contains__(self, name: str) -> bool:
        return name in self._unread

    @property
    def folder(self) -> Path:
        """Folder of the file, to which paths in the file are relative."""
        return Path(self._file).parent

    def integer(
        self, name: str, default: int | None = None, *, min_value: int = 1, max_value: int = _MAX_INTEGER
    ) -> int:
        """Return an integer from ``min_value`` to ``max_value``."""
        value = self._pop(name, default)
        if type(value) is not int or not min_value <= value <= max_value:
            raise self.invalid_value(name, value, f"an integer {_describe_range(min_value, max_value, _MAX_INTEGER)}")
        return value

    def number(
        self, name: str, default: float | None = None, *, min_value: float = 0.0, max_value: float = math.inf
    ) -> float:
        """Return a number from ``min_value`` to ``max_value``; fields of bytes may have a unit, such as ``"90MB"``."""
        value = self._pop(name, default)
        number = self._parse_size(name, value) if isinstance(value, str) and name.endswith(_SIZE_SUFFIXES) else value
        if not isinstance(number, int | float) or isinstance(number, bool) or not min_value <= number <= max_value:
            raise self.invalid_value(name, value, f"a number {_describe_range(min_value, max_value, math.inf)}")
        return float(number)

    def size(self, name: str, default: int | None = None) -> int:
        """Return a number of bytes, which may have a unit, such as ``"8MiB"``."""
        return self._parse_size(name, self._pop(name, default))

    def boolean(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._pop(name, default)
        if not isinstance(value, bool):
            raise self.invalid_value(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a non-empty text."""
        value = self._pop(name, default)
        if not isinstance(value, str) or not value:
            raise self.invalid_value(name, value, "a text")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        """Return one of the texts in ``choices``."""
        value = self._pop(name, default)
        if value not in choices:
            raise self.invalid_value(name, value, f"one of {', '.join(choices)}")
        return str(value)

    def section(self, name: str) -> TomlSection:
        """Return the section of this name, empty if the file has none."""
        value = self._unread.pop(name, {})
        if not isinstance(value, dict):
            raise self.invalid_value(name, value, f"a table, [{self._full_name(name)}]")
        return TomlSection(value, self._file, self._full_name(name))

    def sections(self, name: str) -> list[TomlSection]:
        """Return the sections of an array of tables, an empty list if the file has none."""
        value = self._unread.pop(name, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.invalid_value(name, value, f"an array of tables, [[{self._full_name(name)}]]")
        return [TomlSection(one, self._file, f"{self._full_name(name)}[{index}]") for index, one in enumerate(value)]

    def create_config(self, kind: type[Config], **given: Any) -> Config:
        """Return a frozen dataclass with ``given`` and, for its other numbers and booleans, this section's fields.

        Fields that are left out have the dataclass's default; deprecated names of fields are valid.
        """
        readers: dict[type, Callable[[str], Any]]
        readers = {
            int: partial(self.integer, min_value=0),
            float: self.number,
            bool: partial(self.boolean, default=False),
        }
        for name, type_ in field_types(kind).items():
            if name in self._unread and name not in given and type_ in readers:
                given[name] = readers[type_](name)
        return self.create(kind, **given)

    def create(self, make: Callable[..., Config], **given: Any) -> Config:
        """Return ``make(**given)``; a ConfigError that it raises gets the file and this section's path.

        All fields of the section must have been read before.
        """
        self.reject_unread()
        try:
            return make(**given)
        except ConfigError as error:
            raise self.error(str(error)) from None

    def reject_unread(self) -> None:
        """Raise ConfigError if fields are left that were not read."""
        if self._unread:
            raise ConfigError(
                f"{self._file}: {self._full_name(min(self._unread))} has no effect here; remove it, or check "
                f"its spelling"
            )

    def error(self, message: str) -> ConfigError:
        """Return an error with the file and this section's path before its message."""
        return ConfigError(f"{self._file}: {self._path + ': ' if self._path else ''}{message}")

    def invalid_value(self, name: str, value: object, expected: str) -> ConfigError:
        """Return the error for a field with an invalid value.

        Args:
            name: name of the field.
            value: its value.
            expected: description of the values that are valid.
        """
        return ConfigError(f"{self._file}: {self._full_name(name)} is {quote_value(value)}, not {expected}")

    def _parse_size(self, name: str, value: Any) -> int:
        try:
            size_bytes = parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{self._file}: {self._full_name(name)}: {error}") from None
        if size_bytes > MAX_BYTES:
            raise self.invalid_value(name, value, f"a number of bytes of at most {MAX_BYTES} (1 EiB)")
        return size_bytes

    def _pop(self, name: str, default: object) -> Any:
        if name in self._unread:
            value = self._unread.pop(name)
            if isinstance(value, int) and not -_MAX_INTEGER <= value <= _MAX_INTEGER:
                raise self.invalid_value(name, value, "a number of 64 bits, which is TOML's limit")
            return value
        if default is None:
            raise ConfigError(f"{self._file}: {self._full_name(name)} is missing")
        return default

    def _full_name(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def _describe_range(min_value: float, max_value: float, endless: float) -> str:
    return f"of at least {min_value:g}" if max_value == endless else f"from {min_value:g} to {max_value:,.15g}"


_MAX_SUPER_SAMPLES = 10_000_000
"""Maximum number of super-samples; the simulator holds a few hundred bytes for each."""
_MAX_EVENTS = 500_000_000
_MIN_REQUESTS_PER_SECOND = 0.001
_DEFAULT_DEVICES = {"memory": (10e9, 0.0), "disk": (2e9, 0.0001)}
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
    nodes = top.integer("nodes", 1, max_value=MAX_LANES)  # each node needs at least one lane
    dataset, order, bucket, node = (top.section(name) for name in ("dataset", "order", "bucket", "node"))
    url = dataset.text("url") if "url" in dataset else ""
    prices_of, sections = bucket.text("prices_of", url or "s3"), node.sections("caches")
    caches = [_parse_cache(section) for section in sections]
    cluster = top.section("cluster") if "cluster" in top else None
    settings: dict[str, Any] = {
        "seed": top.integer("seed", 0, min_value=0),
        "in_step": top.boolean("in_step", default=False),
        "cluster": None if cluster is None else _parse_cluster(cluster, nodes),
        "warm": _parse_warm_tier(top.section("warm")) if "warm" in top else None,
        "compute": _parse_latency(node.section("compute"), Constant(0.0)),
        "node_bytes_per_second": _parse_rate(node, "network_bytes_per_second", math.inf),
        "bucket": _parse_bucket(bucket),
        "feed": _parse_pipeline(node, _parse_order(order, nodes), nodes, epochs),
    }
    top.reject_unread()
    manifest = _load_manifest(dataset, url)
    limited = [(section, cache.limit_bytes) for section, cache in zip(sections, caches, strict=True)]
    if cluster is not None:
        limited.append((cluster, settings["cluster"].limit_bytes))
    for section, limit_bytes in limited:
        if limit_bytes < manifest.largest_bytes:  # a loader refuses such a cache, and a cluster cache keeps nothing
            wanted = f"at least {manifest.largest_bytes}, the size of the largest super-sample"
            raise section.invalid_value("limit_bytes", limit_bytes, wanted)
    scenario = top.create(Scenario, manifest=manifest, epochs=epochs, caches=caches, **settings)
    _check_length(path, scenario)
    return ScenarioFile(title=title, url=prices_of, scenario=scenario)


def _check_length(path: Path, scenario: Scenario) -> None:
    """Raise ConfigError if the simulation would take days."""
    feed, manifest = scenario.feed, scenario.manifest
    steps = feed.sharding(manifest.samples).count_steps(0) * feed.world_size
    events = scenario.epochs * (steps + len(manifest))
    if events > _MAX_EVENTS:
        raise ConfigError(
            f"{path}: epochs {scenario.epochs:,} of {steps:,} batches and {len(manifest):,} super-samples each "
            f"are more than the {_MAX_EVENTS:,} that can be simulated in a day: take fewer epochs, nodes or "
            "super_samples, or a larger batch_size"
        )


def _load_manifest(section: TomlSection, url: str) -> Manifest:
    if url:
        version = section.integer("version") if "version" in section else None
        section.reject_unread()
        return asyncio.run(_read_pinned_manifest(url, version))
    return section.create(
        synthetic_manifest,
        super_samples=section.integer("super_samples", max_value=_MAX_SUPER_SAMPLES),
        samples=section.integer("samples"),
        super_sample_bytes=section.size("super_sample_bytes"),
    )


async def _read_pinned_manifest(url: str, version: int | None) -> Manifest:
    store = open_store(url)
    try:
        return await read_manifest(store, version)
    finally:
        await store.close()


def _parse_bucket(section: TomlSection) -> BucketModel:
    """Return the bucket model; figures in the file take precedence over those of a trace."""
    usual = BucketModel()
    if "trace" in section:
        usual = recorded_bucket(read_trace(section.folder / section.text("trace")))
    first_byte = _parse_latency(section.section("first_byte"), usual.first_byte, MAX_FIRST_BYTE_SECONDS)
    names = ("connection_bytes_per_second", "total_bytes_per_second")
    rates = {name: _parse_rate(section, name, getattr(usual, name)) for name in names}
    requests = section.number("requests_per_second", math.inf, min_value=_MIN_REQUESTS_PER_SECOND)
    return section.create_config(BucketModel, first_byte=first_byte, requests_per_second=requests, **rates)


def _parse_order(section: TomlSection, nodes: int) -> OrderConfig:
    shuffle = section.choice("shuffle", ("none", "block", "window", "full"), "window")
    defaults = {"lanes": nodes} if "lanes" not in section else {}
    return section.create_config(OrderConfig, shuffle=shuffle, unit_bytes=None, **defaults)  # units are not simulated


def _parse_pipeline(section: TomlSection, order: OrderConfig, nodes: int, epochs: int) -> PipelineConfig:
    schedule = _parse_schedule(section.section("schedule"))
    fetch = section.section("fetch").create_config(FetchConfig)
    return section.create(
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


def _parse_schedule(section: TomlSection) -> Schedule:
    match section.choice("kind", ("continuous", "fetch-size", "next-batch"), "continuous"):
        case "fetch-size":
            size = section.integer("fetch_size")
            threshold = section.integer("threshold", 0, min_value=0)
            return section.create(FetchSize, fetch_size=size, threshold=threshold)
        case "next-batch":
            return section.create(NextBatch, depth=section.integer("depth", 1))
        case _:
            return section.create(Continuous)


def _parse_rate(section: TomlSection, name: str, default: float) -> float:
    return section.number(name, default, min_value=MIN_BYTES_PER_SECOND)


def _parse_cache(section: TomlSection) -> CacheModel:
    kind = section.choice("kind", tuple(_DEFAULT_DEVICES), "disk")
    rate, seconds = _DEFAULT_DEVICES[kind]
    latency = _parse_latency(section.section("latency"), Constant(seconds))
    policies = (*policy_names(), REPLICA_AWARE, *RENAMED_POLICIES)
    return section.create(
        CacheModel,
        name=section.text("name", kind),
        limit_bytes=section.size("limit_bytes"),
        policy=present_policy(section.choice("policy", policies, "next-use")),
        bytes_per_second=_parse_rate(section, "bytes_per_second", rate),
        latency=latency,
    )


def _parse_cluster(section: TomlSection, nodes: int) -> ClusterModel:
    return section.create(
        ClusterModel,
        machines=nodes,
        limit_bytes=section.size("limit_bytes"),
        network_bytes_per_second=_parse_rate(section, "network_bytes_per_second", NETWORK_BYTES_PER_SECOND),
        bytes_per_second=_parse_rate(section, "bytes_per_second", COPY_BYTES_PER_SECOND),
    )


_REMOVED_FIELDS = ("backup_seconds", "put_back", "together")
"""Fields of earlier releases that are accepted with a warning and ignored."""


def _parse_warm_tier(section: TomlSection) -> WarmTierModel:
    usual, config = WarmTierModel(), WarmConfig()
    latency = _parse_latency(section.section("latency"), usual.latency)
    life_seconds = None
    if "mean_life_seconds" in section:
        life_seconds = section.number("mean_life_seconds", min_value=60.0, max_value=MAX_SECONDS * 365)
    _warn_of_removed_fields(section)
    memory_bytes = section.size("memory_bytes", usual.memory_bytes)
    shape: dict[str, Any] = {
        "nodes": section.integer("nodes", config.nodes),
        "code": _parse_code(section, str(config.code)),
        "keep_warm_seconds": section.number("keep_warm_seconds", config.keep_warm_seconds, min_value=1.0),
        "linger_seconds": section.number("linger_seconds", config.linger_seconds, max_value=MAX_SECONDS),
    }
    limit_bytes = section.size("limit_bytes", memory_bytes * 3 // 4)
    rate = _parse_rate(section, "bytes_per_second", usual.bytes_per_second)
    return section.create(
        lambda: WarmTierModel(
            config=WarmConfig(**shape),
            memory_bytes=memory_bytes,
            limit_bytes=limit_bytes,
            bytes_per_second=rate,
            latency=latency,
            mean_life_seconds=life_seconds,
        )
    )


def _warn_of_removed_fields(section: TomlSection) -> None:
    for name in _REMOVED_FIELDS:
        if name in section:
            section.number(name)
            text = f"warm.{name} has no effect, since only reads rewrite lost shards; leave it out"
            warnings.warn(text, DeprecationWarning, stacklevel=2)


def _parse_code(section: TomlSection, default: str) -> ErasureCode:
    text = section.text("code", default)
    try:
        return ErasureCode.parse(text)
    except ConfigError as error:
        raise section.invalid_value("code", text, f"a code: {error}") from None


def _parse_latency(section: TomlSection, default: Latency, max_seconds: float = MAX_SECONDS) -> Latency:
    """Return a distribution: constant, log-normal, or measured values of a file; a fraction of it may be late."""
    usual = _parse_usual_latency(section, default, max_seconds)
    if "late_fraction" not in section:
        section.reject_unread()
        return usual
    fraction = section.number("late_fraction", max_value=1.0)
    seconds = section.number("late_seconds", max_value=MAX_SECONDS)
    return section.create(LateTail, usual=usual, fraction=fraction, seconds=seconds)


def _parse_usual_latency(section: TomlSection, default: Latency, max_seconds: float) -> Latency:
    if "seconds" in section:
        return Constant(section.number("seconds", max_value=max_seconds))
    if "median_seconds" in section:
        median = section.number("median_seconds", min_value=MIN_MEDIAN_SECONDS, max_value=max_seconds)
        p99 = section.number("p99_seconds", max_value=MAX_SECONDS)
        try:
            return LogNormal(median, p99)
        except ConfigError as error:
            raise section.invalid_value("p99_seconds", p99, f"a valid 99th percentile: {error}") from None
    if "recorded" in section:
        path = section.folder / section.text("recorded")
        event = section.text("event", "first_byte")
        return read_durations(path, event)
    return default
