"""What a command asked of stores, and what they ask for it."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from stoker._base.meter import Reading
from stoker._base.operations import Operation
from stoker._base.sizes import counted, format_dollars
from stoker._cost.prices import Prices
from stoker._stores.metered import MeteredStore, metered
from stoker.abc import Store
from stoker.errors import ConfigError

__all__ = ["RequestBill"]


class RequestBill:
    """Counts the requests of the stores that it is given.

    Raises:
        ConfigError: the price file is not right.
    """

    def __init__(self) -> None:
        self._prices = Prices.load()
        self._stores: list[MeteredStore] = []

    def metered(self, store: Store) -> MeteredStore:
        """Return the store, counting."""
        self._stores.append(metered(store))
        return self._stores[-1]

    def line(self) -> str:
        """Return ``12 requests to stores (10 GET, 2 LIST), $0.000054``, without a price where nothing is charged."""
        counts = self._counts()
        dollars = self._dollars()
        each = (
            f" ({', '.join(f'{count:,} {operation.upper()}' for operation, count in counts.items())})" if counts else ""
        )
        price = f", {format_dollars(dollars)}" if dollars else ""
        return f"{counted(sum(counts.values()), 'request')} to stores{each}{price}"

    def to_dict(self) -> dict[str, Any]:
        """Return ``requests``, by operation, and ``dollars``, for them and what they moved, within the region."""
        counts = {str(operation): count for operation, count in self._counts().items()}
        return {"requests": counts, "dollars": self._dollars()}

    def _readings(self) -> list[Reading]:
        return [store.meter.reading() for store in self._stores]

    def _counts(self) -> Counter[Operation]:
        counts: Counter[Operation] = Counter()
        for reading in self._readings():
            counts.update(reading.requests)
        return +counts

    def _dollars(self) -> float:
        dollars = 0.0
        for reading in self._readings():
            with suppress(ConfigError):  # of a store that the price list does not know
                dollars += self._prices.dollars(reading)
        return dollars
