"""Configuration of a warm tier, and the URLs that express it in settings and on the command line.

``warm+lambda://PREFIX?listen=10.0.0.9:7411`` and ``warm+gcf://…`` stand for a proxy in this process, whose nodes are
the functions ``PREFIX-warm-0``, ``PREFIX-warm-1`` and so on. A URL never contains a secret.
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

from stoker._base.arguments import AtLeastOne, BoundedConfig, NumberBound
from stoker._base.meter import Egress
from stoker._base.sizes import parse_bytes
from stoker._deprecation import caller_stacklevel
from stoker._shared.address import Address
from stoker.errors import ConfigError
from stoker.fanout import ExecutorOptions
from stoker_warm._directory import MAX_NODES
from stoker_warm._erasure import ErasureCode
from stoker_warm._events import MAX_LINGER_SECONDS
from stoker_warm._frames import MAX_SHARD_BYTES

_MIN_LINGER_SECONDS = 0.01
"""Long enough for the first request to reach a node."""
_Duration = Annotated[float, NumberBound(">", 0), NumberBound("<", math.inf)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmConfig(BoundedConfig):
    """Settings of a proxy.

    Attributes:
        nodes: Number of functions; they are named ``warm-0`` to ``warm-{nodes - 1}`` behind the deployment's prefix.
        code: Erasure code of objects; the shards of one object are on distinct nodes.
        linger_seconds: Time that a node waits, and is billed, after its last request.
        keep_warm_seconds: Time without contact after which a node is called, so that the platform keeps it.
        ping_seconds: Timeout for the answer of a node that may be awake; after it, the node is called again.
        wake_seconds: Timeout for a called node to connect, including a cold start.
        fresh_seconds: Time after an answer in which a node is assumed to be awake.
        read_seconds: Timeout of reading an object; after it, the object is read from the bucket.
        write_seconds: Timeout of writing a shard, including waking its node.
        pending_bytes: Maximum bytes of object copies that wait to be written; further offers are declined.
        writes: Maximum number of objects written concurrently.
        max_objects: Maximum number of objects in the directory, which takes about 160 bytes for each.

    Raises:
        ConfigError: A value is out of bounds, or there are fewer nodes than shards of an object.
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
                f"nodes must be from {self.code.shards}, the number of shards of code {self.code}, to {MAX_NODES}, not "
                f"{self.nodes}; deploy more nodes, or use a smaller code"
            )

    @property
    def max_object_bytes(self) -> int:
        """Size of the largest object that can be stored, in bytes; a shard must fit in one frame."""
        return self.code.data * MAX_SHARD_BYTES

    def node_name(self, node: int) -> str:
        """Return the name of a node, from its number."""
        return f"warm-{node}"


_EXAMPLE = "write for example warm+lambda://stoker?listen=10.0.0.5:7411&nodes=12&code=10+2"
_EXECUTORS = {"warm+lambda": ("lambda", "s3"), "warm+gcf": ("gcf", "gs")}
"""URL scheme → executor, and store of the same platform, for prices."""
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,48}", re.ASCII)
_SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)s", re.ASCII)
_COUNT = re.compile(r"\d{1,9}", re.ASCII)
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmDeployment(BoundedConfig):
    """Deployed nodes, and the proxy in this process that they connect to.

    Attributes:
        executor: Name of the executor that calls the nodes.
        options: Options of the executor.
        config: Settings of the proxy.
        listen: Address that the proxy listens on.
        advertised: Address that nodes connect to, if it differs from ``listen``.
        certificate: PEM files of certificate and key. None: no TLS on loopback, elsewhere an ephemeral certificate.
        bucket: URL or scheme of the store behind the tier, for comparing prices.
        egress: Location of this process, relative to the bucket.
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
        """Parse a URL.

        Raises:
            ConfigError: The URL is malformed, or a setting is unknown, repeated or invalid; the message names it.
        """
        if not isinstance(url, str):
            raise ConfigError(f"a warm tier must be a URL, not {url!r:.60}; {_EXAMPLE}")
        scheme, _, rest = url.partition("://")
        prefix, _, query = rest.partition("?")
        if "@" in rest:
            # The text before the @ may be a secret, so the message does not repeat the URL.
            raise ConfigError("a warm tier's URL contains a user or password; set the secret as STOKER_WARM_SECRET")
        if scheme not in _EXECUTORS:
            raise ConfigError(f"{scheme[:_SHOWN_CHARACTERS]!r} is not the scheme of a warm tier; {_EXAMPLE}")
        return _create_deployment(scheme, prefix.removesuffix("/"), _parse_query(query))


def _create_deployment(scheme: str, prefix: str, settings: Mapping[str, str]) -> WarmDeployment:
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(f"{prefix!r:.{_SHOWN_CHARACTERS}} cannot be the prefix of functions; {_EXAMPLE}")
    if "listen" not in settings:
        raise ConfigError(
            f"the URL of the warm tier lacks listen=, the address of this process for its nodes; {_EXAMPLE}"
        )
    if ("certificate" in settings) != ("key" in settings):
        raise ConfigError("certificate= and key=, the PEM files of the proxy, must be given together")
    executor, bucket = _EXECUTORS[scheme]
    deployment = WarmDeployment(
        executor=executor,
        options=ExecutorOptions(prefix=prefix, **_parse_settings(EXECUTOR_SETTINGS, settings)),
        config=WarmConfig(**_parse_settings(_CONFIG_SETTINGS, settings)),
        certificate=(Path(settings["certificate"]), Path(settings["key"])) if "key" in settings else None,
        **{"bucket": bucket} | _parse_settings(_DEPLOYMENT_SETTINGS, settings),
    )
    if deployment.listen.is_everywhere and deployment.advertised is None:
        raise ConfigError(
            f"nodes cannot connect to {deployment.listen.host}; add advertise=, an address at which they reach this "
            "process"
        )
    if deployment.advertised is not None and not deployment.advertised.port:
        raise ConfigError(f"nodes cannot connect to advertise={deployment.advertised}; give a port other than 0")
    return deployment


def _parse_query(query: str) -> dict[str, str]:
    """Parse a query string. A plus is not decoded, as in ``code=10+2``; errors do not repeat values."""
    known = {*_CONFIG_SETTINGS, *EXECUTOR_SETTINGS, "certificate", "key", *_DEPLOYMENT_SETTINGS}
    settings: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        name, _, value = pair.partition("=")
        if name not in known and name not in _REMOVED_SETTINGS:
            raise ConfigError(
                f"{name[:_SHOWN_CHARACTERS]!r} is not a setting of a warm tier; use {', '.join(sorted(known))}"
            )
        if name in settings:
            raise ConfigError(f"{name} is given twice in the URL of a warm tier; remove one")
        settings[name] = unquote(value, errors="strict") if value.isascii() else ""
        if not settings[name] or not settings[name].isprintable():
            raise ConfigError(f"{name} has no value, or an unprintable one, in the URL of a warm tier")
        if name in _REMOVED_SETTINGS:
            text = f"{name}= of a warm tier has no effect: {_REMOVED_SETTINGS[name]}; leave it out"
            warnings.warn(text, DeprecationWarning, stacklevel=caller_stacklevel())
    return settings


_Parsers = Mapping[str, tuple[str, Callable[[str], Any]]]
"""Setting → name of the field, and parser of the setting's text."""


def _parse_settings(parsers: _Parsers, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return field → value for the given settings."""
    values = dict[str, Any]()
    for name, (field_name, parse) in parsers.items():
        try:
            if name in settings:
                values[field_name] = parse(settings[name])
        except ConfigError as error:
            raise ConfigError(f"{name} of a warm tier: {error}") from None
    return values


def _parse_count(text: str) -> int:
    if not _COUNT.fullmatch(text):
        raise ConfigError(f"expected a whole number, not {text!r:.{_SHOWN_CHARACTERS}}")
    return int(text)


def _parse_seconds(text: str) -> float:
    match = _SECONDS.fullmatch(text)
    if match is None:
        raise ConfigError(f"expected a number of seconds such as 60s or 0.25s, not {text!r:.{_SHOWN_CHARACTERS}}")
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
"""Settings of the executor."""
BILLING_OPTIONS = ("memory_bytes", "vcpus")
"""Fields of the executor's options that affect only the bill."""
_DEPLOYMENT_SETTINGS: _Parsers = {
    "listen": ("listen", Address.parse),
    "advertise": ("advertised", Address.parse),
    "bucket": ("bucket", str),
    "egress": ("egress", str),
}
_REMOVED_SETTINGS = {
    "backup": "nodes have no second instances, and a lost object is read from the bucket and stored again",
    "put_back": "lost shards are written again by the next read of their object, from the bucket if too many are lost",
}
"""Settings of earlier releases, which are accepted with a warning → explanation for the warning."""
