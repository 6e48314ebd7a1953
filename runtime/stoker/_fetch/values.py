"""Values of samples from anywhere, read range by range into one memory, each verified by its checksum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker._base.checksum import crc32c
from stoker._base.task_group import for_each
from stoker._fetch.fetcher import Fetcher, RangePart
from stoker._fetch.group_plan import ReadLimits, Reads, plan_reads
from stoker._fetch.group_steps import Group
from stoker._format.manifest import Manifest
from stoker.errors import ChecksumError

__all__ = ["Values", "read_values"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Values:
    """Values to read, and where in their objects they are.

    Attributes:
        samples: that they belong to.
        columns: names, all of columns outside the head.
        starts: ``int64 [columns, samples]``, first byte of each value.
        ends: ``int64 [columns, samples]``, the byte behind its last.
        checksums: ``uint32 [columns, samples]``, its CRC-32C.
    """

    samples: Group
    columns: Sequence[str]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    checksums: NDArray[np.uint32]

    def plan(self, limits: ReadLimits) -> Reads:
        """Return how to read them; they are numbered column by column."""
        objects = np.tile(self.samples.super_samples, len(self.columns))
        return plan_reads(objects, self.starts.ravel(), self.ends.ravel(), limits)


async def read_values(
    values: Values, reads: Reads, into: memoryview, *, manifest: Manifest, fetcher: Fetcher, urgent: bool
) -> NDArray[np.int64]:
    """Read values as planned and return where in ``into`` each one lies, ``int64 [columns, samples]``.

    Each range is an object's part in its own right, with its own retries and deadline. When the call ends, however it
    ends, nothing writes to ``into`` any more.

    Raises:
        StoreError: one could not be had; names object, column and row where its checksum is wrong.
    """
    sizes, checksums = (values.ends - values.starts).ravel(), values.checksums.ravel()

    async def read(number: int) -> None:
        ref = manifest.ref(int(reads.objects[number]))
        part = RangePart(int(reads.starts[number]), int(reads.ends[number]), int(reads.offsets[number]))
        held = reads.values[reads.firsts[number] : reads.firsts[number + 1]]

        def verify(data: memoryview) -> None:
            found = zip(reads.addresses[held].tolist(), sizes[held].tolist(), held.tolist(), strict=True)
            for address, size, value in found:
                if crc32c(data[address : address + size]) != checksums[value]:
                    column, place = divmod(value, len(values.samples))
                    name, row = values.columns[column], values.samples.rows[place]
                    raise ChecksumError(f"{ref.key}: column {name!r} of row {row} is not what was packed")

        await fetcher.fetch_ranges(ref, fetcher.split(part, urgent=urgent), into=into, verify=verify, urgent=urgent)

    await for_each(range(len(reads)), read, concurrency=min(len(reads), fetcher.config.concurrency_most))
    return reads.addresses.reshape(values.starts.shape)
