"""Uploads of large objects in parts, of which only a few are in memory beside the object's own buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, runtime_checkable

from stoker._base.segments import SegmentedBytes
from stoker._base.task_group import for_each
from stoker.abc import Buffer, ObjectInfo
from stoker.errors import StoreError

UPLOAD_PART_BYTES = 16 << 20
"""Size of a part, and of the largest object that is written in one request. At most 65 of them make an object of 1 GiB;
S3 allows 10,000, of at least 5 MiB, and Google wants multiples of 256 KiB."""
_ABORT_SECONDS = 10.0


@runtime_checkable
class ObjectUpload(Protocol):
    """The upload of one new object in parts; the object becomes visible as a whole, or not at all.

    Attributes:
        concurrency: maximum number of parts to send at a time; 1 if they must be sent in order.
    """

    concurrency: int

    async def put_part(self, number: int, start: int, data: Buffer) -> None:
        """Send a part; a part may be sent again.

        Args:
            number: number of the part, from 0.
            start: offset of the part in the object.
            data: bytes of the part: 16 MiB, or fewer in the last one.

        Raises:
            TransientError: the part may be sent again.
            StoreError: the store refused it.
        """
        ...

    async def complete(self) -> ObjectInfo:
        """Create the object from all parts; may be called again.

        Raises:
            PreconditionFailedError: the object exists.
            TransientError: the object may exist now, or not.
        """
        ...

    async def abort(self) -> None:
        """Discard the parts. Does nothing after :meth:`complete`."""
        ...


@runtime_checkable
class PartWritable(Protocol):
    """A store that writes large objects in parts. Without it, an object is put whole, in one buffer."""

    async def begin_upload(self, key: str, size_bytes: int) -> ObjectUpload | None:
        """Begin to write a new object in parts; return None if the store cannot.

        Args:
            key: key of the object, relative to the store's root.
            size_bytes: size of the object.

        Raises:
            PreconditionFailedError: the object exists; it may also be raised at the end.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedUpload:
    """An upload in parts that was neither completed nor aborted, such as that of a killed process.

    Attributes:
        key: key of the object that it would create, relative to the store's root.
        upload_id: id of the upload in its store.
        begun: time at which it began, as the store reports it.
    """

    key: str
    upload_id: str
    begun: datetime


@runtime_checkable
class UploadListable(Protocol):
    """A store that stores, and charges for, the parts of unfinished uploads: ``stoker gc`` discards them."""

    async def list_uploads(self, prefix: str) -> Sequence[UnfinishedUpload]:
        """Return the unfinished uploads of objects whose keys start with ``prefix``."""
        ...

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Discard the parts of an upload. It is no error if the upload has ended."""
        ...


async def send_parts(
    upload: ObjectUpload, data: SegmentedBytes, perform: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]
) -> None:
    """Send all parts of an object.

    Args:
        upload: upload of the object.
        data: bytes of the object.
        perform: sends one part, with retries.
    """

    async def send(number: int) -> None:
        start = number * UPLOAD_PART_BYTES
        part = data[start : start + UPLOAD_PART_BYTES]
        await perform(lambda: upload.put_part(number, start, part))

    count = -(-len(data) // UPLOAD_PART_BYTES)
    await for_each(range(count), send, concurrency=upload.concurrency)


async def abort_upload(upload: ObjectUpload) -> None:
    """Discard the parts of a failed upload, if the store answers soon."""
    with suppress(StoreError, TimeoutError):
        async with asyncio.timeout(_ABORT_SECONDS):
            await upload.abort()
