"""The demo of the functions: one cloud's configuration, the raw images, and whether an epoch has just them."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field

from stoker_local._bucket import BucketConfig
from stoker_local._demo.run import SHAPE
from stoker_local._demo.training import RawImages
from stoker_local._s3.model import BucketSpec
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
from stoker_torch import Loader

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
_BATCH = 64


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
        return BucketConfig(buckets=(BucketSpec(name="raw"), BucketSpec(name=DATASET_KEY[0])), shape=SHAPE)

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


@dataclass(slots=True)
class Epoch:
    """What an epoch of training has delivered.

    Attributes:
        times: how often each image came, by key.
        changed: keys of those whose bytes or label are not what was put.
        gets: that the loader sent.
        dollars: for these, at list prices.
    """

    times: Counter[str] = field(default_factory=Counter)
    changed: set[str] = field(default_factory=set)
    gets: int = 0
    dollars: float = 0.0

    def note(self, images: RawImages, key: str, content: bytes, label: int) -> None:
        """Note an image that was delivered."""
        self.times[key] += 1
        if images.contents.get(key) != content or key.partition("/")[0] != str(label):
            self.changed.add(key)

    def failures(self, images: RawImages) -> list[str]:
        """Return what is not as it should be, in words: every image exactly once, as it was put."""
        missing = images.contents.keys() - self.times.keys()
        repeated = [key for key, times in self.times.items() if times > 1]
        found = {"missing": missing, "delivered more than once": repeated, "not what was put": self.changed}
        return [f"{len(keys):,} images are {what}, such as {min(keys)}" for what, keys in found.items() if keys]


def read_epoch(images: RawImages, seed: int, stopped: threading.Event) -> Epoch:
    """Read one epoch as a training does, until its end or until it is stopped."""
    epoch = Epoch()
    with Loader(DATASET, batch_size=_BATCH, seed=seed, memory="64MB", epochs=1) as loader:
        for batch in loader:
            for key, content, label in zip(batch["path"], batch["image"], batch["label"].tolist(), strict=True):
                epoch.note(images, key, bytes(content), label)
            if stopped.is_set():
                break
        spent = loader.stats()
        epoch.gets, epoch.dollars = spent.get_requests, spent.dollars
    return epoch
