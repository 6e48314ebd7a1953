"""Stores that record their operations and inject faults."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from stoker._base.meter import Operation, StoreWrapper
from stoker.abc import ObjectInfo, Store
from stoker.errors import ConfigError, ConnectionLostError, ServerError, StoreError, ThrottledError, TransientError

T = TypeVar("T")

_FAULTS: dict[str, tuple[str, type[TransientError] | None]] = {
    "throttle": ("before", ThrottledError),
    "error": ("before", ServerError),
    "late": ("before", None),
    "reset": ("after", ConnectionLostError),
}
"""Fault → when it happens, and its error; without an error the operation is only delayed."""


class WatchedStore(StoreWrapper):
    """Forwards every operation to another store and calls ``before`` and ``after`` around it; subclass it for faults.

    Args:
        store: store that performs the operations.

    Attributes:
        calls: every operation so far, such as ``"put data/…"``.

    Example:
        >>> import stoker
        >>> from stoker.testing import WatchedStore, run_check
        >>> store = WatchedStore(stoker.open_store("memory://example/watched"))
        >>> async def check(store):
        ...     await store.put("x", b"1")
        >>> run_check(store, check)
        >>> store.calls
        ['put x']
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.store = store
        self.calls: list[str] = []

    async def before(self, number: int, operation: str, key: str) -> None:
        """Called before an operation is forwarded; may wait or raise. Does nothing by default.

        Args:
            number: index of the operation, from 0.
            operation: its name, such as ``"put"``.
            key: its key; for ``list``, the prefix.
        """

    async def after(self, number: int, operation: str, key: str) -> None:
        """Called when an operation has had its effect; may wait or raise. Takes the arguments of :meth:`before`."""

    async def _perform(self, operation: Operation, key: str, request: Callable[[], Awaitable[T]]) -> T:
        number, name = len(self.calls), operation.lower()
        self.calls.append(f"{name} {key}")
        await self.before(number, name, key)
        result = await request()
        await self.after(number, name, key)
        return result

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield the objects whose key starts with ``prefix``."""
        self.calls.append(f"list {prefix}")
        await self.before(len(self.calls) - 1, "list", prefix)
        async for info in super().list(prefix, start_after=start_after):
            yield info


class DyingStore(WatchedStore):
    """Performs ``lives`` operations and then fails all others, as if the process had been killed.

    Args:
        store: store that performs the operations.
        lives: number of operations that succeed.
        late: whether the first operation that fails has its effect before it fails.

    Example:
        >>> import stoker
        >>> from stoker.testing import DyingStore
        >>> store = DyingStore(stoker.open_store("memory://example/dying"), 3, late=False)
        >>> store.is_dead
        False
    """

    def __init__(self, store: Store, lives: int, *, late: bool) -> None:
        super().__init__(store)
        self.lives = lives
        self.late = late

    @property
    def is_dead(self) -> bool:
        """Whether an operation has failed."""
        return len(self.calls) > self.lives

    async def before(self, number: int, operation: str, key: str) -> None:
        """Raise if no lives are left."""
        if number > self.lives or (number == self.lives and not self.late):
            raise StoreError("the process is dead")

    async def after(self, number: int, operation: str, key: str) -> None:
        """Raise if this is the first operation without a life."""
        if number == self.lives:
            raise StoreError("the process is dead")


class FlakyStore(WatchedStore):
    """Fails one operation with an error that may be retried.

    Args:
        store: store that performs the operations.
        at: index of the operation that fails, from 0.
        late: whether the operation has its effect before it fails, so that only the response is lost.

    Example:
        >>> import stoker
        >>> from stoker.testing import FlakyStore, run_check
        >>> async def check(store):
        ...     try:
        ...         await store.put("x", b"1")
        ...     except stoker.errors.ServerError as error:
        ...         print(error)
        >>> run_check(FlakyStore(stoker.open_store("memory://example/flaky"), 0, late=True), check)
        the response was lost
    """

    def __init__(self, store: Store, at: int, *, late: bool) -> None:
        super().__init__(store)
        self.at = at
        self.late = late

    async def before(self, number: int, operation: str, key: str) -> None:
        """Raise before operation ``at``, unless ``late``."""
        if number == self.at and not self.late:
            raise ServerError("try again")

    async def after(self, number: int, operation: str, key: str) -> None:
        """Raise after operation ``at``."""
        if number == self.at:
            raise ServerError("the response was lost")


class FaultyStore(WatchedStore):
    """Fails operations at random, as a bucket does; a seed makes the same operations fail on every run.

    Args:
        store: store that performs the operations.
        probability: fault → probability per operation, from 0 to 1. ``throttle`` and ``error`` fail before the
            operation has an effect; ``reset`` fails after it; ``late`` delays the operation by ``late_seconds``.
        seed: seed of the random numbers.
        late_seconds: delay of a late operation, in seconds of the event loop.

    Attributes:
        faults: fault → how often it was injected.

    Example:
        >>> import stoker
        >>> from stoker.testing import FaultyStore, run_virtual
        >>> async def main():
        ...     faulty = FaultyStore(stoker.open_store("memory://example/faulty"), {"late": 1.0})
        ...     await faulty.put("x", b"1")
        ...     return faulty.faults
        >>> run_virtual(main())
        Counter({'late': 1})
    """

    def __init__(
        self, store: Store, probability: Mapping[str, float], *, seed: int = 0, late_seconds: float = 2.0
    ) -> None:
        if unknown := probability.keys() - _FAULTS.keys():
            raise ConfigError(f"unknown faults: {', '.join(sorted(unknown))}; use {', '.join(_FAULTS)}")
        super().__init__(store)
        self.faults = Counter[str]()
        self._probability, self._late_seconds = dict(probability), late_seconds
        self._random = random.Random(seed)  # noqa: S311 - repeatable, not secret

    async def before(self, number: int, operation: str, key: str) -> None:
        """Raise or wait if the random numbers say so."""
        await self._inject_faults("before", key)

    async def after(self, number: int, operation: str, key: str) -> None:
        """Raise in place of the response if the random numbers say so."""
        await self._inject_faults("after", key)

    async def _inject_faults(self, when: str, key: str) -> None:
        for name, (moment, kind) in _FAULTS.items():
            if moment != when or self._random.random() >= self._probability.get(name, 0.0):
                continue
            self.faults[name] += 1
            if kind is not None:
                raise kind(f"{self.url}/{key}: injected fault {name!r}")
            await asyncio.sleep(self._late_seconds)
