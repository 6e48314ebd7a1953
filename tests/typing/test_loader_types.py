"""Types that a user's type checker sees: ``mypy`` checks this file, an ignored error that is none is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, assert_type

from stoker_torch import Budget, CachedDataset, Loader, LoaderConfig, StreamConfig, StreamDataset, WorkerOptions
from support.datasets import pack_numbers


def test_a_loader_is_typed() -> None:
    with Loader(pack_numbers(8), batch_size=4, shuffle="full", memory="1MB", workers=2) as loader:
        assert_type(loader, Loader)
        assert_type(iter(loader), Iterator[Any])
        assert_type(loader.config.batch_size, int)
        config: LoaderConfig = loader.config
        assert config.seed == 0
    keywords = Loader(url=pack_numbers(8), batch_size=4, workers=WorkerOptions(threads=1), budget=Budget(dollars=3))
    keywords.close()


def test_a_stream_data_set_is_typed() -> None:
    dataset = StreamDataset(pack_numbers(8), budget=Budget(egress="internet", max_dollars_per_epoch=float("inf")))
    assert_type(dataset.config.batch_size, int | None)
    config: StreamConfig = dataset.config
    assert config.memory == "512MB"


def wrong() -> None:
    """Never called: what a type checker refuses."""
    Loader("data")  # type: ignore[call-arg]
    Loader("data", 64)  # type: ignore[call-arg]
    Loader("data", batch_size="64")  # type: ignore[arg-type]
    Loader("data", batch_size=64, shufle=True)  # type: ignore[call-arg]
    Loader("data", batch_size=64, shuffle="random")  # type: ignore[arg-type]
    Loader("data", batch_size=64, budget=Budget(egress="moon"))  # type: ignore[arg-type]
    Loader(Path("data"), batch_size=64, num_workers=4)  # type: ignore[call-arg]
    StreamDataset("data", pin_memory=True)  # type: ignore[call-arg]
    CachedDataset([], None, visible="none")  # type: ignore[arg-type]
