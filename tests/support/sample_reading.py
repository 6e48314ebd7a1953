"""A reader of samples by number, in virtual time, from a faulty bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stoker import FetchConfig
from stoker._fetch.samples import SampleReader
from stoker._format.manifest import Manifest
from stoker._memory.budget import SampleMemory
from stoker.testing import run_virtual
from support.faulty_store import FaultyStore, StoreProfile

__all__ = ["AMPLE_BYTES", "SampleBench"]

AMPLE_BYTES = 100_000_000


class SampleBench:
    """A reader of some columns, and its store."""

    def __init__(
        self,
        manifest: Manifest,
        objects: Mapping[str, bytes],
        *,
        columns: Sequence[str] | None = None,
        memory_bytes: int = AMPLE_BYTES,
        profile: StoreProfile | None = None,
        seed: int = 0,
        **config: Any,
    ) -> None:
        fetch = FetchConfig(**config)
        self.store = FaultyStore(objects, profile=profile or StoreProfile(tail_sigma=0.0), seed=seed)
        self.memory = SampleMemory.plan(manifest, fetch.hedge_burst if fetch.hedge else 0, memory_bytes)
        self.reader = SampleReader(self.store, manifest, manifest.schema.select(columns), self.memory, fetch)

    async def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return samples by number."""
        return await self.reader.read(np.array(indices, np.int64))

    def samples(self, *indices: int) -> list[dict[str, Any]]:
        """Return samples by number, each call on its own virtual clock."""
        return run_virtual(self.read(indices))

    def requested_ranges(self, *indices: int) -> list[tuple[str, int, int]]:
        """Read samples, and return the requested ranges."""
        before = len(self.store.sent_ranges)
        self.samples(*indices)
        return self.store.sent_ranges[before:]

    def leaves_nothing(self) -> bool:
        """Return whether no memory is held and no request in flight."""
        reader, heads = self.reader, self.reader._heads
        held = reader._value_budget.held, len(heads._locks), sum(head.users for head in heads._heads.values())
        assert heads.held_bytes == sum(head.held_bytes for head in heads._heads.values()) <= heads._budget.limit
        return (held, self.store.active, reader._fetcher._reader._limiter.held) == ((0, 0, 0), 0, 0)
