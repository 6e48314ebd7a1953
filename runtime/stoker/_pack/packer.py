"""Packs samples into super-samples in a store, and commits a manifest at the end.

:mod:`stoker._pack.plan` decides whether a pack starts a new run or resumes one; :mod:`stoker._pack.run` performs it.
Super-samples are uploaded concurrently and counted in order: the ones from the first up to the first gap are the run's
durable prefix. The run's record stores this prefix. It is rewritten each time the prefix has grown by a sixteenth, so
the bytes written for records stay proportional to the manifest's size. A resumed pack builds the prefix again and
compares it with the record instead of uploading it, so it detects a changed source at the first super-sample that
differs.

Objects are never overwritten, and the manifest is written last, so readers of the data set see no partial change.
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
from stoker._base.sizes import format_bytes, format_count, parse_bytes
from stoker._base.threads import LoopThread
from stoker._format import versions
from stoker._format.display import describe_columns, html_table
from stoker._format.manifest import Manifest
from stoker._format.schema import Column, Schema
from stoker._pack.plan import PackConfig, PackPlan, build_next_version, plan_pack
from stoker._pack.record import PackRecord, record_key
from stoker._pack.run import FinishedSuperSample, PackProgress, RunWriter, SuperSampleWriter
from stoker._pack.shuffle import delete_work_folder, open_staging, pack_permuted
from stoker._pack.stored_samples import HEADER_BYTES
from stoker._stores import open_store
from stoker._stores.options import StoreOptions
from stoker.abc import Source, Store
from stoker.errors import ConfigError, PackError, StoreError

_log = logging.getLogger("stoker")

__all__ = ["AsyncPacker", "PackConfig", "PackProgress", "Packer"]


class AsyncPacker:
    """Packs samples into a store that the caller opened and closes.

    ``async with`` plans the pack on entry and commits it on a clean exit. On an error nothing is committed; the
    uploaded super-samples stay, and the next pack of the same source resumes from them. If a write is cancelled, its
    sample has still been packed.

    Args:
        store: destination of the data set.
        config: schema, mode and limits of the pack.
        on_progress: called with the durable progress each time it grows.
    """

    def __init__(
        self, store: Store, config: PackConfig, *, on_progress: Callable[[PackProgress], object] | None = None
    ) -> None:
        self._store = RetryingStore(store, config.retry)
        self._config = config
        self._on_progress = on_progress
        self._plan: PackPlan  # set, like the run, while the packer is open
        self._run: RunWriter | None = None
        self._staging: RunWriter | None = None  # of a pack that permutes: the run that gets the source's samples
        self._is_committing = False
        self._commit_lock = asyncio.Lock()
        self.manifest: Manifest | None = None
        """The committed version; None before the commit."""

    async def __aenter__(self) -> AsyncPacker:
        plan = self._plan = await plan_pack(self._store, self._config)
        config = self._config
        is_resumed = plan.journal.recorded is not None
        cutter = SuperSampleWriter(config.schema, config.super_sample_bytes, dataset=plan.dataset, run=plan.record.run)
        uploads = config.concurrency
        if config.shuffle is not None:
            uploads = min(uploads, config.plan_memory(config.super_sample_bytes + HEADER_BYTES).uploads)
        run = RunWriter(
            self._store,
            cutter,
            plan.record,
            plan.journal,
            self._on_progress,
            concurrency=uploads,
            upload_bytes=config.upload_bytes,
        )
        await run.begin()  # also reports a missing permission before the source is read
        if plan.journal.recorded is not None and not config.single_writer:
            await self._check_conditional_writes(plan.journal.recorded, is_resumed=is_resumed)
        if config.shuffle is not None:
            self._staging = await open_staging(self._store, plan.record.run, config, self._on_progress)
        self._run = run
        return self

    async def _check_conditional_writes(self, record: PackRecord, *, is_resumed: bool) -> None:
        """Write the record again on the condition that it does not exist, which the store must refuse."""
        if await self._store.keeps_conditions(record_key(record.run), record.to_bytes()):
            return
        if not is_resumed:
            await self._store.delete(record_key(record.run))
        raise StoreError(
            f"{self._store.url} ignores If-None-Match: it replaced an existing object although the request forbade it, "
            "so of two packs at the same time one would be lost; use a store with conditional writes (Amazon S3, "
            "Google Cloud Storage, R2, a newer version of the server) or, if nothing else writes to the data set "
            "meanwhile, single_writer=True (stoker pack --single-writer)"
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        runs = self._open_run, self._open_input
        try:
            if error is None:
                await self.commit()
            elif isinstance(error, Exception):
                await self._open_input.stop()
        finally:
            for run in runs:
                await run.cancel()
            self._run = self._staging = None

    @property
    def durable_samples(self) -> int:
        """Number of samples that an earlier, unfinished pack of the same source has stored durably."""
        return self._open_input.record.samples

    def skip(self, samples: int) -> None:
        """Skip the durable samples without comparing them, if the source can start in the middle and has not changed.

        Args:
            samples: number of samples to skip; must equal ``durable_samples``.

        Raises:
            ConfigError: ``samples`` is not ``durable_samples``, or a sample was written already.
        """
        run = self._open_input
        if samples != self.durable_samples or run.sample_writer.samples:
            raise ConfigError(f"skip takes exactly the {self.durable_samples} durable samples, before the first write")
        run.skip_durable()

    async def write(self, sample: Mapping[str, object], where: str = "") -> None:
        """Pack one sample; waits while uploads take the memory, or ``concurrency`` of them run.

        Args:
            sample: column name → value, with exactly the schema's columns.
            where: origin of the sample for error messages, such as its file; shown beside the sample's number.

        Raises:
            SchemaError: the sample does not fit the schema; it was not packed.
            PackError: the sample is larger than 1 GiB, or the source differs from that of the resumed pack.
            StoreError: an earlier upload failed.
        """
        if cut := self.encode(sample, where):
            await self.submit(cut)

    async def extend(self, source: Source) -> None:
        """Pack every sample of a source; see :meth:`write`."""
        async with aclosing(source.read()) as samples:
            async for where, sample in samples:
                await self.write(sample, where)

    def encode(self, sample: Mapping[str, object], where: str = "") -> FinishedSuperSample | None:
        """Encode one sample and return the super-sample that it completed, if any: :meth:`write` without its I/O."""
        run = self._open_input
        if self._is_committing:
            raise ConfigError(
                "the pack is committed, or is being committed; add samples with another packer, mode='append'"
            )
        return run.sample_writer.add(sample, where)

    async def submit(self, finished: FinishedSuperSample) -> None:
        """Upload a super-sample that :meth:`cut` returned; call in the order in which they were returned."""
        await self._open_input.submit(finished)

    async def complete_source(self) -> None:
        """Upload the remaining samples, of which there are no more; :meth:`commit` calls it, and permutes them then.

        Raises:
            PackError: fewer samples were written than the resumed pack had.
            StoreError: an upload failed.
        """
        self._is_committing = True
        await self._open_input.complete()

    async def commit(self) -> Manifest:
        """Upload the remaining samples, commit a manifest and return it.

        Raises:
            DatasetExistsError: the mode is ``create`` and another process created the data set first.
            PackError: no sample was written, or fewer than the resumed pack had, or another process committed the
                same run.
        """
        async with self._commit_lock:
            return await self._commit_run() if self.manifest is None else self.manifest

    async def _commit_run(self) -> Manifest:
        plan, run, url = self._plan, self._open_run, self._store.url
        await self.complete_source()
        if self._staging is not None and self._staging.packed:
            await pack_permuted(self._store, run, self._staging.manifest(self._staging.packed), self._config)
        if not run.packed:
            await self._store.delete(record_key(run.record.run))
            await self._delete_staging()
            raise PackError("nothing was packed: the source has no samples, so no version was committed")
        packed = run.manifest(run.packed)
        base: Manifest | None = None

        def build(newest: Manifest | None) -> Manifest:
            nonlocal base
            base = newest
            return build_next_version(plan, packed, newest, url)

        manifest = await versions.commit(self._store, build)
        await run.record_commit(manifest.version)
        await self._delete_staging()
        if run.record.mode == "overwrite" and base is not None and base is not manifest:
            _log.warning(
                "%s was overwritten; version %d (%s) stays for its readers. To free its space: "
                "stoker gc --keep-versions 1 --delete %s",
                url, base.version, format_bytes(base.size_bytes), url,
            )  # fmt: skip
        self.manifest = manifest
        return manifest

    async def _delete_staging(self) -> None:
        if self._staging is not None:
            await delete_work_folder(self._store, self._plan.record.run)

    def describe(self) -> str:
        """Return the pack's state as one line of text."""
        if self.manifest is not None:
            return f"committed version {self.manifest.version} with {format_count(self.manifest.samples, 'sample')}"
        if self._run is None:
            return "not open"
        run = self._open_input
        done = run.progress
        return (
            f"{format_count(run.sample_writer.samples, 'sample')} written, {done.samples:,} of them stored in "
            f"{format_count(done.objects, 'super-sample')}, {format_bytes(done.size_bytes)}"
        )

    @property
    def _open_run(self) -> RunWriter:
        if self._run is None:
            raise ConfigError("the packer is not open; use it inside its 'with' block")
        return self._run

    @property
    def _open_input(self) -> RunWriter:
        """The run that gets the samples of the source."""
        return self._open_run if self._staging is None else self._staging


_HINTS = {
    "columns": "use schema=, a dictionary of column name and type",
    "overwrite": "use mode='overwrite'",
    "exist_ok": "use mode='overwrite' or mode='append'",
    "append": "use mode='append'",
    "shard_size": "use super_sample_bytes=",
    "maxsize": "use super_sample_bytes=",
    "size_limit": "use super_sample_bytes=",
    "chunk_bytes": "use super_sample_bytes=",
    "compression": "values are stored as they are; compress the values of Bytes columns before you write them",
}


@explain_arguments("Packer", _HINTS)
class Packer:
    """Packs samples into the data set at a URL.

    A clean end of the ``with`` block commits the data set. On an error nothing is committed; the uploaded super-samples
    stay, and the next pack of the same source resumes from them. Samples are encoded in the calling thread; a
    background thread uploads them. Any thread may call any method; calls run one at a time, and the data set has the
    samples in the order of the calls or, with ``shuffle``, in the order of a permutation.

    Args:
        url: destination: a path, or a ``file://``, ``s3://``, ``gs://`` or ``memory://`` URL.
        schema: column name → column type, such as ``{"image": stoker.Bytes(), "label": stoker.Array("int32")}``.
        super_sample_bytes: maximum size of the data of a super-sample with several samples, in bytes, at most a quarter
            of ``memory``. A larger sample, up to 1 GiB, has a super-sample of its own.
        mode: ``create`` a new data set, ``append`` to an existing one, or ``overwrite`` any existing one with the new
            samples alone. Readers of earlier versions are not affected.
        source: name of the samples, such as a fingerprint of their files. The next pack with the same source, schema
            and size resumes an unfinished one. By default a pack that creates is named by the URL, and one that
            appends or overwrites has no name and is never resumed.
        options: options of the store, such as :class:`stoker.S3Options`.
        single_writer: whether nothing else writes to the data set meanwhile, which permits stores without conditional
            writes.
        shuffle: seed of a uniform permutation of all samples that this packer writes, 0 to 2**64 - 1. They are stored
            in the source's order first, and permuted out of core at the commit. With mode ``append`` the new samples
            are permuted among themselves only. Default None: the order of the calls.
        memory: memory of the pack, in bytes or such as ``"512MiB"``; default ``"1GiB"``. Permuting may use all of it,
            the super-samples in upload a quarter; a larger sample is uploaded alone, in parts.

    Raises:
        ConfigError: an argument is invalid.
        MemoryBudgetError: ``memory`` is too small to permute; the message has the figure that fits.
        SchemaError: the schema is invalid.
        StoreError: on entry, the store ignores conditions on writes; see ``single_writer``.

    Example:
        >>> import numpy as np, stoker
        >>> schema = {"image": stoker.Array("uint8", (32, 32, 3)), "label": stoker.Array("int32")}
        >>> with stoker.Packer("memory://example/packer", schema=schema) as packer:
        ...     for label in range(10):
        ...         packer.write({"image": np.zeros((32, 32, 3), np.uint8), "label": label})
        >>> packer.manifest.samples
        10
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
        shuffle: int | None = None,
        memory: int | str = 1 << 30,
    ) -> None:
        self._config = config = PackConfig(
            schema=schema if isinstance(schema, Schema) else Schema(schema),
            super_sample_bytes=super_sample_bytes,
            mode=mode,
            source=source,
            single_writer=single_writer,
            shuffle=shuffle,
            memory_bytes=parse_bytes(memory, "memory"),
        )
        self._store = open_store(url, options=options)
        self._packer = AsyncPacker(self._store, config)
        self._thread = LoopThread("stoker-pack")
        self._lock = threading.Lock()  # super-samples must be submitted in the order in which they were cut

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
        """Number of samples that an earlier, unfinished pack of the same source has stored durably."""
        return self._packer.durable_samples

    @property
    def manifest(self) -> Manifest | None:
        """The committed version of the data set; None before the commit."""
        return self._packer.manifest

    def skip(self, samples: int) -> None:
        """Skip the durable samples instead of writing them again for comparison.

        Args:
            samples: number of samples that the caller skips in its source; must equal ``durable_samples``.

        Raises:
            ConfigError: ``samples`` is not ``durable_samples``, or a sample was written already.
        """
        with self._lock:
            self._packer.skip(samples)

    def write(self, sample: Mapping[str, object], where: str = "") -> None:
        """Pack one sample; waits while uploads take the memory, or 8 of them run.

        Args:
            sample: column name → value, with exactly the schema's columns.
            where: origin of the sample for error messages, such as its file; shown beside the sample's number.

        Raises:
            SchemaError: the sample does not fit the schema; it was not packed.
            PackError: the sample is larger than 1 GiB, or the source differs from that of the resumed pack.
            StoreError: an earlier upload failed.
        """
        with self._lock:
            if cut := self._packer.encode(sample, where):
                self._thread.run(self._packer.submit(cut))

    def extend(self, samples: Iterable[Mapping[str, object]] | Source) -> None:
        """Pack every sample of an iterable, or of a source of raw objects.

        Args:
            samples: iterable of mappings column name → value, or a :class:`stoker.abc.Source`, read from its start.
        """
        if isinstance(samples, Source):
            with self._lock:
                self._thread.run(self._packer.extend(samples))
            return
        for sample in samples:
            self.write(sample)

    def commit(self) -> Manifest:
        """Upload the remaining samples, commit a manifest and return it, as the end of the ``with`` block does."""
        with self._lock:
            return self._thread.run(self._packer.commit())

    def _close(self) -> None:
        try:
            self._thread.run(self._store.close())
        finally:
            self._thread.close()
