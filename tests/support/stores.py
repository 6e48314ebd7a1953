"""Places to run the store contract in: each a server or folder, with what is known not to hold there."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from stoker import StoreOptions, open_store
from stoker.abc import Store

_serial = itertools.count()


class Deviation(Enum):
    """What a place is known to do differently from the service that it stands for."""

    IGNORES_PRECONDITIONS = auto()
    WRITES_WITHOUT_LOCK = auto()  # so that two conditional writers may both win
    REFUSES_EMPTY_OBJECTS = auto()
    CUTS_KEYS_AT_SEMICOLONS = auto()
    LEAVES_404_UNEXPLAINED = auto()
    SLOW = auto()


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a store can be opened: an existing bucket, and the URL of one that does not exist."""

    name: str
    url: str
    missing_url: str
    options: StoreOptions | None = None
    deviations: frozenset[Deviation] = field(default_factory=frozenset)

    def fresh(self) -> Place:
        """Return the same place with a prefix that nobody has used."""
        return replace(self, url=f"{self.url}/{os.getpid()}-{next(_serial)}")

    @property
    def needs_single_writer(self) -> bool:
        """Whether packs must be told that nobody else writes."""
        return Deviation.IGNORES_PRECONDITIONS in self.deviations

    def open(self) -> Store:
        return open_store(self.url, options=self.options)

    def run(self, check: Callable[[Store], Awaitable[None]]) -> None:
        """Run ``check`` on a store opened here, on an event loop of its own."""
        run_with(self.open(), check)

    def run_missing(self, check: Callable[[Store], Awaitable[None]]) -> None:
        """Run ``check`` on a store whose bucket does not exist."""
        run_with(open_store(self.missing_url, options=self.options), check)


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
    return [info.key async for info in store.list(prefix, start_after=start_after)]
