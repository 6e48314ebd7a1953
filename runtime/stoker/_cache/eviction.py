"""Eviction: which entries leave a cache of limited size.

A policy decides what leaves; :class:`Residents` keeps the account. Policies have names in
settings: :data:`POLICIES`, and those of plug-ins, by the entry points ``stoker.cache_policies``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

from stoker._base.fields import shown
from stoker._base.plugins import load_plugin, plugin_names
from stoker.abc import EvictionPolicy, NextUseOracle
from stoker.errors import ConfigError, StokerError

_GROUP = "stoker.cache_policies"

Key = TypeVar("Key", bound=Hashable)


class Residents(Generic[Key]):
    """Who is in a cache of ``capacity`` bytes, or of so many items where each has the size 1.

    Invariant: the sizes of the residents never add up to more than the capacity. The bytes themselves are elsewhere.

    Args:
        policy: used by nobody else.
        capacity: in the unit of the sizes.
    """

    def __init__(self, policy: EvictionPolicy[Key], capacity: int) -> None:
        if capacity < 0:
            raise ConfigError(f"a cache's capacity must be at least 0, not {capacity}")
        self.capacity = capacity
        self.used = 0
        """What the residents' sizes add up to."""
        self._policy = policy
        self._sizes: dict[Key, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._sizes)

    def look_up(self, key: Key) -> bool:
        """Return whether a key is resident, and count this as a use of it."""
        if key not in self._sizes:
            return False
        self._policy.used(key)
        return True

    def offer(self, key: Key, size: int = 1) -> list[Key] | None:
        """Make a key resident if the policy has room for it.

        Returns:
            Who went for it, the first to go first; None if it is not resident, and then nobody went.
        """
        if key in self._sizes:
            return []
        evicted = self._room_for(key, size)
        if evicted is None:
            return None
        for victim in evicted:
            self.drop(victim)
        self._sizes[key] = size
        self.used += size
        self._policy.added(key)
        return evicted

    def drop(self, key: Key) -> None:
        """Make a key resident no longer, if it is."""
        if (size := self._sizes.pop(key, None)) is not None:
            self.used -= size
            self._policy.removed(key)

    def _room_for(self, key: Key, size: int) -> list[Key] | None:
        """Return whose going makes enough room, as few as the policy's sequence allows; None if nobody's does."""
        if size > self.capacity:
            return None
        missing, evicted = self.used + size - self.capacity, dict[Key, None]()
        if missing > 0:
            for victim in self._policy.victims(key):
                if victim in evicted or victim not in self._sizes:
                    raise StokerError(
                        f"the cache policy {type(self._policy).__name__} names {shown(victim)} as a victim, which is "
                        "not in the cache, or was named before; choose another policy"
                    )
                evicted[victim] = None
                missing -= self._sizes[victim]
                if missing <= 0:
                    break
        return list(evicted) if missing <= 0 else None


class Fifo(Generic[Key]):
    """Who came first goes first, however often it is used.

    N. Krichevsky, R. St. Louis, T. Guo, "Quantifying and Improving Performance of Distributed Deep Learning with Cloud
    Storage" (IC2E 2021), section IV-B.
    """

    def __init__(self) -> None:
        self._order: dict[Key, None] = {}

    def used(self, key: Key) -> None:
        """Nothing changes."""

    def added(self, key: Key) -> None:
        """It is last in line."""
        self._order[key] = None

    def removed(self, key: Key) -> None:
        """It leaves the line."""
        del self._order[key]

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield all, in the order in which they came."""
        return iter(self._order)


class Lru(Fifo[Key]):
    """Who was not used for longest goes first: a line at whose end everybody begins again who is used."""

    def used(self, key: Key) -> None:
        """It is last in line."""
        self._order[key] = self._order.pop(key)


class Uniform(Fifo[Key]):
    """Nobody goes: hits are capacity / data in every epoch but the first.

    H. Zhao and others, "SiloD: A Co-design of Caching and Scheduling for Deep Learning Clusters" (EuroSys 2023); as
    MinIO in J. Mohan and others, "Analyzing and Mitigating Data Stalls in DNN Training" (VLDB 2021).
    """

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield nobody."""
        return iter(())


_Entry = tuple[int, int, Key]
"""When it is needed, a number that no other entry has, and who."""

_MOST_STALE = 4
"""Entries a resident, at most, before those that are out of date are dropped."""


class NextUse(Generic[Key]):
    """Whose next use is farthest goes first, and a newcomer whose own is farther than all others' does not come in.

    L. Belady, "A study of replacement algorithms for a virtual-storage computer" (IBM Systems Journal, 1966), with the
    rule of doing no harm: P. Cao and others, "A Study of Integrated Prefetching and Caching Strategies" (SIGMETRICS
    1995); for training, N. Dryden and others, "Clairvoyant Prefetching" (SC'21). Where all have one size it has the
    most hits that any policy can have.

    Args:
        next_use: when a key is needed next, behind the present: any number that rises with time. It may change for a
            key only when that key is used, or when its time has passed.
        present: what has passed.
    """

    def __init__(self, next_use: Callable[[Key], int], present: Callable[[], int]) -> None:
        self._next_use, self._present = next_use, present
        self._numbers = count()
        self._entries: dict[Key, _Entry[Key]] = {}
        self._soonest: list[_Entry[Key]] = []
        self._farthest: list[_Entry[Key]] = []

    def used(self, key: Key) -> None:
        """It is needed again at another time."""
        self.added(key)

    def added(self, key: Key) -> None:
        """Ask when it is needed."""
        time, number = self._next_use(key), next(self._numbers)
        self._entries[key] = time, number, key
        heapq.heappush(self._soonest, (time, number, key))
        heapq.heappush(self._farthest, (-time, number, key))
        if len(self._farthest) > _MOST_STALE * len(self._entries) + _MOST_STALE:
            self._tidy()

    def removed(self, key: Key) -> None:
        """Forget it."""
        del self._entries[key]

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield those that are needed later than the newcomer, the latest first; of equals, who came first."""
        self._ask_again()
        own, taken = self._next_use(newcomer), list[_Entry[Key]]()
        try:
            while self._farthest and -self._farthest[0][0] > own:
                entry = heapq.heappop(self._farthest)
                if self._is_current(entry):
                    taken.append(entry)
                    yield entry[2]
        finally:
            for entry in taken:
                heapq.heappush(self._farthest, entry)

    def _is_current(self, entry: _Entry[Key]) -> bool:
        return self._entries.get(entry[2], (0, -1))[1] == entry[1]

    def _ask_again(self) -> None:
        """Ask anew of those that were not used when their time came: they would stay for ever."""
        present, passed = self._present(), list[Key]()
        while self._soonest and self._soonest[0][0] <= present:
            entry = heapq.heappop(self._soonest)
            if self._is_current(entry):
                passed.append(entry[2])
        for key in passed:
            self.added(key)

    def _tidy(self) -> None:
        """Drop the entries of times that hold no longer."""
        self._soonest = list(self._entries.values())
        self._farthest = [(-time, number, key) for time, number, key in self._soonest]
        heapq.heapify(self._soonest)
        heapq.heapify(self._farthest)


PolicyFactory = Callable[[NextUseOracle[Any]], EvictionPolicy[Any]]
"""What an entry point in the group ``stoker.cache_policies`` names: returns a policy that no cache uses yet."""

POLICIES: Mapping[str, PolicyFactory] = {
    "next-use": lambda future: NextUse(future.next_use, lambda: future.present),
    "uniform": lambda _: Uniform(),
    "lru": lambda _: Lru(),
    "fifo": lambda _: Fifo(),
}
"""The policies that are always there, by the names that they have in settings."""


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies, those of plug-ins last."""
    return (*POLICIES, *(name for name in plugin_names(_GROUP) if name not in POLICIES))


def policy_factory(name: str) -> PolicyFactory:
    """Return what creates the policy of a name.

    Raises:
        ConfigError: there is none.
        MissingExtraError: it is a plug-in's and cannot be loaded.
    """
    if name in POLICIES:
        return POLICIES[name]
    known = policy_names()
    if name not in known:
        raise ConfigError(
            f"policy is one of {', '.join(known)}, not {shown(name)}; "
            f"a package adds one by an entry point in the group {_GROUP}"
        )
    return partial(_created, name, load_plugin(_GROUP, name, "cache policy"))


def _created(name: str, factory: PolicyFactory, oracle: NextUseOracle[Any]) -> EvictionPolicy[Any]:
    """Return what a plug-in creates.

    Raises:
        ConfigError: it fails, or creates what is no policy.
    """
    try:
        policy = factory(oracle)
    except Exception as error:
        raise ConfigError(f"the cache policy {name} cannot be created: {type(error).__name__}: {error}") from error
    for method in ("used", "added", "removed", "victims"):
        if not callable(getattr(policy, method, None)):
            raise ConfigError(
                f"the cache policy {name} is {shown(policy)}, which has no method {method}; "
                "stoker.abc.EvictionPolicy has those that it needs"
            )
    return policy
