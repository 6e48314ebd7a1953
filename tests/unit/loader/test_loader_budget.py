"""A loader with a budget: warnings, the stop, and resuming."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker import Continuous, FetchConfig, NextBatch, S3Options
from stoker.errors import ConfigError, CostBudgetError, MemoryBudgetError, SpendingWarning
from stoker_local import running_bucket
from stoker_torch import Budget, Loader, LoaderConfig, StreamDataset
from support.datasets import numbers

SAMPLES = 200
BATCH = 10
PRICES = """
currency = "USD"
date = 2026-11-21
functions = {}

[stores.s3]
name = "a dollar a GET"
region = "here"
source = "https://example.com"
storage_dollars_per_gb_month = 0.0
read_dollars_per_gb = 0.0
write_dollars_per_gb = 0.0
dollars_per_1000_requests = { GET = 1000, HEAD = 0, PUT = 0, LIST = 0, DELETE = 0 }
egress_dollars_per_gb = { same_region = 0, other_region = 1073741824, internet = 0 }
"""
URL = "s3://stoker/train"


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    """Yield how to reach a bucket with a data set of 200 objects, one sample each."""
    with running_bucket() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment().items():
            patch.setenv(name, value)
        with stoker.Packer(URL, schema={"x": stoker.Array("int64")}, super_sample_bytes=12) as packer:
            for number in range(SAMPLES):
                packer.write({"x": number})
        yield running.environment()


@pytest.fixture(autouse=True)
def a_dollar_a_get(bucket: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "prices.toml").write_text(PRICES, "utf-8")
    monkeypatch.setenv("STOKER_PRICES", str(tmp_path / "prices.toml"))


def loader(**settings: Any) -> Loader:
    """Return one that fetches little more than the next batch; 1 GET a sample, and 1 for the manifest."""
    limits: dict[str, Any] = {"max_dollars_per_epoch": 1e6, "dollars": settings.pop("budget", None)}
    limits |= {name: settings.pop(name) for name in ("egress", "max_dollars_per_epoch") if name in settings}
    given = {
        "batch_size": BATCH,
        "shuffle": "window",
        "window": 2,
        "schedule": NextBatch(),
        "seed": 3,
        "budget": Budget(**limits),
    }
    return Loader(URL, **{**given, **settings})


def delivered(batches: Loader, seen: list[int]) -> None:
    """Add to ``seen`` what an epoch delivers, until the budget ends it."""
    for batch in batches:
        seen += batch["x"].tolist()


def test_a_budget_that_is_not_spent_changes_nothing() -> None:
    with loader() as free, loader(budget="1000 USD") as bounded, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert numbers(free) == numbers(bounded)
        stats = bounded.stats()  # once: it may be fetching ahead
        assert stats.dollars == stats.get_requests <= 300


def test_a_budget_follows_the_prices_of_the_endpoint_and_those_that_the_user_names(
    bucket: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no prices for a store named free, only for s3"):
        loader(budget="1000 USD", options=S3Options(prices="free"))
    free = PRICES.partition("[stores.s3]")[2].replace("GET = 1000", "GET = 0")
    host = bucket["AWS_ENDPOINT_URL"].partition("://")[2]
    for endpoints in ("", f'endpoints = ["{host}"]\n'):
        (tmp_path / "prices.toml").write_text(f"{PRICES}\n[stores.free]\n{free}{endpoints}", "utf-8")
        options = None if endpoints else S3Options(prices="free")
        with loader(budget="1 USD", options=options) as bounded, warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(numbers(bounded)) == SAMPLES
            assert bounded.stats().dollars == bounded.plan.dollars == 0
            assert bounded.stats().get_requests >= SAMPLES


def test_at_80_percent_it_warns_once_and_at_100_it_ends_between_batches() -> None:
    seen: list[int] = []
    with loader(budget="100 USD") as bounded, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(CostBudgetError, match=r"of \$100 has been spent; to continue") as raised:
            delivered(bounded, seen)
    assert [each.category for each in caught] == [SpendingWarning]
    assert str(caught[0].message).endswith("of $100 has been spent")
    assert caught[0].filename == __file__
    assert raised.value.spent_dollars >= 100
    assert len(seen) % BATCH == 0
    assert 50 <= len(seen) <= 100


@pytest.mark.filterwarnings("ignore::stoker.errors.SpendingWarning")
def test_once_it_is_spent_nothing_more_is_fetched() -> None:
    one_at_a_time = FetchConfig(hedge=False, start_concurrency=1, min_concurrency=1, max_concurrency=1)
    with loader(budget=60, schedule=Continuous(), fetch=one_at_a_time) as bounded:
        with pytest.raises(CostBudgetError):
            delivered(bounded, [])
        spent, state = bounded.stats().get_requests, bounded.state_dict()
        time.sleep(0.2)  # which is enough for many more
        assert bounded.stats().get_requests == spent < SAMPLES
        with pytest.raises(CostBudgetError):
            delivered(bounded, [])
        assert bounded.stats().get_requests == spent
        assert bounded.state_dict() == state


@pytest.mark.filterwarnings("ignore::stoker.errors.SpendingWarning")
@pytest.mark.parametrize("workers", [None, 2])
def test_the_state_continues_where_the_budget_ended_it_and_every_sample_comes_once(workers: int | None) -> None:
    pool = {} if workers is None else {"transform": dict, "workers": workers}
    seen: list[int] = []
    states: list[dict[str, Any]] = []
    while len(seen) < SAMPLES:
        with loader(budget="80 USD", **pool) as bounded:
            if states:
                bounded.load_state_dict(states[-1])
            with suppress(CostBudgetError):
                delivered(bounded, seen)
            states.append(bounded.state_dict())
    assert len(states) >= 3
    with loader() as free:
        assert seen == numbers(free)


@pytest.mark.filterwarnings("ignore::stoker.errors.SpendingWarning")
def test_each_rank_may_spend_its_part_of_the_jobs_budget() -> None:
    with (
        loader(budget="120 USD", rank=1, world_size=2) as half,
        pytest.raises(CostBudgetError, match=r"of \$60, this rank's share of a budget of \$120 for 2") as raised,
    ):
        delivered(half, [])
    assert raised.value.budget_dollars == 60.0


@pytest.mark.parametrize("budget", ["5 EUR", 0, -1, "", True])
def test_what_is_no_amount_is_refused_before_anything_is_read(budget: Any) -> None:
    with pytest.raises(ConfigError, match="must be a positive amount"):
        LoaderConfig(batch_size=1, budget=budget)


def test_a_stream_data_set_takes_no_budget() -> None:
    with pytest.raises(ConfigError, match="budget is for a Loader"):
        StreamDataset(URL, budget="5 USD")


def test_what_an_accelerator_costs_while_the_loop_waits_follows_from_its_price() -> None:
    with loader() as free:
        delivered(free, [])
        stats = free.stats()
    assert stats.wait_seconds > 0
    assert stats.idle_dollars(7.2) == pytest.approx(stats.wait_seconds * 0.002)


def test_a_reader_in_another_region_pays_for_bytes_in_plan_and_budget() -> None:
    with loader(egress="other_region", max_dollars_per_epoch=1e9) as far, loader() as near:  # a dollar a byte
        assert far.plan.dollars == near.plan.dollars + far.plan.read_bytes
    with loader(egress="other_region", max_dollars_per_epoch=1e9, fetch=FetchConfig(hedge=False)) as far:
        numbers(far)  # without hedges: what is broken off is paid for, and not read
        stats = far.stats()  # once: it may be fetching ahead
        assert stats.dollars == stats.get_requests + stats.read_bytes
    with (
        loader(egress="other_region", max_dollars_per_epoch=1e9, budget=10) as far,
        pytest.raises(CostBudgetError),  # the manifest alone has more bytes
    ):
        numbers(far)
    with pytest.raises(MemoryBudgetError, match="max_dollars_per_epoch"):
        loader(egress="other_region", max_dollars_per_epoch=1000)


def test_a_reader_is_in_a_place_that_has_a_price() -> None:
    with pytest.raises(ConfigError, match="egress must be one of same_region, other_region, internet, not 'moon'"):
        Budget(egress="moon")  # type: ignore[arg-type]
