"""Sources of samples at any store URL: folders of files or images, NumPy files and WebDataset tars.

Another package adds a kind by an entry point of the group ``stoker.sources``; see :class:`stoker.abc.Source`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence

from stoker._base.plugins import load_plugin, plugin_names
from stoker._base.sizes import format_count
from stoker._base.task_group import for_each
from stoker._format.manifest import POINTER_KEY
from stoker._format.schema import Schema
from stoker._sources.arrays import open_npy, open_npz
from stoker._sources.containers import SNIFFED_BYTES, detect_by_content, detect_by_name, remedy_for
from stoker._sources.folders import is_image, open_files, open_image_folder
from stoker._sources.listing import ARCHIVES, ObjectSource, list_source, read_object
from stoker._sources.webdataset import open_webdataset
from stoker._stores.options import StoreOptions
from stoker.abc import ObjectInfo, Readable, Sample, Source, SourceListing, Store
from stoker.errors import ConfigError

__all__ = ["KINDS", "ObjectSource", "Sample", "detect_kind", "open_source"]

_ENTRY_POINT_GROUP = "stoker.sources"
_BUILT_IN = ("image-folder", "files", "npy", "npz", "webdataset")
_MAX_CONCURRENT_READS = 16
_MAX_SUFFIXES = 32
_KIND_BY_SUFFIX = dict(zip(ARCHIVES, ("npy", "npz", "webdataset"), strict=True))


class _Kinds(Collection[str]):
    """The kinds of sources, built-in ones first; plug-ins are searched only for a kind that is not built in."""

    def __contains__(self, kind: object) -> bool:
        return kind in _BUILT_IN or kind in plugin_names(_ENTRY_POINT_GROUP)

    def __iter__(self) -> Iterator[str]:
        yield from _BUILT_IN
        yield from (name for name in plugin_names(_ENTRY_POINT_GROUP) if name not in _BUILT_IN)

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
    """List the objects at a path or store URL and return them as a source of samples; the caller closes it.

    Args:
        url: a folder, an ``.npy``, ``.npz`` or ``.tar`` file, or several tars as ``train-{000..009}.tar``. For
            a plug-in's kind, a URL with any suffix is a file.
        kind: one of ``KINDS``; by default the result of :func:`detect_kind`.
        options: options of the store.
        strict: whether a tar without an end marker, which may be truncated, is an error instead of a note.
        follow_links: whether links that lead out of a local folder are followed.
        wrap: function that wraps the source's store, for example to count requests.

    Raises:
        ConfigError: the kind is unknown, unclear or does not fit the objects, or links lead out of the folder.
        PackError: there is nothing to pack, or the data is damaged.
        StoreError: the store cannot be read.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"there is no kind of source {kind!r}; use one of {', '.join(KINDS)}")
    listing = await list_source(
        url, options, follow_links=follow_links, any_suffix=kind not in (None, *_BUILT_IN), wrap=wrap
    )
    try:
        return await _open_listing(listing, kind, strict=strict)
    except BaseException:
        await listing.store.close()
        raise


async def _open_listing(listing: SourceListing, given_kind: str | None, *, strict: bool) -> ObjectSource:
    kind = given_kind or detect_kind(listing)
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
        return open_image_folder(listing, is_explicit=given_kind is not None)
    if given_kind is None:
        _check_no_containers(listing, await _find_containers(listing.store, listing.objects))
    return open_files(listing)


async def _open_plugin(listing: SourceListing, kind: str) -> ObjectSource:
    """Return the source that a plug-in opens for a listing."""
    opener: Callable[[SourceListing], Awaitable[object]] = load_plugin(_ENTRY_POINT_GROUP, kind, "source")
    source = await opener(listing)
    if not isinstance(source, Source):
        raise ConfigError(
            f"the plug-in for sources of kind {kind} returned a {type(source).__name__}, which lacks 'schema' or "
            "'read'; it must return a stoker.abc.Source"
        )
    return _PluginSource(kind, source, listing)


class _PluginSource(ObjectSource):
    """A plug-in's source with the properties that follow from its objects, such as the fingerprint."""

    def __init__(self, kind: str, source: Source, listing: SourceListing) -> None:
        super().__init__(kind, Schema(source.schema), listing, listing.objects)
        self._source = source

    def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        return self._source.read(start)


def detect_kind(listing: SourceListing) -> str:
    """Return the kind of the listed objects.

    A file's kind follows from its suffix. A folder is ``webdataset`` if it has ``.tar`` files only; ``image-folder`` if
    its sub-folders have images only (files beside the sub-folders are ignored); ``files`` if it has neither images in
    sub-folders nor files with the names of tables, arrays or archives.

    Raises:
        ConfigError: no kind fits, or the folder is a data set.
    """
    keys = [item.key for item in listing.objects]
    if not listing.is_folder:
        return _KIND_BY_SUFFIX[keys[0][-4:].lower()]
    if POINTER_KEY in keys:
        raise _unclear_kind_error(listing, "it is a packed data set", "copy it with the store's own tools")
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
        problem = f"{images} of {len(nested)} files in sub-folders are images, {odd[0]} is not"
        raise _unclear_kind_error(listing, problem, "--kind image-folder to leave the others out")
    if tars:
        raise _unclear_kind_error(
            listing, f"{tars} of {len(keys)} files are tars", "--kind webdataset to leave the others out"
        )
    _check_no_containers(listing, {key: container for key in keys if (container := detect_by_name(key))})
    return "files"


def _check_no_containers(listing: SourceListing, containers: Mapping[str, str]) -> None:
    """Raise ConfigError if ``containers``, key → kind of container, has any file that holds many samples."""
    if containers:
        first, kind = next(iter(containers.items()))
        problem = f"it holds {format_count(len(containers), 'file')} with many samples each (first: {first}, {kind})"
        raise _unclear_kind_error(listing, problem, remedy_for(kind))


async def _find_containers(store: Readable, objects: Iterable[ObjectInfo]) -> dict[str, str]:
    """Return key → kind of the files that are containers by their first bytes.

    Reads the first and the largest file of each suffix only: at most 64 small reads.

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
    containers: dict[str, str] = {}

    async def inspect_item(item: ObjectInfo) -> None:
        beginning = await read_object(store, item, 0, min(SNIFFED_BYTES, item.size_bytes))
        if kind := detect_by_content(bytes(beginning), item.key):
            containers[item.key] = kind

    chosen = {item.key: item for pair in looked_at.values() for item in pair}
    await for_each(chosen.values(), inspect_item, concurrency=_MAX_CONCURRENT_READS)
    return dict(sorted(containers.items()))


def _unclear_kind_error(listing: SourceListing, problem: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{listing.url}: {problem}, so the kind of source is unclear; use --kind files to pack each file as it is, or "
        f"{remedy}"
    )
