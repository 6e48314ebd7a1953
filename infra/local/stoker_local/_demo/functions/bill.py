"""What the functions' demo would have cost, and what it would have cost with an object for each sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker._base.operations import Operation
from stoker._cost.prices import Prices
from stoker_local._demo.functions.config import DATASET
from stoker_local._demo.table import read_counts
from stoker_local.functions import FunctionStatistics, total

__all__ = ["Bill", "one_by_one"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What was used, at list prices.

    Attributes:
        invocations: of all functions.
        gb_seconds: of all functions.
        function_dollars: for both.
        requests: to the bucket, by operation.
        bucket_dollars: for these.
    """

    invocations: int
    gb_seconds: float
    function_dollars: float
    requests: Mapping[Operation, int]
    bucket_dollars: float

    @classmethod
    def of(
        cls, figures: Mapping[str, FunctionStatistics], counts: Mapping[str, Any], prices: Prices, *, raw_puts: int = 0
    ) -> Bill:
        """Return the bill for what was counted.

        Args:
            figures: of each function.
            counts: of the bucket, as :meth:`~stoker_local._bucket.Counts.as_dict` has them.
            prices: to use.
            raw_puts: requests that brought the raw samples, which are left out: they are the same in any case.
        """
        requests = dict(counts["requests"])
        requests["PutObject"] = max(0, requests.get("PutObject", 0) - raw_puts)
        reading, functions = read_counts(DATASET, {**counts, "requests": requests}), total(figures)
        return cls(
            invocations=functions.invocations,
            gb_seconds=functions.gb_seconds,
            function_dollars=functions.dollars,
            requests=reading.requests,
            bucket_dollars=prices.dollars(reading),
        )

    @property
    def dollars(self) -> float:
        """All of it."""
        return self.function_dollars + self.bucket_dollars


def one_by_one(samples: int, prices: Prices, *operations: Operation) -> float:
    """Return what the bucket asks for one request of each operation for every sample, in dollars."""
    store = prices.store(DATASET)
    return samples * sum(store.request_dollars(operation) for operation in operations)
