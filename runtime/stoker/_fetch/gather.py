"""Gathers rows from the ring into a batch: one vectorised copy per column, for any slots, dtypes and alignments.

The ring's memory is viewed as an array of overlapping ``void[row_bytes]`` elements, one starting at every byte.
Indexing it with the byte addresses of the rows copies each row once, from any number of super-samples, without a
Python loop: as fast as a take from one contiguous array. The offsets of ragged columns are read in the same way, as
16-byte elements (start and end of a row).

:class:`RowLocations` holds the locations of the rows' values. Batches own their memory: nothing here returns a view of
the ring.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker._format.schema import Column


@dataclass(frozen=True, slots=True, eq=False)
class RaggedValues:
    """The concatenated values of a ragged column.

    Attributes:
        column: the column.
        data: the bytes of all values, ``uint8``.
        offsets: ``int64 [samples + 1]``, in elements; value ``i`` is ``elements[offsets[i]:offsets[i + 1]]``.
        block: memory with ``data`` and, from the next multiple of 8 bytes on, ``offsets``; None if they lie apart.
    """

    column: Column
    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    block: NDArray[np.uint8] | None = None

    @property
    def elements(self) -> NDArray[Any]:
        """The values as elements, ``[sum of lengths, *column.shape]`` in the dtype's holder type."""
        return self.data.view(self.column.dtype.holder).reshape(-1, *self.column.shape)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Any:
        """Return one value: ``bytes``, ``str`` or an array of its own."""
        if not 0 <= index < len(self):
            raise IndexError(f"value {index} of a batch of {len(self)}")
        start, end = self.offsets[index : index + 2] * self.column.element_bytes
        return self.column.decode(self.data[start:end].data)


def offsets_start(values_bytes: int) -> int:
    """Return where the offsets are in a block with values of that size, in bytes."""
    return -(-values_bytes // _OFFSET_BYTES) * _OFFSET_BYTES


Columns = dict[str, NDArray[Any] | RaggedValues]
"""Column name → values of a batch: ``[samples, *shape]`` in the dtype's holder type, or ragged."""


class ValueLocations(NamedTuple):
    """Locations of the values of a column.

    Attributes:
        memory: memory that contains the values.
        starts: ``int64 [samples]``, offset of each value in the memory, in bytes.
        lengths: ``int64 [samples]``, number of elements of each value of a ragged column; None for a fixed column.
    """

    memory: memoryview
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64] | None = None


class RowLocations(NamedTuple):
    """Rows to gather, and the locations of their values.

    Attributes:
        super_samples: ``int64 [samples]``, manifest row of each row's super-sample.
        rows: ``int64 [samples]``, row in that super-sample.
        values: column name → locations of its values.
        places: ``int64 [samples]``, index into ``values`` of each row, if they are in another order; otherwise None.
    """

    super_samples: NDArray[np.int64]
    rows: NDArray[np.int64]
    values: Mapping[str, ValueLocations]
    places: NDArray[np.int64] | None = None


_LARGE_BYTES = 1 << 20
FREE_ARRAY_REFERENCES = 2
"""References to an array that neither a batch nor a view refers to: that of its pool, and getrefcount's argument."""

_MAX_LOCKED_ELEMENTS = 500
"""numpy holds the interpreter lock while it copies at most this many elements."""
_MIN_UNLOCKED_BYTES = 64 << 10
"""Copying less takes no longer than a change of threads."""
_MIN_UNLOCKED_VALUE_BYTES = 16 << 10
"""Mean size of ragged values from which on numpy copies them, each without the interpreter lock."""

_OFFSET_BYTES = 8
_WORD_BYTES = (1, 2, 4, 8)
"""Sizes of rows that are copied as integers if they are aligned, in a quarter of the time of other elements."""


def gather_rows(memory: memoryview, addresses: NDArray[np.int64], row_bytes: int) -> NDArray[np.uint8]:
    """Return ``row_bytes`` bytes from each of ``addresses``, ``uint8 [len(addresses), row_bytes]``.

    Raises:
        IndexError: a row does not lie within the memory.
    """
    return _gather_indexed(memory, addresses, _word_indices(addresses, row_bytes), row_bytes)


def _word_indices(addresses: NDArray[np.int64], row_bytes: int) -> NDArray[np.int64] | None:
    """Return addresses as indices of words of ``row_bytes`` bytes; None if some are not aligned, or rows no words."""
    if row_bytes not in _WORD_BYTES or (addresses & (row_bytes - 1)).any():
        return None
    return addresses >> row_bytes.bit_length() - 1


def _gather_indexed(
    memory: memoryview, addresses: NDArray[np.int64], indices: NDArray[np.int64] | None, row_bytes: int
) -> NDArray[np.uint8]:
    """Return rows as :func:`gather_rows` does, given the result of :func:`_word_indices`."""
    rows = len(addresses)
    if indices is not None:
        words = np.frombuffer(memory, f"u{row_bytes}", len(memory) // row_bytes)
        if words.flags.aligned:
            return words.take(indices).view(np.uint8).reshape(rows, row_bytes)
    addresses, element_bytes = _split_rows(addresses, row_bytes)
    shape = (max(0, len(memory) - element_bytes + 1),)
    elements = np.ndarray(shape, f"V{element_bytes}", memory, strides=(1,))
    return elements[addresses].view(np.uint8).reshape(rows, row_bytes)


def _split_rows(addresses: NDArray[np.int64], row_bytes: int) -> tuple[NDArray[np.int64], int]:
    """Cut large rows into equal elements, enough that other threads run while numpy copies them, if they can be cut.

    Returns:
        The addresses of the elements, row after row, ``int64 [elements]``, and their size in bytes.
    """
    rows = len(addresses)
    if rows > _MAX_LOCKED_ELEMENTS or rows * row_bytes < _MIN_UNLOCKED_BYTES:
        return addresses, row_bytes
    element_bytes = row_bytes
    while not element_bytes % 2 and rows * (row_bytes // element_bytes) <= _MAX_LOCKED_ELEMENTS:
        element_bytes //= 2
    return (addresses[:, np.newaxis] + np.arange(0, row_bytes, element_bytes)).ravel(), element_bytes


class BatchArrays:
    """Makes the arrays that batches are gathered into, for one thread at a time.

    Large arrays are used again once nothing else refers to them: the first touch of fresh memory takes longer than the
    copy into it.

    Args:
        reused: number of large arrays to keep.

    Attributes:
        copies_twice: whether fixed values may be gathered into one array, and from there into another.
    """

    copies_twice: ClassVar[bool] = True

    def __init__(self, reused: int = 3) -> None:
        self._large: deque[NDArray[np.uint8]] = deque(maxlen=reused)
        self._words: dict[int, tuple[NDArray[np.int64], NDArray[np.int64] | None]] = {}  # by row_bytes

    def gather_rows(self, memory: memoryview, addresses: NDArray[np.int64], row_bytes: int) -> NDArray[np.uint8]:
        """Return rows as :func:`gather_rows` does; ``addresses`` must not change afterwards.

        Columns of one width often have the same addresses in different memory, so those of words are computed once.
        """
        latest, indices = self._words.get(row_bytes, (None, None))
        if latest is not addresses:
            indices = _word_indices(addresses, row_bytes)
            self._words[row_bytes] = addresses, indices
        return _gather_indexed(memory, addresses, indices, row_bytes)

    def empty(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return an array, ``uint8 [size_bytes]``, with any content."""
        if size_bytes < _LARGE_BYTES:
            return np.empty(size_bytes, np.uint8)
        for index in range(len(self._large)):
            is_free = sys.getrefcount(self._large[index]) <= FREE_ARRAY_REFERENCES
            if is_free and size_bytes <= self._large[index].nbytes <= 2 * size_bytes:
                self._large.rotate(-1 - index)  # the last one is the most recently used
                return self._large[-1][:size_bytes]
        array = np.empty(size_bytes + size_bytes // 4, np.uint8)  # the next batch may be a little larger
        self._large.append(array)
        return array[:size_bytes]


NEW_ARRAYS = BatchArrays(reused=0)
"""Makes every array anew."""


def gather(located: RowLocations, columns: Mapping[str, Column], arrays: BatchArrays = NEW_ARRAYS) -> Columns:
    """Return the values of the given rows in each of ``columns``, in memory from ``arrays``."""
    return {
        name: _gather_fixed(located.values[name], column, arrays, located.places)
        if column.is_fixed
        else _gather_ragged(located.values[name], column, arrays)
        for name, column in columns.items()
    }


def _gather_fixed(
    located: ValueLocations, column: Column, arrays: BatchArrays, places: NDArray[np.int64] | None
) -> NDArray[Any]:
    rows = arrays.gather_rows(located.memory, located.starts, column.element_bytes)
    values = rows.view(column.dtype.holder).reshape(len(rows), *column.shape)
    return values if places is None else values.take(places, axis=0)


def _gather_ragged(located: ValueLocations, column: Column, arrays: BatchArrays) -> RaggedValues:
    memory, starts, lengths = located
    assert lengths is not None  # noqa: S101 - the column is ragged
    sizes = (lengths * column.element_bytes).tolist()
    ends = list(accumulate(sizes))
    values_bytes = ends[-1] if ends else 0
    start = offsets_start(values_bytes)
    block = arrays.empty(start + (len(sizes) + 1) * _OFFSET_BYTES)
    values, offsets = block[:values_bytes], block[start:].view(np.int64)
    if not copy_large_values(memory, starts, sizes, values):
        target = values.data
        for start, size, end in zip(starts.tolist(), sizes, ends, strict=True):
            target[end - size : end] = memory[start : start + size]
    offsets[0] = 0
    np.cumsum(lengths, out=offsets[1:])
    return RaggedValues(column, values, offsets, block)


def copy_large_values(
    memory: memoryview, starts: NDArray[np.int64], sizes: Sequence[int], target: NDArray[np.uint8]
) -> bool:
    """Copy values one behind the other without the interpreter lock; return False, and copy nothing, if they are small.

    Args:
        memory: memory that contains the values.
        starts: ``int64 [values]``, offset of each value in the memory, in bytes.
        sizes: size of each value, in bytes.
        target: ``uint8 [sum of sizes]``.
    """
    if target.nbytes < max(_MIN_UNLOCKED_BYTES, _MIN_UNLOCKED_VALUE_BYTES * len(sizes)):
        return False
    source = np.frombuffer(memory, np.uint8)
    parts = [source[start : start + size] for start, size in zip(starts.tolist(), sizes, strict=True)]
    np.concatenate(parts, out=target)
    return True


def concatenate(parts: Sequence[Columns]) -> Columns:
    """Concatenate the parts of one batch; a single part is returned unchanged."""
    if len(parts) == 1:
        return parts[0]
    return {name: _concatenate_column([part[name] for part in parts]) for name in parts[0]}


def _concatenate_column(parts: Sequence[NDArray[Any] | RaggedValues]) -> NDArray[Any] | RaggedValues:
    ragged = [part for part in parts if isinstance(part, RaggedValues)]
    if not ragged:
        return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    lengths = np.concatenate([np.diff(part.offsets) for part in ragged])
    data = np.concatenate([part.data for part in ragged])
    return RaggedValues(ragged[0].column, data, np.concatenate([[0], np.cumsum(lengths)]))
