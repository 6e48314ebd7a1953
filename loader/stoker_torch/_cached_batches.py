"""The batches of an iteration whose samples all stay on the device.

The host sends the places of many batches in one copy, and each batch is gathered when the loop asks for it, on the
loop's stream: there is nothing to wait for, so a thread and a stream between them would only take time.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from stoker._fetch.batch_stream import Batch
from stoker._fetch.pipeline import BatchPipeline
from stoker_torch._device_cache import DeviceCache
from stoker_torch._readahead import Readahead
from stoker_torch._staging import StagedBatch, Staging

_BATCHES_AT_ONCE = 16


class CachedBatches:
    """The batches of one iteration, gathered from a complete cache.

    Args:
        cache: cache with all samples of the data set.
        pipeline: pipeline of the batches, which have no columns.
        staging: copies the places of the samples.
        count: number of batches.
    """

    def __init__(self, cache: DeviceCache, pipeline: BatchPipeline, staging: Staging, count: int) -> None:
        self._cache = cache
        take = _PlacesSource(cache, pipeline, count)
        # The storage counts as part of each chunk, whose memory the loop's stream keeps.
        self._iteration = staging.iterate(take, lambda _, places: [places, *cache.storage])
        self._chunk: StagedBatch[list[Batch]] | None = None
        self._left: deque[tuple[Batch, torch.Tensor]] = deque()

    @property
    def readahead(self) -> Readahead[StagedBatch[list[Batch]]]:
        """The readahead of places."""
        return self._iteration.readahead

    def next(self) -> tuple[Batch, Any] | None:
        """Return the next batch and its values on the device, or None after the last one.

        Raises:
            StokerError: the current stream is capturing a graph.
        """
        self._iteration.check_capture()
        if not self._left:
            self._chunk = self.readahead.next()
            if self._chunk is None:
                return None
            batches, places = self._chunk.tag, self._chunk.batch[0]
            self._left.extend(zip(batches, places.split([len(each) for each in batches]), strict=True))
        assert self._chunk is not None  # noqa: S101 - what is left is of a chunk
        self._iteration.use(self._chunk)
        batch, places = self._left.popleft()
        return batch, self._cache.select(places)


class _PlacesSource:
    """Takes batches from the pipeline, several at a time, with the places of their samples in the cache."""

    def __init__(self, cache: DeviceCache, pipeline: BatchPipeline, count: int) -> None:
        self._cache, self._pipeline, self._remaining = cache, pipeline, count

    def __call__(self) -> tuple[list[Batch], torch.Tensor] | None:
        batches: list[Batch] = []
        while len(batches) < min(_BATCHES_AT_ONCE, self._remaining) and (batch := self._pipeline.next()) is not None:
            batches.append(batch)
        self._remaining -= len(batches)
        if not batches:
            return None
        return batches, torch.from_numpy(np.concatenate([self._cache.places(batch) for batch in batches]))
