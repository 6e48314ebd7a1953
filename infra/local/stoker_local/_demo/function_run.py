"""``stoker demo --functions``: functions pack arriving images despite faults, and training reads the result."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

from stoker._base.meter import MeterReading, Operation
from stoker._base.threads import run_in_thread
from stoker._cost.prices import Prices
from stoker._format.manifest import POINTER_KEY, Manifest
from stoker.errors import MissingExtraError
from stoker_local._bucket import BucketConfig, LocalBucket
from stoker_local._demo import training
from stoker_local._demo.run import SHAPE, create_reading, patched_environment, single_threaded_torch
from stoker_local._demo.screen import Screen, align_columns, progress_bar
from stoker_local._demo.training import RawImages
from stoker_local._host import background_tasks
from stoker_local._s3.model import BucketSpec
from stoker_local.functions import (
    EventSource,
    FunctionCloud,
    FunctionCloudConfig,
    FunctionEvent,
    FunctionFaultKind,
    FunctionFaultPlan,
    FunctionSpec,
    FunctionStatistics,
    Notification,
    QueueSpec,
    Schedule,
    function_cloud,
    sum_statistics,
)
from stoker_torch import Loader

RAW, DATASET = "s3://raw/images", "s3://stoker/digits"
DATASET_KEY = ("stoker", "digits/")
"""Bucket of the data set, and prefix of its keys."""
INGEST, COMMIT, COMPACT = "ingest", "commit", "compact"
MEMORY_MB = 1769  # as in a deployment: one CPU
_IMAGES_PER_SECOND, _LIMIT_SECONDS = 250.0, 300.0
_INSTANCES, _MESSAGES = 3, 80  # maximum instances of ingest, and maximum messages of one invocation
_COMPACT_BYTES = 64 << 10
_CLASSES = [str(digit) for digit in range(10)]
_INGEST_SECONDS = 6.0  # short, because the messages of a killed instance become visible again only after it
_OTHER_SECONDS = 60.0
_INGEST_BYTES = 8 << 10  # small, so that there are super-samples to compact
_FAULT_PROBABILITIES = {
    FunctionFaultKind.KILL: 0.12,
    FunctionFaultKind.FREEZE: 0.10,
    FunctionFaultKind.DUPLICATE: 0.10,
    FunctionFaultKind.RECLAIM: 0.05,
}
_BATCH_SIZE = 64
_REFRESH_SECONDS = 0.1
_LOG_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionDemoConfig:
    """Configuration of the demo.

    Attributes:
        images: number of raw images.
        seed: seed of the faults.
    """

    images: int = 2500
    seed: int = 7

    def bucket(self) -> BucketConfig:
        """Return the buckets of the raw images and of the data set, with the delays of a cloud."""
        return BucketConfig(buckets=(BucketSpec(name="raw"), BucketSpec(name=DATASET_KEY[0])), shape=SHAPE)

    def cloud(self) -> FunctionCloudConfig:
        """Return the functions and their triggers, as in a deployment, but with shorter times."""
        return FunctionCloudConfig(
            functions=(_function(INGEST, _INSTANCES), _function(COMMIT, 1), _function(COMPACT, 1)),
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
                    batch_size=_MESSAGES,
                    window_seconds=0.3,
                    concurrency=_INSTANCES,
                ),
            ),
            schedules=(Schedule(name="commit", function=COMMIT, rate="rate(2 seconds)", input={"dataset": DATASET}),),
            init_seconds=60.0,
            seed=self.seed,
        )

    def faults(self) -> FunctionFaultPlan:
        """Return the faults that are injected into the functions."""
        return FunctionFaultPlan(
            probabilities=_FAULT_PROBABILITIES, within_seconds=0.12, freeze_seconds=0.5, seed=self.seed
        )


def _function(name: str, concurrency: int) -> FunctionSpec:
    ingest = {
        "dataset": "digits",
        "kind": "image-folder",
        "classes": _CLASSES,
        "super_sample_bytes": _INGEST_BYTES,
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
class EpochDelivery:
    """The samples that one epoch delivered.

    Attributes:
        deliveries: key → number of deliveries of the image.
        altered_keys: keys of images whose bytes or label differ from the uploaded ones.
        gets: number of GETs that the loader sent.
        dollars: cost of the GETs at list prices, in US dollars.
    """

    deliveries: Counter[str] = field(default_factory=Counter)
    altered_keys: set[str] = field(default_factory=set)
    gets: int = 0
    dollars: float = 0.0

    def record(self, images: RawImages, key: str, content: bytes, label: int) -> None:
        """Record a delivered image."""
        self.deliveries[key] += 1
        if images.contents.get(key) != content or key.partition("/")[0] != str(label):
            self.altered_keys.add(key)

    def describe_failures(self, images: RawImages) -> list[str]:
        """Return a message for every way in which the epoch does not contain each image exactly once, unchanged."""
        missing = images.contents.keys() - self.deliveries.keys()
        repeated = [key for key, times in self.deliveries.items() if times > 1]
        keys_by_fault = {
            "missing": missing,
            "delivered more than once": repeated,
            "not what was put": self.altered_keys,
        }
        return [
            f"{len(keys):,} images are {fault}, such as {min(keys)}" for fault, keys in keys_by_fault.items() if keys
        ]


def read_epoch(images: RawImages, seed: int, stop: threading.Event) -> EpochDelivery:
    """Read one epoch with a Loader, until its end or until ``stop`` is set."""
    epoch = EpochDelivery()
    with Loader(DATASET, batch_size=_BATCH_SIZE, seed=seed, memory="64MB", epochs=1) as loader:
        for batch in loader:
            for key, content, label in zip(batch["path"], batch["image"], batch["label"].tolist(), strict=True):
                epoch.record(images, key, bytes(content), label)
            if stop.is_set():
                break
        spent = loader.stats()
        epoch.gets, epoch.dollars = spent.get_requests, spent.dollars
    return epoch


def run(config: FunctionDemoConfig, screen: Screen) -> int:
    """Run the demo; return 0 if the epoch has every image exactly once, unchanged.

    Raises:
        ConfigError: ``config.images`` is larger than the number of images available.
        MissingExtraError: Lambda's runtime client, which the functions need, is not installed.
    """
    if find_spec("awslambdaric") is None:
        raise MissingExtraError("the functions need awslambdaric; pip install 'stoker[local]'")
    train_digits, _ = training.load_train_and_test()
    images = RawImages(train_digits, config.images)
    with single_threaded_torch():
        return asyncio.run(_run_demo(config, images, screen))


async def _run_demo(config: FunctionDemoConfig, images: RawImages, screen: Screen) -> int:
    async with LocalBucket(config.bucket()) as bucket:
        with patched_environment(bucket.environment()):
            async with function_cloud(config.cloud(), bucket=bucket) as cloud:
                prices = Prices.load()
                observer = Observer(bucket, cloud, images)
                _print_introduction(config, images, screen)
                try:
                    async with asyncio.timeout(_LIMIT_SECONDS) as limit, _show_progress(observer, screen, prices):
                        packed, epoch = await _run_chain(config, images, cloud, observer)
                except TimeoutError:
                    if not limit.expired():
                        raise
                    screen.rows(display_lines(observer.snapshot(), prices))
                    return screen.exit_code([f"the demo did not finish within {_LIMIT_SECONDS:.0f} s"])
                screen.rows(function_table(observer.snapshot().functions))
                return _print_conclusion(images, packed, epoch, screen, prices)


def _print_introduction(config: FunctionDemoConfig, images: RawImages, screen: Screen) -> None:
    """Print the parts of the demo."""
    screen.item("bucket", "S3 on this machine: 20 ms to the first byte, 90 MB/s a connection")
    screen.item("images", f"{len(images):,}, a PNG object each, {images.mean_bytes:.0f} bytes on average")
    screen.item(
        "chain",
        f"a queue announces each image; the function ingest packs up to {_MESSAGES} at a time, commit publishes a new "
        "version every two seconds, and compact merges small super-samples into large ones",
    )
    chances = ", ".join(f"{kind} {chance:.0%}" for kind, chance in config.faults().probabilities.items())
    screen.item("faults", f"probabilities per invocation: {chances}")
    screen.line()


async def _run_chain(
    config: FunctionDemoConfig, images: RawImages, cloud: FunctionCloud, observer: Observer
) -> tuple[Snapshot, EpochDelivery]:
    """Run all phases; return the snapshot before the epoch, and the samples that the epoch delivered."""
    cloud.inject(config.faults())
    observer.phase = "raw images arrive, functions pack them"
    await images.put_all(RAW, per_second=_IMAGES_PER_SECOND)
    observer.phase = "functions pack what is left"
    await cloud.queues["raw"].wait_until_empty()
    while observer.snapshot().visible_samples < len(images):  # noqa: ASYNC110  (a function's commit has no event)
        await asyncio.sleep(_REFRESH_SECONDS)
    observer.phase = "small super-samples become large ones"
    event = {"dataset": DATASET, "super_sample_bytes": _COMPACT_BYTES}
    while (await cloud.invoke(COMPACT, event, waits=True)).error_type:
        pass
    packed = observer.snapshot()
    observer.phase = "training reads an epoch"
    return packed, await run_in_thread(partial(read_epoch, images, config.seed))


def _print_conclusion(images: RawImages, packed: Snapshot, epoch: EpochDelivery, screen: Screen, prices: Prices) -> int:
    """Print the bill and the check; return the exit code."""
    screen.rows(bill_table(packed, epoch, prices))
    store, function = prices.store(DATASET), prices.functions["lambda"]
    screen.item(
        "counted",
        "requests by the bucket, without the uploads of the raw images, which are the same in both columns, and those "
        f"of the epoch by the loader; GB-s by the function cloud with {MEMORY_MB:,} MB per instance, including cold "
        f"starts, as measured on this machine, which also runs everything else. List prices of {store.name} and "
        f"{function.name}, {store.region}, {prices.date}.",
    )
    failures = epoch.describe_failures(images)
    if not failures:
        delivered = sum(epoch.deliveries.values())
        screen.item("checked", f"the epoch had {delivered:,} samples: every image exactly once, unchanged")
    return screen.exit_code(failures)


@asynccontextmanager
async def _show_progress(observer: Observer, screen: Screen, prices: Prices) -> AsyncIterator[None]:
    """Show the progress until the block is left."""

    async def show() -> None:
        while True:
            await asyncio.sleep(_REFRESH_SECONDS if screen.is_terminal else _LOG_SECONDS)
            now = observer.snapshot()
            screen.draw(*display_lines(now, prices))
            screen.milestone(summary_line(now))

    async with background_tasks() as tasks:
        tasks.start(show())
        yield


_MAX_SHOWN_EVENTS = 5
_EVENT_TEXTS = {
    "cold-start": "starts cold",
    "kill": "is killed during an invocation",
    "freeze": "is frozen during an invocation",
    "duplicate": "receives an event twice",
    "reclaim": "is reclaimed while idle",
    "error": "fails: {detail}",
    "throttle": "is throttled",
    "dropped": "loses an event: {detail}",
}
_BUCKET, _PREFIX = DATASET_KEY


def display_lines(now: Snapshot, prices: Prices) -> list[str]:
    """Return the lines of the redrawn display, at most 78 columns wide."""
    functions, requests = sum_statistics(now.functions).dollars, prices.dollars(now.requests)
    put_one_by_one = per_sample_dollars(now.visible_samples, prices, Operation.GET, Operation.PUT)
    return [
        f"{now.seconds:5.1f} s  {now.phase}",
        "",
        f"put      {progress_bar(now.put_images / now.images)} {now.put_images:,} of {now.images:,} raw images",
        f"queue    {now.waiting:,} messages waiting, {now.delivered:,} delivered, {now.dead_letters:,} given up",
        "",
        *function_table(now.functions),
        "",
        f"packed   {now.super_samples:,} super-samples, {now.visible_super_samples:,} of them in version {now.version}",
        f"visible  {progress_bar(now.visible_samples / now.images)} {now.visible_samples:,} samples",
        f"bill     ${functions + requests:.6f}: functions ${functions:.6f}, requests ${requests:.6f};",
        f"         a GET and a PUT for each visible sample: ${put_one_by_one:.6f}",
        "",
        *_event_lines(now.events),
    ]


def summary_line(now: Snapshot) -> str:
    """Return a snapshot as one line."""
    all_of_them = sum_statistics(now.functions)
    killed, frozen = (all_of_them.faults.get(kind, 0) for kind in ("kill", "freeze"))
    return (
        f"{now.seconds:3.0f} s: {now.put_images:,} put, {now.waiting + now.delivered:,} queued; "
        f"{all_of_them.busy} of {all_of_them.instances} busy, {killed} killed, {frozen} frozen; "
        f"v{now.version}: {now.visible_samples:,}"
    )


def function_table(functions: Mapping[str, FunctionStatistics]) -> list[str]:
    """Return the lines of a table with each function's statistics."""
    head = ["", "alive", "busy", "cold starts", "calls", "errors", "killed", "frozen", "twice", "GB-s"]
    rows = [[name, *_cells(figures)] for name, figures in functions.items()]
    return align_columns([head, *rows])


def _cells(figures: FunctionStatistics) -> list[str]:
    faults = figures.faults
    counts = [figures.instances, figures.busy, figures.cold_starts, figures.invocations, figures.errors]
    counts += [faults.get(kind, 0) for kind in ("kill", "freeze", "duplicate")]
    return [*(f"{count:,}" for count in counts), f"{figures.gb_seconds:,.0f}"]


def _event_lines(events: Sequence[FunctionEvent]) -> list[str]:
    """Return the newest events as text, padded to a constant number of lines."""
    worth_telling = [each for each in events if each.kind in _EVENT_TEXTS and (each.instance or each.kind != "reclaim")]
    lines = [
        f"{each.seconds:5.1f} s  {each.instance or each.function} {_EVENT_TEXTS[each.kind].format(detail=each.detail)}"
        for each in worth_telling[-_MAX_SHOWN_EVENTS:]
    ]
    return lines + [""] * (_MAX_SHOWN_EVENTS - len(lines))


def bill_table(packed: Snapshot, epoch: EpochDelivery, prices: Prices) -> list[str]:
    """Return the lines of a table that compares the costs of super-samples and single objects.

    Args:
        packed: snapshot after everything was packed.
        epoch: epoch that was read after it.
        prices: list prices.
    """
    samples, gets, puts = packed.images, Operation.GET, Operation.PUT
    functions, requests = sum_statistics(packed.functions), packed.requests.requests
    each = per_sample_dollars(samples, prices, gets, puts)
    rows = [
        ["", "packed by functions", "an object a sample"],
        ["objects to train from", f"{packed.visible_super_samples:,}", f"{samples:,}"],
        ["GETs until they are there", f"{requests[gets]:,}", f"{samples:,}"],
        ["PUTs and LISTs", f"{requests[puts] + requests[Operation.LIST]:,}", f"{samples:,}"],
        ["dollars for requests", f"${prices.dollars(packed.requests):.6f}", f"${each:.6f}"],
        [f"dollars for {functions.gb_seconds:.1f} GB-s", f"${functions.dollars:.6f}", "not counted"],
        ["GETs of an epoch", f"{epoch.gets:,}", f"{samples:,}"],
        ["dollars of an epoch", f"${epoch.dollars:.6f}", f"${per_sample_dollars(samples, prices, gets):.6f}"],
    ]
    return align_columns(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of the demo at one moment.

    Attributes:
        phase: current phase, as text.
        seconds: time since the start, in seconds.
        images: total number of raw images.
        put_images: number of uploaded raw images.
        waiting: number of visible messages in the queue.
        delivered: number of hidden messages, which a function has, or had when it was killed.
        dead_letters: number of messages in the dead-letter queue.
        functions: function name → statistics.
        super_samples: number of super-samples in the bucket, visible or not.
        version: version of the manifest; 0 before the first.
        visible_super_samples: number of super-samples in the manifest.
        visible_samples: number of samples in the manifest.
        requests: requests to the bucket, without the uploads of the raw images.
        events: events of the functions, oldest first.
    """

    phase: str
    seconds: float
    images: int
    put_images: int
    waiting: int
    delivered: int
    dead_letters: int
    functions: Mapping[str, FunctionStatistics]
    super_samples: int
    version: int
    visible_super_samples: int
    visible_samples: int
    requests: MeterReading
    events: Sequence[FunctionEvent]


class Observer:
    """Reads the state of the bucket and the function cloud in memory, without requests that would count.

    Attributes:
        phase: current phase, as text.
    """

    def __init__(self, bucket: LocalBucket, cloud: FunctionCloud, images: RawImages) -> None:
        self.phase = ""
        self._bucket, self._cloud, self._images = bucket, cloud, images
        self._started_at = asyncio.get_running_loop().time()
        self._manifest: tuple[str, Manifest | None] = ("", None)

    def snapshot(self) -> Snapshot:
        """Return the current state."""
        queue, manifest = self._cloud.queues["raw"], self._newest_manifest()
        return Snapshot(
            phase=self.phase,
            seconds=asyncio.get_running_loop().time() - self._started_at,
            images=len(self._images),
            put_images=self._images.completed_puts,
            waiting=len(queue.bodies),
            delivered=len(queue) - len(queue.bodies),
            dead_letters=len(self._cloud.queues["dead"]),
            functions=self._cloud.statistics(),
            super_samples=sum(key.startswith(f"{_PREFIX}data/") for key in self._bucket.objects[_BUCKET]),
            version=0 if manifest is None else manifest.version,
            visible_super_samples=0 if manifest is None else len(manifest),
            visible_samples=0 if manifest is None else manifest.samples,
            requests=bucket_reading(self._bucket.counts.as_dict(), raw_puts=self._images.started_puts),
            events=self._cloud.events(),
        )

    def _newest_manifest(self) -> Manifest | None:
        stored = self._bucket.objects[_BUCKET].get(f"{_PREFIX}{POINTER_KEY}")
        if stored is not None and stored.tag != self._manifest[0]:
            self._manifest = stored.tag, Manifest.from_bytes(stored.data)
        return self._manifest[1]


def bucket_reading(counts: Mapping[str, Any], *, raw_puts: int = 0) -> MeterReading:
    """Convert the bucket's counters to a reading, without the uploads of the raw images.

    Args:
        counts: counters as :meth:`~stoker_local._bucket.BucketCounters.as_dict` returns them.
        raw_puts: number of started uploads of raw images, which are not counted.
    """
    requests = dict(counts["requests"])
    requests["PutObject"] = max(0, requests.get("PutObject", 0) - raw_puts)
    return create_reading(DATASET, {**counts, "requests": requests})


def per_sample_dollars(samples: int, prices: Prices, *operations: Operation) -> float:
    """Return the cost of one request of each operation per sample, in US dollars."""
    store = prices.store(DATASET)
    return samples * sum(store.request_dollars(operation) for operation in operations)
