"""Tiers that keep by the order against models that are too simple to be wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache as memoized
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stoker import OrderConfig
from stoker._cache.eviction import POLICIES
from stoker._cache.index import AccessForecast, ManagedTier, name_of, size_of
from stoker._fetch.batch_stream import StepQueue
from stoker._order.sharding import RankSharding
from stoker._order.steps import PositionRange, SuperSampleSteps
from stoker.testing import run_virtual
from support.tiers import LARGEST_BYTES, MANIFEST, body, disk_tier, future, memory_tier, offer, read_row


class TierMachine(RuleBasedStateMachine):
    """Whatever is offered, damaged, removed, closed and opened again: what is read is right, and limits hold."""

    @initialize(held=st.integers(1, 6), policy=st.sampled_from(list(POLICIES)), disk=st.booleans())
    def make(self, held: int, policy: str, disk: bool) -> None:
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.held, self.policy, self.is_disk = held, policy, disk
        self.offered: set[int] = set()
        self.runner = asyncio.Runner()
        self.tier: ManagedTier = disk_tier(self.path, held, policy) if disk else memory_tier(held, policy)
        self.ahead = future(epochs=None)
        self.run(self.tier.follow(MANIFEST, self.ahead))

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    @rule(row=st.integers(0, 19))
    def offer(self, row: int) -> None:
        self.run(offer(self.tier, row))
        self.offered.add(row)

    @rule(row=st.integers(0, 19))
    def read(self, row: int) -> None:
        found = self.run(read_row(self.tier, row))
        assert found in (None, body(row))
        assert found is None or row in self.offered

    @rule(seed=st.integers(0, 3))
    def follow_another_order(self, seed: int) -> None:
        before = self.tier.statistics().objects
        self.ahead = future(seed=seed, epochs=None)
        self.run(self.tier.follow(MANIFEST, self.ahead))
        assert self.tier.statistics().objects == before

    @rule(epoch=st.integers(0, 5), position=st.integers(0, 110))
    def go_on(self, epoch: int, position: int) -> None:
        self.ahead.advance(epoch, position)

    @rule(held=st.integers(1, 6))
    def open_again(self, held: int) -> None:
        self.run(self.tier.close())
        complete = sum(file.stat().st_size == size_of(file.name) for file in self.path.rglob("*") if file.is_file())
        if self.is_disk:
            self.held = held
            self.tier = disk_tier(self.path, held, self.policy)
        self.run(self.tier.follow(MANIFEST, self.ahead))
        assert self.tier.statistics().objects == (min(complete, held) if self.is_disk else 0)

    @rule(row=st.integers(0, 19), at=st.integers(0, 4000), damage=st.sampled_from(["flip", "cut", "remove"]))
    def spoil(self, row: int, at: int, damage: str) -> None:
        for file in self.path.rglob(name_of(MANIFEST.ref(row))):
            data = bytearray(file.read_bytes())
            if damage == "remove":
                file.unlink()
            elif damage == "cut":
                file.write_bytes(data[:at])
            elif at < len(data):
                data[at] ^= 0xFF
                file.write_bytes(data)

    @invariant()
    def never_more_than_the_limit(self) -> None:
        if hasattr(self, "tier"):
            found = self.tier.statistics()
            assert found.used_bytes <= found.limit_bytes == self.held * LARGEST_BYTES
            assert len([each for each in self.path.rglob("*") if each.is_file()]) <= self.held

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.run(self.tier.close())
            self.runner.close()
            self.folder.cleanup()


TierMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_tiers_agree_with_the_model = TierMachine.TestCase


EVEN = MANIFEST.remove_runs([replace(MANIFEST.runs[0], first_number=18, rows=2)])
"""A data set that three ranks share without a rest: 108 samples."""


def position_range(world_size: int, rank: int, seed: int, shuffle: Any, epochs: int) -> PositionRange:
    partition = RankSharding(samples=EVEN.samples, lanes=world_size, batch_size=9, rank=rank, world_size=world_size)
    order = OrderConfig(seed=seed, shuffle=shuffle, window=2, lanes=world_size)
    return PositionRange(order=order, sharding=partition, end_epoch=epochs)


async def hits_of(tier: ManagedTier, positions: PositionRange) -> tuple[int, list[int]]:
    """Read what a range of positions needs, in its order; return the number of hits, and that order."""
    ahead, asked, hits = AccessForecast(EVEN.rows.samples, positions), [], 0
    await tier.follow(EVEN, ahead)
    queue = StepQueue(SuperSampleSteps(EVEN.rows.samples, positions), ahead.record_request)
    item = queue.next_item()
    while item is not None:
        asked.append(item.ref)
        is_hit = await read_row(tier, item.ref) is not None
        row, item = item.ref, queue.next_item()
        hits += is_hit
        if not is_hit:
            await offer(tier, row)
    await tier.close()
    return hits, asked


def most_hits(asked: list[int], held: int) -> int:
    """Return the maximum number of hits of a cache of a size, with bypass, by exhaustive search."""

    @memoized
    def most(at: int, keeps: frozenset[int]) -> int:
        if at == len(asked):
            return 0
        row = asked[at]
        if row in keeps:
            return 1 + most(at + 1, keeps)
        choices = [keeps] if len(keeps) >= held else [keeps, keeps | {row}]
        if len(keeps) >= held:
            choices += [keeps - {other} | {row} for other in keeps]
        return max(most(at + 1, each) for each in choices)

    return most(0, frozenset())


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    held=st.integers(1, 17),
    shuffle=st.sampled_from(["window", "block", "none"]),
    epochs=st.integers(2, 4),
)
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_one_node_has_exactly_the_hits_that_belady_allows(
    kind: str, seed: int, held: int, shuffle: str, epochs: int
) -> None:
    with TemporaryDirectory() as folder:
        tier: ManagedTier = memory_tier(held) if kind == "memory" else disk_tier(Path(folder), held)
        hits, asked = run_virtual(hits_of(tier, position_range(1, 0, seed, shuffle, epochs)))
    assert len(asked) == epochs * len(EVEN)
    assert hits == (epochs - 1) * held


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), rank=st.integers(0, 2), held=st.integers(1, 3))
def test_a_rank_whose_part_is_dealt_anew_has_the_most_hits_that_there_can_be(seed: int, rank: int, held: int) -> None:
    positions = position_range(3, rank, seed, "window", 4)
    hits, asked = run_virtual(hits_of(memory_tier(held), positions))
    assert len(set(asked)) > len(EVEN) / 2  # parts differ from epoch to epoch
    assert hits == most_hits(asked, held)
