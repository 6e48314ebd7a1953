"""Places where a store can be opened, and small steps that tests of stores take."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from stoker._stores import StoreOptions, open_store
from stoker._stores.object_store import metered
from stoker.abc import Store

_serial = itertools.count()


class Deviation(Enum):
    """What a place is known to do otherwise than the suite wants; what depends on it is skipped."""

    IGNORES_PRECONDITIONS = auto()
    """Writes although ``if_absent`` or ``if_tag`` does not hold."""
    WRITES_WITHOUT_LOCK = auto()
    """Of two conditional writers at the same time both may win."""
    REFUSES_EMPTY_OBJECTS = auto()
    """Keeps no object of 0 bytes."""
    CUTS_KEYS_AT_SEMICOLONS = auto()
    """Takes a semicolon for the end of a key."""
    LEAVES_404_UNEXPLAINED = auto()
    """Tells a missing bucket from a missing object only where the manifest is asked for."""
    SLOW = auto()
    """Takes a millisecond or more for a request, so that thousands are too many."""


@dataclass(frozen=True, kw_only=True)
class StorePlace:
    """Where the suite opens stores.

    Attributes:
        url: of a store; tests add a folder of their own to it.
        missing_url: of a bucket that does not exist; empty if there can be no such thing.
        options: for ``opener``; None for the default.
        opener: opens the store at a URL; default :func:`stoker.open_store`, which finds installed plug-ins.
        deviations: what is known not to hold here.
        name: for messages.
    """

    url: str
    missing_url: str = ""
    options: StoreOptions | None = None
    opener: Callable[[str], Any] | None = None
    deviations: frozenset[Deviation] = field(default_factory=frozenset)
    name: str = "this store"

    def fresh(self) -> StorePlace:
        """Return the same place with a prefix that nobody has used."""
        return replace(self, url=f"{self.url}/{os.getpid()}-{next(_serial)}")

    @property
    def needs_single_writer(self) -> bool:
        """Whether packs must be told that nobody else writes."""
        return Deviation.IGNORES_PRECONDITIONS in self.deviations

    def open(self, url: str = "") -> Store:
        """Open the store here, or at another URL."""
        if self.opener is not None:
            return metered(self.opener(url or self.url))
        return open_store(url or self.url, options=self.options)

    def run(self, check: Callable[[Store], Awaitable[None]]) -> None:
        """Run ``check`` on a store opened here, on an event loop of its own."""
        run_with(self.open(), check)

    def run_missing(self, check: Callable[[Store], Awaitable[None]]) -> None:
        """Run ``check`` on a store whose bucket does not exist."""
        run_with(self.open(self.missing_url), check)


def run_with(store: Store, check: Callable[[Store], Awaitable[None]]) -> None:
    """Run ``check(store)`` on an event loop of its own and close the store."""

    async def main() -> None:
        try:
            await check(store)
        finally:
            await store.close()

    asyncio.run(main())


async def read_range(store: Store, key: str, start: int, end: int, tag: str | None = None) -> bytes:
    """Return the bytes that ``get_range`` puts into memory of exactly the right size."""
    into = bytearray(end - start)
    await store.get_range(key, start, end, into=memoryview(into), tag=tag)
    return bytes(into)


async def keys_of(store: Store, prefix: str = "", *, start_after: str = "") -> list[str]:
    """Return the keys that a listing yields."""
    return [info.key async for info in store.list(prefix, start_after=start_after)]
