"""Stores that watch what is asked of them, and fail when they are told to."""

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
"""Fault → when it happens, and the error; None only takes time."""


class WatchedStore(StoreWrapper):
    """Passes everything on to another store, calling ``before`` and ``after`` around every operation.

    Args:
        store: what it passes on to.

    Attributes:
        calls: every operation so far, as ``"put data/…"``.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.store = store
        self.calls: list[str] = []

    async def before(self, number: int, operation: str, key: str) -> None:
        """Fail, wait, or do nothing."""

    async def after(self, number: int, operation: str, key: str) -> None:
        """Fail, wait, or do nothing, when the operation has had its effect."""

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
    """Does ``lives`` operations; then it is as if the process had been killed: nothing has an effect any more.

    Args:
        store: what it passes on to.
        lives: how many operations succeed.
        late: whether the one that dies has its effect first.
    """

    def __init__(self, store: Store, lives: int, *, late: bool) -> None:
        super().__init__(store)
        self.lives = lives
        self.late = late

    @property
    def is_dead(self) -> bool:
        """Whether more was asked than it has lives for."""
        return len(self.calls) > self.lives

    async def before(self, number: int, operation: str, key: str) -> None:
        """Fail, if it is time to."""
        if number > self.lives or (number == self.lives and not self.late):
            raise StoreError("the process is dead")

    async def after(self, number: int, operation: str, key: str) -> None:
        """Fail, if it is time to."""
        if number == self.lives:
            raise StoreError("the process is dead")


class FlakyStore(WatchedStore):
    """Fails its ``at``-th operation once, with an error that may be retried.

    Args:
        store: what it passes on to.
        at: which operation, from 0.
        late: whether it has its effect first, so that only the answer is lost.
    """

    def __init__(self, store: Store, at: int, *, late: bool) -> None:
        super().__init__(store)
        self.at = at
        self.late = late

    async def before(self, number: int, operation: str, key: str) -> None:
        """Fail, if it is time to."""
        if number == self.at and not self.late:
            raise ServerError("try again")

    async def after(self, number: int, operation: str, key: str) -> None:
        """Fail, if it is time to."""
        if number == self.at:
            raise ServerError("the answer was lost")


class FaultyStore(WatchedStore):
    """Fails by chance, as a bucket does; the same operations on every run.

    Args:
        store: what it passes on to.
        probability: of each fault, per operation: ``throttle`` and ``error`` are answers, before which nothing happens;
            ``reset`` loses the answer of an operation that has had its effect; ``late`` takes ``late_seconds`` longer.
        seed: of what is drawn.
        late_seconds: delay of a late operation, in seconds of the event loop.

    Attributes:
        faults: how many there were, by kind.

    Example:
        >>> async def main() -> Counter[str]:
        ...     faulty = FaultyStore(open_store("memory://test"), {"throttle": 0.2, "reset": 0.1})
        ...     await RetryingStore(faulty).put("x", b"1")
        ...     return faulty.faults
        >>> faults = run_virtual(main())
    """

    def __init__(
        self, store: Store, probability: Mapping[str, float], *, seed: int = 0, late_seconds: float = 2.0
    ) -> None:
        if unknown := probability.keys() - _FAULTS.keys():
            raise ConfigError(f"there are no faults {', '.join(sorted(unknown))}; give of {', '.join(_FAULTS)}")
        super().__init__(store)
        self.faults = Counter[str]()
        self._probability, self._late_seconds = dict(probability), late_seconds
        self._random = random.Random(seed)  # noqa: S311 - repeatable, not secret

    async def before(self, number: int, operation: str, key: str) -> None:
        """Refuse, or wait, as was drawn."""
        await self._happen("before", key)

    async def after(self, number: int, operation: str, key: str) -> None:
        """Lose the answer, as was drawn."""
        await self._happen("after", key)

    async def _happen(self, when: str, key: str) -> None:
        for name, (moment, kind) in _FAULTS.items():
            if moment != when or self._random.random() >= self._probability.get(name, 0.0):
                continue
            self.faults[name] += 1
            if kind is not None:
                raise kind(f"{self.url}/{key}: {name}, by chance")
            await asyncio.sleep(self._late_seconds)
