"""A cache's policy may be a plug-in's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from stoker._cache.eviction import POLICIES, CacheEntries, Fifo, policy_factory, policy_names
from stoker._cache.tiers import CacheSpec
from stoker.abc import EvictionPolicy, NextUseOracle
from stoker.errors import ConfigError, MissingExtraError, StokerError
from support.tiers import MANIFEST, body, disk_tier, future, memory_tier, offer, read_row


class LastInFirstOut(Fifo[Any]):
    """A policy of another package: keeps what came first."""

    def __init__(self, oracle: NextUseOracle[Any]) -> None:
        super().__init__()
        self.oracle = oracle

    def victims(self, newcomer: str) -> Iterator[Any]:
        yield from reversed(list(self._order))


class WrongPolicy(LastInFirstOut):
    """A policy that names what is not in the cache, or the same object again and again."""

    said = "nobody"

    def victims(self, newcomer: str) -> Iterator[Any]:
        yield from [self.said or next(iter(self._order))] * 9


SEVEN = 7


def empty(oracle: object) -> object:
    return {}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {
        "lifo": "LastInFirstOut",
        "wrong": "WrongPolicy",
        "lru": "WrongPolicy",
        "broken": "nothing",
        "empty": "empty",
        "number": "SEVEN",
    }
    points = EntryPoints(
        EntryPoint(name, f"{__name__}:{value}", "stoker.cache_policies") for name, value in named.items()
    )
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: points.select(group=group))


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_tier_keeps_by_the_policy_of_a_plug_in(kind: str, tmp_path: Path) -> None:
    async def check() -> list[int]:
        tier = memory_tier(3, "lifo") if kind == "memory" else disk_tier(tmp_path / "cache", 3, "lifo")
        await tier.follow(MANIFEST, future())
        await offer(tier, *range(6))
        held = [row for row in range(6) if await read_row(tier, row) == body(row)]
        await tier.close()
        return held

    assert asyncio.run(check()) == [0, 1, 5]


def test_a_plug_in_learns_when_keys_are_needed_next() -> None:
    known = future()
    policy = policy_factory("lifo")(known)
    assert isinstance(policy, LastInFirstOut)
    assert policy.oracle.next_use(3) == known.next_use(3)


def test_a_setting_names_it() -> None:
    assert CacheSpec.parse("disk:/x?limit=1GB&policy=lifo").policy == "lifo"
    assert policy_names() == (*POLICIES, "broken", "empty", "lifo", "number", "wrong")


def test_an_unregistered_name_is_refused_with_the_registered_ones() -> None:
    with pytest.raises(ConfigError, match=r"fifo, broken, empty, lifo, number, wrong, not 'mru'; .* stoker.cache_pol"):
        CacheSpec.parse("memory:?limit=1GB&policy=mru")


def test_no_plug_in_takes_the_place_of_a_policy_that_is_always_there() -> None:
    assert not isinstance(policy_factory("lru")(future()), WrongPolicy)


def test_one_that_cannot_be_loaded_is_named_where_the_cache_is_configured() -> None:
    with pytest.raises(MissingExtraError, match=r"the cache policy broken .* cannot be loaded"):
        CacheSpec.parse("memory:?limit=1GB&policy=broken")


@pytest.mark.parametrize(
    ("policy", "why"), [("empty", r"is {}, which has no method used"), ("number", r"'int' object is not callable")]
)
def test_one_that_creates_no_policy_is_refused_where_a_cache_is_made(policy: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"the cache policy {policy} .*{why}"):
        memory_tier(3, policy)


@pytest.mark.parametrize("said", ["nobody", ""], ids=["of-no-object", "of-one-twice"])
def test_a_policy_that_evicts_what_is_not_there_is_an_error_and_the_account_stays_right(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WrongPolicy, "said", said)
    policy: EvictionPolicy[str] = policy_factory("wrong")(future())
    residents = CacheEntries(policy, 3)
    for key in "abc":
        residents.offer(key)
    with pytest.raises(StokerError, match=r"WrongPolicy names .* choose another policy"):
        residents.offer("d", 2)
    assert (sorted(residents), residents.used) == (["a", "b", "c"], 3)
