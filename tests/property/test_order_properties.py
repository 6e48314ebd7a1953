"""What holds for every order, whatever the super-samples, lanes, window, shuffle, seed and epoch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from golden import make_order
from stoker import Order, OrderConfig
from stoker._order.order import Shuffle
from support.units import units_of

SHUFFLES: list[Shuffle] = ["none", "block", "window", "full"]
PIECEWISE: list[Shuffle] = ["none", "block", "window"]


@dataclass(frozen=True)
class Epoch:
    """An epoch; its samples are by super-sample, and with a unit by unit."""

    samples: tuple[int, ...]
    config: OrderConfig
    epoch: int
    super_samples: tuple[int, ...] = ()
    body_bytes: tuple[int, ...] = ()

    def order(self) -> Order:
        if self.config.unit_bytes is None:
            return Order(np.array(self.samples), self.config, self.epoch)
        return Order(units_of(self.super_samples, self.body_bytes, self.config.unit_bytes), self.config, self.epoch)


@st.composite
def epochs(draw: st.DrawFn, shuffles: list[Shuffle] = SHUFFLES, least_samples: int = 1) -> Epoch:
    samples = draw(st.lists(st.integers(1, 40), min_size=1, max_size=30).filter(lambda s: sum(s) >= least_samples))
    shuffle = draw(st.sampled_from(shuffles))
    unit = draw(st.none() | st.integers(1, 2000)) if shuffle == "window" else None
    stays = unit is None and shuffle in ("block", "window")
    config = OrderConfig(
        seed=draw(st.integers(0, 2**64 - 1)),
        shuffle=shuffle,
        window=draw(st.integers(1, 12)),
        lanes=draw(st.integers(1, 20)),
        unit_bytes=unit,
        sticky=draw(st.just(0.0) | st.floats(0.001, 0.99)) if stays else 0.0,
    )
    epoch = draw(st.integers(0, 2**32))
    if unit is None:
        return Epoch(tuple(samples), config, epoch)
    bodies = draw(st.lists(st.integers(0, 5000), min_size=len(samples), max_size=len(samples)))
    return Epoch(tuple(make_order.unit_samples(samples, bodies, unit)), config, epoch, tuple(samples), tuple(bodies))


@given(epochs())
def test_every_sample_is_delivered_exactly_once(epoch: Epoch) -> None:
    order = epoch.order()
    assert sorted(order.at(0, order.samples).tolist()) == list(range(sum(epoch.samples)))


@given(epochs())
@settings(max_examples=60)
def test_the_order_is_that_of_the_independent_script(epoch: Epoch) -> None:
    order, config = epoch.order(), epoch.config
    expected = make_order.order(
        list(epoch.samples), config.shuffle, config.window, order.lanes, config.seed, epoch.epoch, config.sticky
    )
    assert order.at(0, order.samples).tolist() == expected


@given(epochs())
def test_lanes_have_equal_samples_but_for_one_and_all_of_them(epoch: Epoch) -> None:
    order = epoch.order()
    sizes = [order.lane_samples(lane) for lane in range(order.lanes)]
    assert sum(sizes) == order.samples
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [len(range(lane, order.samples, order.lanes)) for lane in range(order.lanes)]


@given(epochs(PIECEWISE))
def test_position_p_is_place_p_div_lanes_of_lane_p_mod_lanes(epoch: Epoch) -> None:
    order = epoch.order()
    whole = order.at(0, order.samples)
    for lane in range(min(order.lanes, order.samples)):
        walked = order.lane(lane).sample_ids(0, order.lane_samples(lane))
        assert whole[lane :: order.lanes].tolist() == walked.tolist()


@given(epochs(PIECEWISE))
def test_at_most_lanes_minus_one_super_samples_are_cut_and_each_lane_is_one_stretch(epoch: Epoch) -> None:
    order = epoch.order()
    lanes = [order.lane(lane) for lane in range(order.lanes)]
    pieces = [
        (int(number), lane.row_range(piece).start, lane.row_range(piece).stop)
        for lane in lanes
        for piece, number in enumerate(lane.super_samples)
    ]
    cut = {number for number, start, end in pieces if (start, end) != (0, epoch.samples[number])}
    assert len(cut) <= order.lanes - 1
    assert all(end > start for _, start, end in pieces)
    # Laid end to end, the pieces are every super-sample from its first row to its last, one after another.
    joined: list[tuple[int, int]] = []
    for number, start, end in pieces:
        if start:
            assert joined[-1] == (number, start)
            joined[-1] = (number, end)
        else:
            joined.append((number, end))
    assert sorted(joined) == list(enumerate(epoch.samples))


@given(epochs(), st.data())
def test_any_range_is_the_slice_of_the_whole_however_it_is_asked(epoch: Epoch, data: st.DataObject) -> None:
    order = epoch.order()
    whole = order.at(0, order.samples).tolist()
    asked = epoch.order()  # nothing computed yet: what one range leaves behind must not change the next
    for _ in range(4):
        start = data.draw(st.integers(0, order.samples))
        end = data.draw(st.integers(start, order.samples))
        assert asked.at(start, end).tolist() == whole[start:end]


@given(epochs(["block", "window", "full"], least_samples=60), st.integers(1, 100))
def test_another_epoch_and_another_seed_give_another_order(epoch: Epoch, step: int) -> None:
    config = epoch.config
    other_seed = replace(config, seed=(config.seed + step) % 2**64)
    orders = (
        epoch.order(),
        replace(epoch, epoch=epoch.epoch + step).order(),
        replace(epoch, config=other_seed).order(),
    )
    assert len({tuple(order.at(0, order.samples).tolist()) for order in orders}) == 3


@given(epochs(PIECEWISE))
def test_a_block_needs_no_more_pieces_than_the_window_and_only_those_it_names(epoch: Epoch) -> None:
    order = epoch.order()
    for lane in map(order.lane, range(order.lanes)):
        limit = {"none": 1, "block": epoch.config.window, "window": epoch.config.window}[epoch.config.shuffle]
        begin = 0
        for block, end in enumerate(lane.block_ends.tolist()):
            content = lane.block(block)
            assert content.pieces.tolist() == lane.used_pieces(block).tolist()
            assert set(content.pieces.tolist()) <= set(lane.pieces_of(block))
            assert len(lane.pieces_of(block)) <= limit
            assert len(content.rows) == len(content.piece_indices) == end - begin
            assert set(content.piece_indices.tolist()) == set(range(len(content.pieces)))
            pieces = content.pieces[content.piece_indices]
            assert lane.used_pieces(block).tolist() == sorted(set(pieces.tolist()))
            rows_of = [lane.row_range(piece) for piece in pieces.tolist()]
            assert all(row in rows for row, rows in zip(content.rows.tolist(), rows_of, strict=True))
            begin = end


@given(epochs(["window"]))
def test_a_piece_s_samples_are_only_in_its_own_blocks_in_equal_parts(epoch: Epoch) -> None:
    order = epoch.order()
    for lane in map(order.lane, range(order.lanes)):
        parts = max(1, min(epoch.config.window, len(lane.super_samples) // 2))
        found: dict[int, dict[int, int]] = {piece: {} for piece in range(len(lane.super_samples))}
        for block in range(len(lane.block_ends)):
            content = lane.block(block)
            for piece in content.pieces[content.piece_indices].tolist():
                found[piece][block] = found[piece].get(block, 0) + 1
        for piece, blocks in found.items():
            count = len(lane.row_range(piece))
            assert set(blocks) <= set(range(piece, piece + parts))
            assert all(abs(each - count / parts) < 1 for each in blocks.values())
            assert sum(blocks.values()) == count


@given(epochs(PIECEWISE), st.data())
def test_every_place_is_in_the_block_that_block_of_names(epoch: Epoch, data: st.DataObject) -> None:
    order = epoch.order()
    place = data.draw(st.integers(0, order.samples - 1))
    lane = order.lane(place % order.lanes)
    block = lane.block_of(place // order.lanes)
    begin = int(lane.block_ends[block - 1]) if block else 0
    assert begin <= place // order.lanes < lane.block_ends[block]


@given(epochs())
def test_locating_a_sample_and_naming_it_again_gives_the_same(epoch: Epoch) -> None:
    order = epoch.order()
    ids = order.at(0, order.samples)
    counts = np.array(epoch.super_samples or epoch.samples)
    super_samples, rows = order.locate(ids)
    assert (rows >= 0).all()
    assert (rows < counts[super_samples]).all()
    assert ((np.cumsum(counts) - counts)[super_samples] + rows).tolist() == ids.tolist()


@given(epochs(["window"]))
def test_units_are_the_runs_of_rows_of_every_super_sample_in_packed_order(epoch: Epoch) -> None:
    units = units_of(epoch.super_samples or epoch.samples, epoch.body_bytes or None, epoch.config.unit_bytes)
    assert units.samples.tolist() == list(epoch.samples)
    joined = [(number, row) for number, rows in map(units.rows_of, range(len(units))) for row in rows]
    counts = epoch.super_samples or epoch.samples
    assert joined == [(number, row) for number, count in enumerate(counts) for row in range(count)]
