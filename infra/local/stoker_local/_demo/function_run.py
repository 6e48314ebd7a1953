"""``stoker demo --functions``, from the empty buckets to the bill: raw images become training data."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec

from stoker._cost.prices import Prices
from stoker.errors import MissingExtraError
from stoker_local._bucket import LocalBucket
from stoker_local._demo import digits
from stoker_local._demo.function_setup import COMPACT, DATASET, Epoch, FunctionDemoConfig, RawImages, read_epoch
from stoker_local._demo.function_view import Observer, Snapshot, bill_table, block, function_table, how_counted, line
from stoker_local._demo.run import led_to, quiet_torch
from stoker_local._demo.screen import Screen
from stoker_local._serving import background
from stoker_local.functions import FunctionCloud, function_cloud

__all__ = ["run"]

_LOOK_SECONDS = 0.1
_TELL_SECONDS = 1.0


def run(config: FunctionDemoConfig, screen: Screen) -> int:
    """Run the demo; return 0 if training got every image exactly once, as it was put.

    Raises:
        ConfigError: there are not so many images.
        MissingExtraError: Lambda's runtime client, which functions run in, is not installed.
    """
    if find_spec("awslambdaric") is None:
        raise MissingExtraError("the functions need awslambdaric; pip install 'stoker[local]'")
    train_digits, _ = digits.load()
    images = RawImages(train_digits, config.images)
    with quiet_torch():
        return asyncio.run(_demonstrate(config, images, screen))


async def _demonstrate(config: FunctionDemoConfig, images: RawImages, screen: Screen) -> int:
    async with LocalBucket(config.bucket()) as bucket:
        with led_to(bucket.environment()):
            async with function_cloud(config.cloud(), bucket=bucket) as cloud:
                prices = Prices.load()
                demo = _Demo(config, images, cloud, Observer(bucket, cloud, images, prices))
                demo.introduce(screen)
                try:
                    async with asyncio.timeout(config.limit_seconds) as limit, _shown(demo.observer, screen, prices):
                        packed, epoch = await demo.perform()
                except TimeoutError:
                    if not limit.expired():
                        raise
                    screen.rows(_indented(block(demo.observer.look(), prices)))
                    screen.item("failed", f"it did not come to its end in {config.limit_seconds:.0f} s")
                    return 1
                return demo.conclude(packed, epoch, screen, prices)


class _Demo:
    """What happens, one thing after the other."""

    def __init__(self, config: FunctionDemoConfig, images: RawImages, cloud: FunctionCloud, observer: Observer) -> None:
        self.observer = observer
        self._config, self._images, self._cloud = config, images, cloud

    def introduce(self, screen: Screen) -> None:
        """Say what is to be seen."""
        sizes = [len(content) for content in self._images.contents.values()]
        screen.item("bucket", "S3 on this machine: 20 ms to the first byte, 90 MB/s a connection")
        screen.item("images", f"{len(sizes):,}, a PNG object each, {sum(sizes) / len(sizes):.0f} bytes on average")
        screen.item(
            "chain",
            f"each is announced in a queue; ingest packs up to {self._config.messages} of them at a time, commit makes "
            "versions of what is packed, every two seconds, compact makes few large super-samples of many small ones",
        )
        chances = ", ".join(f"{kind} {chance:.0%}" for kind, chance in self._config.faults().probabilities.items())
        screen.item("trouble", f"of all calls: {chances}")
        screen.line()

    async def perform(self) -> tuple[Snapshot, Epoch]:
        """Return the moment before the epoch is read, and what it delivered."""
        observer, config = self.observer, self._config
        self._cloud.inject(config.faults())
        observer.phase = "raw images arrive, functions pack them"
        await self._images.put_all(config.images_per_second)
        observer.phase = "functions pack what is left"
        await self._everything_visible()
        observer.phase = "small super-samples become large ones"
        await self._compact()
        packed = observer.look()
        observer.phase = "training reads an epoch"
        return packed, await self._read()

    async def _everything_visible(self) -> None:
        """Wait until a version has all images and no message is left."""
        await self._cloud.queues["raw"].drained()
        while self.observer.look().visible < len(self._images):  # noqa: ASYNC110  (a function's commit has no event)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _compact(self) -> None:
        """Call the function until it is through, whatever happens to it."""
        event = {"dataset": DATASET, "super_sample_bytes": self._config.super_sample_bytes}
        while (await self._cloud.invoke(COMPACT, event, waits=True)).error_type:
            pass

    async def _read(self) -> Epoch:
        """Read an epoch in a thread, which has ended when this returns or is cancelled."""
        stopped = threading.Event()
        reading = asyncio.create_task(asyncio.to_thread(read_epoch, self._images, self._config.seed, stopped=stopped))
        try:
            return await asyncio.shield(reading)
        finally:
            stopped.set()
            await asyncio.wait([reading])

    def conclude(self, packed: Snapshot, epoch: Epoch, screen: Screen, prices: Prices) -> int:
        """Say how it ended."""
        screen.rows(_indented(function_table(self.observer.look().functions)))
        screen.line()
        screen.rows(_indented(bill_table(packed, epoch, prices)))
        screen.line()
        screen.item("counted", how_counted(prices))
        failures = epoch.failures(self._images)
        for failure in failures:
            screen.item("failed", failure)
        if not failures:
            delivered = sum(epoch.times.values())
            screen.item("checked", f"the epoch had {delivered:,} samples: every image exactly once, as it was put")
        return 1 if failures else 0


@asynccontextmanager
async def _shown(observer: Observer, screen: Screen, prices: Prices) -> AsyncIterator[None]:
    """Show what is going on until the block is left."""

    async def show() -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS if screen.is_terminal else _TELL_SECONDS)
            now = observer.look()
            screen.draw(*block(now, prices))
            screen.milestone(line(now))

    async with background() as tasks:
        tasks.start(show())
        yield


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
