"""A fetcher with one object to fetch, in virtual time, from a store with scripted faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from stoker import FetchConfig
from stoker._fetch.fetcher import Fetcher
from stoker._memory.ring import Ring
from stoker.abc import Tier
from support.faulty_store import FaultyStore, StoreProfile, pin

SLOT_BYTES = 4 << 20


BODY = random.Random(0).randbytes(100_000)


class Bench:
    """A store with one object ``x``, a ring and a fetcher."""

    def __init__(
        self,
        *faults: str | None,
        profile: StoreProfile | None = None,
        config: FetchConfig | None = None,
        slots: int = 4,
        tiers: Sequence[Tier] = (),
        warm: Tier | None = None,
        body: bytes = BODY,
        small_hedge_bytes: int = 0,
    ) -> None:
        self.store = FaultyStore({"x": body}, profile=profile or StoreProfile(tail_sigma=0.0))
        if faults:
            self.store.script = lambda number, key: faults[number] if number < len(faults) else None
        self.ref = pin({"x": body})[0]
        self.ring = Ring(slots, SLOT_BYTES)
        self.fetcher = Fetcher(
            self.store,
            ring=self.ring,
            rng=random.Random(1),
            config=config,
            tiers=(*tiers, *([warm] if warm is not None else [])),
            small_hedge_bytes=small_hedge_bytes,
        )

    async def fetch(self, *, urgent: bool = False) -> bytes:
        slot = await self.fetcher.fetch(self.ref, urgent=urgent)
        assert self.ring.statistics().ready == 1
        data = bytes(self.ring.view(slot, self.ref.size_bytes))
        self.ring.release(slot)
        return data

    async def fails(self, error: type[Exception], match: str | None = None) -> float:
        """Return the duration of a fetch, which must fail, in seconds."""
        begun = asyncio.get_running_loop().time()
        with pytest.raises(error, match=match) as caught:
            await self.fetcher.fetch(self.ref)
        self.error = caught.value
        return asyncio.get_running_loop().time() - begun

    def leaves_nothing(self) -> bool:
        return self.ring.statistics().free == self.ring.slots and self.store.active == 0

    @property
    def requests(self) -> int:
        return len(self.store.sent_seconds)


def seconds() -> float:
    return asyncio.get_running_loop().time()
