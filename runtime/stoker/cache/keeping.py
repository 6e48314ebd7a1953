"""What a tier does that keeps by the order: it is told what a run will need, and counts."""

from __future__ import annotations

from typing import Protocol

from stoker.cache.future import Future
from stoker.cache.keeper import CacheStatistics
from stoker.manifest import Manifest
from stoker.tier import Tier

__all__ = ["KeepingTier"]


class KeepingTier(Tier, Protocol):
    """A :class:`~stoker.tier.Tier` that decides by the order what to keep. It opens at the first :meth:`follow`."""

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
