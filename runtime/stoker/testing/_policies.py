"""The contract of eviction policies, as tests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from stoker._cache.eviction import CacheEntries
from stoker.abc import EvictionPolicy, NextUseOracle

_NEVER = 1 << 60


class _RequestSequence:
    """A next-use oracle over a fixed sequence of requests; iterating over it advances the present."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys, self.present = keys, -1

    def next_use(self, key: str, /) -> int:
        later = range(self.present + 1, len(self._keys))
        return next((time for time in later if self._keys[time] == key), _NEVER)

    def __iter__(self) -> Iterator[str]:
        for self.present, key in enumerate(self._keys):  # noqa: B020 - advances the present
            yield key


class EvictionPolicyTests:
    """The tests of an :class:`~stoker.abc.EvictionPolicy`.

    Override :meth:`create_policy`. The tests are deterministic and take well below a second.

    Example:
        >>> from stoker.testing import EvictionPolicyTests
        >>> class TestMostRecentlyUsed(EvictionPolicyTests):
        ...     def create_policy(self, oracle):
        ...         return MostRecentlyUsed(oracle)
    """

    def create_policy(self, oracle: NextUseOracle[str]) -> EvictionPolicy[str]:
        """Return a new policy, as the entry point's function does.

        Args:
            oracle: predicts when each key is needed next.
        """
        raise NotImplementedError(f"override create_policy in {type(self).__name__} to return a policy for {oracle}")

    def test_an_empty_cache_has_no_victims(self) -> None:
        assert list(self.create_policy(_RequestSequence([])).victims("a")) == []

    def test_victims_are_in_the_cache_and_each_is_named_once(self) -> None:
        rng = random.Random(7)  # noqa: S311 - seeded, for the same test every time
        requests = _RequestSequence([f"key {rng.randrange(30)}" for _ in range(600)])
        policy, held = self.create_policy(requests), set[str]()
        for key in requests:
            victims = list(policy.victims(key))
            assert set(victims) <= held, "a victim is not in the cache"
            assert len(set(victims)) == len(victims), "a victim is named twice"
            if key in held:
                policy.used(key)
                continue
            for victim in victims[: max(0, len(held) - 9)]:
                held.remove(victim)
                policy.removed(victim)
            if len(held) < 10:
                held.add(key)
                policy.added(key)

    def test_a_cache_is_never_fuller_than_its_limit_and_takes_in_what_fits(self) -> None:
        rng = random.Random(5)  # noqa: S311 - seeded, for the same test every time
        sizes = {f"key {number}": rng.randrange(1, 60) for number in range(30)}
        requests = _RequestSequence([f"key {rng.randrange(30)}" for _ in range(600)])
        residents = CacheEntries(self.create_policy(requests), 200)
        for key in requests:
            has_room = residents.used + sizes[key] <= residents.capacity
            if not residents.look_up(key):
                assert residents.offer(key, sizes[key]) == [] or not has_room, "it evicts although there is room"
            assert residents.used == sum(sizes[each] for each in residents) <= residents.capacity
            if rng.random() < 0.05:
                residents.remove(rng.choice(sorted(residents)))

    def test_victims_may_be_looked_at_and_left(self) -> None:
        policy = self.create_policy(_RequestSequence([]))
        for key in "abcd":
            policy.added(key)
        before = list(policy.victims("e"))
        next(iter(policy.victims("e")), None)
        assert list(policy.victims("e")) == before, "iterating over the victims changes them"

    def test_a_key_that_was_removed_is_no_victim_and_may_come_back(self) -> None:
        policy = self.create_policy(_RequestSequence([]))
        for key in "abc":
            policy.added(key)
        policy.removed("b")
        assert "b" not in list(policy.victims("d"))
        policy.added("b")
        policy.used("b")
        for key in "abc":
            policy.removed(key)
        assert list(policy.victims("d")) == []
