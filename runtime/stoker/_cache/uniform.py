"""Fill, and never evict: as good as any policy where one reader takes each object once an epoch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["Uniform"]

Key = TypeVar("Key", bound=Hashable)


class Uniform(Generic[Key]):
    """Nobody goes: hits are capacity / data in every epoch but the first.

    H. Zhao and others, "SiloD: A Co-design of Caching and Scheduling for Deep Learning Clusters" (EuroSys 2023); as
    MinIO in J. Mohan and others, "Analyzing and Mitigating Data Stalls in DNN Training" (VLDB 2021).
    """

    def used(self, key: Key) -> None:
        """Nothing changes."""

    def added(self, key: Key) -> None:
        """Nothing changes."""

    def removed(self, key: Key) -> None:
        """Nothing changes."""

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield nobody."""
        return iter(())
