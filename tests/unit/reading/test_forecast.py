"""What an epoch is expected to take, against what walking it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stoker import Array, OrderConfig, Schema
from stoker._fetch.range_plan import count_units_read
from stoker._format.manifest import Manifest, ManifestRows, PackRun
from stoker._order.sharding import RankSharding
from stoker._order.steps import PositionRange, SuperSampleSteps
from support.cases import for_each


def manifest(super_samples: int, samples_each: int) -> Manifest:
    column = np.full(super_samples, 1000, "<u4")
    rows = ManifestRows(
        size_bytes=column,
        samples=np.full(super_samples, samples_each, "<u4"),
        head_bytes=column // 10,
        head_crc32c=column,
        crc32c=column,
        tags=np.zeros((super_samples, 16), np.uint8),
    )
    schema = Schema({"x": Array("int64")})
    return Manifest(
        dataset="d", version=1, schema=schema, rows=rows, runs=(PackRun("0123456789abcdef", 0, super_samples),)
    )


@for_each("shuffle", ["none", "block", "window"])
@for_each("limit", [40, 200, 552, 1400])  # whole steps: a short last one reads some again
@for_each(("lanes", "world_size"), [(1, 1), (4, 2), (4, 4)])
def test_the_super_samples_of_an_epoch_are_foreseen(shuffle: Any, limit: int, lanes: int, world_size: int) -> None:
    index = manifest(super_samples=56, samples_each=25)
    order = OrderConfig(seed=1, shuffle=shuffle, window=6, lanes=lanes)
    partition = RankSharding(samples=limit, lanes=lanes, batch_size=4, rank=0, world_size=world_size)
    steps = SuperSampleSteps(
        index.rows.samples, PositionRange(order=order, sharding=partition, epoch=0, position=0, end_epoch=1)
    )
    walked = 0
    while (step := steps.next()) is not None:
        walked += len(step.first_uses)
    assert count_units_read(index, order, partition) == pytest.approx(walked, abs=2 * lanes / world_size + 1)
