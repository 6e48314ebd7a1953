"""numpy's ``.npz``: several arrays in a zip. Stored ones are read by ranges of rows, compressed ones as a stream."""

from __future__ import annotations

import asyncio
import io
import struct
import zipfile
import zlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from stoker.errors import PackError
from stoker.sources.arrays import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    ArrayHeader,
    ArraySource,
    Blocks,
    header_end,
    parse_header,
    ranged_blocks,
)
from stoker.sources.listing import Listing
from stoker.sources.reading import ByteStream, read
from stoker.store.protocol import ObjectInfo, Readable

__all__ = ["npz"]

_TAIL_BYTES = 64 << 10  # a zip's directory ends within its last 22 bytes and a comment of at most 64 KiB
_MAX_DIRECTORY_BYTES = 4 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")


async def npz(listing: Listing) -> ArraySource:
    """Return the rows of the arrays in an ``.npz`` file as samples, a column for each array.

    Raises:
        PackError: the file is damaged, or its arrays are not of one length or cannot be samples.
    """
    item, store = listing.objects[0], listing.store
    columns: dict[str, tuple[ArrayHeader, Blocks]] = {}
    for info in await _directory(store, item, listing.url):
        name = info.filename.removesuffix(".npy")
        if name in columns:
            raise PackError(f"{listing.url} holds {name!r} twice; save it again with numpy.savez")
        columns[name] = await _column(store, item, info, f"{listing.url}, array {name!r}")
    if not columns:
        raise PackError(f"{listing.url} holds no arrays: nothing to pack")
    lengths = {name: header.shape[0] for name, (header, _) in columns.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {rows}" for name, rows in lengths.items())
        raise PackError(f"{listing.url}: its arrays must have one row for each sample, but {found}")
    return ArraySource("npz", listing, columns)


async def _directory(store: Readable, item: ObjectInfo, where: str) -> list[zipfile.ZipInfo]:
    """Return what the zip's directory says, having read only the end of the file."""
    start = max(0, item.size_bytes - _TAIL_BYTES - 22)
    while item.size_bytes - start <= _MAX_DIRECTORY_BYTES:
        tail = _Tail(bytes(await read(store, item, start)), start)
        try:
            with zipfile.ZipFile(tail) as archive:
                return [info for info in archive.infolist() if not info.is_dir()]
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


async def _column(store: Readable, item: ObjectInfo, info: zipfile.ZipInfo, where: str) -> tuple[ArrayHeader, Blocks]:
    if info.flag_bits & 1:
        raise PackError(f"{where} is encrypted; save it again with numpy.savez")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise PackError(f"{where} has zip compression {info.compress_type}; save it again with numpy.savez")
    start = await _data_start(store, item, info, where)
    if info.compress_type == zipfile.ZIP_STORED:
        if info.compress_size != info.file_size:
            raise PackError(f"{where} is damaged: its zip directory gives two sizes for it")
        prefix = await read(store, item, start, start + min(PREFIX_BYTES, info.file_size))
        end = min(header_end(prefix, where), info.file_size)
        header = parse_header(await read(store, item, start, start + end), info.file_size, where)
        return header, ranged_blocks(store, item, header, start)
    member = _Deflated(store, item, start, info, where)
    header = await member.header()
    return header, partial(member.blocks, header)


async def _data_start(store: Readable, item: ObjectInfo, info: zipfile.ZipInfo, where: str) -> int:
    offset = info.header_offset
    if not 0 <= offset <= item.size_bytes - _LOCAL_HEADER.size:
        raise PackError(f"{where} is damaged: it starts outside of the file")
    magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(await read(store, item, offset, offset + _LOCAL_HEADER.size))
    start = int(offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)
    if magic != b"PK\3\4" or start + info.compress_size > item.size_bytes:
        raise PackError(f"{where} is damaged: it does not lie within the file")
    return start


@dataclass(frozen=True, slots=True)
class _Deflated:
    """A compressed member of a zip, read from its beginning every time."""

    store: Readable
    item: ObjectInfo
    start: int
    info: zipfile.ZipInfo
    where: str

    def _opened(self) -> _Inflater:
        stream = ByteStream(self.store, self.item, self.start, self.start + self.info.compress_size)
        return _Inflater(stream, self.info.CRC, self.where)

    async def header(self) -> ArrayHeader:
        """Return the array's header."""
        data = self._opened()
        try:
            prefix = await data.read(min(PREFIX_BYTES, self.info.file_size))
            end = min(header_end(prefix, self.where), self.info.file_size, MAX_HEADER_BYTES + PREFIX_BYTES)
            return parse_header(prefix + await data.read(end - len(prefix)), self.info.file_size, self.where)
        finally:
            await data.stream.close()

    async def blocks(self, header: ArrayHeader, start: int, rows: int) -> AsyncGenerator[NDArray[Any], None]:
        """Yield the rows from ``start`` on, ``rows`` at a time; those before are decompressed too."""
        data = self._opened()
        try:
            await data.read(header.header_bytes)
            for row in range(0, start, rows):
                await data.read(min(rows, start - row) * header.row_bytes)
            for row in range(start, header.shape[0], rows):
                block = await data.read(min(rows, header.shape[0] - row) * header.row_bytes)
                if row + rows >= header.shape[0]:
                    data.check()
                yield header.rows(block)
        finally:
            await data.stream.close()


class _Inflater:
    """Decompresses a stream as far as it is asked to, so a small file cannot blow up memory."""

    def __init__(self, stream: ByteStream, crc32: int, where: str) -> None:
        self.stream = stream
        self._decompressor = zlib.decompressobj(-15)
        self._expected, self._crc32, self._where = crc32, 0, where

    async def read(self, count: int) -> bytearray:
        """Return the next ``count`` bytes.

        Raises:
            PackError: the stream is damaged or ends before them.
        """
        data = bytearray()
        while len(data) < count:
            some = self._decompressor.unconsumed_tail or await self.stream.read_some()
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
