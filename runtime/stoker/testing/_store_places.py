"""Where the store suite opens stores, and helper functions for tests of stores."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from stoker._deprecation import alias_attributes
from stoker._stores import StoreOptions, open_store
from stoker._stores.object_store import with_meter
from stoker.abc import Store

_serial = itertools.count()


class Deviation(Enum):
    """Known limitations of a store; :class:`StoreTests` skips the tests that depend on them.

    Example:
        >>> from stoker.testing import Deviation, StoreLocation
        >>> place = StoreLocation(url="mine://bucket", deviations=frozenset({Deviation.SLOW}))
    """

    IGNORES_PRECONDITIONS = auto()
    """Writes even if ``if_absent`` or ``if_tag`` does not hold."""
    WRITES_WITHOUT_LOCK = auto()
    """Two concurrent conditional writes may both succeed."""
    REFUSES_EMPTY_OBJECTS = auto()
    """Cannot store an object of 0 bytes."""
    CUTS_KEYS_AT_SEMICOLONS = auto()
    """Ends a key at its first semicolon."""
    LEAVES_404_UNEXPLAINED = auto()
    """Distinguishes a missing bucket from a missing object only in reads of the manifest."""
    SLOW = auto()
    """Takes a millisecond or more per request; tests make fewer requests."""


@alias_attributes("StoreLocation", {"fresh": "with_new_prefix", "run_missing": "run_without_bucket"})
@dataclass(frozen=True, kw_only=True)
class StoreLocation:
    """Where :class:`StoreTests` opens stores, and what is known of them.

    Attributes:
        url: URL of a store.
        missing_url: URL of a bucket that does not exist; empty if there can be no such bucket.
        options: options for :func:`stoker.open_store`; unused with ``opener``.
        opener: function that opens the store at a URL; default :func:`stoker.open_store`, which finds installed
            plug-ins.
        deviations: known limitations of the store.
        name: name of the store in messages.

    Example:
        >>> from stoker.testing import Deviation, StoreLocation
        >>> place = StoreLocation(url="memory://example", deviations=frozenset({Deviation.SLOW})).with_new_prefix()
        >>> place.run(lambda store: store.put("x", b"1"))
    """

    url: str
    missing_url: str = ""
    options: StoreOptions | None = None
    opener: Callable[[str], Any] | None = None
    deviations: frozenset[Deviation] = field(default_factory=frozenset)
    name: str = "this store"

    def with_new_prefix(self) -> StoreLocation:
        """Return a copy of this location with a new, unused prefix in its URL."""
        return replace(self, url=f"{self.url}/{os.getpid()}-{next(_serial)}")

    @property
    def needs_single_writer(self) -> bool:
        """Whether packs to this place need ``single_writer=True``."""
        return Deviation.IGNORES_PRECONDITIONS in self.deviations

    def open(self, url: str = "") -> Store:
        """Open the store at ``url``, by default the place's own URL."""
        if self.opener is not None:
            return with_meter(self.opener(url or self.url))
        return open_store(url or self.url, options=self.options)

    def run(self, check: Callable[[Store], Awaitable[None]]) -> None:
        """Open a store and run ``check`` on it, in a new event loop."""
        run_check(self.open(), check)

    def run_without_bucket(self, check: Callable[[Store], Awaitable[None]]) -> None:
        """Run ``check`` on a store whose bucket does not exist, in a new event loop."""
        run_check(self.open(self.missing_url), check)


def run_check(store: Store, check: Callable[[Store], Awaitable[None]]) -> None:
    """Run ``check(store)`` in a new event loop and close the store.

    Args:
        store: store to check.
        check: asynchronous function that takes the store.

    Example:
        >>> import stoker
        >>> from stoker.testing import list_keys, read_range, run_check
        >>> async def check(store):
        ...     await store.put("x", b"0123")
        ...     print(await list_keys(store), await read_range(store, "x", 1, 3))
        >>> run_check(stoker.open_store("memory://example/run-with"), check)
        ['x'] b'12'
    """

    async def main() -> None:
        try:
            await check(store)
        finally:
            await store.close()

    asyncio.run(main())


async def read_range(store: Store, key: str, start: int, end: int, tag: str | None = None) -> bytes:
    """Return the bytes ``[start, end)`` of an object, read by ``get_range``.

    Example:
        >>> store = stoker.open_store("memory://example/read-range")
        >>> _ = await store.put("digits", b"0123456789")
        >>> await read_range(store, "digits", 2, 5)
        b'234'

    Args:
        store: store to read from.
        key: key of the object.
        start: offset of the first byte.
        end: offset after the last byte.
        tag: tag that the object must have; None for any.
    """
    into = bytearray(end - start)
    await store.get_range(key, start, end, into=memoryview(into), tag=tag)
    return bytes(into)


async def list_keys(store: Store, prefix: str = "", *, start_after: str = "") -> list[str]:
    """Return the keys that ``list`` yields.

    Example:
        >>> store = stoker.open_store("memory://example/keys-of")
        >>> for key in ("b", "a/1", "a/2"):
        ...     _ = await store.put(key, b"")
        >>> await list_keys(store, "a/")
        ['a/1', 'a/2']

    Args:
        store: store to list.
        prefix: prefix of the keys.
        start_after: key after which the listing begins.
    """
    return [info.key async for info in store.list(prefix, start_after=start_after)]
