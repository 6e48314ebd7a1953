"""What a tier keeps: entries by name, under a policy that knows the order by rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from stoker._cache.eviction import Residents, policy_factory
from stoker._cache.future import NEVER, Future
from stoker._cache.naming import NameIndex, name_of, size_of
from stoker._format.manifest import Manifest
from stoker.abc import ObjectRef, Tier

__all__ = ["CacheStatistics", "Keeper", "KeepingTier", "Nearer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """Counts of one tier in one process, and what it holds.

    Attributes:
        look_ups: objects that were asked for.
        hits: of these, those that were delivered; of a folder that is shared, from whosever part.
        added: objects that were taken in.
        evicted: objects that went for others.
        declined: objects that were not taken in, since all that is there is needed sooner or there was no room to
            write.
        damaged: files that were not what their names say, and were removed.
        objects: held now, in this process's part.
        used_bytes: what these have.
        limit_bytes: what they may have.
    """

    look_ups: int
    hits: int
    added: int
    evicted: int
    declined: int
    damaged: int
    objects: int
    used_bytes: int
    limit_bytes: int


class Keeper:
    """Decides what stays, and counts; the bytes are elsewhere. Not thread-safe.

    Objects outlive manifests and futures: what a version does not have, or a run never needs again, goes first.

    Args:
        policy: its name.
        limit_bytes: what all objects together may have.
        block_bytes: what an object takes is a multiple of this.
    """

    def __init__(self, policy: str, limit_bytes: int, block_bytes: int = 1) -> None:
        self.limit_bytes = limit_bytes
        self._create_policy, self._block_bytes = policy_factory(policy), block_bytes
        self._rows: dict[str, int] = {}
        self._used: dict[str, None] = {}
        self._future: Future | None = None
        self._residents = Residents[str](self._create_policy(self), limit_bytes)
        self.look_ups = self.hits = self.added = self.evicted = self.declined = self.damaged = 0

    def follow(self, manifest: Manifest, future: Future) -> None:
        """Keep by the order of another stretch, over rows of a manifest. Who is resident stays it."""
        self._rows, self._future = NameIndex(manifest).rows(self._residents), future
        before, self._residents = self._residents, Residents[str](self._create_policy(self), self.limit_bytes)
        for name in before:
            self._residents.offer(name, self._taken_bytes(size_of(name)))

    def adopt(self, names: Sequence[str], manifest: Manifest) -> list[str]:
        """Take in what was left by somebody before; return what of it cannot stay."""
        self._rows.update(NameIndex(manifest).rows(names))
        for name in names:
            self._residents.offer(name, self._taken_bytes(size_of(name)))
        return [name for name in names if name not in self._residents]

    def clear(self) -> None:
        """Let all objects go; the counts stay."""
        for name in list(self._residents):
            self.drop(name)

    @property
    def present(self) -> int:
        """The time that has passed."""
        return 0 if self._future is None else self._future.present

    def next_use(self, name: str) -> int:
        """Return when an object is needed next."""
        row = self._rows.get(name, -1)
        return NEVER if row < 0 or self._future is None else self._future.next_use(row)

    def __contains__(self, name: str) -> bool:
        return name in self._residents

    def __iter__(self) -> Iterator[str]:
        return iter(self._residents)

    def look_up(self, name: str) -> bool:
        """Return whether an object is resident, and count this as a use of it.

        The policy hears of it before its next decision: by then the future has this use behind it.
        """
        self.look_ups += 1
        if name not in self._residents:
            return False
        self._used.pop(name, None)
        self._used[name] = None
        return True

    def offer(self, ref: ObjectRef) -> list[str] | None:
        """Take an object in if that is worth it.

        Returns:
            Who goes for it; None if it is not taken in, or is here already.
        """
        name = name_of(ref)
        if name in self._residents:
            return None
        self._rows[name] = ref.row
        for used in self._used:
            self._residents.look_up(used)
        self._used.clear()
        evicted = self._residents.offer(name, self._taken_bytes(ref.size_bytes))
        if evicted is None:
            del self._rows[name]
            self.declined += 1
            return None
        self.added += 1
        self.evicted += len(evicted)
        for each in evicted:
            self._rows.pop(each, None)
        return evicted

    def drop(self, name: str) -> None:
        """Let an object go, if it is there."""
        self._residents.drop(name)
        self._rows.pop(name, None)

    def statistics(self) -> CacheStatistics:
        """Return a snapshot."""
        return CacheStatistics(
            look_ups=self.look_ups,
            hits=self.hits,
            added=self.added,
            evicted=self.evicted,
            declined=self.declined,
            damaged=self.damaged,
            objects=len(self._residents),
            used_bytes=self._residents.used,
            limit_bytes=self.limit_bytes,
        )

    def _taken_bytes(self, size_bytes: int) -> int:
        return -(-size_bytes // self._block_bytes) * self._block_bytes


class KeepingTier(Tier, Protocol):
    """A :class:`~stoker.abc.Tier` that decides by the order what to keep.

    It opens at the first :meth:`follow`.
    """

    @property
    def is_shared(self) -> bool:
        """Whether other processes of the machine read what this one keeps."""
        ...

    async def follow(self, manifest: Manifest, future: Future) -> None:
        """Keep what a stretch of the order needs; what is held stays, as far as there is room.

        Before anything is read, and again after a close or a fork. Trouble is logged, and costs hits only.

        Args:
            manifest: says which rows the super-samples are.
            future: of the rank, or of all that share the tier if it is shared; moves on as the run does.
        """
        ...

    def statistics(self) -> CacheStatistics:
        """Return a snapshot; from any thread."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Nearer:
    """Places that are nearer than the store.

    Attributes:
        tiers: of this machine, that keep by the order, the nearest first.
        warm: behind them, across a network.
    """

    tiers: Sequence[KeepingTier] = ()
    warm: Tier | None = None

    async def close(self) -> None:
        """Release what they hold. Idempotent."""
        for tier in (*self.tiers, *([self.warm] if self.warm is not None else [])):
            await tier.close()
