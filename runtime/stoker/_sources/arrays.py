"""NumPy files as sources: each row is a sample. Rows are read in ranges, never a whole array; nothing is unpickled.

An ``.npz`` file is a zip of several arrays: uncompressed ones are read in ranges of rows, compressed ones as a stream.
"""

from __future__ import annotations

import ast
import asyncio
import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker._base.task_group import MAX_AHEAD_BYTES, MAX_READS, run_in_order
from stoker._format.schema import MAX_COLUMNS, Array, Schema
from stoker._format.tensorfile import dtype_of
from stoker._sources.listing import PEEK_SPAN_BYTES, ByteStream, ObjectSource, check_fits, read_object, split_range
from stoker.abc import ObjectInfo, Readable, Sample, SourceListing
from stoker.errors import PackError, SchemaError

_PREFIX_BYTES = 12
_MAX_HEADER_BYTES = 10_000  # numpy's own limit
BLOCK_BYTES = MAX_AHEAD_BYTES // MAX_READS  # for all columns together: each column reads MAX_READS blocks ahead
_MAX_DIMENSIONS = 33  # the rows, and the 32 dimensions that a column can have
_TAIL_BYTES = 64 << 10  # a zip's directory ends within its last 22 bytes and a comment of at most 64 KiB
_MAX_DIRECTORY_BYTES = 4 << 20
_MIN_SPAN_BYTES = 4 << 10
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_DESCR_PATTERN = re.compile(r"[<>|=][A-Za-z]\d{1,4}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """Header of an ``.npy`` file.

    Attributes:
        dtype: dtype of the elements, in any byte order.
        shape: shape of the array; the first dimension is the rows.
        header_bytes: offset of the elements in the file.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    header_bytes: int

    @property
    def row_bytes(self) -> int:
        """Size of one row, in bytes."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def column(self) -> Array:
        """Column type of a row."""
        return Array(self.dtype.newbyteorder("="), self.shape[1:])

    def rows(self, data: bytes | bytearray) -> NDArray[Any]:
        """Return a view of ``data`` as rows."""
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])


async def _read_header(
    read_range: Callable[[int, int], Awaitable[bytearray]], array_bytes: int, where: str
) -> ArrayHeader:
    """Return the header of an ``.npy`` file of ``array_bytes``; ``read_range`` is called with consecutive ranges.

    Raises:
        PackError: the header is damaged, its array does not fit the file's size, or its rows cannot be samples.
    """
    prefix = await read_range(0, min(_PREFIX_BYTES, array_bytes))
    major = prefix[6] if len(prefix) == _PREFIX_BYTES and prefix[:6] == b"\x93NUMPY" else 0
    if major not in (1, 2):
        raise PackError(f"{where} is not an .npy file of version 1 or 2; save it again with numpy.save")
    start = 10 if major == 1 else 12
    length = int.from_bytes(prefix[8:start], "little")
    if length > _MAX_HEADER_BYTES:
        raise PackError(f"{where} has a header of {length} bytes, more than {_MAX_HEADER_BYTES}; the file is damaged")
    end = start + length
    # The prefix cannot grow in place while the store still holds a view of it.
    data = prefix + await read_range(len(prefix), max(len(prefix), min(end, array_bytes)))
    try:
        # literal_eval reads constants only; the length of the header bounds its cost.
        fields = ast.literal_eval(data[start:end].decode("latin-1").strip())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise PackError(f"{where} has a damaged .npy header: {str(error)[:200]}") from None
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"} or len(data) < end:
        raise PackError(f"{where} has a damaged .npy header: it does not give descr, fortran_order and shape")
    header = ArrayHeader(_parse_dtype(fields["descr"], where), _parse_shape(fields["shape"], where), end)
    if fields["fortran_order"] and len(header.shape) > 1:
        raise PackError(f"{where} is in Fortran order, so rows are not contiguous; save numpy.ascontiguousarray of it")
    _check_header(header, array_bytes, where)
    return header


def _parse_dtype(descr: object, where: str) -> np.dtype[Any]:
    if descr == "|O":
        raise PackError(f"{where} holds pickled Python objects, which stoker does not load; convert it to numbers")
    try:
        if not isinstance(descr, str) or not _DESCR_PATTERN.fullmatch(descr):
            raise TypeError
        dtype = np.dtype(descr)
        dtype_of(dtype)
    except (TypeError, SchemaError):
        description = repr(descr)[:80]
        raise PackError(
            f"{where} has elements of {description}, which cannot be stored; convert it to numbers"
        ) from None
    return dtype


def _parse_shape(shape: object, where: str) -> tuple[int, ...]:
    if (
        not isinstance(shape, tuple)
        or len(shape) > 32
        or any(type(n) is not int or not 0 <= n < 1 << 48 for n in shape)
    ):
        raise PackError(f"{where} has the impossible shape {str(shape)[:200]}; save it again with numpy.save")
    if not shape:
        raise PackError(f"{where} holds a single number, so it has no rows to be samples; reshape it to (1,)")
    return shape


def _check_header(header: ArrayHeader, array_bytes: int, where: str) -> None:
    if header.header_bytes + header.shape[0] * header.row_bytes != array_bytes:
        raise PackError(
            f"{where} has {array_bytes - header.header_bytes} bytes of data, which do not fit its shape "
            f"{header.shape} of {header.dtype}: the file is damaged or truncated"
        )
    if len(header.shape) > _MAX_DIMENSIONS:
        raise PackError(f"{where} has {len(header.shape)} dimensions; reshape it to at most {_MAX_DIMENSIONS}")
    if not header.shape[0] or not header.row_bytes:
        raise PackError(f"{where} has the shape {header.shape}: nothing to pack")
    check_fits(f"{where} has rows of", header.row_bytes, "cut the rows")


ReadBlocks = Callable[[int, int], AsyncGenerator[NDArray[Any], None]]
"""Function ``blocks(start, rows)`` that yields the rows from ``start`` on, in blocks of ``rows``."""


class ArraySource(ObjectSource):
    """Rows of one or several arrays of equal length as samples, in order; each array is a column.

    Args:
        kind: ``npy`` or ``npz``.
        listing: listing of the file.
        columns: column name → header of the array and reader of its rows.
    """

    def __init__(self, kind: str, listing: SourceListing, columns: dict[str, tuple[ArrayHeader, ReadBlocks]]) -> None:
        try:
            schema = Schema({name: header.column for name, (header, _) in columns.items()})
        except SchemaError as error:
            raise PackError(f"{listing.url}: {error}; save the array under another name") from None
        super().__init__(kind, schema, listing, listing.objects)
        self.samples = self._end = next(iter(columns.values()))[0].shape[0]
        self._first = 0
        self._blocks = {name: blocks for name, (_, blocks) in columns.items()}
        self._block_rows = max(1, BLOCK_BYTES // max(1, sum(header.row_bytes for header, _ in columns.values())))

    def select_rows(self, start: int, end: int) -> None:
        """Restrict the source to the rows ``[start, end)``.

        Raises:
            PackError: the array has fewer rows.
        """
        if end > self._end:
            raise PackError(f"{self.root}/{self.objects[0].key} has {self._end} rows, not {end}: it was replaced")
        self._first, self._end, self.samples = start, end, end - start

    async def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        """Yield the rows from number ``start`` on; the values are views of blocks of rows."""
        name, row = self._listing.objects[0].key, self._first + start
        streams = {column: blocks(row, self._block_rows) for column, blocks in self._blocks.items()}
        try:
            while row < self._end:
                block = {column: await anext(stream) for column, stream in streams.items()}
                for index in range(min(self._block_rows, self._end - row)):
                    yield f"{name}: row {row + index}", {column: rows[index] for column, rows in block.items()}
                row += self._block_rows
        finally:
            for stream in streams.values():
                await stream.aclose()


async def _open_uncompressed(
    store: Readable, item: ObjectInfo, start: int, array_bytes: int, where: str
) -> tuple[ArrayHeader, ReadBlocks]:
    """Return the header and the row reader of an uncompressed array that starts at offset ``start`` of an object."""
    header = await _read_header(
        lambda first, last: read_object(store, item, start + first, start + last), array_bytes, where
    )
    base, row_bytes = start + header.header_bytes, header.row_bytes

    async def read_block(first: int, last: int) -> NDArray[Any]:
        return header.rows(await read_object(store, item, base + first * row_bytes, base + last * row_bytes))

    def blocks(start: int, rows: int) -> AsyncGenerator[NDArray[Any], None]:
        ranges = split_range(start, header.shape[0], rows)
        return run_in_order(((last - first) * row_bytes, partial(read_block, first, last)) for first, last in ranges)

    return header, blocks


async def open_npy(listing: SourceListing) -> ArraySource:
    """Return the rows of one ``.npy`` file as samples with the column ``x``.

    Raises:
        PackError: the file is not an ``.npy`` file, or its rows cannot be samples.
    """
    item, store = listing.objects[0], listing.store
    return ArraySource("npy", listing, {"x": await _open_uncompressed(store, item, 0, item.size_bytes, listing.url)})


async def open_npz(listing: SourceListing) -> ArraySource:
    """Return the rows of the arrays in an ``.npz`` file as samples, a column for each array.

    Raises:
        PackError: the file is damaged, or its arrays differ in length or cannot be samples.
    """
    item, store = listing.objects[0], listing.store
    columns: dict[str, tuple[ArrayHeader, ReadBlocks]] = {}
    directory = await _read_directory(store, item, listing.url)
    if len(directory) > MAX_COLUMNS:
        raise PackError(f"{listing.url} holds {len(directory)} arrays; a schema has at most {MAX_COLUMNS} columns")
    for info in directory:
        name = info.filename.removesuffix(".npy")
        if name in columns:
            raise PackError(f"{listing.url} holds {name!r} twice; save it again with numpy.savez")
        columns[name] = await _open_member(
            store, item, info, f"{listing.url}, array {name!r}", BLOCK_BYTES // len(directory)
        )
    if not columns:
        raise PackError(f"{listing.url} holds no arrays: nothing to pack")
    lengths = {name: header.shape[0] for name, (header, _) in columns.items()}
    if len(set(lengths.values())) > 1:
        rows = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        raise PackError(f"{listing.url}: its arrays must have one row for each sample, but {rows[:400]}")
    return ArraySource("npz", listing, columns)


async def _read_directory(store: Readable, item: ObjectInfo, where: str) -> list[zipfile.ZipInfo]:
    """Return the entries of the zip's directory; reads only the end of the file."""
    start = max(0, item.size_bytes - _TAIL_BYTES - 22)
    while item.size_bytes - start <= _MAX_DIRECTORY_BYTES:
        tail = _FileTail(bytes(await read_object(store, item, start)), start)
        try:
            with zipfile.ZipFile(tail) as archive:
                return [info for info in archive.infolist() if not info.filename.endswith("/")]
        except _NeedsEarlierBytes as error:
            start = error.args[0]
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, OverflowError) as error:
            raise PackError(f"{where} is not a zip file, or damaged: {str(error)[:200]}") from None
    raise PackError(f"{where} has a directory of more than {_MAX_DIRECTORY_BYTES} bytes, which no .npz file has")


class _NeedsEarlierBytes(Exception):  # noqa: N818 - a request for more, not an error
    """Bytes before the tail are needed, from the offset in ``args[0]`` on."""


class _FileTail(io.BytesIO):
    """The last bytes of a file at their original offsets, so that ``zipfile`` parses a directory without the rest."""

    def __init__(self, data: bytes, start: int) -> None:
        super().__init__(data)
        self._start = start

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == 0 and 0 <= offset < self._start:
            raise _NeedsEarlierBytes(offset)
        return self._start + super().seek(offset - self._start if whence == 0 else offset, whence)

    def tell(self) -> int:
        return self._start + super().tell()


async def _open_member(
    store: Readable, item: ObjectInfo, info: zipfile.ZipInfo, where: str, span_bytes: int
) -> tuple[ArrayHeader, ReadBlocks]:
    """Return an array's header and its row reader; a compressed array is read in spans of ``span_bytes``."""
    if info.flag_bits & 1:
        raise PackError(f"{where} is encrypted; save it again with numpy.savez")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise PackError(f"{where} has zip compression {info.compress_type}; save it again with numpy.savez")
    start = await _find_data_start(store, item, info, where)
    if info.compress_type == zipfile.ZIP_STORED:
        if info.compress_size != info.file_size:
            raise PackError(f"{where} is damaged: its zip directory gives two sizes for it")
        return await _open_uncompressed(store, item, start, info.file_size, where)

    def inflated(span_bytes: int) -> aclosing[_Inflater]:
        end = start + info.compress_size
        stream = ByteStream(store, item, start, end, span_bytes=max(span_bytes, _MIN_SPAN_BYTES))
        return aclosing(_Inflater(stream, info.CRC, where))

    async with inflated(PEEK_SPAN_BYTES) as data:
        header = await _read_header(lambda first, last: data.read(last - first), info.file_size, where)
    return header, partial(_read_inflated_blocks, partial(inflated, span_bytes), header)


async def _find_data_start(store: Readable, item: ObjectInfo, info: zipfile.ZipInfo, where: str) -> int:
    """Return the offset of a member's data in the zip, after a check that the data lies within the file."""
    offset = info.header_offset
    if not 0 <= offset <= item.size_bytes - _LOCAL_HEADER.size:
        raise PackError(f"{where} is damaged: it starts outside of the file")
    magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(
        await read_object(store, item, offset, offset + _LOCAL_HEADER.size)
    )
    start = int(offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)
    if magic != b"PK\3\4" or start + info.compress_size > item.size_bytes:
        raise PackError(f"{where} is damaged: it does not lie within the file")
    return start


async def _read_inflated_blocks(
    open_inflater: Callable[[], aclosing[_Inflater]], header: ArrayHeader, first: int, rows: int
) -> AsyncGenerator[NDArray[Any], None]:
    """Yield the rows from ``first`` on, in blocks of ``rows``; earlier rows must be decompressed too."""
    async with open_inflater() as data:
        await data.read(header.header_bytes)
        for row, end in split_range(0, first, rows):
            await data.read((end - row) * header.row_bytes)
        for row, end in split_range(first, header.shape[0], rows):
            block = await data.read((end - row) * header.row_bytes)
            if end == header.shape[0]:
                data.check()
            yield header.rows(block)


class _Inflater:
    """Decompresses a stream on demand, so that a small file cannot exhaust memory."""

    def __init__(self, stream: ByteStream, crc32: int, where: str) -> None:
        self._stream = stream
        self._decompressor = zlib.decompressobj(-15)
        self._expected, self._crc32, self._where = crc32, 0, where

    async def read(self, count: int) -> bytearray:
        """Return the next ``count`` bytes.

        Raises:
            PackError: the stream is damaged or ends too early.
        """
        data = bytearray()
        while len(data) < count:
            some = self._decompressor.unconsumed_tail or await self._stream.read_some()
            try:
                more = await asyncio.to_thread(self._decompressor.decompress, some, count - len(data))
            except zlib.error as error:
                raise PackError(f"{self._where} is damaged: {error}") from None
            if not more and (self._decompressor.eof or not some):
                raise PackError(f"{self._where} is damaged: its data ends too early")
            data += more
        self._crc32 = zlib.crc32(data, self._crc32)
        return data

    def check(self) -> None:
        """Raise PackError unless the bytes read so far have the checksum from the zip's directory."""
        if self._crc32 != self._expected:
            raise PackError(f"{self._where} is damaged: its checksum differs from the zip's")

    async def aclose(self) -> None:
        """Cancel the reads in flight."""
        await self._stream.aclose()
