"""Packing: samples in, super-samples into a store, and a manifest at the very end.

Which run a pack is, is decided in :mod:`stoker._pack.plan`; :mod:`stoker._pack.run` carries it out. Super-samples are
uploaded side by side and counted in order: those without a gap from the first are the run's durable prefix. The run's
record tells it, rewritten when the prefix has grown by a sixteenth, so that the records' bytes stay proportional to the
manifest's. A resumed pack cuts the prefix again and compares it with the record instead of uploading it, so a source
that changed meanwhile is found at the first super-sample that differs.

An object is only ever written where there is none, and the manifest comes last: nothing that can be read changes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Literal

from stoker._base.arguments import explain_arguments
from stoker._base.retry import RetryingStore
from stoker._base.sizes import counted, format_bytes
from stoker._base.threads import LoopThread
from stoker._format import versions
from stoker._format.display import describe_columns, html_table
from stoker._format.manifest import Manifest
from stoker._format.schema import Column, Schema
from stoker._pack.plan import PackConfig, PackPlan, plan_pack, successor
from stoker._pack.record import PackRecord, record_key
from stoker._pack.run import Cut, Cutter, PackProgress, RunWriter
from stoker._stores import open_store
from stoker._stores.options import StoreOptions
from stoker.abc import Source, Store
from stoker.errors import ConfigError, PackError, StoreError

_log = logging.getLogger("stoker")

__all__ = ["AsyncPacker", "PackConfig", "PackProgress", "Packer"]


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
        self._plan: PackPlan  # of an open packer, as is the run
        self._run: RunWriter | None = None
        self._is_ended = False
        self._commit_lock = asyncio.Lock()
        self.manifest: Manifest | None = None
        """The version that has the samples, once it is committed."""

    async def __aenter__(self) -> AsyncPacker:
        plan = self._plan = await plan_pack(self._store, self._config)
        config = self._config
        is_resumed = plan.journal.recorded is not None
        cutter = Cutter(config.schema, config.super_sample_bytes, dataset=plan.dataset, run=plan.record.run)
        run = RunWriter(
            self._store, cutter, plan.record, plan.journal, self._on_progress, concurrency=config.concurrency
        )
        await run.begin()  # so that a missing permission is told before the source is read, too
        if plan.journal.recorded is not None and not config.single_writer:
            await self._check_conditions(plan.journal.recorded, is_resumed=is_resumed)
        self._run = run
        return self

    async def _check_conditions(self, record: PackRecord, *, is_resumed: bool) -> None:
        """Write the record again as if it were new, which the store must refuse."""
        if await self._store.keeps_conditions(record_key(record.run), record.to_bytes()):
            return
        if not is_resumed:
            await self._store.delete(record_key(record.run))
        raise StoreError(
            f"{self._store.url} ignores If-None-Match: it replaced an object that was to be written only if there is "
            "none, so of two packs at the same time one would be lost; use a store with conditional writes (Amazon S3, "
            "Google Cloud Storage, R2, a newer version of the server) or, if nobody else writes to the data set "
            "meanwhile, single_writer=True (stoker pack --single-writer)"
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run = self._opened
        try:
            if error is None:
                await self.commit()
            elif isinstance(error, Exception):
                await run.keep()
        finally:
            await run.cancel()
            self._run = None

    @property
    def durable_samples(self) -> int:
        """How many samples an earlier, unfinished pack of the same source left durable."""
        return self._opened.record.samples

    def skip(self, samples: int) -> None:
        """Leave out the samples that are durable, for a source that can start in the middle and vouches for itself.

        Raises:
            ConfigError: ``samples`` is not ``durable_samples``, or a sample was written already.
        """
        run = self._opened
        if samples != self.durable_samples or run.cutter.samples:
            raise ConfigError(f"only the {self.durable_samples} durable samples can be skipped, before the first write")
        run.skip_durable()

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

    async def extend(self, source: Source) -> None:
        """Pack every sample of a source; see :meth:`write`."""
        async with aclosing(source.read()) as samples:
            async for where, sample in samples:
                await self.write(sample, where)

    def cut(self, sample: Mapping[str, object], where: str = "") -> Cut | None:
        """Do the part of :meth:`write` that needs no event loop: encode, and cut off a super-sample that is full."""
        run = self._opened
        if self._is_ended:
            raise ConfigError("the pack is committed, or about to be; another one, with mode='append', can add to it")
        return run.cutter.add(sample, where)

    async def submit(self, cut: Cut) -> None:
        """Do the rest of :meth:`write`: upload what was cut off, in the order it was cut."""
        await self._opened.submit(cut)

    async def commit(self) -> Manifest:
        """Upload what is left, commit a manifest that has it, and return that.

        Raises:
            DatasetExistsError: ``create``, and another process was first.
            PackError: no sample was written; or fewer than the resumed pack had; or another process committed the
                same run.
        """
        self._is_ended = True
        async with self._commit_lock:
            return await self._committed() if self.manifest is None else self.manifest

    async def _committed(self) -> Manifest:
        plan, run, url = self._plan, self._opened, self._store.url
        await run.complete()
        if not run.packed:
            await self._store.delete(record_key(run.record.run))
            raise PackError("nothing was packed, the source is empty; no version of a data set was made")
        packed = run.manifest(run.packed)
        base: Manifest | None = None

        def build(newest: Manifest | None) -> Manifest:
            nonlocal base
            base = newest
            return successor(plan, packed, newest, url)

        manifest = await versions.commit(self._store, build)
        await run.committed(manifest.version)
        if run.record.mode == "overwrite" and base is not None and base is not manifest:
            _log.warning(
                "%s was overwritten; version %d, %s, stays for what reads it. Its space is freed with: "
                "stoker gc --keep-versions 1 --delete %s",
                url, base.version, format_bytes(base.size_bytes), url,
            )  # fmt: skip
        self.manifest = manifest
        return manifest

    def describe(self) -> str:
        """Return how far the pack has come."""
        if self.manifest is not None:
            return f"committed version {self.manifest.version} with {counted(self.manifest.samples, 'sample')}"
        if self._run is None:
            return "not open"
        done = self._run.progress
        return (
            f"{counted(self._run.cutter.samples, 'sample')} written, {done.samples:,} of them stored in "
            f"{counted(done.objects, 'super-sample')}, {format_bytes(done.size_bytes)}"
        )

    @property
    def _opened(self) -> RunWriter:
        if self._run is None:
            raise ConfigError("a packer is used inside its 'with' block")
        return self._run


_HINTS = {
    "columns": "use schema=, a dictionary of column name and type",
    "overwrite": "use mode='overwrite'",
    "exist_ok": "use mode='overwrite' or mode='append'",
    "append": "use mode='append'",
    "shard_size": "use super_sample_bytes=",
    "maxsize": "use super_sample_bytes=",
    "size_limit": "use super_sample_bytes=",
    "chunk_bytes": "use super_sample_bytes=",
    "compression": "values are stored as they are; compress those of Bytes columns before they are written",
}


@explain_arguments("Packer", _HINTS)
class Packer:
    """Packs samples into the data set at a URL; :class:`AsyncPacker` for callers without an event loop.

    ``with stoker.Packer(url, schema=...) as packer: packer.write(sample)``. Samples are encoded in the calling thread,
    uploads run on a background thread. Any thread may call any method; one call runs at a time, and samples lie in the
    data set in the order of the calls.

    Args:
        url: a path, or a ``file://``, ``s3://``, ``gs://`` or ``memory://`` URL.
        schema: column name → column.
        super_sample_bytes: limit of a super-sample's data.
        mode: ``create`` a data set where there is none, ``append`` to one, or ``overwrite`` what is there, if anything;
            see :class:`PackConfig`.
        source: what names the samples; see :class:`PackConfig`.
        options: of the store, if it takes any.
        single_writer: nobody else writes to the data set meanwhile, for stores without conditional writes.

    Raises:
        ConfigError: an argument is wrong.
        SchemaError: the schema is.
        StoreError: on entry, the store ignores conditions on writes.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        schema: Mapping[str, Column],
        super_sample_bytes: int = 8 << 20,
        mode: Literal["create", "append", "overwrite"] = "create",
        source: str | None = None,
        options: StoreOptions | None = None,
        single_writer: bool = False,
    ) -> None:
        self._config = config = PackConfig(
            schema=schema if isinstance(schema, Schema) else Schema(schema),
            super_sample_bytes=super_sample_bytes,
            mode=mode,
            source=source,
            single_writer=single_writer,
        )
        self._store = open_store(url, options=options)
        self._packer = AsyncPacker(self._store, config)
        self._thread = LoopThread("stoker-pack")
        self._lock = threading.Lock()  # what was cut first must be submitted first

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
        with self._lock:
            try:
                self._thread.run(self._packer.__aexit__(kind, error, trace))
            finally:
                self._close()

    def __repr__(self) -> str:
        columns = describe_columns(self._config.schema)
        return f"<Packer {self._store.url} mode {self._config.mode!r} ({columns}): {self._packer.describe()}>"

    def _repr_html_(self) -> str:
        config = self._config
        rows = [
            ("mode", config.mode),
            ("columns", describe_columns(config.schema)),
            ("super-samples", f"at most {format_bytes(config.super_sample_bytes)}"),
            ("state", self._packer.describe()),
        ]
        return html_table(f"Packer {self._store.url}", rows)

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
        with self._lock:
            self._packer.skip(samples)

    def write(self, sample: Mapping[str, object], where: str = "") -> None:
        """Pack one sample; see :meth:`AsyncPacker.write`."""
        with self._lock:
            if cut := self._packer.cut(sample, where):
                self._thread.run(self._packer.submit(cut))

    def extend(self, samples: Iterable[Mapping[str, object]] | Source) -> None:
        """Pack every sample of an iterable, or of a source of raw objects.

        Args:
            samples: mappings of column name → value; or a :class:`stoker.abc.Source`, which is read from its start.
        """
        if isinstance(samples, Source):
            with self._lock:
                self._thread.run(self._packer.extend(samples))
            return
        for sample in samples:
            self.write(sample)

    def commit(self) -> Manifest:
        """Upload what is left, commit a manifest that has it, and return that; the clean end of ``with`` does so."""
        with self._lock:
            return self._thread.run(self._packer.commit())

    def _close(self) -> None:
        try:
            self._thread.run(self._store.close())
        finally:
            self._thread.close()
