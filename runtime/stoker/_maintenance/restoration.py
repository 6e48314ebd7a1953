"""Restoring the record of a pack run from the heads of its super-samples.

After DIESEL (Wang et al., ICPP 2020): a metadata server that loses its newest entries, or all of them, is filled again
from the chunks. What a run is, and that there is one, its first record in the bucket tells; how far it has come, its
super-samples do, the last of which says that it is the last.
"""

from __future__ import annotations

from dataclasses import replace

from stoker._base.checksum import crc32c, crc32c_combined
from stoker._base.retry import RetryingReader
from stoker._base.task_group import for_each
from stoker._format.manifest import Manifest, PackRun, Rows
from stoker._format.supersample import Head, Origin, Packed
from stoker._pack.record import PackRecord
from stoker.abc import ObjectInfo, Readable
from stoker.errors import FormatError

__all__ = ["restored"]

_FIRST_BYTES = 64 << 10  # has the whole head where rows are few or large
_HEADS_AT_ONCE = 16


async def restored(store: Readable, record: PackRecord) -> PackRecord:
    """Return a run's record as the run's super-samples tell it, from a LIST and the head of each.

    Args:
        store: where the data set is.
        record: what is known of the run, perhaps only that it has begun.

    Raises:
        FormatError: an object under the run's keys is none of its super-samples.
        StoreError: the bucket fails.
    """
    reader = RetryingReader(store)
    objects = {info.key: info async for info in reader.list(f"data/{record.run}/")}
    numbers = range(len(objects))
    keys = [f"data/{record.run}/{number:08d}" for number in numbers]
    prefix = next((number for number in numbers if keys[number] not in objects), len(keys))
    if not prefix:
        return record
    first, packed = await _read_head(reader, objects[keys[0]], 0)
    rows = {0: packed}
    is_complete = first.is_last

    async def read(number: int) -> None:
        nonlocal is_complete
        head, rows[number] = await _read_head(reader, objects[keys[number]], number)
        _check(record, first, head, number)
        if number == prefix - 1:
            is_complete = head.is_last

    _check(record, first, first, 0)
    await for_each(range(1, prefix), read, concurrency=_HEADS_AT_ONCE)  # none is kept: they are large
    manifest = Manifest(
        dataset=first.origin.dataset,
        version=1,
        schema=first.schema,
        rows=Rows.of([rows[number] for number in range(prefix)]),
        runs=(PackRun(record.run, 0, prefix),),
    )
    found = replace(record, state="complete" if is_complete else "packing", prefix=manifest)
    return found if found.progress > record.progress else record


async def _read_head(reader: RetryingReader[Readable], info: ObjectInfo, number: int) -> tuple[Head, Packed]:
    data = bytearray()
    needed_bytes = min(_FIRST_BYTES, info.size_bytes)
    while needed_bytes > len(data):  # once, but where the head is large, and twice more where its header alone is
        rest = bytearray(needed_bytes - len(data))
        await reader.get_range(info.key, len(data), needed_bytes, into=memoryview(rest), tag=info.tag)
        data += rest
        needed_bytes = Head.bytes_needed(data, info.size_bytes)
    head = Head.parse(data, info.size_bytes)
    header_crc32c = crc32c(memoryview(data)[: head.header_bytes])
    packed = Packed(
        ordinal=number,
        size_bytes=info.size_bytes,
        samples=head.samples,
        head_bytes=head.head_bytes,
        head_crc32c=crc32c(memoryview(data)[: head.head_bytes]),
        crc32c=crc32c_combined(header_crc32c, head.data_crc32c, info.size_bytes - head.header_bytes),
        tag=info.tag,
    )
    return head, packed


def _check(record: PackRecord, first: Head, head: Head, number: int) -> None:
    origin = Origin(dataset=first.origin.dataset, run=record.run, ordinal=number)
    if (head.origin, head.schema) != (origin, first.schema):
        raise FormatError(f"data/{record.run}/{number:08d} says that it is {head.origin}")
