"""Loaders that permute units of super-samples: the sequence, resumption, the plan, and what cannot be combined."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from torch.utils.data import DataLoader

import stoker
from stoker import Order, OrderConfig
from stoker.errors import ConfigError, MemoryBudgetError, StateError
from stoker_torch import Loader, StreamDataset
from support.datasets import SCHEMA, numbers, pack_numbers, sample_of

SAMPLES = 700
UNIT = 300
ASKED: dict[str, Any] = {"seed": 3, "unit": UNIT, "window": 12}


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(SAMPLES)


def order_of(loader: Any, epoch: int = 0, lanes: int = 1) -> Order:
    return Order.of(loader.manifest, OrderConfig(seed=3, window=12, unit_bytes=UNIT, lanes=lanes), epoch)


@pytest.mark.parametrize("memory", ["least", "64MB"])
def test_the_sequence_is_that_of_the_order_in_any_memory_and_all_values_are_right(url: str, memory: str) -> None:
    if memory == "least":
        with pytest.raises(MemoryBudgetError, match="a window of 12 units") as refused:
            Loader(url, batch_size=32, memory=1, **ASKED)
        found = re.search(r"memory=(\d+) ", str(refused.value))
        assert found is not None
        memory = found[1]
    with Loader(url, batch_size=32, memory=memory, **ASKED) as loader:
        for epoch in range(2):
            batches = list(loader)
            assert numbers(batches) == order_of(loader, epoch).at(0, SAMPLES).tolist()
            for batch in batches:
                for place, number in enumerate(batch["x"].tolist()):
                    wanted = sample_of(number)
                    assert batch["image"][place].tolist() == wanted["image"].tolist()
                    assert batch["text"][place] == wanted["text"]
                    assert batch["tokens"][place].tolist() == wanted["tokens"].tolist()


@pytest.mark.parametrize("columns", [["x"], ["image"], ["text", "x"]])
def test_only_the_wanted_columns_are_read(url: str, columns: list[str]) -> None:
    with Loader(url, batch_size=32, with_ids=True, epochs=1, columns=columns, **ASKED) as loader:
        ids = [number for batch in loader for number in batch["__id__"].tolist()]
        assert ids == order_of(loader).at(0, SAMPLES).tolist()
        assert loader.stats().get_requests - 1 == loader.plan.get_requests


def test_a_state_resumes_with_other_ranks_and_batch_sizes(url: str) -> None:
    with Loader(url, batch_size=20, lanes=2, **ASKED) as loader:
        iterator = iter(loader)
        before = [number for _ in range(7) for number in next(iterator)["x"].tolist()]
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["sources"][0]["unit"] == UNIT
    rest = []
    for rank in range(2):
        with Loader(url, batch_size=9, lanes=2, rank=rank, world_size=2, **ASKED) as loader:
            loader.load_state_dict(state)
            rest += numbers(loader)
            assert sorted(before) == sorted(order_of(loader, lanes=2).at(0, 140).tolist())
    assert sorted(before + rest) == list(range(SAMPLES))


def test_a_state_of_units_and_one_of_super_samples_refuse_each_other(url: str) -> None:
    with Loader(url, batch_size=20, **ASKED) as units, Loader(url, batch_size=20, seed=3, window=12) as whole:
        assert "unit" not in whole.state_dict()["sources"][0]
        with pytest.raises(StateError, match="taken with unit=300, but this loader has None"):
            whole.load_state_dict(units.state_dict())
        with pytest.raises(StateError, match="taken with unit=None, but this loader has 300"):
            units.load_state_dict(whole.state_dict())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_data_set_delivers_every_sample_once(url: str, workers: int) -> None:
    lanes = max(1, workers)
    dataset = StreamDataset(url, lanes=lanes, **ASKED)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    found = [int(sample["x"]) for sample in loader]
    assert sorted(found) == list(range(SAMPLES))
    if not workers:
        assert found == order_of(dataset).at(0, SAMPLES).tolist()


def test_a_budget_without_room_to_load_for_a_cluster_copies_only_what_is_there(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"batch_size": 32, "shuffle": "full", "seed": 3}
    with pytest.raises(MemoryBudgetError) as refused:
        Loader(url, memory=1, **settings)
    found = re.search(r"memory=(\d+) ", str(refused.value))
    assert found is not None
    with Loader(url, memory=found[1], cluster="memory:?limit=1MB", **settings) as loader:
        assert loader.plan.by_groups
        assert "memory= has no room to load super-samples for cluster=" in caplog.text
    caplog.clear()
    with Loader(url, memory=2 * int(found[1]), cluster="memory:?limit=1MB", **settings) as loader:
        assert not caplog.text


def test_the_plan_has_the_requests_and_bytes_of_units() -> None:
    url = "memory://units-of-one-column/ds"
    with stoker.Packer(url, schema={"x": SCHEMA["x"], "data": stoker.Bytes()}, super_sample_bytes=50_000) as packer:
        packer.extend({"x": number, "data": bytes([number % 256]) * 1000} for number in range(1000))
    with Loader(url, batch_size=50, unit="10KB", epochs=1) as loader:
        assert len(numbers(loader)) == 1000
        plan, stats = loader.plan, loader.stats()
        manifest_bytes = len(loader.manifest.to_bytes())
        assert stats.get_requests - 1 == plan.get_requests
        assert stats.read_bytes - manifest_bytes == pytest.approx(plan.read_bytes, rel=0.01)
        assert "window 256 units of 9.77 KiB" in str(plan)
        assert "slots of units" in str(plan)
        assert plan.by_groups
        assert plan.memory_bytes <= 512_000_000


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"shuffle": "full"}, "cannot be used with shuffle 'full'"),
        ({"shuffle": "materialized"}, "cannot be used with shuffle 'full'"),
        ({"shuffle": False}, "cannot be used with shuffle 'none'"),
        ({"unit": 0}, "unit_bytes must be at least 1"),
        ({"unit": "1M"}, "unit '1M' is not a number of bytes"),
        ({"cache": "memory:?limit=1GB"}, "reads parts of super-samples; cache= and tier= keep whole ones"),
    ],
)
def test_what_units_cannot_be_combined_with_is_refused(url: str, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Loader(url, batch_size=8, **{"unit": UNIT, **settings})
