"""A run's super-samples on their way to the store: uploaded side by side, counted in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from stoker.errors import PreconditionFailedError, StokerError
from stoker.manifest import object_key
from stoker.pack.cutter import Cut
from stoker.pack.run import PackRunner, source_changed
from stoker.retry import RetryingStore, holds
from stoker.supersample import Packed

__all__ = ["PackProgress", "Uploads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackProgress:
    """What is durable so far, a resumed run's earlier part included once it was replayed.

    Attributes:
        samples: how many.
        size_bytes: of all super-samples.
        objects: how many super-samples.
    """

    samples: int = 0
    size_bytes: int = 0
    objects: int = 0


class Uploads:
    """Uploads what a run's cutter cuts, and records the durable prefix as it grows.

    Args:
        store: takes the objects.
        run: what they belong to.
        concurrency: uploads at once. Memory is this many super-samples, and the one that waits for room.
        on_progress: is told what is durable.
    """

    def __init__(
        self,
        store: RetryingStore,
        run: PackRunner,
        *,
        concurrency: int,
        on_progress: Callable[[PackProgress], object] | None = None,
    ) -> None:
        self._store = store
        self._run = run
        self._concurrency = concurrency
        self._on_progress = on_progress
        self._uploads: deque[asyncio.Task[Packed]] = deque()
        self._requests = asyncio.Semaphore(concurrency)
        self.packed: list[Packed] = []
        """The durable prefix."""
        self.progress = PackProgress()

    def take_in(self, packed: list[Packed]) -> None:
        """Count super-samples that follow the durable prefix and are durable too."""
        if not packed:
            return
        self.packed += packed
        self.progress = PackProgress(
            samples=self.progress.samples + sum(each.samples for each in packed),
            size_bytes=self.progress.size_bytes + sum(each.size_bytes for each in packed),
            objects=len(self.packed),
        )
        if self._on_progress is not None:
            self._on_progress(self.progress)

    async def submit(self, cut: Cut) -> None:
        """Upload what was cut off, in the order it was cut; waits while ``concurrency`` uploads run.

        Raises:
            PackError: the source is not that of the pack that is resumed.
            StoreError: an earlier upload failed.
        """
        if cut.packed.ordinal < len(self._run.durable):
            self.take_in([self._run.replayed(cut.packed)])
            return
        self._run.check_open()
        self._uploads.append(asyncio.create_task(self._upload(cut)))
        await self._settle(self._concurrency)
        if self._run.is_record_due(len(self.packed)):
            await self._run.save(self.packed, "packing")

    async def complete(self) -> None:
        """Upload what is under construction, wait for all uploads, and record that the source has ended.

        Raises:
            PackError: the source ended before the pack that is resumed had.
            StoreError: an upload failed.
        """
        if cut := self._run.cutter.finish():
            await self.submit(cut)
        await self._settle(0)
        self._run.check_reached(len(self.packed))
        if self.packed:
            await self._run.save(self.packed, "complete")

    async def keep(self, *, seconds: float | None = None) -> None:
        """Go no further: let the uploads end, for so long at most, and record what is durable if the store works."""
        if self._uploads:
            await asyncio.wait(self._uploads, timeout=seconds)
        is_failing = any(upload.done() and upload.exception() is not None for upload in self._uploads)
        while self._uploads and self._uploads[0].done() and self._uploads[0].exception() is None:
            self.take_in([self._uploads.popleft().result()])
        if not is_failing:
            with suppress(StokerError):
                await self._run.save(self.packed, "packing")

    async def cancel(self) -> None:
        """End the uploads that are under way."""
        for upload in self._uploads:
            upload.cancel()
        await asyncio.gather(*self._uploads, return_exceptions=True)
        self._uploads.clear()

    async def _upload(self, cut: Cut) -> Packed:
        key = object_key(self._run.record.run, cut.packed.ordinal)
        async with self._requests:
            try:
                info = await self._store.put(key, cut.data, if_absent=True)
            except PreconditionFailedError:
                # A killed run may have come further than its record says, and a twin may be at work.
                found = await holds(self._store, key, cut.data)
                if found is None:
                    raise source_changed(f"{self._store.url}/{key} holds other samples") from None
                info = found
        return replace(cut.packed, tag=info.tag)

    async def _settle(self, running: int) -> None:
        """Wait until at most that many uploads are under way, and count those that ended."""
        while True:
            self._count()
            pending = [upload for upload in self._uploads if not upload.done()]
            if len(pending) <= running:
                return
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    def _count(self) -> None:
        for upload in self._uploads:
            if upload.done():
                upload.result()  # raises what the upload did, also if those before it still run
        done = []
        while self._uploads and self._uploads[0].done():
            done.append(self._uploads.popleft().result())
        self.take_in(done)
