"""``shuffle="materialized"``: whatever there is of an epoch, the sequence of ``full``."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import stoker
from stoker import Order, OrderConfig, Prices, open_store
from stoker.abc import Store
from stoker.errors import ConfigError, FetchError, MemoryBudgetError, SampleError, StateError
from stoker_torch import Budget, Loader, RaggedColumn, StreamDataset
from support.datasets import SCHEMA, numbers, pack_numbers
from support.materialized import layout_of, materialize, plan_tasks
from support.packing import read_objects
from support.stores import run_check

SAMPLES = 103
SUPER_SAMPLE_BYTES = 900
MANY = 400
TIGHT = "64KB"
"""Memory in which MANY samples are read as groups, where an epoch has no objects, and about a third of them else."""


@pytest.fixture(scope="module")
def url() -> str:
    """A data set whose epochs 0 and 1 are materialized for several lanes, and whose epoch 2 is not."""
    found = pack_numbers(SAMPLES, super_sample_bytes=SUPER_SAMPLE_BYTES)
    for lanes in (1, 2, 3, 4):
        for epoch in (0, 1):
            materialize(found, lanes=lanes, slices=lanes, epoch=epoch, object_bytes=SUPER_SAMPLE_BYTES)
    return found


def fresh(*epochs: int, lanes: int = 1, samples: int = SAMPLES, object_bytes: int = SUPER_SAMPLE_BYTES) -> str:
    """Return the URL of a data set that has some epochs."""
    found = pack_numbers(samples, super_sample_bytes=SUPER_SAMPLE_BYTES)
    for epoch in epochs:
        materialize(found, lanes=lanes, slices=lanes, epoch=epoch, object_bytes=object_bytes, keep=99)
    return found


def loader(url: str, shuffle: Any = "materialized", **settings: Any) -> Loader:
    budget = Budget(max_dollars_per_epoch=settings.pop("max_dollars_per_epoch", 1e-9))
    return Loader(url, **{"batch_size": 8, "shuffle": shuffle, "seed": 7, "budget": budget, **settings})


def full(epoch: int = 0, samples: int = SAMPLES) -> list[int]:
    """Return the sequence of ``full``: sample i of these data sets is number i."""
    order = Order(np.array([samples]), OrderConfig(shuffle="full", seed=7), epoch)
    return [int(number) for number in order.at(0, samples)]


def is_materialized(made: Loader) -> bool:
    return made._resources.pipeline.is_materialized


def as_lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [value.tolist() if isinstance(value, torch.Tensor) else value for value in column]
        if isinstance(column, RaggedColumn)
        else column.tolist()
        for name, column in batch.items()
    }


def delete_data(url: str, epoch: int, *, lanes: int = 1, keep: Callable[[str], bool] = lambda key: False) -> int:
    """Delete super-samples of an epoch, as by mistake; return their number."""
    deleted = []

    async def delete(store: Store) -> None:
        layout = await layout_of(store, plan_tasks(epoch=epoch, lanes=lanes)[0][0])
        for key in sorted(await read_objects(store, f"{layout.folder}data/")):
            if not keep(key):
                await store.delete(key)
                deleted.append(key)

    run_check(open_store(url), delete)
    return len(deleted)


# The same as full.


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"drop_last": True}, {"evaluation": True}, {"limit": 50}], ids=str)
def test_in_one_lane_every_batch_of_every_rank_is_that_of_full(
    url: str, world_size: int, settings: dict[str, Any]
) -> None:
    for rank in range(world_size):
        place = {"rank": rank, "world_size": world_size, "with_ids": True, "lanes": 1, **settings}
        with loader(url, **place) as mine, loader(url, "full", **place) as other:
            for _ in range(3):
                assert [as_lists(batch) for batch in mine] == [as_lists(batch) for batch in other]


@pytest.mark.parametrize(("world_size", "lanes"), [(1, 2), (1, 4), (2, 2), (2, 4), (3, 3), (3, 4), (4, 2)])
@pytest.mark.parametrize("batch_size", [1, 5, 12])
def test_in_several_lanes_every_step_has_the_samples_of_the_step_of_full(
    url: str, world_size: int, lanes: int, batch_size: int
) -> None:
    steps: list[list[int]] = []
    for rank in range(world_size):
        with loader(url, rank=rank, world_size=world_size, lanes=lanes, batch_size=batch_size) as mine:
            for epoch in range(3):
                for step, batch in enumerate(mine):
                    if len(steps) <= step + epoch * len(mine):
                        steps.append([])
                    steps[step + epoch * len(mine)] += batch["x"].tolist()
                assert is_materialized(mine) == (epoch < 2)
    for epoch in range(3):
        sequence, mine_too = full(epoch), steps[epoch * len(steps) // 3 : (epoch + 1) * len(steps) // 3]
        for step, found in enumerate(mine_too):
            expected = sequence[step * batch_size * world_size :][: batch_size * world_size]
            assert sorted(set(found)) == sorted(expected)
            assert len(found) == max(len(expected), world_size if step + 1 == len(mine_too) else 0)


@pytest.mark.parametrize("lanes", [2, 4])
def test_with_and_without_objects_every_batch_is_the_same(url: str, lanes: int) -> None:
    bare = fresh()
    for rank in range(2):
        place = {"rank": rank, "world_size": 2, "lanes": lanes, "with_ids": True}
        with loader(url, **place) as mine, loader(bare, **place) as other:
            for epoch in range(2):
                batches = [as_lists(batch) for batch in mine], [as_lists(batch) for batch in other]
                assert batches[0] == batches[1]
                assert (is_materialized(mine), is_materialized(other)) == (True, False), epoch
                assert [batch["__id__"] for batch in batches[0]] == [batch["x"] for batch in batches[0]]


def test_memory_for_groups_only_gives_the_same_where_there_are_no_objects() -> None:
    with loader(fresh(samples=MANY), lanes=2, memory=TIGHT) as mine:
        assert numbers(mine) != full(samples=MANY)
        assert sorted(numbers(mine)) == list(range(MANY))
        assert mine.plan.by_groups


def test_columns_decode_and_transform_are_those_of_any_shuffle(url: str) -> None:
    settings: dict[str, Any] = {
        "columns": ["text", "x"],
        "decode": {"text": str.upper},
        "transform": lambda sample: {**sample, "twice": 2 * sample["x"]},
        "with_ids": True,
    }
    with loader(url, **settings) as mine, loader(url, "full", **settings) as other:
        for found, wanted in zip(mine, other, strict=True):
            assert list(found) == list(wanted)
            assert found["text"] == wanted["text"]
            assert found["twice"].tolist() == wanted["twice"].tolist()


def test_a_sample_that_fails_is_named_by_its_number_and_its_own_object(url: str) -> None:
    def fails(sample: dict[str, Any]) -> Any:
        raise ValueError("no")

    with (
        loader(url, transform=fails) as mine,
        pytest.raises(SampleError, match=rf"sample {full()[0]} .*/epochs/.*/data/"),
    ):
        next(iter(mine))


def test_worker_processes_of_a_data_loader_read_epochs_too(url: str) -> None:
    dataset = StreamDataset(url, batch_size=8, shuffle="materialized", seed=7, lanes=2)
    assert dataset.plan.shuffle == "materialized"
    batches = DataLoader(dataset, batch_size=None, num_workers=2)
    other = DataLoader(
        StreamDataset(url, batch_size=8, shuffle="full", seed=7, lanes=2), batch_size=None, num_workers=2
    )
    for _ in range(3):
        found = numbers(batches)
        assert sorted(found) == list(range(SAMPLES))
        assert found == numbers(other)


# What it takes.


def test_an_epoch_takes_one_request_for_each_object_and_one_for_its_manifest(url: str) -> None:
    with loader(url, lanes=1, memory="100KB", epochs=1) as mine:
        before = mine.stats()
        assert numbers(mine) == full()
        after = mine.stats()
        objects = len(mine._resources.pipeline.source.dataset.manifest)
        hedges = after.hedges - before.hedges
        assert after.get_requests - before.get_requests - hedges == objects + 1


def test_the_plan_is_that_of_reading_objects_in_sequence(url: str) -> None:
    with loader(url, lanes=2, world_size=2, rank=0) as mine:
        plan = mine.plan
        assert (plan.shuffle, plan.lanes, plan.lanes_read, plan.amplification < 1.4) == ("materialized", 2, 1, True)
        assert "shuffle materialized" in str(plan)


def test_statistics_count_over_all_epochs_and_sources(url: str) -> None:
    with loader(url) as mine:
        seen = [mine.stats()]
        for _ in range(3):
            numbers(mine)
            seen.append(mine.stats())
        assert [stats.samples for stats in seen] == [0, SAMPLES, 2 * SAMPLES, 3 * SAMPLES]
        assert all(one.lookups < other.lookups for one, other in itertools.pairwise(seen))
        assert all(one.wait_seconds < other.wait_seconds for one, other in itertools.pairwise(seen))


def test_an_epoch_without_objects_is_reported_with_the_command_that_makes_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = fresh()
    with caplog.at_level(logging.WARNING, "stoker"), loader(url, lanes=2) as mine:
        numbers(mine)
    assert f"stoker shuffle {url} --at 1 --seed 7 --lanes 2 --epoch 0" in caplog.text


def test_an_epoch_that_would_cost_too_much_as_full_is_refused_only_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = fresh(0, samples=MANY)
    s3 = Prices.load().stores["s3"]
    monkeypatch.setattr(Prices, "store", lambda self, url: s3)
    with (
        loader(url, "full", memory=TIGHT, max_dollars_per_epoch=1.0) as other,
        loader(url, memory=TIGHT, max_dollars_per_epoch=1.0) as one,
    ):
        dollars = one.plan.dollars, other.plan.dollars
    assert dollars[0] < 0.5 * dollars[1]
    with loader(url, memory=TIGHT, max_dollars_per_epoch=sum(dollars) / 2) as mine:
        assert numbers(mine) == full(samples=MANY)
        with pytest.raises(MemoryBudgetError, match=r"epoch 1 has no objects of its own.*max_dollars_per_epoch"):
            next(iter(mine))


def test_one_epoch_after_the_other_uses_the_same_memory(url: str) -> None:
    with loader(url) as mine:
        memory = []
        for _ in range(4):
            next(iter(mine))
            memory.append(mine._resources.pipeline.source.ring.memory.obj)
        assert memory[0] is memory[1]
        assert memory[2] is memory[3], "that of full, which is larger"


def test_memory_that_is_too_small_for_a_lane_each_names_the_figure_that_fits(url: str) -> None:
    with pytest.raises(MemoryBudgetError, match=r"an epoch's own objects .* give memory=[0-9]+"):
        loader(url, lanes=4, memory="5KB")


# States, restarts, falling back.


@pytest.mark.parametrize("first", ["materialized", "full"])
@pytest.mark.parametrize("second", ["materialized", "full"])
def test_a_state_continues_with_or_without_objects_exactly_once(url: str, first: str, second: str) -> None:
    seen: list[int] = []
    with loader(url, first, lanes=2) as before:
        for number, batch in enumerate(before):
            seen += batch["x"].tolist()
            if number == 4:
                break
        state = json.loads(json.dumps(before.state_dict()))
    for rank in range(3):
        with loader(url, second, rank=rank, world_size=3, batch_size=3) as after:
            after.load_state_dict(state)
            seen += numbers(after)[: len(seen) * SAMPLES]
    assert sorted(set(seen)) == list(range(SAMPLES))
    assert len(seen) - len(set(seen)) < 3, "only what makes ranks even is repeated"
    assert seen[:40] == sorted(seen[:40], key=seen.index)
    assert sorted(seen[:40]) == sorted(full()[:40])


@given(
    lanes=st.sampled_from((1, 2, 3, 4)),
    limit=st.sampled_from((None, 7, 50)),
    drop_last=st.booleans(),
    stretches=st.lists(
        st.tuples(st.sampled_from(("full", "materialized")), st.integers(1, 4), st.integers(1, 12), st.integers(1, 4)),
        min_size=2,
        max_size=6,
    ),
)
@settings(max_examples=12, deadline=None)
def test_a_run_that_changes_its_size_and_its_source_again_and_again_is_exactly_once(
    url: str, lanes: int, limit: int | None, drop_last: bool, stretches: list[tuple[str, int, int, int]]
) -> None:
    """Each stretch is some steps on all ranks, of an epoch that has objects or, from the third on, has none."""
    state: dict[str, Any] = {}
    epoch = position = 0
    for shuffle, world_size, batch_size, steps in stretches:
        seen: list[int] = []
        for rank in range(world_size):
            place = {"rank": rank, "world_size": world_size, "limit": limit, "drop_last": drop_last, "lanes": lanes}
            with loader(url, shuffle, batch_size=batch_size, **place) as mine:
                if state:
                    mine.load_state_dict(json.loads(json.dumps(state)))
                seen += numbers(itertools.islice(mine, steps))
                after = mine.state_dict()
        state = after
        wanted = full(epoch)[:limit][position:]
        if len(wanted) < (world_size * batch_size if drop_last and position else 1):  # nothing was left of the epoch
            epoch, wanted = epoch + 1, full(epoch + 1)[:limit]
        whole = world_size * batch_size
        end = min(steps * whole, len(wanted) // whole * whole if drop_last else len(wanted))
        assert sorted(set(seen)) == sorted(wanted[:end])
        assert len(seen) - end < world_size, "only what makes ranks even is repeated"
        epoch, position = state["epoch"], state["position"]


def test_ranks_agree_and_share_an_epoch_of_which_one_sees_objects_and_the_other_does_not(url: str) -> None:
    seen: list[int] = []
    states = []
    for rank, place in enumerate((url, fresh())):
        with loader(place, rank=rank, world_size=2) as mine:
            seen += numbers(mine)
            state = mine.state_dict()
            states.append(state | {"sources": [source | {"dataset": ""} for source in state["sources"]]})
    assert sorted(seen)[: SAMPLES - 1] == list(range(SAMPLES - 1))
    assert states[0] == states[1]


def test_a_state_of_another_order_is_refused(url: str) -> None:
    with loader(url, "window") as other:
        state = other.state_dict()
    with loader(url) as mine, pytest.raises(StateError, match="shuffle"):
        mine.load_state_dict(state)


def test_objects_that_appear_are_used_from_the_next_start_on() -> None:
    url = fresh()
    with loader(url) as mine:
        batches = iter(mine)
        seen = [number for _ in range(4) for number in next(batches)["x"].tolist()]
        assert not is_materialized(mine)
        materialize(url, object_bytes=SUPER_SAMPLE_BYTES)
        state = mine.state_dict()
    with loader(url) as mine:
        mine.load_state_dict(state)
        seen += numbers(mine)
        assert is_materialized(mine)
    assert seen == full()


@pytest.mark.parametrize(("lanes", "kept"), [(1, 0), (2, 1), (1, 30)])
def test_objects_that_vanish_in_the_middle_are_done_without(
    lanes: int, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    url, bare = fresh(0, 1, lanes=lanes, samples=MANY, object_bytes=300), fresh(samples=MANY)
    with (
        loader(url, lanes=lanes, memory=TIGHT, with_ids=True) as mine,
        loader(bare, lanes=lanes, with_ids=True) as other,
    ):
        batches, wanted = iter(mine), iter(other)
        assert as_lists(next(batches)) == as_lists(next(wanted))
        assert is_materialized(mine)
        assert delete_data(url, 0, lanes=lanes, keep=lambda key: int(key[-8:]) < kept) > 50
        assert [as_lists(batch) for batch in batches] == [as_lists(batch) for batch in wanted]
        assert "the rest of epoch 0, from position" in caplog.text
        assert [as_lists(batch) for batch in mine] == [as_lists(batch) for batch in other]
        assert is_materialized(mine), "the next epoch has its objects"


def test_objects_that_are_spoilt_or_replaced_are_done_without(caplog: pytest.LogCaptureFixture) -> None:
    url = fresh(0, 1)

    async def spoil(store: Store) -> None:
        for epoch in (0, 1):
            layout = await layout_of(store, plan_tasks(epoch=epoch)[0][0])
            for key, data in (await read_objects(store, f"{layout.folder}data/")).items():
                changed = data[:-1] + bytes([data[-1] ^ 1]) if epoch else b"x" * len(data)
                await store.put(key, changed)

    run_check(open_store(url), spoil)
    with loader(url) as mine:
        assert [numbers(mine), numbers(mine)] == [full(), full(1)]
    assert caplog.text.count("is read as 'full'") == 2


def test_a_data_set_that_is_spoilt_itself_is_an_error() -> None:
    url = fresh(0)

    async def spoil(store: Store) -> None:
        for key, data in [(key, data) for key, data in (await read_objects(store)).items() if "data/" in key]:
            await store.put(key, b"x" * len(data))

    run_check(open_store(url), spoil)
    with loader(url) as mine, pytest.raises((stoker.errors.StoreError, FetchError), match="data/"):
        numbers(mine)


def test_what_is_gathered_ahead_while_objects_vanish_is_neither_lost_nor_repeated() -> None:
    url = fresh(0, samples=MANY, object_bytes=300)
    with loader(url, transform=lambda sample: {"x": sample["x"]}, memory=TIGHT) as mine:
        seen: list[int] = []
        for number, batch in enumerate(mine):
            seen += batch["x"].tolist()
            if number == 2:
                delete_data(url, 0)
        assert is_materialized(mine) is False
    assert seen == full(samples=MANY)


# A loader's life.


def test_epochs_can_be_named_left_and_walked_in_any_order(url: str) -> None:
    with loader(url, epochs=3) as mine:
        next(iter(mine))
        assert numbers(mine) == full(1)
        mine.set_epoch(0)
        assert numbers(mine) == full(0)
        mine.set_epoch(2)
        assert numbers(mine) == full(2)
        with pytest.warns(UserWarning, match="epochs=3"):
            assert numbers(mine) == []


def test_other_lanes_than_those_of_the_objects_are_read_as_full(url: str) -> None:
    with loader(url, lanes=7) as mine:
        assert sorted(numbers(mine)) == list(range(SAMPLES))
        assert not is_materialized(mine)


def test_an_epoch_of_another_version_is_not_read() -> None:
    url = fresh(0)
    with stoker.Packer(url, schema=SCHEMA, mode="append", super_sample_bytes=SUPER_SAMPLE_BYTES) as packer:
        packer.write({"x": 1000, "image": [[0] * 3] * 4, "text": "more", "tokens": [1]})
    with loader(url) as mine:
        assert sorted(numbers(mine)) == [*range(SAMPLES), 1000]
        assert not is_materialized(mine)
    with loader(url, version=1) as mine:
        assert numbers(mine) == full()
        assert is_materialized(mine)


def test_a_shuffle_that_there_is_not_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="shuffle"):
        loader(url, "materialised")


def test_a_forked_child_reads_what_its_parent_would(url: str) -> None:
    with loader(url) as mine:
        batches = iter(mine)
        seen = next(batches)["x"].tolist()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writing, json.dumps(seen + numbers(batches)).encode())
            finally:
                os._exit(0)
        os.close(writing)
        seen += numbers(batches)
        with os.fdopen(reading, "rb") as pipe:
            assert json.loads(pipe.read()) == seen == full()
        os.waitpid(child, 0)
