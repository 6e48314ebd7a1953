"""Counts and cost of a fan-out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from stoker._base.arguments import explain_arguments
from stoker._base.meter import Operation
from stoker._base.sizes import format_bytes, format_count, format_dollars
from stoker._cost.prices import GB_BYTES, FunctionPrices, Prices
from stoker._format.display import PLAIN_KEY
from stoker.abc import Answer
from stoker.errors import ConfigError

_OPERATIONS = {str(operation) for operation in Operation}
_COUNTER_NAMES = (
    *("calls", "continued", "retries", "throttled", "second_calls", "second_calls_won", "cold_starts", "wasted_calls"),
    "requests",
)


@explain_arguments("Report", renamed={"in_vain": "wasted_calls"})
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Counts and cost of a fan-out, from :attr:`Driver.report`.

    Example:
        >>> async with open_executor("local", ExecutorOptions(concurrency=1)) as executor:
        ...     report = Driver(executor).report
        >>> report.calls, report.dollars
        (0, None)

    Attributes:
        tasks: completed tasks.
        failed: failed tasks.
        calls: calls sent, including second and throttled ones.
        continued: calls sent because the previous one stopped at its deadline with work left.
        retries: calls sent because the previous one failed.
        throttled: calls that the platform refused because too many were running.
        second_calls: second calls for late ones.
        second_calls_won: second calls that ended before the first.
        cold_starts: calls that started an instance, as far as the platform reports it.
        wasted_calls: calls that failed, were lost, or were cancelled for another's answer. Their bill is unknown, so
            ``dollars`` includes their duration at the largest memory of the other calls.
        seconds: duration of the fan-out, in seconds.
        billed_seconds: billed duration of all answered calls, in seconds.
        gb_seconds: billed memory of all answered calls, in GiB-seconds.
        dollars: cost of the functions; None if the platform bills nothing.
        requests: requests to stores, from the field ``requests`` of the results.
        request_dollars: cost of these requests.
        samples: samples in the written super-samples.
        objects: super-samples written, from the field ``objects`` of the results.
        size_bytes: size of the written super-samples, in bytes.
    """

    tasks: int
    failed: int
    calls: int
    continued: int
    retries: int
    throttled: int
    second_calls: int
    second_calls_won: int
    cold_starts: int
    wasted_calls: int = field(metadata={PLAIN_KEY: "in_vain"})
    seconds: float
    billed_seconds: float
    gb_seconds: float
    dollars: float | None
    requests: int
    request_dollars: float
    samples: int
    objects: int
    size_bytes: int

    def lines(self) -> tuple[str, ...]:
        """Return the report as lines of text; counts of 0 are left out."""
        happened = {
            "failed": self.failed,
            "retried": self.retries,
            "throttled": self.throttled,
            "called again at their deadline": self.continued,
            "second calls for late ones": self.second_calls,
            "of these first": self.second_calls_won,
            "cold starts": self.cold_starts,
            "wasted": self.wasted_calls,
        }
        details = ", ".join(f"{what} {count:,}" for what, count in happened.items() if count)
        work = f"{format_count(self.tasks, 'task')} in {format_count(self.calls, 'call')}, in {self.seconds:.1f} s"
        written = f"{format_count(self.samples, 'sample')} in {format_count(self.objects, 'super-sample')}"
        price = "" if self.dollars is None else f", {format_dollars(self.dollars)} for functions"
        paid = f", {format_dollars(self.request_dollars)}" if self.request_dollars else ""
        return (
            f"{work} ({details})" if details else work,
            *([f"{written}, {format_bytes(self.size_bytes)}"] if self.objects else []),
            f"{self.billed_seconds:,.1f} s of functions, {self.gb_seconds:,.2f} GB-s{price}",
            *([f"{format_count(self.requests, 'request')} to stores{paid}"] if self.requests else []),
        )


class FanoutCounters:
    """Counters of a running fan-out.

    Args:
        prices: prices of the platform; None if it bills nothing.
        stores: prices of requests to stores; None for no prices.

    Attributes:
        counts: name of a field of :class:`Report` → number of calls or requests.
    """

    def __init__(self, prices: FunctionPrices | None, stores: Prices | None = None) -> None:
        self._prices, self._stores = prices, stores
        self.counts: dict[str, int] = dict.fromkeys(_COUNTER_NAMES, 0)
        self._billed_seconds = self._gb_seconds = self._dollars = self._failed_seconds = self._request_dollars = 0.0
        self._memory_bytes, self._vcpus = 0, 0.0  # the largest of all answers, for calls without one

    def count_answer(self, answer: Answer) -> None:
        """Count an answered call, whose bill is known."""
        self.counts["cold_starts"] += bool(answer.is_cold)
        self._billed_seconds += answer.billed_seconds
        self._gb_seconds += answer.billed_seconds * answer.memory_bytes / GB_BYTES
        self._memory_bytes = max(self._memory_bytes, answer.memory_bytes)
        self._vcpus = max(self._vcpus, answer.vcpus)
        self._count_requests(answer.result.get("requests"))
        if self._prices is not None:
            self._dollars += self._prices.invocation_dollars(
                seconds=answer.billed_seconds, memory_bytes=answer.memory_bytes, vcpus=answer.vcpus
            )

    def _count_requests(self, requests: object) -> None:
        """Add the requests to stores that a function reports; anything malformed adds nothing."""
        for url, counts in requests.items() if isinstance(requests, Mapping) else ():
            for operation, count in counts.items() if isinstance(counts, Mapping) else ():
                if operation not in _OPERATIONS or type(count) is not int or count <= 0:
                    continue
                self.counts["requests"] += count
                with suppress(ConfigError):  # a store without prices
                    if self._stores is not None:
                        dollars = self._stores.request_dollars(str(url), Operation(operation))
                        self._request_dollars += count * dollars

    def count_failure(self, seconds: float) -> None:
        """Count a call that failed or was cancelled after ``seconds``, whose bill is unknown."""
        self.counts["wasted_calls"] += 1
        self._failed_seconds += seconds

    def report(self, results: Iterable[Mapping[str, Any]], failed: int, seconds: float) -> Report:
        """Return the report; ``results`` are those of completed tasks, ``seconds`` is the total duration."""
        done = list(results)
        written = [result for result in done if "objects" in result]
        return Report(
            tasks=len(done),
            failed=failed,
            seconds=seconds,
            billed_seconds=self._billed_seconds,
            gb_seconds=self._gb_seconds,
            dollars=self._total_dollars(),
            request_dollars=self._request_dollars,
            **{name: _sum_field(written, name) for name in ("samples", "objects", "size_bytes")},
            **self.counts,
        )

    def _total_dollars(self) -> float | None:
        if self._prices is None:
            return None
        rest = self._prices.invocation_dollars(
            seconds=self._failed_seconds, memory_bytes=self._memory_bytes, vcpus=self._vcpus
        )
        return self._dollars + rest + (self.counts["wasted_calls"] - 1) * self._prices.dollars_per_request


def _sum_field(results: list[Mapping[str, Any]], name: str) -> int:
    """Return the sum of a field; results without an integer there add nothing."""
    values = (result.get(name) for result in results)
    return sum(value for value in values if type(value) is int)
