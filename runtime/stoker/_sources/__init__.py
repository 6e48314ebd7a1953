"""Where samples come from: folders of files or images, numpy files, WebDataset tars; each at any store URL.

Another package adds a kind by an entry point of the group ``stoker.sources``; see :class:`stoker.abc.Source`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence

from stoker._base.plugins import load_plugin, plugin_names
from stoker._base.sizes import counted
from stoker._base.task_group import for_each
from stoker._format.manifest import POINTER_KEY
from stoker._format.schema import Schema
from stoker._sources.arrays import open_npy, open_npz
from stoker._sources.containers import BEGINNING_BYTES, begins_like, named_like, remedy_for
from stoker._sources.folders import is_image, open_files, open_image_folder
from stoker._sources.listing import ARCHIVES, ObjectSource, list_source, read
from stoker._sources.webdataset import open_webdataset
from stoker._stores.options import StoreOptions
from stoker.abc import ObjectInfo, Readable, Sample, Source, SourceListing, Store
from stoker.errors import ConfigError

__all__ = ["KINDS", "ObjectSource", "Sample", "detect_kind", "open_source"]

_GROUP = "stoker.sources"
_BUILT_IN = ("image-folder", "files", "npy", "npz", "webdataset")
_READS_AT_ONCE = 16
_MAX_SUFFIXES = 32
_BY_SUFFIX = dict(zip(ARCHIVES, ("npy", "npz", "webdataset"), strict=True))


class _Kinds(Collection[str]):
    """The kinds of sources, built-in ones first. Plug-ins are looked for only where a kind is none of these."""

    def __contains__(self, kind: object) -> bool:
        return kind in _BUILT_IN or kind in plugin_names(_GROUP)

    def __iter__(self) -> Iterator[str]:
        yield from _BUILT_IN
        yield from (name for name in plugin_names(_GROUP) if name not in _BUILT_IN)

    def __len__(self) -> int:
        return sum(1 for _ in self)


KINDS = _Kinds()


async def open_source(
    url: str | os.PathLike[str],
    kind: str | None = None,
    options: StoreOptions | None = None,
    *,
    strict: bool = False,
    follow_links: bool = False,
    wrap: Callable[[Store], Store] | None = None,
) -> ObjectSource:
    """List what is at a path or store URL and return it as samples; the caller closes it.

    Args:
        url: a folder, an ``.npy``, ``.npz`` or ``.tar`` file, or several tars as ``train-{000..009}.tar``. For
            the kinds of plug-ins, whatever has a suffix is a file.
        kind: one of ``KINDS``; by default what :func:`detect_kind` says.
        options: how to reach the store.
        strict: raise where a tar has no end marker, so that it may be cut off, instead of noting it.
        follow_links: take in what links in a local folder lead to outside of it.
        wrap: returns the store to read through, given the source's own: one that counts, say.

    Raises:
        ConfigError: the kind is unknown, cannot be told, or not that of what is there; or links lead out of the folder.
        PackError: there is nothing to pack, or it is damaged.
        StoreError: the store cannot be read.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"there is no kind of source {kind!r}; use one of {', '.join(KINDS)}")
    listing = await list_source(
        url, options, follow_links=follow_links, any_suffix=kind not in (None, *_BUILT_IN), wrap=wrap
    )
    try:
        return await _opened(listing, kind, strict=strict)
    except BaseException:
        await listing.store.close()
        raise


async def _opened(listing: SourceListing, said: str | None, *, strict: bool) -> ObjectSource:
    kind = said or detect_kind(listing)
    if kind not in _BUILT_IN:
        return await _open_plugin(listing, kind)
    if kind in ("npy", "npz"):
        if len(listing.objects) != 1 or listing.is_folder:
            raise ConfigError(
                f"--kind {kind} is for one file, not for {listing.url}; pack its files one by one, "
                "with --append from the second"
            )
        return await (open_npy if kind == "npy" else open_npz)(listing)
    if kind == "webdataset":
        return await open_webdataset(listing, strict=strict)
    if not listing.is_folder:
        raise ConfigError(f"--kind {kind} is for a folder, not for {listing.url}; give the folder it is in")
    if kind == "image-folder":
        return open_image_folder(listing, is_said=said is not None)
    if said is None:
        _check_no_containers(listing, await _containers(listing.store, listing.objects))
    return open_files(listing)


async def _open_plugin(listing: SourceListing, kind: str) -> ObjectSource:
    """Return the source that an entry point makes of a listing."""
    opener: Callable[[SourceListing], Awaitable[object]] = load_plugin(_GROUP, kind, "source")
    source = await opener(listing)
    if not isinstance(source, Source):
        raise ConfigError(
            f"the plug-in of sources of kind {kind} returned a {type(source).__name__}, which has no 'schema' and "
            "'read'; have it return a stoker.abc.Source"
        )
    return _PluginSource(kind, source, listing)


class _PluginSource(ObjectSource):
    """A plug-in's source, and what follows from its objects."""

    def __init__(self, kind: str, source: Source, listing: SourceListing) -> None:
        super().__init__(kind, Schema(source.schema), listing, listing.objects)
        self._source = source

    def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        return self._source.read(start)


def detect_kind(listing: SourceListing) -> str:
    """Return the kind of what is listed.

    A file's suffix says it. A folder is ``webdataset`` if it has nothing but ``.tar`` files; ``image-folder`` if it has
    sub-folders with nothing but images in them (files beside the sub-folders do not matter); ``files`` if it has
    neither images in sub-folders nor files whose names are those of tables, arrays or archives.

    Raises:
        ConfigError: none of this is so, or the folder is a data set.
    """
    keys = [item.key for item in listing.objects]
    if not listing.is_folder:
        return _BY_SUFFIX[keys[0][-4:].lower()]
    if POINTER_KEY in keys:
        raise _unclear(listing, "it is a data set already", "copy it with the store's own tools")
    return _kind_of_folder(listing, keys)


def _kind_of_folder(listing: SourceListing, keys: Sequence[str]) -> str:
    tars = sum(key.lower().endswith(".tar") for key in keys)
    nested = [key for key in keys if "/" in key]
    odd = [key for key in nested if not is_image(key)]
    if tars == len(keys):
        return "webdataset"
    if nested and not odd:
        return "image-folder"
    if images := len(nested) - len(odd):
        what = f"{images} of {len(nested)} files in sub-folders are images, {odd[0]} is not"
        raise _unclear(listing, what, "--kind image-folder to leave the others out")
    if tars:
        raise _unclear(listing, f"{tars} of {len(keys)} files are tars", "--kind webdataset to leave the others out")
    _check_no_containers(listing, {key: container for key in keys if (container := named_like(key))})
    return "files"


def _check_no_containers(listing: SourceListing, found: Mapping[str, str]) -> None:
    """Raise ConfigError if some files are containers of samples, by key."""
    if found:
        first, kind = next(iter(found.items()))
        what = f"it holds {counted(len(found), 'file')} with many samples each (first: {first}, {kind})"
        raise _unclear(listing, what, remedy_for(kind))


async def _containers(store: Readable, objects: Iterable[ObjectInfo]) -> dict[str, str]:
    """Return key → kind of those files that begin like containers.

    Only the first and the largest file of each suffix are looked at: at most 64 small reads.

    Raises:
        StoreError: the store could not be read.
    """
    looked_at: dict[str, tuple[ObjectInfo, ObjectInfo]] = {}
    for item in objects:
        _, dot, suffix = item.key.rpartition("/")[2].lower().rpartition(".")
        suffix = suffix if dot else ""
        first, largest = looked_at.get(suffix, (item, item))
        if suffix in looked_at or len(looked_at) < _MAX_SUFFIXES:
            looked_at[suffix] = first, item if item.size_bytes > largest.size_bytes else largest
    found: dict[str, str] = {}

    async def look(item: ObjectInfo) -> None:
        beginning = await read(store, item, 0, min(BEGINNING_BYTES, item.size_bytes))
        if kind := begins_like(bytes(beginning), item.key):
            found[item.key] = kind

    chosen = {item.key: item for pair in looked_at.values() for item in pair}
    await for_each(chosen.values(), look, concurrency=_READS_AT_ONCE)
    return dict(sorted(found.items()))


def _unclear(listing: SourceListing, what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{listing.url}: {what}, so its kind is unclear; say --kind files to pack each file as it is, or {remedy}"
    )
