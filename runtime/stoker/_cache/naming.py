"""What caches call objects: names that say what the bytes must be, and which row of a manifest has such a name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from stoker._format.manifest import Manifest
from stoker.abc import ObjectRef

__all__ = ["NameIndex", "is_name", "name_of", "size_of"]

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


class NameIndex:
    """Which row of a manifest has which name. Takes 12 bytes a row.

    Args:
        manifest: is referred to.
    """

    def __init__(self, manifest: Manifest) -> None:
        rows = manifest.rows
        self._manifest = manifest
        pinned = (rows.crc32c.astype(np.uint64) << np.uint64(32)) | rows.size_bytes.astype(np.uint64)
        self._order = np.argsort(pinned, kind="stable").astype(np.uint32)
        self._pinned = pinned[self._order]

    def rows(self, names: Iterable[str]) -> dict[str, int]:
        """Return the rows of those names that the manifest has. Looks at no more keys than there are names, mostly."""
        found: dict[str, int] = {}
        for name in names:
            wanted = np.uint64(int(name[:16], 16))
            first, end = (int(np.searchsorted(self._pinned, wanted, side)) for side in ("left", "right"))
            for row in self._order[first:end].tolist():
                if name_of(self._manifest.ref(row)) == name:
                    found[name] = row
        return found
