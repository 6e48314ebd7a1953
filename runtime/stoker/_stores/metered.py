"""A store that counts what goes through it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import nullcontext
from functools import partial
from typing import Protocol, runtime_checkable

from stoker._base.meter import Meter
from stoker._base.operations import Egress, Operation, PriceKey
from stoker.abc import Buffer, ObjectInfo, Readable, Store

__all__ = ["MeteredStore", "Priced", "metered", "price_key"]

_PAGE_KEYS = 1000


@runtime_checkable
class Priced(Protocol):
    """A store whose prices its URL alone does not tell."""

    def price_key(self) -> PriceKey:
        """Return by what its prices are found."""
        ...


def price_key(store: Readable) -> PriceKey:
    """Return by what a store's prices are found: the user's choice, its endpoint or its URL.

    A store of the user's own may have an attribute ``prices``: the name of a store in the price file.
    """
    if isinstance(store, Priced):
        return store.price_key()
    return PriceKey(store.url, name=getattr(store, "prices", ""))


def metered(store: Store, *, egress: Egress = "same_region") -> MeteredStore:
    """Return a store with a meter of its own, whose reader is at ``egress``."""
    return MeteredStore(store, Meter(store.url, egress=egress, key=partial(price_key, store)))


class MeteredStore:
    """Passes every call on to ``store`` and counts it in ``meter``, failed and cancelled ones too.

    Args:
        store: does the work.
        meter: counts; several stores may share one.
    """

    def __init__(self, store: Store, meter: Meter) -> None:
        self._store = store
        self.meter = meter

    def __repr__(self) -> str:
        return f"<MeteredStore {self.meter!r}>"

    @property
    def url(self) -> str:
        """The root as the user wrote it, without secrets."""
        return self._store.url

    def price_key(self) -> PriceKey:
        """Return by what the store's prices are found."""
        return price_key(self._store)

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return a whole object."""
        with self.meter.request(Operation.GET):
            data, info = await self._store.get(key)
        self.meter.add_read(len(data))
        return data, info

    async def get_range(
        self,
        key: str,
        start: int,
        end: int,
        *,
        into: memoryview,
        tag: str | None = None,
        begun: Callable[[], None] | None = None,
    ) -> ObjectInfo:
        """Read bytes ``[start, end)`` into ``into``."""
        with self.meter.request(Operation.GET, asked_bytes=end - start):
            info = await self._store.get_range(key, start, end, into=into, tag=tag, begun=begun)
        self.meter.add_read(end - start)
        return info

    async def head(self, key: str) -> ObjectInfo:
        """Return size and tag."""
        with self.meter.request(Operation.HEAD):
            return await self._store.head(key)

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield the objects under ``prefix``; each page of 1,000 keys is a request, and so is an empty answer."""
        found = self._store.list(prefix, start_after=start_after)
        try:
            for number in itertools.count():
                with self.meter.request(Operation.LIST) if number % _PAGE_KEYS == 0 else nullcontext():
                    info = await anext(found, None)
                if info is None:
                    return
                yield info
        finally:
            if isinstance(found, AsyncGenerator):
                await found.aclose()

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        """Write an object."""
        with self.meter.request(Operation.PUT):
            info = await self._store.put(key, data, if_absent=if_absent, if_tag=if_tag)
        self.meter.add_written(memoryview(data).nbytes)
        return info

    async def delete(self, key: str) -> None:
        """Delete an object."""
        with self.meter.request(Operation.DELETE):
            await self._store.delete(key)

    async def close(self) -> None:
        """Close the store."""
        await self._store.close()
