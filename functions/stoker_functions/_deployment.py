"""What a handler is given: the deployment, whose connections last between invocations, and the deadline.

What a deployment may touch, and how large it is, is read from the environment, once.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker._base.fields import Fields
from stoker._base.meter import Meter
from stoker._base.plugins import needs_extra
from stoker._base.retry import RetryingStore
from stoker._base.sizes import parse_bytes
from stoker._format.schema import Schema
from stoker._format.supersample import MAX_SUPER_SAMPLE_BYTES
from stoker._pack.catalog import BucketCatalog
from stoker._stores import open_store
from stoker._stores.access_token import DATASET_NAME
from stoker._stores.location import parse_url
from stoker._stores.object_store import metered
from stoker.abc import Store
from stoker.errors import ConfigError, DeadlineError, EventError

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
            ValueError: it is not JSON, or no such object.
        """
        fields = Fields(json.loads(text), "variable STOKER_INGEST")
        classes = fields.array("classes", most=_MAX_CLASSES, default=[])
        if not all(isinstance(name, str) for name in classes) or len(set(classes)) != len(classes):
            raise EventError("the classes are not different texts")
        ingest = cls(
            dataset=fields.text("dataset", pattern=DATASET_NAME.pattern),
            kind=fields.choice("kind", INGEST_KINDS, default="files"),
            classes=tuple(classes),
            super_sample_bytes=fields.integer(
                "super_sample_bytes", least=1, most=MAX_SUPER_SAMPLE_BYTES, default=8 << 20
            ),
        )
        fields.end()
        if (ingest.kind == "image-folder") != bool(ingest.classes):
            raise EventError("it needs the names of all classes for kind image-folder, and for no other")
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
        given: dict[str, Any] = {}
        for variable, read in _READERS.items():
            if text := environ.get(variable):
                try:
                    given[variable.removeprefix("STOKER_").lower()] = read(text)
                except ValueError as error:  # as ours are
                    raise ConfigError(f"{variable} is not valid: {error}") from None
        return cls(memory_bytes=_memory_bytes(environ), **given)

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
                f"it is wrong behind {len(found)} data sets; write name=url, separated by blanks, each name once"
            )
        parse_url(url)
        found[name] = url
    return found


def _urls(text: str) -> tuple[str, ...]:
    urls = tuple(text.split())
    for url in urls:
        parse_url(url)
    return urls


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


def _timeout_seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds <= 86_400:
        raise ConfigError(f"{text[:40]!r} is not a number of seconds from 1 to 86400")
    return seconds


_READERS: Mapping[str, Callable[[str], Any]] = {
    "STOKER_DATASETS": _named_urls,
    "STOKER_SOURCES": _urls,
    "STOKER_INGEST": Ingest.from_json,
    "STOKER_CATALOG": str,
    "STOKER_CATALOG_PASSWORD": str,
    "STOKER_TOKEN_KEYS": str,
    "STOKER_WARM_SECRET": str,
    "STOKER_WARM_SHELF_BYTES": parse_bytes,
    "STOKER_TIMEOUT_SECONDS": _timeout_seconds,
}
"""Variables, called as the settings that they are, and what reads each."""


def _allowed(url: str, roots: Iterable[str], what: str, variable: str) -> str:
    try:
        wanted = parse_url(url).place
    except ConfigError as error:
        raise EventError(f"the event's {what} is no URL: {error}") from None
    if not any(wanted.startswith(parse_url(root).place) for root in roots):
        raise EventError(f"this deployment may not touch the {what} {url[:200]!r}; {variable} lists what it may")
    return url


_RESERVED_SHARE = 0.1
_LAST_SECONDS = 0.5  # to answer, before the platform kills the invocation
_LEAST_RESERVED_SECONDS, _MOST_RESERVED_SECONDS = 2.0, 30.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of an invocation, on the clock of the running event loop.

    Attributes:
        at_seconds: when the platform kills it.
        stop_at_seconds: when it should stop taking on work, so that what is under way is still made durable: a tenth of
            the whole time before the end, at least 2 s and at most 30 s.
    """

    at_seconds: float
    stop_at_seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline of an invocation that has so much time from here on."""
        seconds = max(seconds, 0.0)
        reserved = min(max(_RESERVED_SHARE * seconds, _LEAST_RESERVED_SECONDS), _MOST_RESERVED_SECONDS)
        at_seconds = asyncio.get_running_loop().time() + seconds
        return cls(at_seconds, at_seconds - min(reserved, seconds / 2))

    @asynccontextmanager
    async def limit(
        self, what: str, problem: str = "did not come to its end in the time of this invocation", *, late: bool = False
    ) -> AsyncIterator[None]:
        """Cancel what is inside when it is time to stop; or, if that stops by itself, only just before the end.

        Raises:
            DeadlineError: it was cancelled; says ``what`` that was, and the ``problem``.
        """
        try:
            async with asyncio.timeout_at(self.at_seconds - _LAST_SECONDS if late else self.stop_at_seconds) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineError(f"{what} {problem}") from error

    @property
    def is_near(self) -> bool:
        """Whether it is time to stop taking on work."""
        return asyncio.get_running_loop().time() >= self.stop_at_seconds

    def remaining_seconds(self) -> float:
        """Return how long it is until the platform kills the invocation, below zero where it should have."""
        return self.at_seconds - asyncio.get_running_loop().time()


class Deployment:
    """The stores and catalogs of an instance, each opened at its first use and kept.

    Args:
        settings: what it may touch; every URL is checked on them.
        open_url: opens the store at a URL.
    """

    def __init__(self, settings: Settings, *, open_url: Callable[[str], Store] = open_store) -> None:
        self.settings = settings
        self._open_url = open_url
        self._stores: dict[str, Store] = {}
        self._meters: dict[str, Meter] = {}
        self._catalogs: dict[str, BucketCatalog] = {}
        self.known_datasets: dict[str, tuple[str, Schema]] = {}
        """URL → id and columns, which a data set never changes, of those that were looked at."""

    def dataset(self, url: str) -> RetryingStore:
        """Return the store of a data set, which is metered.

        Raises:
            EventError: this deployment has nothing to do with it.
        """
        return self._metered(self.settings.dataset(url))

    def source(self, url: str) -> RetryingStore:
        """Return the store of raw samples, which is metered.

        Raises:
            EventError: this deployment has nothing to do with them.
        """
        return self._metered(self.settings.source(url))

    def served(self, url: str) -> Store:
        """Return the store of a data set as its adapter is, with all that it can do.

        Raises:
            EventError: this deployment has nothing to do with it.
        """
        return self._store(self.settings.dataset(url))

    @contextmanager
    def counted(self) -> Iterator[dict[str, dict[str, int]]]:
        """Give what is asked of stores inside, known at the end: URL → operation → how many.

        Where an instance works on several requests at a time, those of the others are among them.
        """
        before = {url: Counter(meter.reading().requests) for url, meter in self._meters.items()}
        requests: dict[str, dict[str, int]] = {}
        yield requests
        for url, meter in self._meters.items():
            if sent := Counter(meter.reading().requests) - before.get(url, Counter()):
                requests[url] = {str(operation): count for operation, count in sent.items()}

    def catalog(self, url: str) -> BucketCatalog:
        """Return where the pack records of a data set are kept.

        Raises:
            EventError: this deployment has nothing to do with it.
            MissingExtraError: Redis is wanted and its client is not installed.
        """
        if url not in self._catalogs:
            self._catalogs[url] = open_catalog(self.dataset(url), self.settings)
        return self._catalogs[url]

    async def close(self) -> None:
        """Release all connections."""
        for catalog in self._catalogs.values():
            await catalog.close()
        for store in self._stores.values():
            await store.close()

    def _metered(self, url: str) -> RetryingStore:
        if url not in self._meters:
            self._meters[url] = Meter(url)
        return RetryingStore(metered(self._store(url), meter=self._meters[url]))

    def _store(self, url: str) -> Store:
        if url not in self._stores:
            self._stores[url] = self._open_url(url)
        return self._stores[url]


def open_catalog(store: RetryingStore, settings: Settings) -> BucketCatalog:
    """Return where the pack records of the data set in ``store`` are kept: in the bucket, or in Redis.

    Nothing is connected to before the first use.

    Raises:
        MissingExtraError: Redis is wanted and its client is not installed.
    """
    if settings.catalog == "bucket":
        return BucketCatalog(store)
    with needs_extra("a catalog in Redis", "redis"):
        from stoker_functions._redis_catalog import RedisCatalog
    return RedisCatalog(store, settings.catalog, password=settings.catalog_password)
