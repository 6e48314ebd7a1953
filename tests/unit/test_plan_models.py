"""The simulator's models: what is shared, how a bucket answers, and distributions of durations."""

from __future__ import annotations

import asyncio
import math
import random
from statistics import median, quantiles
from typing import Any

import pytest

from stoker._diagnostics.latency import Constant, LateTail, LogNormal, RecordedLatency
from stoker.errors import ConfigError, NotFoundError, ServerError, ThrottledError
from stoker.testing import run_virtual
from stoker_sim import BucketModel
from stoker_sim._bucket import BucketView, ProcessorSharing, SharedLink, SimulatedBucket

SIZES = {"a": 8_000_000, "b": 1_000}


def view(model: BucketModel, **settings: Any) -> BucketView:
    return BucketView(SimulatedBucket(model, SIZES.__getitem__), random.Random(1), **settings)


async def timed(*reads: object) -> float:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await asyncio.gather(*reads)  # type: ignore[call-overload]
    return loop.time() - begun


def read(bucket: BucketView, key: str = "a") -> object:
    return bucket.get_range(key, 0, SIZES[key], into=memoryview(bytearray(0)))


def test_a_single_transfer_has_its_own_rate_and_others_share() -> None:
    async def main() -> tuple[float, float]:
        alone, shared = (SharedLink(connection_bytes_per_second=10.0, total_bytes_per_second=30.0) for _ in range(2))
        return await timed(alone.serve(100.0)), await timed(*(shared.serve(100.0) for _ in range(6)))

    assert run_virtual(main()) == pytest.approx((10.0, 20.0))


def test_new_transfers_slow_the_others_and_ended_ones_speed_them_up() -> None:
    async def main() -> list[float]:
        shared, loop, ends = ProcessorSharing(lambda number: 1.0 / number), asyncio.get_running_loop(), []

        async def one(start: float, work: float) -> None:
            await asyncio.sleep(start)
            await shared.serve(work)
            ends.append(loop.time())

        await asyncio.gather(one(0.0, 10.0), one(5.0, 2.0))
        return ends

    assert run_virtual(main()) == pytest.approx([9.0, 12.0])


def test_what_is_cancelled_leaves_its_share_to_the_others() -> None:
    async def main() -> float:
        shared, loop = ProcessorSharing(lambda number: 1.0 / number), asyncio.get_running_loop()
        left, gone = asyncio.create_task(shared.serve(10.0)), asyncio.create_task(shared.serve(10.0))
        await asyncio.sleep(4.0)
        gone.cancel()
        await left
        return loop.time()

    assert run_virtual(main()) == pytest.approx(12.0)


def test_a_read_takes_its_first_byte_and_then_its_bytes() -> None:
    model = BucketModel(first_byte=Constant(0.02), connection_bytes_per_second=80e6)
    assert run_virtual(timed(read(view(model)))) == pytest.approx(0.12)


def test_a_machines_own_network_limits_all_that_it_reads() -> None:
    model = BucketModel(first_byte=Constant(0.0), connection_bytes_per_second=80e6)
    bucket = view(model, bytes_per_second=160e6)
    assert run_virtual(timed(*(read(bucket) for _ in range(10)))) == pytest.approx(0.5)


def test_the_buckets_own_limit_is_shared_by_all_machines() -> None:
    model = BucketModel(first_byte=Constant(0.0), connection_bytes_per_second=80e6, total_bytes_per_second=160e6)
    bucket = SimulatedBucket(model, SIZES.__getitem__)
    machines = [BucketView(bucket, random.Random(rank), bytes_per_second=1e12) for rank in range(10)]
    assert run_virtual(timed(*map(read, machines))) == pytest.approx(0.5)


def test_requests_beyond_the_rate_wait_in_line() -> None:
    bucket = view(BucketModel(first_byte=Constant(0.0), requests_per_second=10.0, connection_bytes_per_second=1e12))
    assert run_virtual(timed(*(bucket.head("b") for _ in range(21)))) == pytest.approx(2.0)


def test_and_are_refused_where_the_line_is_too_long() -> None:
    bucket = view(BucketModel(first_byte=Constant(0.0), requests_per_second=10.0, max_queue_seconds=0.5))

    async def main() -> list[object]:
        return await asyncio.gather(*(bucket.head("b") for _ in range(10)), return_exceptions=True)

    refused = [each for each in run_virtual(main()) if isinstance(each, ThrottledError)]
    assert len(refused) == 4


def test_a_part_of_the_requests_fails() -> None:
    bucket = view(BucketModel(first_byte=Constant(0.0), error_fraction=0.25))

    async def main() -> list[object]:
        return await asyncio.gather(*(bucket.head("b") for _ in range(400)), return_exceptions=True)

    assert sum(isinstance(each, ServerError) for each in run_virtual(main())) == pytest.approx(100, abs=30)


def test_what_is_not_there_is_not_found() -> None:
    with pytest.raises(NotFoundError, match="simulated://bucket/c does not exist"):
        run_virtual(view(BucketModel()).head("c"))


@pytest.mark.parametrize(
    "settings",
    [
        {"connection_bytes_per_second": 0.0},
        {"total_bytes_per_second": math.nan},
        {"requests_per_second": -1.0},
        {"max_queue_seconds": -1.0},
        {"error_fraction": 1.0},
    ],
)
def test_a_model_that_cannot_be_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        BucketModel(**settings)  # type: ignore[arg-type]


def test_a_lognormal_has_the_percentiles_that_it_was_given() -> None:
    rng = random.Random(2)
    drawn = [LogNormal(0.02, 0.2).draw(rng) for _ in range(20_000)]
    assert median(drawn) == pytest.approx(0.02, rel=0.05)
    assert quantiles(drawn, n=100)[98] == pytest.approx(0.2, rel=0.15)


def test_recorded_durations_are_drawn_as_they_were() -> None:
    rng = random.Random(2)
    drawn = {RecordedLatency([0.1, 0.4]).draw(rng) for _ in range(50)}
    assert drawn == {0.1, 0.4}


def test_the_given_fraction_of_requests_is_late() -> None:
    rng = random.Random(2)
    late = LateTail(Constant(0.1), 0.05, 2.0)
    assert sum(late.draw(rng) > 1.0 for _ in range(10_000)) == pytest.approx(500, rel=0.2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(-1.0),
        lambda: Constant(math.inf),
        lambda: LogNormal(0.2, 0.1),
        lambda: LogNormal(0.0, 0.1),
        lambda: RecordedLatency([]),
        lambda: RecordedLatency([math.nan]),
        lambda: LateTail(Constant(0.1), 1.5, 1.0),
    ],
)
def test_durations_that_cannot_be_are_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]
