"""The arguments of a handler: the deployment, which keeps connections between invocations, and the deadline.

The settings of a deployment (its data sets, sources and memory) are read from the environment, once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker._base.fields import JsonFields
from stoker._base.meter import Meter
from stoker._base.plugins import require_extra
from stoker._base.retry import RetryingStore
from stoker._base.sizes import parse_bytes
from stoker._deprecation import declare_renamed
from stoker._format.schema import Schema
from stoker._format.supersample import MAX_TARGET_BYTES
from stoker._pack.catalog import BucketCatalog
from stoker._pack.shuffle import is_work_url
from stoker._stores import open_store
from stoker._stores.access_token import DATASET_NAME
from stoker._stores.location import parse_url
from stoker._stores.object_store import with_meter
from stoker.abc import Store
from stoker.errors import ConfigError, DeadlineError, EventError

_log = logging.getLogger("stoker_functions.deployment")

INGEST_KINDS = ("files", "image-folder", "webdataset")
_DEFAULT_MEMORY_BYTES = 512 << 20
_DEFAULT_TIMEOUT_SECONDS = 60.0
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_MAX_CLASSES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestSettings:
    """How new raw objects become samples.

    Attributes:
        dataset: name of the data set that gets the samples.
        kind: ``files``, ``image-folder`` or ``webdataset``.
        classes: names of all classes, in order, for ``image-folder``.
        super_sample_bytes: limit of a super-sample's data.
    """

    dataset: str
    kind: str = "files"
    classes: tuple[str, ...] = ()
    super_sample_bytes: int = 8 << 20

    @classmethod
    def from_json(cls, text: str) -> IngestSettings:
        """Parse the variable ``STOKER_INGEST``.

        Raises:
            ValueError: the text is not JSON, or not an object with these fields.
        """
        fields = JsonFields(json.loads(text), "variable STOKER_INGEST")
        classes = fields.array("classes", max_length=_MAX_CLASSES, default=[])
        if not all(isinstance(name, str) for name in classes) or len(set(classes)) != len(classes):
            raise EventError("the classes are not strings that all differ")
        ingest = cls(
            dataset=fields.text("dataset", pattern=DATASET_NAME.pattern),
            kind=fields.choice("kind", INGEST_KINDS, default="files"),
            classes=tuple(classes),
            super_sample_bytes=fields.integer(
                "super_sample_bytes", min_value=1, max_value=MAX_TARGET_BYTES, default=8 << 20
            ),
        )
        fields.check_no_fields_left()
        if (ingest.kind == "image-folder") != bool(ingest.classes):
            raise EventError("classes are required for kind image-folder, and not allowed for other kinds")
        return ingest


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSettings:
    """Settings of a deployment of functions.

    Attributes:
        datasets: name → URL of the data sets; a data set in an event must be one of these, or below one.
        sources: URLs at or below which raw samples may be read.
        ingest: how new raw objects become samples, None to ignore them.
        catalog: ``bucket``, or the URL of a Redis server, without a password.
        catalog_password: password of the Redis server, None without one.
        token_keys: keys that sign and check the clients' tokens, as in :class:`stoker_functions.serve.TokenKeys`.
        warm_secret: shared secret of a node of the warm tier and its proxy, as base64url.
        warm_shard_bytes: limit of the shards that a node keeps, None for as many as its memory allows.
        memory_bytes: memory of an instance.
        timeout_seconds: time limit of an invocation, if the platform does not pass it.
    """

    datasets: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    ingest: IngestSettings | None = None
    catalog: str = "bucket"
    catalog_password: str | None = field(default=None, repr=False)
    token_keys: str = field(default="", repr=False)
    warm_secret: str = field(default="", repr=False)
    warm_shard_bytes: int | None = None
    memory_bytes: int = _DEFAULT_MEMORY_BYTES
    timeout_seconds: float = _DEFAULT_TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        if self.ingest is not None and self.ingest.dataset not in self.datasets:
            raise ConfigError(
                f"STOKER_INGEST names the data set {self.ingest.dataset!r}, which is not in STOKER_DATASETS"
            )
        if self.ingest is not None:
            _check_disjoint(self.datasets.values(), self.sources)
        if self.catalog != "bucket" and not self.catalog.startswith(("redis://", "rediss://")):
            raise ConfigError("STOKER_CATALOG is neither 'bucket' nor a redis:// or rediss:// URL")
        if set(self.catalog) & set("@?#"):
            raise ConfigError(
                "STOKER_CATALOG has a user, a password or options; write redis://host:port/0, and put the password "
                "into STOKER_CATALOG_PASSWORD"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> DeploymentSettings:
        """Return the settings in environment variables; a deprecated name is logged, and its present name goes first.

        Raises:
            ConfigError: a variable is not valid; the message names it.
        """
        for old, new in _RENAMED_VARIABLES.items():
            if old in environ:
                _log.warning("%s is deprecated: write %s", old, new)
                environ = {new: environ[old], **environ}
        settings: dict[str, Any] = {}
        for variable, read in _READERS.items():
            if text := environ.get(variable):
                try:
                    settings[variable.removeprefix("STOKER_").lower()] = read(text)
                except ValueError as error:  # a base of ConfigError and EventError
                    raise ConfigError(f"{variable} is not valid: {error}") from None
        return cls(memory_bytes=_memory_bytes(environ), **settings)

    def dataset(self, url: str) -> str:
        """Return the URL of a data set in an event.

        Raises:
            EventError: ``datasets`` does not allow it.
        """
        return _check_allowed(url, self.datasets.values(), "data set", "STOKER_DATASETS")

    def source(self, url: str) -> str:
        """Return the URL of raw samples in an event.

        Raises:
            EventError: ``sources`` does not allow it.
        """
        return _check_allowed(url, self.sources, "source", "STOKER_SOURCES")


def _parse_named_urls(text: str) -> dict[str, str]:
    urls: dict[str, str] = {}
    for pair in text.split():
        name, equals, url = pair.partition("=")
        if not equals or name in urls or not DATASET_NAME.fullmatch(name):
            # The message does not repeat the text, which may be a URL with a secret.
            raise ConfigError(
                f"it is wrong after {len(urls)} data sets; write name=url, separated by blanks, each name once"
            )
        parse_url(url)
        urls[name] = url
    return urls


def _parse_urls(text: str) -> tuple[str, ...]:
    urls = tuple(text.split())
    for url in urls:
        parse_url(url)
    return urls


def _check_disjoint(datasets: Iterable[str], sources: Iterable[str]) -> None:
    """Raise ConfigError if a data set is inside a source: its own objects would be announced and ingested again."""
    for source in sources:
        for dataset in datasets:
            if parse_url(dataset).canonical_url.startswith(parse_url(source).canonical_url):
                raise ConfigError(
                    f"STOKER_SOURCES has {source}, which contains the data set {dataset}: each ingested object would "
                    "be announced and ingested again, without end; keep raw samples in another bucket or folder"
                )


def _memory_bytes(environ: Mapping[str, str]) -> int:
    """Return the memory of an instance: on Lambda from a variable, in containers from their control group."""
    megabytes = environ.get("AWS_LAMBDA_FUNCTION_MEMORY_SIZE", "")
    if megabytes.isdecimal():
        return int(megabytes) << 20
    limits = (Path(file).read_text().strip() for file in _CGROUP_LIMITS if Path(file).is_file())
    return min((int(limit) for limit in limits if limit.isdecimal() and int(limit) < 1 << 50), default=_free_bytes())


def _free_bytes() -> int:
    try:
        return max(_DEFAULT_MEMORY_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    except (ValueError, OSError):  # the system does not have these names
        return _DEFAULT_MEMORY_BYTES


def _parse_timeout_seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds <= 86_400:
        raise ConfigError(f"{text[:40]!r} is not a number of seconds from 1 to 86400")
    return seconds


_READERS: Mapping[str, Callable[[str], Any]] = {
    "STOKER_DATASETS": _parse_named_urls,
    "STOKER_SOURCES": _parse_urls,
    "STOKER_INGEST": IngestSettings.from_json,
    "STOKER_CATALOG": str,
    "STOKER_CATALOG_PASSWORD": str,
    "STOKER_TOKEN_KEYS": str,
    "STOKER_WARM_SECRET": str,
    "STOKER_WARM_SHARD_BYTES": parse_bytes,
    "STOKER_TIMEOUT_SECONDS": _parse_timeout_seconds,
}
"""Environment variable, named after its setting → function that parses it."""

_RENAMED_VARIABLES = {"STOKER_WARM_SHELF_BYTES": "STOKER_WARM_SHARD_BYTES"}
declare_renamed("environment variable", _RENAMED_VARIABLES)


def _check_allowed(url: str, roots: Iterable[str], what: str, variable: str) -> str:
    try:
        canonical_url = parse_url(url).canonical_url
    except ConfigError as error:
        raise EventError(f"the event's {what} is not a URL: {error}") from None
    if not any(canonical_url.startswith(parse_url(root).canonical_url) for root in roots):
        raise EventError(f"this deployment may not use the {what} {url[:200]!r}; add it to {variable}")
    return url


_RESERVED_SHARE = 0.1
_ANSWER_SECONDS = 0.5  # time to answer before the platform kills the invocation
_MIN_RESERVED_SECONDS, _MAX_RESERVED_SECONDS = 2.0, 30.0


@dataclass(frozen=True, slots=True)
class InvocationDeadline:
    """The end of an invocation, on the clock of the running event loop.

    Attributes:
        at_seconds: when the platform kills the invocation.
        stop_at_seconds: when the invocation should begin no more work, so that current work can become durable: before
            the end by a tenth of the whole time, at least 2 s and at most 30 s.
    """

    at_seconds: float
    stop_at_seconds: float

    @classmethod
    def after(cls, seconds: float) -> InvocationDeadline:
        """Return the deadline of an invocation that has ``seconds`` left."""
        seconds = max(seconds, 0.0)
        reserved = min(max(_RESERVED_SHARE * seconds, _MIN_RESERVED_SECONDS), _MAX_RESERVED_SECONDS)
        at_seconds = asyncio.get_running_loop().time() + seconds
        return cls(at_seconds, at_seconds - min(reserved, seconds / 2))

    @asynccontextmanager
    async def limit(
        self, what: str, problem: str = "did not come to its end in the time of this invocation", *, late: bool = False
    ) -> AsyncIterator[None]:
        """Cancel the block at ``stop_at_seconds``, or just before the end.

        Args:
            what: name of the work in the error message.
            problem: end of the error message.
            late: whether to cancel only just before the end, since the block stops by itself.

        Raises:
            DeadlineError: the block was cancelled.
        """
        try:
            async with asyncio.timeout_at(self.at_seconds - _ANSWER_SECONDS if late else self.stop_at_seconds) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineError(f"{what} {problem}") from error

    @property
    def is_near(self) -> bool:
        """Whether the invocation should begin no more work."""
        return asyncio.get_running_loop().time() >= self.stop_at_seconds

    def remaining_seconds(self) -> float:
        """Return the seconds until the platform kills the invocation, negative after that time."""
        return self.at_seconds - asyncio.get_running_loop().time()


class Deployment:
    """The stores and catalogs of an instance, each opened at its first use and kept.

    Args:
        settings: settings of the deployment, against which every URL is checked.
        open_url: function from a URL to its open store.
    """

    def __init__(self, settings: DeploymentSettings, *, open_url: Callable[[str], Store] = open_store) -> None:
        self.settings = settings
        self._open_url = open_url
        self._stores: dict[str, Store] = {}
        self._meters: dict[str, Meter] = {}
        self._catalogs: dict[str, BucketCatalog] = {}
        self.known_datasets: dict[str, tuple[str, Schema]] = {}
        """URL → id and columns of the data sets that were read; a data set never changes these."""

    def dataset_store(self, url: str) -> RetryingStore:
        """Return the store of a data set, with a meter.

        Raises:
            EventError: the settings do not allow the data set.
        """
        return self._open_metered(self.settings.dataset(url))

    def source_store(self, url: str) -> RetryingStore:
        """Return the store of raw samples, with a meter.

        Raises:
            EventError: the settings do not allow the source.
        """
        return self._open_metered(self.settings.source(url))

    def unmetered_store(self, url: str) -> Store:
        """Return the store of a data set without meter and retries, with all capabilities of its adapter.

        Raises:
            EventError: the settings do not allow the data set.
        """
        return self._open_store(self.settings.dataset(url))

    @contextmanager
    def count_requests(self) -> Iterator[dict[str, dict[str, int]]]:
        """Count the requests to stores in a block: yields URL → operation → count, filled at the end of the block.

        If an instance works on several requests at a time, the counts include those of the others.
        """
        before = {url: Counter(meter.snapshot().requests) for url, meter in self._meters.items()}
        requests: dict[str, dict[str, int]] = {}
        yield requests
        for url, meter in self._meters.items():
            if sent := Counter(meter.snapshot().requests) - before.get(url, Counter()):
                requests[url] = {str(operation): count for operation, count in sent.items()}

    def catalog(self, url: str) -> BucketCatalog:
        """Return the catalog with the pack records of a data set.

        Raises:
            EventError: the settings do not allow the data set.
            MissingExtraError: the settings name Redis, and its client is not installed.
        """
        if url not in self._catalogs:
            store = self.dataset_store(url)
            self._catalogs[url] = BucketCatalog(store) if is_work_url(url) else open_catalog(store, self.settings)
        return self._catalogs[url]

    async def close(self) -> None:
        """Close all catalogs and stores."""
        for catalog in self._catalogs.values():
            await catalog.close()
        for store in self._stores.values():
            await store.close()

    def _open_metered(self, url: str) -> RetryingStore:
        if url not in self._meters:
            self._meters[url] = Meter(url)
        return RetryingStore(with_meter(self._open_store(url), meter=self._meters[url]))

    def _open_store(self, url: str) -> Store:
        if url not in self._stores:
            self._stores[url] = self._open_url(url)
        return self._stores[url]


def open_catalog(store: RetryingStore, settings: DeploymentSettings) -> BucketCatalog:
    """Return the catalog with the pack records of the data set in ``store``: in the bucket, or in Redis.

    The first use connects.

    Raises:
        MissingExtraError: the settings name Redis, and its client is not installed.
    """
    if settings.catalog == "bucket":
        return BucketCatalog(store)
    with require_extra("a catalog in Redis", "redis"):
        from stoker_functions._redis_catalog import RedisCatalog
    return RedisCatalog(store, settings.catalog, password=settings.catalog_password)
