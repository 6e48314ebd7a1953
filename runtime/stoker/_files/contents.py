"""The bytes of a sample's file: those of one column's value, or a ``.npy`` file of an array."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker._format.schema import Bytes, Column, Text
from stoker.errors import ConfigError


class Contents:
    """Bytes and sizes of the files of a column.

    Values of ``Bytes`` and ``Text`` columns and one-dimensional arrays of ``uint8`` are files as they are; any other
    array is a ``.npy`` file, which has its shape and dtype.

    Attributes:
        name: name of the column.
        suffix: end of the names of such files: ``.npy``, ``.txt``, or empty for bytes of any kind.

    Args:
        name: name of the column; None for the only one, or the only one of ``Bytes``.
        schema: columns of the data set.

    Raises:
        ConfigError: the column does not exist, or None names none.
    """

    def __init__(self, name: str | None, schema: Mapping[str, Column]) -> None:
        if name is None:
            name = _default_column(schema)
        if name not in schema:
            raise ConfigError(f"content={name!r:.80} is no column of the data set; write one of {', '.join(schema)}")
        self.name, self._column = name, schema[name]
        is_bytes = isinstance(self._column, Bytes)
        is_flat = len(self._column.shape) == int(self._column.is_fixed)
        self._is_raw = is_bytes or (is_flat and self._column.dtype.name == "uint8")
        self.suffix = ".txt" if isinstance(self._column, Text) else "" if self._is_raw else ".npy"

    def encode(self, value: Any) -> bytes:
        """Return the file of a sample's value."""
        if isinstance(value, str):
            return value.encode()
        if self._is_raw:
            return bytes(value)
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return file.getvalue()

    def file_sizes(self, value_sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of files from the sizes of their values, in bytes, ``int64 [samples]`` each."""
        if self._is_raw:
            return value_sizes
        sizes, places = np.unique(value_sizes, return_inverse=True)
        headers = [_npy_header_bytes(self._column.dtype.holder, self._shape(size)) for size in sizes.tolist()]
        return (sizes + np.array(headers, np.int64))[places]

    def _shape(self, size_bytes: int) -> tuple[int, ...]:
        shape = self._column.shape
        return shape if self._column.is_fixed else (size_bytes // self._column.element_bytes, *shape)


def _default_column(schema: Mapping[str, Column]) -> str:
    named = [name for name, column in schema.items() if type(column) is Bytes] or list(schema)
    if len(named) > 1:
        raise ConfigError(f"several columns may be the files; name one by content=: {', '.join(schema)}")
    return named[0]


@lru_cache(maxsize=4096)
def _npy_header_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    file = io.BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return len(file.getvalue())
