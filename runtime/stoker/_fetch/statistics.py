"""What a fetcher has done so far, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

__all__ = ["FetchCounters", "FetchStatistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStatistics:
    """A snapshot of a fetcher.

    Attributes:
        requests: ranged reads sent to the store: first tries, retries and hedges. Each is billed.
        bytes: received whole by those requests.
        useful_bytes: of objects and ranges that were verified and delivered, from store or tier.
        failures: requests that failed, by name of the error.
        retries: requests sent again after a failure, by name of the error.
        hedges: second requests for late bytes.
        start_hedges: of these, those before the first batch that the budget of hedges did not have to allow.
        hedge_wins: hedges that were first.
        hedged_bytes: requested by the losers of hedge races whose answers had begun: an upper bound of what they moved,
            since a cancelled transfer does not tell how far it came.
        throttled: requests that the store refused for now (503, 429).
        checksum_failures: readings, from store or tier, whose checksum differed.
        objects: fetches that ended well.
        failed: fetches that ended in an error (cancelled ones are neither).
        tier_hits: objects delivered by a tier, by name of the tier.
        tier_errors: reads in which a tier failed or spoilt the bytes, by name of the tier.
        tier_late: reads in which a tier was late, so that the store was asked as well or instead, by name of the tier.
        tier_states: of each tier's circuit breaker, by name of the tier: ``"closed"`` where it is read, ``"open"``
            where it is left alone since it was late or failed several times in a row, ``"half-open"`` or ``"probing"``
            where one read tries it.
        first_byte_seconds: estimated wait for the first byte, lately.
        bytes_per_second: estimated rate of one transfer, lately; 0 if sizes are too alike to tell.
        transfer_seconds: median time of a whole transfer, lately.
        concurrency: requests that may be in flight now.
        in_flight: permits held now; a fetch that backs off keeps its permit.
    """

    requests: int
    bytes: int
    useful_bytes: int
    failures: Mapping[str, int]
    retries: Mapping[str, int]
    hedges: int
    start_hedges: int
    hedge_wins: int
    hedged_bytes: int
    throttled: int
    checksum_failures: int
    objects: int
    failed: int
    tier_hits: Mapping[str, int]
    tier_errors: Mapping[str, int]
    tier_late: Mapping[str, int]
    tier_states: Mapping[str, str]
    first_byte_seconds: float
    bytes_per_second: float
    transfer_seconds: float
    concurrency: int
    in_flight: int


@dataclass(slots=True)
class FetchCounters:
    """The counts behind :class:`FetchStatistics`; its fields are described there."""

    requests: int = 0
    bytes: int = 0
    useful_bytes: int = 0
    hedges: int = 0
    hedge_wins: int = 0
    hedged_bytes: int = 0
    checksum_failures: int = 0
    objects: int = 0
    failed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    tier_hits: Counter[str] = field(default_factory=Counter)
    tier_errors: Counter[str] = field(default_factory=Counter)
    tier_late: Counter[str] = field(default_factory=Counter)

    def snapshot(self, **estimates: Any) -> FetchStatistics:
        """Return what has been counted, with what the fetcher estimates and allows now: the other fields, by name."""
        counts = {each.name: getattr(self, each.name) for each in fields(self)}
        frozen = {name: MappingProxyType(dict(count)) for name, count in counts.items() if isinstance(count, Counter)}
        return FetchStatistics(**{**counts, **frozen}, throttled=self.failures["ThrottledError"], **estimates)
