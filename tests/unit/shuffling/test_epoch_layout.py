"""The layout of a materialized epoch: at every position what ``full`` has there, whatever the lanes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from stoker import Array, Order, OrderConfig, Schema
from stoker._format.manifest import Manifest, ManifestRows, PackRun
from stoker._format.supersample import SuperSampleRecord
from stoker._order.epoch_layout import MAX_EPOCH, MAX_SLICES, EpochLayout, even_slice_count
from stoker.errors import ConfigError


def manifest_of(counts: list[int], *, dataset: str = "digits", version: int = 1) -> Manifest:
    packed = [
        SuperSampleRecord(ordinal=number, size_bytes=10_000, samples=count, head_bytes=9_000, head_crc32c=1, crc32c=2)
        for number, count in enumerate(counts)
    ]
    return Manifest(
        dataset=dataset,
        version=version,
        schema=Schema({"x": Array("int64")}),
        rows=ManifestRows.of(packed),
        runs=(PackRun("0" * 16, 0, len(counts)),),
    )


MANIFEST = manifest_of([7, 1, 12, 30, 5, 2, 40, 3])
SAMPLES = 100


def layout(lanes: int = 4, *, seed: int = 7, epoch: int = 3, manifest: Manifest = MANIFEST) -> EpochLayout:
    return EpochLayout(manifest, seed=seed, lanes=lanes, epoch=epoch)


@pytest.mark.parametrize("lanes", [1, 2, 3, 7, 8, 99, 100, 101, 300])
@pytest.mark.parametrize("cuts", [[100], [30, 30, 40], [1] * 100, [99, 1]])
def test_none_with_lanes_over_the_rows_is_full(lanes: int, cuts: list[int]) -> None:
    epoch = layout(lanes)
    in_rows = Order(np.array(cuts), OrderConfig(shuffle="none", lanes=lanes), epoch=3).at(0, SAMPLES)
    full = Order(MANIFEST.rows.samples, OrderConfig(shuffle="full", seed=7), epoch=3).at(0, SAMPLES)
    assert epoch.samples_of(in_rows).tolist() == full.tolist()
    assert epoch.positions(in_rows).tolist() == list(range(SAMPLES))


@pytest.mark.parametrize("lanes", [1, 3, 8, 150])
def test_where_a_sample_is_is_found_from_either_side(lanes: int) -> None:
    epoch = layout(lanes)
    rows = np.arange(SAMPLES)
    assert epoch.rows_of(epoch.samples_of(rows)).tolist() == rows.tolist()
    assert sorted(epoch.samples_of(rows).tolist()) == rows.tolist()


@pytest.mark.parametrize("lanes", [1, 2, 5, 8, 12])
def test_slices_are_whole_lanes_or_equal_parts_of_one(lanes: int) -> None:
    epoch = layout(lanes)
    for at_least in range(1, 40):
        slices = even_slice_count(at_least, lanes)
        assert slices >= at_least
        starts = epoch.slice_starts(slices)
        assert (starts[0], starts[-1], len(starts)) == (0, SAMPLES, slices + 1)
        sizes = np.diff(starts)
        assert sizes.max() - sizes.min() <= max(1, lanes // slices)
        for start, stop in itertools.pairwise(starts.tolist()):
            within = epoch.lane_row_counts(start, stop)
            assert sum(within) == stop - start
            assert len(within) == max(1, lanes // slices)


def test_the_least_slices_that_are_even_are_taken() -> None:
    assert [even_slice_count(count, 12) for count in (1, 2, 3, 4, 5, 7, 12, 13, 25)] == [1, 2, 3, 4, 6, 12, 12, 24, 36]


@pytest.mark.parametrize(("lanes", "slices"), [(4, 3), (4, 6), (4, 0), (4, -4), (1, MAX_SLICES + 1)])
def test_slices_that_are_not_even_are_refused(lanes: int, slices: int) -> None:
    with pytest.raises(ConfigError, match="slices"):
        layout(lanes).slice_starts(slices)


def test_more_lanes_than_samples_leave_lanes_empty() -> None:
    epoch = layout(300)
    starts = epoch.slice_starts(300)
    assert np.diff(starts).tolist() == [1] * 100 + [0] * 200
    assert epoch.lane_row_counts(0, 100) == [1] * 100
    assert epoch.lane_row_counts(100, 100) == []


def test_everything_that_fixes_the_sequence_fixes_the_folder_and_the_ids() -> None:
    epochs = [
        layout(),
        layout(8),
        layout(seed=8),
        layout(epoch=4),
        layout(manifest=manifest_of([100], version=2)),
        layout(manifest=manifest_of([100], dataset="letters")),
    ]
    for one, other in itertools.combinations(epochs, 2):
        assert one.folder != other.folder
        assert one.dataset != other.dataset
        assert one.run_id("slice", 0) != other.run_id("slice", 0)
    assert epochs[0].run_folder == epochs[3].run_folder
    assert layout().run_id("slice", 0) != layout().run_id("slice", 1)


def test_folders_of_a_run_stand_in_the_order_of_its_epochs_and_never_change() -> None:
    assert layout().folder == "epochs/91dc3d0d21b891e5/00000003/"
    folders = [layout().folder_of(epoch) for epoch in (0, 9, 10, 99, 100, MAX_EPOCH)]
    assert folders == sorted(folders)


@pytest.mark.parametrize("epoch", [-1, MAX_EPOCH + 1, 1 << 64])
def test_an_epoch_without_a_folder_is_refused(epoch: int) -> None:
    with pytest.raises(ConfigError, match="epoch"):
        layout(epoch=epoch)
