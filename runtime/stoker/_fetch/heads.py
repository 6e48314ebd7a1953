"""The heads of super-samples, fetched and checked against the manifest."""

from __future__ import annotations

from dataclasses import replace

from stoker._base.checksum import crc32c
from stoker._fetch.fetcher import Fetcher, RangePart
from stoker._format.manifest import Manifest
from stoker._format.supersample import Head
from stoker.errors import ChecksumError, FormatError

__all__ = ["fetch_head", "open_head"]


def open_head(manifest: Manifest, row: int, data: memoryview) -> Head:
    """Return the head at the start of verified ``data`` of a manifest row's super-sample; its arrays are views.

    Raises:
        FormatError: it is not a head, or not what the manifest says.
    """
    try:
        head = Head.parse(data, int(manifest.rows.size_bytes[row]))
    except FormatError as error:
        raise FormatError(f"{manifest.key(row)}: {error}; pack the data set again") from error
    rows = manifest.rows
    if head.schema != manifest.schema or (head.samples, head.head_bytes) != (rows.samples[row], rows.head_bytes[row]):
        raise FormatError(f"{manifest.key(row)} does not have the schema, samples or head that the manifest says")
    return replace(head, schema=manifest.schema)  # the same object for all heads


async def fetch_head(fetcher: Fetcher, manifest: Manifest, row: int, into: memoryview, *, urgent: bool) -> Head:
    """Read a super-sample's head into the start of ``into``, verified by its checksum in the manifest.

    Raises:
        StoreError: it could not be had; see :meth:`stoker._fetch.fetcher.Fetcher.fetch_ranges`.
        FormatError: it is not a head, or not what the manifest says.
    """
    size_bytes, wanted = int(manifest.rows.head_bytes[row]), int(manifest.rows.head_crc32c[row])
    ref, data = manifest.ref(row), into[:size_bytes]

    def verify(data: memoryview) -> None:
        if (found := crc32c(data)) != wanted:
            raise ChecksumError(f"{ref.key}: its head has crc32c {found:08x}, the manifest says {wanted:08x}")

    await fetcher.fetch_ranges(ref, [RangePart(0, size_bytes, 0)], into=data, verify=verify, urgent=urgent)
    return open_head(manifest, row, data)
