"""Scenarios that several experiments run."""

from __future__ import annotations

from typing import Any

from stoker._fetch.config import FetchConfig, PipelineConfig
from stoker._format.manifest import Manifest
from stoker._memory.ring import ALIGNMENT_BYTES
from stoker._order.order import OrderConfig
from stoker_sim._scenario import Scenario


def create_lane_scenario(
    manifest: Manifest, order: OrderConfig, batch_size: int, ring_bytes: int, fetch: FetchConfig, **settings: Any
) -> Scenario:
    """Return a scenario with one rank for each lane.

    Args:
        manifest: manifest of the data set.
        order: configuration of the order.
        batch_size: samples in a batch of one rank.
        ring_bytes: memory of each rank without the manifest, in bytes.
        fetch: configuration of each rank's fetches.
        settings: other fields of the scenario.
    """
    memory_bytes, ranks = manifest.file_bytes + ring_bytes, order.lanes
    feed = PipelineConfig(order=order, batch_size=batch_size, world_size=ranks, memory_bytes=memory_bytes, fetch=fetch)
    return Scenario(manifest=manifest, feed=feed, **settings)


def whole_object_fetch(concurrency: int, **settings: Any) -> FetchConfig:
    """Return a configuration that fetches whole super-samples, ``concurrency`` concurrently, without hedging."""
    counts = {"start_concurrency": concurrency, "min_concurrency": concurrency, "max_concurrency": concurrency}
    return FetchConfig(**counts, split_parts=1, hedge=False, **settings)


def aligned_slot_bytes(size_bytes: int) -> int:
    """Return the size of a ring slot for an object of ``size_bytes``, in bytes."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
