"""A loader attributes its waits: the phases add up, and the slow one is reported."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from stoker_torch import Loader
from support.datasets import numbers, pack_numbers


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(500)


def test_waits_by_phase_add_up_to_the_whole_wait_over_epochs_and_abandoned_ones(url: str) -> None:
    with Loader(url, batch_size=50) as loader:
        assert not any(loader.stats().waits.values())
        for _ in range(3):
            numbers(loader)
            next(iter(loader))
        stats = loader.stats()
    assert stats.wait_seconds > 0
    assert math.fsum(stats.waits.values()) == pytest.approx(stats.wait_seconds)
    assert stats.waits["start"] > 0
    assert stats.waits["gather"] > 0


def test_waits_for_the_bucket_are_in_its_phases(url: str) -> None:
    with Loader(url, batch_size=50) as loader:
        numbers(loader)
        stats = loader.stats()
    elsewhere = ("start", "gather", "decode")
    waited = math.fsum(seconds for phase, seconds in stats.waits.items() if phase not in elsewhere)
    assert 0 < waited <= stats.bucket_wait_seconds * (1 + 1e-9)


def test_the_ten_longest_waits_are_reported_longest_first(url: str) -> None:
    with Loader(url, batch_size=10) as loader:
        numbers(loader)
        stats = loader.stats()
    worst = stats.worst_waits
    assert len(worst) == 10
    assert [wait.seconds for wait in worst] == sorted((wait.seconds for wait in worst), reverse=True)
    assert math.fsum(wait.seconds for wait in worst) <= stats.wait_seconds * (1 + 1e-9)


SLOW_SECONDS = 0.002


def slow(value: Any) -> Any:
    time.sleep(SLOW_SECONDS)
    return value


def test_a_slow_decode_is_reported(url: str) -> None:
    with Loader(url, batch_size=50, decode={"x": slow}, workers=2) as loader:
        numbers(loader)
        stats = loader.stats()
    # At least the first batch is decoded while nothing else is waited for; how long all else takes is the machine's.
    assert stats.waits["decode"] >= 50 * SLOW_SECONDS / 2
    assert math.fsum(stats.waits.values()) == pytest.approx(stats.wait_seconds)
    assert any("decode" in str(wait) for wait in stats.worst_waits)


@pytest.mark.parametrize("settings", [{"shuffle": "full"}, {"shuffle": "materialized"}, {"columns": ["x"]}])
def test_every_way_to_read_is_recorded(url: str, settings: dict[str, Any]) -> None:
    with Loader(url, batch_size=50, **settings) as loader:
        numbers(loader)
        stats = loader.stats()
    assert math.fsum(stats.waits.values()) == pytest.approx(stats.wait_seconds)
