"""A run's super-samples on their way to the store: uploaded side by side, counted in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from stoker._base.retry import RetryingStore
from stoker._base.task_group import InOrder
from stoker._format.manifest import object_key
from stoker._format.supersample import Packed
from stoker._pack.cutter import Cut
from stoker._pack.run import PackRunner, source_changed
from stoker.errors import StokerError

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
        self._on_progress = on_progress
        self._uploads = InOrder(concurrency, self.take_in)
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
        await self._uploads.add(partial(self._upload, cut))
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
        await self._uploads.finish()
        self._run.check_reached(len(self.packed))
        if self.packed:
            await self._run.save(self.packed, "complete")

    async def keep(self, *, seconds: float | None = None) -> None:
        """Go no further: let the uploads end, for so long at most, and record what is durable if the store works."""
        if await self._uploads.keep(seconds):
            with suppress(StokerError):
                await self._run.save(self.packed, "packing")

    async def cancel(self) -> None:
        """End the uploads that are under way."""
        await self._uploads.cancel()

    async def _upload(self, cut: Cut) -> Packed:
        key = object_key(self._run.record.run, cut.packed.ordinal)
        info = await self._store.put_once(key, cut.data)
        if info is None:
            raise source_changed(self._run.record.run, f"{self._store.url}/{key} holds other samples")
        return replace(cut.packed, tag=info.tag)
