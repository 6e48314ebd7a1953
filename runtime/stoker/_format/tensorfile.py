"""The safetensors framing of super-samples, manifests and pack records, and its element types.

A file is ``u64 header length · JSON header · data``. The header maps each tensor name to dtype, shape and
``data_offsets``, and ``__metadata__`` to a map of strings. Headers are written with trailing spaces, so that the data
starts at a multiple of 8 bytes. Headers that are read are untrusted: every claim is checked against the size of the
object before anything is allocated.

The element types are those of both torch and safetensors. numpy has no bfloat16 and no float8: arrays hold the bits of
such columns (``uint16``, ``uint8``), while the schema and the header of every super-sample have the true type. Complex
types are not supported, because safetensors readers disagree on them.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import FormatError, SchemaError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: name in numpy and torch, such as ``"float32"`` or ``"bfloat16"``.
        code: name in safetensors, such as ``"F32"``.
        holder: numpy dtype that holds the bits, little-endian.
        is_bits: whether numpy lacks this type, so that ``holder`` only carries its bits.
    """

    name: str
    code: str
    holder: np.dtype[np.generic]
    is_bits: bool = False

    def __repr__(self) -> str:
        return repr(self.name)

    @property
    def size_bytes(self) -> int:
        """Size of one element in bytes."""
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
    """Return the element type for a name in :data:`DTYPES`, a numpy or Python type, or a torch dtype.

    Raises:
        SchemaError: the type does not exist, or cannot be stored.
    """
    if isinstance(name, DType):
        return name
    text = str(name).removeprefix("torch.")
    # np.dtype would convert None to float64, and parse strings such as "i4,f8": neither is intended here.
    if text not in DTYPES and name is not None and not isinstance(name, str):
        with contextlib.suppress(TypeError, ValueError):
            text = np.dtype(name).name  # type: ignore[call-overload]
    if text in DTYPES:
        return DTYPES[text]
    raise SchemaError(f"dtype {name!r} cannot be stored; use one of {', '.join(DTYPES)}")


PREFIX_BYTES = 8
MAX_HEADER_BYTES = 1 << 20
MAX_DIMENSIONS = 32  # numpy 1's limit
MAX_SIZE = 1 << 48
_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, type, shape and position of one tensor in a file.

    Attributes:
        name: name, unique within the file.
        dtype: element type.
        shape: dimensions, each from 0.
        start: offset of the first byte in the data section.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        """Offset behind the last byte in the data section."""
        return self.start + self.dtype.size_bytes * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header.

    Attributes:
        metadata: strings of ``__metadata__``.
        tensors: tensors in order of their positions, without gaps.
        header_bytes: size of length prefix and header; offset of the data section in the file.
    """

    metadata: Mapping[str, str]
    tensors: tuple[TensorInfo, ...]
    header_bytes: int


def lay_out(tensors: Iterable[tuple[str, DType, tuple[int, ...]]]) -> tuple[TensorInfo, ...]:
    """Return consecutive tensors for names, types and shapes, in the given order."""
    placed: list[TensorInfo] = []
    end = 0
    for name, dtype, shape in tensors:
        placed.append(TensorInfo(name, dtype, shape, end))
        end = placed[-1].end
    return tuple(placed)


def tensors_of(arrays: Mapping[str, NDArray[Any]]) -> tuple[TensorInfo, ...]:
    """Return consecutive tensors for arrays, in the given order."""
    return lay_out((name, dtype_of(array.dtype), array.shape) for name, array in arrays.items())


def arrays_of(header: Header, data: bytes | bytearray | memoryview) -> dict[str, NDArray[Any]]:
    """Return the arrays of a whole file by name, in order, as views of ``data``."""
    return {
        tensor.name: np.frombuffer(
            data,
            tensor.dtype.holder,
            (tensor.end - tensor.start) // tensor.dtype.size_bytes,
            header.header_bytes + tensor.start,
        ).reshape(tensor.shape)
        for tensor in header.tensors
    }


def encode_ragged(name: str, pieces: Sequence[bytes]) -> dict[str, NDArray[Any]]:
    """Encode byte strings as two arrays: ``NAME.offsets``, ``int64 [pieces + 1]``, and the concatenation ``NAME``."""
    offsets = np.cumsum([0, *map(len, pieces)], dtype="<i8")
    return {f"{name}.offsets": offsets, name: np.frombuffer(b"".join(pieces), np.uint8)}


def decode_ragged(name: str, arrays: Mapping[str, NDArray[Any]], count: int, what: str) -> list[memoryview]:
    """Return the byte strings that :func:`encode_ragged` encoded, as views.

    Args:
        name: name of the array with the concatenation.
        arrays: arrays of an untrusted file, by name.
        count: expected number of byte strings.
        what: description of the byte strings, for messages.

    Raises:
        FormatError: the arrays do not encode ``count`` byte strings.
    """
    offsets, data = arrays[f"{name}.offsets"], arrays[name]
    is_bytes = data.dtype == np.uint8 and data.ndim == 1
    if not is_bytes or offsets.dtype != np.int64 or offsets.shape != (count + 1,) or count < 0:
        raise FormatError(f"{what} have the wrong shape or dtype")
    if offsets[0] != 0 or offsets[-1] != len(data) or (offsets[1:] < offsets[:-1]).any():
        raise FormatError(f"the offsets of {what} do not rise to their end")
    return [data.data[start:end] for start, end in pairwise(offsets.tolist())]


def encode_header(metadata: Mapping[str, str], tensors: Iterable[TensorInfo]) -> bytes:
    """Return length prefix and header, padded to a multiple of 8 bytes.

    Raises:
        FormatError: the header is larger than ``MAX_HEADER_BYTES``.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype.code,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.start, tensor.end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(
            f"header of {len(text)} bytes is larger than {MAX_HEADER_BYTES}; shorten the schema's names or classes"
        )
    return struct.pack("<Q", len(text)) + text


def parse_length(data: bytes | bytearray | memoryview, object_bytes: int) -> int:
    """Return the offset of the data section, from the first 8 bytes of an object of ``object_bytes`` bytes.

    Raises:
        FormatError: ``data`` has fewer than 8 bytes, or the header does not fit into the object.
    """
    if len(data) < PREFIX_BYTES:
        raise FormatError(f"{len(data)} bytes are too few for a safetensors file")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(MAX_HEADER_BYTES, object_bytes - PREFIX_BYTES) or length < 2:
        raise FormatError(f"header length {length} does not fit an object of {object_bytes} bytes")
    return PREFIX_BYTES + int(length)


def parse_header(data: bytes | bytearray | memoryview, object_bytes: int) -> Header:
    """Parse the header at the start of ``data``, and check it against the size of the whole object.

    Args:
        data: beginning of the object, at least the length prefix and the header.
        object_bytes: size of the whole object.

    Raises:
        FormatError: the bytes are not a safetensors header, or the tensors overlap, leave gaps or do not end with the
            object.
    """
    header_bytes = parse_length(data, object_bytes)
    if len(data) < header_bytes:
        raise FormatError(f"header of {header_bytes} bytes is cut off after {len(data)}")
    try:
        text = str(data[PREFIX_BYTES:header_bytes], "utf-8")
        entries = json.loads(text, object_pairs_hook=_check_unique_keys, parse_int=_parse_natural)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"header is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(entries, dict):
        raise FormatError("header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError("__metadata__ is not a map of strings")
    tensors = sorted((_parse_tensor(name, entry) for name, entry in entries.items()), key=lambda t: (t.start, t.end))
    end = 0
    for tensor in tensors:
        if tensor.start != end:
            raise FormatError(f"tensor {tensor.name!r} starts at {tensor.start}, not where the last ended ({end})")
        end = tensor.end
    if header_bytes + end != object_bytes:
        raise FormatError(f"header and tensors end at {header_bytes + end}, the object at {object_bytes}")
    return Header(metadata, tuple(tensors), header_bytes)


def _check_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key is repeated")
    for text in (*entries, *entries.values()):
        if isinstance(text, str) and not text.isascii():
            text.encode()  # an escaped lone surrogate raises UnicodeEncodeError, a ValueError
    return entries


def _parse_natural(digits: str) -> int:
    if digits.startswith("-"):  # also "-0", which safetensors readers reject
        raise ValueError(f"{digits[:80]} is negative")
    return int(digits)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_SIZE


def _parse_tensor(name: str, entry: object) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"tensor {name[:80]!r} is not described by dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    dtype = _BY_CODE.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise FormatError(f"tensor {name[:80]!r} has unknown dtype {str(entry['dtype'])[:80]!r}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise FormatError(f"tensor {name[:80]!r} has a bad shape")
    if math.prod(filter(None, shape)) >= MAX_SIZE:  # the strides of an empty tensor must not overflow either
        raise FormatError(f"tensor {name[:80]!r} has a shape that overflows")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise FormatError(f"tensor {name[:80]!r} has bad data_offsets")
    tensor = TensorInfo(name, dtype, tuple(shape), offsets[0])
    if tensor.end != offsets[1]:
        raise FormatError(f"tensor {name[:80]!r} has {offsets[1] - offsets[0]} bytes, its shape says otherwise")
    return tensor
