"""Packed objects of the SPDL peers: labels, ends and bytes of some samples, one array after the other.

An object of ``n`` samples is int64 ``n``, int64 labels ``[n]``, int64 ends ``[n]`` in bytes, and the samples' bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import obstore
import torch
from common import SHAPES, Packing, bucket_and_prefix
from numpy.typing import NDArray
from obstore.store import S3Store

OBJECT_BYTES = 8 << 20
WORD_BYTES = 8
INDEX = "index.json"

Data = NDArray[Any] | list[Any]


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples in memory.

    Attributes:
        data: array ``[n, ...]``, or a list of ``n`` JPEGs.
        labels: ``[n]``, the samples' numbers.
    """

    data: Data
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: slice) -> Samples:
        return Samples(self.data[chosen], self.labels[chosen])

    def tensors(self) -> tuple[Any, torch.Tensor]:
        data = self.data if isinstance(self.data, list) else torch.from_numpy(self.data)
        return data, torch.from_numpy(self.labels)


@dataclass(frozen=True, slots=True)
class Index:
    """The objects of a data set.

    Attributes:
        objects: key → number of samples.
    """

    objects: dict[str, int]

    @classmethod
    def read(cls, store: S3Store) -> Index:
        return cls(json.loads(bytes(obstore.get(store, INDEX).bytes())))

    @property
    def keys(self) -> list[str]:
        return list(self.objects)

    @property
    def samples(self) -> int:
        return sum(self.objects.values())


def open_store(url: str) -> S3Store:
    """Return the store of a URL; the endpoint and the credentials come from the AWS_* variables."""
    bucket, prefix = bucket_and_prefix(url)
    return S3Store(bucket, prefix=prefix, endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True})


def pack(packing: Packing) -> None:
    """Write the objects of a workload, and their index."""
    store, index = open_store(packing.url), {}
    contents: list[bytes] = []
    labels: list[int] = []

    def flush() -> None:
        ends = np.cumsum([len(content) for content in contents])
        head = np.concatenate([[len(labels)], labels, ends]).astype(np.int64)
        key = f"{len(index):06d}"
        obstore.put(store, key, b"".join([head.tobytes(), *contents]))
        index[key] = len(labels)
        contents.clear()
        labels.clear()

    size = 0
    for data, label in packing.samples():
        contents.append(data if isinstance(data, bytes) else data.tobytes())
        labels.append(label)
        size += len(contents[-1])
        if size >= OBJECT_BYTES:
            flush()
            size = 0
    if contents:
        flush()
    obstore.put(store, INDEX, json.dumps(index).encode())


def parse(workload: str, content: Any) -> Samples:
    """Return the samples of an object, whose arrays are views of its bytes."""
    (n,) = np.frombuffer(content, np.int64, 1)
    labels, ends = np.frombuffer(content, np.int64, 2 * n, WORD_BYTES).reshape(2, n)
    stored = np.frombuffer(content, np.uint8, offset=(1 + 2 * n) * WORD_BYTES)
    if workload in SHAPES:
        dtype, shape = SHAPES[workload]
        return Samples(stored.view(dtype).reshape(n, *shape), labels)
    return Samples([stored[start:end] for start, end in zip((0, *ends[:-1]), ends, strict=True)], labels)


def mix(parts: Sequence[Samples], rng: np.random.Generator) -> Samples:
    """Copy the samples of all parts, in random order."""
    places = rng.permutation(sum(len(part) for part in parts))
    labels = np.empty(len(places), np.int64)
    first = parts[0].data
    data: Data = (
        [b""] * len(places) if isinstance(first, list) else np.empty((len(places), *first.shape[1:]), first.dtype)
    )
    start = 0
    for part in parts:
        chosen = places[start : start + len(part)]
        labels[chosen] = part.labels
        if isinstance(data, list):
            for place, sample in zip(chosen.tolist(), part.data, strict=True):
                data[place] = bytes(sample)
        else:
            data[chosen] = part.data
        start += len(part)
    return Samples(data, labels)
