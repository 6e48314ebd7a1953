"""Exports waits and fetches as OpenTelemetry spans and metrics, and as Prometheus metrics.

Needs the extra ``telemetry``. OpenTelemetry also needs an SDK that the application sets up. Spans contain keys of
objects, relative to the data set. Metrics have only phases, outcomes and names of tiers as labels: the number of keys
is unbounded. Neither contains URLs, and so no signatures or credentials.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from stoker._base.arguments import explain_arguments
from stoker._base.closeable import Closeable
from stoker._base.fetch_record import Fetch, Phase, Span
from stoker._base.plugins import require_extra
from stoker._base.recorder import Wait
from stoker.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry


def _summarize(fetch: Fetch) -> tuple[float, int, int, int]:
    """Return a fetch's duration in seconds, its numbers of successful and other requests, and the bytes received."""
    sizes = [request.size_bytes for request in fetch.requests if request.is_whole]
    return fetch.ready_seconds - fetch.issued_seconds, len(sizes), len(fetch.requests) - len(sizes), sum(sizes)


_SCOPE = "stoker"


@explain_arguments("OpenTelemetrySink", renamed={"least_wait_seconds": "min_wait_seconds"})
class OpenTelemetrySink:
    """A :class:`~stoker.abc.TraceSink` that exports OpenTelemetry spans and metrics.

    A wait is a span ``stoker.wait`` with a child span per phase; a fetch is a span ``stoker.fetch`` with such children.
    Counters: ``stoker.wait.time`` (s, by ``stoker.phase``), ``stoker.batches``, ``stoker.read`` (By),
    ``stoker.requests`` (by ``stoker.outcome``); histogram ``stoker.fetch.duration`` (s).

    Example:
        >>> from stoker_torch import Loader
        >>> loader = Loader("s3://bucket/train", batch_size=32, trace=OpenTelemetrySink())
        >>> loader.close()

    Args:
        tracer_provider: provider of the spans; default the global one.
        meter_provider: provider of the metrics; default the global one.
        min_wait_seconds: minimum duration of a wait that becomes a span, in seconds; all waits count in metrics.
        clock: returns a time in seconds; must be the clock that measures the waits.

    Raises:
        MissingExtraError: opentelemetry is not installed.
        ConfigError: ``min_wait_seconds`` is negative.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        min_wait_seconds: float = 0.01,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        with require_extra("OpenTelemetrySink", "telemetry"):
            from opentelemetry import metrics, trace
        if not min_wait_seconds >= 0:
            raise ConfigError(f"min_wait_seconds must be at least 0, not {min_wait_seconds}")
        self._context_of = trace.set_span_in_context
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        meter = metrics.get_meter(_SCOPE, meter_provider=meter_provider)
        self._waits = meter.create_counter("stoker.wait.time", "s", "waits of the training loop")
        self._batches = meter.create_counter("stoker.batches", "{batch}", "batches yielded")
        self._fetches = meter.create_histogram("stoker.fetch.duration", "s", "time to fetch an item")
        self._read = meter.create_counter("stoker.read", "By", "bytes received by requests")
        self._requests = meter.create_counter("stoker.requests", "{request}", "requests to the store")
        self._min_wait_seconds = min_wait_seconds
        self._epoch_seconds = time.time() - clock()

    def fetched(self, fetch: Fetch, offset_seconds: float) -> None:
        """Export a fetch as a span, and count it."""
        seconds, answered, lost, read_bytes = _summarize(fetch)
        self._fetches.record(seconds)
        self._read.add(read_bytes)
        self._requests.add(answered, {"stoker.outcome": "answered"})
        self._requests.add(lost, {"stoker.outcome": "lost"})
        spans = [span.shift(offset_seconds) for span in fetch.path()]
        attributes: dict[str, str | int] = {
            "stoker.object": fetch.object,
            "stoker.item": fetch.item,
            "stoker.requests": len(fetch.requests),
        }
        begin = fetch.issued_seconds + offset_seconds
        end = fetch.ready_seconds + offset_seconds
        self._span("stoker.fetch", begin, end, attributes, spans)

    def waited(self, wait: Wait) -> None:
        """Count a wait, and export it as a span unless it is shorter than ``min_wait_seconds``."""
        self._batches.add(1)
        for span in wait.spans:
            self._waits.add(max(0.0, span.seconds), {"stoker.phase": str(span.phase)})
        if wait.seconds >= self._min_wait_seconds:
            (phase, key), _ = next(iter(wait.by_cause().items()))
            attributes: dict[str, str | int] = {"stoker.batch": wait.batch, "stoker.epoch": wait.epoch}
            attributes |= {"stoker.phase": str(phase), "stoker.object": key}
            begin, end = wait.spans[0].begin_seconds, wait.spans[-1].end_seconds
            self._span("stoker.wait", begin, end, attributes, wait.spans)

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


_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Histogram buckets of fetch durations, in seconds."""


class PrometheusSink(Closeable):
    """A :class:`~stoker.abc.TraceSink` that counts waits and fetches as Prometheus metrics and can serve them.

    Example:
        >>> from stoker_torch import Loader
        >>> with PrometheusSink(port=0) as sink, Loader("s3://bucket/train", batch_size=32, trace=sink) as loader:
        ...     for batch in loader:
        ...         train_step(batch["image"], batch["label"])

    Args:
        port: TCP port that serves ``/metrics``; 0 for any free port (see :attr:`port`), None to serve nothing because
            the application serves the registry.
        address: address of the network interface. The default is reachable only from this machine, since metrics are
            served without a password.
        registry: registry of the metrics; default a new one.

    Attributes:
        registry: registry of the metrics.
        port: port in use; None if nothing is served.

    Raises:
        MissingExtraError: prometheus_client is not installed.
        ConfigError: the port is not available.
    """

    def __init__(
        self, port: int | None = None, *, address: str = "127.0.0.1", registry: CollectorRegistry | None = None
    ) -> None:
        with require_extra("PrometheusSink", "telemetry"):
            from prometheus_client import CollectorRegistry
        self.registry = CollectorRegistry() if registry is None else registry
        self._create_metrics(self.registry)
        self._pid = os.getpid()
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        if port is not None:
            self._server = _serve(port, address, self.registry)
        self.port: int | None = None if self._server is None else self._server[0].server_port

    def _create_metrics(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        waited = "Time that the training loop waited for batches, by cause."
        requests = "Requests to the store; lost requests failed or lost to a hedge."
        tiers, ready = "Reads of super-samples from tiers.", "Items in the ring that are ready or in use."
        fetches = "Time to fetch an item."
        self._waits = Counter("stoker_wait_seconds", waited, ["phase"], registry=registry)
        self._batches = Counter("stoker_batches", "Batches yielded.", registry=registry)
        self._fetches = Histogram("stoker_fetch_seconds", fetches, buckets=_BUCKETS, registry=registry)
        self._read_bytes = Counter("stoker_read_bytes", "Bytes received by requests.", registry=registry)
        self._requests = Counter("stoker_requests", requests, ["outcome"], registry=registry)
        self._tiers = Counter("stoker_tier_reads", tiers, ["tier", "outcome"], registry=registry)
        self._ready = Gauge("stoker_ready_items", ready, registry=registry)
        for phase in Phase:  # a counter needs an initial 0 for its rate to be computed
            self._waits.labels(phase=str(phase))

    def fetched(self, fetch: Fetch, offset_seconds: float) -> None:
        """Count a fetch."""
        seconds, answered, lost, read_bytes = _summarize(fetch)
        self._fetches.observe(seconds)
        self._read_bytes.inc(read_bytes)
        self._requests.labels(outcome="answered").inc(answered)
        self._requests.labels(outcome="lost").inc(lost)
        for tier, outcome in fetch.tiers:
            self._tiers.labels(tier=tier, outcome=outcome).inc()
        self._ready.inc()

    def released(self, fetch: Fetch, now_seconds: float, offset_seconds: float) -> None:
        """Decrease the number of ready items."""
        self._ready.dec()

    def waited(self, wait: Wait) -> None:
        """Count a batch, and the wait for it by phase."""
        self._batches.inc()
        for span in wait.spans:
            self._waits.labels(phase=str(span.phase)).inc(max(0.0, span.seconds))

    def close(self) -> None:
        """Stop serving. Idempotent; does nothing in a forked child, which does not serve."""
        server, self._server = self._server, None
        if server is not None and self._pid == os.getpid():
            server[0].shutdown()
            server[0].server_close()
            server[1].join()


def _serve(port: int, address: str, registry: CollectorRegistry) -> tuple[WSGIServer, threading.Thread]:
    from prometheus_client import start_http_server

    try:
        return start_http_server(port, addr=address, registry=registry)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"metrics cannot be served on {address} port {port}: {error}; name another port") from None
