"""Element types: what torch and safetensors share, and how numpy holds each.

numpy has no bfloat16 and no float8: such columns are held as their bits (``uint16``, ``uint8``) and keep their true
type in the schema and in the header of every super-sample. Complex types are refused: safetensors readers disagree
on them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from stoker.errors import SchemaError

__all__ = ["DTYPES", "DType", "dtype_of"]


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: as numpy and torch spell it, e.g. ``"float32"``, ``"bfloat16"``.
        code: as safetensors spells it, e.g. ``"F32"``.
        holder: the numpy dtype that holds its bits, little-endian.
        is_bits: True if numpy has no such type and ``holder`` only carries the bits.
    """

    name: str
    code: str
    holder: np.dtype[np.generic]
    is_bits: bool = False

    def __repr__(self) -> str:
        return repr(self.name)

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return self.holder.itemsize


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("bool", "BOOL", np.dtype("?")),
        DType("uint8", "U8", np.dtype("u1")),
        DType("int8", "I8", np.dtype("i1")),
        DType("uint16", "U16", np.dtype("<u2")),
        DType("int16", "I16", np.dtype("<i2")),
        DType("uint32", "U32", np.dtype("<u4")),
        DType("int32", "I32", np.dtype("<i4")),
        DType("uint64", "U64", np.dtype("<u8")),
        DType("int64", "I64", np.dtype("<i8")),
        DType("float16", "F16", np.dtype("<f2")),
        DType("float32", "F32", np.dtype("<f4")),
        DType("float64", "F64", np.dtype("<f8")),
        DType("bfloat16", "BF16", np.dtype("<u2"), is_bits=True),
        DType("float8_e4m3fn", "F8_E4M3", np.dtype("u1"), is_bits=True),
        DType("float8_e5m2", "F8_E5M2", np.dtype("u1"), is_bits=True),
    )
}


def dtype_of(name: object) -> DType:
    """Return the element type called ``name``: a name in :data:`DTYPES`, a numpy or Python type, or a torch dtype.

    Raises:
        SchemaError: there is no such type, or it is one that cannot be stored.
    """
    if isinstance(name, DType):
        return name
    text = str(name).removeprefix("torch.")
    # numpy takes None for float64, and runs a parser over strings: neither is what was meant.
    if text not in DTYPES and name is not None and not isinstance(name, str):
        with contextlib.suppress(TypeError, ValueError):
            text = np.dtype(name).name  # type: ignore[call-overload]
    if text in DTYPES:
        return DTYPES[text]
    raise SchemaError(f"dtype {name!r} cannot be stored; use one of {', '.join(DTYPES)}")
