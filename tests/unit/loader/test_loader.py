"""The loader, as a user meets it."""

from __future__ import annotations

import json
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker import Order, OrderConfig
from stoker._fetch.pipeline import BatchPipeline
from stoker.errors import ConfigError, FormatError, MemoryBudgetError, SampleError, StateError, StokerError
from stoker_torch import Loader, LoaderConfig, RaggedColumn, WorkerOptions
from support.datasets import numbers, pack_numbers, sample_of


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(500)


@pytest.mark.parametrize("shuffle", ["none", "block", "window", "full"])
def test_an_epoch_delivers_every_sample_once_with_all_its_columns(url: str, shuffle: Any) -> None:
    with Loader(url, batch_size=32, shuffle=shuffle) as loader:
        seen = []
        for batch in loader:
            for place, number in enumerate(batch["x"].tolist()):
                wanted = sample_of(number)
                assert batch["image"][place].numpy().tolist() == wanted["image"].tolist()
                assert batch["text"][place] == wanted["text"]
                assert batch["tokens"][place].tolist() == wanted["tokens"].tolist()
                seen.append(number)
        assert sorted(seen) == list(range(500))
        assert (seen == list(range(500))) == (shuffle == "none")
        assert len(loader) == 16


@pytest.mark.parametrize("shuffle", ["none", "block", "window", "full"])
def test_the_sequence_is_that_of_the_order(url: str, shuffle: Any) -> None:
    with Loader(url, batch_size=32, shuffle=shuffle, seed=3, window=3, with_ids=True) as loader:
        order = Order(loader.manifest.rows.samples, OrderConfig(seed=3, shuffle=shuffle, window=3), 0)
        ids = [number for batch in loader for number in batch["__id__"].tolist()]
        assert ids == order.at(0, 500).tolist()


def test_tensors_have_the_columns_dtypes_and_own_their_memory(url: str) -> None:
    with Loader(url, batch_size=10, shuffle="none") as loader:
        batches = list(loader)
    assert batches[0]["x"].dtype == torch.int64
    assert batches[0]["image"].shape == (10, 4, 3)
    assert isinstance(batches[0]["tokens"], RaggedColumn)
    assert batches[0]["tokens"].values.dtype == torch.uint16
    for index, batch in enumerate(batches):  # the ring was reused many times since the first
        assert batch["x"].tolist() == list(range(index * 10, index * 10 + 10))


def test_bfloat16_keeps_its_dtype_and_values() -> None:
    url = "memory://bf16/ds"
    values = torch.randn(20, 3).to(torch.bfloat16)
    with stoker.Packer(url, schema={"v": stoker.Array("bfloat16", (3,))}) as packer:
        packer.extend({"v": value} for value in values)
    with Loader(url, batch_size=20, shuffle="none") as loader:
        (batch,) = loader
    assert batch["v"].dtype == torch.bfloat16
    assert torch.equal(batch["v"], values)


def test_epochs_differ_and_the_same_seed_repeats_them(url: str) -> None:
    with Loader(url, batch_size=50, seed=1) as one, Loader(url, batch_size=50, seed=1) as two:
        first, second = numbers(one), numbers(one)
        assert first != second
        assert [numbers(two), numbers(two)] == [first, second]
        two.set_epoch(0)
        assert numbers(two) == first


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 7), (2, 16), (3, 5), (4, 64)])
def test_over_all_ranks_every_sample_comes_once_in_equally_many_batches(
    url: str, world_size: int, batch_size: int
) -> None:
    seen: list[int] = []
    steps = set()
    for rank in range(world_size):
        with Loader(url, batch_size=batch_size, rank=rank, world_size=world_size) as loader:
            batches = [batch["x"].tolist() for batch in loader]
            assert len(batches) == len(loader)
            steps.add(len(batches))
            seen += chain.from_iterable(batches)
    assert sorted(seen) == list(range(500))
    assert len(steps) == 1


def test_drop_last_leaves_out_only_the_incomplete_global_batch(url: str) -> None:
    seen = []
    for rank in range(3):
        with Loader(url, batch_size=16, rank=rank, world_size=3, drop_last=True) as loader:
            assert all(len(batch["x"]) == 16 for batch in loader)
            loader.set_epoch(0)
            seen += numbers(loader)
    assert len(seen) == len(set(seen)) == 500 // 48 * 48


def test_a_last_batch_with_fewer_samples_than_ranks_repeats_and_counts_them() -> None:
    url = pack_numbers(9)
    seen, repeated = [], []
    for rank in range(4):
        with Loader(url, batch_size=2, rank=rank, world_size=4) as loader:
            seen += numbers(loader)
            repeated.append(loader.stats().repeated_samples)
    assert sorted(set(seen)) == list(range(9))
    assert len(seen) == 12
    assert repeated == [3] * 4


def test_evaluation_repeats_nothing() -> None:
    url = pack_numbers(9)
    seen = []
    for rank in range(4):
        with Loader(url, batch_size=2, rank=rank, world_size=4, evaluation=True) as loader:
            found = numbers(loader)
            assert len(found) in (2, 3)
            seen += found + numbers(loader)
    assert sorted(seen) == sorted([*range(9), *range(9)])


@pytest.mark.parametrize("stop_after", [0, 1, 5, 15, 16])
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 32), (2, 8), (3, 11)])
def test_a_state_continues_with_the_rest_on_any_world_size(
    url: str, stop_after: int, world_size: int, batch_size: int
) -> None:
    seen = []
    with Loader(url, batch_size=32, lanes=2) as loader:
        batches = iter(loader)
        seen = [number for _ in range(stop_after) for number in next(batches)["x"].tolist()]
        state = json.loads(json.dumps(loader.state_dict()))
    rest: list[int] = []
    for rank in range(world_size):
        with Loader(url, batch_size=batch_size, rank=rank, world_size=world_size) as loader:
            loader.load_state_dict(state)
            steps = loader.remaining
            batches_left = [batch["x"].tolist() for batch in loader]
            assert len(batches_left) == steps
            rest += chain.from_iterable(batches_left)
            assert loader.state_dict()["epoch"] == (2 if stop_after == 16 else 1)
    if stop_after == 16:
        assert sorted(rest) == list(range(500))
    else:
        assert sorted(seen + rest) == list(range(500))


def test_columns_are_delivered_as_asked(url: str) -> None:
    with Loader(url, batch_size=50, columns=["text", "x"]) as loader:
        batch = next(iter(loader))
        assert list(batch) == ["text", "x"]
    with pytest.raises(ConfigError, match="nope"):
        Loader(url, batch_size=50, columns=["nope"])


def test_limit_cuts_every_epoch_short(url: str) -> None:
    with Loader(url, batch_size=50, limit=120) as loader:
        assert len(loader) == 3
        assert len(numbers(loader)) == 120


def test_decode_replaces_a_column_and_keeps_the_others_in_step(url: str) -> None:
    def decode(text: str) -> np.ndarray[Any, Any]:
        return np.array([int(text.split()[1])])

    with Loader(url, batch_size=32, decode={"text": decode}, workers=3) as loader:
        for batch in loader:
            assert batch["text"].shape == (len(batch["x"]), 1)
            assert batch["text"][:, 0].tolist() == batch["x"].tolist()


def test_transform_collate_and_batch_transform_run_in_that_order(url: str) -> None:
    def transform(sample: dict[str, Any]) -> int:
        return int(sample["x"]) * 2

    with Loader(
        url, batch_size=32, shuffle="none", transform=transform, collate=sum, batch_transform=lambda total: total + 1
    ) as loader:
        totals = list(loader)
    assert totals[0] == 2 * sum(range(32)) + 1


def test_transform_alone_is_collated_as_torch_does(url: str) -> None:
    with Loader(url, batch_size=4, shuffle="none", transform=lambda s: {"y": s["x"] + 1, "t": s["text"]}) as loader:
        batch = next(iter(loader))
    assert batch["y"].tolist() == [1, 2, 3, 4]
    assert batch["t"][2] == sample_of(2)["text"]


def test_a_failing_transform_is_raised_at_its_batch_with_sample_and_object_named(url: str) -> None:
    def transform(sample: dict[str, Any]) -> Any:
        if int(sample["x"]) == 70:
            raise ZeroDivisionError("seventy")
        return sample["x"]

    with Loader(url, batch_size=32, shuffle="none", transform=transform, workers=2) as loader:
        batches = iter(loader)
        seen = [*next(batches).tolist(), *next(batches).tolist()]
        with pytest.raises(SampleError, match=r"sample 70 \(row \d+ of memory://.*data/.*transform.*seventy") as caught:
            next(batches)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert seen == list(range(64))
        assert loader.state_dict()["position"] == 64


def test_bad_samples_within_the_budget_are_replaced_in_their_batch_and_counted(url: str) -> None:
    def decode(text: str) -> int:
        number = int(text.split()[1])
        if number % 100 == 7:
            raise ValueError("bad")
        return number

    with Loader(url, batch_size=32, decode={"text": decode}, workers=WorkerOptions(max_bad_samples=5)) as loader:
        batches = list(loader)
        assert loader.stats().bad_samples == 5
        assert [len(batch["x"]) for batch in batches] == [32] * 15 + [20]
        for batch in batches:
            assert batch["text"].tolist() == batch["x"].tolist()
            assert not any(number % 100 == 7 for number in batch["x"].tolist())
    allowed = WorkerOptions(max_bad_samples=4)
    with Loader(url, batch_size=32, decode={"text": decode}, workers=allowed) as loader, pytest.raises(SampleError):
        list(loader)


def test_too_little_memory_is_refused_with_the_figure_that_fits(url: str) -> None:
    with pytest.raises(MemoryBudgetError, match=r"memory=(\d+)") as caught:
        Loader(url, batch_size=32, memory=4000)
    figure = int(str(caught.value).split("memory=")[1].split()[0])
    with Loader(url, batch_size=32, memory=figure) as loader:
        assert sorted(numbers(loader)) == list(range(500))
    with pytest.raises(MemoryBudgetError):
        Loader(url, batch_size=32, memory=figure - 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shuffle", ["none", "block", "window"])
def test_the_least_memory_delivers_the_same_sequence(url: str, shuffle: Any, world_size: int) -> None:
    sequences = []
    for memory in ("100MB", None):
        for rank in range(world_size):
            settings = {"batch_size": 90, "shuffle": shuffle, "rank": rank, "world_size": world_size, "lanes": 4}
            if memory is None:
                with pytest.raises(MemoryBudgetError) as caught:
                    Loader(url, memory=1, **settings)
                least = int(str(caught.value).split("memory=")[1].split()[0])
                with Loader(url, memory=least, **settings) as loader:
                    sequences.append(numbers(loader) + numbers(loader))
            else:
                with Loader(url, memory=memory, **settings) as loader:
                    sequences.append(numbers(loader) + numbers(loader))
    assert sequences[:world_size] == sequences[world_size:]


def test_nothing_is_fetched_beyond_the_last_epoch(url: str) -> None:
    with Loader(url, batch_size=50, epochs=2) as loader:
        numbers(loader)
        numbers(loader)
        with pytest.warns(UserWarning, match="epochs=2"):
            assert numbers(loader) == []
        statistics = loader.stats()
        assert statistics.get_requests == 2 * len(loader.manifest) + 1 + statistics.hedges


def test_look_ahead_is_bounded_by_one_epoch_however_large_the_memory(url: str) -> None:
    with Loader(url, batch_size=50, memory="1GB") as loader:
        next(iter(loader))
        time.sleep(0.3)
        assert loader.stats().get_requests <= 2 * len(loader.manifest) + 20
        assert loader.plan.memory_bytes < 10 << 20


def test_statistics_count_what_was_done(url: str) -> None:
    with Loader(url, batch_size=50, epochs=1) as loader:
        assert loader.stats().first_batch_seconds is None
        numbers(loader)
        statistics = loader.stats()
    assert statistics.batches == 10
    assert statistics.samples == 500
    assert statistics.lookups == len(loader.manifest)
    assert statistics.read_bytes >= loader.manifest.size_bytes
    assert 0 <= statistics.wait_seconds <= statistics.loop_seconds
    assert 0 <= statistics.stall <= 1
    assert statistics.first_batch_seconds is not None


def test_the_time_to_begin_an_iteration_is_time_that_the_loop_waits(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = BatchPipeline.start

    def slow(self: BatchPipeline, epoch: int, position: int = 0) -> None:
        time.sleep(0.05)
        start(self, epoch, position)

    monkeypatch.setattr(BatchPipeline, "start", slow)
    with Loader(url, batch_size=50, epochs=3) as loader:
        for waits in (1, 2):
            next(iter(loader))
            loader.close()
            iter(loader)  # begun and not waited for: no wait of the loop yet
            statistics = loader.stats()
            assert 0.05 * waits <= statistics.wait_seconds <= statistics.loop_seconds
            loader.close()


def test_the_plan_is_one_line(url: str) -> None:
    with Loader(url, batch_size=50) as loader:
        text = str(loader.plan)
    assert "\n" not in text
    assert "500 samples" in text
    assert "GETs" in text
    assert "$" in text


def test_a_changed_schema_in_a_super_sample_is_a_format_error_that_names_it(url: str) -> None:
    other = pack_numbers(40, schema={"x": stoker.Array("int64")})
    with Loader(other, batch_size=4) as loader:
        object.__setattr__(loader.manifest, "schema", stoker.Schema({"x": stoker.Array("int32")}))
        with pytest.raises(FormatError, match="data/"):
            list(loader)


def test_states_of_other_orders_are_refused(url: str) -> None:
    with Loader(url, batch_size=50, seed=1) as loader:
        state = loader.state_dict()
    with Loader(url, batch_size=50, seed=2) as loader, pytest.raises(StateError, match=r"seed=1.*2"):
        loader.load_state_dict(state)
    with Loader(pack_numbers(10), batch_size=50, seed=1) as loader, pytest.raises(StateError, match="dataset"):
        loader.load_state_dict(state)
    with Loader(url, batch_size=50, seed=1, lanes=3) as loader, pytest.raises(StateError, match="lanes"):
        loader.load_state_dict(state)
    with Loader(url, batch_size=50, seed=1) as loader:
        for bad in ({}, {"format": 2}, {"format": 1, "epoch": 0}, state | {"position": -1}, state | {"epoch": "0"}):
            with pytest.raises(StateError):
                loader.load_state_dict(bad)


def test_a_state_pins_the_manifest_version() -> None:
    url = pack_numbers(100)
    with Loader(url, batch_size=10, seed=1) as loader:
        first = next(iter(loader))["x"].tolist()
        state = loader.state_dict()
    schema = stoker.Schema(loader.manifest.schema)
    with stoker.Packer(url, schema=schema, mode="append", super_sample_bytes=2000) as packer:
        packer.extend(sample_of(index) for index in range(100, 150))
    with Loader(url, batch_size=10, seed=1) as loader:
        assert loader.manifest.version == 2
        assert len(numbers(loader)) == 150
        loader.load_state_dict(state)
        assert sorted(first + numbers(loader)) == list(range(100))


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 0},
        {"batch_size": 1, "shuffle": "random"},
        {"batch_size": 1, "window": 0},
        {"batch_size": 1, "seed": -1},
        {"batch_size": 1, "lanes": 0},
        {"batch_size": 1, "rank": 1},
        {"batch_size": 1, "rank": 2, "world_size": 2},
        {"batch_size": 1, "memory": "12 apples"},
        {"batch_size": 1, "evaluation": True, "drop_last": True},
        {"batch_size": 1, "columns": "x"},
        {"batch_size": 1, "limit": 0},
        {"batch_size": 1, "decode": {"y": len}, "columns": ["x"]},
        {"batch_size": 1, "decode": {"nope": len}},
    ],
)
def test_wrong_settings_are_refused_at_once(url: str, settings: Any) -> None:
    with pytest.raises(StokerError) as caught:
        Loader(url, **settings)
    assert isinstance(caught.value, ConfigError)


def test_reused_buffers_never_change_a_batch_that_is_held(url: str) -> None:
    with Loader(url, batch_size=10, shuffle="none", reuse_buffers=True, columns=["x", "image"]) as loader:
        held = [batch for index, batch in enumerate(loader) if index % 3 == 0]
        for index, batch in enumerate(held):
            assert batch["x"].tolist() == list(range(index * 30, index * 30 + 10))


def test_reused_buffers_are_few_when_batches_are_dropped(url: str) -> None:
    with Loader(url, batch_size=10, reuse_buffers=True, columns=["x", "image"]) as loader:
        for _ in range(3):
            assert sorted(numbers(loader)) == list(range(500))
        assert loader._buffers is not None
        assert loader._buffers.buffers_made <= 8


@pytest.mark.parametrize("reuse_buffers", [False, True])
def test_large_ragged_values_of_a_batch_that_is_held_never_change(tmp_path: Path, reuse_buffers: bool) -> None:
    with stoker.Packer(str(tmp_path / "large"), schema={"data": stoker.Bytes()}) as packer:
        packer.extend({"data": bytes([number]) * 300_000} for number in range(48))
    with Loader(str(tmp_path / "large"), batch_size=4, epochs=3, reuse_buffers=reuse_buffers) as loader:
        for _ in range(3):
            held = [batch["data"] for index, batch in enumerate(loader) if index % 3 == 0]
            seen = [bytes(value) for column in held for value in column]
            assert len({value[0] for value in seen}) == len(seen) == 16
            assert all(value == value[:1] * 300_000 for value in seen)
        if reuse_buffers:
            assert loader._buffers is not None
            assert loader._buffers.buffers_made <= 12


def test_rank_and_world_size_come_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Loader(url, batch_size=10) as loader:
        assert (loader.rank, loader.world_size, loader.plan.lanes) == (1, 2, 2)
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ConfigError, match="RANK and WORLD_SIZE must be integers, not 'one' and '2'"):
        Loader(url, batch_size=10)


def test_memory_of_a_node_is_divided_among_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert LoaderConfig(batch_size=1, memory="node:4GB").memory_bytes() == 10**9


def test_a_super_sample_may_have_thousands_of_batches() -> None:
    url = pack_numbers(3000, super_sample_bytes=1 << 20)
    with Loader(url, batch_size=1, columns=["x"], shuffle="none") as loader:
        assert len(loader.manifest) == 1
        for _ in range(2):
            assert [int(batch["x"]) for batch in loader] == list(range(3000))
