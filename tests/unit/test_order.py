from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden import make_order
from stoker import Order, OrderConfig
from stoker._order.order import MAX_LANES
from stoker.errors import ConfigError
from support.cases import for_each
from support.units import units_of

GOLDEN: list[make_order.Case] = json.loads(Path(make_order.__file__).with_name("order.json").read_text())
UNITS: list[make_order.UnitCase] = json.loads(Path(make_order.__file__).with_name("unit_order.json").read_text())
STICKY: list[make_order.StickyCase] = json.loads(Path(make_order.__file__).with_name("sticky_order.json").read_text())


def order_of(samples: list[int], *, epoch: int = 0, **config: Any) -> Order:
    return Order(np.array(samples), OrderConfig(**config), epoch)


def everything(order: Order) -> list[int]:
    return list(map(int, order.at(0, order.samples)))


def golden_name(case: make_order.Case) -> str:
    words = (
        case["shuffle"],
        f"w{case['window']}",
        f"l{case['lanes']}",
        f"e{case['epoch']}",
        f"of{len(case['samples'])}",
    )
    return "-".join((*words, str(max(case["samples"]))))


def test_the_golden_file_is_what_the_independent_script_computes() -> None:
    assert make_order.cases() == GOLDEN


@for_each("case", GOLDEN, ids=golden_name)
def test_the_order_is_the_golden_one(case: make_order.Case) -> None:
    order = order_of(
        case["samples"],
        shuffle=case["shuffle"],
        window=case["window"],
        lanes=case["lanes"],
        seed=case["seed"],
        epoch=case["epoch"],
    )
    assert everything(order) == case["ids"]


def test_the_golden_file_of_sticky_lanes_is_what_the_independent_script_computes() -> None:
    assert make_order.sticky_cases() == STICKY


@for_each("golden", STICKY, ids=lambda golden: f"{golden_name(golden['case'])}-{golden['sticky']}")
def test_the_order_of_sticky_lanes_is_the_golden_one(golden: make_order.StickyCase) -> None:
    case = dict(golden["case"])
    ids, samples, epoch = (case.pop(name) for name in ("ids", "samples", "epoch"))
    assert everything(order_of(samples, epoch=epoch, sticky=golden["sticky"], **case)) == ids  # type: ignore[arg-type]  # of the file


def test_the_golden_file_of_units_is_what_the_independent_script_computes() -> None:
    assert make_order.unit_cases() == UNITS


@pytest.mark.parametrize("golden", UNITS, ids=lambda golden: golden_name(golden["case"]))
def test_the_order_of_units_is_the_golden_one(golden: make_order.UnitCase) -> None:
    case, unit_bytes = golden["case"], golden["unit_bytes"]
    units = units_of(golden["super_samples"], golden["body_bytes"], unit_bytes)
    config = OrderConfig(unit_bytes=unit_bytes, seed=case["seed"], window=case["window"], lanes=case["lanes"])
    order = Order(units, config, case["epoch"])
    assert units.samples.tolist() == case["samples"]
    assert order.at(0, min(500, order.samples)).tolist() == case["ids"]


def test_the_window_is_8_super_samples_or_256_units_unless_it_is_given() -> None:
    assert OrderConfig().window == 8
    assert OrderConfig(unit_bytes=1 << 20).window == 256
    assert OrderConfig(unit_bytes=1 << 20, window=9).window == 9


@pytest.mark.parametrize("shuffle", ["none", "block", "full"])
def test_only_window_has_units(shuffle: Any) -> None:
    with pytest.raises(ConfigError, match=f"cannot be used with shuffle '{shuffle}': only 'window' permutes units"):
        OrderConfig(shuffle=shuffle, unit_bytes=100)


def test_an_order_of_units_refuses_counts_by_super_sample_and_the_reverse() -> None:
    with pytest.raises(ConfigError, match=r"unit_bytes=50; use Order.of\(manifest, config, epoch\)"):
        Order(np.array([5]), OrderConfig(unit_bytes=50), 0)
    with pytest.raises(ConfigError, match="by units of 50 bytes"):
        Order(units_of([5], [500], 50), OrderConfig(), 0)


def test_the_golden_file_has_every_shuffle_cut_super_samples_and_lanes_without_a_sample() -> None:
    assert {case["shuffle"] for case in GOLDEN} == {"none", "block", "window", "full"}
    assert any(sum(case["samples"]) % case["lanes"] for case in GOLDEN)
    assert any(sum(case["samples"]) < case["lanes"] for case in GOLDEN)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"seed": -1}, "seed must be at least 0 and less than .*, not -1"),
        ({"seed": 1 << 64}, "seed must be .* less than 18,446,744,073,709,551,616, not 18446744073709551616"),
        ({"shuffle": "random"}, "shuffle must be one of none, block, window, full, not 'random'"),
        ({"window": 0}, "window must be at least 1, not 0"),
        ({"unit_bytes": 0}, "unit_bytes must be at least 1 and at most 1,073,741,824, or None, not 0"),
        ({"lanes": 0}, "lanes must be at least 1 and .*, not 0"),
        ({"lanes": MAX_LANES + 1}, "lanes must be .* at most 65,536, not 65537"),
    ],
)
def test_a_config_out_of_range_is_refused_with_its_value(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        OrderConfig(**config)


def test_none_on_one_lane_is_the_packed_order() -> None:
    order = order_of([3, 1, 4], shuffle="none")
    assert everything(order) == list(range(8))


def test_none_on_lanes_deals_the_parts_of_the_packed_order_in_turn() -> None:
    order = order_of([3, 1, 4], shuffle="none", lanes=3)
    assert everything(order) == [0, 3, 6, 1, 4, 7, 2, 5]


def test_none_does_not_depend_on_seed_or_epoch() -> None:
    assert everything(order_of([5, 5], shuffle="none", seed=1)) == everything(
        order_of([5, 5], shuffle="none", seed=2, epoch=9)
    )


@pytest.mark.parametrize("shuffle", ["block", "window", "full"])
def test_shuffled_orders_differ_between_epochs_and_between_seeds(shuffle: str) -> None:
    of = [everything(order_of([25] * 8, shuffle=shuffle, seed=s, epoch=e)) for s, e in ((1, 0), (1, 1), (2, 0), (2, 1))]
    assert len(set(map(tuple, of))) == 4


def test_lanes_are_dealt_anew_each_epoch() -> None:
    dealt = {tuple(order_of([10] * 16, lanes=4, epoch=epoch).lane(0).super_samples.tolist()) for epoch in range(5)}
    assert len(dealt) == 5


def test_a_block_of_block_is_all_of_its_group_and_nothing_else() -> None:
    order = order_of([4] * 7, shuffle="block", window=3)
    lane = order.lane(0)
    assert lane.block_ends.tolist() == [12, 24, 28]
    assert [lane.pieces_of(block) for block in range(3)] == [range(3), range(3, 6), range(6, 7)]
    for block in range(3):
        ids = lane.sample_ids(block * 12, len(lane.block(block).rows)).tolist()
        numbers = lane.super_samples[block * 3 : (block + 1) * 3]
        assert sorted(ids) == sorted(int(n) * 4 + row for n in numbers for row in range(4))


def test_window_is_capped_at_half_of_the_lane_s_super_samples() -> None:
    lanes = [order_of([8] * n, window=8).lane(0) for n in (1, 2, 3, 4, 15, 16, 40)]
    assert [max(map(len, map(lane.pieces_of, range(len(lane.block_ends))))) for lane in lanes] == [1, 1, 1, 2, 7, 8, 8]


def test_a_window_block_has_one_part_of_every_piece_in_the_window() -> None:
    lane = order_of([12] * 10, window=4).lane(0)
    assert np.diff(lane.block_ends, prepend=0).tolist() == [3, 6, 9, *[12] * 7, 9, 6, 3]
    for block in range(3, 10):
        content = lane.block(block)
        assert content.pieces.tolist() == list(range(block - 3, block + 1))
        assert np.bincount(content.piece_indices).tolist() == [3, 3, 3, 3]


def test_pieces_smaller_than_the_window_still_deliver_every_row_once() -> None:
    order = order_of([1] * 20, window=8)
    assert sorted(everything(order)) == list(range(20))


def test_a_place_between_empty_blocks_is_found_in_the_block_that_holds_it() -> None:
    lane = order_of([1] * 20, window=8).lane(0)
    sizes = np.diff(lane.block_ends, prepend=0)
    assert (sizes == 0).any()
    for place in range(20):
        block = lane.block_of(place)
        assert sizes[block] > 0
        assert lane.block_ends[block] - sizes[block] <= place < lane.block_ends[block]


def test_seeking_back_gives_what_was_there_before() -> None:
    order = order_of([9] * 30, window=4, seed=3)
    lane = order.lane(0)
    first = lane.sample_ids(0, 50).tolist()
    lane.sample_ids(200, 70)
    assert lane.sample_ids(0, 50).tolist() == first


def test_full_has_one_lane_whatever_was_asked() -> None:
    order = order_of([5, 6], shuffle="full", lanes=4)
    assert order.lanes == 1
    assert order.lane_samples(0) == 11
    assert everything(order) == everything(order_of([5, 6], shuffle="full", window=3))


def test_more_lanes_than_samples_leaves_the_last_lanes_empty() -> None:
    order = order_of([1, 2], lanes=5, shuffle="none")
    assert [order.lane_samples(lane) for lane in range(5)] == [1, 1, 1, 0, 0]
    assert len(order.lane(4).super_samples) == 0
    assert order.lane(4).block_ends.tolist() == []
    assert everything(order) == [0, 1, 2]


def test_locate_and_sample_ids_are_inverse() -> None:
    order = order_of([3, 1, 4, 1, 5])
    super_samples, rows = order.locate(np.arange(14))
    assert super_samples.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4]
    assert rows.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0, 0, 1, 2, 3, 4]
    assert order.sample_ids(super_samples, rows).tolist() == list(range(14))


def test_a_manifest_of_many_samples_is_sought_without_being_laid_out() -> None:
    order = order_of([1_000_000] * 2000, window=2, lanes=2)
    middle = order.samples // 2
    ids = order.at(middle, middle + 10)
    assert len(set(ids.tolist())) == 10


def test_a_lane_keeps_the_row_permutations_of_no_more_pieces_than_the_window() -> None:
    lane = order_of([6] * 40, window=3).lane(0)
    for block in range(len(lane.block_ends)):
        lane.block(block)
        assert len(lane._row_permutations) <= 3


def test_a_super_sample_of_which_nothing_is_used_is_no_piece() -> None:
    order = order_of([3, 0, 2], shuffle="none")
    assert order.lane(0).super_samples.tolist() == [0, 2]
    assert everything(order) == [0, 1, 2, 3, 4]
