"""What caches call objects: names that say what the bytes must be, and which row of a manifest has such a name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from stoker.manifest import Manifest
from stoker.tier import ObjectRef

__all__ = ["is_name", "name_of", "rows_of", "size_of"]

_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)


def name_of(ref: ObjectRef) -> str:
    """Return an object's name: its checksum, its size and a hash of its key, 32 hexadecimal digits."""
    return f"{ref.crc32c:08x}{ref.size_bytes:08x}{blake2b(ref.key.encode(), digest_size=8).hexdigest()}"


def is_name(text: str) -> bool:
    """Return whether a text could be the name of an object."""
    return _NAME.fullmatch(text) is not None


def size_of(name: str) -> int:
    """Return how many bytes the object of a name has."""
    return int(name[8:16], 16)


def rows_of(names: Iterable[str], manifest: Manifest) -> dict[str, int]:
    """Return the rows of those names that a manifest has. Looks at no more keys than there are names, mostly."""
    rows = manifest.rows
    pinned = (rows.crc32c.astype(np.uint64) << np.uint64(32)) | rows.size_bytes.astype(np.uint64)
    order = np.argsort(pinned, kind="stable")
    found: dict[str, int] = {}
    for name in names:
        wanted = np.uint64(int(name[:16], 16))
        first, end = (int(np.searchsorted(pinned, wanted, side, sorter=order)) for side in ("left", "right"))
        for row in order[first:end].tolist():
            if name_of(manifest.ref(row)) == name:
                found[name] = row
    return found
