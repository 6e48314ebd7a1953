"""Super-samples: many samples in one object, a valid safetensors file that is readable by column and by row.

The schema, the sample count and the ragged lengths determine the layout of the data section, for every writer:

1. ``NAME.offsets`` ``I64 [n + 1]`` of every ragged column, in elements;
2. small columns (fixed, at most ``SMALL_ROW_BYTES`` a row), including ``__crc32c__`` ``U32 [n, columns]``: the CRC-32C
   of every value, with which any range of rows of any column can be verified;
3. large columns: the other fixed columns, then the elements of the ragged columns.

In 2, and in each half of 3, wider element types come first, ``__crc32c__`` before other types of 4 bytes; ties are in
the schema's order. Views are therefore aligned wherever the sizes permit. The header, 1 and 2 form the **head**: one
ranged read of it opens an object; a range of samples is then one byte range per column. Chunk metadata inside the chunk
is DIESEL's design.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker._base.checksum import combine_crc32c, crc32c
from stoker._base.segments import SegmentedBytes
from stoker._format import tensorfile
from stoker._format.schema import Column, Schema
from stoker._format.tensorfile import DTYPES, DType
from stoker.errors import ChecksumError, FormatError, SchemaError

FORMAT = "1"
SMALL_ROW_BYTES = 64
MAX_SAMPLE_BYTES = 1 << 30
"""Maximum size of a sample's values. A sample that is larger than the target size has a super-sample of its own."""
MAX_TARGET_BYTES = 32 << 20
"""Maximum size at which functions end a super-sample, unless a single sample is larger."""
MAX_SUPER_SAMPLE_BYTES = MAX_SAMPLE_BYTES + (64 << 10)
"""Maximum size of a data section: the largest sample with the offsets and checksums of 1,024 columns."""
MAX_OBJECT_BYTES = MAX_SUPER_SAMPLE_BYTES + tensorfile.MAX_HEADER_BYTES + tensorfile.PREFIX_BYTES
CHECKSUMS = "__crc32c__"
COLUMN_CHECKSUMS = "columns_crc32c"
MIN_WIDE_COLUMNS = 32
"""Minimum number of small columns from which the header has the checksum of every fixed column."""
_MAX_COPIED_BYTES = 16 << 20
"""Maximum size of values that are copied into one buffer: faster for many small ones."""
_MAX_CHAINED_BYTES = 64 << 10
_RUN = re.compile(r"[0-9a-f]{16}", re.ASCII)
_ORDINAL = re.compile(r"[0-9]{1,9}", re.ASCII)
_CRC32C = re.compile(r"[0-9a-f]{8}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOrigin:
    """The data set and pack run of a super-sample; stored in its head, so that a lost manifest can be rebuilt.

    Attributes:
        dataset: id of the data set.
        run: id of the pack run, 16 hexadecimal digits.
        ordinal: number of the super-sample within the run, from 0.
    """

    dataset: str
    run: str
    ordinal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperSampleRecord:
    """The manifest entry of a super-sample.

    Attributes:
        ordinal: number of the super-sample within the pack run, from 0.
        size_bytes: size of the whole object.
        samples: number of samples.
        head_bytes: size of the head, which starts the object.
        head_crc32c: CRC-32C of the head.
        crc32c: CRC-32C of the whole object.
        tag: ETag or generation of the stored object, ``""`` until it is stored.
        sha256_128: first 16 bytes of the SHA-256 of the whole object, None if not computed.
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
    """Return whether the head contains the values of a column."""
    return column.is_fixed and column.element_bytes <= SMALL_ROW_BYTES


def _layout(schema: Schema, samples: int, elements: Mapping[str, int]) -> tuple[tensorfile.TensorInfo, ...]:
    """Return the tensors of a super-sample, in order of the file.

    Args:
        schema: columns of the super-sample.
        samples: number of samples.
        elements: total number of elements of each ragged column, by name.
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
    return tensorfile.lay_out([*offsets, *small, *fixed, *ragged])


def tensors_of_fixed_columns(schema: Schema, samples: int) -> tuple[tensorfile.TensorInfo, ...]:
    """Return the tensors of a super-sample up to the last fixed column; their positions do not depend on others."""
    layout = _layout(schema, samples, dict.fromkeys(schema, 0))
    return tuple(tensor for tensor in layout if tensor.name not in schema or schema[tensor.name].is_fixed)


def is_wide(schema: Schema) -> bool:
    """Return whether the header has the checksum of every fixed column, so that a few of many can be read."""
    return sum(map(is_small, schema.values())) >= MIN_WIDE_COLUMNS


class SuperSampleBuilder:
    """Collects samples and encodes them as one super-sample.

    Args:
        schema: columns of every sample.
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
        """Size of the data section with the samples so far; the header adds a few hundred bytes."""
        return self._value_bytes + self._bookkeeping_bytes(len(self))

    def size_with(self, values: list[bytes]) -> int:
        """Return the value of ``size_bytes`` after ``add(values)``."""
        return self._value_bytes + sum(map(len, values)) + self._bookkeeping_bytes(len(self) + 1)

    def _bookkeeping_bytes(self, samples: int) -> int:
        return 8 * self._ragged * (samples + 1) + 4 * len(self.schema) * samples

    def add(self, values: list[bytes]) -> None:
        """Append one sample: the bytes of each column in the schema's order, from :meth:`Schema.encode`."""
        for column, value in zip(self._values, values, strict=True):
            column.append(value)
        self._value_bytes += sum(map(len, values))

    def finish(self, origin: PackOrigin, *, is_last: bool = False) -> tuple[bytes, SuperSampleRecord]:
        """Return the object's bytes and its manifest entry, and reset the builder; like :meth:`finish_segments`."""
        data, record = self.finish_segments(origin, is_last=is_last)
        return bytes(data[:]), record

    def finish_segments(self, origin: PackOrigin, *, is_last: bool = False) -> tuple[SegmentedBytes, SuperSampleRecord]:
        """Return the object's bytes and its manifest entry, and reset the builder.

        The bytes of a large object are not copied: they are those of its values.

        Args:
            origin: data set and pack run, for the head.
            is_last: whether this is the last super-sample of the pack run; recorded in the head.

        Raises:
            SchemaError: the builder is empty.
        """
        samples = len(self)
        if not samples:
            raise SchemaError("a super-sample needs at least one sample")
        column_checksums = self._column_checksums() if is_wide(self.schema) else {}
        parts, tensors = self._take_data(samples)
        data_bytes, data_crc32c = sum(map(len, parts)), _chain_crc32c(parts)
        metadata = column_checksums | {
            "stoker": FORMAT,
            "dataset": origin.dataset,
            "run": origin.run,
            "ordinal": str(origin.ordinal),
            "crc32c": f"{data_crc32c:08x}",
            "schema": self.schema.to_json(),
        }
        header = tensorfile.encode_header(metadata | ({"last": "true"} if is_last else {}), tensors)
        whole, head_bytes = SegmentedBytes([header, *parts]), len(header) + _head_end(self.schema, tensors)
        return whole, SuperSampleRecord(
            ordinal=origin.ordinal,
            size_bytes=len(whole),
            samples=samples,
            head_bytes=head_bytes,
            head_crc32c=crc32c(memoryview(whole[:head_bytes])),
            crc32c=combine_crc32c(crc32c(header), data_crc32c, data_bytes),
        )

    def _column_checksums(self) -> dict[str, str]:
        """Return the header's metadata with the checksum of every fixed column, in the schema's order."""
        fixed = [values for values, column in zip(self._values, self.schema.values(), strict=True) if column.is_fixed]
        return {COLUMN_CHECKSUMS: "".join(f"{_chain_crc32c(values):08x}" for values in fixed)}

    def _take_data(self, samples: int) -> tuple[list[bytes], tuple[tensorfile.TensorInfo, ...]]:
        """Return the data section, in one piece if it is small, and its tensors, and reset the builder."""
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
        data = [part for tensor in tensors for part in parts[tensor.name]]
        if self._value_bytes <= _MAX_COPIED_BYTES:
            data = [b"".join(data)]
        self._values = [[] for _ in self.schema]
        self._value_bytes = 0
        return data, tensors


def _chain_crc32c(parts: Iterable[bytes]) -> int:
    """Return the CRC-32C of concatenated bytes; small ones are copied, because a call takes longer than the copy."""
    checksum, few = 0, bytearray()
    for part in parts:
        if len(few) + len(part) > _MAX_CHAINED_BYTES:
            checksum, few = crc32c(few, checksum), bytearray()
        if len(part) > _MAX_CHAINED_BYTES:
            checksum = crc32c(part, checksum)
        else:
            few += part
    return crc32c(few, checksum)


def _head_end(schema: Schema, tensors: Iterable[tensorfile.TensorInfo]) -> int:
    """Return the size of the head's part of the data section."""
    large = {name for name, column in schema.items() if not is_small(column)}
    return max((tensor.end for tensor in tensors if tensor.name not in large), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The parsed head of a super-sample, which locates and verifies any value in it.

    Attributes:
        schema: columns of the super-sample.
        origin: data set and pack run of the super-sample.
        samples: number of samples.
        size_bytes: size of the whole object.
        head_bytes: size of the head.
        header_bytes: size of the safetensors header; offset of the data section.
        data_crc32c: CRC-32C of the data section.
        is_last: whether this is the last super-sample of its pack run.
        starts: offset in the object of each tensor, by name.
        offsets: row offsets of each ragged column, by name: ``int64 [samples + 1]``, in elements.
        checksums: CRC-32C of each value, ``uint32 [samples, columns]``.
    """

    schema: Schema
    origin: PackOrigin
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
        """Parse the head at the start of ``data``; its arrays are views of ``data``.

        Args:
            data: beginning of the object, at least its head.
            size_bytes: size of the whole object.

        Raises:
            FormatError: the bytes are not the head of a super-sample of that size.
        """
        if size_bytes > MAX_OBJECT_BYTES:
            raise FormatError(f"an object of {size_bytes} bytes is larger than any super-sample ({MAX_OBJECT_BYTES})")
        header = tensorfile.parse_header(data, size_bytes)
        schema, origin, is_last, data_crc32c = _parse_metadata(header.metadata)
        named = {tensor.name: tensor for tensor in header.tensors}
        samples = _sample_count(named)
        ragged = [name for name, column in schema.items() if not column.is_fixed]
        elements = {name: _element_count(named.get(name)) for name in ragged}
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
        """Return how many bytes from the start of the object must be read to continue parsing.

        This is the size of the head, or of the header if ``data`` ends before the header does.

        Args:
            data: beginning of the object, at least 8 bytes.
            size_bytes: size of the whole object.

        Raises:
            FormatError: the bytes are not the beginning of a super-sample of that size.
        """
        header_bytes = tensorfile.parse_length(data, size_bytes)
        if header_bytes > len(data):
            return header_bytes
        header = tensorfile.parse_header(data, size_bytes)
        return header.header_bytes + _head_end(_parse_metadata(header.metadata)[0], header.tensors)

    def row_range(self, name: str, start: int, end: int) -> tuple[int, int]:
        """Return the byte range of column ``name`` for rows ``[start, end)``, relative to the object."""
        column, base = self.schema[name], self.starts[name]
        if not column.is_fixed:
            start, end = int(self.offsets[name][start]), int(self.offsets[name][end])
        return base + start * column.element_bytes, base + end * column.element_bytes

    def row_ranges(self, name: str, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return start and end offset in the object of each row's value of column ``name``, ``int64 [rows]`` each."""
        column, base = self.schema[name], self.starts[name]
        starts, ends = (rows, rows + 1) if column.is_fixed else (self.offsets[name][rows], self.offsets[name][rows + 1])
        return base + starts * column.element_bytes, base + ends * column.element_bytes

    def is_in_head(self, name: str) -> bool:
        """Return whether the head contains the values of column ``name``."""
        return is_small(self.schema[name])

    def verify_rows(self, name: str, start: int, data: memoryview) -> None:
        """Verify values of column ``name`` by their checksums, from row ``start`` to the end of ``data``.

        Raises:
            ChecksumError: a value is not the one that was packed; the message names column and row.
        """
        column, index = self.schema[name], list(self.schema).index(name)
        borders = np.arange(self.samples + 1 - start) if column.is_fixed else self.offsets[name][start:]
        ends = ((borders[1:] - borders[0]) * column.element_bytes).tolist()
        begin = 0
        for row, (end, expected) in enumerate(zip(ends, self.checksums[start:, index].tolist(), strict=True), start):
            if begin >= len(data):
                break
            if crc32c(data[begin:end]) != expected:
                raise ChecksumError(f"column {name!r} of row {row} is not what was packed: its checksum differs")
            begin = end


def _parse_metadata(metadata: Mapping[str, str]) -> tuple[Schema, PackOrigin, bool, int]:
    """Parse a header's metadata: schema, origin, whether it is the last of its run, CRC-32C of the data section."""
    if metadata.get("stoker") != FORMAT:
        format_name = metadata.get("stoker")
        raise FormatError(
            "this is not a super-sample"
            if format_name is None
            else f"super-sample format {format_name[:20]!r} is not {FORMAT!r}; use a newer stoker"
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
    origin = PackOrigin(dataset=dataset, run=run, ordinal=int(ordinal))
    return schema, origin, metadata.get("last") == "true", int(checksum, 16)


def _sample_count(named: Mapping[str, tensorfile.TensorInfo]) -> int:
    checksums = named.get(CHECKSUMS)
    if checksums is None or len(checksums.shape) != 2 or checksums.shape[0] < 1:
        raise FormatError(f"there is no {CHECKSUMS} of shape [samples, columns]")
    return checksums.shape[0]


def _element_count(tensor: tensorfile.TensorInfo | None) -> int:
    return tensor.shape[0] if tensor is not None and tensor.shape else 0


def _check_offsets(name: str, offsets: NDArray[np.int64], elements: int) -> None:
    if offsets[0] != 0 or offsets[-1] != elements or (offsets[1:] < offsets[:-1]).any():
        raise FormatError(f"the offsets of column {name!r} do not rise from 0 to {elements}")


class SuperSample:
    """A whole super-sample in memory. Its columns are views of the buffer.

    Attributes:
        head: parsed head.
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        """Parse the object ``data`` without copying or verifying it.

        Raises:
            FormatError: the bytes are not a super-sample.
        """
        self._data = memoryview(data).cast("B")
        self.head = Head.parse(self._data, len(self._data))

    def __len__(self) -> int:
        return self.head.samples

    def verify(self) -> None:
        """Verify the data section by the checksum in the header.

        Raises:
            ChecksumError: the checksum is wrong.
        """
        checksum = crc32c(self._data[self.head.header_bytes :])
        if checksum != self.head.data_crc32c:
            raise ChecksumError(f"data section has crc32c {checksum:08x}, its header says {self.head.data_crc32c:08x}")

    def verify_values(self) -> None:
        """Verify every value by its own checksum.

        Raises:
            ChecksumError: a checksum is wrong.
        """
        for name in self.head.schema:
            start, end = self.head.row_range(name, 0, len(self))
            self.head.verify_rows(name, 0, self._data[start:end])

    def column(self, name: str) -> NDArray[Any]:
        """Return all values of a column as one view.

        The shape is ``[samples, *shape]`` for a fixed column, and ``[elements, *shape]`` for a ragged one, whose rows
        ``head.offsets`` delimits.
        """
        column = self.head.schema[name]
        start, end = self.head.row_range(name, 0, len(self))
        return np.frombuffer(self._data[start:end], column.dtype.holder).reshape(-1, *column.shape)

    def encode_row(self, row: int) -> list[bytes]:
        """Return the bytes of each column of one sample, as :meth:`Schema.encode` does."""
        return list(map(bytes, self._values(row)))

    def _values(self, row: int) -> list[memoryview]:
        ranges = (self.head.row_range(name, row, row + 1) for name in self.head.schema)
        return [self._data[start:end] for start, end in ranges]

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return the values of one sample by column name; they own their memory.

        Raises:
            IndexError: the row is out of range.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} is out of range: the super-sample has {len(self)} rows")
        values = zip(self.head.schema.items(), self._values(row % len(self)), strict=True)
        return {name: column.decode(value) for (name, column), value in values}
