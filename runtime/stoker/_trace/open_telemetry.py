"""Waits and fetches as OpenTelemetry spans and metrics. Needs the extra ``telemetry``, and an SDK that the user set up.

Spans have keys of objects, relative to the data set; metrics have phases and outcomes only. No URL, and so no signature
and no credential, is in either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from stoker._base.fetch_record import Fetch, Span
from stoker._base.recorder import Wait
from stoker._trace.exporting import EXTRA, FetchCounts
from stoker.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

__all__ = ["OpenTelemetrySink"]

_SCOPE = "stoker"


class OpenTelemetrySink:
    """A :class:`~stoker.abc.TraceSink` that makes spans and metrics of what it is told.

    A wait is a span ``stoker.wait`` with one below it for each phase; a fetch is a span ``stoker.fetch``, likewise.
    Counters: ``stoker.wait.time`` (s, by ``stoker.phase``), ``stoker.batches``, ``stoker.read`` (By),
    ``stoker.requests`` (by ``stoker.outcome``); histogram ``stoker.fetch.duration`` (s).

    Args:
        tracer_provider: default the global one.
        meter_provider: default the global one.
        least_wait_seconds: waits that are shorter are counted, but make no span.
        clock: seconds, the one that waits are measured with.

    Raises:
        MissingExtraError: opentelemetry is not installed.
        ConfigError: ``least_wait_seconds`` is negative.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        least_wait_seconds: float = 0.01,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError:
            raise MissingExtraError(EXTRA.format(what="OpenTelemetrySink")) from None
        if not least_wait_seconds >= 0:
            raise ConfigError(f"least_wait_seconds is at least 0, not {least_wait_seconds}")
        self._context_of = trace.set_span_in_context
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        meter = metrics.get_meter(_SCOPE, meter_provider=meter_provider)
        self._waits = meter.create_counter("stoker.wait.time", "s", "waits of the training loop")
        self._batches = meter.create_counter("stoker.batches", "{batch}", "batches that were yielded")
        self._fetches = meter.create_histogram("stoker.fetch.duration", "s", "time to fetch an item")
        self._read = meter.create_counter("stoker.read", "By", "bytes that requests brought")
        self._requests = meter.create_counter("stoker.requests", "{request}", "requests to the store")
        self._least_wait_seconds = least_wait_seconds
        self._epoch_seconds = time.time() - clock()

    def fetched(self, fetch: Fetch, offset_seconds: float) -> None:
        """Make a span of a fetch, and count it."""
        counts = FetchCounts.of(fetch)
        self._fetches.record(counts.seconds)
        self._read.add(counts.read_bytes)
        self._requests.add(counts.answered, {"stoker.outcome": "answered"})
        self._requests.add(counts.lost, {"stoker.outcome": "lost"})
        spans = [span.later(offset_seconds) for span in fetch.path()]
        attributes: dict[str, str | int] = {
            "stoker.object": fetch.object,
            "stoker.item": fetch.item,
            "stoker.requests": len(fetch.requests),
        }
        begin, end = fetch.issued_seconds + offset_seconds, fetch.ready_seconds + offset_seconds
        self._span("stoker.fetch", begin, end, attributes, spans)

    def released(self, fetch: Fetch, now_seconds: float, offset_seconds: float) -> None:
        """Nothing is made of it."""

    def waited(self, wait: Wait) -> None:
        """Count a wait, and make a span of one that is not short."""
        self._batches.add(1)
        for span in wait.spans:
            self._waits.add(max(0.0, span.seconds), {"stoker.phase": str(span.phase)})
        if wait.seconds >= self._least_wait_seconds:
            (phase, key), _ = next(iter(wait.by_cause().items()))
            attributes: dict[str, str | int] = {"stoker.batch": wait.batch, "stoker.epoch": wait.epoch}
            attributes |= {"stoker.phase": str(phase), "stoker.object": key}
            begin, end = wait.spans[0].begin_seconds, wait.spans[-1].end_seconds
            self._span("stoker.wait", begin, end, attributes, wait.spans)

    def flush(self) -> None:
        """Nothing is held back: exporting is the provider's."""

    def _span(
        self, name: str, begin: float, end: float, attributes: Mapping[str, str | int], parts: Iterable[Span]
    ) -> None:
        whole = self._tracer.start_span(name, start_time=self._ns(begin), attributes=attributes)
        context = self._context_of(whole)
        for part in parts:
            about = {"stoker.object": part.object} if part.object else {}
            below = self._tracer.start_span(
                f"stoker.{part.phase}", context, start_time=self._ns(part.begin_seconds), attributes=about
            )
            below.end(self._ns(part.end_seconds))
        whole.end(self._ns(end))

    def _ns(self, seconds: float) -> int:
        return round((seconds + self._epoch_seconds) * 1e9)
