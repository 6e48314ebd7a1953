"""Memory use of a function, measured by the interpreter."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ROUNDS = 2


class Memory:
    """Minimum memory use over several rounds of the same work.

    A round also counts memory of the interpreter: a module that is imported at its first use, caches of regular
    expressions and code, and the table of interned strings, which doubles when it is full, by megabytes late in a long
    run. None of this recurs, so the memory that every round takes is the work's own.
    """

    def __init__(self) -> None:
        self._figures: list[tuple[int, int]] = []

    @contextmanager
    def round(self) -> Iterator[None]:
        """Measure the memory that the body takes, and the part that is left at its end. Rounds do not nest."""
        tracemalloc.start()
        try:
            yield
            self._figures.append(tracemalloc.get_traced_memory())
        finally:
            tracemalloc.stop()

    @property
    def held_bytes(self) -> int:
        """Memory that is left at the end of a round, in bytes."""
        return min(kept for kept, _ in self._figures)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of a round, in bytes."""
        return min(peak for _, peak in self._figures)


def memory_of(work: Callable[[], object], *, enough_bytes: int = 0) -> Memory:
    """Return the memory that rounds of a function take, including its result.

    Args:
        work: function to measure. It is called twice, so it creates everything that it changes.
        enough_bytes: peak up to which no second round is needed, in bytes.
    """
    memory = Memory()
    for _ in range(ROUNDS):
        with memory.round():
            kept = work()
        del kept
        if memory.peak_bytes <= enough_bytes:
            break
    return memory
