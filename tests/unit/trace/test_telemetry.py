"""Telemetry says what the record says, names no URL, and is imported by nobody who does not ask for it."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from stoker.errors import ConfigError, MissingExtraError
from stoker.trace import OpenTelemetrySink, Phase, PrometheusSink
from support.faulty_store import StoreProfile
from support.traced import TracedRun

ROUGH = StoreProfile(late_fraction=0.1, probability={"throttle_bare": 0.1, "corrupt": 0.05}, total_bytes_per_second=2e6)


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Name and labels' values → value."""
    found = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, *sample.labels.values()): sample.value for sample in found}


def scraped(port: int | None) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def test_prometheus_serves_what_is_on_record() -> None:
    with PrometheusSink(0) as sink:
        run = TracedRun(objects=40, profile=ROUGH, compute_seconds=0.05, sinks=[sink]).run()
        found = samples(scraped(sink.port))
    stats = run.fetcher.stats
    for phase, seconds in run.recorder.seconds.items():
        assert found["stoker_wait_seconds_total", str(phase)] == pytest.approx(seconds)
    assert found["stoker_batches_total",] == found["stoker_fetch_seconds_count",] == 40
    assert found["stoker_ready_items",] == 0
    assert found["stoker_requests_total", "answered"] + found["stoker_requests_total", "lost"] == stats.requests
    assert found["stoker_read_bytes_total",] == stats.bytes


def test_prometheus_labels_have_no_keys_and_no_urls() -> None:
    with PrometheusSink(0) as sink:
        run = TracedRun(sinks=[sink]).run()
        text = scraped(sink.port)
    assert run.refs[0].key not in text
    assert run.store.url not in text


def test_prometheus_serves_only_this_machine_by_default() -> None:
    with PrometheusSink(0) as sink:
        assert sink._server is not None
        assert sink._server[0].server_address[0] == "127.0.0.1"


def test_a_closed_prometheus_serves_no_more_and_is_closed_twice() -> None:
    sink = PrometheusSink(0)
    sink.close()
    sink.close()
    with pytest.raises(OSError, match="refused"):
        scraped(sink.port)


def test_prometheus_without_a_port_enters_into_the_users_registry() -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry=registry)
    assert sink.port is None
    TracedRun(objects=3, sinks=[sink]).run()
    assert registry.get_sample_value("stoker_batches_total") == 3


@pytest.mark.parametrize("port", [-1, 70_000])
def test_a_port_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match="name another port"):
        PrometheusSink(port)


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="name another port"):
        PrometheusSink(taken.getsockname()[1])


class Telemetry:
    """Providers that keep what they are given."""

    def __init__(self) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        meters = MeterProvider([self.reader])
        self.sink = OpenTelemetrySink(
            tracer_provider=tracers, meter_provider=meters, min_wait_seconds=0.01, clock=lambda: 0.0
        )

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def counts(self) -> dict[tuple[str, ...], float]:
        data = self.reader.get_metrics_data()
        assert data is not None
        metrics = [metric for each in data.resource_metrics for scope in each.scope_metrics for metric in scope.metrics]
        return {
            (metric.name, *map(str, (point.attributes or {}).values())): getattr(point, "value", 0)
            or getattr(point, "sum", 0)
            for metric in metrics
            for point in metric.data.data_points
        }


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_open_telemetry_has_spans_of_waits_and_fetches_that_say_what_is_on_record() -> None:
    telemetry = Telemetry()
    run = TracedRun(objects=40, profile=ROUGH, compute_seconds=0.05, sinks=[telemetry.sink]).run()
    waits, fetches = telemetry.spans("stoker.wait"), telemetry.spans("stoker.fetch")
    assert len(fetches) == 40
    long = [wait for wait in run.recorder.worst_waits() if wait.seconds >= 0.01]
    assert len(waits) == len(long) > 0
    assert max(map(seconds, waits)) == pytest.approx(long[0].seconds, abs=1e-6)
    worst = max(waits, key=seconds)
    assert worst.attributes is not None
    assert (worst.attributes["stoker.phase"], worst.attributes["stoker.object"]) == next(iter(long[0].by_cause()))
    for whole in (*waits, *fetches):
        below = [span for span in telemetry.exporter.get_finished_spans() if span.parent == whole.context]
        assert sum(map(seconds, below)) == pytest.approx(seconds(whole), abs=1e-6)


def test_open_telemetry_counts_what_is_on_record() -> None:
    telemetry = Telemetry()
    run = TracedRun(objects=40, profile=ROUGH, sinks=[telemetry.sink]).run()
    counts, stats = telemetry.counts(), run.fetcher.stats
    for phase, waited in run.recorder.seconds.items():
        assert counts.get(("stoker.wait.time", str(phase)), 0.0) == pytest.approx(waited)
    assert counts["stoker.batches",] == 40
    assert counts["stoker.read",] == stats.bytes
    assert counts["stoker.requests", "answered"] + counts["stoker.requests", "lost"] == stats.requests


def test_no_url_is_in_a_span() -> None:
    telemetry = Telemetry()
    run = TracedRun(objects=3, sinks=[telemetry.sink]).run()
    for span in telemetry.exporter.get_finished_spans():
        assert run.store.url not in span.to_json()


def test_a_negative_least_wait_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_wait_seconds"):
        OpenTelemetrySink(min_wait_seconds=-1.0)


@pytest.mark.parametrize(
    ("kind", "library"), [(PrometheusSink, "prometheus_client"), (OpenTelemetrySink, "opentelemetry")]
)
def test_a_missing_library_is_reported_with_its_extra(
    kind: type[PrometheusSink] | type[OpenTelemetrySink], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=r"stoker\[telemetry\]"):
        kind()


def test_nothing_of_it_is_imported_before_it_is_requested() -> None:
    modules = "stoker._fetch.pipeline, stoker._trace.telemetry, stoker._trace.picture, stoker.cli"
    program = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert not {"opentelemetry", "prometheus_client", "matplotlib", "plotly"} & set(done.stdout.split())


def test_phases_are_names_that_a_label_may_have() -> None:
    assert all(str(phase).replace("_", "").isalpha() for phase in Phase)
