"""Super-samples and manifests with every kind of column, written by stoker's own writers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stoker import Array, Bytes, Column, Ragged, Schema, Text
from stoker._format.manifest import Manifest, ManifestRows, PackRun
from stoker._format.supersample import PackOrigin, SuperSampleBuilder, SuperSampleRecord
from stoker._format.tensorfile import DTYPES

RUN = "0123456789abcdef"
ORIGIN = PackOrigin(dataset="digits", run=RUN, ordinal=3)

EVERY_KIND = Schema(
    {
        "label": Array("int64", classes=("cat", "dög")),
        "image": Array("uint8", (5, 5, 3)),
        "jpeg": Bytes(),
        "caption": Text(),
        "tokens": Ragged("uint16"),
        "boxes": Ragged("float32", (4,)),
        "weight": Array("bfloat16", (2,)),
    }
)


def value_of(column: Column, rng: random.Random) -> Any:
    """Return a random value of ``column``, in a form that users may pass."""
    if isinstance(column, Text):
        return "".join(rng.choice("aé漢😀 ") for _ in range(rng.randrange(12)))
    if isinstance(column, Bytes):
        return rng.randbytes(rng.randrange(40))
    shape = column.shape if column.is_fixed else (rng.randrange(5), *column.shape)
    holder = column.dtype.holder
    count = int(np.prod(shape))
    if holder == np.dtype("?"):
        return np.array([rng.random() < 0.5 for _ in range(count)], bool).reshape(shape)
    return np.frombuffer(rng.randbytes(count * holder.itemsize), holder).reshape(shape)


def samples_of(schema: Schema, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``count`` random samples of ``schema``."""
    rng = random.Random(seed)
    return [{name: value_of(column, rng) for name, column in schema.items()} for _ in range(count)]


def built(
    schema: Schema, samples: Sequence[Mapping[str, Any]], origin: PackOrigin = ORIGIN
) -> tuple[bytes, SuperSampleRecord]:
    """Return the super-sample of ``samples`` and its manifest entry."""
    builder = SuperSampleBuilder(schema)
    for sample in samples:
        builder.add(schema.encode(sample))
    return builder.finish(origin)


def every_dtype() -> Schema:
    """Return a schema with a scalar, an array and a ragged column of every dtype."""
    columns: dict[str, Column] = {}
    for name in DTYPES:
        columns |= {f"{name}_scalar": Array(name), f"{name}_array": Array(name, (3, 2)), f"{name}_ragged": Ragged(name)}
    return Schema(columns)


def manifest_of(tags: Sequence[str], schema: Schema = EVERY_KIND) -> Manifest:
    """Return a manifest with one row for each of ``tags``."""
    packed = [
        SuperSampleRecord(
            ordinal=i,
            size_bytes=4000 + i,
            samples=3 + i,
            head_bytes=900 + 40 * i,
            head_crc32c=7 * i,
            crc32c=2**32 - 1 - i,
            tag=tag,
        )
        for i, tag in enumerate(tags)
    ]
    runs = (PackRun(RUN, 5, len(packed)),)
    return Manifest(dataset="digits", version=1, schema=schema, rows=ManifestRows.of(packed), runs=runs)
