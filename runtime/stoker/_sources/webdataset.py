"""WebDataset tars as sources: consecutive files with the same base name are a sample.

Tars are read as a stream. Nothing is extracted to disk: a member is only a name and bytes. The standard library's
``tarfile`` parses headers; this module applies the rules of POSIX.1-2001 pax and of GNU for long names, and bounds the
memory that a header can make it allocate.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from stoker._base.sizes import format_count
from stoker._base.task_group import MAX_READS, for_each
from stoker._format.schema import Array, Bytes, Column, Schema, Text
from stoker._sources.listing import (
    PEEK_SPAN_BYTES,
    STREAM_SPAN_BYTES,
    ByteStream,
    ObjectSource,
    check_fits,
    read_object,
)
from stoker.abc import ObjectInfo, Sample, SourceListing
from stoker.errors import PackError, SchemaError

_NAME_PATTERN = re.compile(r"((?:.*/)?[^./][^/.]*)\.([^/]+)", re.DOTALL)
_INTEGER_PATTERN = re.compile(rb"\s*([+-]?\d{1,20})\s*")
_COLUMN_BY_EXTENSION: dict[str, Column] = {"cls": Array("int64"), "txt": Text(), "json": Text()}
_MAX_EXTENDED_BYTES = 1 << 20
_BLOCK_BYTES = tarfile.BLOCKSIZE
_PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENSIONS = (*_PAX, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class WebDataset(ObjectSource):
    """The samples of one or more tars, in the order of the tars and of their members.

    Each file extension is a column (everything after the first dot of the name, in lower case, other dots as ``_``):
    ``.cls`` is an ``int64``, ``.txt`` and ``.json`` are text, any other is bytes; the column ``key`` is the name before
    the extension. Hidden files and files without an extension are skipped.

    Args:
        listing: listing of the source.
        tars: tars to read.
        schema: columns of every sample.
        strict: whether a tar without an end marker is an error.
    """

    def __init__(self, listing: SourceListing, tars: tuple[ObjectInfo, ...], schema: Schema, *, strict: bool) -> None:
        super().__init__("webdataset", schema, listing, tars)
        self._strict = strict
        self._without_end: set[str] = set()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about files that were left out, and about tars read so far that have no end marker."""
        notes = []
        if left_out := len(self._listing.objects) - len(self.objects):
            notes.append(f"{left_out} of {len(self._listing.objects)} files were left out: not .tar")
        if self._without_end:
            where = (
                f"{len(self._without_end):,} of {format_count(len(self.objects), 'tar')} (first: "
                f"{min(self._without_end)})"
            )
            notes.append(f"warning: no end marker in {where}: if they are truncated, samples are missing")
        return tuple(notes)

    async def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        """Yield the samples from number ``start`` on; a tar has no index, so earlier samples are read too."""
        number = 0
        for tar in self.objects:
            on_no_end = partial(self._note_no_end, tar.key)
            async with aclosing(_read_samples(self._listing, tar, on_no_end=on_no_end)) as samples:
                async for where, sample in samples:
                    if sample.keys() != self.schema.keys():
                        raise PackError(
                            f"{where} has the columns {', '.join(sample)}, but the first sample has "
                            f"{', '.join(self.schema)}; give every sample the same files"
                        )
                    if number >= start:
                        yield where, sample
                    number += 1

    async def check_ends(self) -> None:
        """Note the tars that do not end with zeros; reads only their last bytes.

        Raises:
            PackError: a tar does not end with zeros, and the source is strict.
        """

        async def check(tar: ObjectInfo) -> None:
            if any(await read_object(self._listing.store, tar, max(0, tar.size_bytes - _BLOCK_BYTES))):
                self._note_no_end(tar.key)

        await for_each(self.objects, check, concurrency=MAX_READS)

    def _note_no_end(self, key: str) -> None:
        if self._strict:
            raise PackError(
                f"{self.root}/{key} has no end marker, so it may be truncated; create it again or pack without --strict"
            )
        self._without_end.add(key)


async def open_webdataset(listing: SourceListing, *, strict: bool = False) -> WebDataset:
    """Return a source of the listed tars, with the columns of their first sample.

    Args:
        listing: listing of the tars.
        strict: whether a tar without an end marker is an error instead of a note.

    Raises:
        PackError: there is no tar or no sample, or the first tar is damaged.
    """
    tars = tuple(item for item in listing.objects if not listing.is_folder or item.key.lower().endswith(".tar"))
    if not tars:
        raise PackError(f"{listing.url} has no .tar files; check the URL, or use another --kind")
    for tar in tars:
        async with aclosing(_read_samples(listing, tar, span_bytes=PEEK_SPAN_BYTES)) as samples:
            async for where, sample in samples:
                return WebDataset(listing, tars, _infer_schema(where, sample), strict=strict)
    raise PackError(f"{listing.url} has no samples: no file in it has a name with an extension")


def _infer_schema(where: str, sample: dict[str, Any]) -> Schema:
    kinds: dict[type, Column] = {int: _COLUMN_BY_EXTENSION["cls"], str: Text()}
    try:
        return Schema({name: kinds.get(type(value), Bytes()) for name, value in sample.items()})
    except SchemaError as error:
        raise PackError(f"{where}: {error}; rename the files' extensions") from None


async def _read_samples(
    listing: SourceListing,
    tar: ObjectInfo,
    *,
    span_bytes: int = STREAM_SPAN_BYTES,
    on_no_end: Callable[[], object] = lambda: None,
) -> AsyncGenerator[Sample, None]:
    """Yield the samples of one tar."""
    where, key = f"{listing.store.url}/{tar.key}", ""
    sample: dict[str, Any] = {}
    async with (
        aclosing(ByteStream(listing.store, tar, span_bytes=span_bytes)) as stream,
        aclosing(read_members(stream, where, on_no_end=on_no_end)) as members,
    ):
        async for member in members:
            match = _NAME_PATTERN.fullmatch(member.name)
            if match is None:
                continue
            if sample and match[1] != key:
                yield f"{where}: sample {key!r}", sample
                sample = {}
            key = match[1]
            name = key.encode("utf-8", "surrogateescape")
            sample = sample or {"key": _decode_text(name, f"{where}: the name {name!r}")}
            await _add_member(sample, match[2].lower(), member, f"{where}: {member.name!r}")
        if sample:
            yield f"{where}: sample {key!r}", sample


async def _add_member(sample: dict[str, Any], extension: str, member: TarMember, where: str) -> None:
    """Read a member into the sample."""
    column = extension.replace(".", "_")
    if column in sample:
        raise PackError(f"{where}: its sample has the column {column!r} already; give each file its own extension")
    held_bytes = sum(len(value) for value in sample.values() if not isinstance(value, int))
    check_fits(f"{where} makes a sample of", member.size_bytes + held_bytes, "split it")
    kind = _COLUMN_BY_EXTENSION.get(extension.rpartition(".")[2])
    data = await member.read()
    sample[column] = (
        data if kind is None else _decode_text(data, where) if isinstance(kind, Text) else _parse_integer(data, where)
    )


def _decode_text(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PackError(f"{where} is not UTF-8 text ({error}); convert it") from None


def _parse_integer(data: bytes, where: str) -> int:
    match = _INTEGER_PATTERN.fullmatch(data[:80])
    if match is None:
        raise PackError(f"{where} holds {data[:40]!r}, which is not an integer; a .cls file is a class index")
    return int(match[1])


@dataclass(frozen=True, slots=True)
class TarMember:
    """A regular file in a tar. Its content can be read only until the next member is requested.

    Attributes:
        name: path of the file, as the tar has it.
        size_bytes: size of the content.
        stream: stream of the tar, positioned at the content.
    """

    name: str
    size_bytes: int
    stream: ByteStream

    async def read(self) -> bytes:
        """Return the content."""
        return await self.stream.read(self.size_bytes)


async def read_members(
    stream: ByteStream, where: str, *, on_no_end: Callable[[], object] = lambda: None
) -> AsyncGenerator[TarMember, None]:
    """Yield the regular files of a tar in its order; skips folders, links and devices.

    Args:
        stream: the tar's bytes.
        where: name of the tar in error messages.
        on_no_end: called if the bytes end after a member without the block of zeros that ends a tar.

    Raises:
        PackError: the tar is damaged, truncated or compressed, or has a sparse file.
    """
    overrides: dict[str, str] = {}
    while stream.remaining_bytes:
        header = await _read_header(stream, where)
        if header is None:
            return
        is_extension = header.type in _EXTENSIONS
        has_content = is_extension or header.isreg() or header.type not in tarfile.SUPPORTED_TYPES
        size = header.size if is_extension else overrides.get("size", header.size)
        size_bytes = _parse_size(size, f"{where}: {header.name!r}") if has_content else 0
        end = stream.position + size_bytes + -size_bytes % _BLOCK_BYTES
        if size_bytes > stream.remaining_bytes:  # the padding after the last member may be missing
            raise PackError(
                f"{where} is truncated: {header.name!r} should have {size_bytes} bytes; create the tar again"
            )
        if is_extension:
            overrides |= await _read_extension(stream, header, size_bytes, where)
        else:
            if header.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in overrides):
                raise PackError(f"{where} holds the sparse file {header.name!r}; create the tar without --sparse")
            if header.isreg():
                yield TarMember(overrides.get("path", header.name), size_bytes, stream)
            overrides = {}
        await stream.skip(min(end - stream.position, stream.remaining_bytes))
    on_no_end()


async def _read_header(stream: ByteStream, where: str) -> tarfile.TarInfo | None:
    """Return the next header, None at the end of the archive."""
    if stream.remaining_bytes < _BLOCK_BYTES:
        raise PackError(f"{where} is truncated in a header; create the tar again")
    try:
        block = await stream.read(_BLOCK_BYTES)
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape") if any(block) else None
    except (tarfile.HeaderError, ValueError) as error:
        raise PackError(
            f"{where} is not a tar, or damaged before byte {stream.position} ({error}); decompress a compressed "
            "tar first"
        ) from None


def _parse_size(value: int | str, where: str) -> int:
    try:
        size_bytes = int(value)
    except ValueError:
        size_bytes = -1
    if size_bytes < 0:
        raise PackError(f"{where} has the impossible size {str(value)[:40]}; create the tar again")
    return size_bytes


async def _read_extension(stream: ByteStream, header: tarfile.TarInfo, size_bytes: int, where: str) -> dict[str, str]:
    """Return the attributes of the next member from a pax or GNU extension."""
    if header.type in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
        return {}  # attributes of all members and link targets are not needed
    if size_bytes > _MAX_EXTENDED_BYTES:
        raise PackError(f"{where} has an extended header of {size_bytes} bytes; create the tar again")
    data = await stream.read(size_bytes)
    if header.type == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.partition(b"\0")[0].decode("utf-8", "surrogateescape")}
    try:
        return dict(_parse_pax_records(data))
    except ValueError:
        raise PackError(
            f"{where} has a damaged pax header before byte {stream.position}; create the tar again"
        ) from None


def _parse_pax_records(data: bytes) -> list[tuple[str, str]]:
    """Return the records, each ``<length> <key>=<value>`` and a newline; raise ValueError for a malformed one."""
    records, start = [], 0
    while start < len(data) and data[start]:
        digits, _, _ = data[start : start + 20].partition(b" ")
        end = start + int(digits)
        key, equals, value = data[start + len(digits) + 1 : end - 1].partition(b"=")
        if not digits.isdigit() or not equals or end > len(data) or data[end - 1 : end] != b"\n":
            raise ValueError("bad pax record")
        records.append((key.decode(), value.decode("utf-8", "surrogateescape")))
        start = end
    return records
