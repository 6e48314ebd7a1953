"""What the demo of the functions does, as one cloud's configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass

from stoker_local._config import BucketConfig
from stoker_local._s3.model import BucketSpec
from stoker_local._shape import Shape
from stoker_local.functions import (
    EventSource,
    FunctionCloudConfig,
    FunctionFaultKind,
    FunctionFaultPlan,
    FunctionSpec,
    Notification,
    QueueSpec,
    Schedule,
)

__all__ = ["COMPACT", "DATASET", "DATASET_KEY", "INGEST", "MEMORY_MB", "RAW", "FunctionDemoConfig"]

RAW, DATASET = "s3://raw/images", "s3://stoker/digits"
DATASET_KEY = ("stoker", "digits/")
"""The bucket of the data set, and what its keys begin with."""
INGEST, COMMIT, COMPACT = "ingest", "commit", "compact"
MEMORY_MB = 1769  # as deployed: one processor
_CLASSES = [str(digit) for digit in range(10)]
_INGEST_SECONDS = 6.0  # short, since the messages of one that dies come back after so long
_OTHER_SECONDS = 60.0
_TRICKLED_BYTES = 8 << 10  # small, so that there is something to compact
_CHANCES = {
    FunctionFaultKind.KILL: 0.12,
    FunctionFaultKind.FREEZE: 0.10,
    FunctionFaultKind.DUPLICATE: 0.10,
    FunctionFaultKind.RECLAIM: 0.05,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionDemoConfig:
    """What the demo does.

    Attributes:
        images: how many raw objects are put.
        images_per_second: how fast they come.
        seed: of the faults.
        instances: of ingest, at most.
        messages: that one invocation of ingest gets, at most.
        super_sample_bytes: of what compaction makes.
        limit_seconds: after which it is given up.
    """

    images: int = 2500
    images_per_second: float = 250.0
    seed: int = 7
    instances: int = 3
    messages: int = 80
    super_sample_bytes: int = 64 << 10
    limit_seconds: float = 300.0

    def bucket(self) -> BucketConfig:
        """Return the buckets: for raw images, and for the data set; as far away as a cloud's."""
        shape = Shape(first_byte_seconds=0.020, connection_bytes_per_second=90e6)
        return BucketConfig(buckets=(BucketSpec(name="raw"), BucketSpec(name=DATASET_KEY[0])), shape=shape)

    def cloud(self) -> FunctionCloudConfig:
        """Return the functions and what calls them: as they are deployed, with shorter times."""
        return FunctionCloudConfig(
            functions=(_function(INGEST, self.instances), _function(COMMIT, 1), _function(COMPACT, 1)),
            queues=(
                QueueSpec(
                    name="raw",
                    visibility_seconds=_INGEST_SECONDS,
                    max_receives=50,
                    dead_letters="dead",
                    duplicate_probability=0.02,
                ),
                QueueSpec(name="dead"),
            ),
            notifications=(Notification(bucket="raw", prefix="images/", queue="raw"),),
            sources=(
                EventSource(
                    queue="raw",
                    function=INGEST,
                    batch_size=self.messages,
                    window_seconds=0.3,
                    concurrency=self.instances,
                ),
            ),
            schedules=(Schedule(name="commit", function=COMMIT, rate="rate(2 seconds)", input={"dataset": DATASET}),),
            init_seconds=60.0,
            seed=self.seed,
        )

    def faults(self) -> FunctionFaultPlan:
        """Return what happens to the functions' instances while they work."""
        return FunctionFaultPlan(probabilities=_CHANCES, within_seconds=0.12, freeze_seconds=0.5, seed=self.seed)


def _function(name: str, concurrency: int) -> FunctionSpec:
    ingest = {
        "dataset": "digits",
        "kind": "image-folder",
        "classes": _CLASSES,
        "super_sample_bytes": _TRICKLED_BYTES,
    }
    return FunctionSpec(
        name=name,
        handler=f"stoker_functions.aws.{name}",
        memory_mb=MEMORY_MB,
        timeout_seconds=_INGEST_SECONDS if name == INGEST else _OTHER_SECONDS,
        concurrency=concurrency,
        environment={
            "STOKER_DATASETS": f"digits={DATASET}",
            "STOKER_SOURCES": RAW,
            "STOKER_INGEST": json.dumps(ingest),
        },
    )
