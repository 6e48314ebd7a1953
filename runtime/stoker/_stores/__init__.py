"""Buckets behind one protocol: S3, Google Cloud Storage, a local folder, memory; and data sets that are served."""

from __future__ import annotations

import os
from importlib import import_module

from stoker._stores.location import parse_url
from stoker._stores.options import GcsOptions, HttpOptions, S3Options, ServedOptions, StoreOptions
from stoker.abc import Buffer, ObjectInfo, Presigner, Readable, Store, Writable
from stoker.errors import ConfigError, MissingExtraError

__all__ = [
    "Buffer",
    "GcsOptions",
    "HttpOptions",
    "ObjectInfo",
    "Presigner",
    "Readable",
    "S3Options",
    "ServedOptions",
    "Store",
    "StoreOptions",
    "Writable",
    "open_store",
]

# Scheme → module, adapter, its options, its extra. An adapter and its SDK are imported when a URL of theirs is opened.
_ADAPTERS: dict[str, tuple[str, str, type[StoreOptions] | None, str]] = {
    "memory": ("stoker._stores.memory", "MemoryStore", None, ""),
    "file": ("stoker._stores.local", "LocalStore", None, ""),
    "s3": ("stoker._stores.s3", "S3Store", S3Options, "s3"),
    "gs": ("stoker._stores.gcs", "GcsStore", GcsOptions, "gcs"),
    "stoker+https": ("stoker._stores.http_store", "HttpStore", ServedOptions, ""),
    "stoker+http": ("stoker._stores.http_store", "HttpStore", ServedOptions, ""),
}


def open_store(url: str | os.PathLike[str], *, options: StoreOptions | None = None) -> Store:
    """Open the store at a path or a ``file://``, ``s3://``, ``gs://``, ``memory://`` or ``stoker+https://`` URL.

    Nothing is read, connected to or created before the store's first use, and no cloud SDK is imported for another
    store's URL.

    Raises:
        ConfigError: the URL is malformed, or ``options`` are those of another kind of store.
        MissingExtraError: the store's optional dependency is not installed.
    """
    location = parse_url(url)
    module, adapter, options_type, extra = _ADAPTERS[location.scheme]
    if options is None and options_type is not None:
        options = options_type()
    if options is not None and (options_type is None or not isinstance(options, options_type)):
        raise ConfigError(f"{location.url} takes no {type(options).__name__}")
    try:
        opened: Store = getattr(import_module(module), adapter)(location, options)
    except ModuleNotFoundError as error:
        if not extra:
            raise
        raise MissingExtraError(f"{location.url} needs {error.name}; pip install 'stoker[{extra}]'") from error
    return opened
