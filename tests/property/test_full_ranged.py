"""``full`` beyond memory: whatever the memory, world and place, the same samples in the same order, all bytes right."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import stoker
from stoker import Order, OrderConfig, Prices, Schema
from stoker._base.threads import LoopThread
from stoker._fetch.batch_stream import Batch
from stoker._fetch.config import PipelineConfig
from stoker._fetch.gather import RaggedValues
from stoker._fetch.groups import GroupSteps
from stoker._fetch.pipeline import BatchPipeline
from stoker._fetch.range_plan import MAX_GROUP_SAMPLES, ReadLimits, SampleGroup, plan_reads
from stoker._memory.budget import max_sample_bytes, plan_group_slots
from stoker._order.sharding import RankSharding
from stoker._order.steps import PlannedStep, PositionRange, SuperSampleSteps
from stoker.errors import MemoryBudgetError
from stoker_torch import Budget, Loader
from support.datasets import SCHEMA
from support.faulty_store import FaultyStore, StoreProfile
from support.packed_objects import packed_objects
from support.supersamples import EVERY_KIND, samples_of

FULL = OrderConfig(shuffle="full", seed=11)


# What to read for a group.


@st.composite
def values(draw: st.DrawFn) -> tuple[list[bytes], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Objects, and some values in them (which object, first byte, end): disjoint in any order, with a few twice."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    objects = [rng.bytes(draw(st.integers(0, 400))) for _ in range(draw(st.integers(1, 4)))]
    found: list[tuple[int, int, int]] = []
    for number, body in enumerate(objects):
        cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=24)))
        found += [(number, start, end) for start, end in itertools.pairwise(cuts) if draw(st.booleans())]
    found += [value for value in found if draw(st.integers(0, 20)) == 0]
    found = draw(st.permutations(found))
    columns = np.array(found, np.int64).reshape(-1, 3).T
    return objects, columns[0], columns[1], columns[2]


@given(values(), st.integers(0, 200), st.integers(0, 100), st.integers(1, 300))
@settings(max_examples=200, deadline=None)
def test_after_its_ranges_are_read_every_value_is_at_its_planned_offset(
    case: tuple[list[bytes], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    room_bytes: int,
    gap_bytes: int,
    range_bytes: int,
) -> None:
    objects, which, starts, ends = case
    slot = bytearray(int((ends - starts).sum()) + room_bytes)
    limits = ReadLimits(slot_bytes=len(slot), gap_bytes=gap_bytes, range_bytes=range_bytes)
    reads = plan_reads(which, starts, ends, limits)
    written = 0
    for number in range(len(reads)):
        of, start, end, offset = (
            int(column[number]) for column in (reads.objects, reads.starts, reads.ends, reads.offsets)
        )
        assert offset == written, "one range follows the other"
        slot[offset : offset + end - start] = objects[of][start:end]
        written += end - start
        held = reads.values[reads.value_offsets[number] : reads.value_offsets[number + 1]]
        assert (which[held] == of).all()
        assert starts[held].min() == start
        assert ends[held].max() == end
        assert starts[held].max() - start < range_bytes, "a range that is long enough ends"
        by_place = np.sort(starts[held]), np.sort(ends[held])
        assert (by_place[0][1:] - by_place[1][:-1] <= gap_bytes).all()
    assert written <= limits.slot_bytes
    assert sorted(reads.values.tolist()) == np.flatnonzero(ends > starts).tolist()
    for value, address in enumerate(reads.addresses.tolist()):
        size = int(ends[value] - starts[value])
        assert bytes(slot[address : address + size]) == objects[which[value]][starts[value] : ends[value]]


@given(case=values(), gap_bytes=st.integers(0, 60))
def test_with_room_for_every_gap_exactly_those_that_are_narrow_are_bridged(
    case: tuple[list[bytes], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], gap_bytes: int
) -> None:
    objects, which, starts, ends = case
    size_bytes = 1 + sum(map(len, objects))
    reads = plan_reads(
        which, starts, ends, ReadLimits(slot_bytes=2 * size_bytes, gap_bytes=gap_bytes, range_bytes=size_bytes)
    )
    merged: list[list[int]] = []
    for of, start, end in sorted(zip(which.tolist(), starts.tolist(), ends.tolist(), strict=True)):
        if start == end:
            continue
        if merged and merged[-1][0] == of and start - merged[-1][2] <= gap_bytes:
            merged[-1][2] = max(merged[-1][2], end)
        else:
            merged.append([of, start, end])
    assert np.transpose([reads.objects, reads.starts, reads.ends]).tolist() == merged


def plan_of(starts: list[int], ends: list[int], **limits: int) -> list[tuple[int, int]]:
    given_limits = {"slot_bytes": 1000, "gap_bytes": 10, "range_bytes": 1000} | limits
    places = np.zeros(len(starts), np.int64), np.array(starts), np.array(ends)
    reads = plan_reads(*places, ReadLimits(**given_limits))
    return list(zip(reads.starts.tolist(), reads.ends.tolist(), strict=True))


def test_neighbours_are_one_range_and_so_are_values_with_a_little_between_them() -> None:
    assert plan_of([0, 10, 30], [10, 20, 40]) == [(0, 40)]
    assert plan_of([0, 10, 31], [10, 20, 41]) == [(0, 20), (31, 41)]


def test_where_room_is_short_the_smallest_gaps_are_bridged_and_neighbours_always() -> None:
    starts, ends = [0, 10, 25, 33, 43], [10, 20, 30, 38, 48]
    assert plan_of(starts, ends, slot_bytes=35 + 12) == [(0, 38), (43, 48)]
    assert plan_of(starts, ends, slot_bytes=35 + 7) == [(0, 20), (25, 38), (43, 48)]
    assert plan_of(starts, ends, slot_bytes=35) == [(0, 20), (25, 30), (33, 38), (43, 48)]


def test_a_long_range_is_cut_between_values() -> None:
    starts = list(range(0, 100, 10))
    assert plan_of(starts, [start + 10 for start in starts], range_bytes=35) == [(0, 40), (40, 70), (70, 100)]


# The steps, cut into groups.


@dataclass(frozen=True)
class Case:
    samples: list[int]
    batch_size: int
    world_size: int
    position: int
    group_bytes: int
    drop_last: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    samples = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    return Case(
        samples,
        draw(st.integers(1, 15)),
        draw(st.integers(1, 4)),
        draw(st.integers(0, sum(samples))),
        draw(st.integers(1, 400)),
        draw(st.booleans()),
    )


def sizes_of(group: SampleGroup) -> NDArray[np.int64]:
    """Say that a sample has up to 40 bytes, and some none."""
    sizes: NDArray[np.int64] = (group.super_samples * 7 + group.rows * 13) % 41
    return sizes


def stretch_of(case: Case, rank: int) -> PositionRange:
    partition = RankSharding(
        samples=sum(case.samples),
        batch_size=case.batch_size,
        rank=rank,
        world_size=case.world_size,
        drop_last=case.drop_last,
    )
    return PositionRange(order=FULL, sharding=partition, position=case.position, end_epoch=2)


def walked(case: Case, next_step: Callable[[], PlannedStep[Any] | None], samples_of_item: Any) -> list[Any]:
    """Use steps like a consumer; return the record of each, and its samples as (super-sample, row)."""
    held: dict[int, Any] = {}
    seen, steps = 0, []
    while (step := next_step()) is not None:
        for item, ref in step.first_uses:
            assert item == seen, "items are numbered in order of first use"
            held[item] = ref
            seen += 1
        found: list[Any] = []
        for segment in step.segments:
            which, rows = segment.row_indices()
            found += [samples_of_item(held[segment.items[i]], row) for i, row in zip(which, rows, strict=True)]
            for item in segment.released_after:
                del held[item]
        steps.append((step.number, step.epoch, step.end, step.is_last, step.repeated, found))
    assert not held, "nothing is held behind the end"
    return steps


@given(cases())
@settings(max_examples=150, deadline=None)
def test_the_steps_of_groups_are_those_of_whole_super_samples(case: Case) -> None:
    samples = np.array(case.samples)
    for rank in range(case.world_size):
        whole = SuperSampleSteps(samples, stretch_of(case, rank))
        groups = GroupSteps(samples, stretch_of(case, rank), sizes_of, case.group_bytes)
        expected = walked(case, whole.next, lambda super_sample, row: (super_sample, int(row)))
        found = walked(
            case, groups.next, lambda group, place: (int(group.super_samples[place]), int(group.rows[place]))
        )
        assert found == expected


@given(cases())
@settings(max_examples=200, deadline=None)
def test_groups_stay_within_their_bytes_except_single_samples_and_batches_are_not_split_needlessly(case: Case) -> None:
    steps = GroupSteps(np.array(case.samples), stretch_of(case, 0), sizes_of, case.group_bytes)
    while (step := steps.next()) is not None:
        for _, group in step.first_uses:
            assert len(group) == 1 or sizes_of(group).sum() <= case.group_bytes
        if len(step.segments) > 1:
            cut = [group for _, group in step.first_uses]
            assert sum(int(sizes_of(group).sum()) for group in cut) > case.group_bytes
            assert len(cut) == len(step.segments), "a batch that is cut has its groups for itself"


def test_groups_begin_with_one_batch_and_grow() -> None:
    partition = RankSharding(samples=1000, batch_size=10)
    stretch = PositionRange(order=FULL, sharding=partition, end_epoch=1)
    steps = GroupSteps(np.full(10, 100), stretch, lambda group: np.ones(len(group), np.int64), 200)
    sizes = []
    while (step := steps.next()) is not None:
        sizes += [len(group) for _, group in step.first_uses]
    assert sizes == [10, 20, 40, 80, 160, 200, 200, 200, 90]


def test_groups_of_samples_without_bytes_have_a_bounded_number_of_samples() -> None:
    partition = RankSharding(samples=10 * MAX_GROUP_SAMPLES, batch_size=MAX_GROUP_SAMPLES // 2)
    stretch = PositionRange(order=FULL, sharding=partition, end_epoch=1)
    steps = GroupSteps(np.array([10 * MAX_GROUP_SAMPLES]), stretch, lambda group: np.zeros(len(group), np.int64), 1)
    groups: list[int] = []
    while len(groups) < 5 and (step := steps.next()) is not None:
        groups += [len(group) for _, group in step.first_uses]
    assert max(groups) == MAX_GROUP_SAMPLES


# The budget.


def test_the_memory_of_groups_is_within_the_budget_and_the_least_one_is_named() -> None:
    parts = {"manifest_bytes": 1000, "head_bytes": 5000, "sample_bytes": 70_000, "hedge_buffers": 2}
    with pytest.raises(MemoryBudgetError, match="heads of all super-samples") as refused:
        plan_group_slots(memory_bytes=20_000, **parts)
    figure = int(str(refused.value).partition("memory=")[2].split()[0])
    least = plan_group_slots(memory_bytes=figure, **parts)
    assert least.slot_bytes >= 70_000
    assert least.size_bytes <= figure
    with pytest.raises(MemoryBudgetError):
        plan_group_slots(memory_bytes=figure - 1, **parts)
    ample = plan_group_slots(memory_bytes=10_000_000, **parts)
    assert 9_900_000 < ample.size_bytes <= 10_000_000
    assert ample.holds_groups


def test_the_largest_sample_is_known_from_the_manifest() -> None:
    samples = samples_of(EVERY_KIND, 40)
    manifest, _ = packed_objects(EVERY_KIND, samples, [15, 20, 5])
    assert max_sample_bytes(manifest, {"label": EVERY_KIND["label"]}) == 0
    assert max_sample_bytes(manifest, {"label": EVERY_KIND["label"], "image": EVERY_KIND["image"]}) == 75
    encoded = [dict(zip(EVERY_KIND, EVERY_KIND.encode(sample), strict=True)) for sample in samples]
    largest = max(sum(len(values[name]) for name in ("image", "jpeg", "tokens")) for values in encoded)
    columns = {name: EVERY_KIND[name] for name in ("image", "jpeg", "tokens")}
    assert max_sample_bytes(manifest, columns) >= largest


# The whole feed.

COUNTS = [int(count) for count in np.random.default_rng(0).integers(1, 30, 40)]
SAMPLES = samples_of(EVERY_KIND, sum(COUNTS), seed=5)
MANIFEST, OBJECTS = packed_objects(EVERY_KIND, SAMPLES, COUNTS)
RESIDENT_BYTES = 10_000_000


def flat(batch: Batch) -> list[Any]:
    """Return a batch as something that compares with ``==``."""
    columns = {
        name: (values.data.tobytes(), values.offsets.tolist()) if isinstance(values, RaggedValues) else values.tobytes()
        for name, values in batch.columns.items()
    }
    place = batch.super_samples.tolist(), batch.rows.tolist()
    return [batch.epoch, batch.end, batch.is_last, batch.repeated, *place, columns]


@cache
def fed(start: int = 0, batches: int = 1 << 30, **settings: Any) -> list[Any]:
    """Return the first batches from a position of epoch 0 on, to the end of epoch 1."""
    store = FaultyStore(OBJECTS, profile=StoreProfile(first_byte_seconds=0.0, bytes_per_second=1e12))
    thread = LoopThread("test feed")
    try:
        feed = BatchPipeline(store, MANIFEST, PipelineConfig(order=FULL, end_epoch=2, **settings), thread)
        assert feed.source.slots.size_bytes <= settings["memory_bytes"]
        assert feed.source.slots.holds_groups == (settings["memory_bytes"] < RESIDENT_BYTES)
        feed.start(0, start)
        found: list[Any] = []
        while len(found) < batches and (batch := feed.next()) is not None:
            found.append(flat(batch))
        feed.stop()
        assert feed.source.ring.free == feed.source.ring.slots
        return found
    finally:
        thread.close()


def least_bytes(columns: tuple[str, ...] | None = None) -> int:
    with pytest.raises(MemoryBudgetError) as refused:
        fed(batch_size=10, memory_bytes=1, columns=columns)
    return int(str(refused.value).partition("memory=")[2].split()[0])


@pytest.mark.parametrize("columns", [None, ("label",), ("tokens", "label"), ("image", "caption")])
@pytest.mark.parametrize("extra_bytes", [0, 20_000, 60_000])
def test_every_memory_delivers_what_ample_memory_does(columns: tuple[str, ...] | None, extra_bytes: int) -> None:
    asked: dict[str, Any] = {"batch_size": 37, "columns": columns}
    expected = fed(memory_bytes=RESIDENT_BYTES, **asked)
    assert len(expected) == 2 * -(-len(SAMPLES) // 37)
    assert fed(memory_bytes=least_bytes(columns) + extra_bytes, **asked) == expected


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_an_epoch_whatever_their_memory_and_the_rest_of_one_that_was_left(world_size: int) -> None:
    memory_bytes = least_bytes()
    order = Order(np.array(COUNTS), FULL, 0)
    half = len(SAMPLES) // 2 - len(SAMPLES) // 2 % (20 * world_size)
    for start in (0, half):
        delivered = []
        for rank in range(world_size):
            asked = {"batch_size": 20, "rank": rank, "world_size": world_size, "start": start}
            batches = fed(memory_bytes=memory_bytes + 10_000 * rank, **asked)
            assert batches == fed(memory_bytes=RESIDENT_BYTES, **asked)
            epoch = [batch for batch in batches if batch[0] == 0]
            delivered += [order.sample_ids(np.array(batch[4]), np.array(batch[5])).tolist() for batch in epoch]
        assert sorted(itertools.chain(*delivered)) == sorted(order.at(start, len(SAMPLES)).tolist())


def test_a_batch_larger_than_all_slots_together_is_put_together_from_many_groups() -> None:
    found = fed(memory_bytes=least_bytes(), batch_size=len(SAMPLES))
    assert found == fed(memory_bytes=RESIDENT_BYTES, batch_size=len(SAMPLES))
    assert len(found) == 2


def test_leaving_early_leaves_nothing_in_the_ring_and_heads_are_read_once() -> None:
    store = FaultyStore(OBJECTS, profile=StoreProfile(first_byte_seconds=0.0, bytes_per_second=1e12))
    thread = LoopThread("test feed")
    feed = BatchPipeline(store, MANIFEST, PipelineConfig(order=FULL, batch_size=10, memory_bytes=least_bytes()), thread)
    for epoch in range(3):
        feed.start(epoch)
        assert feed.next() is not None
        feed.stop()
        assert feed.source.ring.free == feed.source.ring.slots
    heads = {(MANIFEST.key(row), 0, int(MANIFEST.rows.head_bytes[row])) for row in range(len(MANIFEST))}
    assert len(heads) == sum(sent in heads for sent in store.sent_ranges)
    thread.close()


# The loader.


@pytest.fixture(scope="module")
def url() -> str:
    wide = Schema({"x": SCHEMA["x"], "image": stoker.Array("uint8", (30, 30)), "text": SCHEMA["text"]})
    url = "memory://full-ranged/ds"
    rng = np.random.default_rng(3)
    with stoker.Packer(url, schema=wide, super_sample_bytes=64_000) as packer:
        for number in range(4000):
            image = rng.integers(0, 256, (30, 30), np.uint8)
            packer.write({"x": number, "image": image, "text": "é" * (number % 40)})
    return url


def test_the_plan_tells_the_requests_and_bytes_of_groups(url: str) -> None:
    with Loader(url, batch_size=50, shuffle="full", memory="1MB", epochs=1) as loader:
        numbers = [number for batch in loader for number in batch["x"].tolist()]
        plan, stats = loader.plan, loader.stats()
        order = Order(loader.manifest.rows.samples, OrderConfig(shuffle="full"), 0)
        assert numbers == order.at(0, 4000).tolist()
        manifest_bytes = len(loader.manifest.to_bytes())
        assert plan.by_groups
        assert "groups" in str(plan)
        assert plan.memory_bytes <= 1_000_000
        assert stats.get_requests - 1 == pytest.approx(plan.get_requests, rel=0.2)
        assert stats.read_bytes - manifest_bytes == pytest.approx(plan.read_bytes, rel=0.2)


def test_an_epoch_that_costs_more_than_allowed_is_refused_with_the_figures(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prices, "store", lambda self, url: self.stores["s3"])
    asked: dict[str, Any] = {"batch_size": 50, "shuffle": "full", "memory": "1MB", "world_size": 2, "rank": 0}
    with Loader(url, **asked) as loader:
        dollars = loader.plan.dollars * 2
    assert 0 < dollars < 1
    with pytest.raises(MemoryBudgetError, match=r"GETs.*max_dollars_per_epoch=.*Raise it"):
        Loader(url, budget=Budget(max_dollars_per_epoch=dollars * 0.99), **asked)
    Loader(url, budget=Budget(max_dollars_per_epoch=dollars * 1.01), **asked).close()
