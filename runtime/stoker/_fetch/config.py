"""How hard the fetcher tries, every knob with its default; and what it has done so far, in numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker._base.arguments import explain_arguments
from stoker.errors import ConfigError

__all__ = ["GAP_BYTES", "FetchConfig", "FetchCounters", "FetchStatistics", "check_fetch"]

GAP_BYTES = 128 << 10
"""Unwanted bytes that are read rather than sending one more request: what arrives in about a first byte's time."""


@explain_arguments("FetchConfig")
@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """How the fetcher retries, hedges and adapts.

    Attributes:
        deadline_seconds: for an object in all, from the moment its first request may be sent; what is under way then
            may go on for as long as the object takes at ``least_bytes_per_second``. What normally ends the attempts in
            an outage.
        attempts: requests for one range, at most, hedges aside.
        attempt_seconds: for one request, beside what its bytes take at ``least_bytes_per_second``.
        least_bytes_per_second: a transfer slower than this never succeeds. A link is shared by all in flight.
        max_bytes_per_second: requested from the bucket by one rank, hedges and retries included, to share a link with
            others; None does not limit. It holds on average: a burst of 0.1 s and one request may exceed it.
        checksum_attempts: readings of an object whose checksum differs before it counts as spoilt at rest.
        backoff_base_seconds: bound of the first wait; doubles with every failure.
        backoff_cap_seconds: bound of every wait.
        hedge: whether late requests are sent a second time.
        hedge_fraction: hedges per request, at most.
        hedge_burst: hedges that may be sent beyond that.
        hedge_after_factor: a request is late after this many times the expected (median) time,
        hedge_first_byte_factor: or without a byte after this many times the median first byte's time,
        hedge_least_seconds: but never before this: where answers take milliseconds one is late by chance, and a second
            request would save nothing that a training loop feels.
        hedge_first_seconds: when a request is late while too few were seen to expect anything.
        concurrency_start: requests in flight at first.
        concurrency_least: requests in flight, at least, however much the store throttles.
        concurrency_most: requests in flight, at most.
        split_parts: parallel ranges that an urgent object is read in, at most; 1 never splits.
        split_least_bytes: the smallest range worth a request of its own.
    """

    deadline_seconds: float = 60.0
    attempts: int = 32
    attempt_seconds: float = 20.0
    least_bytes_per_second: float = 64 << 10
    max_bytes_per_second: float | None = None
    checksum_attempts: int = 3
    backoff_base_seconds: float = 0.05
    backoff_cap_seconds: float = 5.0
    hedge: bool = True
    hedge_fraction: float = 0.10
    hedge_burst: int = 2
    hedge_after_factor: float = 2.5
    hedge_first_byte_factor: float = 4.0
    hedge_least_seconds: float = 0.05
    hedge_first_seconds: float = 1.0
    concurrency_start: int = 16
    concurrency_least: int = 4
    concurrency_most: int = 64
    split_parts: int = 4
    split_least_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        positive = (
            "deadline_seconds", "attempts", "attempt_seconds", "least_bytes_per_second", "checksum_attempts",
            "backoff_base_seconds", "hedge_first_seconds", "concurrency_least", "split_parts", "split_least_bytes",
        )  # fmt: skip
        for name in positive:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}")
        if self.max_bytes_per_second is not None and not 0 < self.max_bytes_per_second < math.inf:
            raise ConfigError(
                f"max_bytes_per_second must be more than 0 and finite, or None for no limit, not "
                f"{self.max_bytes_per_second}"
            )
        if not self.backoff_cap_seconds >= self.backoff_base_seconds:
            raise ConfigError(f"backoff_cap_seconds={self.backoff_cap_seconds} is below backoff_base_seconds")
        if not 0.0 <= self.hedge_fraction <= 1.0 or self.hedge_burst < 1:
            raise ConfigError(f"hedges need 0 <= fraction <= 1 and burst >= 1, not {self}")
        if not min(self.hedge_after_factor, self.hedge_first_byte_factor) >= 1.0:
            raise ConfigError(f"the factors after which a request is late must be >= 1, not {self}")
        if not self.hedge_least_seconds >= 0.0:
            raise ConfigError(f"hedge_least_seconds must be >= 0, not {self.hedge_least_seconds}")
        if not self.concurrency_least <= self.concurrency_start <= self.concurrency_most:
            raise ConfigError(f"concurrency must be least <= start <= most, not {self}")

    def transfer_seconds(self, size_bytes: int) -> float:
        """Return what a transfer may take at most, beside all that waiting for it may."""
        return size_bytes / self.least_bytes_per_second

    def attempt_limit_seconds(self, size_bytes: int) -> float:
        """Return what a request for so many bytes may take at most."""
        return self.attempt_seconds + self.transfer_seconds(size_bytes)


def check_fetch(fetch: object) -> None:
    """Raise ConfigError unless a setting ``fetch`` is a :class:`FetchConfig`."""
    if not isinstance(fetch, FetchConfig):
        raise ConfigError(f"fetch is a FetchConfig, such as FetchConfig(deadline_seconds=60), not {fetch!r:.80}")


@dataclass(slots=True, kw_only=True)
class FetchCounters:
    """What fetchers have done, one or several after each other.

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
        checksum_failures: readings, from store or tier, whose checksum differed.
        objects: fetches that ended well.
        failed: fetches that ended in an error (cancelled ones are neither).
        tier_hits: objects delivered by a tier, by name of the tier.
        tier_errors: reads in which a tier failed or spoilt the bytes, by name of the tier.
        tier_late: reads in which a tier was late, so that the store was asked as well or instead, by name of the tier.
    """

    requests: int = 0
    bytes: int = 0
    useful_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    hedges: int = 0
    start_hedges: int = 0
    hedge_wins: int = 0
    hedged_bytes: int = 0
    checksum_failures: int = 0
    objects: int = 0
    failed: int = 0
    tier_hits: Counter[str] = field(default_factory=Counter)
    tier_errors: Counter[str] = field(default_factory=Counter)
    tier_late: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, kw_only=True)
class FetchStatistics(FetchCounters):
    """A snapshot of a fetcher: what has been counted, and what is estimated and allowed now.

    Attributes:
        tier_states: of each tier's circuit breaker, by name of the tier: ``"closed"`` where it is read, ``"open"``
            where it is left alone since it was late or failed several times in a row, ``"half-open"`` or ``"probing"``
            where one read tries it.
        first_byte_seconds: estimated wait for the first byte, lately.
        bytes_per_second: estimated rate of one transfer, lately; 0 if sizes are too alike to tell.
        transfer_seconds: median time of a whole transfer, lately.
        concurrency: requests that may be in flight now.
        in_flight: permits held now; a fetch that backs off keeps its permit.
    """

    tier_states: Mapping[str, str]
    first_byte_seconds: float
    bytes_per_second: float
    transfer_seconds: float
    concurrency: int
    in_flight: int

    @property
    def throttled(self) -> int:
        """Requests that the store refused for now (503, 429)."""
        return self.failures["ThrottledError"]
