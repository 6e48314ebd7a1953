"""A simulated bucket of which some objects have bytes: for code that reads what it gets, as starting a run does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

from stoker.abc import ObjectInfo
from stoker_sim._models.bucket import BucketView

__all__ = ["HeldView"]


class HeldView:
    """A :class:`~stoker.abc.Readable` that takes a view's time and has these objects.

    Args:
        view: of a bucket whose ``size_of`` knows them.
        objects: key → bytes.
    """

    def __init__(self, view: BucketView, objects: Mapping[str, bytes]) -> None:
        self._view, self._objects = view, objects

    @property
    def url(self) -> str:
        """The view's."""
        return self._view.url

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return an object, when its bytes would be there."""
        data = self._objects.get(key, b"")
        return data, await self._view.get_range(key, 0, len(data), into=memoryview(b""))

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
        """Fill ``into`` when the bytes would be there."""
        info = await self._view.get_range(key, start, end, into=into, tag=tag, begun=begun)
        into[:] = self._objects[key][start:end]
        return info

    async def head(self, key: str) -> ObjectInfo:
        """Return an object's size, when the first byte would be there."""
        return await self._view.head(key)

    def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Refuse, as the view does."""
        return self._view.list(prefix, start_after=start_after)
