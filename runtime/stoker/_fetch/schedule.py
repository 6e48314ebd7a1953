"""How far ahead of the consumer to fetch: a pure decision, made from how far both have come.

A schedule never changes what is fetched or in which order, only when. Whatever it says, an item that the consumer is
waiting for is issued, and none is issued without a free slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stoker.errors import ConfigError

__all__ = ["Continuous", "FetchSize", "NextBatch", "Progress", "Schedule"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the prefetcher and the consumer have come; items count from the start of the run.

    Attributes:
        issued: items whose fetch has begun.
        consumed: items that the consumer has begun to use.
        next_item_step: the step that first uses the next item to be issued; None if there is none.
        step: the step the consumer is at.
    """

    issued: int
    consumed: int
    next_item_step: int | None
    step: int


class Schedule(Protocol):
    """Decides how far ahead to fetch."""

    @property
    def needed_slots(self) -> int:
        """The fewest slots with which the schedule can do what it says."""
        ...

    @property
    def follows_steps(self) -> bool:
        """Whether :attr:`Progress.step` matters: if not, it may be behind until an item is first used."""
        ...

    def admit(self, progress: Progress) -> int:
        """Return how many items may be issued now; asked again once these are issued and progress is made."""
        ...


@dataclass(frozen=True, slots=True)
class Continuous:
    """Fill whatever memory there is, in order of first use; also across epochs. The default."""

    @property
    def needed_slots(self) -> int:
        """One: the ring is the only limit."""
        return 1

    @property
    def follows_steps(self) -> bool:
        """No: memory is the limit."""
        return False

    def admit(self, progress: Progress) -> int:
        """Always one more: it is asked again after each, and the ring bounds the rest."""
        return int(progress.next_item_step is not None)


@dataclass(frozen=True, slots=True)
class FetchSize:
    """Fetch ``fetch_size`` more items whenever at most ``threshold`` fetched ones are left to use.

    DELI's pre-fetch rule: Krichevsky, St. Louis and Guo, "Quantifying and Improving Performance of Distributed Deep
    Learning with Cloud Storage" (IC2E 2021).
    """

    fetch_size: int
    threshold: int

    def __post_init__(self) -> None:
        if self.fetch_size < 1 or self.threshold < 0:
            raise ConfigError(f"FetchSize needs fetch_size >= 1 and threshold >= 0, not {self}")

    @classmethod
    def half_and_half(cls, items: int) -> FetchSize:
        """Fetch half of ``items`` (a cache's room, at least 1) when the other half is left: DELI's 50/50."""
        return cls(fetch_size=items - items // 2, threshold=items // 2)

    @property
    def needed_slots(self) -> int:
        """``threshold`` items still unused and ``fetch_size`` new ones are held at once."""
        return self.threshold + self.fetch_size

    @property
    def follows_steps(self) -> bool:
        """No: it counts items."""
        return False

    def admit(self, progress: Progress) -> int:
        """Return ``fetch_size`` when at most ``threshold`` issued items are unused, else 0."""
        return self.fetch_size if progress.issued - progress.consumed <= self.threshold else 0


@dataclass(frozen=True, slots=True)
class NextBatch:
    """Fetch what the next ``depth`` steps need while the current step runs (IPDL's in-parallel loading)."""

    depth: int = 1

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ConfigError(f"NextBatch needs depth >= 1, not {self.depth}")

    @property
    def needed_slots(self) -> int:
        """One: how many items a step needs is for the order to say."""
        return 1

    @property
    def follows_steps(self) -> bool:
        """Yes: it counts steps."""
        return True

    def admit(self, progress: Progress) -> int:
        """Return 1 while the next item is first used at most ``depth`` steps ahead, else 0."""
        upcoming = progress.next_item_step
        return int(upcoming is not None and upcoming <= progress.step + self.depth)
