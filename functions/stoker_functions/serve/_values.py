"""Answers to requests for values: ranges of super-samples, read from the bucket concurrently, as one body.

Ranges with small gaps between them are one read of the bucket; the client gets what it asked for.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from stoker._base.batch_read import RangePart
from stoker._base.task_group import for_each
from stoker._fetch.config import FetchConfig
from stoker._fetch.fetcher import Fetcher
from stoker._format.manifest import Manifest
from stoker._memory.budget import ByteBudget
from stoker._memory.ring import Ring
from stoker._stores.served_values import ANSWER_BYTES_HEADER, ValueRange
from stoker.abc import Readable
from stoker.errors import ObjectChangedError
from stoker_functions.serve._messages import HttpError, Response

_READS = 64
_GAP_BYTES = 32 << 10  # takes about as long as the processor time of a request, at the bandwidth of a small function
_MERGED_BYTES = 1 << 20
_GAPS_MEMORY_BYTES = 8 << 20
_HEDGE_BYTES = _MERGED_BYTES  # for each of 2 hedges
# One late read delays the whole answer, so reads are hedged; waiting is billed, so they are retried for a short time.
_FETCHES = FetchConfig(
    deadline_seconds=20.0, attempts=6, attempt_seconds=8.0, start_concurrency=_READS, max_concurrency=_READS
)


@dataclass(slots=True)
class _Read:
    """One read of the bucket: bytes ``[start, end)`` of a super-sample, for the ranges with these numbers."""

    row: int
    start: int
    end: int
    numbers: list[int]


def merge_ranges(ranges: Sequence[ValueRange]) -> list[_Read]:
    """Return the reads for ranges: one for those of a super-sample with small gaps, if it has at most 1 MiB."""
    reads: list[_Read] = []
    for number in sorted(range(len(ranges)), key=ranges.__getitem__):
        row, start, end = ranges[number]
        last = reads[-1] if reads else None
        is_near = last is not None and last.row == row and start - last.end <= _GAP_BYTES
        if last is not None and is_near and max(end, last.end) - last.start <= _MERGED_BYTES:
            last.end = max(end, last.end)
            last.numbers.append(number)
        else:
            reads.append(_Read(row, start, end, [number]))
    return reads


class RangesReader:
    """Reads ranges of one data set's super-samples. Belongs to one event loop; any number of calls may read at once.

    Args:
        store: store of the data set, without retries.
        answer_bytes: size of the largest body that the platform sends.
    """

    def __init__(self, store: Readable, answer_bytes: int) -> None:
        self._answer_bytes = answer_bytes
        self._gaps_memory = ByteBudget(_GAPS_MEMORY_BYTES)
        self._fetcher = Fetcher(
            store,
            ring=Ring(1, 1),  # holds nothing: hedges have memory of their own
            rng=random.Random(os.urandom(8)),  # noqa: S311 - jitter
            config=_FETCHES,
            small_hedge_bytes=_HEDGE_BYTES,
        )

    async def answer(self, manifest: Manifest, ranges: Sequence[ValueRange]) -> Response:
        """Return the response with the bytes of all ranges, in their order. The client verifies them.

        Raises:
            HttpError: a range is not within its super-sample (404, 416), all together are larger than an answer (413),
                or an object has changed since it was packed (412).
            StoreError: a range could not be read.
        """
        said = {ANSWER_BYTES_HEADER: str(self._answer_bytes), "Stoker-Version": str(manifest.version)}
        _check_ranges(manifest, ranges)
        *offsets, size_bytes = accumulate((part.end - part.start for part in ranges), initial=0)
        if size_bytes > self._answer_bytes:
            limit = f"the ranges have {size_bytes} bytes, and one answer has at most {self._answer_bytes}"
            raise HttpError(413, "too-large", f"{limit}: ask for fewer", headers=said)
        body, reads = bytearray(size_bytes), merge_ranges(ranges)
        places = memoryview(body)

        async def read(each: _Read) -> None:
            if len(each.numbers) == 1:
                await self._fetch(manifest, each, places, offsets[each.numbers[0]])
                return
            async with self._gaps_memory.reserve(each.end - each.start):
                data = memoryview(bytearray(each.end - each.start))
                await self._fetch(manifest, each, data, 0)
                for number in each.numbers:
                    _, start, end = ranges[number]
                    places[offsets[number] : offsets[number] + end - start] = data[
                        start - each.start : end - each.start
                    ]

        try:
            await for_each(reads, read, concurrency=min(len(reads), _READS))
        except ObjectChangedError as error:
            raise HttpError(412, "changed", "a super-sample was overwritten since it was packed") from error
        headers = {"Content-Type": "application/octet-stream", "Cache-Control": "no-store", **said}
        return Response(status=200, headers=headers, body=body)

    async def _fetch(self, manifest: Manifest, read: _Read, into: memoryview, offset: int) -> None:
        part = RangePart(read.start, read.end, offset)
        await self._fetcher.fetch_ranges(manifest.ref(read.row), [part], into=into, verify=_accept)


def _accept(_: Any) -> None:
    """Accept any bytes: only the client has the checksums."""


def _check_ranges(manifest: Manifest, ranges: Sequence[ValueRange]) -> None:
    sizes = manifest.rows.size_bytes
    for row, _, end in ranges:
        if row >= len(sizes):
            raise HttpError(404, "no-such-super-sample", f"there are super-samples 0 to {len(sizes) - 1}")
        if end > sizes[row]:
            raise HttpError(416, "bad-range", f"super-sample {row} has {sizes[row]} bytes: a range ends at {end}")
