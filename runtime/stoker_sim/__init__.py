"""Simulator that runs the fetcher's own code against models of buckets and machines, on a virtual clock.

The commands ``stoker plan``, ``stoker simulate`` and ``stoker allocate`` use it. In programs it gives bucket models:

Example:
    >>> from stoker_sim import BucketModel
    >>> BucketModel(connection_bytes_per_second=50e6, requests_per_second=3500).total_bytes_per_second
    inf
"""

from typing import TYPE_CHECKING, Any

from stoker._base.plugins import load_name

__all__ = ["BucketModel", "recorded_bucket", "recorded_latency"]

_NAMES_OF = {
    "stoker._diagnostics.latency": "BucketModel",
    "stoker_sim._bucket": "recorded_bucket recorded_latency",
}

if TYPE_CHECKING:
    from stoker._diagnostics.latency import BucketModel
    from stoker_sim._bucket import recorded_bucket, recorded_latency
else:

    def __getattr__(name: str) -> Any:
        return load_name(__name__, name, _NAMES_OF)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
