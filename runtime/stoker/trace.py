"""What the training loop waited for: sinks that write or export it, and the reader of what was written.

OpenTelemetry and Prometheus are imported when a sink of theirs is made.
"""

from stoker._base.fetch_record import Fetch, Phase, Request, Span
from stoker._base.recorder import Wait
from stoker._trace.chrome import ChromeTrace
from stoker._trace.recording import read_trace
from stoker._trace.telemetry import OpenTelemetrySink, PrometheusSink

__all__ = [
    "ChromeTrace",
    "Fetch",
    "OpenTelemetrySink",
    "Phase",
    "PrometheusSink",
    "Request",
    "Span",
    "Wait",
    "read_trace",
]
