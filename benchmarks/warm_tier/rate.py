"""Rate and processor time of reads through the tier, beside a plain TCP copy of the same bytes.

Nodes, proxy and reader are on one machine, as the plain copy's two processes are. Reads come one after the other, so a
read's time is its latency. Ratios are within one round; medians of the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.warm_tier.fleet import Object, fleet, made_objects
from benchmarks.warm_tier.plain import Copied, copied
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import Code
from stoker_warm._proxy import Proxy

__all__ = ["Rates", "measured", "patient"]

OBJECT_BYTES, OBJECTS = 8 << 20, 6


def patient(code: Code, **changes: object) -> WarmConfig:
    """Return settings for a busy machine, on which a process may be late for reasons of its own."""
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
    """What reads came to, of one code.

    Attributes:
        code: of the objects.
        bytes_per_second: of reads one after the other.
        rate: over that of the plain copy in the same round.
        processor: seconds a byte, proxy and nodes, over those of the plain copy.
        plain_bytes_per_second: of the plain copy.
        median_seconds: of a read.
    """

    code: Code
    bytes_per_second: float
    rate: float
    processor: float
    plain_bytes_per_second: float
    median_seconds: float


async def measured(code: Code, rounds: int, reads: int) -> Rates:
    """Measure a code, through the proxy of this process."""
    objects = made_objects(OBJECTS, OBJECT_BYTES)
    async with fleet(patient(code)) as running:
        await running.put(objects)
        return await _rates(code, running.proxy, running.node_seconds, objects, (rounds, reads))


async def _rates(
    code: Code,
    keeper: Proxy,
    seconds_of_others: Callable[[], float],
    objects: Sequence[Object],
    times: tuple[int, int],
) -> Rates:
    rounds, reads = times
    await _read(keeper, objects, 2 * OBJECTS)  # all nodes are awake, all memory is in use
    found = [await _round(keeper, seconds_of_others, objects, reads) for _ in range(rounds)]
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
    keeper: Proxy, seconds_of_others: Callable[[], float], objects: Sequence[Object], reads: int
) -> tuple[Copied, Copied, list[float]]:
    plain = copied([each.data for each in objects], reads)
    before = time.process_time() + seconds_of_others()
    seconds = await _read(keeper, objects, reads)
    spent = time.process_time() + seconds_of_others() - before
    return Copied(seconds=sum(seconds), processor_seconds=spent), plain, seconds


async def _read(keeper: Proxy, objects: Sequence[Object], reads: int) -> list[float]:
    into, seconds = memoryview(bytearray(OBJECT_BYTES)), []
    for number in range(reads):
        wanted = objects[number % len(objects)]
        began = time.perf_counter()
        if not await keeper.read(wanted.name, into):
            raise RuntimeError(f"a read of {wanted.name} failed")
        seconds.append(time.perf_counter() - began)
        if reads == 2 * OBJECTS and bytes(into) != wanted.data:
            raise RuntimeError("the tier delivers wrong bytes")
    return seconds
