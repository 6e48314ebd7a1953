"""Packing again what is packed: samples of some super-samples into others, without decoding them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing

from stoker._base.checksum import crc32c
from stoker._base.retry import RetryingStore
from stoker._format.supersample import SuperSample
from stoker._pack.catalog import RunJournal
from stoker._pack.object_reading import in_order
from stoker._pack.record import PackRecord
from stoker._pack.run import PackRunner, RunConfig
from stoker._pack.uploads import Uploads
from stoker.abc import ObjectRef, Readable
from stoker.errors import ChecksumError

__all__ = ["pack_again"]

_UPLOADS = 4


async def pack_again(
    store: RetryingStore,
    refs: Iterable[ObjectRef],
    record: PackRecord,
    journal: RunJournal,
    config: RunConfig,
    is_wanted: Callable[[int], bool] = lambda sample: True,
) -> PackRecord:
    """Pack the samples of super-samples as a run of their own, in order, and return its finished record.

    One that is finished already stays as it is. A run that is resumed begins behind what is durable; its super-samples
    are read again.

    Args:
        store: where the super-samples are, and where the run's go.
        refs: what pins them.
        record: with which the run begins.
        journal: of the run.
        config: what it makes of samples.
        is_wanted: tells, by its number among all, whether a sample is taken.

    Raises:
        ChecksumError: a super-sample is not the one that was packed.
        StoreError: one could not be read, or written.
    """
    begun = journal.recorded or record
    if begun.state != "packing":
        return begun
    run = PackRunner(config, begun, journal)
    await run.save([], "packing")
    uploads = Uploads(store, run, concurrency=_UPLOADS)
    try:
        await _rewrite(store, refs, run, uploads, is_wanted)
    finally:
        await uploads.cancel()
    return journal.recorded or begun


async def _rewrite(
    store: Readable,
    refs: Iterable[ObjectRef],
    run: PackRunner,
    uploads: Uploads,
    is_wanted: Callable[[int], bool],
) -> None:
    number = 0
    async with aclosing(_read(store, refs)) as found:
        async for sample in found:
            for row in range(len(sample)):
                if is_wanted(number) and (cut := run.cutter.add_encoded(sample.encoded(row), f"sample {number}")):
                    await uploads.submit(cut)
                number += 1
    await uploads.complete()


async def _read(store: Readable, refs: Iterable[ObjectRef]) -> AsyncGenerator[SuperSample, None]:
    async with aclosing(in_order((ref.size_bytes, _reader(store, ref)) for ref in refs)) as found:
        async for sample in found:
            yield sample


def _reader(store: Readable, ref: ObjectRef) -> Callable[[], Awaitable[SuperSample]]:
    async def read() -> SuperSample:
        for attempt in range(2):
            data = bytearray(ref.size_bytes)
            await store.get_range(ref.key, 0, len(data), into=memoryview(data))
            found = crc32c(data)
            if found == ref.crc32c:
                return SuperSample(data)
            if attempt:
                break  # damaged not on its way, but where it lies
        raise ChecksumError(f"{store.url}/{ref.key} has crc32c {found:08x}, the manifest says {ref.crc32c:08x}")

    return read
