"""A cloud on this machine: a bucket that can be slow and faulty, for tests, benchmarks and the demo."""

from typing import TYPE_CHECKING

from stoker_local._bucket import LocalBucket
from stoker_local._config import BucketConfig
from stoker_local._faults import Fault, FaultKind, FaultPlan
from stoker_local._host import BucketProcess, bucket_process, running_bucket, running_server
from stoker_local._s3.model import BucketSpec
from stoker_local._s3.signature import KeyPair
from stoker_local._shape import PROFILES, Shape

if TYPE_CHECKING:
    from stoker_local._gcs import GcsConfig, LocalGcs, running_gcs

__all__ = [
    "PROFILES",
    "BucketConfig",
    "BucketProcess",
    "BucketSpec",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "GcsConfig",
    "KeyPair",
    "LocalBucket",
    "LocalGcs",
    "Shape",
    "bucket_process",
    "running_bucket",
    "running_gcs",
    "running_server",
]


def __getattr__(name: str) -> object:
    """Import the local GCS when it is first used: ``stoker --help`` loads this package, and aiohttp takes 0.1 s."""
    if name in ("GcsConfig", "LocalGcs", "running_gcs"):
        from stoker_local import _gcs

        return getattr(_gcs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
