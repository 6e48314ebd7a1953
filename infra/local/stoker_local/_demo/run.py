"""The training demo: fills a bucket, trains with a plain DataLoader and with stoker, and compares them."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch

from stoker._base.meter import Meter, MeterReading, Operation
from stoker._base.sizes import format_bytes
from stoker._cost.prices import Prices
from stoker_local._bucket import BucketConfig
from stoker_local._demo import training
from stoker_local._demo.screen import Screen, align_columns, progress_bar
from stoker_local._demo.training import (
    Batches,
    RawImages,
    Timing,
    accuracy,
    choose_workers,
    new_model,
    open_dataloader,
    train,
)
from stoker_local._host import bucket_process
from stoker_local._network import NetworkShape
from stoker_local._s3.model import BucketSpec
from stoker_torch import Loader, LoaderStatistics

_BUCKET, _IMAGES, _PACKED = "digits", "images", "packed"
_BATCH_SIZE = 32
_SUPER_SAMPLE_BYTES = 16 << 10  # small, so that there are enough super-samples to fetch ahead
_MIN_ACCURACY = 0.97
SHAPE = NetworkShape(first_byte_seconds=0.020, connection_bytes_per_second=90e6)
_OPERATIONS = {
    "GetObject": Operation.GET,
    "HeadObject": Operation.HEAD,
    "ListObjectsV2": Operation.LIST,
    "PutObject": Operation.PUT,
    "DeleteObject": Operation.DELETE,
    "DeleteObjects": Operation.DELETE,
}


def run(epochs: int, seed: int, workers: int | None, screen: Screen) -> int:
    """Run the demo; return 0 if both trainings reached the accuracy and stoker's loader stalled less.

    Args:
        epochs: number of epochs of each training.
        seed: seed of the initial weights and of the orders.
        workers: number of the DataLoader's workers; None tries a few.
        screen: output.
    """
    train_digits, test_digits = training.load_train_and_test()
    bucket_config = BucketConfig(buckets=(BucketSpec(name=_BUCKET),), shape=SHAPE)
    with bucket_process(bucket_config) as bucket, patched_environment(bucket.environment()), single_threaded_torch():
        screen.item("bucket", "S3 on this machine: 20 ms to the first byte, 90 MB/s a connection")
        asyncio.run(_fill_bucket(train_digits, screen))
        workers = workers or _tune_workers(epochs, screen)
        _warm_up()

        def run_training(name: str, workers_text: str, opening: AbstractContextManager[Batches]) -> TrainingResult:
            """Train on the batches that ``opening`` opens, with the same model, bucket, test and display each time."""
            screen.draw(f"{name} starts ...")
            bucket.reset()
            model = new_model(seed)
            timing = train(opening, model, epochs, partial(_show, name, epochs, screen))
            reading = create_reading(f"s3://{_BUCKET}", bucket.counts())
            test_accuracy = accuracy(model, test_digits)
            return TrainingResult(
                name=name, workers_text=workers_text, accuracy=test_accuracy, timing=timing, reading=reading
            )

        opening = open_dataloader(_BUCKET, f"{_IMAGES}/", workers, _BATCH_SIZE, seed)
        direct = run_training("DataLoader", f"{workers} worker processes", opening)
        statistics: list[LoaderStatistics] = []
        loader = run_training("stoker's Loader", "no worker processes", _open_loader(epochs, seed, statistics.append))
    return _print_conclusion(direct, loader, statistics[0].bucket_wait_seconds, screen)


async def _fill_bucket(train_digits: training.Digits, screen: Screen) -> None:
    count = len(train_digits)
    raw = RawImages(train_digits, count)

    def show(verb: str, done: int) -> None:
        screen.draw(f"{verb} {progress_bar(done / count)} {done:,} of {count:,} images")

    images, packed = f"s3://{_BUCKET}/{_IMAGES}", f"s3://{_BUCKET}/{_PACKED}"
    await raw.put_all(images, report=lambda done: show("uploading", done))
    screen.item("images", f"{count:,} to train on, a PNG object each, {raw.mean_bytes:.0f} bytes on average")
    manifest = await training.pack(images, packed, _SUPER_SAMPLE_BYTES, lambda done: show("packing", done))
    mean_bytes = manifest.size_bytes / len(manifest)
    screen.item("packed", f"{len(manifest)} super-samples of {format_bytes(mean_bytes)}, in the same bucket")


def _tune_workers(epochs: int, screen: Screen) -> int:
    trials: list[str] = []

    def show(workers: int, seconds: float | None) -> None:
        if seconds is None:
            screen.draw(f"finding the best number of workers for the DataLoader: {workers} ...")
        else:
            trials.append(f"{seconds:.0f} s with {workers}")

    best = choose_workers(_BUCKET, f"{_IMAGES}/", _BATCH_SIZE, epochs, show)
    screen.item("workers", f"of the DataLoader: {', '.join(trials)} expected; it gets {best}")
    return best


def _warm_up() -> None:
    """Train one step on zeros, because PyTorch's lazy imports would otherwise count as time of the first training."""
    shape = (_BATCH_SIZE, training.IMAGE_SIDE, training.IMAGE_SIDE, 1)
    batch = {"image": torch.zeros(shape, dtype=torch.uint8), "label": torch.zeros(_BATCH_SIZE, dtype=torch.int64)}
    train(nullcontext([batch]), new_model(seed=0), epochs=1, on_step=lambda _: None)


@contextmanager
def _open_loader(epochs: int, seed: int, on_end: Callable[[LoaderStatistics], None]) -> Iterator[Batches]:
    with Loader(
        f"s3://{_BUCKET}/{_PACKED}",
        batch_size=_BATCH_SIZE,
        seed=seed,
        memory="64MB",
        columns=["image", "label"],
        decode=training.DECODE,
        epochs=epochs,
    ) as loader:
        yield loader
        on_end(loader.stats())


def _show(name: str, epochs: int, screen: Screen, step: Timing) -> None:
    text = (
        f"epoch {step.epoch}/{epochs}, loss {step.loss:.3f}, "
        f"{step.samples / step.loop_seconds:,.0f} images/s, waited {step.stall:.0%}"
    )
    screen.draw(f"{name} {progress_bar(step.fraction_done, 12)} {text}")
    if step.is_last_of_epoch:
        screen.milestone(f"{name}: {text}")


def _print_conclusion(
    direct: TrainingResult, loader: TrainingResult, bucket_wait_seconds: float, screen: Screen
) -> int:
    prices = Prices.load()
    screen.line()
    screen.rows(comparison_table(direct, loader, prices))
    screen.item("why", explain_difference(direct, loader, bucket_wait_seconds))
    store = prices.store(loader.reading.url)
    screen.item(
        "counted",
        "by the bucket; the DataLoader's bytes and dollars include listing the images once. Dollars are computed from "
        f"these counts at the list prices of {store.name}, {store.region}, {prices.date}.",
    )
    return screen.exit_code(find_failures(direct, loader, _MIN_ACCURACY))


@contextmanager
def patched_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for AWS clients, without the user's own settings, and a temporary PyTorch cache."""
    before = dict(os.environ)
    nowhere = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull, "NO_PROXY": "127.0.0.1"}
    with TemporaryDirectory(prefix="stoker-demo-", ignore_cleanup_errors=True) as cache:
        try:
            for name in before:
                if name.startswith("AWS_") or name.lower() == "no_proxy":
                    del os.environ[name]
            os.environ.update({**nowhere, "TORCHINDUCTOR_CACHE_DIR": cache, **variables})
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextmanager
def single_threaded_torch() -> Iterator[None]:
    """Limit PyTorch to one thread, so that data loading has another core and no idle thread spins."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # The warning recommends one worker per core; these wait for the network, and their best number is measured.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """Result of one training.

    Attributes:
        name: name of the loader.
        workers_text: description of its workers.
        accuracy: accuracy on the test images, 0 to 1.
        timing: timing of the training.
        reading: requests and bytes that the bucket counted.
    """

    name: str
    workers_text: str
    accuracy: float
    timing: Timing
    reading: MeterReading


def create_reading(url: str, counts: Mapping[str, Any]) -> MeterReading:
    """Convert the bucket's counters to a reading of stoker's meter, to which prices can be applied."""
    requests: Counter[Operation] = Counter(dict.fromkeys(Operation, 0))
    for name, count in counts["requests"].items():
        requests[_OPERATIONS[name]] += count
    return replace(Meter(url).snapshot(), requests=requests, read_bytes=counts["bytes_out"])


def comparison_table(direct: TrainingResult, loader: TrainingResult, prices: Prices) -> list[str]:
    """Return the lines of the comparison, narrower than 80 columns."""
    columns = [_cells(result, prices) for result in (direct, loader)]
    return align_columns(
        [(label, left, right) for (label, left), (_, right) in zip(*columns, strict=True)], header_rows=2
    )


def _cells(result: TrainingResult, prices: Prices) -> list[tuple[str, str]]:
    timing, reading = result.timing, result.reading
    return [
        ("", result.name),
        ("", result.workers_text),
        ("test accuracy", f"{result.accuracy:.1%}"),
        ("wait for data", f"{timing.wait_seconds:.2f} s"),
        ("stall", f"{timing.stall:.1%}"),
        ("GETs", f"{reading.requests[Operation.GET]:,}"),
        ("bytes", format_bytes(reading.read_bytes)),
        ("dollars", f"${prices.dollars(reading):.6f}"),
        ("time to first batch", f"{timing.first_batch_seconds:.2f} s"),
        ("total time", f"{timing.total_seconds:.2f} s"),
    ]


def explain_difference(direct: TrainingResult, loader: TrainingResult, bucket_wait_seconds: float) -> str:
    """Return the explanation of the difference.

    Args:
        direct: result with one object per image.
        loader: result with super-samples.
        bucket_wait_seconds: part of the loader's wait that was for the bucket, in seconds.
    """
    gets = [result.reading.requests[Operation.GET] for result in (direct, loader)]
    return (
        f"every GET waits for its first byte, however small the object is. The DataLoader sent {gets[0]:,} GETs, one "
        f"per image and epoch, at most one at a time per worker, and the workers compete with the model for the "
        f"processor. The Loader sent {gets[1]:,} GETs, ahead of time, while the model trained: it waited "
        f"{bucket_wait_seconds:.2f} s for the bucket, and the rest for gathering and decoding. These images are tiny; "
        "the larger images are, the more bytes matter and the less GETs do."
    )


def find_failures(direct: TrainingResult, loader: TrainingResult, min_accuracy: float) -> list[str]:
    """Return a message for every result that is not as the demo promises."""
    failures = [
        f"with the {result.name}, the model reached an accuracy of {result.accuracy:.1%}, not {min_accuracy:.0%}"
        for result in (direct, loader)
        if result.accuracy < min_accuracy
    ]
    if loader.timing.stall >= direct.timing.stall:
        failures.append(f"the {loader.name} stalled no less than the {direct.name}")
    return failures
