"""The warm tier as the fetcher sees it: one more nearer place, which may be late, lack, lose or spoil anything."""

from __future__ import annotations

from typing import Protocol

from stoker._cache.naming import name_of
from stoker.abc import ObjectRef

__all__ = ["Keeper", "WarmTier"]


class Keeper(Protocol):
    """What keeps objects by their names: a :class:`~stoker_warm._proxy.Proxy`, or a client of one."""

    async def read(self, name: str, into: memoryview) -> bool:
        """Fill ``into`` with an object and return True, or False if it is not to be had.

        Raises:
            StoreError: the keeper cannot be reached.
        """
        ...

    def offer(self, name: str, data: memoryview) -> None:
        """Put an object away some time; must not block, and copies what it keeps."""
        ...

    async def close(self) -> None:
        """Release what it holds here. Idempotent."""
        ...


class WarmTier:
    """A :class:`~stoker.abc.Tier` over a keeper. For a fetcher, which asks the store as well when it is late.

    Args:
        keeper: of the objects.
    """

    name = "warm"

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Fill ``into`` with an object, if it is there.

        Raises:
            StoreError: the keeper cannot be reached.
        """
        return await self._keeper.read(name_of(ref), into)

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Have an object kept that came from the bucket."""
        self._keeper.offer(name_of(ref), data)

    async def close(self) -> None:
        """Release the keeper. Idempotent."""
        await self._keeper.close()
