"""One pack run: builds super-samples, uploads them concurrently and records the durable prefix as it grows.

The boundaries of super-samples depend on the samples' sizes alone, so the same samples give the same objects, byte for
byte. A resumed run builds its durable prefix again and compares it with the record, unless the caller skips it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial

from stoker._base.checksum import crc32c
from stoker._base.retry import RetryingStore
from stoker._base.segments import SegmentedBytes
from stoker._base.task_group import Limiter, OrderedTasks, run_in_order, task_group
from stoker._format.identity import compute_sha256_128
from stoker._format.manifest import Manifest, object_key
from stoker._format.schema import Schema
from stoker._format.supersample import (
    MAX_SAMPLE_BYTES,
    MAX_TARGET_BYTES,
    PackOrigin,
    SuperSample,
    SuperSampleBuilder,
    SuperSampleRecord,
)
from stoker._pack.record import Journal, PackRecord, min_record_growth
from stoker.abc import ObjectRef, Readable
from stoker.errors import ChecksumError, PackError, StokerError

_REPACK_UPLOADS = 4


@dataclass(frozen=True, slots=True)
class FinishedSuperSample:
    """A finished super-sample.

    Attributes:
        data: bytes of the object, in several buffers if it is large.
        packed: the object's entry for the manifest.
    """

    data: SegmentedBytes
    packed: SuperSampleRecord


class SuperSampleWriter:
    """Collects samples and finishes a super-sample when the next sample would make it too large; performs no I/O.

    A sample that is larger than ``super_sample_bytes`` has a super-sample of its own.

    Args:
        schema: columns of every sample.
        super_sample_bytes: maximum size of the data section of several samples, in bytes; the header is added to it.
        dataset: id of the data set.
        run: id of the pack run.

    Attributes:
        super_sample_bytes: maximum size of a super-sample's data section, in bytes.
        samples: number of samples added or skipped.
        objects: number of super-samples finished or skipped.
    """

    def __init__(self, schema: Schema, super_sample_bytes: int, *, dataset: str, run: str) -> None:
        self.schema, self.dataset, self.run = schema, dataset, run
        self._builder = SuperSampleBuilder(schema)
        self.super_sample_bytes = super_sample_bytes
        self.samples = 0
        self.objects = 0

    def skip(self, objects: int, samples: int) -> None:
        """Count super-samples that were packed before as if they had been built here.

        Args:
            objects: number of super-samples to skip.
            samples: number of their samples in total.

        Raises:
            PackError: a super-sample is under construction.
        """
        if len(self._builder):
            raise PackError(f"cannot skip after sample {self.samples}, in the middle of a super-sample")
        self.objects += objects
        self.samples += samples

    def add(self, sample: Mapping[str, object], where: str = "") -> FinishedSuperSample | None:
        """Add a sample, and return the super-sample that ended before it, if any.

        Args:
            sample: column name → value.
            where: origin of the sample for error messages, such as its file; shown beside the sample's number.

        Raises:
            SchemaError: the sample does not fit the schema; it was not added.
            PackError: the sample is larger than 1 GiB; it was not added.
        """
        name = f"sample {self.samples}" + (f" ({where})" if where else "")
        return self.add_encoded(self.schema.encode(sample, name), name)

    def add_encoded(self, values: list[bytes], name: str) -> FinishedSuperSample | None:
        """Add a sample encoded by :meth:`Schema.encode`; like :meth:`add`, with the sample's ``name`` in errors."""
        cut = None
        if self._builder.size_with(values) > self.super_sample_bytes:
            self._check_size(values, name)
            cut = self._finish_current(is_last=False) if len(self._builder) else None
        self._builder.add(values)
        self.samples += 1
        return cut

    def finish(self) -> FinishedSuperSample | None:
        """Return the run's last super-sample, which was under construction; None if it has no samples."""
        return self._finish_current(is_last=True) if len(self._builder) else None

    def _finish_current(self, *, is_last: bool) -> FinishedSuperSample:
        origin = PackOrigin(dataset=self.dataset, run=self.run, ordinal=self.objects)
        data, packed = self._builder.finish_segments(origin, is_last=is_last)
        self.objects += 1
        return FinishedSuperSample(data, packed)

    def _check_size(self, values: list[bytes], name: str) -> None:
        size_bytes = sum(map(len, values))
        if size_bytes > MAX_SAMPLE_BYTES:
            sizes = dict(zip(self.schema, map(len, values), strict=True))
            largest = max(sizes, key=sizes.__getitem__)
            raise PackError(
                f"{name} has {size_bytes} bytes ({sizes[largest]} of them in column {largest!r}), more than the "
                f"{MAX_SAMPLE_BYTES} (1 GiB) that a sample may have; divide it into several samples, such as crops of "
                "a volume or parts of a sequence, or store it in a smaller element type"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackProgress:
    """Progress of a pack: the samples that are durable, including those of a resumed run once they were compared.

    Attributes:
        samples: number of samples.
        size_bytes: total size of the super-samples, in bytes.
        objects: number of super-samples.
    """

    samples: int = 0
    size_bytes: int = 0
    objects: int = 0


class RunWriter:
    """Performs a run: uploads super-samples and records the durable prefix. Always call :meth:`cancel` at the end.

    Args:
        store: store of the data set.
        sample_writer: builder of the run's super-samples.
        record: initial record of the run, with its durable prefix.
        journal: journal of the run.
        on_progress: called with the durable progress each time it grows.
        concurrency: maximum number of concurrent uploads.
        upload_bytes: maximum size of the super-samples in upload, in bytes; a larger one is uploaded alone.

    Attributes:
        sample_writer: builder of the super-samples for :meth:`submit`.
        record: initial record of the run.
        packed: durable prefix, as far as it was compared or skipped.
        progress: durable progress.
    """

    def __init__(
        self,
        store: RetryingStore,
        sample_writer: SuperSampleWriter,
        record: PackRecord,
        journal: Journal,
        on_progress: Callable[[PackProgress], object] | None = None,
        *,
        concurrency: int = _REPACK_UPLOADS,
        upload_bytes: int = _REPACK_UPLOADS * MAX_TARGET_BYTES,
    ) -> None:
        self.record = record
        self._upload_memory = Limiter(upload_bytes)
        self.packed: list[SuperSampleRecord] = []
        self.progress = PackProgress()
        self._store, self.sample_writer, self._journal, self._on_progress = store, sample_writer, journal, on_progress
        self._uploads = OrderedTasks(concurrency, self._append_durable)
        self._durable = [] if record.prefix is None else [packed for _, packed in record.prefix.records()]

    async def begin(self) -> None:
        """Record the run before its first object, so that garbage collection does not delete its objects."""
        await self._save([], "packing")

    def skip_durable(self) -> None:
        """Continue after the durable samples without comparing them, for a source that is known to be unchanged."""
        self.sample_writer.skip(len(self._durable), self.record.samples)
        self._append_durable(self._durable)

    async def submit(self, finished: FinishedSuperSample) -> None:
        """Upload a super-sample; waits while ``concurrency`` uploads or ``upload_bytes`` are in progress.

        If it is larger than ``upload_bytes``, also waits until it is uploaded.

        Args:
            finished: the next super-sample of :attr:`sample_writer`.

        Raises:
            PackError: the source differs from that of the resumed pack.
            StoreError: an earlier upload failed.
        """
        number = finished.packed.ordinal
        if number < len(self._durable):
            durable = self._durable[number]
            if replace(finished.packed, tag=durable.tag, sha256_128=durable.sha256_128) != durable:
                raise self._source_changed_error(
                    f"super-sample {number}, before sample {self.sample_writer.samples}, differs"
                )
            self._append_durable([durable])
            return
        if self.record.state != "packing":
            raise self._source_changed_error(f"it has more than its {self.record.samples} samples")
        limiter, size_bytes = self._upload_memory, len(finished.data)
        await limiter.acquire(min(size_bytes, limiter.limit))
        await self._uploads.add(partial(self._upload, finished))
        if size_bytes > limiter.limit:
            await self._uploads.finish()
        recorded = 0 if self._journal.recorded is None else len(self._journal.recorded)
        if len(self.packed) - recorded >= min_record_growth(recorded):
            await self._save(self.packed, "packing")

    async def complete(self) -> None:
        """Upload the last super-sample, wait for all uploads, and record that the source has ended.

        Raises:
            PackError: the source has fewer samples than the resumed pack had.
            StoreError: an upload failed.
        """
        if cut := self.sample_writer.finish():
            await self.submit(cut)
        await self._uploads.finish()
        if len(self.packed) < len(self._durable):
            ended, packed = self.sample_writer.samples, self.record.samples
            raise self._source_changed_error(f"it ended after {ended} samples, but {packed} were packed before")
        if self.packed:
            await self._save(self.packed, "complete")

    async def record_commit(self, version: int) -> None:
        """Record that a version of the manifest has the run."""
        await self._save(self.packed, "committed", version)

    async def stop(self, *, timeout_seconds: float | None = None) -> None:
        """Wait at most ``timeout_seconds`` for uploads (None: for all), and record the durable prefix."""
        if await self._uploads.wait_all(timeout_seconds):
            with suppress(StokerError):
                await self._save(self.packed, "packing")

    async def cancel(self) -> None:
        """Cancel the uploads in flight."""
        await self._uploads.cancel()

    def manifest(self, packed: list[SuperSampleRecord]) -> Manifest:
        """Return a manifest of the run's first super-samples.

        Raises:
            PackError: their numbers are not 0, 1, 2, …, so the manifest would name other objects.
        """
        run = self.record.run
        for number, each in enumerate(packed):
            if each.ordinal != number:
                raise PackError(
                    f"run {run} has super-sample {each.ordinal} instead of {number}, so samples would be lost or "
                    f"doubled; nothing was committed: delete the run with stoker gc --abandoned {run} --delete, and "
                    "pack again"
                )
        manifest = Manifest.of(self.sample_writer.dataset, self.sample_writer.schema, [(run, each) for each in packed])
        return replace(manifest, shuffles=self.record.shuffles)

    def _append_durable(self, packed: list[SuperSampleRecord]) -> None:
        """Append super-samples to the durable prefix and report the progress."""
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

    async def _upload(self, finished: FinishedSuperSample) -> SuperSampleRecord:
        key = object_key(self.record.run, finished.packed.ordinal)
        try:
            info = await put_super_sample(self._store, key, finished.data, finished.packed)
        finally:
            self._upload_memory.release(min(len(finished.data), self._upload_memory.limit))
        if info is None:
            raise self._source_changed_error(f"{self._store.url}/{key} holds other samples")
        return info

    async def _save(self, packed: list[SuperSampleRecord], state: str, version: int = 0) -> None:
        prefix = self.manifest(packed) if packed else None
        await self._journal.save(replace(self.record, state=state, version=version, prefix=prefix))

    def _source_changed_error(self, what: str) -> PackError:
        """Return the error for a source that differs from the one that the run began with."""
        return PackError(
            f"the source differs from the one that the unfinished pack began with: {what}; pack the original again to "
            "resume, or give this one its own name with source=, or delete the unfinished pack with: stoker gc "
            f"--abandoned {self.record.run} --delete"
        )


async def put_super_sample(
    store: RetryingStore, key: str, data: bytes | SegmentedBytes, packed: SuperSampleRecord
) -> SuperSampleRecord | None:
    """Write a super-sample unless it exists already, and hash it in a thread meanwhile; a large one in parts.

    Args:
        store: store of the data set.
        key: key of the super-sample.
        data: bytes of the super-sample.
        packed: its entry for the manifest, without tag and hash.

    Returns:
        The entry with tag and hash; None if the key has another object.
    """
    async with task_group() as group:
        hashing = group.create_task(compute_sha256_128(data))
        info = await store.put_once(key, data)
    return None if info is None else replace(packed, tag=info.tag, sha256_128=hashing.result())


async def repack(
    store: RetryingStore,
    refs: Iterable[ObjectRef],
    record: PackRecord,
    journal: Journal,
    sample_writer: SuperSampleWriter,
    is_wanted: Callable[[int], bool] = lambda sample: True,
) -> PackRecord:
    """Pack the samples of existing super-samples as a new run, in order and without decoding; return its final record.

    A finished run is returned as it is. A resumed run reads all super-samples again and uploads the missing ones.

    Args:
        store: store of the data set.
        refs: references of the super-samples to read.
        record: initial record of the run.
        journal: journal of the run.
        sample_writer: builder of the run's super-samples.
        is_wanted: function of a sample's index among all samples that returns whether to pack the sample.

    Raises:
        ChecksumError: a super-sample does not have its checksum.
        StoreError: a super-sample could not be read or written.
    """
    started_record = journal.recorded or record
    if started_record.state != "packing":
        return started_record
    writer = RunWriter(store, sample_writer, started_record, journal)
    await writer.begin()
    try:
        number = 0
        reads = ((ref.size_bytes, partial(_read_super_sample, store, ref)) for ref in refs)
        async with aclosing(run_in_order(reads)) as batches:
            async for sample in batches:
                for row in range(len(sample)):
                    if is_wanted(number) and (
                        cut := sample_writer.add_encoded(sample.encode_row(row), f"sample {number}")
                    ):
                        await writer.submit(cut)
                    number += 1
        await writer.complete()
    finally:
        await writer.cancel()
    return journal.recorded or started_record


async def _read_super_sample(store: Readable, ref: ObjectRef) -> SuperSample:
    for _ in range(2):  # the first read may have been damaged in transit
        data = bytearray(ref.size_bytes)
        await store.get_range(ref.key, 0, len(data), into=memoryview(data))
        checksum = crc32c(data)
        if checksum == ref.crc32c:
            return SuperSample(data)
    raise ChecksumError(f"{store.url}/{ref.key} has crc32c {checksum:08x}, the manifest says {ref.crc32c:08x}")
