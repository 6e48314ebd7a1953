"""Small packed data sets for tests, in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import stoker
from stoker import Column
from support.stores import Place

__all__ = ["SCHEMA", "numbers", "pack_at", "pack_numbers", "sample_of"]

SCHEMA: dict[str, Column] = {
    "x": stoker.Array("int64"),
    "image": stoker.Array("uint8", (4, 3)),
    "text": stoker.Text(),
    "tokens": stoker.Ragged("uint16"),
}
_names = itertools.count()


def sample_of(index: int) -> dict[str, Any]:
    """Return sample number ``index``, which every column identifies."""
    return {
        "x": index,
        "image": np.full((4, 3), index % 251, np.uint8),
        "text": f"sample {index} " + "é" * (index % 5),
        "tokens": np.arange(index % 7, dtype=np.uint16) + np.uint16(index % 1000),
    }


def pack_numbers(samples: int, *, super_sample_bytes: int = 2000, schema: Mapping[str, Column] = SCHEMA) -> str:
    """Pack samples 0, 1, 2 … into a new data set in memory and return its URL."""
    url = f"memory://numbers-{next(_names)}/ds"
    with stoker.Packer(url, schema=schema, super_sample_bytes=super_sample_bytes) as packer:
        packer.extend({name: sample_of(index)[name] for name in schema} for index in range(samples))
    return url


def pack_at(place: Place, samples: int) -> None:
    """Pack samples 0, 1, 2 … into a new data set at a place of the store contract."""
    with stoker.Packer(
        place.url,
        schema=SCHEMA,
        super_sample_bytes=2000,
        options=place.options,
        single_writer=place.needs_single_writer,
    ) as packer:
        packer.extend(map(sample_of, range(samples)))


def numbers(batches: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of the samples in the batches, in order."""
    return [number for batch in batches for number in batch["x"].tolist()]
