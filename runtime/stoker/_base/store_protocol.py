"""What stoker asks of a bucket: one small protocol per capability, the same for every store.

Keys are relative to the store's root (``s3://bucket/prefix`` + ``data/x``), use ``/`` and never start with it. Byte
ranges are half-open ``start, end``. Every method raises a :class:`~stoker.errors.StoreError`; those that may
succeed on another try are :class:`~stoker.errors.TransientError`. An adapter does not retry: the fetcher does, under
its own deadline and budget. Every await may be cancelled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Buffer = bytes | bytearray | memoryview

__all__ = ["Buffer", "ObjectInfo", "Presigner", "Readable", "Store", "Writable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a store says of an object.

    Attributes:
        key: relative to the store's root.
        size_bytes: of the whole object, also when a range was read.
        tag: the store's identity of this content, to be sent back as a precondition: an ETag without quotes (S3, local,
            memory) or a decimal generation (GCS). Opaque: compared, never interpreted.
    """

    key: str
    size_bytes: int
    tag: str


@runtime_checkable
class Readable(Protocol):
    """Reading objects."""

    @property
    def url(self) -> str:
        """The root as the user wrote it, without secrets; used in messages."""
        ...

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return a whole (small) object and what the store says of it.

        Raises:
            NotFoundError: there is no such object.
        """
        ...

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
        """Read bytes ``[start, end)`` straight into ``into``, which has exactly ``end - start`` bytes.

        With ``tag``, the read is conditional on the object still having it. When the call ends, however it ends
        (cancellation too), nothing writes to ``into`` any more. ``begun`` is called when the answer begins, by stores
        whose answers take long enough for that to matter.

        Raises:
            NotFoundError: there is no such object.
            ObjectChangedError: ``tag`` was given and the object has another.
            RangeBeyondEndError: the object ends before ``end``.
            TruncatedError: the connection did.
        """
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Return what the store says of an object without its bytes.

        Raises:
            NotFoundError: there is no such object.
        """
        ...

    def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield the objects whose key starts with ``prefix``, ascending by UTF-8 key, after ``start_after``."""
        ...


@runtime_checkable
class Writable(Protocol):
    """Writing objects: whole, atomic, visible at once."""

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        """Write an object; readers see the old bytes or the new, never a mixture.

        Raises:
            PreconditionFailedError: ``if_absent`` and the object exists, or it does not (or no longer) have ``if_tag``.
        """
        ...

    async def delete(self, key: str) -> None:
        """Delete an object; deleting one that does not exist is no error."""
        ...


@runtime_checkable
class Store(Readable, Writable, Protocol):
    """A bucket, or a prefix of one. Opened by :func:`stoker._stores.open_store`; closed by whoever opened it."""

    async def close(self) -> None:
        """Release connections. Idempotent. The store may be used again afterwards: it reconnects."""
        ...


@runtime_checkable
class Presigner(Protocol):
    """Lending the right to read: a bucket that can be told to answer whoever has a certain URL."""

    async def presign(self, key: str, *, seconds: int, tag: str = "") -> str:
        """Return a URL at which anybody can GET an object, or a range of it, for ``seconds`` from here on.

        Nothing is asked of the bucket, so the object need not exist. Where the bucket can tell its versions apart, the
        URL is of the one that has ``tag``; elsewhere of whatever stands at the key then. The URL is a secret.

        Raises:
            CredentialsError: the credentials in use cannot sign.
        """
        ...
