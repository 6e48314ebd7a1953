"""A cloud on this machine: a bucket that can be slow and faulty, for tests, benchmarks and the demo."""

from stoker_local._bucket import LocalBucket
from stoker_local._config import BucketConfig
from stoker_local._faults import Fault, FaultKind, FaultPlan
from stoker_local._gcs import GcsConfig, LocalGcs
from stoker_local._host import BucketProcess, bucket_process, running_bucket, running_gcs
from stoker_local._s3.model import BucketSpec
from stoker_local._s3.signature import KeyPair
from stoker_local._shape import PROFILES, Shape

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
]
