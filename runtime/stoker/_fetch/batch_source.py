"""How a rank's samples come into memory: what the prefetcher's items are, how one is read, and where its rows lie then.

There are two ways: whole super-samples, or what is wanted of them (:mod:`stoker._fetch.super_samples`); and groups of
samples from anywhere (:mod:`stoker._fetch.groups`). What is delivered does not depend on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker._fetch.fetcher import Fetcher
from stoker._fetch.forecast import Forecast
from stoker._fetch.gather import PickedRows
from stoker._fetch.prefetcher import SlotReader
from stoker._format.manifest import Manifest
from stoker._format.schema import Column
from stoker._memory.ring import Ring
from stoker._order.order import OrderConfig
from stoker._order.sharding import Dealing
from stoker._order.steps import StepSource, Stretch

__all__ = ["Reading", "ReadingParts"]

Ref = TypeVar("Ref")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingParts:
    """What samples are read with.

    Attributes:
        manifest: of the data set.
        columns: the wanted ones.
        fetcher: gets bytes.
        ring: they are put into; nobody else's.
    """

    manifest: Manifest
    columns: dict[str, Column]
    fetcher: Fetcher
    ring: Ring


class Reading(SlotReader[Ref], Protocol[Ref]):
    """A way to read. It fetches on the event loop's thread; rows are picked on the consumer's."""

    async def prepare(self) -> None:
        """Read what must be there before steps can be planned; of no effect the second time.

        Raises:
            StokerError: it could not be had.
        """
        ...

    def forecast(self, order: OrderConfig, partition: Dealing) -> Forecast:
        """Return what an epoch of the rank will take."""
        ...

    def steps(self, stretch: Stretch) -> StepSource[Ref]:
        """Return the steps of a stretch, and with them the items."""
        ...

    def picked(self, slots: Sequence[int], which: NDArray[np.int64], rows: NDArray[np.int64]) -> PickedRows:
        """Return where rows lie in slots that are READY.

        Args:
            slots: as :meth:`fetch` returned them.
            which: ``int64 [samples]``, index into ``slots``.
            rows: ``int64 [samples]``, as the step's segments pick them.
        """
        ...
