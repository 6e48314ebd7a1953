"""SPDL's loader in the style of PyTorch's: a map-style data set of samples in packed objects, read by range.

See README.md in the folder above for the settings.
"""

from __future__ import annotations

import asyncio
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np
import obstore
import packed
import torch
from common import Running, main, restore
from obstore.store import S3Store
from spdl.dataloader import PyTorchDataLoader, get_pytorch_dataloader
from torch.utils.data import Dataset

Sample = tuple[np.ndarray | bytes, int]
GAP_BYTES = 1 << 16  # fewer bytes between two ranges than a request's latency is worth


@cache
def store(url: str) -> S3Store:
    """Return this process's store; workers are forked before its first call."""
    return packed.open_store(url)


class Samples(Dataset[Sample]):
    """The samples under a URL; those of a batch are read together."""

    def __init__(self, running: Running) -> None:
        self._url, self._restore = running.url, restore(running.workload, running.decoded)
        # Not by this module's store: the threads of an open one are not inherited by the workers.
        self._index = packed.Index.parse(*(packed.read_alone(running.url, key) for key in packed.INDEX_KEYS))

    def __len__(self) -> int:
        return self._index.samples

    def __getitem__(self, i: int) -> Sample:
        return self.__getitems__([i])[0]

    def __getitems__(self, chosen: list[int]) -> list[Sample]:
        return asyncio.run(self._read(np.array(chosen)))

    async def _read(self, chosen: np.ndarray) -> list[Sample]:
        """Read samples, those of an object with one call, which requests their ranges side by side."""
        objects, starts, ends = self._index.locate(chosen)
        samples: list[Sample] = [(b"", -1)] * len(chosen)

        async def read(object_: int) -> None:
            places = np.flatnonzero(objects == object_)
            places = places[np.argsort(starts[places])]
            found = await obstore.get_ranges_async(
                store(self._url),
                self._index.keys[object_],
                starts=starts[places].tolist(),
                ends=ends[places].tolist(),
                coalesce=GAP_BYTES,
            )
            for place, content in zip(places.tolist(), found, strict=True):
                samples[place] = self._restore(content.to_bytes()), int(chosen[place])

        await asyncio.gather(*(read(each) for each in np.unique(objects).tolist()))
        return samples


def collate(samples: list[Sample]) -> tuple[Any, torch.Tensor]:
    data, labels = zip(*samples, strict=True)
    batch = list(data) if isinstance(data[0], bytes) else torch.from_numpy(np.stack(data))
    return batch, torch.tensor(labels)


def loader(running: Running) -> PyTorchDataLoader[Any]:
    return get_pytorch_dataloader(
        Samples(running),
        batch_size=running.batch,
        shuffle=True,
        generator=torch.Generator().manual_seed(running.seed),
        num_workers=running.workers,
        collate_fn=collate,
    )


if __name__ == "__main__":
    main(packed.pack, loader)
