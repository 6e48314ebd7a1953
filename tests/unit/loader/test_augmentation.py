"""Random augmentation is the same however samples are dealt, worked on, batched and resumed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from stoker import SampleContext
from stoker.errors import ConfigError
from stoker_torch import Loader, LoaderConfig, StreamDataset
from stoker_torch._user_functions import add_context_argument
from support.cases import for_each
from support.datasets import pack_numbers

SAMPLES = 150
SEED = 11
Drawn = dict[tuple[int, int], tuple[float, float, int]]


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(SAMPLES)


def decode(text: str, context: SampleContext) -> float:
    assert text.startswith(f"sample {context.sample} ")
    return context.generator().random()


def augment(sample: dict[str, Any], context: SampleContext) -> dict[str, Any]:
    assert int(sample["x"]) == context.sample
    jitter = torch.randint(1 << 40, (), generator=context.torch_generator())
    return {"key": (context.epoch, context.sample), "drawn": (sample["text"], context.generator().random(), jitter)}


SETTINGS: dict[str, Any] = {"decode": {"text": decode}, "transform": augment, "collate": list, "seed": SEED}


def collected(batches: Iterable[list[Mapping[str, Any]]]) -> Drawn:
    """Return what was drawn for each sample of an epoch; the same if a sample came twice."""
    drawn: Drawn = {}
    for sample in (sample for batch in batches for sample in batch):
        first, second, third = sample["drawn"]
        value = (first, second, int(third))
        assert drawn.setdefault(sample["key"], value) == value
    return drawn


@pytest.fixture(scope="module")
def expected(url: str) -> Drawn:
    with Loader(url, batch_size=32, workers=1, **SETTINGS) as loader:
        drawn = collected(loader) | collected(loader)
    assert sorted(drawn) == [(epoch, sample) for epoch in (0, 1) for sample in range(SAMPLES)]
    assert len({value for values in drawn.values() for value in values}) == 3 * len(drawn)
    return drawn


@pytest.mark.parametrize("shuffle", ["none", "block", "full", "materialized"])
@pytest.mark.parametrize(("workers", "batch_size", "ranks"), [(1, 1, 1), (5, 7, 2), (2, 64, 3)])
def test_neither_threads_nor_ranks_nor_batches_nor_the_shuffle_change_it(
    url: str, expected: Drawn, shuffle: Any, workers: int, batch_size: int, ranks: int
) -> None:
    drawn: Drawn = {}
    for rank in range(ranks):
        place: dict[str, Any] = {"rank": rank, "world_size": ranks}
        with Loader(
            url, batch_size=batch_size, workers=workers, shuffle=shuffle, lanes=6, **place, **SETTINGS
        ) as loader:
            drawn |= collected(loader) | collected(loader)
    assert drawn == expected


def test_a_run_that_is_resumed_continues_as_it_would_have(url: str, expected: Drawn) -> None:
    choose = random.Random(0)
    state: dict[str, Any] | None = None
    drawn: Drawn = {}
    while len(drawn) < len(expected):
        with Loader(url, batch_size=choose.randrange(1, 40), workers=choose.randrange(1, 4), **SETTINGS) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for batch in loader:
                drawn |= collected([batch])
                state = loader.state_dict()
                if choose.random() < 0.3:
                    break
    assert {key: drawn[key] for key in expected} == expected


@pytest.mark.parametrize("batch_size", [None, 9])
def test_a_stream_dataset_augments_as_a_loader_does(url: str, expected: Drawn, batch_size: int | None) -> None:
    settings: dict[str, Any] = {**SETTINGS, "collate": SETTINGS["collate"] if batch_size else None}
    drawn: Drawn = {}
    for rank in range(2):
        dataset = StreamDataset(url, batch_size=batch_size, rank=rank, world_size=2, lanes=4, **settings)
        for _ in range(2):
            drawn |= collected(dataset if batch_size else ([sample] for sample in dataset))
        dataset.close()
    assert drawn == expected


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_worker_processes_augment_as_a_loader_does(url: str, expected: Drawn) -> None:
    dataset = StreamDataset(url, **{**SETTINGS, "collate": None})
    loader = DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=list)
    assert collected(loader) | collected(loader) == expected


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_draws_from_torchs_own_generator_can_be_seeded_in_a_worker_process(url: str) -> None:
    def augment(sample: dict[str, Any], context: SampleContext) -> tuple[int, float]:
        torch.manual_seed(context.torch_generator().initial_seed())
        return context.sample, torch.rand(()).item()

    found = []
    for workers in (1, 2):
        dataset = StreamDataset(url, transform=augment, seed=SEED)
        loader = DataLoader(dataset, batch_size=20, num_workers=workers, collate_fn=list)
        found.append(sorted(sample for batch in loader for sample in batch))
    assert found[0] == found[1]
    assert len(set(found[0])) == SAMPLES


def test_another_seed_draws_other_numbers(url: str, expected: Drawn) -> None:
    with Loader(url, batch_size=32, **{**SETTINGS, "seed": SEED + 1}) as loader:
        drawn = collected(loader)
    assert not {value for values in drawn.values() for value in values} & {
        value for values in expected.values() for value in values
    }


class Method:
    def __call__(self, sample: Any, context: SampleContext | None = None) -> int:
        return -1 if context is None else context.sample

    def method(self, sample: Any, *, context: SampleContext) -> int:
        return context.sample


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (Method(), 7),
        (Method().method, 7),
        (functools.partial(lambda size, sample, context: context.sample, 3), 7),
        (lambda sample, context: context.sample, 7),
        (lambda sample, *others, **named: len(others) + len(named), 0),
        (lambda sample, size=224: size, 224),
        (len, 4),
        (torch.nn.Identity(), "text"),
    ],
)
def test_a_function_asks_by_the_name_of_a_parameter(function: Callable[..., Any], result: Any) -> None:
    LoaderConfig(batch_size=1, transform=function)
    assert add_context_argument(function)("text", SampleContext(seed=0, epoch=0, sample=7)) == result


@for_each(
    "function",
    [lambda: 0, lambda sample, generator: 0, lambda sample, context, size: 0, lambda context: 0, lambda *, sample: 0],
)
@for_each("name", ["transform", "decode"])
def test_what_cannot_be_called_is_refused_when_the_loader_is_made(name: str, function: Callable[..., Any]) -> None:
    settings: dict[str, Any] = {name: {"text": function} if name == "decode" else function}
    with pytest.raises(
        ConfigError, match=rf"^{name}.* cannot be called: .*SampleContext if it has a parameter 'context'"
    ):
        LoaderConfig(batch_size=1, **settings)


@pytest.mark.parametrize("name", ["collate", "batch_transform"])
def test_a_function_of_a_batch_has_no_context(name: str) -> None:
    settings: dict[str, Any] = {name: lambda batch, context: batch}
    with pytest.raises(
        ConfigError, match=rf"^{name}.* cannot be called: .*only decode and transform .* draw random numbers there"
    ):
        LoaderConfig(batch_size=1, **settings)
