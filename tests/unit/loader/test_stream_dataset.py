"""A stream data set in one process: its samples, its resumption, and its errors."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import stoker
from stoker import Order, OrderConfig
from stoker.errors import ConfigError, MemoryBudgetError, NotFoundError, SampleError, StateError
from stoker_torch import Budget, Loader, StreamDataset, WorkerOptions, merge_states
from support.datasets import SCHEMA, numbers, pack_numbers, sample_of

SAMPLES = 403
COLLATED = ["x", "image"]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are read in many chunks, as those of a large data set are."""
    monkeypatch.setattr("stoker_torch._stream_reader._MAX_CHUNK_SAMPLES", 11)


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(SAMPLES)


def xs(samples: Iterable[Any]) -> list[int]:
    return [int(sample["x"]) for sample in samples]


def order_of(dataset: StreamDataset, epoch: int, **settings: Any) -> list[int]:
    """Return the canonical sequence of an epoch."""
    order = Order(dataset.manifest.rows.samples, OrderConfig(seed=dataset.config.seed, **settings), epoch)
    return list(order.at(0, dataset.manifest.samples).tolist())


def test_samples_are_dictionaries_of_what_was_packed(url: str) -> None:
    for sample in StreamDataset(url):
        number = int(sample["x"])
        packed = sample_of(number)
        assert list(sample) == ["x", "image", "text", "tokens"]
        assert (sample["x"].dtype, sample["x"].shape) == (torch.int64, ())
        assert (sample["image"].numpy() == packed["image"]).all()
        assert sample["text"] == packed["text"]
        assert sample["tokens"].tolist() == packed["tokens"].tolist()


@pytest.mark.parametrize("shuffle", ["none", "block", "window", "full"])
@pytest.mark.parametrize("lanes", [None, 3])
def test_epochs_are_the_orders_sequence_whatever_the_lanes_and_the_memory(url: str, shuffle: Any, lanes: Any) -> None:
    dataset = StreamDataset(url, shuffle=shuffle, seed=4, window=2, lanes=lanes, memory="100KB")
    for epoch in range(2):
        assert xs(dataset) == order_of(dataset, epoch, shuffle=shuffle, window=2, lanes=lanes or 1)


def test_full_beyond_memory_yields_the_orders_sequence_too(url: str) -> None:
    dataset = StreamDataset(url, shuffle="full", memory="48KB", budget=Budget(max_dollars_per_epoch=10))
    assert dataset.plan.by_groups
    assert xs(dataset) == order_of(dataset, 0, shuffle="full")


def test_a_dataloader_collates_them(url: str) -> None:
    loader = DataLoader(StreamDataset(url, columns=COLLATED, with_ids=True), batch_size=64)
    assert len(loader) == 7
    batches = list(loader)
    assert [len(batch["x"]) for batch in batches] == [64] * 6 + [19]
    assert sorted(numbers(batches)) == list(range(SAMPLES))
    assert all(batch["__id__"].equal(batch["x"]) for batch in batches)
    assert batches[0]["image"].shape == (64, 4, 3)


def test_decode_and_transform_are_applied_in_order(url: str) -> None:
    def transform(sample: dict[str, Any]) -> tuple[int, int]:
        return int(sample["x"]), sample["text"]

    dataset = StreamDataset(url, decode={"text": len}, transform=transform, lanes=3, window=2)
    assert list(dataset) == [
        (number, len(sample_of(number)["text"])) for number in order_of(dataset, 0, lanes=3, window=2)
    ]


def test_a_bad_sample_is_an_error_that_names_it_or_replaced_if_that_is_allowed(url: str) -> None:
    def fail(sample: dict[str, Any]) -> Any:
        if int(sample["x"]) == 77:
            raise ZeroDivisionError("seventy-seven")
        return sample

    with pytest.raises(SampleError, match=r"sample 77 .*ZeroDivisionError: seventy-seven"):
        list(StreamDataset(url, transform=fail))
    seen = xs(StreamDataset(url, transform=fail, workers=WorkerOptions(max_bad_samples=1)))
    assert len(seen) == SAMPLES
    assert set(seen) == set(range(SAMPLES)) - {77}


def test_batches_are_those_of_a_loader(url: str) -> None:
    dataset = StreamDataset(url, batch_size=50, seed=3)
    with Loader(url, batch_size=50, seed=3) as loader:
        for ours, theirs in zip(DataLoader(dataset, batch_size=None), loader, strict=True):
            assert ours["x"].equal(theirs["x"])
            assert list(ours["text"]) == list(theirs["text"])
    with pytest.raises(TypeError, match="number of workers"):
        len(dataset)


def test_a_last_batch_that_is_not_full_is_dropped_if_requested(url: str) -> None:
    assert [len(batch["x"]) for batch in StreamDataset(url, batch_size=50, drop_last=True)] == [50] * 8


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_yield_equally_many_and_every_sample_once_but_for_a_few_repeats(url: str, world_size: int) -> None:
    datasets = [StreamDataset(url, rank=rank, world_size=world_size) for rank in range(world_size)]
    yielded = [xs(dataset) for dataset in datasets]
    assert {len(each) for each in yielded} == {len(dataset) for dataset in datasets} == {-(-SAMPLES // world_size)}
    every = [number for each in yielded for number in each]
    assert set(every) == set(range(SAMPLES))
    assert len(every) - SAMPLES < world_size


@pytest.mark.parametrize("how", ["drop_last", "evaluation"])
def test_ranks_drop_the_odd_samples_or_keep_them_if_asked_to(url: str, how: str) -> None:
    settings: dict[str, Any] = {how: True, "world_size": 2}
    datasets = [StreamDataset(url, rank=rank, **settings) for rank in range(2)]
    yielded = [xs(dataset) for dataset in datasets]
    wanted = [201, 201] if how == "drop_last" else [202, 201]
    assert [len(each) for each in yielded] == [len(dataset) for dataset in datasets] == wanted
    assert len({number for each in yielded for number in each}) == sum(wanted)


def test_a_limit_holds_for_all_ranks_together(url: str) -> None:
    datasets = [StreamDataset(url, rank=rank, world_size=2, limit=101) for rank in range(2)]
    assert [len(dataset) for dataset in datasets] == [51, 51]
    assert {number for dataset in datasets for number in xs(dataset)} == set(order_of(datasets[0], 0, lanes=2)[:101])


# Epochs.


def test_break_abandons_an_epoch_and_an_unused_iterator_does_not(url: str) -> None:
    dataset = StreamDataset(url)
    iter(dataset)
    assert int(next(iter(dataset))["x"]) == order_of(dataset, 0)[0]
    iter(dataset)
    assert xs(dataset) == order_of(dataset, 1)


def test_an_older_iteration_ends_where_a_newer_one_begins(url: str) -> None:
    dataset = StreamDataset(url)
    older = iter(dataset)
    next(older)
    newer = iter(dataset)
    first = int(next(newer)["x"])
    assert list(older) == []
    assert [first, *(int(sample["x"]) for sample in newer)] == order_of(dataset, 1)


def test_set_epoch_says_which_comes_next(url: str) -> None:
    dataset = StreamDataset(url)
    for epoch in (4, 4, 0):
        dataset.set_epoch(epoch)
        assert xs(dataset) == order_of(dataset, epoch)
    assert xs(dataset) == order_of(dataset, 1)
    next(iter(dataset))
    dataset.set_epoch(2)
    assert xs(dataset) == order_of(dataset, 2)
    for wrong in (-1, 1.5, 1 << 24, "1"):
        with pytest.raises(ConfigError, match="epoch"):
            dataset.set_epoch(wrong)  # type: ignore[arg-type]


def test_behind_the_last_epoch_there_is_nothing_and_a_warning_each_time(url: str) -> None:
    dataset = StreamDataset(url, epochs=2)
    with pytest.warns(
        UserWarning, match="the limit epochs=2 is reached: epoch [23], counted from 0, is empty"
    ) as caught:
        assert [len(xs(dataset)) for _ in range(4)] == [SAMPLES, SAMPLES, 0, 0]
    assert len({str(each.message) for each in caught}) == 2


@pytest.mark.parametrize("settings", [{}, {"batch_size": 10}], ids=["samples", "batches"])
def test_behind_an_error_it_continues_at_its_place(url: str, settings: dict[str, Any]) -> None:
    def fail(sample: dict[str, Any]) -> Any:
        if int(sample["x"]) == 77 and not mended:
            raise ZeroDivisionError("seventy-seven")
        return {"x": sample["x"]}

    def take() -> None:
        for each in dataset:
            seen.extend(each["x"].reshape(-1).tolist())

    mended: list[bool] = []
    seen: list[int] = []
    dataset = StreamDataset(url, transform=fail, **settings)
    for _ in range(2):
        with pytest.raises(SampleError):
            take()
    mended.append(True)
    take()
    assert seen == order_of(dataset, 0)
    assert dataset.state_dict()["epoch"] == 1


@pytest.mark.parametrize("settings", [{}, {"drop_last": True}, {"evaluation": True}], ids=str)
def test_the_state_of_all_ranks_at_an_epochs_end_is_the_start_of_the_next(url: str, settings: dict[str, Any]) -> None:
    states = []
    for rank in range(3):
        dataset = StreamDataset(url, rank=rank, world_size=3, **settings)
        xs(dataset)
        states.append(dataset.state_dict())
    merged = merge_states(states)
    assert (merged["epoch"], set(merged["lanes"].values())) == (1, {0})
    dataset = StreamDataset(url, lanes=3, rank=0, world_size=1)
    dataset.load_state_dict(merged)
    assert len(xs(dataset)) == SAMPLES
    assert dataset.state_dict()["epoch"] == 2


# State.


@pytest.mark.parametrize("stop", [0, 1, 100, SAMPLES - 1])
@pytest.mark.parametrize(("settings", "lanes"), [({}, 1), ({"lanes": 4, "window": 2}, 4), ({"shuffle": "full"}, 1)])
def test_any_place_is_resumed_exactly(url: str, stop: int, settings: Any, lanes: int) -> None:
    dataset = StreamDataset(url, **settings)
    xs(dataset)
    before = xs(islice(dataset, stop))
    state = json.loads(json.dumps(dataset.state_dict()))
    other = StreamDataset(url, **settings)
    other.load_state_dict(state)
    assert other.state_dict() == state or not stop  # behind an epoch is before the next
    assert before + xs(other) == order_of(dataset, 1, **{"lanes": lanes} | settings)
    assert xs(other) == order_of(dataset, 2, **{"lanes": lanes} | settings)


def test_batches_are_resumed_with_another_batch_size(url: str) -> None:
    dataset = StreamDataset(url, batch_size=30)
    before = numbers(islice(dataset, 4))
    assert len(before) == 120
    state = dataset.state_dict()
    for batch_size in (7, 500):
        other = StreamDataset(url, batch_size=batch_size)
        other.load_state_dict(state)
        assert sorted(before + numbers(other)) == list(range(SAMPLES))


def test_a_state_behind_the_last_sample_begins_the_next_epoch(url: str) -> None:
    dataset, other = StreamDataset(url), StreamDataset(url)
    xs(dataset)
    other.load_state_dict(dataset.state_dict())
    assert xs(other) == order_of(dataset, 1)


def test_a_state_between_a_sample_and_its_repetition_is_resumed_with_it(url: str) -> None:
    dataset = StreamDataset(url, rank=1, world_size=2)
    seen = xs(islice(dataset, 201))
    for loaded in range(2):
        other = StreamDataset(url, rank=1, world_size=2)
        other.load_state_dict(dataset.state_dict())
        rest = xs(islice(other, 1))
        assert rest == seen[-1:], loaded
        dataset = StreamDataset(url, rank=1, world_size=2)
        dataset.load_state_dict(merge_states([other.state_dict()]) | {"repeated": 0})


def test_loading_or_setting_an_epoch_replaces_what_was_loaded(url: str) -> None:
    dataset = StreamDataset(url)
    next(iter(dataset))
    state = dataset.state_dict()
    dataset.load_state_dict(state)
    dataset.set_epoch(1)
    assert dataset.state_dict()["lanes"] == {"0": 0}
    assert xs(dataset) == order_of(dataset, 1)
    dataset.load_state_dict(state)
    assert xs(dataset) == order_of(dataset, 0)[1:]
    assert xs(dataset) == order_of(dataset, 1)


def test_naming_the_epoch_that_a_state_was_loaded_for_keeps_its_place(url: str) -> None:
    dataset = StreamDataset(url)
    next(iter(dataset))
    dataset.load_state_dict(dataset.state_dict())
    for epoch, start in ((0, 1), (1, 0), (1, 0)):
        dataset.set_epoch(epoch)
        assert xs(dataset) == order_of(dataset, epoch)[start:]


def test_a_state_pins_its_version_and_lanes(url: str) -> None:
    dataset = StreamDataset(pack_numbers(60), lanes=2)
    first = xs(islice(dataset, 25))
    state = dataset.state_dict()
    with stoker.Packer(dataset.url, schema=SCHEMA, mode="append", super_sample_bytes=2000) as packer:
        packer.extend(map(sample_of, range(60, 80)))
    newer = StreamDataset(dataset.url)
    assert (newer.manifest.version, len(newer)) == (2, 80)
    newer.load_state_dict(state)
    assert (newer.manifest.version, len(newer)) == (1, 60)
    assert first + xs(newer) == order_of(dataset, 0, lanes=2)
    assert sorted(xs(newer)) == list(range(60))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"seed": 1}, "seed"),
        ({"shuffle": "none"}, "shuffle"),
        ({"window": 3}, "window"),
        ({"limit": 100}, "limit"),
        ({"lanes": 2}, "lanes"),
        ({"version": 1, "lanes": 3}, "lanes"),
    ],
)
def test_a_state_of_another_order_is_refused(url: str, settings: Any, match: str) -> None:
    state = StreamDataset(url).state_dict()
    with pytest.raises(StateError, match=match):
        StreamDataset(url, **settings).load_state_dict(state)


def test_the_state_of_a_loader_or_of_other_ranks_is_refused(url: str) -> None:
    with Loader(url, batch_size=8) as loader, pytest.raises(StateError, match="not the state of a StreamDataset"):
        StreamDataset(url).load_state_dict(loader.state_dict())
    first = StreamDataset(url, rank=0, world_size=2)
    other = StreamDataset(url, rank=1, world_size=2)
    other.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match=r"lanes \[1\] of 2.*merge_states"):
        next(iter(other))
    with pytest.raises(ConfigError, match="lanes=3"):
        StreamDataset(url, rank=0, world_size=3).load_state_dict(first.state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_states_of_two_ranks_are_resumed_by_another_number_of_them(url: str, world_size: int) -> None:
    before: list[int] = []
    states = []
    for rank, stop in enumerate((80, 75)):
        dataset = StreamDataset(url, rank=rank, world_size=2, lanes=6)
        before += xs(islice(dataset, stop))
        states.append(dataset.state_dict())
    state = merge_states(states)
    rests = []
    for rank in range(world_size):
        dataset = StreamDataset(url, rank=rank, world_size=world_size)
        dataset.load_state_dict(state)
        rests.append(xs(dataset))
    assert len({len(rest) for rest in rests}) == 1
    rest = {number for each in rests for number in each}
    assert rest == set(range(SAMPLES)) - set(before)
    assert len(before) == 155


# Settings, and what is left behind.


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, not 0"),
        ({"pin_memory": True}, "DataLoader pin_memory"),
        ({"reuse_buffers": True}, "reuse_buffers"),
        ({"collate": list}, "collate_fn"),
        ({"batch_transform": list}, "batch_size="),
        ({"rank": 0, "world_size": 2, "lanes": 3}, "lanes=4, or another multiple of 2"),
        ({"decode": {"nothing": len}}, "decode has unknown columns nothing"),
        ({"rank": 1}, "world_size"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(url: str, settings: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        StreamDataset(url, **settings)


def test_what_is_missing_too_small_or_too_dear_is_refused_at_once(url: str) -> None:
    with pytest.raises(NotFoundError):
        StreamDataset("memory://nowhere/at-all")
    with pytest.raises(MemoryBudgetError, match="memory="):
        StreamDataset(url, memory="8KB")
    with pytest.raises(MemoryBudgetError, match="max_dollars_per_epoch"):
        StreamDataset(url, budget=Budget(max_dollars_per_epoch=-1.0))


def test_made_it_has_no_thread_and_forgotten_it_leaves_none(url: str) -> None:
    gc.collect()
    before = set(threading.enumerate())
    dataset = StreamDataset(url, decode={"text": len}, workers=2)
    assert not set(threading.enumerate()) - before  # threads of earlier tests may end meanwhile
    samples = iter(dataset)
    next(samples)
    assert set(threading.enumerate()) - before
    del dataset, samples
    gc.collect()
    assert not set(threading.enumerate()) - before


def test_closed_it_has_no_thread_and_iterates_again(url: str) -> None:
    gc.collect()
    before = set(threading.enumerate())
    dataset = StreamDataset(url)
    next(iter(dataset))
    dataset.close()
    dataset.close()
    assert not set(threading.enumerate()) - before
    assert xs(dataset) == order_of(dataset, 1)
    dataset.close()


def pickled(dataset: StreamDataset) -> Any:
    return pickle.loads(pickle.dumps(dataset))  # noqa: S301 - its own


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_continues_by_itself(url: str, copied: Any) -> None:
    dataset = StreamDataset(url)
    xs(dataset)
    other = copied(dataset)
    assert xs(dataset) == xs(other) == order_of(dataset, 1)
    other.set_epoch(7)
    assert xs(dataset) == order_of(dataset, 2)


def test_it_says_what_it_is(url: str) -> None:
    assert repr(StreamDataset(url, rank=1, world_size=2)) == f"<StreamDataset {url} rank 1 of 2>"


def test_a_trace_is_refused_since_workers_do_not_know_what_is_waited_for() -> None:
    with pytest.raises(ConfigError, match="trace is for a Loader"):
        StreamDataset(pack_numbers(10), rank=0, world_size=1, trace="trace.json")  # type: ignore[call-arg]


def test_a_budget_is_refused_since_workers_do_not_know_what_is_spent() -> None:
    with pytest.raises(ConfigError, match=r"budget is for a Loader: .* use budget=Budget\(max_dollars_per_epoch="):
        StreamDataset(pack_numbers(10), rank=0, world_size=1, budget="5 USD")
