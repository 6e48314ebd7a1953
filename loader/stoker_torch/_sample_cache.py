"""What a cache of samples can do."""

from __future__ import annotations

from typing import Any, Protocol, Self

from stoker_torch._look_ups import LookUpCounts

__all__ = ["DamagedEntryError", "SampleCache"]


class DamagedEntryError(KeyError):
    """What a cache has for an index is not what was put there. To a reader, the sample is not in the cache."""


class SampleCache(Protocol):
    """A capped collection of samples, first in, first out, for the length of one run.

    What is read is what was put. All methods may be called from any thread; which of them from other processes, each
    cache says.
    """

    @property
    def samples(self) -> int:
        """How many samples it holds at most."""
        ...

    @property
    def counts(self) -> LookUpCounts:
        """Where the look-ups of all processes that share the cache are added up."""
        ...

    def get(self, index: int) -> Any:
        """Return a sample.

        Raises:
            KeyError: it is not in the cache; :class:`DamagedEntryError`, if it should be.
        """
        ...

    def holds(self, index: int, *, renew: bool) -> bool:
        """Return whether a sample is in the cache; with ``renew``, it then becomes the one that came in last."""
        ...

    def put(self, index: int, sample: Any) -> bool:
        """Add a sample that is not there yet, in place of those that came in first if there is no room.

        Returns:
            Whether it is in the cache; it is not if it alone would be too much.

        Raises:
            SampleError: the cache cannot hold samples of such a type.
            OSError: it cannot be written.
        """
        ...

    def close(self) -> None:
        """Forget all samples; idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...
