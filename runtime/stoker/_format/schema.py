"""Schemas: named, typed columns, and the encoding of their values.

A column is of fixed size (:class:`Array`) or ragged (:class:`Bytes`, :class:`Text`, :class:`Ragged`). Packing checks
each value against its column and never casts silently, so training reads exactly the values that were written.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from stoker._deprecation import alias_attributes
from stoker._format.tensorfile import DTYPES, DType, dtype_of
from stoker.errors import ConfigError, FormatError, SchemaError

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
MAX_COLUMNS = 1024
_MAX_CACHED_SCHEMAS = 8  # each object and record repeats its data set's schema, which may be large with its classes
MAX_DIMENSIONS = 31  # numpy 1 allows 32, and batches add one for the samples
MAX_ROW_BYTES = (1 << 31) - 1  # the largest element that numpy can copy


def _quote_value(value: object) -> str:
    """Return at most 200 ASCII characters of an untrusted value, for a message."""
    return ascii(value)[:200]


class Column:
    """A typed column of a schema; the base class of :class:`Array`, :class:`Ragged`, :class:`Bytes`, :class:`Text`.

    Example:
        >>> schema = {"image": Bytes(), "tokens": Ragged("uint16")}
        >>> [column.kind for column in schema.values()]
        ['bytes', 'ragged']

    Attributes:
        kind: name of the column type in manifests: ``array``, ``ragged``, ``bytes`` or ``text``.
        dtype: element type.
        shape: shape of one sample's value for a fixed column, of one element for a ragged column.
    """

    __slots__ = ()
    kind: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def is_fixed(self) -> bool:
        """Whether the values of all samples have the same number of bytes."""
        return isinstance(self, Array)

    @property
    def element_bytes(self) -> int:
        """Size of one sample's value (fixed), or of one element (ragged), in bytes."""
        return self.dtype.size_bytes * math.prod(self.shape)

    def encode(self, value: object) -> bytes:
        """Encode a value of one sample as bytes.

        Raises:
            SchemaError: the value does not fit the column; the message does not name the column.
        """
        raise NotImplementedError

    def decode(self, data: memoryview) -> Any:
        """Return the value whose bytes are ``data``; it owns its memory."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the column as plain JSON values."""
        return {"kind": self.kind, "dtype": self.dtype.name, "shape": list(self.shape)}


def _validate_shape(shape: object, dtype: DType) -> tuple[int, ...]:
    if isinstance(shape, int) and not isinstance(shape, bool):
        shape = (shape,)
    if not isinstance(shape, tuple | list) or not all(type(n) is int and n > 0 for n in shape):
        raise SchemaError(f"shape must be a tuple of positive integers, not {_quote_value(shape)}")
    if len(shape) > MAX_DIMENSIONS or math.prod(shape) * dtype.size_bytes > MAX_ROW_BYTES:
        raise SchemaError(f"shape {_quote_value(shape)} is too large for a sample")
    return tuple(shape)


def _to_holder_array(value: object, dtype: DType) -> np.ndarray[Any, Any]:
    """Convert ``value`` to an array of ``dtype``'s holder type, without changing any number."""
    if type(value) is np.ndarray and value.dtype == dtype.holder:  # the usual case; numpy's dtype names are slow
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if str(value.dtype) != f"torch.{dtype.name}":
            raise SchemaError(f"dtype is {value.dtype}, expected {dtype.name}; convert it with .to()")
        tensor = value.detach().cpu().contiguous()
        if dtype.is_bits:
            tensor = tensor.view(torch.uint16 if dtype.size_bytes == 2 else torch.uint8)
        return np.asarray(tensor.numpy())
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array_interface__"):
        array = np.asarray(value)
        if array.dtype.name == dtype.name:
            return array.view(dtype.holder) if dtype.is_bits else array.astype(dtype.holder, copy=False)
        if dtype.is_bits and array.dtype == dtype.holder:
            return array
        raise SchemaError(f"dtype is {array.dtype.name}, expected {dtype.name}; convert it with .astype()")
    return _from_python(value, dtype)


def _from_python(value: object, dtype: DType) -> np.ndarray[Any, Any]:
    """Convert Python numbers, or nested lists of them, to ``dtype``; reject numbers that would change."""
    if dtype.is_bits:
        raise SchemaError(f"a {dtype.name} value must be a tensor, or an array of its bits ({dtype.holder.name})")
    if type(value) is int and dtype.holder.kind in "iu":  # most labels; the general case below takes 8 µs
        try:
            data = value.to_bytes(dtype.size_bytes, "little", signed=dtype.holder.kind == "i")
        except OverflowError:
            raise SchemaError(f"value {value} does not fit {dtype.name}") from None
        return np.frombuffer(data, dtype.holder).reshape(())
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise SchemaError(f"value is not a regular array: {error}") from None
    kinds = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[dtype.holder.kind]
    if array.size and array.dtype.kind not in kinds:
        raise SchemaError(f"value of type {type(value).__name__} ({array.dtype.name}) is not {dtype.name}")
    if dtype.holder.kind in "iu" and array.size:
        limits = np.iinfo(dtype.holder.name)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise SchemaError(f"value {low if low < limits.min else high} does not fit {dtype.name}")
    try:
        with np.errstate(over="raise"):  # floats may round, but must not become infinite
            return array.astype(dtype.holder)
    except FloatingPointError:
        raise SchemaError(f"a value is too large for {dtype.name}") from None


@dataclass(frozen=True, slots=True)
class Array(Column):
    """A column of arrays of one dtype and shape; ``Array("int64")`` is a column of scalars.

    Attributes:
        dtype: numpy or torch dtype, or its name, such as ``"float32"`` or ``"bfloat16"``.
        shape: shape of one sample's value; default a scalar.
        classes: class names of a label column, by index; default None.

    Example:
        >>> Array("uint8", (2, 2)).encode([[72, 101], [108, 108]])
        b'Hell'
    """

    dtype: DType
    shape: tuple[int, ...] = ()
    classes: tuple[str, ...] | None = None
    kind = "array"

    def __init__(
        self, dtype: object, shape: tuple[int, ...] | int = (), *, classes: tuple[str, ...] | None = None
    ) -> None:
        object.__setattr__(self, "dtype", dtype_of(dtype))
        object.__setattr__(self, "shape", _validate_shape(shape, self.dtype))
        try:
            "".join(classes or ()).encode()
        except (TypeError, UnicodeEncodeError):  # for instance a lone surrogate, which JSON can contain
            raise SchemaError(f"classes must be strings of valid Unicode, not {_quote_value(classes)}") from None
        object.__setattr__(self, "classes", None if classes is None else tuple(classes))

    def encode(self, value: object) -> bytes:
        """Return the value's bytes in C order."""
        array = _to_holder_array(value, self.dtype)
        if array.shape != self.shape:
            raise SchemaError(f"shape is {array.shape}, expected {self.shape}")
        return array.tobytes()

    def decode(self, data: memoryview) -> Any:
        """Return an array of the column's shape, in the dtype's holder type."""
        return np.frombuffer(data, self.dtype.holder).reshape(self.shape).copy()

    def to_json(self) -> dict[str, Any]:
        """Return the column as plain JSON values."""
        return Column.to_json(self) | ({} if self.classes is None else {"classes": list(self.classes)})


@dataclass(frozen=True, slots=True)
class Ragged(Column):
    """A column of arrays whose first dimension varies, such as tokens or bounding boxes.

    Attributes:
        dtype: numpy or torch dtype, or its name, such as ``"uint16"``.
        shape: shape of one element; a value has the shape ``(any, *shape)``. Default: elements are scalars.

    Example:
        >>> tokens, boxes = Ragged("uint16"), Ragged("float32", (4,))
        >>> tokens.decode(memoryview(tokens.encode([1, 2, 3]))).tolist()
        [1, 2, 3]
    """

    dtype: DType
    shape: tuple[int, ...] = ()
    kind = "ragged"

    def __init__(self, dtype: object, shape: tuple[int, ...] | int = ()) -> None:
        object.__setattr__(self, "dtype", dtype_of(dtype))
        object.__setattr__(self, "shape", _validate_shape(shape, self.dtype))

    def encode(self, value: object) -> bytes:
        """Return the value's bytes in C order."""
        array = _to_holder_array(value, self.dtype)
        if array.size == 0 and array.ndim == 1:
            array = array.reshape(0, *self.shape)
        if array.ndim != 1 + len(self.shape) or array.shape[1:] != self.shape:
            expected = ", ".join(["any", *map(str, self.shape)])
            raise SchemaError(f"shape is {array.shape}, expected ({expected})")
        return array.tobytes()

    def decode(self, data: memoryview) -> Any:
        """Return an array of shape ``(any, *shape)``, in the dtype's holder type."""
        return np.frombuffer(data, self.dtype.holder).reshape(-1, *self.shape).copy()


@dataclass(frozen=True, slots=True)
class Bytes(Column):
    """A column of byte strings of any length, such as encoded images.

    Example:
        >>> Schema({"image": Bytes(), "label": Array("int64")})["image"].encode(b"GIF89a")
        b'GIF89a'
    """

    kind = "bytes"
    dtype, shape = dtype_of("uint8"), ()

    def encode(self, value: object) -> bytes:
        """Return the value itself."""
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        raise SchemaError(f"value of type {type(value).__name__} is not bytes")

    def decode(self, data: memoryview) -> Any:
        """Return ``bytes``."""
        return bytes(data)

    def to_json(self) -> dict[str, Any]:
        """Return the column as plain JSON values."""
        return {"kind": self.kind}


@dataclass(frozen=True, slots=True)
class Text(Bytes):
    """A column of strings, stored as UTF-8.

    Example:
        >>> Text().encode("a cat")
        b'a cat'
    """

    kind = "text"

    def encode(self, value: object) -> bytes:
        """Return the string as UTF-8."""
        if not isinstance(value, str):
            raise SchemaError(f"value of type {type(value).__name__} is not str")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise SchemaError(f"text cannot be stored as UTF-8: {error}") from None

    def decode(self, data: memoryview) -> Any:
        """Return ``str``.

        Raises:
            FormatError: the bytes are not UTF-8.
        """
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"text is not UTF-8: {error}") from None


@alias_attributes("Schema", {"chosen": "select"})
class Schema(Mapping[str, Column]):
    r"""The columns of a data set, in order: an immutable mapping from name to column.

    Two schemas are equal if names, order and types are.

    Args:
        columns: columns by name, at least one.

    Raises:
        SchemaError: there is no column, or a name is not ``[A-Za-z_]\w*`` (ASCII), or starts with ``__``.

    Example:
        >>> import numpy as np
        >>> schema = Schema({"image": Array("uint8", (32, 32, 3)), "label": Array("int64", classes=("cat", "dog"))})
        >>> [len(value) for value in schema.encode({"image": np.zeros((32, 32, 3), "uint8"), "label": 1})]
        [3072, 8]
    """

    __slots__ = ("_columns",)

    def __init__(self, columns: Mapping[str, Column]) -> None:
        if not isinstance(columns, Mapping):
            raise SchemaError(
                "a schema must be a dictionary of column names and types, such as {'label': stoker.Array('int64')}, "
                f"not {columns!r:.80}"
            )
        if not columns:
            raise SchemaError("a schema needs at least one column")
        if len(columns) > MAX_COLUMNS:
            raise SchemaError(f"a schema has at most {MAX_COLUMNS} columns, not {len(columns)}")
        for name, column in columns.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith("__"):
                raise SchemaError(
                    f"column name {_quote_value(name)} is invalid; use letters, digits and _, with neither a digit "
                    "nor __ at the start"
                )
            if not isinstance(column, Column):
                raise SchemaError(f"column {name!r} must be a stoker.Array, Bytes, Text or Ragged, not {column!r}")
        self._columns = dict(columns)

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and list(self._columns.items()) == list(other._columns.items())

    def __hash__(self) -> int:
        return hash(tuple(self._columns.items()))

    def __repr__(self) -> str:
        return f"Schema({self._columns!r})"

    def select(self, names: Sequence[str] | None) -> dict[str, Column]:
        """Return the named columns in the given order, or all columns for None.

        Raises:
            ConfigError: a column does not exist, or ``names`` is empty.
        """
        if names is None:
            return dict(self._columns)
        if isinstance(names, str):
            raise ConfigError(f"columns must be a sequence of names; write columns=[{names!r}]")
        unknown = [str(name) for name in names if name not in self._columns]
        if not names:
            raise ConfigError("columns is empty; name at least one column, or leave it out to read all")
        if unknown:
            raise ConfigError(f"the data set has no column {', '.join(unknown)}; its columns are {', '.join(self)}")
        return {name: self._columns[name] for name in names}

    def encode(self, sample: Mapping[str, object], where: str = "sample") -> list[bytes]:
        """Encode a sample as the bytes of each column, in the schema's order.

        Args:
            sample: values by column name, for exactly the columns of the schema.
            where: name of the sample in error messages.

        Raises:
            SchemaError: the sample is not a mapping, a column is missing or unknown, or a value does not fit; the
                message names the sample, the column and the remedy.
        """
        if not isinstance(sample, Mapping):
            raise SchemaError(
                f"{where} is of type {type(sample).__name__}, not a mapping; "
                f"give exactly the columns {', '.join(self._columns)}"
            )
        if len(sample) != len(self._columns) or sample.keys() != self._columns.keys():
            missing = [name for name in self._columns if name not in sample]
            unknown = [name for name in sample if name not in self._columns]
            problem = " and ".join(
                f"{what} column {', '.join(map(repr, names))}"
                for what, names in (("no", missing), ("unknown", unknown))
                if names
            )
            raise SchemaError(f"{where} has {problem}; give exactly the columns {', '.join(self._columns)}")
        encoded = []
        for name, column in self._columns.items():
            try:
                encoded.append(column.encode(sample[name]))
            except SchemaError as error:
                raise SchemaError(f"{where}, column {name!r}: {error}") from None
        return encoded

    def to_json(self) -> str:
        """Return the schema as canonical JSON: equal schemas give the same text on every machine."""
        columns = [{"name": name, **column.to_json()} for name, column in self._columns.items()]
        return json.dumps(columns, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """Parse the result of :meth:`to_json`, which may be untrusted. Recent results are cached.

        Raises:
            SchemaError: the text is not a schema.
        """
        return _parse_schema(text)


@lru_cache(maxsize=_MAX_CACHED_SCHEMAS)
def _parse_schema(text: str) -> Schema:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        raise SchemaError("the schema is not valid JSON") from None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise SchemaError("the schema is not a list of columns")
    columns: dict[str, Column] = {}
    for item in items:
        name = item.pop("name", None)
        if not isinstance(name, str) or name in columns:
            raise SchemaError(f"the schema has a bad or repeated column name {_quote_value(name)}")
        columns[name] = _column_from_json(item)
    schema = Schema(columns)
    if schema.to_json() != text:  # also rejects duplicate keys, of which another reader might use the first
        raise SchemaError("the schema is not canonical JSON: written again, it gives another text")
    return schema


def _column_from_json(item: dict[str, Any]) -> Column:
    kind = item.pop("kind", None)
    makers: dict[str, type[Any]] = {"array": Array, "ragged": Ragged, "bytes": Bytes, "text": Text}
    if not isinstance(kind, str) or kind not in makers:
        raise SchemaError(f"the schema has a column of unknown kind {_quote_value(kind)}")
    if "dtype" in item and (not isinstance(item["dtype"], str) or item["dtype"] not in DTYPES):
        raise SchemaError(f"the schema has an unknown dtype {_quote_value(item['dtype'])}")
    if not isinstance(item.get("classes", []), list):
        raise SchemaError(f"the schema has bad classes {_quote_value(item['classes'])}")
    try:
        column: Column = makers[kind](**item)
    except TypeError:
        raise SchemaError(f"the schema has a bad {kind} column {_quote_value(item)}") from None
    return column
