"""numpy's ``.npz``: several arrays in a zip. Stored ones are read by ranges of rows, compressed ones as a stream."""

from __future__ import annotations

import asyncio
import io
import struct
import zipfile
import zlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from stoker._format.schema import MAX_COLUMNS
from stoker._pack.object_reading import MAX_AHEAD_BYTES, MAX_READS, PEEK_SPAN_BYTES, ByteStream, read
from stoker._sources.arrays import (
    PREFIX_BYTES,
    ArrayHeader,
    ArraySource,
    Blocks,
    header_end,
    parse_header,
    ranged_blocks,
    read_header,
)
from stoker.abc import ObjectInfo, Readable, SourceListing
from stoker.errors import PackError

__all__ = ["open_npz"]

_TAIL_BYTES = 64 << 10  # a zip's directory ends within its last 22 bytes and a comment of at most 64 KiB
_MAX_DIRECTORY_BYTES = 4 << 20
_MIN_SPAN_BYTES = 4 << 10
_LOCAL_HEADER = struct.Struct("<4s22xHH")


async def open_npz(listing: SourceListing) -> ArraySource:
    """Return the rows of the arrays in an ``.npz`` file as samples, a column for each array.

    Raises:
        PackError: the file is damaged, or its arrays are not of one length or cannot be samples.
    """
    item, store = listing.objects[0], listing.store
    columns: dict[str, tuple[ArrayHeader, Blocks]] = {}
    found = await _directory(store, item, listing.url)
    if len(found) > MAX_COLUMNS:
        raise PackError(f"{listing.url} holds {len(found)} arrays; a schema has at most {MAX_COLUMNS} columns")
    for info in found:
        name = info.filename.removesuffix(".npy")
        if name in columns:
            raise PackError(f"{listing.url} holds {name!r} twice; save it again with numpy.savez")
        member = _Member(store, item, info, f"{listing.url}, array {name!r}")
        columns[name] = await _column(member, MAX_AHEAD_BYTES // MAX_READS // len(found))
    if not columns:
        raise PackError(f"{listing.url} holds no arrays: nothing to pack")
    lengths = {name: header.shape[0] for name, (header, _) in columns.items()}
    if len(set(lengths.values())) > 1:
        rows = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        raise PackError(f"{listing.url}: its arrays must have one row for each sample, but {rows[:400]}")
    return ArraySource("npz", listing, columns)


async def _directory(store: Readable, item: ObjectInfo, where: str) -> list[zipfile.ZipInfo]:
    """Return what the zip's directory says, having read only the end of the file."""
    start = max(0, item.size_bytes - _TAIL_BYTES - 22)
    while item.size_bytes - start <= _MAX_DIRECTORY_BYTES:
        tail = _Tail(bytes(await read(store, item, start)), start)
        try:
            with zipfile.ZipFile(tail) as archive:
                return [info for info in archive.infolist() if not info.filename.endswith("/")]
        except _TooShort as error:
            start = error.args[0]
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, OverflowError) as error:
            raise PackError(f"{where} is not a zip file, or damaged: {str(error)[:200]}") from None
    raise PackError(f"{where} has a directory of more than {_MAX_DIRECTORY_BYTES} bytes, which no .npz file has")


class _TooShort(Exception):  # noqa: N818 - a request for more, not an error
    """Bytes before the tail are needed, from the offset given."""


class _Tail(io.BytesIO):
    """The last bytes of a file, at their true offsets; so ``zipfile`` parses a directory without the file."""

    def __init__(self, data: bytes, start: int) -> None:
        super().__init__(data)
        self._start = start

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == 0 and 0 <= offset < self._start:
            raise _TooShort(offset)
        return self._start + super().seek(offset - self._start if whence == 0 else offset, whence)

    def tell(self) -> int:
        return self._start + super().tell()


@dataclass(frozen=True, slots=True)
class _Member:
    """An array in a zip, as the directory has it."""

    store: Readable
    item: ObjectInfo
    info: zipfile.ZipInfo
    where: str

    async def data_start(self) -> int:
        """Return where its data starts in the file, having checked that it lies within."""
        offset, size_bytes = self.info.header_offset, self.item.size_bytes
        if not 0 <= offset <= size_bytes - _LOCAL_HEADER.size:
            raise PackError(f"{self.where} is damaged: it starts outside of the file")
        header = await read(self.store, self.item, offset, offset + _LOCAL_HEADER.size)
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        start = int(offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)
        if magic != b"PK\3\4" or start + self.info.compress_size > size_bytes:
            raise PackError(f"{self.where} is damaged: it does not lie within the file")
        return start


async def _column(member: _Member, span_bytes: int) -> tuple[ArrayHeader, Blocks]:
    """Return an array's header, and what reads its rows, with a compressed one in spans of ``span_bytes``."""
    info, where = member.info, member.where
    if info.flag_bits & 1:
        raise PackError(f"{where} is encrypted; save it again with numpy.savez")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise PackError(f"{where} has zip compression {info.compress_type}; save it again with numpy.savez")
    start = await member.data_start()
    if info.compress_type == zipfile.ZIP_DEFLATED:
        header = await _deflated_header(member, start)
        return header, partial(_deflated_blocks, member, header, start, span_bytes)
    if info.compress_size != info.file_size:
        raise PackError(f"{where} is damaged: its zip directory gives two sizes for it")
    header = await read_header(member.store, member.item, start, info.file_size, where)
    return header, ranged_blocks(member.store, member.item, header, start)


async def _deflated_header(member: _Member, start: int) -> ArrayHeader:
    size_bytes = member.info.file_size
    async with _inflated(member, start, PEEK_SPAN_BYTES) as data:
        prefix = await data.read(min(PREFIX_BYTES, size_bytes))
        end = min(header_end(prefix, member.where), size_bytes)
        return parse_header(prefix + await data.read(end - len(prefix)), size_bytes, member.where)


async def _deflated_blocks(
    member: _Member, header: ArrayHeader, start: int, span_bytes: int, first: int, rows: int
) -> AsyncGenerator[NDArray[Any], None]:
    """Yield the rows from ``first`` on, ``rows`` at a time; those before have to be decompressed as well."""
    async with _inflated(member, start, span_bytes) as data:
        await data.read(header.header_bytes)
        for row in range(0, first, rows):
            await data.read(min(rows, first - row) * header.row_bytes)
        for row in range(first, header.shape[0], rows):
            block = await data.read(min(rows, header.shape[0] - row) * header.row_bytes)
            if row + rows >= header.shape[0]:
                data.check()
            yield header.rows(block)


@asynccontextmanager
async def _inflated(member: _Member, start: int, span_bytes: int) -> AsyncGenerator[_Inflater, None]:
    end = start + member.info.compress_size
    stream = ByteStream(member.store, member.item, start, end, span_bytes=max(span_bytes, _MIN_SPAN_BYTES))
    try:
        yield _Inflater(stream, member.info.CRC, member.where)
    finally:
        await stream.close()


class _Inflater:
    """Decompresses a stream as far as it is asked to, so a small file cannot blow up memory."""

    def __init__(self, stream: ByteStream, crc32: int, where: str) -> None:
        self._stream = stream
        self._decompressor = zlib.decompressobj(-15)
        self._expected, self._crc32, self._where = crc32, 0, where

    async def read(self, count: int) -> bytearray:
        """Return the next ``count`` bytes.

        Raises:
            PackError: the stream is damaged or ends before them.
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
        """Raise PackError unless all that was read has the checksum of the zip's directory."""
        if self._crc32 != self._expected:
            raise PackError(f"{self._where} is damaged: its checksum differs from the zip's")
