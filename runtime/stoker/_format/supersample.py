"""Super-samples: many samples in one object, a valid safetensors file, readable by column and by row.

Layout of the data section, the same function of schema and sample count for every writer:

1. ``NAME.offsets`` ``I64 [n + 1]`` of every ragged column, in elements;
2. small columns, fixed and at most ``SMALL_ROW_BYTES`` a row, and among them ``__crc32c__`` ``U32 [n, columns]``: the
   CRC-32C of every value, so that any run of rows of any column verifies;
3. large columns: the other fixed ones, then the elements of the ragged ones.

Wider element types come first (in 3, within the fixed and within the ragged), ``__crc32c__`` before others of 4 bytes,
and then the schema's order: so views are aligned wherever the sizes allow. Header, 1 and 2 are the **head**: one ranged
read of it opens an object, after which a run of samples is one byte range per column. The chunk head is DIESEL's (chunk
metadata in the chunk itself).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker._base.checksum import crc32c
from stoker._format import tensorfile
from stoker._format.schema import Column, Schema
from stoker._format.tensorfile import DTYPES, DType
from stoker.errors import ChecksumError, FormatError, SchemaError

FORMAT = "1"
SMALL_ROW_BYTES = 64
MAX_SUPER_SAMPLE_BYTES = 32 << 20
MAX_OBJECT_BYTES = MAX_SUPER_SAMPLE_BYTES + tensorfile.MAX_HEADER_BYTES + tensorfile.PREFIX_BYTES
CHECKSUMS = "__crc32c__"
_RUN = re.compile(r"[0-9a-f]{16}", re.ASCII)
_ORDINAL = re.compile(r"[0-9]{1,9}", re.ASCII)
_CRC32C = re.compile(r"[0-9a-f]{8}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a super-sample comes from; stored in its head, so that a lost manifest can be rebuilt.

    Attributes:
        dataset: id of the data set.
        run: id of the pack run, 16 hexadecimal digits.
        ordinal: number of the super-sample within the run, from 0.
    """

    dataset: str
    run: str
    ordinal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What a manifest must know of a super-sample.

    Attributes:
        ordinal: its number within the pack run.
        size_bytes: of the whole object.
        samples: how many it holds.
        head_bytes: how many bytes, from the start of the object, its head has.
        head_crc32c: checksum of the head.
        crc32c: checksum of the whole object.
        tag: ETag or generation of the stored object, ``""`` until it is stored.
        sha256_128: the first 16 bytes of the SHA-256 of the whole object, None where nobody has computed it.
    """

    ordinal: int
    size_bytes: int
    samples: int
    head_bytes: int
    head_crc32c: int
    crc32c: int
    tag: str = ""
    sha256_128: bytes | None = None


_Entry = tuple[str, DType, tuple[int, ...]]


def is_small(column: Column) -> bool:
    """Return whether the values of such a column lie in the head."""
    return column.is_fixed and column.element_bytes <= SMALL_ROW_BYTES


def _layout(schema: Schema, samples: int, elements: Mapping[str, int]) -> tuple[tensorfile.Tensor, ...]:
    """Return the tensors of a super-sample.

    Args:
        schema: its columns.
        samples: how many rows.
        elements: how many elements each ragged column has in all.
    """
    offsets = [(f"{name}.offsets", DTYPES["int64"], (samples + 1,)) for name, c in schema.items() if not c.is_fixed]
    small: list[_Entry] = [(CHECKSUMS, DTYPES["uint32"], (samples, len(schema)))]
    fixed: list[_Entry] = []
    ragged: list[_Entry] = []
    for name, column in schema.items():
        group = small if is_small(column) else fixed if column.is_fixed else ragged
        group.append((name, column.dtype, (samples if column.is_fixed else elements[name], *column.shape)))
    for group in (small, fixed, ragged):
        group.sort(key=lambda entry: -entry[1].size_bytes)
    return tensorfile.laid_out([*offsets, *small, *fixed, *ragged])


class SuperSampleBuilder:
    """Collects samples and makes one super-sample of them.

    Args:
        schema: the columns of every sample.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._values: list[list[bytes]] = [[] for _ in schema]
        self._value_bytes = 0
        self._ragged = sum(not column.is_fixed for column in schema.values())

    def __len__(self) -> int:
        return len(self._values[0])

    @property
    def size_bytes(self) -> int:
        """Size of the data section if it were finished now; the header adds a few hundred bytes."""
        return self._value_bytes + self._bookkeeping_bytes(len(self))

    def size_with(self, values: list[bytes]) -> int:
        """Return what ``size_bytes`` would be after ``add(values)``."""
        return self._value_bytes + sum(map(len, values)) + self._bookkeeping_bytes(len(self) + 1)

    def _bookkeeping_bytes(self, samples: int) -> int:
        return 8 * self._ragged * (samples + 1) + 4 * len(self.schema) * samples

    def add(self, values: list[bytes]) -> None:
        """Append one sample: the bytes of each column in the schema's order, as :meth:`Schema.encode` gives them."""
        for column, value in zip(self._values, values, strict=True):
            column.append(value)
        self._value_bytes += sum(map(len, values))

    def finish(self, origin: Origin, *, is_last: bool = False) -> tuple[bytes, Packed]:
        """Return the object's bytes and its manifest entry, and start anew, empty.

        Args:
            origin: where the samples come from.
            is_last: whether the pack run ends with it; its head says so.

        Raises:
            SchemaError: there is no sample.
        """
        samples = len(self)
        if not samples:
            raise SchemaError("a super-sample needs at least one sample")
        data, tensors = self._take_data(samples)
        metadata = {
            "stoker": FORMAT,
            "dataset": origin.dataset,
            "run": origin.run,
            "ordinal": str(origin.ordinal),
            "crc32c": f"{crc32c(data):08x}",
            "schema": self.schema.to_json(),
        }
        header = tensorfile.encode_header(metadata | ({"last": "true"} if is_last else {}), tensors)
        whole, head_bytes = header + data, len(header) + _head_end(self.schema, tensors)
        head_crc32c = crc32c(memoryview(whole)[:head_bytes])
        return whole, Packed(
            ordinal=origin.ordinal,
            size_bytes=len(whole),
            samples=samples,
            head_bytes=head_bytes,
            head_crc32c=head_crc32c,
            crc32c=crc32c(memoryview(whole)[head_bytes:], head_crc32c),
        )

    def _take_data(self, samples: int) -> tuple[bytes, tuple[tensorfile.Tensor, ...]]:
        """Return the data section and what lies where in it, and begin anew."""
        parts = dict(zip(self.schema, self._values, strict=True))
        elements = {}
        for name, column in self.schema.items():
            if not column.is_fixed:
                offsets = np.cumsum([0, *map(len, parts[name])], dtype="<i8") // column.element_bytes
                elements[name] = int(offsets[-1])
                parts[f"{name}.offsets"] = [offsets.tobytes()]
        checksums = np.array([[crc32c(value) for value in column] for column in self._values], dtype="<u4").T
        parts[CHECKSUMS] = [checksums.tobytes()]
        tensors = _layout(self.schema, samples, elements)
        data = b"".join([part for tensor in tensors for part in parts[tensor.name]])
        self._values = [[] for _ in self.schema]
        self._value_bytes = 0
        return data, tensors


def _head_end(schema: Schema, tensors: Iterable[tensorfile.Tensor]) -> int:
    """Return how much of the data section belongs to the head."""
    large = {name for name, column in schema.items() if not is_small(column)}
    return max((tensor.end for tensor in tensors if tensor.name not in large), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The head of a super-sample: what is needed to find and verify any value in it.

    Attributes:
        schema: its columns.
        origin: where it comes from.
        samples: how many rows it has.
        size_bytes: of the whole object.
        head_bytes: of the head itself.
        data_crc32c: checksum of the data section.
        is_last: whether the pack run ended with it.
        starts: column name → offset in the object of its first value.
        offsets: ragged column name → ``int64 [samples + 1]``, in elements.
        checksums: ``uint32 [samples, columns]``.
    """

    schema: Schema
    origin: Origin
    samples: int
    size_bytes: int
    head_bytes: int
    header_bytes: int
    data_crc32c: int
    is_last: bool
    starts: Mapping[str, int]
    offsets: Mapping[str, NDArray[np.int64]]
    checksums: NDArray[np.uint32]

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, size_bytes: int) -> Head:
        """Return the head at the start of ``data``; the arrays are views of it.

        Args:
            data: at least the head; more does not matter.
            size_bytes: of the whole object.

        Raises:
            FormatError: the bytes are not the head of a super-sample of that size.
        """
        if size_bytes > MAX_OBJECT_BYTES:
            raise FormatError(f"an object of {size_bytes} bytes is larger than any super-sample ({MAX_OBJECT_BYTES})")
        header = tensorfile.parse_header(data, size_bytes)
        schema, origin, is_last, data_crc32c = _metadata(header.metadata)
        named = {tensor.name: tensor for tensor in header.tensors}
        samples = _samples(named)
        ragged = [name for name, column in schema.items() if not column.is_fixed]
        elements = {name: _elements(named.get(name)) for name in ragged}
        expected = _layout(schema, samples, elements)
        if header.tensors != expected:
            raise FormatError("the tensors are not those of the schema, or not in the format's order")
        head_bytes = header.header_bytes + _head_end(schema, expected)
        if len(data) < head_bytes:
            raise FormatError(f"head of {head_bytes} bytes is cut off after {len(data)}")
        starts = {tensor.name: header.header_bytes + tensor.start for tensor in expected}
        offsets = {name: np.frombuffer(data, "<i8", samples + 1, starts[f"{name}.offsets"]) for name in ragged}
        for name, array in offsets.items():
            _check_offsets(name, array, elements[name])
        checksums = np.frombuffer(data, "<u4", samples * len(schema), starts[CHECKSUMS])
        return cls(
            schema=schema,
            origin=origin,
            samples=samples,
            size_bytes=size_bytes,
            head_bytes=head_bytes,
            header_bytes=header.header_bytes,
            data_crc32c=data_crc32c,
            is_last=is_last,
            starts=starts,
            offsets=offsets,
            checksums=checksums.reshape(samples, len(schema)),
        )

    @staticmethod
    def bytes_needed(data: bytes | bytearray | memoryview, size_bytes: int) -> int:
        """Return how many bytes, from the start of the object, are needed to tell more than ``data`` does.

        That is the size of the head, or of the header where that is cut off.

        Args:
            data: the beginning of an object, at least 8 bytes.
            size_bytes: of the whole object.

        Raises:
            FormatError: the bytes are not the beginning of a super-sample of that size.
        """
        header_bytes = tensorfile.parse_length(data, size_bytes)
        if header_bytes > len(data):
            return header_bytes
        header = tensorfile.parse_header(data, size_bytes)
        return header.header_bytes + _head_end(_metadata(header.metadata)[0], header.tensors)

    def row_range(self, name: str, start: int, end: int) -> tuple[int, int]:
        """Return the byte range in the object of column ``name`` of rows ``[start, end)``."""
        column, base = self.schema[name], self.starts[name]
        if not column.is_fixed:
            start, end = int(self.offsets[name][start]), int(self.offsets[name][end])
        return base + start * column.element_bytes, base + end * column.element_bytes

    def row_ranges(self, name: str, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return first byte and end in the object of each row's value of column ``name``, ``int64 [rows]``."""
        column, base = self.schema[name], self.starts[name]
        starts, ends = (rows, rows + 1) if column.is_fixed else (self.offsets[name][rows], self.offsets[name][rows + 1])
        return base + starts * column.element_bytes, base + ends * column.element_bytes

    def is_in_head(self, name: str) -> bool:
        """Return whether the values of column ``name`` lie in the head."""
        return is_small(self.schema[name])

    def verify_rows(self, name: str, start: int, data: memoryview) -> None:
        """Check the values of column ``name`` from row ``start`` on, as far as ``data`` goes, each on its checksum.

        Raises:
            ChecksumError: a value is not the one that was packed; names column and row.
        """
        column, index = self.schema[name], list(self.schema).index(name)
        borders = np.arange(self.samples + 1 - start) if column.is_fixed else self.offsets[name][start:]
        ends = ((borders[1:] - borders[0]) * column.element_bytes).tolist()
        begin = 0
        for row, (end, wanted) in enumerate(zip(ends, self.checksums[start:, index].tolist(), strict=True), start):
            if begin >= len(data):
                break
            if crc32c(data[begin:end]) != wanted:
                raise ChecksumError(f"column {name!r} of row {row} is not what was packed: its checksum differs")
            begin = end


def _metadata(metadata: Mapping[str, str]) -> tuple[Schema, Origin, bool, int]:
    """Return what a header says beside where things lie: schema, origin, whether it is the last, and the checksum."""
    if metadata.get("stoker") != FORMAT:
        found = metadata.get("stoker")
        raise FormatError(
            "this is not a super-sample"
            if found is None
            else f"super-sample format {found[:20]!r} is not {FORMAT!r}; use a newer stoker"
        )
    try:
        dataset, run, ordinal = metadata["dataset"], metadata["run"], metadata["ordinal"]
        checksum, schema = metadata["crc32c"], Schema.from_json(metadata["schema"])
    except KeyError as error:
        raise FormatError(f"the header has no {error}") from None
    except SchemaError as error:
        raise FormatError(f"the header's schema is not valid: {str(error)[:200]}") from None
    for pattern, text in ((_RUN, run), (_ORDINAL, ordinal), (_CRC32C, checksum)):
        if not pattern.fullmatch(text):
            raise FormatError(f"the header's metadata has {text[:40]!r} for {pattern.pattern}")
    origin = Origin(dataset=dataset, run=run, ordinal=int(ordinal))
    return schema, origin, metadata.get("last") == "true", int(checksum, 16)


def _samples(named: Mapping[str, tensorfile.Tensor]) -> int:
    checksums = named.get(CHECKSUMS)
    if checksums is None or len(checksums.shape) != 2 or checksums.shape[0] < 1:
        raise FormatError(f"there is no {CHECKSUMS} of shape [samples, columns]")
    return checksums.shape[0]


def _elements(tensor: tensorfile.Tensor | None) -> int:
    return tensor.shape[0] if tensor is not None and tensor.shape else 0


def _check_offsets(name: str, offsets: NDArray[np.int64], elements: int) -> None:
    if offsets[0] != 0 or offsets[-1] != elements or (offsets[1:] < offsets[:-1]).any():
        raise FormatError(f"the offsets of column {name!r} do not rise from 0 to {elements}")


class SuperSample:
    """A whole super-sample in memory. Its columns are views of the buffer: they live as long as it does.

    Attributes:
        head: what it says of itself.
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        """Open the object whose bytes are ``data``, without copying or verifying them.

        Raises:
            FormatError: the bytes are not a super-sample.
        """
        self._data = memoryview(data).cast("B")
        self.head = Head.parse(self._data, len(self._data))

    def __len__(self) -> int:
        return self.head.samples

    def verify(self) -> None:
        """Check the data section against the checksum in the header.

        Raises:
            ChecksumError: it differs.
        """
        found = crc32c(self._data[self.head.header_bytes :])
        if found != self.head.data_crc32c:
            raise ChecksumError(f"data section has crc32c {found:08x}, its header says {self.head.data_crc32c:08x}")

    def verify_values(self) -> None:
        """Check every value against its own checksum.

        Raises:
            ChecksumError: one differs.
        """
        for name in self.head.schema:
            start, end = self.head.row_range(name, 0, len(self))
            self.head.verify_rows(name, 0, self._data[start:end])

    def column(self, name: str) -> NDArray[Any]:
        """Return all values of a column as one view.

        A fixed column is ``[samples, *shape]``; a ragged one all its elements, to be cut by ``head.offsets``.
        """
        column = self.head.schema[name]
        start, end = self.head.row_range(name, 0, len(self))
        return np.frombuffer(self._data[start:end], column.dtype.holder).reshape(-1, *column.shape)

    def encoded(self, row: int) -> list[bytes]:
        """Return the bytes of each column of one sample, as :meth:`Schema.encode` gives them."""
        return list(map(bytes, self._values(row)))

    def _values(self, row: int) -> list[memoryview]:
        ranges = (self.head.row_range(name, row, row + 1) for name in self.head.schema)
        return [self._data[start:end] for start, end in ranges]

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return one sample, column name → value; the values own their memory.

        Raises:
            IndexError: there is no such row.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a super-sample with {len(self)}")
        values = zip(self.head.schema.items(), self._values(row % len(self)), strict=True)
        return {name: column.decode(value) for (name, column), value in values}
