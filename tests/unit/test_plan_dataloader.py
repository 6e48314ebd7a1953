"""What loader workers share and wait for: one disk's head, the processors, and each other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import Any

import pytest

from stoker.errors import NotFoundError
from stoker.testing import run_virtual
from stoker_sim._experiments.ipdl import DecodingReader, Disk, DiskReader, Processors, train


def still_disk() -> Disk:
    return Disk(
        random.Random(1), settle_seconds=0.0, stroke_seconds=1.0, rotation_seconds=0.0, bytes_per_second=1e6, pieces=1
    )


async def timed(*work: Awaitable[object]) -> float:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await asyncio.gather(*work)
    return loop.time() - begun


def test_a_read_takes_the_way_of_the_head_and_its_bytes() -> None:
    disk = still_disk()
    assert run_virtual(timed(disk.read_file(0.75, 500_000))) == pytest.approx(0.25**0.5 + 0.5)
    assert run_virtual(timed(disk.read_file(0.75, 500_000))) == pytest.approx(0.5)


def test_a_turn_of_the_platter_costs_half_of_one_on_average() -> None:
    disk = Disk(random.Random(1), rotation_seconds=0.01, settle_seconds=0.0, stroke_seconds=0.0)

    async def main() -> float:
        for _ in range(1000):
            await disk.read_file(0.5, 0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(1000 * Disk.pieces * 0.005, rel=0.05)


def test_of_those_that_wait_the_nearest_is_served_first() -> None:
    async def main() -> list[float]:
        disk, served = still_disk(), []

        async def read(place: float) -> None:
            await disk.read_file(place, 0)
            served.append(place)

        await asyncio.gather(*map(read, (0.5, 0.9, 0.1, 0.6, 0.4, 0.0)))
        return served

    assert run_virtual(main()) == [0.5, 0.6, 0.4, 0.1, 0.0, 0.9]


def disk_seconds(readers: int, files: int = 400) -> float:
    """Return the duration of a file's read with a number of concurrent readers of other files."""
    places = random.Random(1)

    async def main() -> float:
        disk = Disk(random.Random(2))

        async def read() -> None:
            for _ in range(files // readers):
                await disk.read_file(places.random(), 2500)

        await asyncio.gather(*(read() for _ in range(readers)))
        return asyncio.get_running_loop().time() / files

    return run_virtual(main())


def test_two_readers_take_the_head_from_each_other_and_of_many_one_is_near() -> None:
    one, two, many = disk_seconds(1), disk_seconds(2), disk_seconds(16)
    assert two > 1.25 * one
    assert many < 0.9 * one


def test_a_cancelled_wait_leaves_the_disk_to_the_others() -> None:
    async def main() -> float:
        disk = still_disk()
        first = asyncio.create_task(disk.read_file(0.5, 1_000_000))
        gone = asyncio.create_task(disk.read_file(0.5, 1_000_000))
        last = asyncio.create_task(disk.read_file(0.5, 1_000_000))
        await asyncio.sleep(0.5)
        gone.cancel()
        await asyncio.gather(first, last)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(2.0)


def test_a_waiter_cancelled_at_its_turn_passes_it_on() -> None:
    async def main() -> float:
        disk = still_disk()

        async def first() -> None:
            await disk.read_file(0.5, 1_000_000)
            gone.cancel()  # the head is his already, and he has not woken yet

        reading = asyncio.create_task(first())
        gone = asyncio.create_task(disk.read_file(0.5, 1_000_000))
        last = asyncio.create_task(disk.read_file(0.5, 1_000_000))
        await asyncio.gather(reading, last)
        assert gone.cancelled()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(2.0)


def test_a_disks_files_are_read_by_key() -> None:
    view = DiskReader(still_disk(), {"a": 1000}.__getitem__, {"a": 0.5}.__getitem__)
    data, info = run_virtual(view.get("a"))
    assert (data, info.size_bytes) == (bytes(1000), 1000)
    with pytest.raises(NotFoundError, match="simulated://disk/b does not exist"):
        run_virtual(view.head("b"))


def test_jobs_beyond_the_cores_share_them() -> None:
    processors = Processors(4)
    assert run_virtual(timed(*(processors.work(1.0) for _ in range(4)))) == pytest.approx(1.0)
    assert run_virtual(timed(*(processors.work(1.0) for _ in range(16)))) == pytest.approx(4.0)
    assert processors.busy_seconds == 20.0


def test_what_is_read_is_decoded_before_it_is_there() -> None:
    disk = DiskReader(still_disk(), {"a": 1_000_000}.__getitem__, {"a": 0.5}.__getitem__)
    processors = Processors(1)
    view = DecodingReader(disk, processors, 0.25)
    assert view.url == disk.url
    assert run_virtual(timed(view.get_range("a", 0, 1_000_000, into=memoryview(b"")))) == pytest.approx(1.25)
    assert run_virtual(timed(view.get("a"))) == pytest.approx(1.25)
    assert processors.busy_seconds == 0.5
    assert run_virtual(view.head("a")).size_bytes == 1_000_000


class Training:
    """Batches of four samples of a second each, and steps of a given duration."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self.loaded: list[int] = []
        self.stepped_seconds: list[float] = []
        self.loaded_batches: list[int] = []

    async def load(self, sample: int) -> None:
        self.loaded.append(sample)
        await asyncio.sleep(1.0)

    async def step(self) -> None:
        self.stepped_seconds.append(asyncio.get_running_loop().time())
        self.loaded_batches.append(len(self.loaded) // 4)
        await asyncio.sleep(self.step_seconds)

    def run(self, batches: int = 8, **settings: Any) -> float:
        async def main() -> float:
            await train([range(4 * n, 4 * n + 4) for n in range(batches)], self.load, self.step, **settings)
            return asyncio.get_running_loop().time()

        return run_virtual(main())


@pytest.mark.parametrize("workers", [0, 1, 3, 16])
def test_every_sample_is_loaded_once_and_every_batch_stepped_on(workers: int) -> None:
    training = Training()
    training.run(workers=workers)
    assert sorted(training.loaded) == list(range(32))
    assert len(training.stepped_seconds) == 8


def test_without_workers_loading_and_steps_take_turns() -> None:
    assert Training(2.0).run(workers=0) == pytest.approx(8 * (4.0 + 2.0))


def test_one_worker_loads_while_the_loop_steps() -> None:
    assert Training(2.0).run(workers=1) == pytest.approx(8 * 4.0 + 2.0)


def test_enough_workers_leave_the_steps_and_what_handing_over_takes() -> None:
    seconds = Training(2.0).run(workers=4, hand_over_seconds=0.5)
    assert seconds == pytest.approx(4.0 + 8 * 2.5)


def test_batches_of_workers_come_in_bursts_in_their_order() -> None:
    training = Training()
    training.run(workers=4)
    assert training.stepped_seconds == pytest.approx([4.0] * 4 + [8.0] * 4)


def test_workers_are_as_far_ahead_as_they_were_asked() -> None:
    training = Training(1000.0)
    training.run(workers=2, prefetch_factor=3, batches=20)
    assert training.loaded_batches[1:4] == [7, 8, 9]  # six ahead of the one that was taken
