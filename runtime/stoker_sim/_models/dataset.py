"""Data sets that are described and not packed: a manifest like any other, of objects that nobody has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from stoker._format.manifest import Manifest, PackRun, Rows
from stoker._format.schema import Bytes, Schema
from stoker.errors import ConfigError

__all__ = ["bodiless", "described", "size_of"]

_RUN = "0" * 16


def described(*, super_samples: int, samples: int, super_sample_bytes: int, head_bytes: int = 4096) -> Manifest:
    """Return the manifest of a data set of so many super-samples that are all alike.

    Args:
        super_samples: how many.
        samples: in each.
        super_sample_bytes: size of each.
        head_bytes: of its head, at most the whole.

    Raises:
        ConfigError: a number is not positive, or more than the format has room for.
    """
    for name, number in (
        ("super_samples", super_samples),
        ("samples", samples),
        ("super_sample_bytes", super_sample_bytes),
    ):
        if not 0 < number < 1 << 32:
            raise ConfigError(f"{name} must be in [1, 2**32), not {number}")
    full = np.ones(super_samples, "<u4")
    rows = Rows(
        size_bytes=full * np.uint32(super_sample_bytes),
        samples=full * np.uint32(samples),
        head_bytes=full * np.uint32(min(head_bytes, super_sample_bytes)),
        head_crc32c=full * np.uint32(0),
        crc32c=full * np.uint32(0),
        tags=np.zeros((super_samples, 16), np.uint8),
    )
    schema = Schema({"data": Bytes()})
    return Manifest(dataset=_RUN, version=1, schema=schema, rows=rows, runs=(PackRun(_RUN, 0, super_samples),))


def bodiless(manifest: Manifest) -> Manifest:
    """Return a manifest whose objects all have the checksum of what is never there: 0."""
    rows = replace(manifest.rows, crc32c=np.zeros_like(manifest.rows.crc32c))
    return replace(manifest, rows=rows)


def size_of(manifest: Manifest) -> Callable[[str], int]:
    """Return a function that tells the size in bytes of an object of a manifest by its key; KeyError if it has none."""
    if len(manifest.runs) > 1:
        return {manifest.key(row): int(manifest.rows.size_bytes[row]) for row in range(len(manifest))}.__getitem__
    # Keys end in the row's number: no dictionary of a million keys is needed.
    first, prefix = manifest.runs[0].first_number, manifest.key(0).rpartition("/")[0]
    sizes = manifest.rows.size_bytes

    def of_one_run(key: str) -> int:
        folder, _, number = key.rpartition("/")
        if folder != prefix or not number.isdecimal() or not 0 <= int(number) - first < len(sizes):
            raise KeyError(key)
        return int(sizes[int(number) - first])

    return of_one_run
