"""What an instance keeps between invocations: its settings, and the connections that it has made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stoker._base.meter import Meter
from stoker._base.retry import RetryingStore
from stoker._format.schema import Schema
from stoker._stores import Store, open_store
from stoker._stores.object_store import metered
from stoker_functions._catalog import Catalog, open_catalog
from stoker_functions._settings import Settings

__all__ = ["Deployment"]


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
