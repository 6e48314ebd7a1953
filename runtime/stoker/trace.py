"""Traces of what the training loop waited for: sinks that write or export them, and a reader of trace files.

OpenTelemetry and Prometheus are imported when one of their sinks is created.

Example:
    >>> from stoker_torch import Loader
    >>> with ChromeTrace("trace.json", limit="1GB") as sink:
    ...     with Loader("s3://bucket/train", batch_size=32, trace=sink) as loader:
    ...         batches = len(list(loader))
"""

from stoker._base.fetch_record import DeviceCopy, Fetch, Phase, Request, Span
from stoker._base.recorder import Wait
from stoker._trace.chrome import ChromeTrace
from stoker._trace.recording import read_trace
from stoker._trace.telemetry import OpenTelemetrySink, PrometheusSink

__all__ = [
    "ChromeTrace",
    "DeviceCopy",
    "Fetch",
    "OpenTelemetrySink",
    "Phase",
    "PrometheusSink",
    "Request",
    "Span",
    "Wait",
    "read_trace",
]
