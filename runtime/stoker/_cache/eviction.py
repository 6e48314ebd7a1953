"""Eviction: which entries leave a cache of limited size.

A policy chooses the victims; :class:`CacheEntries` accounts for the sizes. Settings name policies: the built-in
:data:`POLICIES`, and plug-ins by entry points in the group ``stoker.cache_policies``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

from stoker._base.fields import quote_value
from stoker._base.plugins import load_plugin, plugin_names
from stoker._deprecation import declare_renamed, warn_renamed
from stoker.abc import EvictionPolicy, NextUseOracle
from stoker.errors import ConfigError, StokerError

_GROUP = "stoker.cache_policies"

Key = TypeVar("Key", bound=Hashable)


class CacheEntries(Generic[Key]):
    """The keys and sizes of the entries in a cache; the data is stored elsewhere.

    Invariant: the sizes of all entries never add up to more than the capacity.

    Args:
        policy: Eviction policy, not shared with another cache.
        capacity: Maximum sum of all sizes, in the unit of the sizes: bytes, or items if each has the size 1.
    """

    def __init__(self, policy: EvictionPolicy[Key], capacity: int) -> None:
        if capacity < 0:
            raise ConfigError(f"a cache's capacity must be at least 0, not {capacity}")
        self.capacity = capacity
        self.used = 0
        """Sum of the sizes of all entries."""
        self._policy = policy
        self._sizes: dict[Key, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._sizes)

    def look_up(self, key: Key) -> bool:
        """Return whether the cache has a key, and report a hit to the policy."""
        if key not in self._sizes:
            return False
        self._policy.used(key)
        return True

    def offer(self, key: Key, size: int = 1) -> list[Key] | None:
        """Add a key if the policy makes room for it.

        Returns:
            The keys that were evicted, in order of eviction; None if the key was not added, and nothing was evicted.
        """
        if key in self._sizes:
            return []
        evicted = self._select_victims(key, size)
        if evicted is None:
            return None
        for victim in evicted:
            self.remove(victim)
        self._sizes[key] = size
        self.used += size
        self._policy.added(key)
        return evicted

    def remove(self, key: Key) -> None:
        """Remove a key, if the cache has it."""
        if (size := self._sizes.pop(key, None)) is not None:
            self.used -= size
            self._policy.removed(key)

    def _select_victims(self, key: Key, size: int) -> list[Key] | None:
        """Return the shortest prefix of the policy's victims that makes enough room; None if all do not suffice."""
        if size > self.capacity:
            return None
        missing, evicted = self.used + size - self.capacity, dict[Key, None]()
        if missing > 0:
            for victim in self._policy.victims(key):
                if victim in evicted or victim not in self._sizes:
                    raise StokerError(
                        f"the cache policy {type(self._policy).__name__} names the victim "
                        f"{quote_value(victim)}, which is "
                        "not in the cache or was named before; fix it or choose another policy"
                    )
                evicted[victim] = None
                missing -= self._sizes[victim]
                if missing <= 0:
                    break
        return list(evicted) if missing <= 0 else None


class Fifo(Generic[Key]):
    """First in, first out: hits do not change the order of eviction.

    N. Krichevsky, R. St. Louis, T. Guo, "Quantifying and Improving Performance of Distributed Deep Learning with Cloud
    Storage" (IC2E 2021), section IV-B.
    """

    def __init__(self) -> None:
        self._order: dict[Key, None] = {}

    def used(self, key: Key) -> None:
        """Do nothing: hits do not count."""

    def added(self, key: Key) -> None:
        """Append the key to the end of the queue."""
        self._order[key] = None

    def removed(self, key: Key) -> None:
        """Remove the key from the queue."""
        del self._order[key]

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield all keys, the one added first first."""
        return iter(self._order)


class Lru(Fifo[Key]):
    """Least recently used: a hit moves the entry to the end of the queue."""

    def used(self, key: Key) -> None:
        """Move the key to the end of the queue."""
        self._order[key] = self._order.pop(key)


class NoEviction(Fifo[Key]):
    """No eviction: the cache keeps its first entries, so hits are capacity / data in every epoch but the first.

    H. Zhao and others, "SiloD: A Co-design of Caching and Scheduling for Deep Learning Clusters" (EuroSys 2023); as
    MinIO in J. Mohan and others, "Analyzing and Mitigating Data Stalls in DNN Training" (VLDB 2021).
    """

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield nothing."""
        return iter(())


_Entry = tuple[int, int, Key]
"""Next use, a unique number, and the key."""

_MAX_HEAP_ENTRIES_PER_KEY = 4
"""Maximum number of heap entries per cached key; beyond it, outdated heap entries are dropped."""


class NextUse(Generic[Key]):
    """Belady's policy: evicts the entry with the farthest next use, and rejects a new key with a farther one.

    L. Belady, "A study of replacement algorithms for a virtual-storage computer" (IBM Systems Journal, 1966), with the
    "do no harm" rule of P. Cao and others, "A Study of Integrated Prefetching and Caching Strategies" (SIGMETRICS
    1995); for training, N. Dryden and others, "Clairvoyant Prefetching" (SC'21). If all entries have the same size, no
    policy has more hits.

    Args:
        next_use: Returns the time of a key's next use after the present, as any number that rises with time. The value
            may change for a key only when the key is used, or when the time has passed.
        present: Returns the present time.
    """

    def __init__(self, next_use: Callable[[Key], int], present: Callable[[], int]) -> None:
        self._next_use, self._present = next_use, present
        self._numbers = count()
        self._entries: dict[Key, _Entry[Key]] = {}
        self._soonest: list[_Entry[Key]] = []
        self._farthest: list[_Entry[Key]] = []

    def used(self, key: Key) -> None:
        """Look up the key's new next use."""
        self.added(key)

    def added(self, key: Key) -> None:
        """Look up the key's next use."""
        time, number = self._next_use(key), next(self._numbers)
        self._entries[key] = time, number, key
        heapq.heappush(self._soonest, (time, number, key))
        heapq.heappush(self._farthest, (-time, number, key))
        if len(self._farthest) > _MAX_HEAP_ENTRIES_PER_KEY * len(self._entries) + _MAX_HEAP_ENTRIES_PER_KEY:
            self._rebuild_heaps()

    def removed(self, key: Key) -> None:
        """Forget the key; its heap entries become outdated."""
        del self._entries[key]

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield the keys that are needed later than the newcomer, the latest first; among equals, the oldest first."""
        self._update_passed_entries()
        own, victims = self._next_use(newcomer), list[_Entry[Key]]()
        try:
            while self._farthest and -self._farthest[0][0] > own:
                entry = heapq.heappop(self._farthest)
                if self._is_current(entry):
                    victims.append(entry)
                    yield entry[2]
        finally:
            for entry in victims:
                heapq.heappush(self._farthest, entry)

    def _is_current(self, entry: _Entry[Key]) -> bool:
        return self._entries.get(entry[2], (0, -1))[1] == entry[1]

    def _update_passed_entries(self) -> None:
        """Look up the next use of keys whose time passed without a use; otherwise they would never be evicted."""
        present, passed = self._present(), list[Key]()
        while self._soonest and self._soonest[0][0] <= present:
            entry = heapq.heappop(self._soonest)
            if self._is_current(entry):
                passed.append(entry[2])
        for key in passed:
            self.added(key)

    def _rebuild_heaps(self) -> None:
        """Rebuild the heaps without outdated entries."""
        self._soonest = list(self._entries.values())
        self._farthest = [(-time, number, key) for time, number, key in self._soonest]
        heapq.heapify(self._soonest)
        heapq.heapify(self._farthest)


PolicyFactory = Callable[[NextUseOracle[Any]], EvictionPolicy[Any]]
"""Type of the entry points in the group ``stoker.cache_policies``: creates a new policy for one cache."""

POLICIES: Mapping[str, PolicyFactory] = {
    "next-use": lambda future: NextUse(future.next_use, lambda: future.present),
    "no-evict": lambda _: NoEviction(),
    "lru": lambda _: Lru(),
    "fifo": lambda _: Fifo(),
}
"""Built-in policies, by their names in settings."""


RENAMED_POLICIES: Mapping[str, str] = {"uniform": "no-evict"}
"""Present name by deprecated name, as for :func:`~stoker._deprecation.declare_renamed`."""

declare_renamed("cache policy", RENAMED_POLICIES)


def present_policy(name: str) -> str:
    """Return the present name of a policy, with a warning if ``name`` is its deprecated one."""
    if name in RENAMED_POLICIES:
        warn_renamed(f"the cache policy {name}", RENAMED_POLICIES[name])
    return RENAMED_POLICIES.get(name, name)


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies, built-in ones first, then those of plug-ins."""
    return (*POLICIES, *(name for name in plugin_names(_GROUP) if name not in POLICIES))


def policy_factory(name: str) -> PolicyFactory:
    """Return the factory of the policy with a name.

    Raises:
        ConfigError: There is no such policy.
        MissingExtraError: The policy's plug-in cannot be loaded.
    """
    if name in POLICIES:
        return POLICIES[name]
    known = policy_names()
    if name not in known:
        raise ConfigError(
            f"policy must be one of {', '.join(known)}, not {quote_value(name)}; "
            f"packages add policies by entry points in the group {_GROUP}"
        )
    return partial(_create_plugin_policy, name, load_plugin(_GROUP, name, "cache policy"))


def _create_plugin_policy(name: str, factory: PolicyFactory, oracle: NextUseOracle[Any]) -> EvictionPolicy[Any]:
    """Create a plug-in's policy, and check that it has all methods.

    Raises:
        ConfigError: The plug-in failed, or its object lacks a method of :class:`stoker.abc.EvictionPolicy`.
    """
    try:
        policy = factory(oracle)
    except Exception as error:
        raise ConfigError(f"the cache policy {name} cannot be created: {type(error).__name__}: {error}") from error
    for method in ("used", "added", "removed", "victims"):
        if not callable(getattr(policy, method, None)):
            raise ConfigError(
                f"the cache policy {name} is {quote_value(policy)}, which has no method {method}(); "
                "implement the methods of stoker.abc.EvictionPolicy"
            )
    return policy
