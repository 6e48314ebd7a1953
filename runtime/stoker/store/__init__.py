"""Buckets behind one protocol: S3, Google Cloud Storage, a local folder, memory."""

from __future__ import annotations

import os
from importlib import import_module

from stoker.errors import ConfigError, MissingExtraError
from stoker.store.location import parse_url
from stoker.store.options import GcsOptions, HttpOptions, S3Options, StoreOptions
from stoker.store.protocol import Buffer, ObjectInfo, Readable, Store, Writable

__all__ = [
    "Buffer",
    "GcsOptions",
    "HttpOptions",
    "ObjectInfo",
    "Readable",
    "S3Options",
    "Store",
    "Writable",
    "open_store",
]

# Scheme → module, adapter, extra. Adapters that use an SDK are imported only when a URL of theirs is opened.
_ADAPTERS = {
    "memory": ("stoker.store.memory", "MemoryStore", ""),
    "file": ("stoker.store.local", "LocalStore", ""),
    "s3": ("stoker.store.s3", "S3Store", "s3"),
    "gs": ("stoker.store.gcs", "GcsStore", "gcs"),
}


def open_store(url: str | os.PathLike[str], *, options: StoreOptions | None = None) -> Store:
    """Open the store at a path or a ``file://``, ``s3://``, ``gs://`` or ``memory://`` URL.

    Nothing is read, connected to or created before the store's first use, and no cloud SDK is imported for another
    store's URL.

    Raises:
        ConfigError: the URL is malformed, or ``options`` are those of another kind of store.
        MissingExtraError: the store's optional dependency is not installed.
    """
    location = parse_url(url)
    kinds = {"s3": S3Options, "gs": GcsOptions}
    if options is not None and not isinstance(options, kinds.get(location.scheme, ())):
        raise ConfigError(f"{location.url} takes no {type(options).__name__}")
    module, adapter, extra = _ADAPTERS[location.scheme]
    try:
        opened: Store = getattr(import_module(module), adapter)(location, options)
    except ModuleNotFoundError as error:
        if not extra:
            raise
        raise MissingExtraError(f"{location.url} needs {error.name}; pip install 'stoker[{extra}]'") from error
    return opened
