"""Settings, states and ranks: what each takes, and what is refused."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stoker.errors import ConfigError, RankMismatchError, StateError
from stoker_torch import Loader, LoaderConfig, StreamConfig, StreamDataset, WorkerOptions
from stoker_torch._ranks import compare_ranks, find_rank
from stoker_torch._state import RunState
from support.cases import for_each
from support.datasets import pack_numbers

STATE = RunState(
    epoch=2, position=30, dataset="digits", version=3, seed=1, shuffle="window", window=8, lanes=2, limit=None
)


@for_each(
    "name",
    ["batch_size", "seed", "window", "lanes", "rank", "world_size", "limit", "version", "epochs", "workers"],
)
@for_each("value", [-1, 1.0, "1", True, float("nan")])
def test_an_integer_setting_is_an_integer_and_not_too_small(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} "):
        LoaderConfig(**{"batch_size": 1, name: value})


def test_a_loader_makes_batches_and_a_stream_data_set_need_not() -> None:
    with pytest.raises(ConfigError, match=r"^batch_size must be an integer of at least 1, not None"):
        LoaderConfig(batch_size=None)  # type: ignore[arg-type]
    assert StreamConfig(batch_size=None).batch_size is None


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "30 s", None])
def test_a_timeout_is_a_number_of_seconds(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^timeout_seconds must be a number of seconds, 0 for no limit, not "):
        WorkerOptions(timeout_seconds=value)


def test_numpy_integers_become_pythons() -> None:
    config = LoaderConfig(batch_size=np.int64(3), seed=np.uint8(7), limit=np.int32(9))  # type: ignore[arg-type]
    assert [type(value) for value in (config.batch_size, config.seed, config.limit)] == [int] * 3


@for_each(
    ("name", "value"),
    [
        ("drop_last", "no"),
        ("evaluation", None),
        ("with_ids", 1),
        ("decode", [int]),
        ("decode", {"x": "int"}),
        ("decode", {"x": None}),
        ("transform", 3),
        ("collate", "list"),
        ("batch_transform", {}),
        ("schedule", "continuous"),
    ],
)
def test_a_switch_is_a_boolean_and_what_is_called_can_be(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}.* must be .*not "):
        LoaderConfig(**{"batch_size": 1, name: value})


@pytest.mark.parametrize("columns", ["x", [], ()])
def test_columns_are_a_sequence_of_at_least_one_name(columns: Any) -> None:
    with pytest.raises(ConfigError, match="columns"):
        LoaderConfig(batch_size=1, columns=columns)


@pytest.mark.parametrize("ranks", ["0", "-1", "two", ""])
def test_memory_of_a_node_needs_a_number_of_ranks(monkeypatch: pytest.MonkeyPatch, ranks: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE"):
        LoaderConfig(batch_size=1, memory="node:1GB")
    assert LoaderConfig(batch_size=1, memory="1GB").memory_bytes() == 10**9


def test_a_state_goes_through_plain_values_and_back() -> None:
    plain = STATE.to_dict()
    assert plain["sources"] == [
        {"dataset": "digits", "version": 3, "seed": 1, "shuffle": "window", "window": 8, "lanes": 2, "limit": None}
    ]
    assert RunState.from_dict(plain) == STATE


@for_each(
    "damage",
    [
        lambda state: [],
        lambda state: None,
        lambda state: {},
        lambda state: state | {"format": 2},
        lambda state: state | {"sources": []},
        lambda state: state | {"sources": state["sources"] * 2},
        lambda state: state | {"sources": 7},
        lambda state: state | {"sources": [{}]},
        lambda state: state | {"sources": [state["sources"][0] | {"more": 1}]},
        lambda state: state | {"sources": [state["sources"][0] | {"lanes": 0}]},
        lambda state: state | {"epoch": -1},
        lambda state: state | {"position": 1.5},
        lambda state: state | {"position": True},
        lambda state: {name: value for name, value in state.items() if name != "epoch"},
    ],
)
def test_what_is_not_a_state_is_a_state_error(damage: Any) -> None:
    with pytest.raises(StateError):
        RunState.from_dict(damage(STATE.to_dict()))


def test_rank_and_world_size_are_as_given_else_of_the_environment_else_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert find_rank(None, None) == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert find_rank(None, None) == (2, 4)
    assert find_rank(0, 1) == (0, 1)
    for half in ((1, None), (None, 2)):
        with pytest.raises(ConfigError, match="must be given together"):
            find_rank(*half)
    monkeypatch.delenv("RANK")
    with pytest.raises(
        ConfigError,
        match=r"WORLD_SIZE is 4 and RANK is not set; construct the loader or data set when torch.distributed is",
    ):
        find_rank(None, None)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(
        ConfigError, match=r"^RANK is 1 and WORLD_SIZE is not set; construct the loader or data set when "
    ):
        find_rank(None, None)
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert find_rank(None, None) == (0, 1)


class FakeDistributed:
    """A group of ranks in threads."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.ranks = threading.local()
        self.tensors: dict[int, torch.Tensor] = {}
        self.barrier = threading.Barrier(world_size, timeout=30)

    def all_gather(self, into: list[torch.Tensor], mine: torch.Tensor, group: None) -> None:
        self.tensors[self.ranks.own] = mine
        self.barrier.wait()
        for rank, target in enumerate(into):
            target.copy_(self.tensors[rank])

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(distributed, "get_rank", lambda: self.ranks.own)
        monkeypatch.setattr(distributed, "get_world_size", lambda group=None: self.world_size)
        monkeypatch.setattr(distributed, "get_backend", lambda group: "gloo")
        monkeypatch.setattr(distributed, "all_gather", self.all_gather)

    def compare(self, settings: list[dict[str, object]]) -> list[str]:
        """Compare on every rank, and return what each raised."""
        raised = [""] * self.world_size

        def run(rank: int) -> None:
            self.ranks.own = rank
            try:
                compare_ranks(settings[rank], self.world_size)
            except RankMismatchError as error:
                raised[rank] = str(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return raised


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    distributed.destroy_process_group()


def test_a_dimension_of_a_mesh_is_rank_and_world_size(mesh: DeviceMesh) -> None:
    assert find_rank(None, None, mesh["dp"]) == (0, 1)
    url = pack_numbers(20)
    with Loader(url, batch_size=10, mesh=mesh["dp"], shuffle="none") as loader:
        assert next(iter(loader))["x"].tolist() == list(range(10))
    dataset = StreamDataset(url, batch_size=10, mesh=mesh["dp"], shuffle="none")
    assert pickle.dumps(dataset)  # as for a spawned worker


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0, "world_size": 1}, r"give mesh=, or rank= and world_size=, not both"),
        ({"mesh": "dp"}, "mesh must be a torch.distributed.device_mesh.DeviceMesh, not 'dp'"),
        ({"mesh": None}, r"this one has 2 \(dp, tp\): give mesh=device_mesh\['dp'\]"),
    ],
    ids=str,
)
def test_a_wrong_mesh_is_refused(mesh: DeviceMesh, settings: dict[str, Any], message: str) -> None:
    given = {"mesh": mesh["dp"], **settings}
    with pytest.raises(ConfigError, match=message):
        Loader(pack_numbers(20), batch_size=10, **{**given, "mesh": mesh if given["mesh"] is None else given["mesh"]})


def test_ranks_that_agree_continue_and_the_others_learn_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeDistributed(3)
    group.install(monkeypatch)
    assert group.compare([{"seed": 1, "lanes": None}] * 3) == ["", "", ""]
    raised = group.compare([{"seed": 1, "lanes": None}, {"seed": 1, "lanes": 2}, {"seed": 1, "lanes": None}])
    for rank, lanes in enumerate((None, 2, None)):
        assert f"do not agree on lanes (here {lanes!r});" in raised[rank]


def test_torch_distributed_names_the_rank_before_the_environment_does(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeDistributed(3)
    group.install(monkeypatch)
    group.ranks.own = 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "9")
    assert find_rank(None, None) == (2, 3)


def test_ranks_given_by_hand_are_not_compared_with_a_group_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeDistributed(3)
    group.install(monkeypatch)
    monkeypatch.setattr(distributed, "all_gather", None)  # would fail if it were called
    compare_ranks({"seed": 1}, 1)
    compare_ranks({"seed": 1}, 2)


def test_the_start_line_says_what_is_read_and_what_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    url = pack_numbers(100)
    with caplog.at_level(logging.INFO, "stoker"), Loader(url, batch_size=10, rank=1, world_size=2) as loader:
        (record,) = caplog.records
    assert record.getMessage() == f"{url}, rank 1 of 2: {loader.plan}"


def test_pin_memory_without_a_gpu_trains_all_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with Loader(pack_numbers(20), batch_size=10, pin_memory=True, reuse_buffers=True) as loader:
        assert "pin_memory has no effect" in caplog.text
        assert len(list(loader)) == 2


@pytest.mark.parametrize("kind", [partial(Loader, batch_size=4), StreamDataset])
def test_what_was_made_before_torch_distributed_refuses_to_be_read_as_another_rank(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[..., Loader | StreamDataset]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    url = pack_numbers(10)
    early, given = kind(url), kind(url, rank=0, world_size=1)
    group = FakeDistributed(2)
    group.install(monkeypatch)
    group.ranks.own = 1
    with pytest.raises(ConfigError, match=r"rank 0 of 1, but torch.distributed has rank 1 of 2; .*train_dataloader"):
        next(iter(early))
    next(iter(given))
    early.close()
    given.close()
