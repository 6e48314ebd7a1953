"""Batches as tensors: fixed columns become tensors without a copy, ragged ones a sequence over one buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from stoker.dtypes import DType
from stoker.gather import Columns, RaggedValues
from stoker.schema import Column

__all__ = ["RaggedColumn", "to_tensor", "to_tensors"]


def to_tensor(array: NDArray[Any], dtype: DType) -> torch.Tensor:
    """Return an array in a dtype's holder type as a tensor of that dtype, sharing its memory."""
    if dtype.is_bits:
        return torch.from_numpy(array).view(getattr(torch, dtype.name))
    return torch.from_numpy(array)


def to_tensors(columns: Columns, schema: Mapping[str, Column]) -> dict[str, torch.Tensor | RaggedColumn]:
    """Return a gathered batch as tensors; nothing is copied."""
    return {
        name: RaggedColumn.of(values) if isinstance(values, RaggedValues) else to_tensor(values, schema[name].dtype)
        for name, values in columns.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class RaggedColumn:
    """The values of a ragged column in a batch: a sequence over one buffer.

    Indexing gives ``bytes`` or ``str`` for those columns, else a tensor ``[length, *shape]`` that is a view of
    ``values``.

    Attributes:
        column: the column's type.
        values: all elements, one sample's behind the other's, ``[sum of lengths, *shape]``.
        offsets: ``int64 [samples + 1]``, in elements.
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

    def __getitem__(self, index: int | torch.Tensor) -> Any:
        """Return one sample's value, or for an ``int64 [n]`` tensor of indices a column of copies of those.

        Raises:
            IndexError: there is no such sample.
        """
        if isinstance(index, torch.Tensor):
            return self._taken(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"value {index} of a batch of {len(self)}")
        start, end = self.offsets[index % len(self) : index % len(self) + 2].tolist()
        value = self.values[start:end]
        if self.column.kind in ("bytes", "text"):
            return self.column.decode(memoryview(value.cpu().numpy().tobytes()))
        return value

    def _taken(self, indices: torch.Tensor) -> RaggedColumn:
        parts = self.values.split(self.lengths().tolist())
        offsets = torch.zeros(len(indices) + 1, dtype=torch.int64)
        torch.cumsum(self.lengths()[indices], 0, out=offsets[1:])
        return RaggedColumn(self.column, torch.cat([parts[index] for index in indices.tolist()]), offsets)

    def lengths(self) -> torch.Tensor:
        """Return how many elements each value has, ``int64 [samples]``."""
        return self.offsets.diff()

    def to_padded(self, value: float = 0) -> torch.Tensor:
        """Return the values padded behind to the longest, ``[samples, longest, *shape]``."""
        return torch.nn.utils.rnn.pad_sequence(
            self.values.split(self.lengths().tolist()), batch_first=True, padding_value=value
        )

    def pin_memory(self) -> RaggedColumn:
        """Return a copy in page-locked memory."""
        return RaggedColumn(self.column, self.values.pin_memory(), self.offsets.pin_memory())

    def to(self, *args: Any, **kwargs: Any) -> RaggedColumn:
        """Return the column with both tensors moved, as by :meth:`torch.Tensor.to` (a device, not a dtype)."""
        return RaggedColumn(self.column, self.values.to(*args, **kwargs), self.offsets.to(*args, **kwargs))

    def __repr__(self) -> str:
        return f"<RaggedColumn of {len(self)} {self.column.kind} values, {self.values.numel()} elements>"
