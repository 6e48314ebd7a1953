"""Training from a data set: the same on every store, under every schedule and shuffle."""

from __future__ import annotations

from typing import Any

import pytest

from stoker import Continuous, FetchSize, NextBatch, Order, OrderConfig
from stoker_torch import Loader
from support.datasets import pack_at, sample_of
from support.stores import Place

SAMPLES = 200


def sequence(loader: Loader) -> list[int]:
    return [number for batch in loader for number in batch["x"].tolist()]


@pytest.mark.parametrize("shuffle", ["none", "block", "window", "full"])
def test_an_epoch_is_the_orders_on_every_store(place: Place, shuffle: Any) -> None:
    pack_at(place, SAMPLES)
    with Loader(place.url, batch_size=32, shuffle=shuffle, seed=5, epochs=2, options=place.options) as loader:
        for epoch in range(2):
            order = Order(loader.manifest.rows.samples, OrderConfig(seed=5, shuffle=shuffle), epoch)
            assert sequence(loader) == order.at(0, SAMPLES).tolist()
        assert loader.stats().read_bytes >= 2 * loader.manifest.size_bytes


@pytest.mark.parametrize(
    "schedule", [Continuous(), FetchSize(3, 2), FetchSize.half_and_half(8), NextBatch(), NextBatch(4)]
)
def test_a_schedule_changes_when_bytes_come_and_not_what_is_delivered(tmp_path: Any, schedule: Any) -> None:
    place = Place(name="folder", url=str(tmp_path / "ds"), missing_url="")
    pack_at(place, SAMPLES)
    with Loader(place.url, batch_size=8, seed=5, epochs=2) as loader:
        wanted = [sequence(loader), sequence(loader)]
    with Loader(place.url, batch_size=8, seed=5, epochs=2, schedule=schedule) as loader:
        assert [sequence(loader), sequence(loader)] == wanted


def test_some_columns_and_samples_by_ranges_are_read_on_every_store(place: Place) -> None:
    pack_at(place, SAMPLES)
    with Loader(place.url, batch_size=32, columns=["tokens", "x"], epochs=1, options=place.options) as loader:
        for batch in loader:
            for number, tokens in zip(batch["x"].tolist(), batch["tokens"], strict=True):
                assert tokens.tolist() == sample_of(number)["tokens"].tolist()
    with Loader(place.url, batch_size=32, shuffle="full", memory="25KB", epochs=1, options=place.options) as loader:
        assert loader.plan.by_groups
        assert sorted(sequence(loader)) == list(range(SAMPLES))
