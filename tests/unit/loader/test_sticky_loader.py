"""Loaders with sticky lanes: the sequence, resumption, what ranks and states refuse, and what a cache has."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from stoker import Order, OrderConfig
from stoker.errors import ConfigError, StateError
from stoker_torch import Loader, StreamDataset
from support.datasets import numbers, pack_numbers

SAMPLES = 1200
LANES = 4
ASKED: dict[str, Any] = {"seed": 3, "window": 3, "lanes": LANES, "sticky": 0.9}


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(SAMPLES)


def order_of(loader: Any, epoch: int = 0, **config: Any) -> Order:
    return Order.of(loader.manifest, OrderConfig(**{**ASKED, **config}), epoch)


def test_the_sequence_is_that_of_the_order(url: str) -> None:
    with Loader(url, batch_size=32, **ASKED) as loader:
        assert "window 3, sticky 0.9" in str(loader.plan)
        for epoch in range(3):
            order = order_of(loader, epoch)
            for number, batch in enumerate(loader):
                begin, end = 32 * number, min(32 * (number + 1), SAMPLES)
                assert sorted(batch["x"].tolist()) == sorted(order.at(begin, end).tolist())


def test_a_state_resumes_with_other_ranks(url: str) -> None:
    with Loader(url, batch_size=20, **ASKED) as loader:
        for _ in range(2):
            numbers(loader)
        iterator = iter(loader)
        before = [number for _ in range(7) for number in next(iterator)["x"].tolist()]
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["sources"][0]["sticky"] == 0.9
    rest = []
    for rank in range(2):
        with Loader(url, batch_size=10, rank=rank, world_size=2, **ASKED) as loader:
            loader.load_state_dict(state)
            rest += numbers(loader)
            assert sorted(before) == sorted(order_of(loader, 2).at(0, 140).tolist())
    assert sorted(before + rest) == list(range(SAMPLES))


def test_a_number_of_numpy_is_a_plain_one_in_the_state(url: str) -> None:
    with Loader(url, batch_size=20, **{**ASKED, "sticky": np.float64(0.9)}) as loader:
        state = loader.state_dict()
        assert type(state["sources"][0]["sticky"]) is float
        loader.load_state_dict(state)


def test_a_state_is_refused_with_another_stickiness_and_is_as_before_without(url: str) -> None:
    settings = {**ASKED, "batch_size": 20}
    with Loader(url, **settings) as sticky, Loader(url, **(settings | {"sticky": 0})) as plain:
        assert "sticky" not in plain.state_dict()["sources"][0]
        with pytest.raises(StateError, match=r"taken with sticky=0\.9, but this loader has 0"):
            plain.load_state_dict(sticky.state_dict())
        with pytest.raises(StateError, match=r"taken with sticky=0\.0, but this loader has 0\.9"):
            sticky.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("value", ["0.9", None, -0.1, 1.0, float("nan"), True])
def test_a_state_with_an_impossible_stickiness_is_refused(url: str, value: object) -> None:
    with Loader(url, batch_size=20, **ASKED) as loader:
        state = loader.state_dict()
        state["sources"][0]["sticky"] = value
        with pytest.raises(StateError, match=r"sticky must be a number from 0 to 0\.99"):
            loader.load_state_dict(state)


def test_ranks_compare_it_and_exchange_as_many_values_as_without(url: str) -> None:
    def compared(**settings: Any) -> dict[str, Any]:
        with Loader(url, batch_size=20, **{**ASKED, **settings}) as loader:
            return loader._state().comparison_values(loader.config)

    sticky, other, plain = compared(), compared(sticky=0.8), compared(sticky=0)
    assert sticky.keys() == plain.keys()
    assert plain["window"] == 3
    assert len({str(each["window"]) for each in (sticky, other, plain)}) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_data_set_delivers_every_sample_once(url: str, workers: int) -> None:
    dataset = StreamDataset(url, **ASKED)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    for epoch in range(2):
        found = [int(sample["x"]) for sample in loader]
        assert sorted(found) == list(range(SAMPLES))
        if not workers:
            assert found == order_of(dataset, epoch).at(0, SAMPLES).tolist()


def test_a_rank_s_cache_has_what_stays_in_its_lanes(url: str) -> None:
    epochs, shares = 6, {}
    for sticky in (0.0, 0.9):
        settings = {**ASKED, "sticky": sticky, "cache": "memory:?limit=64MB", "epochs": epochs}
        with Loader(url, batch_size=30, rank=1, world_size=LANES, **settings) as loader:
            numbers(loader)
            begun = loader.stats().tier_hits.get("memory", 0), loader.stats().get_requests
            for _ in range(epochs - 1):
                numbers(loader)
            hits = loader.stats().tier_hits["memory"] - begun[0]
            shares[sticky] = hits / (hits + loader.stats().get_requests - begun[1])
    assert shares[0.9] > 0.8
    assert shares[0.9] > shares[0.0] + 0.15


def test_it_is_refused_where_super_samples_have_no_lanes(url: str) -> None:
    with pytest.raises(ConfigError, match=r"sticky=0\.9 cannot be used with shuffle 'full'"):
        Loader(url, batch_size=20, sticky=0.9, shuffle="full")
