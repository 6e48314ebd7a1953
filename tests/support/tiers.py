"""Tiers without a loader: a small data set as a manifest and its objects, and the access forecast of a run on it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from stoker import Array, OrderConfig, Schema
from stoker._cache.disk_folder import FolderConfig
from stoker._cache.disk_tier import DiskTier
from stoker._cache.index import AccessForecast, ManagedTier
from stoker._cache.tiers import MemoryTier
from stoker._order.sharding import RankSharding
from stoker._order.steps import PositionRange
from stoker.abc import ObjectRef
from support.packed_objects import packed_objects

COUNTS = [5 + row % 3 for row in range(20)]
SCHEMA = Schema({"image": Array("uint8", (300, 3))})
LARGEST_BYTES = 8192
"""At least the size of any object, and two disk blocks: every object occupies that."""


MANIFEST, OBJECTS = packed_objects(
    SCHEMA, [{"image": np.full((300, 3), index % 251, np.uint8)} for index in range(sum(COUNTS))], COUNTS
)


def body(row: int) -> bytes:
    """Return the bytes of a row's object."""
    return OBJECTS[MANIFEST.key(row)]


def future(*, seed: int = 0, epochs: int | None = 4) -> AccessForecast:
    """Return the access forecast of one of two ranks that share a lane, and so all super-samples, but no cache."""
    partition = RankSharding(samples=MANIFEST.samples, batch_size=8, world_size=2)
    stretch = PositionRange(order=OrderConfig(seed=seed, window=2), sharding=partition, end_epoch=epochs)
    return AccessForecast(MANIFEST.rows.samples, stretch)


def memory_tier(held: int, policy: str = "next-use") -> MemoryTier:
    """Return a memory tier with room for ``held`` objects."""
    return MemoryTier(held * LARGEST_BYTES, policy, largest_bytes=LARGEST_BYTES)


def disk_tier(
    path: Path,
    held: int,
    policy: str = "next-use",
    *,
    owners: int = 1,
    preferred: int = 0,
    dataset: str = "d",
    behind_bytes: int = 1 << 20,
) -> DiskTier:
    """Return a disk tier with room for ``held`` objects per owner."""
    config = FolderConfig(
        path=path, dataset=dataset, owners=owners, preferred=preferred, share_bytes=held * LARGEST_BYTES
    )
    return DiskTier(config, policy, largest_bytes=LARGEST_BYTES, max_queued_bytes=behind_bytes)


async def read_row(tier: ManagedTier, row: int) -> bytes | None:
    """Return the object of a row in a tier, None if it has none."""
    into = bytearray(len(body(row)))
    return bytes(into) if await tier.read(MANIFEST.ref(row), memoryview(into)) else None


async def offer(tier: ManagedTier, *rows: int) -> None:
    """Offer the objects of some rows, each after the one before is stored."""
    for row in rows:
        tier.offer(MANIFEST.ref(row), memoryview(body(row)))
        if isinstance(tier, DiskTier):
            await tier.flush()


class SilentTier:
    """A tier that never answers.

    Args:
        name: name in statistics and traces.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        await asyncio.sleep(1e6)
        return True

    def offer(self, ref: ObjectRef, data: memoryview) -> None: ...

    async def close(self) -> None: ...
