"""What every function has done: figures, happenings, what it wrote, and what that would have cost."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from stoker._cost.prices import GB_BYTES, FunctionPrices, Prices
from stoker_local.functions._faults import FunctionFaultKind

__all__ = [
    "Account",
    "FunctionStatistics",
    "Happening",
    "Journal",
    "Ledger",
    "Meter",
    "total",
]

_KEPT = 10_000
_KEPT_LOGS = 200


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


class Account:
    """One function's page of the ledger.

    Attributes:
        meter: its figures.
        logs: what its newest 200 invocations wrote.
    """

    def __init__(self, function: str, meter: Meter, journal: Journal, echo: Callable[[str], object]) -> None:
        self.meter = meter
        self.logs: deque[str] = deque(maxlen=_KEPT_LOGS)
        self._function = function
        self._journal = journal
        self._echo = echo

    def note(self, what: str, *, instance: str = "", detail: str = "") -> None:
        """Add a happening to the journal."""
        self._journal.note(self._function, what, instance=instance, detail=detail)

    def throttled(self) -> None:
        """Count a refusal for concurrency."""
        self.meter.throttles += 1
        self.note("throttle")

    def started(self, *, instances: int) -> None:
        """Count a cold start, after which there are so many instances."""
        self.meter.instance_started(instances)

    def reclaimed(self, instance: str) -> None:
        """Count an instance that was taken back."""
        self.meter.reclaimed += 1
        self.note("reclaim", instance=instance)

    def struck(self, kind: FunctionFaultKind) -> None:
        """Count an injected fault."""
        self.meter.faults[kind.value] += 1
        self.note(kind.value, detail="injected")

    def wrote(self, log: bytes) -> None:
        """Keep what an invocation wrote."""
        if log:
            text = log.decode("utf-8", "replace")
            self.logs.append(text)
            self._echo(text)


class Ledger:
    """All functions' accounts.

    Args:
        clock: seconds, from anywhere.
        echo: is given what every invocation writes.
    """

    def __init__(self, *, clock: Callable[[], float], echo: Callable[[str], object]) -> None:
        self.journal = Journal(clock)
        self.accounts: dict[str, Account] = {}
        self._prices = Prices.load().functions
        self._echo = echo

    def open(self, function: str, platform: str, *, memory_bytes: int, vcpus: float = 0.0) -> Account:
        """Open a function's account, at the prices of a platform (``lambda``, ``cloud-run``)."""
        meter = Meter(self._prices[platform], memory_bytes=memory_bytes, vcpus=vcpus)
        self.accounts[function] = Account(function, meter, self.journal, self._echo)
        return self.accounts[function]

    def statistics(self) -> dict[str, FunctionStatistics]:
        """Return the figures of every function."""
        return {name: account.meter.read() for name, account in self.accounts.items()}

    def events(self, since: int) -> list[Happening]:
        """Return what has happened from number ``since`` on, oldest first."""
        return self.journal.since(since)
