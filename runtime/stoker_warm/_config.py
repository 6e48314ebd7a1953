"""Configuration of a warm tier, and the URLs that settings and commands write it in.

``warm+lambda://PREFIX?listen=10.0.0.9:7411`` and ``warm+gcf://…`` are a proxy in this process, whose nodes are the
functions ``PREFIX-warm-0`` and so on. Secrets are never part of it.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

from stoker._base.arguments import AtLeastOne, BoundedConfig, NumberBound, caller_stacklevel
from stoker._base.meter import Egress
from stoker._base.sizes import parse_bytes
from stoker._shared.address import Address
from stoker.errors import ConfigError
from stoker.fanout import ExecutorOptions
from stoker_warm._directory import MAX_NODES
from stoker_warm._erasure import ErasureCode
from stoker_warm._events import MAX_LINGER_SECONDS
from stoker_warm._frames import MAX_SHARD_BYTES

_MIN_LINGER_SECONDS = 0.01
"""A node stays until the first request has come to it."""
_Duration = Annotated[float, NumberBound(">", 0), NumberBound("<", math.inf)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmConfig(BoundedConfig):
    """The proxy's settings.

    Attributes:
        nodes: functions, called ``warm-0`` to ``warm-{nodes - 1}`` behind the deployment's prefix.
        code: how objects are cut; each shard is on a node of its own.
        linger_seconds: how long a node stays after the last request, and is billed.
        keep_warm_seconds: from the last contact with a node to a call that has the platform keep it.
        ping_seconds: for a node that may be awake to answer, before it is called again.
        wake_seconds: for a node that is called to connect, a cold start included.
        fresh_seconds: after an answer, in which a node is believed to be awake.
        read_seconds: for an object, at most; then the bucket is asked.
        write_seconds: for a shard that is put away, its node's wake included.
        pending_bytes: copies of objects that wait to be written; more are not kept at all.
        writes: objects that are written at once.
        max_objects: that are known of; bounds the memory for it, about 100 bytes each.

    Raises:
        ConfigError: a figure is out of bounds, or there are fewer nodes than an object has shards.
    """

    nodes: int = 12
    code: ErasureCode = field(default_factory=ErasureCode)
    linger_seconds: Annotated[float, NumberBound(">=", _MIN_LINGER_SECONDS), NumberBound("<=", MAX_LINGER_SECONDS)] = (
        0.25
    )
    keep_warm_seconds: _Duration = 60.0
    ping_seconds: _Duration = 0.25
    wake_seconds: _Duration = 10.0
    fresh_seconds: Annotated[float, NumberBound(">=", 0), NumberBound("<", math.inf)] = 1.0
    read_seconds: _Duration = 10.0
    write_seconds: _Duration = 30.0
    pending_bytes: AtLeastOne[int] = 256 << 20
    writes: AtLeastOne[int] = 8
    max_objects: AtLeastOne[int] = 1_000_000

    def __post_init__(self) -> None:
        BoundedConfig.__post_init__(self)  # super() does not know a class with slots
        if not self.code.shards <= self.nodes <= MAX_NODES:
            raise ConfigError(
                f"objects in {self.code} shards need {self.code.shards} to {MAX_NODES} nodes, not {self.nodes}: "
                "deploy more, or take a smaller code"
            )

    @property
    def max_object_bytes(self) -> int:
        """Size of the largest object whose shards can be sent."""
        return self.code.data * MAX_SHARD_BYTES

    def node_name(self, node: int) -> str:
        """Return what a node is called."""
        return f"warm-{node}"


_EXAMPLE = "write for example warm+lambda://stoker?listen=10.0.0.5:7411&nodes=12&code=10+2"
_EXECUTORS = {"warm+lambda": ("lambda", "s3"), "warm+gcf": ("gcf", "gs")}
"""Scheme → executor, and the scheme of the buckets beside it."""
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,48}", re.ASCII)
_SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)s", re.ASCII)
_COUNT = re.compile(r"\d{1,9}", re.ASCII)
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmDeployment(BoundedConfig):
    """Nodes, and the proxy in this process that they dial.

    Attributes:
        executor: what calls them.
        options: of the executor.
        config: of the proxy.
        listen: where it listens.
        advertised: address that nodes dial, if it is another.
        certificate: PEM files of what it shows and of its key; None off loopback is one that is made for this process.
        bucket: URL or scheme of the store behind the tier, for comparing prices.
        egress: where this process is, seen from the bucket.
    """

    executor: str
    options: ExecutorOptions
    config: WarmConfig
    listen: Address
    advertised: Address | None = None
    certificate: tuple[Path, Path] | None = None
    bucket: str = "s3"
    egress: Egress = "same_region"

    @classmethod
    def parse(cls, url: str) -> WarmDeployment:
        """Return what a URL says.

        Raises:
            ConfigError: it is not one, a setting is unknown, twice there or wrong; names it.
        """
        if not isinstance(url, str):
            raise ConfigError(f"a warm tier is told by a URL, not by {url!r:.60}; {_EXAMPLE}")
        scheme, _, rest = url.partition("://")
        place, _, query = rest.partition("?")
        if "@" in rest:
            # What stands before the @ may be a secret, so the URL is not repeated.
            raise ConfigError("a warm tier's URL holds a user or password; its secret is in STOKER_WARM_SECRET")
        if scheme not in _EXECUTORS:
            raise ConfigError(f"{scheme[:_SHOWN_CHARACTERS]!r} is no kind of warm tier; {_EXAMPLE}")
        return _create_deployment(scheme, place.removesuffix("/"), _parse_query(query))


def _create_deployment(scheme: str, prefix: str, settings: Mapping[str, str]) -> WarmDeployment:
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(f"the prefix of a warm tier's functions is {prefix!r:.{_SHOWN_CHARACTERS}}; {_EXAMPLE}")
    if "listen" not in settings:
        raise ConfigError(f"listen is missing: where nodes dial this process; {_EXAMPLE}")
    if ("certificate" in settings) != ("key" in settings):
        raise ConfigError("certificate and key go together: the PEM files of the proxy's certificate and its key")
    executor, bucket = _EXECUTORS[scheme]
    fleet = WarmDeployment(
        executor=executor,
        options=ExecutorOptions(prefix=prefix, **_parse_settings(EXECUTOR_SETTINGS, settings)),
        config=WarmConfig(**_parse_settings(_CONFIG_SETTINGS, settings)),
        certificate=(Path(settings["certificate"]), Path(settings["key"])) if "key" in settings else None,
        **{"bucket": bucket} | _parse_settings(_DEPLOYMENT_SETTINGS, settings),
    )
    if fleet.listen.is_everywhere and fleet.advertised is None:
        raise ConfigError(
            f"advertise is missing: nodes cannot dial {fleet.listen.host}, so say at which address they can"
        )
    if fleet.advertised is not None and not fleet.advertised.port:
        raise ConfigError(
            f"advertise of a warm tier: {fleet.advertised} has the port 0, at which nobody can be dialled"
        )
    return fleet


def _parse_query(query: str) -> dict[str, str]:
    """Return the settings of a query. A plus is a plus, as in ``code=10+2``; values are not repeated in errors."""
    known, given = (
        {*_CONFIG_SETTINGS, *EXECUTOR_SETTINGS, "certificate", "key", *_DEPLOYMENT_SETTINGS},
        dict[str, str](),
    )
    for each in query.split("&") if query else ():
        name, _, value = each.partition("=")
        if name not in known and name not in _REMOVED_SETTINGS:
            raise ConfigError(
                f"{name[:_SHOWN_CHARACTERS]!r} is no setting of such a warm tier; there are {', '.join(sorted(known))}"
            )
        if name in given:
            raise ConfigError(f"{name} is given twice in the URL of a warm tier")
        given[name] = unquote(value, errors="strict") if value.isascii() else ""
        if not given[name] or not given[name].isprintable():
            raise ConfigError(f"{name} has no value, or one that cannot be, in the URL of a warm tier")
        if name in _REMOVED_SETTINGS:
            text = f"{name}= of a warm tier has no effect: {_REMOVED_SETTINGS[name]}; leave it out"
            warnings.warn(text, DeprecationWarning, stacklevel=caller_stacklevel())
    return given


_Parsers = Mapping[str, tuple[str, Callable[[str], Any]]]
"""Setting → the field that takes it, and what reads its text."""


def _parse_settings(parsers: _Parsers, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return field → value, of the settings that are given."""
    values = dict[str, Any]()
    for name, (field_name, read) in parsers.items():
        try:
            if name in settings:
                values[field_name] = read(settings[name])
        except ConfigError as error:
            raise ConfigError(f"{name} of a warm tier: {error}") from None
    return values


def _parse_count(text: str) -> int:
    if not _COUNT.fullmatch(text):
        raise ConfigError(f"it is a whole number, not {text!r:.{_SHOWN_CHARACTERS}}")
    return int(text)


def _parse_seconds(text: str) -> float:
    match = _SECONDS.fullmatch(text)
    if match is None:
        raise ConfigError(f"it is a number of seconds such as 60s or 0.25s, not {text!r:.{_SHOWN_CHARACTERS}}")
    return float(match[1])


_CONFIG_SETTINGS: _Parsers = {
    "nodes": ("nodes", _parse_count),
    "code": ("code", ErasureCode.parse),
    "linger": ("linger_seconds", _parse_seconds),
    "keep_warm": ("keep_warm_seconds", _parse_seconds),
    "ping": ("ping_seconds", _parse_seconds),
    "wake": ("wake_seconds", _parse_seconds),
    "read": ("read_seconds", _parse_seconds),
    "write": ("write_seconds", _parse_seconds),
    "pending": ("pending_bytes", parse_bytes),
    "writes": ("writes", _parse_count),
    "objects": ("max_objects", _parse_count),
}
EXECUTOR_SETTINGS: _Parsers = {
    "region": ("region", str),
    "project": ("project", str),
    "endpoint": ("endpoint_url", str),
    "account": ("service_account", str),
    "memory": ("memory_bytes", parse_bytes),
    "vcpus": ("vcpus", _parse_count),
}
"""Of the executor."""
BILLING_OPTIONS = ("memory_bytes", "vcpus")
"""Of those, what only the bill depends on."""
_DEPLOYMENT_SETTINGS: _Parsers = {
    "listen": ("listen", Address.parse),
    "advertise": ("advertised", Address.parse),
    "bucket": ("bucket", str),
    "egress": ("egress", str),
}
_REMOVED_SETTINGS = {
    "backup": "nodes have no second instances, and an object that is lost is read from the bucket and kept again",
    "put_back": "lost shards are written again by the next read of their object, from the bucket if too many are lost",
}
"""Settings of earlier releases → what happens instead. They are accepted with a warning."""
