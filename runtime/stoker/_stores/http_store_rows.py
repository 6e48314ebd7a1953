"""Which row of which version an object of a served data set is: a function serves rows, a manifest speaks of keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate

from stoker._format.manifest import Manifest, version_key
from stoker.abc import ObjectInfo

__all__ = ["RowIndex", "super_samples", "version_of"]

_DATA_KEY = re.compile(r"data/([0-9a-f]{16})/([0-9]{8,10})", re.ASCII)
_VERSION_KEY = re.compile(r"manifests/([0-9]{8,9})\.safetensors", re.ASCII)


class RowIndex:
    """Learns manifests, and knows then at which row of one of them an object stands. Keeps their runs, no rows."""

    def __init__(self) -> None:
        # Run → its stretches: first number and rows → the newest version that has just that, and the first row there.
        self._stretches: dict[str, dict[tuple[int, int], tuple[int, int]]] = {}
        self._versions: set[int] = set()

    def __contains__(self, version: int) -> bool:
        return version in self._versions

    def learn(self, manifest: Manifest) -> None:
        """Take note of what a version holds."""
        if manifest.version in self._versions:
            return
        self._versions.add(manifest.version)
        first_rows = accumulate((run.rows for run in manifest.runs), initial=0)
        for run, first_row in zip(manifest.runs, first_rows, strict=False):
            stretches = self._stretches.setdefault(run.run, {})
            stretch = run.first_number, run.rows
            stretches[stretch] = max(stretches.get(stretch, (0, 0)), (manifest.version, first_row))

    def path_of(self, key: str) -> str | None:
        """Return the path, below the data set's, at which a super-sample is served; None if no known version has it."""
        match = _DATA_KEY.fullmatch(key)
        if match is None:
            return None
        number = int(match[2])
        found = [
            (version, first_row + number - first_number)
            for (first_number, rows), (version, first_row) in self._stretches.get(match[1], {}).items()
            if first_number <= number < first_number + rows
        ]
        if not found:
            return None
        version, row = max(found)  # the newest: an older one may be deleted first
        return f"super-samples/{row}?version={version}"


def version_of(key: str) -> int | None:
    """Return which version of the manifest a key is of, None if it is not one's."""
    match = _VERSION_KEY.fullmatch(key)
    version = int(match[1]) if match else 0
    return version if version and version_key(version) == key else None


def super_samples(manifest: Manifest, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
    """Yield super-samples of a version: keys that start with ``prefix``, ascending, after ``start_after``."""
    if not ("data/".startswith(prefix) or prefix.startswith("data/")):
        return
    for key, row in sorted((manifest.key(row), row) for row in range(len(manifest))):
        if key.startswith(prefix) and key > start_after:
            ref = manifest.ref(row)
            yield ObjectInfo(key=key, size_bytes=ref.size_bytes, tag=ref.tag)
