"""Rate and processor time of reads through the tier, compared with a plain TCP copy of the same bytes.

Nodes, proxy and reader are on one machine, like the two processes of the plain copy. Reads are sequential, so a read's
time is its latency. Ratios are within one round; figures are medians of the rounds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.warm_tier.fleet import Object, create_objects, fleet, processor_seconds
from benchmarks.warm_tier.plain import Copied, copy_bodies
from stoker.abc import Tier
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from stoker_warm._tier import WarmTier

__all__ = ["Rates", "measure", "measure_program", "patient"]

OBJECT_BYTES, OBJECTS = 8 << 20, 6
_KNOWN_SECONDS = 120.0


def patient(code: ErasureCode, **changes: object) -> WarmConfig:
    """Return settings for a busy machine, on which processes may be late."""
    settings: dict[str, object] = {
        "nodes": code.shards,
        "code": code,
        "linger_seconds": 30.0,
        "fresh_seconds": 30.0,
        "ping_seconds": 10.0,
        "wake_seconds": 120.0,
        "read_seconds": 120.0,
        "write_seconds": 120.0,
    }
    return WarmConfig(**{**settings, **changes})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Figures of reads with one code.

    Attributes:
        code: erasure code of the objects.
        bytes_per_second: rate of sequential reads.
        rate: ratio to the rate of the plain copy in the same round.
        processor: ratio of the processor time per byte, of proxy and nodes, to that of the plain copy.
        plain_bytes_per_second: rate of the plain copy.
        median_seconds: median duration of a read.
    """

    code: ErasureCode
    bytes_per_second: float
    rate: float
    processor: float
    plain_bytes_per_second: float
    median_seconds: float


async def measure(code: ErasureCode, rounds: int, reads: int) -> Rates:
    """Measure a code, with the proxy of this process."""
    objects = create_objects(OBJECTS, OBJECT_BYTES)
    async with fleet(patient(code)) as running:
        await running.put(objects)
        tier = WarmTier.from_proxy(running.proxy, running.tenant)
        return await _rates(code, tier, running.node_seconds, objects, (rounds, reads))


async def measure_program(code: ErasureCode, rounds: int, reads: int) -> Rates:
    """Measure a code, with a proxy in another process, over HTTP: one more hop."""
    objects = create_objects(OBJECTS, OBJECT_BYTES)
    async with fleet(patient(code)) as running:
        await running.put(objects)
        async with running.program() as (pid, tier):
            await _wait_until_known(tier, objects)

            def seconds_of_others() -> float:
                return running.node_seconds() + processor_seconds(pid)

            return await _rates(code, tier, seconds_of_others, objects, (rounds, reads))


async def _wait_until_known(tier: Tier, objects: Sequence[Object]) -> None:
    """Wait until a new proxy knows the content of its nodes."""
    into = memoryview(bytearray(OBJECT_BYTES))
    async with asyncio.timeout(_KNOWN_SECONDS):
        for each in objects:
            while not await tier.read(each.ref, into):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.1)


async def _rates(
    code: ErasureCode,
    tier: Tier,
    seconds_of_others: Callable[[], float],
    objects: Sequence[Object],
    times: tuple[int, int],
) -> Rates:
    rounds, reads = times
    await _read(tier, objects, 2 * OBJECTS)  # all nodes run, all memory is mapped
    found = [await _round(tier, seconds_of_others, objects, reads) for _ in range(rounds)]
    seconds, size_bytes = [each.seconds for each, _, _ in found], reads * OBJECT_BYTES
    return Rates(
        code=code,
        bytes_per_second=size_bytes / median(seconds),
        rate=median(plain.seconds / each.seconds for each, plain, _ in found),
        processor=median(each.processor_seconds / plain.processor_seconds for each, plain, _ in found),
        plain_bytes_per_second=size_bytes / median(plain.seconds for _, plain, _ in found),
        median_seconds=median(read for *_, each in found for read in each),
    )


async def _round(
    tier: Tier, seconds_of_others: Callable[[], float], objects: Sequence[Object], reads: int
) -> tuple[Copied, Copied, list[float]]:
    plain = copy_bodies([each.data for each in objects], reads)
    before = time.process_time() + seconds_of_others()
    seconds = await _read(tier, objects, reads)
    spent = time.process_time() + seconds_of_others() - before
    return Copied(seconds=sum(seconds), processor_seconds=spent), plain, seconds


async def _read(tier: Tier, objects: Sequence[Object], reads: int) -> list[float]:
    into, seconds = memoryview(bytearray(OBJECT_BYTES)), []
    for number in range(reads):
        wanted = objects[number % len(objects)]
        began = time.perf_counter()
        if not await tier.read(wanted.ref, into):
            raise RuntimeError(f"a read of {wanted.ref.key} failed")
        seconds.append(time.perf_counter() - began)
        if reads == 2 * OBJECTS and bytes(into) != wanted.data:
            raise RuntimeError("the tier delivers wrong bytes")
    return seconds
