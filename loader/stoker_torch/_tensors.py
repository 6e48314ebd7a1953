"""Batches as tensors: fixed columns become tensors without a copy, ragged ones a sequence over one buffer.

A buffer is reused only when it is no longer referenced and the GPU has read it. It is lent as an array that is kept
alive by all its tensors and views, so its reference count shows whether a batch in it still exists. When none does,
copies from it to a GPU may still run: an event, recorded at that time on their stream, must complete before the buffer
is lent again.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from stoker._base.sizes import format_count
from stoker._fetch.gather import FREE_ARRAY_REFERENCES, BatchArrays, Columns, RaggedValues
from stoker._format.display import describe_type, html_table
from stoker._format.schema import Column
from stoker._format.tensorfile import DType
from stoker.errors import ArgumentError


def to_tensor(array: NDArray[Any], dtype: DType) -> torch.Tensor:
    """Return an array as a tensor of ``dtype`` that shares its memory.

    Args:
        array: array of ``dtype``, or of the integer type that stores it if numpy lacks it.
        dtype: dtype of the column.
    """
    if dtype.is_bits:
        return torch.from_numpy(array).view(getattr(torch, dtype.name))
    return torch.from_numpy(array)


def to_tensors(columns: Columns, schema: Mapping[str, Column]) -> dict[str, torch.Tensor | RaggedColumn]:
    """Return a gathered batch as tensors that share its memory."""
    return {
        name: RaggedColumn.of(values) if isinstance(values, RaggedValues) else to_tensor(values, schema[name].dtype)
        for name, values in columns.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class RaggedColumn:
    """The values of a ragged column in a batch: a sequence over one buffer.

    Indexing by an integer returns ``bytes`` or ``str`` for columns of these types, else a tensor ``[length, *shape]``
    that is a view of ``values``. A slice, a list or tensor of indices, or a mask returns a ``RaggedColumn`` of copies.

    Attributes:
        column: type of the column.
        values: elements of all samples, one sample after the other, ``[sum of lengths, *shape]``.
        offsets: start of each sample in ``values``, and the end of the last, in elements: ``int64 [samples + 1]``.

    Example:
        >>> with stoker.Packer("text", schema={"tokens": stoker.Ragged("int64")}) as packer:
        ...     packer.extend({"tokens": tokens} for tokens in ([5, 6, 7], [8]))
        >>> with Loader("text", batch_size=2, shuffle="none") as loader:
        ...     tokens = next(iter(loader))["tokens"]
        >>> tokens[1]  # the tokens of the second sample
        tensor([8])
        >>> tokens.to_padded(0)
        tensor([[5, 6, 7],
                [8, 0, 0]])
        >>> tokens.lengths()
        tensor([3, 1])
    """

    column: Column
    values: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, ragged: RaggedValues) -> RaggedColumn:
        """Return gathered values as tensors that share their memory."""
        values = to_tensor(ragged.elements, ragged.column.dtype)
        return cls(ragged.column, values, torch.from_numpy(ragged.offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int | np.integer | slice | Sequence[int] | NDArray[Any] | torch.Tensor) -> Any:
        """Return one sample's value, or a column of copies for a slice, indices or a mask.

        Raises:
            IndexError: there is no such sample.
            TypeError: ``index`` is neither an integer nor a selection of samples.
        """
        if not isinstance(index, int | np.integer):
            places = np.arange(len(self))[_parse_selection(index)]
            if places.ndim:
                return self._take_rows(torch.from_numpy(places))
            index = int(places)
        if not -len(self) <= index < len(self):
            raise IndexError(f"value {index} of a batch of {len(self)}")
        start, end = self.offsets[index % len(self) : index % len(self) + 2].tolist()
        value = self.values[start:end]
        if self.column.kind in ("bytes", "text"):
            return self.column.decode(memoryview(value.cpu().numpy().tobytes()))
        return value

    def _take_rows(self, indices: torch.Tensor) -> RaggedColumn:
        lengths = self.lengths()
        parts = self.values.split(lengths.tolist())
        values = torch.cat([self.values[:0], *(parts[index] for index in indices.tolist())])
        return RaggedColumn(self.column, values, torch.cat([self.offsets[:1], lengths[indices].cumsum(0)]))

    def lengths(self) -> torch.Tensor:
        """Return how many elements each value has, ``int64 [samples]``."""
        return self.offsets.diff()

    def to_padded(self, value: float = 0) -> torch.Tensor:
        """Return the values padded behind to the longest, ``[samples, longest, *shape]``."""
        lengths = self.lengths().tolist()
        padded = self.values.new_empty(len(self), max(lengths, default=0), *self.values.shape[1:]).fill_(value)
        for row, part in zip(padded, self.values.split(lengths), strict=True):
            row[: len(part)] = part
        return padded

    def is_pinned(self) -> bool:
        """Return whether the values are in page-locked memory."""
        return self.values.is_pinned() and self.offsets.is_pinned()

    def pin_memory(self) -> RaggedColumn:
        """Return a copy in page-locked memory, which needs a GPU."""
        return RaggedColumn(self.column, self.values.pin_memory(), self.offsets.pin_memory())

    def to(self, *args: Any, **kwargs: Any) -> RaggedColumn:
        """Return the column with both tensors moved to a device; the arguments are those of :meth:`torch.Tensor.to`.

        Raises:
            TypeError: an argument is a dtype, or a tensor, which has a dtype.
        """
        named = [*args, *kwargs.values()]
        if any(isinstance(each, torch.dtype | torch.Tensor) for each in named):
            raise TypeError(
                "RaggedColumn.to() only moves to a device: it cannot change the dtype of the column and its offsets. "
                "Convert the values, column.values.to(dtype), or pad them first, column.to_padded().to(dtype)"
            )
        return RaggedColumn(self.column, self.values.to(*args, **kwargs), self.offsets.to(*args, **kwargs))

    def __repr__(self) -> str:
        return f"<RaggedColumn {describe_type(self.column)}: {self._format_size()}>"

    def _repr_html_(self) -> str:
        return html_table(f"RaggedColumn {describe_type(self.column)}", [("values", self._format_size())])

    def _format_size(self) -> str:
        lengths = self.lengths()
        longest = f" of {int(lengths.min())} to {int(lengths.max())} elements" if len(self) else ""
        return f"{format_count(len(self), 'value')}{longest}, {self.values.numel():,} in all, on {self.values.device}"


def _parse_selection(index: Any) -> slice | NDArray[Any]:
    """Return a selection of samples as a slice, or as an array of indices or a mask with at most one dimension.

    Raises:
        ArgumentError: ``index`` is not a selection.
    """
    if isinstance(index, slice):
        if index.step is not None and not index.step > 0:
            raise ArgumentError(
                f"the step of a slice of a column is at least 1, not {index.step}; give a list of indices"
            )
        return index
    if isinstance(index, torch.Tensor):
        index = (index.bool() if index.dtype == torch.uint8 else index).cpu().numpy()  # uint8 is a mask to torch
    try:
        chosen = np.asarray(index)
    except ValueError:  # sequences of different lengths
        chosen = np.asarray(None)
    if not isinstance(index, np.ndarray) and chosen.shape == (0,):
        chosen = chosen.astype(np.int64)  # numpy makes floats of an empty list
    if chosen.dtype.kind not in "iub" or chosen.ndim > 1 or (chosen.dtype.kind == "b" and not chosen.ndim):
        raise ArgumentError(
            f"a column's index is an integer, a slice, a list or tensor of integers, or a mask, not {index!r:.80}"
        )
    return chosen


def stack_values(values: Sequence[Any]) -> Any:
    """Return numbers, or tensors and arrays of one shape, stacked as by ``default_collate``; other values as a list."""
    if all(isinstance(value, bool | int | float | np.number | np.bool_) for value in values):
        return default_collate([value.item() if isinstance(value, np.bool_) else value for value in values])
    first = values[0]
    if not all(isinstance(value, np.ndarray | torch.Tensor) and value.shape == first.shape for value in values):
        return list(values)
    if all(isinstance(value, np.ndarray) and value.dtype == first.dtype for value in values):
        return torch.from_numpy(np.stack(values))  # accepts any strides
    return torch.stack([torch.as_tensor(value.copy() if isinstance(value, np.ndarray) else value) for value in values])


def pin_batch(batch: Any) -> Any:
    """Return a batch whose tensors and columns, also in dictionaries, lists and tuples, are in page-locked memory."""
    if isinstance(batch, torch.Tensor | RaggedColumn):
        return batch if batch.is_pinned() else batch.pin_memory()
    if isinstance(batch, dict):
        return {name: pin_batch(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(pin_batch, batch))
    return type(batch)(map(pin_batch, batch)) if type(batch) in (list, tuple) else batch


_log = logging.getLogger("stoker")

_MIN_BUFFER_BYTES = 4096


def gather_rows_into(
    target: NDArray[np.uint8], memory: memoryview, addresses: NDArray[np.int64], row_bytes: int
) -> NDArray[np.uint8]:
    """Gather rows as :func:`stoker._fetch.gather.gather_rows` does, into an array of their size; return its rows."""
    rows = target.reshape(len(addresses), row_bytes)
    starts = max(0, len(memory) - row_bytes + 1)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    overlapping = everything.as_strided((starts, row_bytes), (1, 1))
    torch.index_select(overlapping, 0, torch.from_numpy(addresses), out=torch.from_numpy(rows))
    return rows


@dataclass(slots=True)
class _Buffer:
    memory: NDArray[np.uint8]
    event: torch.cuda.Event | None = None


class BufferPool(BatchArrays):
    """Reusable buffers for the values of batches, for one thread.

    Args:
        pinned: whether the buffers are page-locked.

    Attributes:
        buffers_made: number of buffers made; it stays small if the training loop drops batches in time.
    """

    copies_twice = False

    def __init__(self, *, pinned: bool = False) -> None:
        super().__init__()
        self._pinned = pinned
        self.buffers_made = 0
        self._buffers: dict[int, list[_Buffer]] = {}

    def gather_rows(self, memory: memoryview, addresses: NDArray[np.int64], row_bytes: int) -> NDArray[np.uint8]:
        """Return rows as :func:`stoker._fetch.gather.gather_rows` does, in a buffer of the pool."""
        return gather_rows_into(self.empty(len(addresses) * row_bytes), memory, addresses, row_bytes)

    def empty(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return a free buffer's first bytes; sizes of buffers are powers of two, so that columns can share them."""
        rounded_bytes = 1 << (max(size_bytes, _MIN_BUFFER_BYTES) - 1).bit_length()
        buffers = self._buffers.setdefault(rounded_bytes, [])
        for buffer in buffers:
            if self._is_free(buffer):
                buffer.event = None
                return buffer.memory[:size_bytes]
        self.buffers_made += 1
        buffers.append(_Buffer(torch.empty(rounded_bytes, dtype=torch.uint8, pin_memory=self._pinned).numpy()))
        return buffers[-1].memory[:size_bytes]

    def _is_free(self, buffer: _Buffer) -> bool:
        if sys.getrefcount(buffer.memory) > FREE_ARRAY_REFERENCES:
            return False
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            if buffer.event is None:
                buffer.event = torch.cuda.Event()
                buffer.event.record()
            return bool(buffer.event.query())
        return True


def can_pin_memory() -> bool:
    """Return whether there is a GPU to page-lock memory for; warns if there is none, as torch's DataLoader does."""
    if not torch.cuda.is_available():
        _log.warning("pin_memory has no effect: there is no CUDA device")
        return False
    return True
