"""Policies of caches: one suite for all, and what each is for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest

from stoker._cache.eviction import CacheEntries, Fifo, Lru, NextUse, NoEviction
from stoker.abc import EvictionPolicy
from stoker.errors import ConfigError
from stoker_sim._caches import ReplicaAware

NEVER = 1 << 60


class Known:
    """A sequence of requests that is known, and how far it has come."""

    def __init__(self, requests: list[Any]) -> None:
        self.requests, self.present = requests, -1

    def next_use(self, key: Any) -> int:
        later = range(self.present + 1, len(self.requests))
        return next((time for time in later if self.requests[time] == key), NEVER)

    def policy(self) -> NextUse[Any]:
        return NextUse(self.next_use, lambda: self.present)


def hits(requests: list[Any], capacity: int, policy: EvictionPolicy[Any], known: Known | None = None) -> int:
    residents = CacheEntries(policy, capacity)
    found = 0
    for time, key in enumerate(requests):
        if known is not None:
            known.present = time
        found += residents.look_up(key)
        residents.offer(key)
    return found


POLICIES: dict[str, Callable[[list[int]], tuple[EvictionPolicy[int], Known | None]]] = {
    "fifo": lambda requests: (Fifo(), None),
    "lru": lambda requests: (Lru(), None),
    "no-evict": lambda requests: (NoEviction(), None),
    "next-use": lambda requests: ((known := Known(requests)).policy(), known),
    "replica-aware": lambda requests: (ReplicaAware(Counter({key: key % 3 for key in requests})), None),
}


@pytest.fixture(params=POLICIES)
def create_policy(request: pytest.FixtureRequest) -> Callable[[list[int]], tuple[EvictionPolicy[int], Known | None]]:
    return POLICIES[request.param]


def test_sizes_never_exceed_the_capacity_and_the_account_is_exact(create_policy: Any) -> None:
    rng = random.Random(5)
    requests = [rng.randrange(30) for _ in range(2000)]
    policy, known = create_policy(requests)
    residents, sizes = CacheEntries(policy, 100), {key: rng.randrange(1, 60) for key in range(30)}
    sizes[7] = 101
    for time, key in enumerate(requests):
        if known is not None:
            known.present = time
        was_there = key in residents
        before = set(residents)
        assert residents.look_up(key) is was_there
        evicted = residents.offer(key, sizes[key])
        if evicted is None:
            assert set(residents) == before
        else:
            assert set(residents) == before - set(evicted) | {key}
        if rng.random() < 0.05 and len(residents):
            residents.remove(rng.choice(list(residents)))
        assert residents.used == sum(sizes[each] for each in residents) <= residents.capacity
        assert len(residents) == len(set(residents))
    assert 7 not in residents


def test_a_present_entry_is_not_added_twice_and_evicts_nothing(create_policy: Any) -> None:
    policy, _ = create_policy([1, 2, 1, 2])
    residents = CacheEntries(policy, 2)
    assert [residents.offer(key) for key in (1, 2, 1)] == [[], [], []]
    assert set(residents) == {1, 2}


def test_dropping_what_is_not_there_is_no_error(create_policy: Any) -> None:
    residents: CacheEntries[int] = CacheEntries(create_policy([])[0], 2)
    residents.remove(9)
    assert not residents.look_up(9)
    assert not len(residents)


def test_nothing_fits_into_nothing(create_policy: Any) -> None:
    assert CacheEntries(create_policy([1])[0], 0).offer(1) is None


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 0, not -1"):
        CacheEntries(Fifo[int](), -1)


def test_fifo_evicts_the_first_entry_regardless_of_use() -> None:
    residents = CacheEntries(Fifo[str](), 2)
    residents.offer("a"), residents.offer("b"), residents.look_up("a")
    assert residents.offer("c") == ["a"]


def test_lru_evicts_the_least_recently_used_entry() -> None:
    residents = CacheEntries(Lru[str](), 2)
    residents.offer("a"), residents.offer("b"), residents.look_up("a")
    assert residents.offer("c") == ["b"]


def test_uniform_never_evicts() -> None:
    residents: CacheEntries[str] = CacheEntries(NoEviction(), 2)
    assert [residents.offer(key) for key in "abc"] == [[], [], None]


def test_replica_aware_evicts_what_others_have_and_is_lru_without_that() -> None:
    for elsewhere, gone in (({"b": 2}, "b"), ({}, "a")):
        residents = CacheEntries(ReplicaAware(Counter[str](elsewhere)), 3)
        for key in "abc":
            residents.offer(key)
        assert residents.offer("d") == [gone]


def test_next_use_keeps_the_entries_that_are_needed_soonest() -> None:
    known = Known(["a", "b", "c", "b", "a", "c"])
    residents = CacheEntries(known.policy(), 2)
    for known.present, key in enumerate("ab"):
        residents.offer(key)
    known.present = 2
    assert residents.offer("c") is None


def test_next_use_evicts_the_farthest() -> None:
    known = Known(["a", "b", "c", "c", "b", "a"])
    residents = CacheEntries(known.policy(), 2)
    for known.present, key in enumerate("ab"):
        residents.offer(key)
    known.present = 2
    assert residents.offer("c") == ["a"]


def test_next_use_updates_an_entry_whose_use_did_not_happen() -> None:
    times = {"a": 1, "b": 50, "c": 20}
    present = 0
    residents = CacheEntries(NextUse[str](times.__getitem__, lambda: present), 2)
    residents.offer("a"), residents.offer("b")
    present, times["a"] = 10, NEVER
    assert residents.offer("c") == ["a"]


def test_next_use_stays_small_however_often_keys_are_used() -> None:
    known = Known([])
    policy = known.policy()
    residents = CacheEntries(policy, 4)
    for key in range(4):
        residents.offer(key)
    for _ in range(1000):
        residents.look_up(2)
    assert len(policy._farthest) + len(policy._soonest) < 100


def most_hits(requests: tuple[int, ...], capacity: int) -> int:
    """The most hits that any policy can have, which may refuse to let a key in: by trying everything."""

    @cache
    def best(time: int, held: frozenset[int]) -> int:
        if time == len(requests):
            return 0
        key = requests[time]
        if key in held:
            return 1 + best(time + 1, held)
        after = [held] + [held - {victim} | {key} for victim in held if len(held) == capacity]
        if len(held) < capacity:
            after.append(held | {key})
        return max(best(time + 1, each) for each in after)

    return best(0, frozenset())


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_next_use_has_the_most_hits_that_any_policy_can_have(capacity: int) -> None:
    for requests in product(range(4), repeat=7):
        known = Known(list(requests))
        assert hits(list(requests), capacity, known.policy(), known) == most_hits(requests, capacity), requests


def test_no_policy_has_more_hits_than_the_capacity_where_each_epoch_uses_each_key_once(create_policy: Any) -> None:
    rng = random.Random(3)
    epochs = [rng.sample(range(60), 60) for _ in range(6)]
    requests = [key for epoch in epochs for key in epoch]
    policy, known = create_policy(requests)
    assert hits(requests, 20, policy, known) <= 20 * 5


def test_uniform_and_next_use_reach_that_bound_and_recency_does_not() -> None:
    rng = random.Random(3)
    requests = [key for _ in range(6) for key in rng.sample(range(60), 60)]
    known = Known(requests)
    assert hits(requests, 20, NoEviction(), None) == 20 * 5
    assert hits(requests, 20, known.policy(), known) == 20 * 5
    assert hits(requests, 20, Lru(), None) < 20 * 2
