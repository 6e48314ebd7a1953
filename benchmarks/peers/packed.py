"""Packed objects of the SPDL peers: labels, ends and bytes of some samples, one array after the other.

An object of ``n`` samples is int64 ``n``, int64 labels ``[n]``, int64 ends ``[n]`` in bytes, and the samples' bytes.
Two more objects are the index of all: their keys and counts, and the ends of all samples within their objects.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import boto3
import numpy as np
import obstore
import torch
from common import SHAPES, Packing, bucket_and_prefix
from numpy.typing import NDArray
from obstore.store import S3Store

OBJECT_BYTES = 8 << 20
WORD_BYTES = 8
COUNTS, ENDS = INDEX_KEYS = "counts.json", "ends"

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
    """The objects of a data set, whose samples are numbered through.

    Attributes:
        keys: their keys.
        firsts: ``[objects + 1]``, the number of the first sample of each, and how many samples there are.
        ends: ``[samples]``, the end of each sample in its object, in bytes.
    """

    keys: list[str]
    firsts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def parse(cls, counts: bytes, ends: bytes) -> Index:
        objects = json.loads(counts)
        return cls(list(objects), np.cumsum([0, *objects.values()]), np.frombuffer(ends, np.int64))

    @property
    def samples(self) -> int:
        return int(self.firsts[-1])

    def locate(self, chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the object of each chosen sample, and the start and the end of its bytes there."""
        objects = np.searchsorted(self.firsts, chosen, side="right") - 1
        heads = WORD_BYTES * (1 + 2 * np.diff(self.firsts))[objects]
        begins = np.where(chosen == self.firsts[objects], heads, self.ends[chosen - 1])
        return objects, begins, self.ends[chosen]


def read_counts(store: S3Store) -> dict[str, int]:
    """Return key → number of samples, all of the index that reading whole objects needs."""
    counts: dict[str, int] = json.loads(bytes(obstore.get(store, COUNTS).bytes()))
    return counts


def read_alone(url: str, key: str) -> bytes:
    """Return an object, by a client that leaves no thread behind."""
    bucket, prefix = bucket_and_prefix(url)
    s3 = boto3.client("s3")
    content: bytes = s3.get_object(Bucket=bucket, Key=f"{prefix}/{key}")["Body"].read()
    s3.close()
    return content


def open_store(url: str) -> S3Store:
    """Return the store of a URL; the endpoint and the credentials come from the AWS_* variables."""
    bucket, prefix = bucket_and_prefix(url)
    return S3Store(bucket, prefix=prefix, endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True})


def pack(packing: Packing) -> None:
    """Write the objects of a workload, and their index."""
    store, counts = open_store(packing.url), {}
    contents: list[bytes] = []
    labels: list[int] = []
    all_ends: list[NDArray[np.int64]] = []

    def flush() -> None:
        ends = WORD_BYTES * (1 + 2 * len(labels)) + np.cumsum([len(content) for content in contents])
        head = np.concatenate([[len(labels)], labels, ends]).astype(np.int64)
        key = f"{len(counts):06d}"
        obstore.put(store, key, b"".join([head.tobytes(), *contents]))
        counts[key] = len(labels)
        all_ends.append(ends)
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
    obstore.put(store, COUNTS, json.dumps(counts).encode())
    obstore.put(store, ENDS, np.concatenate(all_ends).tobytes())


def parse(workload: str, content: Any) -> Samples:
    """Return the samples of an object, whose arrays are views of its bytes."""
    (n,) = np.frombuffer(content, np.int64, 1)
    labels, ends = np.frombuffer(content, np.int64, 2 * n, WORD_BYTES).reshape(2, n)
    head_bytes = WORD_BYTES * (1 + 2 * int(n))
    if workload in SHAPES:
        dtype, shape = SHAPES[workload]
        return Samples(np.frombuffer(content, dtype, offset=head_bytes).reshape(n, *shape), labels)
    stored = memoryview(content)
    starts = [head_bytes, *ends[:-1].tolist()]
    return Samples([stored[start:end] for start, end in zip(starts, ends.tolist(), strict=True)], labels)


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
