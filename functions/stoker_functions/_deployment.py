"""What a handler is given: the deployment, whose connections last between invocations, and the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from stoker._base.meter import Meter
from stoker._base.retry import RetryingStore
from stoker._format.schema import Schema
from stoker._pack.catalog import BucketCatalog, Catalog
from stoker._stores import Store, open_store
from stoker._stores.object_store import metered
from stoker.errors import DeadlineError, MissingExtraError
from stoker_functions._settings import Settings

__all__ = ["Catalog", "Deadline", "Deployment", "open_catalog"]

_RESERVED_SHARE = 0.1
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
    async def limit(self, what: str) -> AsyncIterator[None]:
        """Cancel what is inside when it is time to stop.

        Raises:
            DeadlineError: it was; ``what`` names it, and what to do.
        """
        try:
            async with asyncio.timeout_at(self.stop_at_seconds) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineError(f"{what} did not come to its end in the time of this invocation") from error

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
        self._catalogs: dict[str, Catalog] = {}
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
        before = {url: meter.reading().requests for url, meter in self._meters.items()}
        requests: dict[str, dict[str, int]] = {}
        yield requests
        for url, meter in self._meters.items():
            counts = {
                str(operation): sent
                for operation, count in meter.reading().requests.items()
                if (sent := count - before.get(url, {}).get(operation, 0))
            }
            if counts:
                requests[url] = counts

    def catalog(self, url: str) -> Catalog:
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


def open_catalog(store: RetryingStore, settings: Settings) -> Catalog:
    """Return where the pack records of the data set in ``store`` are kept: in the bucket, or in Redis.

    Nothing is connected to before the first use.

    Raises:
        MissingExtraError: Redis is wanted and its client is not installed.
    """
    if settings.catalog == "bucket":
        return BucketCatalog(store)
    try:
        from stoker_functions._redis_catalog import RedisCatalog
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"a catalog in Redis needs {error.name}; pip install 'stoker[redis]'") from error
    return RedisCatalog(store, settings.catalog, password=settings.catalog_password)
