"""Which row of which version of the manifest a super-sample of a served data set is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

from stoker._format.manifest import Manifest, version_key
from stoker.abc import ObjectInfo

_DATA_KEY = re.compile(r"data/([0-9a-f]{16})/([0-9]{8,10})", re.ASCII)
_VERSION_KEY = re.compile(r"manifests/([0-9]{8,9})\.safetensors", re.ASCII)


class RowIndex:
    """Maps keys of super-samples to rows of the manifests added so far. Stores runs, no rows."""

    def __init__(self) -> None:
        # Run → (first number, number of rows) → version that has exactly these → their first row in it.
        self._runs: dict[str, dict[tuple[int, int], dict[int, int]]] = {}
        self._versions: list[int] = []  # newest first

    def __contains__(self, version: int) -> bool:
        return version in self._versions

    def learn(self, manifest: Manifest) -> None:
        """Add the runs of a manifest."""
        if manifest.version in self._versions:
            return
        self._versions = sorted((*self._versions, manifest.version), reverse=True)
        first_rows = accumulate((run.rows for run in manifest.runs), initial=0)
        for run, first_row in zip(manifest.runs, first_rows, strict=False):
            stretches = self._runs.setdefault(run.run, {})
            stretches.setdefault((run.first_number, run.rows), {})[manifest.version] = first_row

    def path_of(self, key: str) -> str | None:
        """Return the path of a super-sample below the data set's URL; None if no known version has it."""
        found = self.rows_of([key])  # in the newest version, since older ones are deleted first
        return found and f"super-samples/{found[1][0]}?version={found[0]}"

    def rows_of(self, keys: Sequence[str]) -> tuple[int, list[int]] | None:
        """Return the newest version that has all super-samples, and their rows in it; None if none is known."""
        for version in self._versions:
            rows = []
            for key in keys:
                if (row := self._row_in(version, key)) is None:
                    break
                rows.append(row)
            else:
                return version, rows
        return None

    def _row_in(self, version: int, key: str) -> int | None:
        match = _DATA_KEY.fullmatch(key)
        if match is None:
            return None
        number = int(match[2])
        for (first_number, rows), first_rows in self._runs.get(match[1], {}).items():
            if first_number <= number < first_number + rows and version in first_rows:
                return first_rows[version] + number - first_number
        return None


def version_of(key: str) -> int | None:
    """Return the version of the manifest with a key; None if it is not the key of a version."""
    match = _VERSION_KEY.fullmatch(key)
    version = int(match[1]) if match else 0
    return version if version and version_key(version) == key else None


def list_super_samples(manifest: Manifest, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
    """Yield a version's super-samples whose keys start with ``prefix`` and follow ``start_after``, ascending."""
    if not ("data/".startswith(prefix) or prefix.startswith("data/")):
        return
    for key, row in sorted((manifest.key(row), row) for row in range(len(manifest))):
        if key.startswith(prefix) and key > start_after:
            ref = manifest.ref(row)
            yield ObjectInfo(key=key, size_bytes=ref.size_bytes, tag=ref.tag)
