"""What the function cloud has done, and what that would have cost."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from stoker._cost.prices import GB_BYTES, FunctionPrices

__all__ = ["FunctionStatistics", "Happening", "Journal", "Meter", "total"]

_KEPT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that happened.

    Attributes:
        number: ascending, from 0; none is left out.
        seconds: since the cloud's start.
        function: whose.
        instance: whose; empty where none was concerned.
        what: ``cold-start``, ``start-failed``, ``invoke``, ``answer``, ``error``, ``throttle``, ``kill``, ``freeze``,
            ``duplicate``, ``reclaim``, ``retry``, ``dropped`` (all attempts have failed), ``undelivered`` (dropped, and
            too large for the queue of failures).
        detail: such as the error's type.
    """

    number: int
    seconds: float
    function: str
    instance: str
    what: str
    detail: str = ""


class Journal:
    """The newest happenings, of all functions."""

    __slots__ = ("_clock", "_happenings", "_next", "_started_at")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_at = clock()
        self._happenings: deque[Happening] = deque(maxlen=_KEPT)
        self._next = 0

    def note(self, function: str, what: str, *, instance: str = "", detail: str = "") -> None:
        """Add one."""
        seconds = self._clock() - self._started_at
        self._happenings.append(
            Happening(
                number=self._next, seconds=seconds, function=function, instance=instance, what=what, detail=detail
            )
        )
        self._next += 1

    def since(self, number: int) -> list[Happening]:
        """Return the happenings from ``number`` on, oldest first; of the oldest, only the newest 10,000 are kept."""
        return [happening for happening in self._happenings if happening.number >= number]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionStatistics:
    """Figures since the start.

    Attributes:
        instances: alive now, without those that are being killed.
        busy: of these, with an invocation now.
        peak_instances: most that were alive at once.
        cold_starts: instances started, also in vain.
        invocations: that have ended, as often as an event was delivered.
        errors: of these, failed.
        throttles: refused for concurrency.
        reclaimed: instances that were taken back while idle.
        faults: injected, by kind; kills and freezes only if they struck.
        billed_seconds: of invocations and cold starts.
        gb_seconds: of configured memory.
        dollars: at list prices, requests included.
    """

    instances: int = 0
    busy: int = 0
    peak_instances: int = 0
    cold_starts: int = 0
    invocations: int = 0
    errors: int = 0
    throttles: int = 0
    reclaimed: int = 0
    faults: Mapping[str, int]
    billed_seconds: float = 0.0
    gb_seconds: float = 0.0
    dollars: float = 0.0


class Meter:
    """The figures of one function, as they grow."""

    def __init__(self, prices: FunctionPrices, *, memory_bytes: int, vcpus: float = 0.0) -> None:
        self._prices = prices
        self._memory_bytes = memory_bytes
        self._vcpus = vcpus
        self.instances = 0
        self.busy = 0
        self.peak_instances = 0
        self.cold_starts = 0
        self.invocations = 0
        self.errors = 0
        self.throttles = 0
        self.reclaimed = 0
        self.faults: Counter[str] = Counter()
        self.billed_seconds = 0.0

    def instance_started(self, instances: int) -> None:
        """Count a cold start, after which there are so many instances."""
        self.cold_starts += 1
        self.instances = instances
        self.peak_instances = max(self.peak_instances, instances)

    def read(self) -> FunctionStatistics:
        """Return the figures."""
        per_second = self._prices.invocation_dollars(seconds=1.0, memory_bytes=self._memory_bytes, vcpus=self._vcpus)
        per_second -= self._prices.dollars_per_request
        return FunctionStatistics(
            instances=self.instances,
            busy=self.busy,
            peak_instances=self.peak_instances,
            cold_starts=self.cold_starts,
            invocations=self.invocations,
            errors=self.errors,
            throttles=self.throttles,
            reclaimed=self.reclaimed,
            faults=dict(self.faults),
            billed_seconds=self.billed_seconds,
            gb_seconds=self.billed_seconds * self._memory_bytes / GB_BYTES,
            dollars=self.invocations * self._prices.dollars_per_request + self.billed_seconds * per_second,
        )


def total(figures: Mapping[str, FunctionStatistics]) -> FunctionStatistics:
    """Return the sums over functions; ``peak_instances`` is the sum of their peaks."""
    sums = {
        field.name: sum(getattr(each, field.name) for each in figures.values())
        for field in fields(FunctionStatistics)
        if field.name != "faults"
    }
    faults: Counter[str] = Counter()
    for each in figures.values():
        faults.update(each.faults)
    return FunctionStatistics(**sums, faults=dict(faults))
