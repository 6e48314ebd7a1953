"""Waits and fetches as Prometheus metrics, for a scraper on this machine. Needs the extra ``telemetry``.

Labels are phases, outcomes and names of tiers only: no keys, whose number has no bound, and no URLs.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker._base.fetch_record import Fetch, Phase
from stoker._base.recorder import Wait
from stoker._trace.exporting import EXTRA, FetchCounts
from stoker.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["PrometheusSink"]

_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Of fetches, in seconds."""


@dataclass(frozen=True, slots=True)
class _Metrics:
    waits: Counter
    batches: Counter
    fetches: Histogram
    read_bytes: Counter
    requests: Counter
    tiers: Counter
    ready: Gauge


class PrometheusSink:
    """A :class:`~stoker.abc.TraceSink` that counts, and serves the counts.

    Args:
        port: to serve ``/metrics`` on; 0 for any that is free (see :attr:`port`), None to serve nothing, where the
            registry is served by somebody else.
        address: of the interface. The default is for this machine alone: metrics are served without a password.
        registry: the counts are entered into it; default one of its own.

    Attributes:
        port: that is served on, None if none is.

    Raises:
        MissingExtraError: prometheus_client is not installed.
        ConfigError: the port cannot be had.
    """

    def __init__(
        self, port: int | None = None, *, address: str = "127.0.0.1", registry: CollectorRegistry | None = None
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError:
            raise MissingExtraError(EXTRA.format(what="PrometheusSink")) from None
        self.registry = CollectorRegistry() if registry is None else registry
        self._metrics = _made(self.registry)
        self._pid = os.getpid()
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        if port is not None:
            self._server = _serve(port, address, self.registry)
        self.port: int | None = None if self._server is None else self._server[0].server_port

    def fetched(self, fetch: Fetch, offset_seconds: float) -> None:
        """Count a fetch."""
        counts, metrics = FetchCounts.of(fetch), self._metrics
        metrics.fetches.observe(counts.seconds)
        metrics.read_bytes.inc(counts.read_bytes)
        metrics.requests.labels(outcome="answered").inc(counts.answered)
        metrics.requests.labels(outcome="lost").inc(counts.lost)
        for tier, outcome in fetch.tiers:
            metrics.tiers.labels(tier=tier, outcome=outcome).inc()
        metrics.ready.inc()

    def released(self, fetch: Fetch, now_seconds: float, offset_seconds: float) -> None:
        """Count an item less."""
        self._metrics.ready.dec()

    def waited(self, wait: Wait) -> None:
        """Count a batch, and what was waited for it."""
        self._metrics.batches.inc()
        for span in wait.spans:
            self._metrics.waits.labels(phase=str(span.phase)).inc(max(0.0, span.seconds))

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Serve no more. Idempotent; a forked child, which serves nothing, has nothing to end."""
        server, self._server = self._server, None
        if server is not None and self._pid == os.getpid():
            server[0].shutdown()
            server[0].server_close()
            server[1].join()

    def __enter__(self) -> PrometheusSink:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _made(registry: CollectorRegistry) -> _Metrics:
    from prometheus_client import Counter, Gauge, Histogram

    waited = "Time that the training loop waited for batches, by what it waited for."
    requests = "Requests to the store; lost ones failed, or were overtaken by a hedge."
    metrics = _Metrics(
        waits=Counter("stoker_wait_seconds", waited, ["phase"], registry=registry),
        batches=Counter("stoker_batches", "Batches that were yielded.", registry=registry),
        fetches=Histogram("stoker_fetch_seconds", "Time to fetch an item.", buckets=_BUCKETS, registry=registry),
        read_bytes=Counter("stoker_read_bytes", "Bytes that requests brought.", registry=registry),
        requests=Counter("stoker_requests", requests, ["outcome"], registry=registry),
        tiers=Counter(
            "stoker_tier_reads", "Super-samples that tiers were to give.", ["tier", "outcome"], registry=registry
        ),
        ready=Gauge("stoker_ready_items", "Items in the ring that are ready or in use.", registry=registry),
    )
    for phase in Phase:  # a count that is there at zero can be asked for its rate
        metrics.waits.labels(phase=str(phase))
    return metrics


def _serve(port: int, address: str, registry: CollectorRegistry) -> tuple[WSGIServer, threading.Thread]:
    from prometheus_client import start_http_server

    try:
        return start_http_server(port, addr=address, registry=registry)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"metrics cannot be served on {address} port {port}: {error}; name another port") from None
