"""Which row of which version an object of a served data set is: a function serves rows, a manifest speaks of keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from stoker.manifest import Manifest, version_key
from stoker.store.protocol import ObjectInfo

__all__ = ["RowIndex", "super_samples", "version_of"]

_DATA_KEY = re.compile(r"data/([0-9a-f]{16})/([0-9]{8,10})", re.ASCII)
_VERSION_KEY = re.compile(r"manifests/([0-9]{8,9})\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Consecutive super-samples of one run, and where they stand in a version of the manifest."""

    rows: int
    first_row: int
    version: int


class RowIndex:
    """Learns manifests, and knows then at which row of one of them an object stands. Keeps their runs, no rows."""

    def __init__(self) -> None:
        self._stretches: dict[str, dict[int, _Stretch]] = {}
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
            known = stretches.get(run.first_number)
            if known is None or (known.rows, known.version) < (run.rows, manifest.version):
                stretches[run.first_number] = _Stretch(run.rows, first_row, manifest.version)

    def path_of(self, key: str) -> str | None:
        """Return the path, below the data set's, at which a super-sample is served; None if no known version has it."""
        match = _DATA_KEY.fullmatch(key)
        if match is None:
            return None
        number = int(match[2])
        for first_number, stretch in self._stretches.get(match[1], {}).items():
            if first_number <= number < first_number + stretch.rows:
                return f"super-samples/{stretch.first_row + number - first_number}?version={stretch.version}"
        return None


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
