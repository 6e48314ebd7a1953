"""Packing: samples in, super-samples into a store, and a manifest at the very end.

What is packed is decided in :mod:`stoker.pack.plan`, where it is cut in :mod:`stoker.pack.cutter`; here it is carried
out. Super-samples are uploaded side by side and counted in order: those without a gap from the first are the run's
durable prefix. The run's record tells it, rewritten when the prefix has grown by a sixteenth, so that the records'
bytes stay proportional to the manifest's. A resumed pack cuts the prefix again and compares it with the record instead
of uploading it, so a source that changed meanwhile is found at the first super-sample that differs.

An object is only ever written where there is none, and the manifest comes last: nothing that can be read changes.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal

from stoker import versions
from stoker.errors import ConfigError, PackError, PreconditionFailedError, StokerError
from stoker.loop_thread import LoopThread
from stoker.manifest import Manifest, object_key
from stoker.pack.cutter import Cut
from stoker.pack.log import Journal
from stoker.pack.plan import PackConfig, plan_pack
from stoker.pack.record import record_key
from stoker.pack.run import PackRunner, source_changed
from stoker.retry import RetryingStore, holds
from stoker.schema import Column, Schema
from stoker.store import open_store
from stoker.store.options import StoreOptions
from stoker.store.protocol import Store
from stoker.supersample import Packed

__all__ = ["AsyncPacker", "PackConfig", "PackProgress", "Packer"]


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


class AsyncPacker:
    """Packs samples into a store that the caller opened and closes.

    ``async with`` plans the pack on entry and commits it on a clean exit. On an error nothing is committed; what was
    packed stays, and the next pack of the same source resumes it. A write that is cancelled has taken its sample.
    """

    def __init__(
        self, store: Store, config: PackConfig, *, on_progress: Callable[[PackProgress], object] | None = None
    ) -> None:
        self._store = RetryingStore(store, config.retry)
        self._config = config
        self._on_progress = on_progress
        self._uploads: deque[asyncio.Task[Packed]] = deque()
        self._requests = asyncio.Semaphore(config.concurrency)
        self._packed: list[Packed] = []
        self._progress = PackProgress()
        self._run: PackRunner | None = None
        self.manifest: Manifest | None = None
        """The version that has the samples, once it is committed."""

    async def __aenter__(self) -> AsyncPacker:
        plan = await plan_pack(self._store, self._config)
        run = PackRunner(self._config, plan, Journal(self._store, plan.tag, plan.record if plan.is_resumed else None))
        # Written before the first object, so that no collector of garbage takes a running pack's objects, and a
        # missing permission is told before the source is read.
        await run.save([], "packing")
        self._run = run
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.commit()
            elif isinstance(error, Exception):
                await self._keep()
        finally:
            for upload in self._uploads:
                upload.cancel()
            await asyncio.gather(*self._uploads, return_exceptions=True)
            self._uploads.clear()
            self._run = None

    @property
    def durable_samples(self) -> int:
        """How many samples an earlier, unfinished pack of the same source left durable."""
        return self._opened.plan.record.samples

    def skip(self, samples: int) -> None:
        """Leave out the samples that are durable, for a source that can start in the middle and vouches for itself.

        Raises:
            ConfigError: ``samples`` is not ``durable_samples``, or a sample was written already.
        """
        run = self._opened
        if samples != self.durable_samples or run.cutter.samples:
            raise ConfigError(f"only the {self.durable_samples} durable samples can be skipped, before the first write")
        run.cutter.skip(len(run.plan.record), samples)
        self._take_in(run.durable)

    async def write(self, sample: Mapping[str, object], where: str = "") -> None:
        """Pack one sample; waits while ``concurrency`` uploads run and another super-sample is ready.

        Args:
            sample: column name → value, exactly the schema's columns.
            where: what to call the sample in an error beside its number, such as the file that it came from.

        Raises:
            SchemaError: the sample does not fit the schema; it was not taken.
            PackError: it is larger than a super-sample, or the source is not that of the pack that is resumed.
            StoreError: an earlier upload failed.
        """
        if cut := self.cut(sample, where):
            await self.submit(cut)

    def cut(self, sample: Mapping[str, object], where: str = "") -> Cut | None:
        """Do the part of :meth:`write` that needs no event loop: encode, and cut off a super-sample that is full."""
        if self.manifest is not None:
            raise ConfigError("the pack is committed; another one, with mode='append', can add to it")
        return self._opened.cutter.add(sample, where)

    async def submit(self, cut: Cut) -> None:
        """Do the rest of :meth:`write`: upload what was cut off, in the order it was cut."""
        run = self._opened
        if cut.packed.ordinal < len(run.durable):
            self._take_in([run.replayed(cut.packed)])
            return
        run.check_open()
        self._uploads.append(asyncio.create_task(self._upload(cut)))
        await self._settle(self._config.concurrency)
        if run.is_record_due(len(self._packed)):
            await run.save(self._packed, "packing")

    async def commit(self) -> Manifest:
        """Upload what is left, commit a manifest that has it, and return that.

        Raises:
            DatasetExistsError: ``create``, and another process was first.
            PackError: no sample was written; or fewer than the resumed pack had; or another process committed the
                same run.
        """
        run = self._opened
        if self.manifest is not None:
            return self.manifest
        if cut := run.cutter.finish():
            await self.submit(cut)
        await self._settle(0)
        if not self._packed and not run.durable:
            await self._store.delete(record_key(run.plan.record.run))
            raise PackError("nothing was packed, the source is empty; no data set was made")
        run.check_reached(len(self._packed))
        await run.save(self._packed, "complete")
        manifest = await versions.commit(self._store, lambda base: run.built(base, self._packed, self._store.url))
        await run.save(self._packed, "committed", manifest.version)
        self.manifest = manifest
        return manifest

    @property
    def _opened(self) -> PackRunner:
        if self._run is None:
            raise ConfigError("a packer is used inside its 'with' block")
        return self._run

    async def _upload(self, cut: Cut) -> Packed:
        key = object_key(self._opened.plan.record.run, cut.packed.ordinal)
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
        self._take_in(done)

    def _take_in(self, done: list[Packed]) -> None:
        if not done:
            return
        self._packed += done
        self._progress = PackProgress(
            samples=self._progress.samples + sum(packed.samples for packed in done),
            size_bytes=self._progress.size_bytes + sum(packed.size_bytes for packed in done),
            objects=len(self._packed),
        )
        if self._on_progress is not None:
            self._on_progress(self._progress)

    async def _keep(self) -> None:
        """After an error of the source: let the uploads end, and record what is durable, unless the store fails too."""
        if self._uploads:
            await asyncio.wait(self._uploads)
        while self._uploads and self._uploads[0].exception() is None:
            self._take_in([self._uploads.popleft().result()])
        if self._run is not None and not self._uploads:
            with suppress(StokerError):
                await self._run.save(self._packed, "packing")


class Packer:
    """Packs samples into the data set at a URL; :class:`AsyncPacker` for callers without an event loop.

    ``with stoker.Packer(url, schema=...) as packer: packer.write(sample)``. Samples are encoded in the calling thread,
    uploads run on a background thread.

    Args:
        url: a path, or a ``file://``, ``s3://``, ``gs://`` or ``memory://`` URL.
        schema: column name → column.
        super_sample_bytes: limit of a super-sample's data.
        mode: ``create`` a data set where there is none, or ``append`` to one.
        source: what names the samples; see :class:`PackConfig`.
        options: of the store, if it takes any.

    Raises:
        ConfigError: an argument is wrong.
        SchemaError: the schema is.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        schema: Mapping[str, Column],
        super_sample_bytes: int = 8 << 20,
        mode: Literal["create", "append"] = "create",
        source: str | None = None,
        options: StoreOptions | None = None,
    ) -> None:
        config = PackConfig(
            schema=schema if isinstance(schema, Schema) else Schema(schema),
            super_sample_bytes=super_sample_bytes,
            mode=mode,
            source=source,
        )
        self._store = open_store(url, options=options)
        self._packer = AsyncPacker(self._store, config)
        self._thread = LoopThread("stoker-pack")

    def __enter__(self) -> Packer:
        try:
            self._thread.run(self._packer.__aenter__())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._thread.run(self._packer.__aexit__(kind, error, trace))
        finally:
            self._close()

    @property
    def durable_samples(self) -> int:
        """How many samples an earlier, unfinished pack of the same source left durable."""
        return self._packer.durable_samples

    @property
    def manifest(self) -> Manifest | None:
        """The version that has the samples, once it is committed."""
        return self._packer.manifest

    def skip(self, samples: int) -> None:
        """Leave out the durable samples; see :meth:`AsyncPacker.skip`."""
        self._packer.skip(samples)

    def write(self, sample: Mapping[str, object], where: str = "") -> None:
        """Pack one sample; see :meth:`AsyncPacker.write`."""
        if cut := self._packer.cut(sample, where):
            self._thread.run(self._packer.submit(cut))

    def extend(self, samples: Iterable[Mapping[str, object]]) -> None:
        """Pack every sample of an iterable."""
        for sample in samples:
            self.write(sample)

    def commit(self) -> Manifest:
        """Upload what is left, commit a manifest that has it, and return that; the clean end of ``with`` does so."""
        return self._thread.run(self._packer.commit())

    def _close(self) -> None:
        try:
            self._thread.run(self._store.close())
        finally:
            self._thread.close()
