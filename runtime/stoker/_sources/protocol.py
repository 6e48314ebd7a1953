"""What a packer asks of a place with samples."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from stoker._base.store_protocol import ObjectInfo
from stoker._format.schema import Schema

__all__ = ["Sample", "Source"]

Sample = tuple[str, dict[str, Any]]
"""How to name a sample in a message, and its values by column."""


class Source(Protocol):
    """Samples in a fixed order, which can be read from any of them on."""

    @property
    def kind(self) -> str:
        """Which kind of source it is, as ``stoker pack --kind`` names it."""
        ...

    @property
    def schema(self) -> Schema:
        """The columns of every sample."""
        ...

    @property
    def objects(self) -> tuple[ObjectInfo, ...]:
        """The raw objects that the samples are in, in order of the samples."""
        ...

    @property
    def root(self) -> str:
        """URL of the folder that the objects' keys are relative to."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of kind, schema, and relative key, size and tag of every object: another one if the source changed."""
        ...

    @property
    def samples(self) -> int | None:
        """How many samples there are, None if only reading them tells."""
        ...

    @property
    def size_bytes(self) -> int:
        """How many bytes the objects have that the samples are in."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the source, such as files that were left out; more once it was read."""
        ...

    def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        """Yield the samples from number ``start`` on, in order, reading a bounded number of bytes ahead.

        Close the generator (``contextlib.aclosing``) when leaving it early: that cancels the reads in flight.

        Raises:
            PackError: an object is damaged or not what the source's kind makes of it; names object and remedy.
            StoreError: an object could not be read, or is no longer the one that the fingerprint covers.
        """
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...
