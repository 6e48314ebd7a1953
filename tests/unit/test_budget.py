"""The memory budget: its use, and the exact minimum in the error if it is too small."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import stoker
from stoker import OrderConfig, Schema
from stoker._memory.budget import (
    SlotPlan,
    UnitSizes,
    max_sample_bytes,
    plan_group_slots,
    plan_slots,
    plan_unit_slots,
    window_items,
)
from stoker._memory.ring import ALIGNMENT_BYTES
from stoker._order.sharding import RankSharding
from stoker._order.units import Units
from stoker.errors import MemoryBudgetError
from support.cases import for_each
from support.packed_objects import packed_objects
from support.supersamples import EVERY_KIND, manifest_of, samples_of

MANIFEST = manifest_of(["v1"] * 40)
MANIFEST_BYTES = 1234


def plan(
    memory_bytes: int, *, shuffle: Any = "window", window: int = 4, lanes: int = 2, world_size: int = 1
) -> SlotPlan:
    order = OrderConfig(shuffle=shuffle, window=window, lanes=lanes)
    partition = RankSharding(
        samples=MANIFEST.samples, lanes=1 if shuffle == "full" else lanes, batch_size=6, world_size=world_size
    )
    return plan_slots(MANIFEST, MANIFEST_BYTES, order, partition, memory_bytes)


def figure_of(call: Callable[[int], SlotPlan]) -> int:
    """Return the minimum in the error of an empty budget."""
    with pytest.raises(MemoryBudgetError) as caught:
        call(0)
    found = re.search(r"give memory=(\d+) ", str(caught.value))
    assert found is not None
    return int(found[1])


CASES: list[dict[str, Any]] = [
    {"shuffle": shuffle, "window": window, "lanes": lanes, "world_size": world_size}
    for shuffle in ("none", "block", "window", "full")
    for window in (1, 8, 64)
    for lanes, world_size in ((1, 1), (4, 1), (4, 2), (3, 2))
]


@for_each("case", CASES, ids=str)
def test_the_minimum_in_the_error_is_exact_to_the_byte(case: dict[str, Any]) -> None:
    figure = figure_of(lambda memory_bytes: plan(memory_bytes, **case))
    fits = plan(figure, **case)
    assert fits.size_bytes == figure
    assert fits.slots == fits.window_slots + 2
    with pytest.raises(MemoryBudgetError, match=f"memory={figure} "):
        plan(figure - 1, **case)


@for_each("case", CASES, ids=str)
@for_each("memory_bytes", [700_000, 1_000_000, 10**9])
def test_no_plan_takes_more_than_the_budget_nor_more_than_an_epoch_can_fill(
    case: dict[str, Any], memory_bytes: int
) -> None:
    spent = plan(memory_bytes, **case)
    assert spent.size_bytes <= memory_bytes
    assert 1 <= spent.hedge_slots < spent.slots - spent.window_slots, "there is room for an item in flight"
    assert spent.slots <= spent.window_slots + 2 * len(MANIFEST)
    assert spent.slot_bytes % ALIGNMENT_BYTES == 0
    assert 0 <= spent.slot_bytes - MANIFEST.largest_bytes < ALIGNMENT_BYTES


def test_a_larger_budget_only_looks_farther_ahead() -> None:
    plans = [plan(memory_bytes) for memory_bytes in (100_000, 200_000, 400_000)]
    assert {spent.window_slots for spent in plans} == {8}
    assert plans[0].slots < plans[1].slots < plans[2].slots


@pytest.mark.parametrize(("shuffle", "slots"), [("none", 2), ("window", 8), ("block", 16), ("full", 40)])
def test_a_window_is_counted_once_a_lane_and_a_block_twice(shuffle: Any, slots: int) -> None:
    partition = RankSharding(samples=MANIFEST.samples, lanes=2, batch_size=6)
    assert window_items(40, OrderConfig(shuffle=shuffle, window=4, lanes=2), partition) == slots


def test_a_window_larger_than_the_data_set_needs_no_more_than_that() -> None:
    partition = RankSharding(samples=10, batch_size=6)
    assert window_items(3, OrderConfig(window=64), partition) == 3


@for_each("sample_bytes", [0, 1, 64, 1025, 3_000_000])
@for_each("hedge_buffers", [0, 6])
def test_the_figure_for_groups_is_enough_and_not_a_byte_too_much(sample_bytes: int, hedge_buffers: int) -> None:
    def groups(memory_bytes: int) -> SlotPlan:
        return plan_group_slots(
            manifest_bytes=MANIFEST_BYTES,
            head_bytes=5000,
            sample_bytes=sample_bytes,
            hedge_buffers=hedge_buffers,
            memory_bytes=memory_bytes,
        )

    figure = figure_of(groups)
    fits = groups(figure)
    assert fits.size_bytes == figure
    assert fits.holds_groups
    assert fits.slot_bytes >= max(1, sample_bytes)
    with pytest.raises(MemoryBudgetError, match=f"memory={figure} "):
        groups(figure - 1)
    assert groups(50 * figure).size_bytes <= 50 * figure


def test_the_most_of_a_sample_is_exact_for_fixed_columns_and_enough_for_ragged_ones() -> None:
    schema = Schema(
        {"image": stoker.Array("uint8", (50, 50)), "mask": stoker.Array("bool", (1000,)), "b": stoker.Bytes()}
    )
    samples = [{"image": [[0] * 50] * 50, "mask": [True] * 1000, "b": b"x" * size} for size in (10, 9000, 0)]
    manifest, _ = packed_objects(schema, samples, [1, 2])
    assert max_sample_bytes(manifest, {"image": schema["image"]}) == 2500
    assert max_sample_bytes(manifest, {"image": schema["image"], "mask": schema["mask"]}) == 3500
    assert max_sample_bytes(manifest, {"b": schema["b"]}) >= 9000
    assert max_sample_bytes(manifest, dict(schema)) >= 12500


@pytest.mark.parametrize("columns", [("image",), ("image", "jpeg"), ("label",)])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_minimum_for_units_is_exact_and_their_memory_is_within_the_budget(
    columns: tuple[str, ...], workers: int
) -> None:
    manifest, _ = packed_objects(EVERY_KIND, samples_of(EVERY_KIND, 60), [20, 25, 15])
    order = OrderConfig(window=5, lanes=2, unit_bytes=300)
    units = Units.of(manifest.rows, 300)
    wanted = {name: EVERY_KIND[name] for name in columns}
    sizes = UnitSizes.of(manifest, wanted, units)
    assert (sizes.max_bytes == sizes.expected_bytes) == all(column.is_fixed for column in wanted.values())

    def plan_units(memory_bytes: int) -> SlotPlan:
        return plan_unit_slots(
            units=len(units),
            sizes=sizes,
            order=order,
            sharding=RankSharding(samples=60, lanes=2, batch_size=6),
            manifest_bytes=MANIFEST_BYTES,
            head_bytes=777,
            hedge_buffers=2,
            memory_bytes=memory_bytes,
            workers=workers,
        )

    figure = figure_of(plan_units)
    least, ample = plan_units(figure), plan_units(100 * figure)
    assert least.size_bytes * workers == figure
    assert least.slots >= least.window_slots + 2 == 12
    assert least.holds_units
    assert ample.slots <= least.slots + len(units) + 2
    with pytest.raises(MemoryBudgetError, match=f"memory={figure} "):
        plan_units(figure - 1)
