"""LitData: chunks downloaded into a cache on disk; chunks are shuffled, and samples within theirs.

See README.md in the folder above for the settings.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from common import Packing, Running, Source, decode, main
from litdata import StreamingDataLoader, StreamingDataset, optimize
from litdata.streaming import downloader

# A chunk with samples of two workers is read whole by each of them: at the default of 64 MB that takes minutes.
CHUNK_BYTES = "4MB"
# Its client, obstore, refuses plain HTTP without a setting that has no public interface.
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # noqa: SLF001


@cache
def source(packing: Packing) -> Source:
    """Return the samples, opened once in each packing process."""
    return packing.samples()


def stored(i: int, packing: Packing) -> dict[str, Any]:
    data, label = source(packing)[i]
    return {"data": data, "label": label}


def pack(packing: Packing) -> None:
    optimize(
        fn=partial(stored, packing=packing),
        inputs=list(range(len(source(packing)))),
        output_dir=packing.url,
        chunk_bytes=CHUNK_BYTES,
        num_workers=1,
    )


def decoded(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "data": decode(sample["data"])}


def copied(sample: dict[str, Any]) -> dict[str, Any]:
    """Copy the bytes, which are a view of the chunk: views can be neither collated nor sent to another process."""
    return {**sample, "data": bytes(sample["data"])}


def loader(running: Running) -> StreamingDataLoader:
    transform = decoded if running.decoded else copied if running.workload == "jpegs" else None
    dataset = StreamingDataset(
        running.url,
        cache_dir=str(running.cache),
        shuffle=True,
        seed=running.seed,
        transform=transform,
    )
    return StreamingDataLoader(
        dataset,
        batch_size=running.batch,
        num_workers=running.workers,
        persistent_workers=running.workers > 0,
    )


if __name__ == "__main__":
    main(pack, loader)
