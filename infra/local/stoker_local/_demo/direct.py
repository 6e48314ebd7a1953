"""The way without stoker: one GET per image, in the worker processes of a plain DataLoader."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3  # type: ignore[import-untyped]  # it ships no types
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from stoker_local._demo.training import Batches, new_model

__all__ = ["ImageObjects", "open_direct", "tune"]

_CANDIDATES = (4, 8, 16, 32)


class ImageObjects(Dataset[dict[str, Any]]):
    """The images below a prefix, each an object in a folder of its class; one GET per item.

    Each worker process makes its own client when it reads its first image.
    """

    def __init__(self, bucket: str, prefix: str) -> None:
        client = boto3.client("s3")
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        self._bucket = bucket
        self._keys = [item["Key"] for page in pages for item in page["Contents"]]
        client.close()
        classes = sorted({key.split("/")[-2] for key in self._keys})
        self._labels = {name: number for number, name in enumerate(classes)}
        self._client: Any = None

    def close(self) -> None:
        """End this process's connections, if it has any."""
        if self._client is not None:
            self._client.close()

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Fetch and decode one image, ``uint8 [8, 8, 1]``."""
        if self._client is None:
            self._client = boto3.client("s3")
        key = self._keys[index]
        data = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
        with Image.open(io.BytesIO(data)) as image:
            pixels = torch.from_numpy(np.array(image)[..., None])
        return {"image": pixels, "label": self._labels[key.split("/")[-2]]}


@contextmanager
def open_direct(bucket: str, prefix: str, workers: int, batch_size: int, seed: int) -> Iterator[Batches]:
    """List the images and open a DataLoader on them, whose workers live until the end."""
    yield DataLoader(
        ImageObjects(bucket, prefix),
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
        num_workers=workers,
        persistent_workers=True,
    )


def tune(bucket: str, prefix: str, batch_size: int, epochs: int, report: Callable[[int, float | None], None]) -> int:
    """Return the number of workers that should train fastest, of a few that are tried for an epoch each.

    Args:
        bucket: where the images are.
        prefix: of their keys.
        batch_size: of the training.
        epochs: of the training.
        report: told each number of workers, first with None, then with the seconds that the training should take.
    """
    images = ImageObjects(bucket, prefix)
    expected_seconds: dict[int, float] = {}
    for workers in _CANDIDATES[: None if _forks() else 2]:
        report(workers, None)
        start_seconds, epoch_seconds = _tried(images, workers, batch_size)
        expected_seconds[workers] = start_seconds + epochs * epoch_seconds
        report(workers, expected_seconds[workers])
    return min(expected_seconds, key=lambda workers: expected_seconds[workers])


def _forks() -> bool:
    """Return whether workers are forked; where each one loads PyTorch anew, many of them are too much for a laptop."""
    return torch.multiprocessing.get_start_method() == "fork"


def _tried(images: ImageObjects, workers: int, batch_size: int) -> tuple[float, float]:
    """Return how many seconds the workers take to start, and to train an epoch once they have."""
    begun = time.perf_counter()
    batches = [[index] for index in range(workers)]
    loader = DataLoader(images, batch_sampler=batches, num_workers=workers, persistent_workers=True)
    for _ in loader:  # an image for each worker, which makes its client
        pass
    order = list(range(len(images)))
    batches[:] = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    model, started = new_model(seed=0), time.perf_counter()
    for batch in loader:
        torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()
    return started - begun, time.perf_counter() - started
