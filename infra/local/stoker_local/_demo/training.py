"""The demo's data, model and training loop, and its data loading without stoker.

The data are scikit-learn's handwritten digits, as PNG objects in a bucket and packed in the same bucket. Without
stoker, the worker processes of a plain DataLoader send one GET per image.
"""

from __future__ import annotations

import asyncio
import io
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import boto3  # type: ignore[import-untyped]  # it ships no types
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from stoker._base.task_group import for_each
from stoker._format.manifest import Manifest
from stoker._pack.packer import AsyncPacker, PackConfig
from stoker._sources import open_source
from stoker._stores import open_store
from stoker.errors import ConfigError
from stoker.images import ImageDecoder

IMAGE_SIDE = 8
DECODE = {"image": ImageDecoder(IMAGE_SIDE, IMAGE_SIDE, mode="L")}
"""Decoders for the loader: column ``image`` to ``uint8 [8, 8, 1]``."""

_TEST_IMAGES = 297
_SPLIT_SEED = 0
_MAX_PIXEL_VALUE = 16
_MAX_CONCURRENT_PUTS = 32
_SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
"""Shifts of the digits, (rows, columns) in pixels, in each round of repetition."""

Report = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Images of digits and their labels.

    Attributes:
        images: images, ``uint8 [n, 8, 8, 1]``.
        labels: labels 0 to 9, ``int64 [n]``.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def png(self, index: int) -> bytes:
        """Return one image as a PNG file."""
        file = io.BytesIO()
        Image.fromarray(self.images[index, :, :, 0]).save(file, "PNG", optimize=True)
        return file.getvalue()


def load_train_and_test() -> tuple[Digits, Digits]:
    """Return 1,500 training images and 297 test images; the split is the same on every machine."""
    bunch = load_digits()
    images = np.round(bunch.images * (255 / _MAX_PIXEL_VALUE)).astype(np.uint8)[..., None]
    # The legacy generator, because numpy guarantees a stable stream only for it.
    order = np.random.RandomState(_SPLIT_SEED).permutation(len(images))
    test, train = np.split(order, [_TEST_IMAGES])
    labels = bunch.target.astype(np.int64)
    return tuple(Digits(images=images[part], labels=labels[part]) for part in (train, test))  # type: ignore[return-value]


class RawImages:
    """Digits as PNG files in one folder per class; further rounds repeat the digits, shifted by a pixel.

    Attributes:
        contents: key → content of every object.
        started_puts: number of started PUTs.
        completed_puts: number of completed PUTs.

    Raises:
        ConfigError: ``count`` is larger than the number of digits and their shifted repetitions.
    """

    def __init__(self, digits: Digits, count: int) -> None:
        rounds = -(-count // len(digits))
        if rounds > len(_SHIFTS):
            max_count = len(_SHIFTS) * len(digits)
            raise ConfigError(f"{count:,} images are too many; the digits and their shifted copies are {max_count:,}")
        shifted = [np.roll(digits.images, shift, axis=(1, 2)) for shift in _SHIFTS[:rounds]]
        every = Digits(images=np.concatenate(shifted), labels=np.tile(digits.labels, rounds))
        self.contents = {f"{every.labels[n]}/{n:05}.png": every.png(n) for n in range(count)}
        self.started_puts = self.completed_puts = 0

    def __len__(self) -> int:
        return len(self.contents)

    @property
    def mean_bytes(self) -> float:
        """Mean size of an object, in bytes."""
        return sum(map(len, self.contents.values())) / len(self)

    async def put_all(self, url: str, *, per_second: float = math.inf, report: Report = lambda done: None) -> None:
        """Upload the images to a bucket, one object each.

        Args:
            url: URL of the folder that will contain the class folders.
            per_second: maximum rate of uploads, in images per second.
            report: is called with the number of uploaded objects after each.
        """
        store, loop = open_store(url), asyncio.get_running_loop()
        started_at = loop.time()

        async def put(numbered: tuple[int, str]) -> None:
            number, key = numbered
            await asyncio.sleep(started_at + number / per_second - loop.time())
            self.started_puts += 1
            await store.put(key, self.contents[key])
            self.completed_puts += 1
            report(self.completed_puts)

        try:
            await for_each(enumerate(self.contents), put, concurrency=_MAX_CONCURRENT_PUTS)
        finally:
            await store.close()


async def pack(source_url: str, url: str, super_sample_bytes: int, report: Report) -> Manifest:
    """Pack a folder of images from bucket to bucket, as ``stoker pack`` does, and return the manifest.

    Args:
        source_url: URL of the folder of class folders.
        url: URL of the data set to create.
        super_sample_bytes: maximum size of a super-sample, in bytes.
        report: is called with the number of packed images after each super-sample.
    """
    source, store = await open_source(source_url), open_store(url)
    try:
        config = PackConfig(schema=source.schema, source=source.fingerprint, super_sample_bytes=super_sample_bytes)
        async with AsyncPacker(store, config, on_progress=lambda done: report(done.samples)) as packer:
            await packer.extend(source)
            return await packer.commit()
    finally:
        await store.close()
        await source.close()


_MAX_LEARNING_RATE = 4e-3
_WORKER_CANDIDATES = (4, 8, 16, 32)


class Batches(Protocol):
    """Interface of the loop's batches: each iteration is one epoch, each batch has ``image`` and ``label``."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


class DigitNet(nn.Sequential):
    """A small convolutional network from images ``uint8 [n, 8, 8, 1]`` to scores ``float32 [n, 10]``."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128 * (IMAGE_SIDE // 2) ** 2, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores of the digits."""
        scores: torch.Tensor = super().forward(images.permute(0, 3, 1, 2).float() / 255)  # type: ignore[no-untyped-call]
        return scores


@dataclass(slots=True, kw_only=True)
class Timing:
    """Progress and timing of a training.

    Attributes:
        epoch: number of the current epoch, from 1.
        is_last_of_epoch: whether the latest step was the last of its epoch.
        fraction_done: completed fraction of the training, 0 to 1.
        loss: loss of the latest batch.
        samples: number of samples so far.
        total_seconds: time from before the batches were opened to the end of the latest step, in seconds.
        loop_seconds: time from the request of the first batch to the end of the latest step, in seconds.
        wait_seconds: part of ``loop_seconds`` in which the loop waited for batches.
        first_batch_seconds: time from before the batches were opened to the first batch, in seconds.
    """

    epoch: int = 1
    is_last_of_epoch: bool = False
    fraction_done: float = 0.0
    loss: float = 0.0
    samples: int = 0
    total_seconds: float = 0.0
    loop_seconds: float = 0.0
    wait_seconds: float = 0.0
    first_batch_seconds: float = 0.0

    @property
    def stall(self) -> float:
        """Fraction of the loop's time that it waited for batches, 0 to 1."""
        return self.wait_seconds / self.loop_seconds


def new_model(seed: int) -> DigitNet:
    """Return a model whose initial weights depend only on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DigitNet()


def train(
    open_batches: AbstractContextManager[Batches], model: DigitNet, epochs: int, on_step: Callable[[Timing], None]
) -> Timing:
    """Train a model and return the timing.

    Args:
        open_batches: context that opens the batches on entry, which is timed, and closes them on exit, which is not.
        model: model to train, in place.
        epochs: number of epochs.
        on_step: is called with the timing after every step.
    """
    timing, opened_at = Timing(), time.perf_counter()
    with open_batches as batches:
        steps, optimizer = epochs * len(batches), torch.optim.Adam(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _MAX_LEARNING_RATE, total_steps=steps)
        started_at = requested_at = time.perf_counter()
        for number, batch in enumerate((batch for _ in range(epochs) for batch in batches), 1):
            now = time.perf_counter()
            timing.wait_seconds += now - requested_at
            timing.first_batch_seconds = timing.first_batch_seconds or now - opened_at
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            timing.loss, timing.samples = loss.item(), timing.samples + len(batch["label"])
            timing.fraction_done, timing.epoch = number / steps, -(-number // len(batches))
            timing.is_last_of_epoch = number % len(batches) == 0
            ended = time.perf_counter()
            timing.total_seconds = ended - opened_at
            timing.loop_seconds = ended - started_at
            on_step(timing)
            requested_at = time.perf_counter()
    return timing


def accuracy(model: DigitNet, digits: Digits) -> float:
    """Return the fraction of images that the model classifies correctly, 0 to 1."""
    with torch.inference_mode():
        answers = model(torch.from_numpy(digits.images)).argmax(dim=1)
    return float((answers == torch.from_numpy(digits.labels)).double().mean())


class ImageObjects(Dataset[dict[str, Any]]):
    """A data set of image objects in one folder per class, with one GET per item.

    Each worker process creates its own client when it reads its first image.
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
        """Close this process's connections."""
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
def open_dataloader(bucket: str, prefix: str, workers: int, batch_size: int, seed: int) -> Iterator[Batches]:
    """List the images and yield a DataLoader on them with persistent workers."""
    yield DataLoader(
        ImageObjects(bucket, prefix),
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
        num_workers=workers,
        persistent_workers=True,
    )


def choose_workers(
    bucket: str, prefix: str, batch_size: int, epochs: int, report: Callable[[int, float | None], None]
) -> int:
    """Choose the number of workers for the fastest training, by trying a few for one epoch each.

    Args:
        bucket: name of the images' bucket.
        prefix: prefix of the images' keys.
        batch_size: batch size of the training.
        epochs: number of epochs of the training.
        report: is called for each number of workers, first with None, then with the training's expected seconds.
    """
    images = ImageObjects(bucket, prefix)
    expected_seconds: dict[int, float] = {}
    for workers in _WORKER_CANDIDATES[: None if _uses_fork() else 2]:
        report(workers, None)
        start_seconds, epoch_seconds = _measure_workers(images, workers, batch_size)
        expected_seconds[workers] = start_seconds + epochs * epoch_seconds
        report(workers, expected_seconds[workers])
    return min(expected_seconds, key=lambda workers: expected_seconds[workers])


def _uses_fork() -> bool:
    """Return whether workers are forked; if each has to import PyTorch, many are too much for a laptop."""
    return torch.multiprocessing.get_start_method() == "fork"


def _measure_workers(images: ImageObjects, workers: int, batch_size: int) -> tuple[float, float]:
    """Measure the workers' start and one epoch of training; return both durations in seconds."""
    started_at = time.perf_counter()
    batches = [[index] for index in range(workers)]
    loader = DataLoader(images, batch_sampler=batches, num_workers=workers, persistent_workers=True)
    for _ in loader:  # one image for each worker, which creates its client
        pass
    order = list(range(len(images)))
    batches[:] = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    model, started = new_model(seed=0), time.perf_counter()
    for batch in loader:
        torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()
    return started - started_at, time.perf_counter() - started
