"""What a cache of limited size holds: a policy decides who goes, residents keep the account."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from stoker.abc import EvictionPolicy
from stoker.errors import ConfigError

__all__ = ["Residents"]

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
        missing, evicted = self.used + size - self.capacity, list[Key]()
        if missing > 0:
            for victim in self._policy.victims(key):
                evicted.append(victim)
                missing -= self._sizes[victim]
                if missing <= 0:
                    break
        return evicted if missing <= 0 else None
