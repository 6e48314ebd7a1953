"""Planning ahead: the simulator, which runs the fetcher itself against modelled buckets and machines."""

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
