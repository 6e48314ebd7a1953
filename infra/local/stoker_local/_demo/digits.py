"""The demo's data: scikit-learn's handwritten digits as PNG objects in a bucket, and packed there."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from stoker._base.task_group import task_group
from stoker._format.manifest import Manifest
from stoker._pack.packer import AsyncPacker, PackConfig
from stoker._sources import open_source
from stoker._stores import open_store
from stoker.images import ImageDecoder

__all__ = ["DECODE", "IMAGE_SIDE", "Digits", "load", "pack", "upload"]

IMAGE_SIDE = 8
DECODE = {"image": ImageDecoder(IMAGE_SIDE, IMAGE_SIDE, mode="L")}
"""For the loader: to ``uint8 [8, 8, 1]``."""

_TEST_IMAGES = 297
_SPLIT_SEED = 0
_LARGEST_VALUE = 16
_UPLOADS_AT_ONCE = 32

Report = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Images of digits.

    Attributes:
        images: ``uint8 [n, 8, 8, 1]``.
        labels: ``int64 [n]``, 0 to 9.
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


def load() -> tuple[Digits, Digits]:
    """Return 1,500 images to train on and 297 to test with: the same ones on every machine."""
    bunch = load_digits()
    images = np.round(bunch.images * (255 / _LARGEST_VALUE)).astype(np.uint8)[..., None]
    # The legacy generator: its streams are frozen, those of numpy's newer ones are not.
    order = np.random.RandomState(_SPLIT_SEED).permutation(len(images))
    test, train = np.split(order, [_TEST_IMAGES])
    labels = bunch.target.astype(np.int64)
    return tuple(Digits(images=images[part], labels=labels[part]) for part in (train, test))  # type: ignore[return-value]


async def upload(digits: Digits, url: str, report: Report) -> int:
    """Write each image as an object of its own into a folder of its class, and return their bytes.

    Args:
        digits: the images.
        url: of the folder of classes.
        report: told how many objects are there, after each.
    """
    store, at_once = open_store(url), asyncio.Semaphore(_UPLOADS_AT_ONCE)
    written: list[int] = []

    async def put(index: int) -> None:
        data = digits.png(index)
        async with at_once:
            await store.put(f"{digits.labels[index]}/{index:04}.png", data)
        written.append(len(data))
        report(len(written))

    try:
        async with task_group() as uploads:
            for index in range(len(digits)):
                uploads.create_task(put(index))
    finally:
        await store.close()
    return sum(written)


async def pack(source_url: str, url: str, super_sample_bytes: int, report: Report) -> Manifest:
    """Pack a folder of images as ``stoker pack`` does, bucket to bucket, and return the manifest.

    Args:
        source_url: of the folder of classes.
        url: where the data set is to be.
        super_sample_bytes: limit of a super-sample.
        report: told how many images were packed, after each super-sample.
    """
    source, store = await open_source(source_url), open_store(url)
    try:
        config = PackConfig(schema=source.schema, source=source.fingerprint, super_sample_bytes=super_sample_bytes)
        async with AsyncPacker(store, config, on_progress=lambda done: report(done.samples)) as packer:
            async with aclosing(source.read()) as samples:
                async for where, sample in samples:
                    await packer.write(sample, where)
            return await packer.commit()
    finally:
        await store.close()
        await source.close()
