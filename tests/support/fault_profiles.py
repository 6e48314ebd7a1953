"""Random fault settings of a store, drawn from a seed, for the random fault schedules."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from stoker._fetch.config import FetchCounters
from stoker.testing import VirtualClockLoop
from support.faulty_store import FAULTS, FaultyStore, StoreProfile

__all__ = ["DEADLINE_SECONDS", "ClockJumps", "Tables", "faulty_profile", "random_profile"]

DEADLINE_SECONDS = 12.0


def faulty_profile(seed: int) -> StoreProfile:
    """Return settings with a few faults, some late responses, and at times an outage."""
    rng = random.Random(seed)
    return StoreProfile(
        tail_sigma=rng.choice([0.3, 1.0]),
        probability={fault: rng.choice([0.0, 0.03, 0.1]) for fault in FAULTS},
        outages=[(0.3, 0.3 + rng.random())] if rng.random() < 0.3 else [],
        closing_seconds=rng.choice([0.0, 0.05]),
    )


def random_profile(rng: random.Random) -> StoreProfile:
    severity = rng.choice([0.0, 0.02, 0.1, 0.25])
    chosen = rng.sample(FAULTS, rng.randint(1, len(FAULTS)))
    begin = rng.uniform(0.0, 2.0)
    period = (begin, begin + rng.choice([0.5, 5.0, 30.0, 300.0]))
    expires = rng.random() < 0.1
    return StoreProfile(
        bytes_per_second=1e6,
        total_bytes_per_second=rng.choice([2e6, 1e9]),
        tail_sigma=rng.choice([0.0, 0.5, 1.5]),
        late_fraction=rng.choice([0.0, 0.0, 0.05]),
        probability={fault: severity * rng.random() for fault in chosen},
        outages=[period] if rng.random() < 0.2 else [],
        storms=[period] if rng.random() < 0.1 else [],
        retry_after_seconds=rng.choice([None, 0.5, 3.0]),
        credentials_expire_at=rng.uniform(0.1, 2.0) if expires else float("inf"),
        credentials_renewable=rng.random() < 0.5,
        closing_seconds=rng.choice([0.0, 0.2]),
        tells_when_it_begins=rng.random() < 0.7,
    )


class ClockJumps:
    """Stops the process for minutes, once or twice, in half of the runs; connections break in half of the stops."""

    def __init__(self, rng: random.Random, store: FaultyStore) -> None:
        self._rng, self._store = random.Random(rng.random()), store
        self._planned = self._rng.choice([0, 0, 1, 2])
        self.count = 0
        self.jumped_seconds = 0.0

    async def play(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        for _ in range(self._planned):
            await asyncio.sleep(self._rng.uniform(0.0, 1.5))
            seconds = self._rng.uniform(20.0, 600.0)
            if self._rng.random() < 0.5:
                seconds = self._rng.uniform(0.1, 2.0)  # too short for the requests to fail by their timeouts
                self._store.lose_connections()
            loop.jump(seconds)
            self.count += 1
            self.jumped_seconds += seconds


@dataclass(slots=True)
class Tables:
    """Counts of events in several runs, by name."""

    injected: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)

    def add(self, stats: FetchCounters) -> None:
        self.retried.update(stats.retries)
        self.counted.update(
            requests=stats.requests,
            hedges=stats.hedges,
            hedge_wins=stats.hedge_wins,
            hedge_losses=stats.hedges - stats.hedge_wins,
            throttled=stats.failures["ThrottledError"],
            checksum_failures=stats.checksum_failures,
        )

    def merge(self, other: Tables) -> None:
        self.injected.update(other.injected)
        self.retried.update(other.retried)
        self.raised.update(other.raised)
        self.counted.update(other.counted)

    def __str__(self) -> str:
        tables = {"injected": self.injected, "retried": self.retried, "raised": self.raised, "counted": self.counted}
        return "\n".join(
            f"  {name}: " + ", ".join(f"{what} {count}" for what, count in table.most_common())
            for name, table in tables.items()
        )
