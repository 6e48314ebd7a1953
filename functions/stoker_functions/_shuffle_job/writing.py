"""Writes samples as super-samples, in order, so that it may end at any time and be gone on with by anybody.

Objects are cut where their sizes and the borders between sections say, so the same samples always make the same
objects, byte for byte. They are written only where there are none yet, side by side, and counted in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import TracebackType

from stoker._base.retry import RetryingStore
from stoker._base.task_group import InOrder
from stoker._fetch.materialized_epochs import PartRecord
from stoker._format.manifest import Manifest, Rows, object_key, pack_runs
from stoker._format.schema import Schema
from stoker._format.supersample import Head, Origin, Packed, SuperSampleBuilder
from stoker.abc import Store
from stoker.errors import ChecksumError, PackError
from stoker_functions._shuffle_job.reading import Samples

__all__ = ["PartWriter", "Section", "WriteConfig"]

_RECORD_EVERY_OBJECTS = 16


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive samples that share no super-sample with others.

    Attributes:
        run: that packs them; sections of one run follow each other.
        samples: how many.
    """

    run: str
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteConfig:
    """What is written, and how.

    Attributes:
        dataset: id of the data set.
        schema: of its samples.
        sections: of the part, in order.
        object_bytes: limit of a super-sample's data.
        uploads: at once.
        stop_at_seconds: on the clock of the event loop, when no other super-sample is begun.
    """

    dataset: str
    schema: Schema
    sections: Sequence[Section]
    object_bytes: int
    uploads: int
    stop_at_seconds: float


class PartWriter:
    """Writes one part, from where its record says that it has come; ``async with`` around the writing.

    However it is left, no upload is under way behind it.

    Args:
        store: the folder.
        record: of the part.
        config: what to write.
    """

    def __init__(self, store: Store, record: PartRecord, config: WriteConfig) -> None:
        self._store = RetryingStore(store)
        self._record = record
        self._config = config
        self._builder = SuperSampleBuilder(config.schema)
        self._checksums: list[bytes] = []
        self._borders = list(accumulate(section.samples for section in config.sections))
        self._taken = self._section = 0
        self._packed: list[tuple[str, Packed]] = []
        self._uploads = InOrder(config.uploads, self._packed.extend)
        self._ordinals: dict[str, int] = {}
        self._resume()

    @property
    def samples(self) -> int:
        """How many samples the part has."""
        return self._borders[-1] if self._borders else 0

    @property
    def is_complete(self) -> bool:
        """Whether all samples are written, and recorded."""
        return self._record.samples == self.samples

    def _resume(self) -> None:
        written = self._record.written
        if written is None:
            return
        row = 0
        for run in written.runs:
            for number in range(run.first_number, run.first_number + run.rows):
                packed = written.rows.packed(row, number)
                self._advance()
                left = self._borders[self._section] - self._taken if self._taken < self.samples else 0
                expected = self._config.sections[self._section].run if left else None
                if packed.samples > left or (run.run, number) != (expected, self._ordinals.get(run.run, 0)):
                    raise PackError(f"{self._store.url} has the record of other work than this; delete its parts/")
                self._packed.append((run.run, packed))
                self._ordinals[run.run] = number + 1
                self._taken += packed.samples
                row += 1
        self._advance()

    def _advance(self) -> None:
        """Go to the section that the next sample is in."""
        while self._section < len(self._borders) and self._taken >= self._borders[self._section]:
            self._section += 1

    async def __aenter__(self) -> PartWriter:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._uploads.cancel()

    async def write(self, samples: Samples) -> bool:
        """Write the samples that come next; return whether there is time for more.

        Raises:
            ChecksumError: a value is not what was packed any more; nothing of it was written.
            PackError: the store has something else where a super-sample belongs.
            StoreError: an upload failed.
        """
        columns = range(len(self._config.schema))
        for place, value in enumerate(samples.values):
            ends = list(accumulate(samples.sizes[place].tolist(), initial=0))
            values = [value[ends[column] : ends[column + 1]] for column in columns]
            samples.values[place] = b""
            is_full = len(self._builder) and self._builder.size_with(values) > self._config.object_bytes
            if is_full and not await self._cut():
                return False
            self._builder.add(values)
            self._checksums.append(samples.checksums[place].tobytes())
            self._taken += 1
            if self._taken == self._borders[self._section] and not await self._cut():
                return False
        return True

    async def finish(self) -> None:
        """Wait for all uploads, and record how far the part has come; what is no whole super-sample is dropped."""
        await self._uploads.finish()
        await self._save()

    async def _cut(self) -> bool:
        section = self._config.sections[self._section]
        ordinal = self._ordinals.get(section.run, 0)
        data, packed = self._builder.finish(Origin(dataset=self._config.dataset, run=section.run, ordinal=ordinal))
        key = object_key(section.run, ordinal)
        if Head.parse(data, len(data)).checksums.tobytes() != b"".join(self._checksums):
            raise ChecksumError(f"{key}: a value is not what was packed; it changed in memory")
        self._checksums.clear()
        self._ordinals[section.run] = ordinal + 1
        self._advance()
        await self._uploads.add(partial(self._upload, key, section.run, data, packed))
        if len(self._packed) - len(self._record) >= _RECORD_EVERY_OBJECTS:
            await self._save()
        return asyncio.get_running_loop().time() < self._config.stop_at_seconds or self._taken == self.samples

    async def _upload(self, key: str, run: str, data: bytes, packed: Packed) -> tuple[str, Packed]:
        info = await self._store.put_once(key, data)
        if info is None:
            raise PackError(f"{self._store.url}/{key} holds something else; delete it, and shuffle again")
        return run, replace(packed, tag=info.tag)

    async def _save(self) -> None:
        if len(self._packed) > len(self._record):
            await self._record.save(
                Manifest(
                    dataset=self._config.dataset,
                    version=1,
                    schema=self._config.schema,
                    rows=Rows.of([packed for _, packed in self._packed]),
                    runs=pack_runs((run, packed.ordinal) for run, packed in self._packed),
                )
            )
