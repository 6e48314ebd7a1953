"""Batches as tensors: fixed columns become tensors without a copy, ragged ones a sequence over one buffer.

A buffer is reused only when it is no longer referenced and the GPU has read it. It is lent as an array that is kept
alive by all its tensors and views, so its reference count shows whether a batch in it still exists. When none does,
copies from it to a GPU may still run: an event, recorded at that time on their stream, must complete before the buffer
is lent again.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from stoker._base.sizes import format_count
from stoker._fetch.gather import (
    FREE_ARRAY_REFERENCES,
    BatchArrays,
    Columns,
    RaggedValues,
    copy_large_values,
    gather_rows,
    offsets_start,
)
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
    _host_offsets: torch.Tensor | None = field(default=None, repr=False)
    """The offsets in host memory, if the others are not: reading these does not wait for the device."""

    @classmethod
    def of(cls, ragged: RaggedValues) -> RaggedColumn:
        """Return gathered values as tensors that share their memory."""
        values = to_tensor(ragged.elements, ragged.column.dtype)
        column = cls(ragged.column, values, torch.from_numpy(ragged.offsets))
        return column if ragged.block is None else column._in_block(torch.from_numpy(ragged.block))

    # One block of memory with the values and, behind them, the offsets.

    def find_block(self) -> torch.Tensor | None:
        """Return the block that has both tensors, ``uint8 [bytes]``; None if they lie in different memory."""
        values, offsets, start = self.values, self.offsets, offsets_start(self.values.nbytes)
        is_block = (
            values.untyped_storage().data_ptr() == offsets.untyped_storage().data_ptr()
            and (values.storage_offset(), offsets.storage_offset() * offsets.itemsize) == (0, start)
            and values.is_contiguous()
            and offsets.is_contiguous()
        )
        if not is_block:
            return None
        block = torch.empty(0, dtype=torch.uint8)
        block.set_(values.untyped_storage(), 0, (start + offsets.nbytes,), (1,))
        return block

    def join(self, empty: Callable[[int], NDArray[np.uint8]]) -> torch.Tensor:
        """Return a block with copies of both tensors, in an array from ``empty``."""
        start = offsets_start(self.values.nbytes)
        block = empty(start + self.offsets.nbytes)
        block[: self.values.nbytes] = bytes_of(self.values)
        block[start:] = bytes_of(self.offsets)
        return torch.from_numpy(block)

    def on_device(self, block: torch.Tensor) -> RaggedColumn:
        """Return this column of the host as it is in a copy of its block on a device."""
        return self._in_block(block, self.offsets.clone())

    def _in_block(self, block: torch.Tensor, host_offsets: torch.Tensor | None = None) -> RaggedColumn:
        values = block[: self.values.nbytes].view(self.values.dtype).view(self.values.shape)
        offsets = block[offsets_start(self.values.nbytes) :].view(torch.int64)
        return RaggedColumn(self.column, values, offsets, host_offsets)

    def with_tensors(self, values: torch.Tensor, offsets: torch.Tensor) -> RaggedColumn:
        """Return the column in other tensors, which have the same content."""
        return RaggedColumn(self.column, values, offsets, self._host_offsets)

    def _offsets_in_host(self) -> torch.Tensor:
        if self._host_offsets is not None:
            return self._host_offsets
        return self.offsets.cpu()

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
        start, end = self._offsets_in_host()[index % len(self) : index % len(self) + 2].tolist()
        value = self.values[start:end]
        if self.column.kind in ("bytes", "text"):
            return self.column.decode(memoryview(value.cpu().numpy().tobytes()))
        return value

    def _take_rows(self, indices: torch.Tensor) -> RaggedColumn:
        lengths = self._offsets_in_host().diff()
        parts = self.values.split(lengths.tolist())
        values = torch.cat([self.values[:0], *(parts[index] for index in indices.tolist())])
        offsets = torch.cat([lengths.new_zeros(1), lengths[indices].cumsum(0)])
        host_offsets = None if self._host_offsets is None else offsets
        return RaggedColumn(self.column, values, offsets.to(self.offsets.device), host_offsets)

    def lengths(self) -> torch.Tensor:
        """Return how many elements each value has, ``int64 [samples]``."""
        return self.offsets.diff()

    def to_padded(self, value: float = 0) -> torch.Tensor:
        """Return the values padded behind to the longest, ``[samples, longest, *shape]``."""
        lengths = self._offsets_in_host().diff().tolist()
        longest = max(lengths, default=0)
        padded = self.values.new_empty(len(self), longest, *self.values.shape[1:]).fill_(value)
        if self.values.device.type == "cpu":
            for row, part in zip(padded, self.values.split(lengths), strict=True):
                row[: len(part)] = part
            return padded
        is_value = torch.arange(longest, device=self.offsets.device) < self.lengths()[:, None]
        return padded.masked_scatter_(is_value.view(*is_value.shape, *[1] * (self.values.ndim - 1)), self.values)

    def is_pinned(self) -> bool:
        """Return whether the values are in page-locked memory."""
        return self.values.is_pinned() and self.offsets.is_pinned()

    def pin_memory(self) -> RaggedColumn:
        """Return a copy in page-locked memory, which needs a GPU."""
        return RaggedColumn(self.column, pin_tensor(self.values), pin_tensor(self.offsets))

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
        values, offsets = self.values.to(*args, **kwargs), self.offsets.to(*args, **kwargs)
        host_offsets = self._offsets_in_host().clone() if offsets.device.type != "cpu" else None
        return RaggedColumn(self.column, values, offsets, host_offsets)

    def __repr__(self) -> str:
        return f"<RaggedColumn {describe_type(self.column)}: {self._format_size()}>"

    def _repr_html_(self) -> str:
        return html_table(f"RaggedColumn {describe_type(self.column)}", [("values", self._format_size())])

    def _format_size(self) -> str:
        lengths = self._offsets_in_host().diff()
        longest = f" of {int(lengths.min())} to {int(lengths.max())} elements" if len(self) else ""
        return f"{format_count(len(self), 'value')}{longest}, {self.values.numel():,} in all, on {self.values.device}"


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous tensor in host memory, or of a copy of another one.

    numpy copies them with one thread; torch would use all of its own.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    found: NDArray[np.uint8] = plain.reshape(-1).view(torch.uint8).numpy()
    return found


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


def _same(value: Any) -> Any:
    return value


def map_tensors(
    function: Callable[[torch.Tensor | RaggedColumn], Any], batch: Any, other: Callable[[Any], Any] = _same
) -> Any:
    """Return a batch with a function's results in place of its tensors and columns, in a fixed order.

    They are found in dictionaries, lists and tuples; other values are replaced by the results of ``other``, by default
    themselves.
    """
    if isinstance(batch, torch.Tensor | RaggedColumn):
        return function(batch)
    if isinstance(batch, dict):
        return {name: map_tensors(function, value, other) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value, other) for value in batch))
    if type(batch) in (list, tuple):
        return type(batch)(map_tensors(function, value, other) for value in batch)
    return other(batch)


def pin_batch(batch: Any) -> Any:
    """Return a batch whose tensors and columns, also in dictionaries, lists and tuples, are in page-locked memory."""

    def pin(value: torch.Tensor | RaggedColumn) -> torch.Tensor | RaggedColumn:
        if value.is_pinned():
            return value
        return value.pin_memory() if isinstance(value, RaggedColumn) else pin_tensor(value)

    return map_tensors(pin, batch)


def pin_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in page-locked memory, made with one thread: torch's own copy would wake all of torch's threads."""
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        return tensor.pin_memory()
    pinned = torch.empty_like(tensor, pin_memory=True)
    bytes_of(pinned)[:] = bytes_of(tensor)
    return pinned


_log = logging.getLogger("stoker")

_MIN_BUFFER_BYTES = 4096
_CACHED_BYTES = 256 << 10
"""Bytes that are copied twice in a row, and are in a core's cache the second time."""


def gather_rows_into(
    target: NDArray[np.uint8], memory: memoryview, addresses: NDArray[np.int64], row_bytes: int
) -> NDArray[np.uint8]:
    """Gather rows as :func:`stoker._fetch.gather.gather_rows` does, into an array of their size; return its rows."""
    rows = target.reshape(len(addresses), row_bytes)
    if len(addresses) and (addresses.min() < 0 or addresses.max() > len(memory) - row_bytes):
        raise IndexError(f"a row of {row_bytes} bytes does not lie within the {len(memory)} bytes of the memory")
    if copy_large_values(memory, addresses, [row_bytes] * len(addresses), target):
        return rows
    if torch.get_num_threads() == 1:  # or waking torch's threads would take more processor time than the copy
        overlapping = torch.frombuffer(memory, dtype=torch.uint8).as_strided(
            (max(0, len(memory) - row_bytes + 1), row_bytes), (1, 1)
        )
        torch.index_select(overlapping, 0, torch.from_numpy(addresses), out=torch.from_numpy(rows))
        return rows
    step = max(1, _CACHED_BYTES // max(1, row_bytes))
    for start in range(0, len(addresses), step):  # numpy gathers into an array of its own
        rows[start : start + step] = gather_rows(memory, addresses[start : start + step], row_bytes)
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
        self._addresses: set[int] = set()

    def gather_rows(self, memory: memoryview, addresses: NDArray[np.int64], row_bytes: int) -> NDArray[np.uint8]:
        """Return rows as :func:`stoker._fetch.gather.gather_rows` does, in a buffer of the pool."""
        return gather_rows_into(self.empty(len(addresses) * row_bytes), memory, addresses, row_bytes)

    def empty(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return a free buffer's first bytes; sizes of buffers are powers of two, so that columns can share them."""
        rounded_bytes = 1 << (max(size_bytes, _MIN_BUFFER_BYTES) - 1).bit_length()
        buffers = self._buffers.setdefault(rounded_bytes, [])
        for buffer in buffers:
            if sys.getrefcount(buffer.memory) <= FREE_ARRAY_REFERENCES and self._is_read(buffer):
                buffer.event = None
                return buffer.memory[:size_bytes]
        self.buffers_made += 1
        buffers.append(_Buffer(self._allocate(rounded_bytes).numpy()))
        self._addresses.add(buffers[-1].memory.ctypes.data)
        return buffers[-1].memory[:size_bytes]

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor begins where a buffer does."""
        return tensor.data_ptr() in self._addresses

    def clear(self) -> None:
        """Release all buffers that no batch refers to."""
        self._buffers.clear()
        self._addresses.clear()

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        """Return the memory of a new buffer, ``uint8 [size_bytes]``."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def _is_read(self, buffer: _Buffer) -> bool:
        """Return whether a device has read a buffer that no batch refers to."""
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
