"""The demo from the empty bucket to the table."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from stoker.images import ImageDecoder
from stoker.prices import Operation, Prices
from stoker.sizes import format_bytes
from stoker_local.config import BucketConfig
from stoker_local.demo import digits
from stoker_local.demo.direct import open_direct, tune
from stoker_local.demo.screen import Screen, bar
from stoker_local.demo.table import Result, read_counts, table
from stoker_local.demo.training import Batches, Step, accuracy, new_model, train
from stoker_local.host import BucketProcess, bucket_process
from stoker_local.s3.model import BucketSpec
from stoker_local.shape import Shape
from stoker_torch import Loader

__all__ = ["DemoConfig", "run"]

_BUCKET, _IMAGES, _PACKED = "digits", "images", "packed"
_SHAPE = Shape(first_byte_seconds=0.020, connection_bytes_per_second=90e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What the demo does.

    Attributes:
        epochs: of both trainings.
        seed: of the initial weights and of the orders.
        workers: of the DataLoader; None tries a few.
        batch_size: of both trainings.
        super_sample_bytes: small, so that there is something to fetch ahead.
        least_accuracy: that both must reach.
    """

    epochs: int = 8
    seed: int = 7
    workers: int | None = None
    batch_size: int = 32
    super_sample_bytes: int = 16 << 10
    least_accuracy: float = 0.97


def run(config: DemoConfig, screen: Screen) -> int:
    """Run the demo; return 0 if both ways learned and the loader waited less."""
    train_digits, test_digits = digits.load()
    bucket_config = BucketConfig(buckets=(BucketSpec(name=_BUCKET),), shape=_SHAPE)
    with bucket_process(bucket_config) as bucket, _environment(bucket.environment()), _quiet_torch():
        screen.item("bucket", "S3 on this machine: 20 ms to the first byte, 90 MB/s a connection")
        _fill(train_digits, config, screen)
        workers = config.workers or _tuned(config, screen)
        contest = _Contest(config, bucket, test_digits, screen)
        opening = open_direct(_BUCKET, f"{_IMAGES}/", workers, config.batch_size, config.seed)
        direct = contest.result("DataLoader", f"{workers} worker processes", opening)
        loader = contest.result("stoker's Loader", "no worker processes", _open_loader(config))
    return _conclude(direct, loader, config, screen)


def _fill(train_digits: digits.Digits, config: DemoConfig, screen: Screen) -> None:
    count = len(train_digits)

    def show(verb: str, done: int) -> None:
        screen.draw(f"{verb} {bar(done / count)} {done:,} of {count:,} images")

    size_bytes = asyncio.run(
        digits.upload(train_digits, f"s3://{_BUCKET}/{_IMAGES}", lambda done: show("uploading", done))
    )
    screen.item("images", f"{count:,} to train on, a PNG object each, {size_bytes / count:.0f} bytes on average")
    manifest = asyncio.run(
        digits.pack(
            f"s3://{_BUCKET}/{_IMAGES}",
            f"s3://{_BUCKET}/{_PACKED}",
            config.super_sample_bytes,
            lambda done: show("packing", done),
        )
    )
    mean_bytes = manifest.size_bytes / len(manifest)
    screen.item("packed", f"{len(manifest)} super-samples of {format_bytes(mean_bytes)}, in the same bucket")


def _tuned(config: DemoConfig, screen: Screen) -> int:
    rates: dict[int, float] = {}

    def show(workers: int, rate: float | None) -> None:
        if rate is None:
            screen.draw(f"finding the best number of workers for the plain DataLoader: {workers} ...")
        else:
            rates[workers] = rate

    best = tune(_BUCKET, f"{_IMAGES}/", config.batch_size, show)
    tried = ", ".join(f"{workers}: {rate:,.0f} images/s" for workers, rate in rates.items())
    screen.item("workers", f"of the plain DataLoader, tried: {tried}; it gets {best}")
    return best


@contextmanager
def _open_loader(config: DemoConfig) -> Iterator[Batches]:
    with Loader(
        f"s3://{_BUCKET}/{_PACKED}",
        batch_size=config.batch_size,
        seed=config.seed,
        memory="64MB",
        columns=["image", "label"],
        decode={"image": ImageDecoder(digits.IMAGE_SIDE, digits.IMAGE_SIDE, mode="L")},
        epochs=config.epochs,
    ) as loader:
        yield loader


@dataclass(frozen=True, slots=True)
class _Contest:
    """Equal conditions for each way of reading: the same model, bucket, test and display."""

    config: DemoConfig
    bucket: BucketProcess
    test_digits: digits.Digits
    screen: Screen

    def result(self, name: str, workers: str, opening: AbstractContextManager[Batches]) -> Result:
        """Train on what ``opening`` opens, and return how it did."""

        def show(step: Step) -> None:
            text = (
                f"epoch {step.epoch}/{step.epochs}, loss {step.loss:.3f}, "
                f"{step.samples / step.loop_seconds:,.0f} images/s, waited {step.wait_seconds / step.loop_seconds:.0%}"
            )
            self.screen.draw(f"{name} {bar(step.done, 12)} {text}")
            if step.is_last_of_epoch:
                self.screen.milestone(f"{name}: {text}")

        self.screen.draw(f"{name} starts ...")
        self.bucket.reset()
        model = new_model(self.config.seed)
        timing = train(opening, model, self.config.epochs, show)
        reading = read_counts(f"s3://{_BUCKET}", self.bucket.counts())
        return Result(
            name=name, workers=workers, accuracy=accuracy(model, self.test_digits), timing=timing, reading=reading
        )


def _conclude(direct: Result, loader: Result, config: DemoConfig, screen: Screen) -> int:
    prices = Prices.load()
    screen.line()
    screen.rows(table(direct, loader, prices))
    screen.line()
    gets = [result.reading.requests[Operation.GET] for result in (direct, loader)]
    screen.item(
        "why",
        f"a GET waits 20 ms for its first byte, however little it asks for. The DataLoader sent {gets[0]:,}, one an "
        f"image and epoch, as many at a time as it has workers, which take the processor from the model; the Loader "
        f"sent {gets[1]:,}, known in advance and under way while the model trains. These images are tiny: the larger "
        "they are, the more the bytes count and the less the GETs.",
    )
    store = prices.store(loader.reading.url)
    screen.item(
        "counted",
        "by the bucket; the DataLoader's bytes and dollars include listing the images once. Dollars are what stoker's "
        f"meter makes of these counts at the list prices of {store.name} in {store.region}, {prices.date}.",
    )
    return _verdict(direct, loader, config, screen)


def _verdict(direct: Result, loader: Result, config: DemoConfig, screen: Screen) -> int:
    failures = [
        f"the {result.name} reached {result.accuracy:.1%}, not {config.least_accuracy:.0%}"
        for result in (direct, loader)
        if result.accuracy < config.least_accuracy
    ]
    if loader.timing.stall >= direct.timing.stall:
        failures.append("the Loader stalled no less than the plain DataLoader")
    for failure in failures:
        screen.item("failed", f"{failure}.")
    return 1 if failures else 0


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Lead every AWS client to the local bucket, whatever the user's own settings are, until the end."""
    before = dict(os.environ)
    nowhere = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull, "NO_PROXY": "127.0.0.1"}
    try:
        for name in before:
            if name.startswith("AWS_") or name.lower() == "no_proxy":
                del os.environ[name]
        os.environ.update(nowhere | dict(variables))
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Let the model compute on one core, so that what feeds it has another and no idle thread spins for work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # It advises a worker per core; these wait for the network, and their best number is found by trying.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            yield
    finally:
        torch.set_num_threads(before)
