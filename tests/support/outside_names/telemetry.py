"""Metrics with their labels, spans and attributes, phases, and the contents of a trace file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from stoker.trace import ChromeTrace, OpenTelemetrySink, Phase, PrometheusSink
from support.faulty_store import StoreProfile
from support.outside_names.shape import shape
from support.tiers import SilentTier
from support.traced import TracedRun

__all__ = ["telemetry"]

_ROUGH = StoreProfile(
    late_fraction=0.1, probability={"throttle_bare": 0.1, "corrupt": 0.05}, total_bytes_per_second=2e6
)


def telemetry(folder: Path) -> Iterator[str]:
    """Return the telemetry of a run with faults, in virtual time."""
    for phase in Phase:
        yield f"phase {phase.name} = {phase.value}"
    with PrometheusSink() as prometheus, ChromeTrace(folder / "trace.json", clock=lambda: 0.0) as chrome:
        spans, metrics = InMemorySpanExporter(), InMemoryMetricReader()
        tracers, meters = TracerProvider(), MeterProvider(metric_readers=[metrics])
        tracers.add_span_processor(SimpleSpanProcessor(spans))
        open_telemetry = OpenTelemetrySink(tracer_provider=tracers, meter_provider=meters)
        TracedRun(objects=40, profile=_ROUGH, compute_seconds=0.05, sinks=[prometheus, chrome, open_telemetry]).run()
        TracedRun(tiers=[SilentTier("silent")], slots=3, sinks=[prometheus, chrome, open_telemetry]).run()
        yield from _prometheus(prometheus)
        yield from _spans(spans)
        yield from _metrics(metrics)
        meters.shutdown()
        tracers.shutdown()
    yield from _chrome(folder / "trace.json")


def _prometheus(sink: PrometheusSink) -> Iterator[str]:
    for family in sink.registry.collect():
        yield f"prometheus {family.name}: {family.type}"
        for sample in family.samples:
            if sample.name.endswith("_created"):  # the library's own, which one of its variables turns off
                continue
            labels = ",".join(
                name if name in ("phase", "le") else f"{name}={value}" for name, value in sample.labels.items()
            )
            yield f"prometheus sample {sample.name}{{{labels}}}"


def _spans(exporter: InMemorySpanExporter) -> Iterator[str]:
    for span in exporter.get_finished_spans():
        yield f"OpenTelemetry span {span.name}"
        for name in span.attributes or ():
            yield f"OpenTelemetry span {span.name} attribute {name}"


def _metrics(reader: InMemoryMetricReader) -> Iterator[str]:
    found = reader.get_metrics_data()
    assert found is not None
    for resource in found.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                yield f"OpenTelemetry metric {scope.scope.name}: {metric.name} ({metric.unit})"
                for point in metric.data.data_points:
                    for name in point.attributes or ():
                        yield f"OpenTelemetry metric {scope.scope.name}: {metric.name} attribute {name}"


def _chrome(file: Path) -> Iterator[str]:
    for event in json.loads(file.read_text(encoding="ascii")):
        kind = event.get("cat", "about")
        yield from shape(f"trace file {kind}", event)
        if kind in ("request", "about"):
            yield f"trace file {kind} name {event['name']}"
