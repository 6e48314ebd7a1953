"""Parts of a source: cut where it is known whole, opened where one of them is packed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeVar

from stoker._base.retry import RetryingStore
from stoker._format.schema import Schema
from stoker._pack.part import PART_KINDS, KeySlice, Part
from stoker._pack.plan import schema_difference
from stoker._sources.arrays import open_npy, open_npz
from stoker._sources.folders import FolderSource, belongs
from stoker._sources.listing import ObjectSource, fingerprint_of, listed_between
from stoker._sources.webdataset import open_webdataset
from stoker.abc import ObjectInfo, Sample, SourceListing
from stoker.errors import ConfigError, PackError, SchemaError

__all__ = ["Samples", "grouped", "open_part", "split"]

T = TypeVar("T")

MAX_PART_OBJECTS = 20_000  # at 1,000 reads a second a part takes a third of a minute
_MAX_NAMED_OBJECTS = 500  # more than these are named by the first and last of them: events are limited to 1 MB or less


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a part.

    Attributes:
        source: that they are read from.
        start: number of the part's first sample in the source.
        end: number behind its last; None if only the end of the source tells.
    """

    source: ObjectSource
    start: int = 0
    end: int | None = None

    async def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        """Yield the part's samples from its number ``start`` on; see :meth:`stoker.abc.Source.read`."""
        number = self.start + start
        if number == self.end:
            return
        async with aclosing(self.source.read(number)) as samples:
            async for sample in samples:
                yield sample
                number += 1
                if number == self.end:
                    return


def split(source: ObjectSource, part: Part, part_bytes: int) -> Iterator[Part]:
    """Yield the parts that ``source`` consists of, in order of its samples; the same ones every time.

    Args:
        source: as a whole.
        part: what all of them have in common; its objects do not matter.
        part_bytes: how large the raw objects of a part are together, at most; an object that is larger is a part
            alone, unless it is an array, which is cut between its rows.

    Raises:
        ConfigError: the source is of a plug-in's kind, which functions do not have.
    """
    if source.kind not in PART_KINDS:
        raise ConfigError(
            f"functions pack sources of kind {', '.join(PART_KINDS)}, not {source.kind!r}; pack it in this process, "
            "without --on"
        )
    base = replace(part, source=source.root, kind=source.kind, schema=source.schema, objects=())
    if source.kind == "npy" and source.samples is not None:
        rows = max(1, part_bytes * source.samples // source.size_bytes)
        for start in range(0, source.samples, rows):
            yield replace(base, objects=source.objects, rows=(start, min(start + rows, source.samples)))
        return
    after = ""
    sizes = attrgetter("size_bytes")
    for group in grouped(source.objects, sizes, most_bytes=part_bytes, most_items=MAX_PART_OBJECTS):
        # Whoever opens a slice lists it again, and follows no links out of the folder.
        can_be_slice = isinstance(source, FolderSource) and not source.follows_links
        if can_be_slice and len(group) > _MAX_NAMED_OBJECTS:
            fingerprint = fingerprint_of(source.kind, source.schema, group)
            keys = KeySlice(after=after, until=group[-1].key, objects=len(group), fingerprint=fingerprint)
            yield replace(base, keys=keys)
        else:
            yield replace(base, objects=tuple(group))
        after = group[-1].key


def grouped(
    items: Iterable[T], size_bytes: Callable[[T], int], *, most_bytes: int, most_items: int
) -> Iterator[list[T]]:
    """Yield consecutive items in groups of at most so many, and so many bytes; one that is larger is alone."""
    group: list[T] = []
    group_bytes = 0
    for item in items:
        if group and (group_bytes + size_bytes(item) > most_bytes or len(group) == most_items):
            yield group
            group, group_bytes = [], 0
        group.append(item)
        group_bytes += size_bytes(item)
    if group:
        yield group


async def open_part(part: Part, store: RetryingStore) -> Samples:
    """Return the samples of a part.

    Args:
        part: what to open.
        store: of the folder that its raw objects are in; stays the caller's.

    Raises:
        PackError: the raw objects are not those that the part was cut from, or damaged.
        SchemaError: they have other columns.
        StoreError: they could not be read.
    """
    objects = part.objects if part.keys is None else await _listed(part, part.keys, store)
    listing = SourceListing(part.source, store, tuple(objects), is_folder=False)
    if part.kind in ("files", "image-folder"):
        return Samples(FolderSource(part.kind, part.schema, listing, objects))
    source = await _OPENERS[part.kind](listing)
    _check_schema(part, source.schema)
    start, end = part.rows or (0, None)
    if end is not None and (source.samples is None or end > source.samples):
        raise PackError(f"{part.source}/{objects[0].key} has {source.samples} rows, not {end}: it was replaced")
    return Samples(source, start, end)


_OPENERS: dict[str, Callable[[SourceListing], Awaitable[ObjectSource]]] = {
    "npy": open_npy,
    "npz": open_npz,
    "webdataset": open_webdataset,
}


async def _listed(part: Part, keys: KeySlice, store: RetryingStore) -> Sequence[ObjectInfo]:
    listed = await listed_between(store, keys.after, keys.until)
    objects = [item for item in listed if belongs(part.kind, item.key)]
    if len(objects) != keys.objects or fingerprint_of(part.kind, part.schema, objects) != keys.fingerprint:
        raise PackError(
            f"{part.source} has changed between {keys.after!r} and {keys.until!r} since the pack was planned (it had "
            f"{keys.objects} objects there, and has {len(objects)}); plan it again"
        )
    return objects


def _check_schema(part: Part, found: Schema) -> None:
    if dict(found) != dict(part.schema):  # values have names: files of a tar may come in another order
        raise SchemaError(
            f"the samples of {part.source}/{part.objects[0].key} have {schema_difference(part.schema, found)}; all raw "
            "objects of a data set must have the same columns"
        )
