"""Stores behind one protocol: S3, Google Cloud Storage, local folders, memory, and data sets served by functions."""

from __future__ import annotations

import os
from importlib import import_module
from typing import cast

from stoker._base.plugins import load_plugin, require_extra
from stoker._stores.location import STORE_ENTRY_POINTS, Location, parse_url
from stoker._stores.object_store import MeteredStore
from stoker._stores.options import GcsOptions, HttpOptions, S3Options, ServedOptions, StoreOptions
from stoker.abc import RangeReadable, Store
from stoker.errors import ConfigError, StokerError, StoreError

__all__ = [
    "ADAPTERS",
    "GcsOptions",
    "HttpOptions",
    "S3Options",
    "ServedOptions",
    "StoreOptions",
    "open_reader",
    "open_store",
    "url_of",
]

# Scheme → module, adapter, its options, its extra. An adapter and its SDK are imported when the first URL is opened.
ADAPTERS: dict[str, tuple[str, str, type[StoreOptions] | None, str]] = {
    "memory": ("stoker._stores.object_store", "MemoryStore", None, ""),
    "file": ("stoker._stores.local", "LocalStore", None, ""),
    "s3": ("stoker._stores.s3", "S3Store", S3Options, "s3"),
    "gs": ("stoker._stores.gcs", "GcsStore", GcsOptions, "gcs"),
    "stoker+https": ("stoker._stores.served_store", "ServedStore", ServedOptions, ""),
    "stoker+http": ("stoker._stores.served_store", "ServedStore", ServedOptions, ""),
}


def open_store(url: str | os.PathLike[str], *, options: StoreOptions | None = None) -> Store:
    """Open the store at a path or a ``file://``, ``s3://``, ``gs://``, ``memory://`` or ``stoker+https://`` URL.

    Plug-ins add other schemes by entry points in the group ``stoker.stores``, each a function that takes the URL and
    returns a store (:class:`stoker.abc.Store`). Opening neither connects nor reads nor creates anything, and imports
    only the SDK of the URL's own scheme. Every store has every method; one that a store cannot perform, such as writing
    to a data set that a function serves, raises a PermissionDeniedError.

    Example:
        >>> store = stoker.open_store("s3://bucket/train", options=S3Options(region="us-east-1"))
        >>> data, info = await store.get("manifest.safetensors")
        >>> len(data) == info.size_bytes
        True
        >>> await store.close()

    Args:
        url: location of the store: a path or a URL.
        options: options of the kind of store that the URL names; default those of its platform's environment.

    Raises:
        ConfigError: The URL is malformed, or ``options`` belong to another kind of store.
        MissingExtraError: The store's optional dependency is not installed, or a plug-in cannot be loaded.
    """
    location = parse_url(url)
    if location.scheme not in ADAPTERS:
        return _open_plugin(location, options)
    module, adapter, options_type, extra = ADAPTERS[location.scheme]
    if options is None and options_type is not None:
        options = options_type()
    if options is not None and options_type is None:
        raise ConfigError(
            f"{location.url} takes no options, but options= is of type {type(options).__name__}; leave it out"
        )
    if options_type is not None and not isinstance(options, options_type):
        raise ConfigError(f"options= of {location.url} must be {options_type.__name__}, not {type(options).__name__}")
    with require_extra(location.url, extra):
        store: Store = getattr(import_module(module), adapter)(location, options)
    return store


def _open_plugin(location: Location, options: StoreOptions | None) -> Store:
    if options is not None:
        raise ConfigError(
            f"{location.url} is opened by a plug-in, which takes no {type(options).__name__}; leave options= out"
        )
    opener = load_plugin(STORE_ENTRY_POINTS, location.scheme, "store for the scheme")
    try:
        return MeteredStore(opener(location.url))
    except StokerError:
        raise
    except Exception as error:
        raise StoreError(f"the plug-in {opener!r} failed to open {location.url}: {error!r}") from error


_READER_METHODS = ("url", "get_range", "head")


def open_reader(place: str | os.PathLike[str] | RangeReadable, *, options: StoreOptions | None = None) -> Store:
    """Return a store to read from: a store object as it is, or the one at a path or URL by :func:`open_store`.

    Raises:
        ConfigError: ``place`` is neither, or ``options`` are given for a store object; or see :func:`open_store`.
    """
    if isinstance(place, str | os.PathLike):
        return open_store(place, options=options)
    url = url_of(place)
    if options is not None:
        raise ConfigError(f"options= is for a URL, but {url} is a store object; configure it when you create it")
    return cast("Store", place)  # readers never write


def url_of(place: str | os.PathLike[str] | RangeReadable) -> str:
    """Return a path or URL as it is, or the URL of a store object.

    Raises:
        ConfigError: ``place`` is neither.
    """
    if isinstance(place, str | os.PathLike):
        return os.fspath(place)
    if isinstance(place, type):
        raise ConfigError(f"the store must be an instance of {place.__name__}, not the class itself")
    if missing := [name for name in _READER_METHODS if not hasattr(place, name)]:
        raise ConfigError(
            f"{place!r:.80} is neither a path or URL, nor a stoker.abc.Store: it lacks {', '.join(missing)}"
        )
    return place.url
