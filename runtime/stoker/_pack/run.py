"""One pack run: samples cut into super-samples, uploaded side by side, and recorded as the durable prefix grows.

Where super-samples end depends on the samples' sizes alone, so the same samples give the same objects, byte for byte. A
run that is resumed cuts its durable prefix again and compares it with the record, unless the source vouches for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial

from stoker._base.checksum import crc32c
from stoker._base.retry import RetryingStore
from stoker._base.task_group import InOrder, in_order, task_group
from stoker._format.identity import hashed
from stoker._format.manifest import Manifest, object_key
from stoker._format.schema import Schema
from stoker._format.supersample import Origin, Packed, SuperSample, SuperSampleBuilder
from stoker._pack.record import Journal, PackRecord, record_growth
from stoker.abc import ObjectRef, Readable
from stoker.errors import ChecksumError, PackError, StokerError

_UPLOADS_AGAIN = 4


@dataclass(frozen=True, slots=True)
class Cut:
    """One finished super-sample.

    Attributes:
        data: the object's bytes.
        packed: what a manifest must know of it.
    """

    data: bytes
    packed: Packed


class Cutter:
    """Collects samples and cuts a super-sample off when the next sample would make it too large; pure.

    Args:
        schema: the columns of every sample.
        super_sample_bytes: limit of a super-sample's data section; its header comes on top.
        dataset: id of the data set.
        run: id of the pack run.
    """

    def __init__(self, schema: Schema, super_sample_bytes: int, *, dataset: str, run: str) -> None:
        self.schema, self.dataset, self.run = schema, dataset, run
        self._builder = SuperSampleBuilder(schema)
        self._super_sample_bytes = super_sample_bytes
        self.samples = 0
        self.objects = 0

    def skip(self, objects: int, samples: int) -> None:
        """Go on as if that many more super-samples with that many samples in all had been cut.

        Raises:
            PackError: a super-sample is under construction.
        """
        if len(self._builder):
            raise PackError(f"cannot skip after sample {self.samples}, in the middle of a super-sample")
        self.objects += objects
        self.samples += samples

    def add(self, sample: Mapping[str, object], where: str = "") -> Cut | None:
        """Take one sample; return the super-sample that ended before it, if one did.

        Args:
            sample: column name → value.
            where: what to call the sample in an error beside its number, such as the file that it came from.

        Raises:
            SchemaError: the sample does not fit the schema; it was not taken.
            PackError: the sample alone is larger than a super-sample; it was not taken.
        """
        name = f"sample {self.samples}" + (f" ({where})" if where else "")
        return self.add_encoded(self.schema.encode(sample, name), name)

    def add_encoded(self, values: list[bytes], name: str) -> Cut | None:
        """Take one sample as :meth:`Schema.encode` gives it, called ``name`` in an error; else like :meth:`add`."""
        cut = None
        if self._builder.size_with(values) > self._super_sample_bytes:
            self._check_fits(values, name)
            cut = self._cut(is_last=False)
        self._builder.add(values)
        self.samples += 1
        return cut

    def finish(self) -> Cut | None:
        """Return the run's last super-sample, the one under construction; None if there is no sample."""
        return self._cut(is_last=True) if len(self._builder) else None

    def _cut(self, *, is_last: bool) -> Cut:
        origin = Origin(dataset=self.dataset, run=self.run, ordinal=self.objects)
        data, packed = self._builder.finish(origin, is_last=is_last)
        self.objects += 1
        return Cut(data, packed)

    def _check_fits(self, values: list[bytes], name: str) -> None:
        alone = SuperSampleBuilder(self.schema).size_with(values)
        if alone > self._super_sample_bytes:
            sizes = dict(zip(self.schema, map(len, values), strict=True))
            largest = max(sizes, key=sizes.__getitem__)
            raise PackError(
                f"{name} needs {alone} bytes ({sizes[largest]} of them in column {largest!r}), more than a "
                f"super-sample of {self._super_sample_bytes}; raise super_sample_bytes= or make the sample smaller"
            )


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


class RunWriter:
    """Carries out a run: cuts, uploads, and records the durable prefix. Leave it with :meth:`cancel`, however it ends.

    Args:
        store: takes the objects.
        cutter: makes them, of the same run.
        record: with which the run begins; its prefix is durable.
        journal: takes what the run comes to.
        on_progress: called with what is durable, as it grows.
        concurrency: uploads at once. Memory is this many super-samples, and the one that waits for room.

    Attributes:
        cutter: takes samples, and gives what :meth:`submit` takes.
        record: as given.
        packed: the durable prefix, as far as it was replayed or skipped.
        progress: what that comes to.
    """

    def __init__(
        self,
        store: RetryingStore,
        cutter: Cutter,
        record: PackRecord,
        journal: Journal,
        on_progress: Callable[[PackProgress], object] | None = None,
        *,
        concurrency: int = _UPLOADS_AGAIN,
    ) -> None:
        self.record = record
        self.packed: list[Packed] = []
        self.progress = PackProgress()
        self._store, self.cutter, self._journal, self._on_progress = store, cutter, journal, on_progress
        self._uploads = InOrder(concurrency, self._take_in)
        self._durable = [] if record.prefix is None else [packed for _, packed in record.prefix.packed()]

    async def begin(self) -> None:
        """Record that there is such a run: before its first object, so that no collector of garbage takes that."""
        await self._save([], "packing")

    def skip_durable(self) -> None:
        """Go on behind the durable samples, for a source that can start there and vouches for itself."""
        self.cutter.skip(len(self._durable), self.record.samples)
        self._take_in(self._durable)

    async def submit(self, cut: Cut) -> None:
        """Upload what was cut off, in the order it was cut; waits while ``concurrency`` uploads run.

        Raises:
            PackError: the source is not that of the pack that is resumed.
            StoreError: an earlier upload failed.
        """
        number = cut.packed.ordinal
        if number < len(self._durable):
            durable = self._durable[number]
            if replace(cut.packed, tag=durable.tag, sha256_128=durable.sha256_128) != durable:
                raise self._source_changed(f"super-sample {number}, before sample {self.cutter.samples}, differs")
            self._take_in([durable])
            return
        if self.record.state != "packing":
            raise self._source_changed(f"it has more than its {self.record.samples} samples")
        await self._uploads.add(partial(self._upload, cut))
        recorded = 0 if self._journal.recorded is None else len(self._journal.recorded)
        if len(self.packed) - recorded >= record_growth(recorded):
            await self._save(self.packed, "packing")

    async def complete(self) -> None:
        """Upload what is under construction, wait for all uploads, and record that the source has ended.

        Raises:
            PackError: the source ended before the pack that is resumed had.
            StoreError: an upload failed.
        """
        if cut := self.cutter.finish():
            await self.submit(cut)
        await self._uploads.finish()
        if len(self.packed) < len(self._durable):
            ended, packed = self.cutter.samples, self.record.samples
            raise self._source_changed(f"it ended after {ended} samples, but {packed} were packed before")
        if self.packed:
            await self._save(self.packed, "complete")

    async def committed(self, version: int) -> None:
        """Record the version of the manifest that has the run."""
        await self._save(self.packed, "committed", version)

    async def keep(self, *, seconds: float | None = None) -> None:
        """Go no further: let the uploads end, for so long at most, and record what is durable if the store works."""
        if await self._uploads.keep(seconds):
            with suppress(StokerError):
                await self._save(self.packed, "packing")

    async def cancel(self) -> None:
        """End the uploads that are under way."""
        await self._uploads.cancel()

    def manifest(self, packed: list[Packed]) -> Manifest:
        """Return a manifest of the run's first super-samples alone.

        Raises:
            PackError: they are not numbered from 0 without gaps or repeats, so it would name other objects than theirs.
        """
        run = self.record.run
        for number, each in enumerate(packed):
            if each.ordinal != number:
                raise PackError(
                    f"run {run} has super-sample {each.ordinal} where {number} belongs, so a sample would be lost or "
                    f"doubled; nothing was committed: give the run up with stoker gc --abandoned {run} --delete, and "
                    "pack again"
                )
        return Manifest.of(self.cutter.dataset, self.cutter.schema, [(run, each) for each in packed])

    def _take_in(self, packed: list[Packed]) -> None:
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

    async def _upload(self, cut: Cut) -> Packed:
        key = object_key(self.record.run, cut.packed.ordinal)
        stored = await put_super_sample(self._store, key, cut.data, cut.packed)
        if stored is None:
            raise self._source_changed(f"{self._store.url}/{key} holds other samples")
        return stored

    async def _save(self, packed: list[Packed], state: str, version: int = 0) -> None:
        prefix = self.manifest(packed) if packed else None
        await self._journal.save(replace(self.record, state=state, version=version, prefix=prefix))

    def _source_changed(self, what: str) -> PackError:
        """Return the error that says how the source differs from the one that the run began with."""
        return PackError(
            f"the source is not the one that the unfinished pack began with: {what}; pack the original again to "
            "resume, or give this one its own name with source=, or give the unfinished pack up with: stoker gc "
            f"--abandoned {self.record.run} --delete"
        )


async def put_super_sample(store: RetryingStore, key: str, data: bytes, packed: Packed) -> Packed | None:
    """Write a super-sample unless it is there already, and hash it in a thread meanwhile.

    Returns:
        What a manifest must know of it, with its tag and hash; None if there is another object.
    """
    async with task_group() as group:
        hashing = group.create_task(hashed(data))
        info = await store.put_once(key, data)
    return None if info is None else replace(packed, tag=info.tag, sha256_128=hashing.result())


async def pack_again(
    store: RetryingStore,
    refs: Iterable[ObjectRef],
    record: PackRecord,
    journal: Journal,
    cutter: Cutter,
    is_wanted: Callable[[int], bool] = lambda sample: True,
) -> PackRecord:
    """Pack the samples of super-samples as a run of their own, in order and not decoded; return its finished record.

    One that is finished already stays as it is. A run that is resumed begins behind what is durable; its super-samples
    are read again.

    Args:
        store: where the super-samples are, and where the run's go.
        refs: what pins them.
        record: with which the run begins.
        journal: of the run.
        cutter: of the run.
        is_wanted: tells, by its number among all, whether a sample is taken.

    Raises:
        ChecksumError: a super-sample is not the one that was packed.
        StoreError: one could not be read, or written.
    """
    begun = journal.recorded or record
    if begun.state != "packing":
        return begun
    writer = RunWriter(store, cutter, begun, journal)
    await writer.begin()
    try:
        number = 0
        reads = ((ref.size_bytes, partial(_read_again, store, ref)) for ref in refs)
        async with aclosing(in_order(reads)) as found:
            async for sample in found:
                for row in range(len(sample)):
                    if is_wanted(number) and (cut := cutter.add_encoded(sample.encoded(row), f"sample {number}")):
                        await writer.submit(cut)
                    number += 1
        await writer.complete()
    finally:
        await writer.cancel()
    return journal.recorded or begun


async def _read_again(store: Readable, ref: ObjectRef) -> SuperSample:
    for _ in range(2):  # the first time, it may have been damaged on its way
        data = bytearray(ref.size_bytes)
        await store.get_range(ref.key, 0, len(data), into=memoryview(data))
        found = crc32c(data)
        if found == ref.crc32c:
            return SuperSample(data)
    raise ChecksumError(f"{store.url}/{ref.key} has crc32c {found:08x}, the manifest says {ref.crc32c:08x}")
