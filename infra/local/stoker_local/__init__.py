"""A cloud on this machine: a bucket that can be slow and faulty, for tests, benchmarks and the demo."""

from stoker_local.bucket import LocalBucket
from stoker_local.config import BucketConfig
from stoker_local.faults import Fault, FaultKind, FaultPlan
from stoker_local.gcs import GcsConfig, LocalGcs
from stoker_local.host import BucketProcess, bucket_process, running_bucket, running_gcs
from stoker_local.s3.model import BucketSpec
from stoker_local.s3.signature import KeyPair
from stoker_local.shape import PROFILES, Shape

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
