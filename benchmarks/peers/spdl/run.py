"""SPDL: a pipeline of async GETs of packed objects and of threads that mix groups of them into batches.

See README.md in the folder above for the settings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np
import obstore
import packed
import torch
from common import Running, decode, main
from spdl.pipeline import Pipeline, PipelineBuilder

GROUP = 8  # objects whose samples are mixed
GETS = 10  # at a time
CORES = os.cpu_count() or 1
BUFFER_BATCHES = 8

Batch = tuple[Any, torch.Tensor]


class Keys:
    """The keys of all objects, in another order in each epoch."""

    def __init__(self, keys: list[str], seed: int) -> None:
        self._keys, self._rng = keys, np.random.default_rng(seed)

    def __iter__(self) -> Iterator[str]:
        return (self._keys[i] for i in self._rng.permutation(len(self._keys)))


class Mixer:
    """Shuffled batches of groups of objects; what a group leaves of a last, incomplete batch is mixed into the next."""

    def __init__(self, running: Running, samples: int) -> None:
        self._batch, self._samples = running.batch, samples
        self._left, self._rng = samples, np.random.default_rng(running.seed)
        self._kept: packed.Samples | None = None

    def batches(self, group: list[packed.Samples]) -> Iterator[Batch]:
        parts = group if self._kept is None else [self._kept, *group]
        self._left -= sum(len(part) for part in group)
        mixed = packed.mix(parts, self._rng)
        end = len(mixed)
        if self._left:
            end -= end % self._batch
            self._kept = mixed[end:]
        else:  # the last group of the epoch
            self._left, self._kept = self._samples, None
        for start in range(0, end, self._batch):
            yield mixed[start : min(start + self._batch, end)].tensors()


def decoded(batch: Batch) -> Batch:
    return torch.from_numpy(np.stack([decode(jpeg) for jpeg in batch[0]])), batch[1]


def loader(running: Running) -> Pipeline[Batch]:
    store = packed.open_store(running.url)
    counts = packed.read_counts(store)

    async def fetch(key: str) -> packed.Samples:
        response = await obstore.get_async(store, key)
        return packed.parse(running.workload, await response.bytes_async())

    keys = Keys(list(counts), running.seed)
    builder = PipelineBuilder().add_source(keys, continuous=running.epochs > 1)  # nothing is read for a further epoch
    builder.pipe(fetch, concurrency=GETS).aggregate(GROUP).pipe(Mixer(running, sum(counts.values())).batches)
    if running.decoded:
        builder.pipe(decoded, concurrency=CORES)
    pipeline = builder.add_sink(BUFFER_BATCHES).build(num_threads=CORES + 1, use_thread_output_queue=True)
    pipeline.start()
    return pipeline


if __name__ == "__main__":
    main(packed.pack, loader)
