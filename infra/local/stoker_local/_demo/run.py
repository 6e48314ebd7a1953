"""The demo from the empty bucket to the table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from stoker._base.sizes import format_bytes
from stoker._cost.prices import Prices
from stoker_local._config import BucketConfig
from stoker_local._demo import digits
from stoker_local._demo.direct import open_direct, tune
from stoker_local._demo.environment import led_to, quiet_torch
from stoker_local._demo.screen import Screen, bar
from stoker_local._demo.table import Result, failures, how_counted, read_counts, table, why
from stoker_local._demo.training import Batches, Step, accuracy, new_model, train
from stoker_local._host import BucketProcess, bucket_process
from stoker_local._s3.model import BucketSpec
from stoker_local._shape import Shape
from stoker_torch import Loader, LoaderStatistics

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
    with bucket_process(bucket_config) as bucket, led_to(bucket.environment()), quiet_torch():
        screen.item("bucket", "S3 on this machine: 20 ms to the first byte, 90 MB/s a connection")
        asyncio.run(_fill(train_digits, config, screen))
        workers = config.workers or _tuned(config, screen)
        _warm_up(config.batch_size)
        contest = _Contest(config, bucket, test_digits, screen)
        opening = open_direct(_BUCKET, f"{_IMAGES}/", workers, config.batch_size, config.seed)
        direct = contest.result("DataLoader", f"{workers} worker processes", opening)
        ended: list[LoaderStatistics] = []
        loader = contest.result("stoker's Loader", "no worker processes", _open_loader(config, ended.append))
    return _conclude(direct, loader, ended[0].bucket_wait_seconds, config, screen)


async def _fill(train_digits: digits.Digits, config: DemoConfig, screen: Screen) -> None:
    count = len(train_digits)

    def show(verb: str, done: int) -> None:
        screen.draw(f"{verb} {bar(done / count)} {done:,} of {count:,} images")

    images, packed = f"s3://{_BUCKET}/{_IMAGES}", f"s3://{_BUCKET}/{_PACKED}"
    size_bytes = await digits.upload(train_digits, images, lambda done: show("uploading", done))
    screen.item("images", f"{count:,} to train on, a PNG object each, {size_bytes / count:.0f} bytes on average")
    manifest = await digits.pack(images, packed, config.super_sample_bytes, lambda done: show("packing", done))
    mean_bytes = manifest.size_bytes / len(manifest)
    screen.item("packed", f"{len(manifest)} super-samples of {format_bytes(mean_bytes)}, in the same bucket")


def _tuned(config: DemoConfig, screen: Screen) -> int:
    tried: list[str] = []

    def show(workers: int, seconds: float | None) -> None:
        if seconds is None:
            screen.draw(f"finding the best number of workers for the DataLoader: {workers} ...")
        else:
            tried.append(f"{seconds:.0f} s with {workers}")

    best = tune(_BUCKET, f"{_IMAGES}/", config.batch_size, config.epochs, show)
    screen.item("workers", f"of the DataLoader: {', '.join(tried)} expected; it gets {best}")
    return best


def _warm_up(batch_size: int) -> None:
    """Train a step on nothing: PyTorch imports parts of itself only then, which is no wait for data."""
    shape = (batch_size, digits.IMAGE_SIDE, digits.IMAGE_SIDE, 1)
    batch = {"image": torch.zeros(shape, dtype=torch.uint8), "label": torch.zeros(batch_size, dtype=torch.int64)}
    train(nullcontext([batch]), new_model(seed=0), epochs=1, on_step=lambda _: None)


@contextmanager
def _open_loader(config: DemoConfig, on_end: Callable[[LoaderStatistics], None]) -> Iterator[Batches]:
    with Loader(
        f"s3://{_BUCKET}/{_PACKED}",
        batch_size=config.batch_size,
        seed=config.seed,
        memory="64MB",
        columns=["image", "label"],
        decode=digits.DECODE,
        epochs=config.epochs,
    ) as loader:
        yield loader
        on_end(loader.stats())


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


def _conclude(direct: Result, loader: Result, bucket_wait_seconds: float, config: DemoConfig, screen: Screen) -> int:
    prices = Prices.load()
    screen.line()
    screen.rows(table(direct, loader, prices))
    screen.line()
    screen.item("why", why(direct, loader, bucket_wait_seconds))
    screen.item("counted", how_counted(loader, prices))
    failed = failures(direct, loader, config.least_accuracy)
    for failure in failed:
        screen.item("failed", failure)
    return 1 if failed else 0
