"""A packed data set as plain bytes, for stores of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stoker import Schema
from stoker._fetch.gather import RaggedValues
from stoker._format.manifest import Manifest, ManifestRows, PackRun
from support.supersamples import ORIGIN, RUN, built

__all__ = ["packed_objects", "value_at"]


def packed_objects(
    schema: Schema, samples: Sequence[Mapping[str, Any]], counts: Sequence[int], tag: str = "v1"
) -> tuple[Manifest, dict[str, bytes]]:
    """Return a manifest, and its objects by key: ``counts[i]`` of the samples, in order, in super-sample ``i``."""
    packed, bodies, first = [], [], 0
    for ordinal, count in enumerate(counts):
        body, entry = built(schema, samples[first : first + count], replace(ORIGIN, ordinal=ordinal))
        packed.append(replace(entry, tag=tag))
        bodies.append(body)
        first += count
    manifest = Manifest(
        dataset="digits", version=1, schema=schema, rows=ManifestRows.of(packed), runs=(PackRun(RUN, 0, len(packed)),)
    )
    return manifest, {manifest.key(row): body for row, body in enumerate(bodies)}


def value_at(values: Any, place: int) -> Any:
    """Return one value of a gathered column in a form that ``==`` compares: bytes, text or nested lists."""
    value = values[place]
    if isinstance(values, RaggedValues) and not isinstance(value, np.ndarray):
        return value
    return value.tolist()
