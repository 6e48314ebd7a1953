"""MosaicML Streaming: MDS shards downloaded whole into a cache on disk, shuffled globally, read sample by sample.

See README.md in the folder above for the settings.
"""
# ruff: noqa: E402  (a module must be replaced before the imports)

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
# Its vision data sets, which are not used here, need torchvision, which does not have a build for every torch.
sys.modules["streaming.vision"] = ModuleType("streaming.vision")

from common import SHAPES, Packing, Running, decode, main
from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader

SHARD_BYTES = 1 << 26


class Decoded(StreamingDataset):
    """A data set of JPEGs, which are decoded one by one on access."""

    def __getitem__(self, at: Any) -> dict[str, Any]:
        sample: dict[str, Any] = super().__getitem__(at)
        sample["data"] = decode(sample["data"])
        return sample


def pack(packing: Packing) -> None:
    if packing.workload in SHAPES:
        dtype, shape = SHAPES[packing.workload]
        encoding = f"ndarray:{dtype}:{','.join(map(str, shape))}"
    else:
        encoding = "bytes"
    with MDSWriter(out=packing.url, columns={"data": encoding, "label": "int"}, size_limit=SHARD_BYTES) as writer:
        for data, label in packing.samples():
            writer.write({"data": data, "label": label})


def loader(running: Running) -> DataLoader[Any]:
    clean_stale_shared_memory()  # of a run that was killed; otherwise this one would wait for it
    kind = Decoded if running.decoded else StreamingDataset
    dataset = kind(
        remote=running.url,
        local=str(running.cache),
        shuffle=True,
        shuffle_seed=running.seed,
        batch_size=running.batch,
    )
    for stream in dataset.streams:
        # Workers inherit the connection that fetched the index; if they shared it, they would hang or mix responses.
        stream._downloader.clean_up()  # noqa: SLF001
    return DataLoader(
        dataset,
        batch_size=running.batch,
        num_workers=running.workers,
        persistent_workers=running.workers > 0,
    )


if __name__ == "__main__":
    main(pack, loader)
