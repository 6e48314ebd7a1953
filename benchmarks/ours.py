"""stoker's loader as a program like those of the peers: `python -m benchmarks.ours pack|run|start ...`.

``pack`` and ``run`` are those of peers/common.py; ``start`` is that of benchmarks/starts.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy.random  # noqa: F401  (numpy imports it at its first use)

import stoker
import stoker._stores.s3  # which opening an s3:// URL imports
from benchmarks import starts
from benchmarks.peers.common import SHAPES, SIDE, Packing, Running, main
from stoker._order.order import Shuffle
from stoker.images import ImageDecoder
from stoker_torch import Loader


def pack(packing: Packing) -> None:
    """Write a workload with the packer's defaults."""
    column = stoker.Array(*SHAPES[packing.workload]) if packing.workload in SHAPES else stoker.Bytes()
    with stoker.Packer(packing.url, schema={"data": column, "label": stoker.Array("int64")}) as packer:
        packer.extend({"data": data, "label": label} for data, label in packing.samples())


def report(loader: Loader) -> dict[str, Any]:
    """Return the loader's own figures of a run."""
    stats = loader.stats()
    return {
        "super_samples": len(loader.manifest),
        "budget_bytes": loader.config.memory_bytes(),
        "get_requests": stats.get_requests,
        "hedges": stats.hedges,
        "hedge_wins": stats.hedge_wins,
        "retries": stats.retries,
    }


def program(shuffle: Shuffle) -> None:
    """Pack or run with the settings of the command line; the others are the loader's defaults."""
    loaders = []

    def loader(running: Running) -> Loader:
        loaders.append(
            Loader(
                running.url,
                batch_size=running.batch,
                shuffle=shuffle,
                seed=running.seed,
                epochs=running.epochs,
                decode={"data": ImageDecoder(SIDE, SIDE)} if running.decoded else {},
            )
        )
        return loaders[-1]

    main(pack, loader)
    for each in loaders:
        with each:
            print(json.dumps(report(each)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["start"]:
        starts.main()
    else:
        program("window")
