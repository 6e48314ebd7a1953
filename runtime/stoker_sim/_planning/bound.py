"""The least time that an epoch can take, whatever is fetched in which order: a closed form beside the simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker.errors import ConfigError

__all__ = ["Bound", "Demand", "bound_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What an epoch asks of one node.

    Attributes:
        compute_seconds: of its accelerators.
        size_bytes: that it uses.
        gets: requests that it takes to read them all from the bucket.
        hit_rate: the part of both that a cache serves, 0 to 1: κ.
        bytes_per_second: that its network and its connections together can bring.
        latency_seconds: of a request, until its first byte.
        concurrency: requests that may be under way at once.
        requests_per_second: that the bucket answers this node.
    """

    compute_seconds: float
    size_bytes: float
    gets: float
    hit_rate: float = 0.0
    bytes_per_second: float
    latency_seconds: float
    concurrency: int
    requests_per_second: float = math.inf

    def __post_init__(self) -> None:
        for name in ("compute_seconds", "size_bytes", "gets", "latency_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0 and finite, not {getattr(self, name)}")
        if not 0 <= self.hit_rate <= 1:
            raise ConfigError(f"hit_rate must be in [0, 1], not {self.hit_rate}")
        if not min(self.bytes_per_second, self.requests_per_second) > 0 or self.concurrency < 1:
            raise ConfigError(
                f"an epoch needs bytes_per_second > 0, requests_per_second > 0 and concurrency >= 1, not {self}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """T ≥ max(compute, (1 - κ)·bytes / bandwidth, (1 - κ)·GETs·latency / concurrency, (1 - κ)·GETs / rate), in seconds.

    Attributes:
        compute_seconds: the first term.
        transfer_seconds: the second.
        request_seconds: the third.
        rate_seconds: the fourth.
    """

    compute_seconds: float
    transfer_seconds: float
    request_seconds: float
    rate_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The largest of them."""
        return max(self.compute_seconds, self.transfer_seconds, self.request_seconds, self.rate_seconds)

    @property
    def limit(self) -> str:
        """Which of them it is: ``"compute"``, ``"bandwidth"``, ``"requests"`` or ``"request rate"``.

        The first where they are equal.
        """
        terms = {
            "compute": self.compute_seconds,
            "bandwidth": self.transfer_seconds,
            "requests": self.request_seconds,
            "request rate": self.rate_seconds,
        }
        return max(terms, key=terms.__getitem__)

    @property
    def stall(self) -> float:
        """The least part of the epoch, 0 to 1, in which the accelerators wait."""
        return 1.0 - self.compute_seconds / self.seconds if self.seconds else 0.0


def bound_of(demand: Demand) -> Bound:
    """Return the bound of an epoch."""
    missed = 1.0 - demand.hit_rate
    return Bound(
        compute_seconds=demand.compute_seconds,
        transfer_seconds=missed * demand.size_bytes / demand.bytes_per_second,
        request_seconds=missed * demand.gets * demand.latency_seconds / demand.concurrency,
        rate_seconds=missed * demand.gets / demand.requests_per_second,
    )
