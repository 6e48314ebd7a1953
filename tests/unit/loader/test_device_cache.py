"""Samples that stay on the device: the same batches, fewer reads; the device is one of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker import FetchConfig, SampleContext
from stoker.errors import ConfigError
from stoker_torch import Loader, WorkerOptions
from support.datasets import pack_numbers
from support.fake_device import ImmediateDevice, use_device

FIXED = ["x", "image"]
SAMPLE_BYTES = 8 + 4 * 3 * 4


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(500)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ImmediateDevice:
    """The device that "cuda:0" is in this test."""
    device = ImmediateDevice()
    use_device(device, monkeypatch)
    return device


def epoch_of(loader: Loader) -> list[dict[str, Any]]:
    return [{name: value.clone() for name, value in batch.items()} for batch in loader]


def assert_same(batches: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(batches) == len(wanted)
    for batch, expected in zip(batches, wanted, strict=True):
        assert list(batch) == list(expected)
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


@pytest.mark.parametrize("shuffle", ["none", "block", "window", "full"])
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_batches_are_the_same_and_reads_become_fewer(
    url: str, device: ImmediateDevice, shuffle: Any, share: float
) -> None:
    settings: dict[str, Any] = {"batch_size": 32, "shuffle": shuffle, "columns": FIXED, "with_ids": True, "seed": 2}
    limit = int(share * 500 * (SAMPLE_BYTES + 8)) + 8
    with Loader(url, **settings) as host, Loader(url, device="cuda:0", gpu_cache=limit, **settings) as loader:
        reads = []
        for _ in range(8):  # what was planned before is still read
            before, copied = loader.stats().get_requests, device.copied_bytes
            assert_same(epoch_of(loader), epoch_of(host))
            reads.append((loader.stats().get_requests - before, device.copied_bytes - copied))
    stats, objects = loader.stats(), len(loader.manifest)
    assert 7 * 500 * 0.8 * share <= stats.device_samples <= 7 * 500
    assert "on the device" in str(stats)
    assert reads[-1][0] <= objects * (1.02 - share) + 1
    if share == 1.0:
        assert reads[-1] == (0, 500 * 8)  # only the places of the samples


def test_full_beyond_memory_reads_nothing_once_the_cache_has_all(device: ImmediateDevice) -> None:
    url = "memory://cached-groups/ds"
    rng = np.random.default_rng(0)
    with stoker.Packer(url, schema={"v": stoker.Array("uint8", (5000,))}, super_sample_bytes=100_000) as packer:
        packer.extend({"v": rng.integers(0, 256, 5000, np.uint8)} for _ in range(2000))
    settings: dict[str, Any] = {"batch_size": 100, "shuffle": "full", "memory": "5MB", "with_ids": True}
    with Loader(url, **settings) as host, Loader(url, device="cuda:0", gpu_cache="20MB", **settings) as loader:
        assert loader._resources.pipeline.source.slots.holds_groups
        for _ in range(2):  # the second epoch's first samples are read ahead
            assert_same(epoch_of(loader), epoch_of(host))
        before = loader.stats().get_requests
        for _ in range(2):
            assert_same(epoch_of(loader), epoch_of(host))
        assert loader.stats().get_requests == before


def test_decoded_values_are_kept_and_decoded_once(url: str, device: ImmediateDevice) -> None:
    decoded: list[int] = []

    def decode(value: torch.Tensor) -> torch.Tensor:
        decoded.append(int(value))
        return value * 2.5

    def halve(batch: dict[str, Any]) -> dict[str, Any]:
        return {"half": batch["x"] / 2}

    settings: dict[str, Any] = {"columns": ["x"], "decode": {"x": decode}, "batch_transform": halve, "shuffle": "none"}
    with Loader(url, batch_size=64, device="cuda:0", gpu_cache="1MB", **settings) as loader:
        first, *_, third = (epoch_of(loader) for _ in range(3))
        assert_same(third, first)
        count = len(decoded)
        assert_same(epoch_of(loader), first)
    assert len(decoded) == count
    assert first[0]["half"][:3].tolist() == [0, 1.25, 2.5]


def test_a_transform_may_pad_ragged_columns(url: str, device: ImmediateDevice) -> None:
    def pad(sample: dict[str, Any]) -> dict[str, Any]:
        tokens = sample["tokens"].to(torch.int32)
        return {"x": sample["x"], "tokens": torch.nn.functional.pad(tokens, (0, 20 - len(tokens)))}

    with Loader(url, batch_size=64, transform=pad, device="cuda:0", gpu_cache="1MB", shuffle="none") as loader:
        first = epoch_of(loader)
        epoch_of(loader)
        assert_same(epoch_of(loader), first)


def test_ranks_keep_the_super_samples_that_they_have_seen_whole(url: str, device: ImmediateDevice) -> None:
    settings: dict[str, Any] = {"batch_size": 16, "columns": FIXED, "world_size": 2, "with_ids": True}
    for rank in range(2):
        with (
            Loader(url, rank=rank, **settings) as host,
            Loader(url, rank=rank, device="cuda:0", gpu_cache="1MB", **settings) as loader,
        ):
            for _ in range(12):  # until each has seen every super-sample whole, and what was planned before is read
                assert_same(epoch_of(loader), epoch_of(host))
            before = loader.stats().get_requests
            epoch_of(loader)
            assert loader.stats().get_requests == before


@pytest.mark.parametrize("shuffle", ["block", "window", "full"])
@pytest.mark.parametrize(
    "settings",
    [
        {"lanes": 3},
        {"lanes": 2, "batch_size": 25, "drop_last": True},
        {"batch_size": 499},
        {"batch_size": 3},
        {"world_size": 3, "rank": 2, "batch_size": 33},
        {"world_size": 3, "rank": 0, "batch_size": 41, "evaluation": True},
        {"epochs": 6},
    ],
    ids=str,
)
def test_a_complete_cache_yields_the_same_batches(
    url: str, device: ImmediateDevice, shuffle: Any, settings: dict[str, Any]
) -> None:
    settings = {"batch_size": 32, "columns": FIXED, "with_ids": True, "shuffle": shuffle, "seed": 7, **settings}
    with Loader(url, **settings) as host, Loader(url, device="cuda:0", gpu_cache="1MB", **settings) as loader:
        cache = loader._resources.device_cache
        assert cache is not None
        complete_epochs = 0
        while complete_epochs < 3:
            complete_epochs += cache.is_complete
            assert_same(epoch_of(loader), epoch_of(host))
            assert host.state_dict() == loader.state_dict()
            assert host.state_dict()["epoch"] < 40, "some super-samples are never seen whole"
        assert loader.stats().repeated_samples == host.stats().repeated_samples


def test_a_state_is_resumed_in_the_middle_of_a_cached_epoch(url: str, device: ImmediateDevice) -> None:
    settings: dict[str, Any] = {"batch_size": 50, "columns": FIXED, "seed": 4}
    with Loader(url, **settings) as host, Loader(url, device="cuda:0", gpu_cache="1MB", **settings) as loader:
        for _ in range(2):
            epoch_of(host)
            epoch_of(loader)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
        assert state["position"] == 150  # though the places of all batches of the epoch are on the device
        host.load_state_dict(state)
        loader.load_state_dict(state)
        assert_same(epoch_of(loader), epoch_of(host))
        loader.close()
        assert_same(epoch_of(loader), epoch_of(host))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": None}, "give device="),
        ({"unit": "1MiB"}, "unit='1MiB' reads others"),
        ({"shuffle": "materialized"}, "shuffle='materialized' reads others"),
        ({"collate": list}, "in place of collate="),
        ({"workers": WorkerOptions(max_bad_samples=1)}, "leave out max_bad_samples="),
        ({"gpu_cache": "much"}, "much"),
    ],
    ids=str,
)
def test_settings_that_contradict_it_are_refused(
    url: str, device: ImmediateDevice, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader(url, batch_size=10, **{"device": "cuda:0", "gpu_cache": "1MB", **settings})


def test_random_functions_are_refused(url: str, device: ImmediateDevice) -> None:
    def flip(value: torch.Tensor, context: SampleContext) -> torch.Tensor:
        return value

    with pytest.raises(ConfigError, match=r"decode\['x'\] has a parameter context"):
        Loader(url, batch_size=10, decode={"x": flip}, device="cuda:0", gpu_cache="1MB")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "a ragged column has none"),
        ({"columns": ["x"], "decode": {"x": str}}, "the batches have a str"),
        ({"columns": ["x"], "gpu_cache": 64}, "does not hold the"),
    ],
    ids=str,
)
def test_values_that_cannot_be_kept_are_explained_at_the_first_batch(
    url: str, device: ImmediateDevice, settings: dict[str, Any], message: str
) -> None:
    with (
        Loader(url, batch_size=10, **{"device": "cuda:0", "gpu_cache": "1MB", **settings}) as loader,
        pytest.raises(ConfigError, match=message),
    ):
        next(iter(loader))


def test_thousands_of_steps_that_read_nothing_are_planned_little_by_little(url: str, device: ImmediateDevice) -> None:
    settings: dict[str, Any] = {"batch_size": 1, "columns": ["x"], "limit": 100, "shuffle": "none"}
    fetch = FetchConfig(hedge=False)  # it counts requests
    with Loader(url, device="cuda:0", gpu_cache="1MB", fetch=fetch, **settings) as loader:
        for _ in range(30):
            assert [int(batch["x"]) for batch in loader] == list(range(100))
        before = loader.stats().get_requests
        for _ in range(30):
            assert [int(batch["x"]) for batch in loader] == list(range(100))
        # The super-sample that the limit cuts is never whole; that of the epoch ahead may be read before or after.
        assert loader.stats().get_requests - before <= 30 + 1
