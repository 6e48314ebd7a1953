"""Epochs, states and places: every pattern that a training script walks a loader with."""

from __future__ import annotations

import copy
import io
import itertools
import json
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.errors import ConfigError, SampleError, StateError
from stoker_torch import Loader, WorkerOptions
from support.datasets import numbers, pack_numbers

SAMPLES = 100


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(SAMPLES)


def keep_x(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": sample["x"]}


# Epochs.


def test_naming_every_epoch_before_it_keeps_what_was_fetched_ahead(url: str) -> None:
    def gets(names_epochs: bool) -> tuple[list[list[int]], int]:
        with Loader(url, batch_size=16, epochs=4) as loader:
            seen = []
            for epoch in range(4):
                if names_epochs:
                    loader.set_epoch(epoch)
                seen.append(numbers(loader))
            statistics = loader.stats()
            return seen, statistics.get_requests - statistics.hedges

    assert gets(names_epochs=True) == gets(names_epochs=False)


def test_naming_the_epoch_under_way_begins_it_again(url: str) -> None:
    with Loader(url, batch_size=16) as loader:
        first = numbers(loader)
        loader.set_epoch(0)
        batches = iter(loader)
        next(batches)
        loader.set_epoch(0)
        assert list(batches) == []
        assert numbers(loader) == first


def test_naming_the_epoch_that_a_state_was_loaded_for_keeps_its_place(url: str) -> None:
    with Loader(url, batch_size=16) as loader:
        whole = [numbers(loader) for _ in range(3)]
        loader.set_epoch(1)
        next(iter(loader))
        state = loader.state_dict()
        for first in (1, 2):
            loader.load_state_dict(state)
            for epoch in range(first, 3):
                loader.set_epoch(epoch)
                assert numbers(loader) == (whole[1][16:] if epoch == 1 else whole[epoch])


@pytest.mark.parametrize("epoch", [-1, 1.0, "1", None])
def test_an_epoch_that_is_no_number_from_0_is_refused(url: str, epoch: Any) -> None:
    with Loader(url, batch_size=16) as loader, pytest.raises(ConfigError, match="epoch"):
        loader.set_epoch(epoch)


def test_each_first_batch_taken_alone_is_that_of_the_next_epoch(url: str) -> None:
    with Loader(url, batch_size=16) as loader:
        firsts = []
        for epoch in range(4):
            loader.set_epoch(epoch)
            firsts.append(numbers(loader)[:16])
        loader.set_epoch(0)
        assert [next(iter(loader))["x"].tolist() for _ in range(4)] == firsts


def test_enumerate_zip_and_islice_walk_it_as_any_iterable(url: str) -> None:
    with Loader(url, batch_size=16, shuffle="none") as loader:
        assert [index for index, _ in enumerate(loader)] == list(range(7)) == list(range(len(loader)))
        assert [batch["x"][0].item() for batch in itertools.islice(loader, 3)] == [0, 16, 32]
        assert [batch["x"][0].item() for _, batch in zip(range(2), loader, strict=False)] == [0, 16]
        assert loader.state_dict()["epoch"] == 2


def test_one_iteration_can_be_walked_in_pieces(url: str) -> None:
    with Loader(url, batch_size=16, shuffle="none") as loader:
        batches = iter(loader)
        assert iter(batches) is batches
        pieces = [len(list(itertools.islice(batches, 3))) for _ in range(4)]
        assert pieces == [3, 3, 1, 0]


def test_a_loop_inside_a_loop_over_the_same_loader_ends_the_outer_one(url: str) -> None:
    with Loader(url, batch_size=16) as loader:
        outer = 0
        for _ in loader:
            outer += 1
            assert len(numbers(loader)) == SAMPLES
        assert outer == 1


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"batch_size": 16}, 7),
        ({"batch_size": 16, "drop_last": True}, 6),
        ({"batch_size": 200}, 1),
        ({"batch_size": 200, "drop_last": True}, 0),
        ({"batch_size": 16, "limit": 32}, 2),
        ({"batch_size": 16, "limit": 33}, 3),
        ({"batch_size": 16, "limit": 33, "drop_last": True}, 2),
        ({"batch_size": 16, "limit": 5}, 1),
        ({"batch_size": 16, "limit": 5000}, 7),
        ({"batch_size": 16, "rank": 1, "world_size": 3}, 3),
    ],
)
def test_len_and_remaining_are_what_a_loop_yields(url: str, settings: dict[str, Any], steps: int) -> None:
    with Loader(url, **settings) as loader:
        assert len(loader) == loader.remaining == steps
        yielded = 0
        for _ in loader:
            yielded += 1
            assert loader.remaining in (steps - yielded, steps)  # behind the last batch it is the next epoch's
        assert yielded == steps
        assert loader.state_dict()["epoch"] == 1


def test_a_loop_behind_the_last_epoch_is_empty_and_warns_each_time(url: str) -> None:
    with Loader(url, batch_size=16, epochs=1, transform=keep_x) as loader:
        assert len(numbers(loader)) == SAMPLES
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")  # which shows a warning once for each place and text
            for _ in range(3):
                for _ in loader:
                    raise AssertionError
        assert [each.filename for each in caught] == [__file__] * 3
        assert "the limit epochs=1 is reached: the next would be epoch 1" in str(caught[0].message)
        loader.set_epoch(0)
        assert len(numbers(loader)) == SAMPLES
        with pytest.warns(UserWarning, match="epochs=1"):
            assert numbers(loader) == []


@pytest.mark.parametrize("leaving", ["next", "break"])
def test_a_loop_behind_a_last_epoch_that_was_abandoned_raises_with_the_remedies(url: str, leaving: str) -> None:
    with Loader(url, batch_size=16, epochs=2) as loader:
        whole = [numbers(loader), numbers(loader)]
        loader.set_epoch(1)
        if leaving == "next":
            next(iter(loader))
        else:
            for _ in loader:
                break
        for _ in range(2):  # nothing has changed
            with pytest.raises(
                ConfigError, match=r"the limit epochs=2 is reached.*left epoch 1 at position 16.*set_epoch\(1\)"
            ):
                iter(loader)
        loader.load_state_dict(loader.state_dict())
        assert numbers(loader) == whole[1][16:]
        loader.set_epoch(1)
        assert numbers(loader) == whole[1]


def test_a_resumed_loop_over_all_epochs_warns_of_those_behind_the_last_and_does_not_crash(url: str) -> None:
    with Loader(url, batch_size=16, epochs=3) as loader:
        loader.set_epoch(2)
        next(iter(loader))
        state = loader.state_dict()
    with Loader(url, batch_size=16, epochs=3) as loader:
        loader.load_state_dict(state)
        with pytest.warns(UserWarning, match="epochs=3") as caught:
            assert [len(list(loader)) for _ in range(3)] == [6, 0, 0]
        assert len(caught) == 2
    with Loader(url, batch_size=16, epochs=3) as loader:
        loader.load_state_dict(state)
        next(iter(loader))  # left again
        with pytest.warns(UserWarning, match="epochs=3"):
            assert list(loader) == []


def test_ranks_without_a_batch_in_an_evaluation_go_through_the_epochs_with_the_others() -> None:
    url = pack_numbers(3)
    for rank in range(5):
        with Loader(url, batch_size=2, rank=rank, world_size=5, evaluation=True) as loader:
            places = []
            for _ in range(3):
                numbers(loader)
                places.append((loader.state_dict()["epoch"], loader.state_dict()["position"]))
            assert places == [(1, 0), (2, 0), (3, 0)]


def test_an_evaluation_that_was_left_continues_on_all_ranks_in_the_same_epoch(url: str) -> None:
    with Loader(url, batch_size=7, evaluation=True) as loader:
        batches = iter(loader)
        seen = [number for _ in range(14) for number in next(batches)["x"].tolist()]
        state = loader.state_dict()  # two samples are left, for three ranks
    for rank in range(3):
        with Loader(url, batch_size=7, rank=rank, world_size=3, lanes=1, evaluation=True) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict()["epoch"] == 0
            seen += numbers(loader)
            assert loader.state_dict()["epoch"] == 1
    assert sorted(seen) == list(range(SAMPLES))


@pytest.mark.parametrize("settings", [{}, {"transform": keep_x}], ids=["plain", "pool"])
def test_a_rank_whose_share_of_an_evaluation_has_ended_says_the_place_until_the_epoch_is_over(
    settings: dict[str, Any],
) -> None:
    """Five samples for three ranks, one at a time: the last rank has one batch, the others have two."""
    url = pack_numbers(5)
    delivered: list[int] = []
    for step in range(2):
        for rank in range(3):
            with Loader(
                url, batch_size=1, rank=rank, world_size=3, lanes=1, evaluation=True, epochs=1, **settings
            ) as loader:
                batches = iter(loader)
                seen = [next(batches)["x"].item() for _ in range(1 if rank == 2 else step + 1)]
                delivered += seen[step:]
                state = loader.state_dict()
                assert (state["epoch"], state["position"]) == ((0, 3) if rank == 2 or step == 0 else (1, 0))
                if step == 0:
                    with Loader(url, batch_size=9, evaluation=True) as rest:
                        rest.load_state_dict(state)
                        assert len(numbers(rest)) == 2, "what the other ranks have still to deliver"
                elif rank == 2:
                    assert list(batches) == []
                    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)
                    with pytest.warns(UserWarning, match="epochs=1"):
                        assert list(loader) == []
    assert sorted(delivered) == list(range(5))


# States.


def through_json(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state))


def through_torch(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("settings", [{}, {"transform": keep_x}], ids=["plain", "pool"])
@pytest.mark.parametrize("taken", [0, 1, 4, 6, 7, 8])
def test_a_state_continues_exactly_wherever_it_was_taken(url: str, settings: dict[str, Any], taken: int) -> None:
    with Loader(url, batch_size=16, seed=5, **settings) as loader:
        whole = numbers(loader) + numbers(loader)
        loader.set_epoch(0)
        batches = itertools.chain.from_iterable(loader for _ in range(2))
        seen = [number for batch in itertools.islice(batches, taken) for number in batch["x"].tolist()]
        states = [carry(loader.state_dict()) for carry in (through_json, through_torch, copy.deepcopy)]
        loader.close()
        assert [loader.state_dict()] * 3 == states
    for state in states:
        with Loader(url, batch_size=16, seed=5, **settings) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            found = list(seen)
            while len(found) < len(whole):
                found += numbers(loader)
            assert found == whole


def test_a_state_is_the_place_behind_the_batch_yielded_however_far_the_pool_is(url: str) -> None:
    with Loader(url, batch_size=10, transform=keep_x, workers=4) as loader:
        for number, _ in enumerate(loader, 1):
            state = loader.state_dict()
            assert (state["epoch"], state["position"]) == ((0, number * 10) if number < 10 else (1, 0))


def test_a_state_may_be_loaded_again_and_in_the_middle_of_a_loop(url: str) -> None:
    with Loader(url, batch_size=10) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        wanted = next(batches)["x"].tolist()
        for _ in range(3):
            loader.load_state_dict(state)
            assert next(iter(loader))["x"].tolist() == wanted
        assert list(batches) == []


def test_a_state_is_used_once_and_the_loop_behind_it_is_the_next_epoch(url: str) -> None:
    with Loader(url, batch_size=10) as loader:
        next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        assert len(numbers(loader)) == 90
        assert len(numbers(loader)) == 100


def test_a_rest_smaller_than_the_new_global_batch_is_dropped_with_drop_last(url: str) -> None:
    with Loader(url, batch_size=10) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with Loader(url, batch_size=40, drop_last=True) as loader:
        loader.load_state_dict(state)
        assert loader.remaining == 2
        assert len(numbers(loader)) == 80
        assert loader.state_dict()["epoch"] == 1
    with Loader(url, batch_size=95, drop_last=True) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict()["epoch"] == 1  # nothing of that epoch is left
        assert len(numbers(loader)) == 95


def test_a_state_with_other_lanes_changes_the_lanes(url: str) -> None:
    with Loader(url, batch_size=10, lanes=3) as loader:
        batches = iter(loader)
        next(batches)
        state, wanted = loader.state_dict(), [batch["x"].tolist() for batch in batches]
    with Loader(url, batch_size=10) as loader:
        next(iter(loader))
        loader.load_state_dict(state)
        assert loader.plan.lanes == 3
        assert [batch["x"].tolist() for batch in loader] == wanted


def test_a_state_beyond_the_epoch_is_refused(url: str) -> None:
    with Loader(url, batch_size=10) as loader:
        state = loader.state_dict()
        with pytest.raises(StateError, match="position 101"):
            loader.load_state_dict({**state, "position": 101})
        assert loader.state_dict() == state


# Where it runs.


def test_a_loader_is_handed_from_thread_to_thread(url: str) -> None:
    seen: list[int] = []

    def some(batches: Any) -> None:
        seen.extend(number for batch in itertools.islice(batches, 3) for number in batch["x"].tolist())

    with Loader(url, batch_size=10, shuffle="none", transform=keep_x) as loader:
        batches = iter(loader)
        for _ in range(3):
            thread = threading.Thread(target=some, args=(batches,))
            thread.start()
            thread.join()
        some(batches)
    assert seen == list(range(SAMPLES))


def test_statistics_can_be_taken_from_another_thread_all_the_time(url: str) -> None:
    taken: list[Any] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            taken.append(loader.stats())

    with Loader(url, batch_size=4, transform=keep_x, memory="1MB") as loader:
        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(2):
            numbers(loader)
        over.set()
        watcher.join()
        taken.append(loader.stats())
    assert taken[-1].samples == 2 * SAMPLES
    assert len(taken) > 10
    for name in ("batches", "samples", "get_requests", "read_bytes", "wait_seconds", "lookups"):
        values = [getattr(statistics, name) for statistics in taken]
        assert values == sorted(values)


def test_statistics_make_sense_in_every_state(url: str) -> None:
    loader = Loader(url, batch_size=10)
    fresh = loader.stats()
    assert (fresh.batches, fresh.samples, fresh.stall, fresh.loop_seconds) == (0, 0, 0.0, 0.0)
    assert fresh.first_batch_seconds is None
    next(iter(loader))
    first = loader.stats()
    assert (first.batches, first.samples) == (1, 10)
    assert first.first_batch_seconds is not None
    loader.close()
    closed = loader.stats()
    assert (closed.batches, closed.first_batch_seconds) == (1, first.first_batch_seconds)
    numbers(loader)
    assert loader.stats().samples == 10 + SAMPLES
    loader.close()


def test_bad_samples_are_counted_on_over_a_close(url: str) -> None:
    def fail_on_7(sample: dict[str, Any]) -> Any:
        if sample["x"] == 7:
            raise ValueError("seven")
        return keep_x(sample)

    loader = Loader(url, batch_size=10, transform=fail_on_7, workers=WorkerOptions(max_bad_samples=2))
    numbers(loader)
    loader.close()
    numbers(loader)
    assert loader.stats().bad_samples == 2
    with pytest.raises(SampleError, match="sample 7"):
        numbers(loader)
    loader.close()


@pytest.mark.parametrize("copying", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_cannot_be_pickled_or_copied_and_says_what_to_do(url: str, copying: Callable[[Any], Any]) -> None:
    with Loader(url, batch_size=10) as loader, pytest.raises(TypeError, match=r"construct one .* state_dict"):
        copying(loader)


# Data sets of every size.


@pytest.fixture(scope="module")
def small_urls() -> dict[int, str]:
    """Data sets, number of samples → URL."""
    return {samples: pack_numbers(samples, super_sample_bytes=1000) for samples in (1, 2, 5)}


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("world_size", [1, 2, 7])
@pytest.mark.parametrize(
    ("shuffle", "settings"),
    [
        *((shuffle, {}) for shuffle in ("none", "block", "window", "full")),
        *itertools.product(("window", "full"), ({"drop_last": True}, {"evaluation": True}, {"limit": 1})),
    ],
    ids=str,
)
def test_data_sets_smaller_than_anything_are_delivered(
    small_urls: dict[int, str], shuffle: Any, samples: int, world_size: int, settings: dict[str, Any]
) -> None:
    url = small_urls[samples]
    seen, steps = [], set()
    for rank in range(world_size):
        with Loader(
            url, batch_size=3, shuffle=shuffle, rank=rank, world_size=world_size, lanes=4, **settings
        ) as loader:
            epochs = [[batch["x"].tolist() for batch in loader] for _ in range(2)]
            assert [len(epoch) for epoch in epochs] == [len(loader)] * 2
            steps.add(len(loader))
            seen += list(itertools.chain.from_iterable(epochs[0]))
    whole = 1 if "limit" in settings else samples
    if settings.get("drop_last"):
        assert len(set(seen)) == len(seen) == samples // (3 * world_size) * 3 * world_size
    elif settings.get("evaluation"):
        assert sorted(seen) == list(range(samples))
    else:
        assert len(set(seen)) == whole
        assert len(seen) == max(whole, world_size)
    assert settings.get("evaluation") or len(steps) == 1


def test_two_hundred_columns_are_delivered_and_any_few_of_them() -> None:
    names = [f"c{number}" for number in range(200)]
    kinds = [stoker.Array("int16"), stoker.Ragged("uint8"), stoker.Text(), stoker.Array("bool", (2,))]
    schema = {name: kinds[number % 4] for number, name in enumerate(names)}
    values = {"array": 3, "ragged": np.arange(3, dtype=np.uint8), "text": "xyz"}
    sample = {name: [True, False] if column.shape else values[column.kind] for name, column in schema.items()}
    with stoker.Packer("memory://wide/ds", schema=schema) as packer:
        packer.extend(sample for _ in range(20))
    with Loader("memory://wide/ds", batch_size=8) as loader:
        for batch in loader:
            assert list(batch) == names
            assert batch["c0"].tolist() == [3] * len(batch["c1"])
            assert list(batch["c2"]) == ["xyz"] * len(batch["c1"])
    with Loader("memory://wide/ds", batch_size=8, columns=["c199", "c5"]) as loader:
        assert list(next(iter(loader))) == ["c199", "c5"]


@pytest.mark.parametrize("settings", [{}, {"collate": list}, {"reuse_buffers": True}], ids=str)
def test_values_without_an_element_are_delivered(settings: dict[str, Any]) -> None:
    url = f"memory://empty-values-{len(settings)}-{'collate' in settings}/ds"
    schema = {"b": stoker.Bytes(), "t": stoker.Text(), "r": stoker.Ragged("float32", (3,))}
    with stoker.Packer(url, schema=schema) as packer:
        packer.extend({"b": b"", "t": "", "r": np.zeros((0, 3), np.float32)} for _ in range(10))
    with Loader(url, batch_size=4, **settings) as loader:
        for batch in loader:
            samples = batch if "collate" in settings else [{name: batch[name][0] for name in schema}]
            for sample in samples:
                assert (sample["b"], sample["t"], sample["r"].shape) == (b"", "", (0, 3))
