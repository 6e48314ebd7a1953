"""Units of super-samples that exist only in a manifest's rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stoker._format.manifest import ManifestRows
from stoker._order.units import Units


def units_of(samples: Sequence[int], body_bytes: Sequence[int] | None = None, unit_bytes: int | None = None) -> Units:
    """Return the units of super-samples of some samples and sizes, behind heads of 10 bytes."""
    bodies = np.zeros(len(samples), np.int64) if body_bytes is None else np.array(body_bytes, np.int64)
    zeros = np.zeros(len(samples), "<u4")
    heads = np.where(bodies + 10 < 1 << 32, 10, 0)
    rows = ManifestRows(
        size_bytes=(bodies + heads).astype("<u4"),
        samples=np.array(samples, "<u4"),
        head_bytes=heads.astype("<u4"),
        head_crc32c=zeros,
        crc32c=zeros,
        tags=("",) * len(samples),
    )
    return Units.of(rows, unit_bytes)
