"""The memory that work takes, by the interpreter's own count."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ROUNDS = 2


class Memory:
    """The least that the rounds of one work took, each of which does the same afresh.

    A round also counts what the interpreter takes for itself while it runs: a module that is imported at its first use,
    caches of regular expressions and code, and the table of interned strings, which doubles when it is full, by
    megabytes late in a long run. None of this comes twice, so what every round took is the work's own.
    """

    def __init__(self) -> None:
        self._figures: list[tuple[int, int]] = []

    @contextmanager
    def round(self) -> Iterator[None]:
        """Count what the body takes, and what of it is still there at its end. Rounds do not nest."""
        tracemalloc.start()
        try:
            yield
            self._figures.append(tracemalloc.get_traced_memory())
        finally:
            tracemalloc.stop()

    @property
    def kept_bytes(self) -> int:
        """Bytes that were there at the end of a round."""
        return min(kept for kept, _ in self._figures)

    @property
    def peak_bytes(self) -> int:
        """The most bytes at once in a round."""
        return min(peak for _, peak in self._figures)


def memory_of(work: Callable[[], object], *, enough_bytes: int = 0) -> Memory:
    """Return what rounds of a work take; what it returns is kept.

    Args:
        work: What is measured. It is called twice, so it makes all that it changes.
        enough_bytes: A peak up to this is little enough to need no second round.
    """
    memory = Memory()
    for _ in range(ROUNDS):
        with memory.round():
            kept = work()
        del kept
        if memory.peak_bytes <= enough_bytes:
            break
    return memory
