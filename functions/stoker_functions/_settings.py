"""What a deployment may touch and how large it is: read from the environment, once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stoker._base.fields import Fields
from stoker._base.sizes import parse_bytes
from stoker._format.supersample import MAX_SUPER_SAMPLE_BYTES
from stoker._stores.access_token import DATASET_NAME
from stoker._stores.location import parse_url
from stoker.errors import ConfigError, EventError

__all__ = ["INGEST_KINDS", "Ingest", "Settings"]

INGEST_KINDS = ("files", "image-folder", "webdataset")
_DEFAULT_MEMORY_BYTES = 512 << 20
_DEFAULT_TIMEOUT_SECONDS = 60.0
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_MAX_CLASSES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingest:
    """What becomes of raw objects that appear.

    Attributes:
        dataset: name of the data set that they are added to.
        kind: ``files``, ``image-folder`` or ``webdataset``.
        classes: names of all classes, in order, for ``image-folder``.
        super_sample_bytes: limit of a super-sample's data.
    """

    dataset: str
    kind: str = "files"
    classes: tuple[str, ...] = ()
    super_sample_bytes: int = 8 << 20

    @classmethod
    def from_json(cls, text: str) -> Ingest:
        """Return what the variable ``STOKER_INGEST`` says.

        Raises:
            ConfigError: it is not valid.
        """
        try:
            fields = Fields(json.loads(text), "variable STOKER_INGEST")
            classes = fields.array("classes", most=_MAX_CLASSES, default=[])
            if not all(isinstance(name, str) for name in classes) or len(set(classes)) != len(classes):
                raise EventError("the classes in STOKER_INGEST are not different texts")
            ingest = cls(
                dataset=fields.text("dataset", pattern=DATASET_NAME.pattern),
                kind=fields.choice("kind", INGEST_KINDS, default="files"),
                classes=tuple(classes),
                super_sample_bytes=fields.integer(
                    "super_sample_bytes", least=1, most=MAX_SUPER_SAMPLE_BYTES, default=8 << 20
                ),
            )
            fields.end()
        except (json.JSONDecodeError, EventError) as error:
            raise ConfigError(f"STOKER_INGEST is not valid: {error}") from None
        if (ingest.kind == "image-folder") != bool(ingest.classes):
            raise ConfigError("STOKER_INGEST needs the names of all classes for kind image-folder, and for no other")
        return ingest


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the functions of a deployment may do.

    Attributes:
        datasets: name → URL. A data set that an event names must be one of these, or lie below one.
        sources: URLs at or below which raw samples may be read.
        ingest: what becomes of raw objects that appear, if anything.
        catalog: ``bucket``, or the URL of a Redis server, without a password.
        catalog_password: of the Redis server.
        token_keys: what signs and checks the tokens of clients, as :mod:`stoker_functions.serve` reads it.
        warm_secret: what a node of the warm tier and its proxy know each other by, as base64url.
        warm_shelf_bytes: of shards that a node keeps; None for what its memory allows.
        memory_bytes: that an instance has.
        timeout_seconds: of an invocation, where the platform does not tell.
    """

    datasets: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    ingest: Ingest | None = None
    catalog: str = "bucket"
    catalog_password: str | None = field(default=None, repr=False)
    token_keys: str = field(default="", repr=False)
    warm_secret: str = field(default="", repr=False)
    warm_shelf_bytes: int | None = None
    memory_bytes: int = _DEFAULT_MEMORY_BYTES
    timeout_seconds: float = _DEFAULT_TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        _check_urls("STOKER_DATASETS", self.datasets.values())
        _check_urls("STOKER_SOURCES", self.sources)
        if self.ingest is not None and self.ingest.dataset not in self.datasets:
            raise ConfigError(
                f"STOKER_INGEST names the data set {self.ingest.dataset!r}, which STOKER_DATASETS has not"
            )
        if self.ingest is not None:
            _check_apart(self.datasets.values(), self.sources)
        if self.catalog != "bucket" and not self.catalog.startswith(("redis://", "rediss://")):
            raise ConfigError("STOKER_CATALOG is neither 'bucket' nor a redis:// or rediss:// URL")
        if set(self.catalog) & set("@?#"):
            raise ConfigError(
                "STOKER_CATALOG holds a user, a password or options; write redis://host:port/0, and give the password "
                "in STOKER_CATALOG_PASSWORD"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Return what the environment says.

        Raises:
            ConfigError: a variable is not valid; names it.
        """
        ingest = environ.get("STOKER_INGEST")
        return cls(
            datasets=_named_urls(environ.get("STOKER_DATASETS", "")),
            sources=tuple(environ.get("STOKER_SOURCES", "").split()),
            ingest=Ingest.from_json(ingest) if ingest else None,
            catalog=environ.get("STOKER_CATALOG") or "bucket",
            catalog_password=environ.get("STOKER_CATALOG_PASSWORD") or None,
            token_keys=environ.get("STOKER_TOKEN_KEYS", ""),
            warm_secret=environ.get("STOKER_WARM_SECRET", ""),
            warm_shelf_bytes=_warm_shelf_bytes(environ),
            memory_bytes=_memory_bytes(environ),
            timeout_seconds=_timeout_seconds(environ),
        )

    def dataset(self, url: str) -> str:
        """Return the URL of a data set that an event names.

        Raises:
            EventError: this deployment has nothing to do with it.
        """
        return _allowed(url, self.datasets.values(), "data set", "STOKER_DATASETS")

    def source(self, url: str) -> str:
        """Return the URL of raw samples that an event names.

        Raises:
            EventError: this deployment has nothing to do with them.
        """
        return _allowed(url, self.sources, "source", "STOKER_SOURCES")


def _named_urls(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in text.split():
        name, equals, url = pair.partition("=")
        if not equals or name in found or not DATASET_NAME.fullmatch(name):
            # What stands there may be a URL with a secret, so it is not repeated.
            raise ConfigError(
                f"STOKER_DATASETS is wrong behind {len(found)} data sets; write name=url, separated by blanks, each "
                "name once"
            )
        found[name] = url
    return found


def _check_urls(variable: str, urls: Iterable[str]) -> None:
    for url in urls:
        try:
            parse_url(url)
        except ConfigError as error:
            raise ConfigError(f"{variable} is not valid: {error}") from None


def _check_apart(datasets: Iterable[str], sources: Iterable[str]) -> None:
    """Raise ConfigError if a data set lies in a source: each object of it would be announced, taken in, and so on."""
    for source in sources:
        for dataset in datasets:
            if parse_url(dataset).place.startswith(parse_url(source).place):
                raise ConfigError(
                    f"STOKER_SOURCES has {source}, which holds the data set {dataset}: what is taken in would be "
                    "announced and taken in again, without end; keep raw samples in another bucket or folder"
                )


def _memory_bytes(environ: Mapping[str, str]) -> int:
    """Return what the platform says that an instance has: Lambda in a variable, containers in their control group."""
    megabytes = environ.get("AWS_LAMBDA_FUNCTION_MEMORY_SIZE", "")
    if megabytes.isdecimal():
        return int(megabytes) << 20
    limits = (Path(file).read_text().strip() for file in _CGROUP_LIMITS if Path(file).is_file())
    return min((int(limit) for limit in limits if limit.isdecimal() and int(limit) < 1 << 50), default=_free_bytes())


def _free_bytes() -> int:
    try:
        return max(_DEFAULT_MEMORY_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    except (ValueError, OSError):  # not on every system
        return _DEFAULT_MEMORY_BYTES


def _warm_shelf_bytes(environ: Mapping[str, str]) -> int | None:
    text = environ.get("STOKER_WARM_SHELF_BYTES")
    try:
        return parse_bytes(text) if text else None
    except ConfigError as error:
        raise ConfigError(f"STOKER_WARM_SHELF_BYTES is not valid: {error}") from None


def _timeout_seconds(environ: Mapping[str, str]) -> float:
    text = environ.get("STOKER_TIMEOUT_SECONDS") or str(_DEFAULT_TIMEOUT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86_400:
        raise ConfigError(f"STOKER_TIMEOUT_SECONDS is {text[:40]!r}, not a number of seconds from 1 to 86400")
    return seconds


def _allowed(url: str, roots: Iterable[str], what: str, variable: str) -> str:
    try:
        wanted = parse_url(url).place
    except ConfigError as error:
        raise EventError(f"the event's {what} is no URL: {error}") from None
    if not any(wanted.startswith(parse_url(root).place) for root in roots):
        raise EventError(f"this deployment may not touch the {what} {url[:200]!r}; {variable} lists what it may")
    return url
