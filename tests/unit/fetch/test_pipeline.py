"""The batch pipeline of one rank: it continues after samples that could not be read."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

import stoker
from stoker import OrderConfig, Schema
from stoker._base.threads import LoopThread
from stoker._fetch.batch_stream import Batch
from stoker._fetch.config import PipelineConfig
from stoker._fetch.pipeline import BatchPipeline
from stoker._order.sharding import RankSharding
from stoker.errors import NotFoundError
from support.faulty_store import FaultyStore, StoreProfile
from support.packed_objects import packed_objects

SCHEMA = Schema({"x": stoker.Array("int64", (20,))})
MANIFEST, OBJECTS = packed_objects(SCHEMA, [{"x": [number] * 20} for number in range(60)], [20, 20, 20])


def test_behind_an_error_an_epoch_continues_as_it_was_dealt_and_ends_where_it_was_to() -> None:
    store = FaultyStore(dict(OBJECTS), profile=StoreProfile(first_byte_seconds=0.0, bytes_per_second=1e12))
    lost = MANIFEST.key(1)
    body = store.objects.pop(lost)
    thread = LoopThread("test pipeline")
    try:
        config = PipelineConfig(order=OrderConfig(shuffle="none"), batch_size=20, memory_bytes=1 << 20)
        pipeline = BatchPipeline(store, MANIFEST, config, thread)
        assert isinstance(pipeline.partition, RankSharding)
        pipeline.start(0, partition=replace(pipeline.partition, batch_size=5), end_epoch=2)
        found: list[Batch] = []
        with pytest.raises(NotFoundError):
            found.extend(islice(iter(pipeline.next, None), 40))
        assert pipeline.position is None
        store.objects[lost] = body
        found.extend(islice(iter(pipeline.next, None), 40))
        assert [len(batch) for batch in found] == [5] * 24
        assert [number for batch in found for number in batch.sample_ids().tolist()] == [*range(60), *range(60)]
        assert [batch.epoch for batch in found] == [0] * 12 + [1] * 12
    finally:
        thread.close()
