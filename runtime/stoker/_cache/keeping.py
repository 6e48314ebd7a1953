"""What a tier does that keeps by the order: it is told what a run will need, and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stoker._cache.future import Future
from stoker._cache.keeper import CacheStatistics
from stoker._format.manifest import Manifest
from stoker.abc import Tier

__all__ = ["KeepingTier", "Nearer"]


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
