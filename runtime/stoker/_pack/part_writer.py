"""Writes parts of a permuted data set as super-samples, each with a record from which any process continues it.

Writing may stop at any time. Sizes and the borders of sections decide where an object ends, so the same samples always
make the same objects, byte for byte. Objects are never overwritten; uploads are concurrent, and recorded in order.

The record of a part is a manifest, stored beside the objects that it lists: the part is complete when its record has
all of its samples. Records only grow, so any number of processes may write the same part at the same time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from stoker._base.retry import RetryingStore
from stoker._base.task_group import OrderedTasks
from stoker._fetch.materialized_pipeline import load_manifest
from stoker._format.manifest import Manifest, object_key
from stoker._format.schema import Schema
from stoker._format.supersample import Head, PackOrigin, SuperSampleBuilder, SuperSampleRecord
from stoker._pack.run import put_super_sample
from stoker._pack.stored_samples import SampleRow, StoredSamples
from stoker.abc import Store
from stoker.errors import ChecksumError, FormatError, NotFoundError, PackError, PreconditionFailedError

RECORD_FOLDER = "parts/"
RECORD_EVERY_OBJECTS = 16


class PartRecord:
    """The record of one task, constructed by :meth:`open`.

    Args:
        store: folder of the epoch.
        run: name of the record.
        dataset: id of the epoch's data set.
    """

    def __init__(self, store: Store, run: str, dataset: str) -> None:
        self._store = RetryingStore(store)
        self._key = f"{RECORD_FOLDER}{run}.safetensors"
        self._dataset = dataset
        self._tag: str | None = None
        self.written: Manifest | None = None
        """Manifest of the super-samples that this process knows to be stored; None if there are none."""

    @classmethod
    async def open(cls, store: Store, run: str, dataset: str) -> PartRecord:
        """Return the record in the store, or an empty one if there is none: one GET."""
        record = cls(store, run, dataset)
        await record._read()
        return record

    def __len__(self) -> int:
        return 0 if self.written is None else len(self.written)

    @property
    def samples(self) -> int:
        """Number of samples that are stored."""
        return 0 if self.written is None else self.written.samples

    async def save(self, written: Manifest) -> None:
        """Save a manifest, unless the stored one, perhaps of another process, has as many super-samples or more.

        Raises:
            PackError: the record was deleted, and perhaps the objects that it lists.
        """
        while len(self) < len(written):
            try:
                info = await self._store.put(
                    self._key, written.to_bytes(), if_absent=self._tag is None, if_tag=self._tag
                )
            except PreconditionFailedError:
                await self._read()
                if self.written is None:
                    raise PackError(f"{self._name} was deleted while it was written; shuffle it again") from None
            else:
                self.written, self._tag = written, info.tag

    async def _read(self) -> None:
        try:
            written, info = await load_manifest(self._store, self._key)
        except NotFoundError:
            self.written = self._tag = None
            return
        except (FormatError, ChecksumError) as error:
            raise PackError(f"{self._name} is damaged: {error}; delete it, and shuffle again") from None
        if written.dataset != self._dataset:
            raise PackError(f"{self._name} is of another data set; delete it, and shuffle again")
        self.written, self._tag = written, info.tag

    @property
    def _name(self) -> str:
        return f"{self._store.url}/{self._key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteConfig:
    """The sections of a part to write, and the limits of writing.

    Attributes:
        dataset: id of the data set.
        schema: schema of its samples.
        sections: run and number of samples of each section, in order. Sections share no super-sample; those of one
            run follow each other.
        object_bytes: limit of a super-sample's data.
        uploads: number of concurrent uploads.
        stop_at_seconds: time on the clock of the event loop after which no other super-sample is begun.
    """

    dataset: str
    schema: Schema
    sections: Sequence[tuple[str, int]]
    object_bytes: int
    uploads: int
    stop_at_seconds: float


class PartWriter:
    """Writes one part, continuing after the samples in its record.

    Args:
        store: folder of the part.
        record: record of the part.
        config: sections and limits.
    """

    def __init__(self, store: Store, record: PartRecord, config: WriteConfig) -> None:
        self._store = RetryingStore(store)
        self._record = record
        self._config = config
        self._builder = SuperSampleBuilder(config.schema)
        self._checksums: list[bytes] = []
        self._packed = [] if record.written is None else list(record.written.records())
        self._ordinals: Counter[str] = Counter()
        self._uploads = OrderedTasks(config.uploads, self._packed.extend)

    async def write(self, samples: AsyncGenerator[StoredSamples, None]) -> None:
        """Write the next samples, as far as there is time, and record the progress of the part.

        An incomplete super-sample is dropped. No upload continues after the end, also after an error.

        Raises:
            ChecksumError: a value changed in memory; it was not written.
            PackError: another object is where a super-sample belongs, or the record is of another part.
            StoreError: an upload failed.
        """
        sections = self._remaining_sections()
        try:
            async with aclosing(_iterate_rows(samples)) as rows:
                for run, count in sections:
                    if not await self._write_section(run, count, rows):
                        break
            await self._uploads.finish()
            await self._save()
        finally:
            await self._uploads.cancel()

    def _remaining_sections(self) -> deque[tuple[str, int]]:
        """Return the sections that are left, the first one without its recorded samples."""
        sections = deque(section for section in self._config.sections if section[1])
        for run, packed in self._packed:
            section, left = sections.popleft() if sections else ("", 0)
            if packed.samples > left or (run, packed.ordinal) != (section, self._ordinals[run]):
                raise PackError(f"{self._store.url} has the record of another part in this place; delete its parts/")
            self._ordinals[run] += 1
            if packed.samples < left:
                sections.appendleft((run, left - packed.samples))
        return sections

    async def _write_section(self, run: str, count: int, rows: AsyncGenerator[SampleRow, None]) -> bool:
        """Write the samples of a section, and return whether there is time for more."""
        for _ in range(count):
            values, checksums = await anext(rows)
            is_full = len(self._builder) and self._builder.size_with(values) > self._config.object_bytes
            if is_full and not await self._finish_super_sample(run):
                return False
            self._builder.add(values)
            self._checksums.append(checksums)
        return await self._finish_super_sample(run)

    async def _finish_super_sample(self, run: str) -> bool:
        ordinal = self._ordinals[run]
        data, packed = self._builder.finish(PackOrigin(dataset=self._config.dataset, run=run, ordinal=ordinal))
        key = object_key(run, ordinal)
        if Head.parse(data, len(data)).checksums.tobytes() != b"".join(self._checksums):
            raise ChecksumError(f"{key}: a value changed in memory after it was read; run the same task again")
        self._checksums.clear()
        self._ordinals[run] += 1
        await self._uploads.add(partial(self._upload, key, run, data, packed))
        if len(self._packed) - len(self._record) >= RECORD_EVERY_OBJECTS:
            await self._save()
        return asyncio.get_running_loop().time() < self._config.stop_at_seconds

    async def _upload(
        self, key: str, run: str, data: bytes, packed: SuperSampleRecord
    ) -> tuple[str, SuperSampleRecord]:
        info = await put_super_sample(self._store, key, data, packed)
        if info is None:
            raise PackError(f"{self._store.url}/{key} has other contents; delete it, and shuffle again")
        return run, info

    async def _save(self) -> None:
        if len(self._packed) > len(self._record):
            await self._record.save(Manifest.of(self._config.dataset, self._config.schema, self._packed))


async def _iterate_rows(blocks: AsyncGenerator[StoredSamples, None]) -> AsyncGenerator[SampleRow, None]:
    async for samples in blocks:
        for row in samples.rows():
            yield row
