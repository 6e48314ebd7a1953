"""The heads of all super-samples in one block of memory, so that any sample can be found, verified and half read.

In it are the offsets of ragged columns, the checksum of every value, and the small columns themselves. Everything is
asked for in arrays: many samples at a time, from any super-samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from stoker._base.task_group import for_each
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.gather import gather_rows
from stoker._fetch.heads import fetch_head
from stoker._format.manifest import Manifest
from stoker._format.schema import Column
from stoker._format.supersample import CHECKSUMS
from stoker._memory.ring import ALIGNMENT_BYTES, anonymous_memory

__all__ = ["HeadMemory"]


class HeadMemory:
    """The heads; nothing is allocated or read before :meth:`load`.

    Args:
        manifest: of the data set.
        columns: the ones that will be asked for.
    """

    def __init__(self, manifest: Manifest, columns: Mapping[str, Column]) -> None:
        self._manifest = manifest
        self._columns = columns
        self._numbers = {name: number for number, name in enumerate(manifest.schema)}
        self._bases = _bases(manifest)
        self._starts: dict[str, NDArray[np.int64]] = {}
        self._memory: memoryview | None = None

    @staticmethod
    def size_bytes(manifest: Manifest, columns: Mapping[str, Column]) -> int:
        """Return what the heads of a data set will take, with the tables of where things are in them."""
        tables = len(_tensors(columns)) + 1
        return int(_bases(manifest)[-1]) + tables * 8 * (len(manifest) + 1)

    async def load(self, fetcher: Fetcher) -> None:
        """Read and verify all heads, as many at once as the fetcher allows; of no effect the second time.

        Raises:
            StoreError: a head could not be had.
            FormatError: one is not what the manifest says.
        """
        if self._memory is not None:
            return
        memory = anonymous_memory(int(self._bases[-1]))
        starts = {tensor: np.empty(len(self._manifest), np.int64) for tensor in _tensors(self._columns)}

        async def read(row: int) -> None:
            into = memory[int(self._bases[row]) : int(self._bases[row + 1])]
            head = await fetch_head(fetcher, self._manifest, row, into, urgent=True)
            for tensor, table in starts.items():
                table[row] = head.starts[tensor]

        await for_each(range(len(self._manifest)), read, concurrency=fetcher.config.concurrency_most)
        self._memory, self._starts = memory, starts

    @property
    def memory(self) -> memoryview:
        """All heads."""
        assert self._memory is not None  # noqa: S101 - loaded before anything is asked for
        return self._memory

    def addresses(
        self, tensor: str, super_samples: NDArray[np.int64], rows: NDArray[np.int64], row_bytes: int
    ) -> NDArray[np.int64]:
        """Return where in :attr:`memory` rows of a tensor of the head are, ``int64 [samples]``."""
        addresses: NDArray[np.int64] = (
            self._bases[super_samples] + self._starts[tensor][super_samples] + rows * row_bytes
        )
        return addresses

    def extents(
        self, name: str, super_samples: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return first byte and end, in its object, of each row's value of a column, ``int64 [samples]``."""
        column = self._columns[name]
        base, row_bytes = self._starts[name][super_samples], column.element_bytes
        if column.is_fixed:
            return base + rows * row_bytes, base + (rows + 1) * row_bytes
        borders = gather_rows(self.memory, self.addresses(f"{name}.offsets", super_samples, rows, 8), 16).view("<i8")
        return base + borders[:, 0] * row_bytes, base + borders[:, 1] * row_bytes

    def checksums(self, name: str, super_samples: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the CRC-32C of each row's value of a column, ``uint32 [samples]``."""
        places = self.addresses(CHECKSUMS, super_samples, rows, 4 * len(self._numbers)) + 4 * self._numbers[name]
        return gather_rows(self.memory, places, 4).view("<u4").reshape(-1)


def _bases(manifest: Manifest) -> NDArray[np.int64]:
    """Return where each head starts and the last one ends, ``int64 [super-samples + 1]``."""
    sizes = -(-manifest.rows.head_bytes.astype(np.int64) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return np.concatenate([[0], np.cumsum(sizes)])


def _tensors(columns: Mapping[str, Column]) -> list[str]:
    offsets = [f"{name}.offsets" for name, column in columns.items() if not column.is_fixed]
    return [CHECKSUMS, *offsets, *columns]
