"""A cloud on this machine: S3 and GCS servers with configurable delays and faults, for tests, benchmarks and the demo.

Names are imported on first use, because ``stoker --help`` imports this package for the ``demo`` command.

Example:
    >>> from stoker_local import running_bucket
    >>> with running_bucket() as bucket:
    ...     _ = bucket.put("stoker", "hello.txt", b"hello")
    ...     list(bucket.objects["stoker"])
    ['hello.txt']
"""

from typing import TYPE_CHECKING, Any

from stoker._base.plugins import load_name
from stoker._deprecation import declare_renamed

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
    "NetworkShape",
    "bucket_process",
    "running_bucket",
    "running_gcs",
    "running_server",
]

_NAMES_OF = {
    "stoker_local._bucket": "BucketConfig LocalBucket",
    "stoker_local._gcs": "GcsConfig LocalGcs running_gcs",
    "stoker_local._host": "BucketProcess bucket_process running_bucket running_server",
    "stoker_local._s3.model": "BucketSpec",
    "stoker_local._s3.signature": "KeyPair",
    "stoker_local._network": "PROFILES Fault FaultKind FaultPlan NetworkShape",
}
"""Module → public names that it defines, separated by spaces."""

declare_renamed(__name__, {"Shape": "NetworkShape"})

if TYPE_CHECKING:
    from stoker_local._bucket import BucketConfig, LocalBucket
    from stoker_local._gcs import GcsConfig, LocalGcs, running_gcs
    from stoker_local._host import BucketProcess, bucket_process, running_bucket, running_server
    from stoker_local._network import PROFILES, Fault, FaultKind, FaultPlan, NetworkShape
    from stoker_local._s3.model import BucketSpec
    from stoker_local._s3.signature import KeyPair
else:  # hidden from type checkers, which would accept any name if they saw __getattr__

    def __getattr__(name: str) -> Any:
        return load_name(__name__, name, _NAMES_OF)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
