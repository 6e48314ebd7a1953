"""What every function has done, in one place: figures, happenings, and what it wrote."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from stoker._cost.prices import Prices
from stoker_local.functions._faults import FunctionFaultKind
from stoker_local.functions._statistics import FunctionStatistics, Happening, Journal, Meter

__all__ = ["Account", "Ledger"]

_KEPT_LOGS = 200


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
