"""As `benchmarks.ours`, with whole batches from a `StreamDataset` in the worker processes of torch's DataLoader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from benchmarks.ours import pack
from benchmarks.peers.common import SIDE, Running, main
from stoker.images import ImageDecoder
from stoker_torch import StreamDataset


def loader(running: Running) -> DataLoader[Any]:
    dataset = StreamDataset(
        running.url,
        batch_size=running.batch,
        seed=running.seed,
        decode={"data": ImageDecoder(SIDE, SIDE)} if running.decoded else {},
    )
    return DataLoader(dataset, batch_size=None, num_workers=running.workers, persistent_workers=running.workers > 0)


if __name__ == "__main__":
    main(pack, loader)
