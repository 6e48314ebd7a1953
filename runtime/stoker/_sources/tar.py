"""The members of a tar, read as a stream. Nothing is extracted: a member is a name and bytes, whatever it claims.

Headers are parsed by the standard library's ``tarfile``; this module follows the rules of POSIX.1-2001 pax and of GNU
for long names, and bounds what a header can make it allocate.
"""

from __future__ import annotations

import tarfile
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from stoker._pack.object_reading import ByteStream
from stoker.errors import PackError

__all__ = ["BLOCK_BYTES", "Member", "members"]

_MAX_EXTENDED_BYTES = 1 << 20
BLOCK_BYTES = tarfile.BLOCKSIZE


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in a tar. Its bytes have to be read, if at all, before the next member is asked for.

    Attributes:
        name: its path, as it stands there.
        size_bytes: of its content.
        stream: stands at its content.
    """

    name: str
    size_bytes: int
    stream: ByteStream

    async def read(self) -> bytes:
        """Return the content."""
        return await self.stream.read(self.size_bytes)


async def members(
    stream: ByteStream, where: str, *, on_no_end: Callable[[], object] = lambda: None
) -> AsyncGenerator[Member, None]:
    """Yield the regular files of a tar in its order; folders, links and devices are passed over.

    Args:
        stream: the tar's bytes.
        where: what to call the tar in an error.
        on_no_end: called where the bytes end at a member's border without the block of zeros that ends a tar.

    Raises:
        PackError: the tar is damaged, cut off, compressed, or has a sparse file.
    """
    overrides: dict[str, str] = {}
    while stream.remaining:
        header = await _header(stream, where)
        if header is None:
            return
        has_content = header.isreg() or header.type not in tarfile.SUPPORTED_TYPES
        size_bytes = _size(overrides, header, where) if has_content or _is_extension(header) else 0
        end = stream.position + size_bytes + -size_bytes % BLOCK_BYTES
        if size_bytes > stream.remaining:  # the padding behind the last member may be missing
            raise PackError(f"{where} is cut off: {header.name!r} is to have {size_bytes} bytes; make the tar again")
        if _is_extension(header):
            overrides |= await _extension(stream, header, size_bytes, where)
        else:
            if header.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in overrides):
                raise PackError(f"{where} holds the sparse file {header.name!r}; make the tar without --sparse")
            if header.isreg():
                yield Member(overrides.get("path", header.name), size_bytes, stream)
            overrides = {}
        await stream.skip(min(end - stream.position, stream.remaining))
    on_no_end()


async def _header(stream: ByteStream, where: str) -> tarfile.TarInfo | None:
    """Return the next header, None at the end of the archive."""
    if stream.remaining < BLOCK_BYTES:
        raise PackError(f"{where} is cut off in a header; make the tar again")
    try:
        block = await stream.read(BLOCK_BYTES)
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape") if any(block) else None
    except (tarfile.HeaderError, ValueError) as error:
        raise PackError(
            f"{where} is not a tar, or damaged before byte {stream.position} ({error}); a compressed one has to be "
            "decompressed first"
        ) from None


def _is_extension(header: tarfile.TarInfo) -> bool:
    return header.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, *_GNU_LONG)


_GNU_LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


def _size(overrides: dict[str, str], header: tarfile.TarInfo, where: str) -> int:
    text = header.size if _is_extension(header) else overrides.get("size", header.size)
    try:
        size_bytes = int(text)
    except ValueError:
        size_bytes = -1
    if size_bytes < 0:
        raise PackError(f"{where}: {header.name!r} has the impossible size {str(text)[:40]}; make the tar again")
    return size_bytes


async def _extension(stream: ByteStream, header: tarfile.TarInfo, size_bytes: int, where: str) -> dict[str, str]:
    """Return what a pax or GNU extension says of the next member."""
    if header.type in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
        return {}  # passed over: what it could say of all members, or of a link's target, is of no interest here
    if size_bytes > _MAX_EXTENDED_BYTES:
        raise PackError(f"{where} has an extended header of {size_bytes} bytes; make the tar again")
    data = await stream.read(size_bytes)
    if header.type == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.partition(b"\0")[0].decode("utf-8", "surrogateescape")}
    try:
        return dict(_pax_records(data))
    except ValueError:
        raise PackError(f"{where} has a damaged pax header before byte {stream.position}; make the tar again") from None


def _pax_records(data: bytes) -> list[tuple[str, str]]:
    """Return the records, each ``<length> <key>=<value>`` and a newline; a bad one is a ValueError."""
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
