"""Buckets of objects in memory: what both local clouds store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

from stoker_local._http1 import Body
from stoker_local._listing import Page, list_page

__all__ = ["ObjectCreated", "ObjectMap", "StoredObject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object: immutable, replaced as a whole.

    Attributes:
        data: read-only, the buffer it was received in.
        tag: the store's identity of the content: a quoted MD5 (S3) or a decimal generation (GCS).
        modified_at: POSIX seconds.
        headers: to be sent with the object (``Content-Type``, ``x-amz-meta-…``).
        tags: S3's object tags.
        part_bytes: sizes of the parts that it was uploaded in; empty if it was uploaded whole.
    """

    data: Body
    tag: str
    modified_at: float
    headers: dict[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    part_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectCreated:
    """An object that a request has just made or replaced.

    Attributes:
        event: S3's name of what happened, such as ``ObjectCreated:Put``.
    """

    bucket: str
    key: str
    event: str
    stored: StoredObject


class ObjectMap(MutableMapping[str, StoredObject]):
    """A bucket's objects by key; lists in ascending order of UTF-8 bytes."""

    def __init__(self) -> None:
        self._objects: dict[str, StoredObject] = {}
        self._sorted: list[str] | None = []

    def __getitem__(self, key: str) -> StoredObject:
        return self._objects[key]

    def __setitem__(self, key: str, stored: StoredObject) -> None:
        if key not in self._objects:
            self._sorted = None
        self._objects[key] = stored

    def __delitem__(self, key: str) -> None:
        del self._objects[key]
        self._sorted = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)

    def page(self, *, prefix: str, delimiter: str = "", start: str = "", limit: int) -> Page:
        """Return one page of the listing; see :func:`~stoker_local._listing.list_page`."""
        if self._sorted is None:
            self._sorted = sorted(self._objects)
        return list_page(self._sorted, prefix=prefix, delimiter=delimiter, start=start, limit=limit)
