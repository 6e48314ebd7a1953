"""Packing again what is packed: samples of some super-samples into others, without decoding them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing

from stoker.checksum import crc32c
from stoker.errors import ChecksumError
from stoker.pack.run import PackRunner
from stoker.pack.uploads import Uploads
from stoker.sources.reading import in_order
from stoker.store.protocol import Readable
from stoker.supersample import SuperSample
from stoker.tier import ObjectRef

__all__ = ["rewrite"]


async def rewrite(
    store: Readable,
    refs: Iterable[ObjectRef],
    run: PackRunner,
    uploads: Uploads,
    is_wanted: Callable[[int], bool] = lambda sample: True,
) -> None:
    """Pack the samples of super-samples into a run, in order, and complete it.

    A run that is resumed begins behind what is durable; its super-samples are read again.

    Args:
        store: where the super-samples are.
        refs: what pins them.
        run: that the samples go to.
        uploads: of that run.
        is_wanted: tells, by its number among all, whether a sample is taken.

    Raises:
        ChecksumError: a super-sample is not the one that was packed.
        StoreError: one could not be read, or written.
    """
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
