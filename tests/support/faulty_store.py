"""A bucket in virtual time that can do everything wrong that a real one does, and watches its client's memory.

Fixed first-byte time and rate with a lognormal tail; faults are drawn per request from a seeded generator, or forced
for whole stretches of time (outages). Beside serving, it checks the client: no two transfers may ever write to the
same memory, and a cancelled transfer goes on writing until it has really ended.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from stoker.checksum import crc32c
from stoker.errors import (
    ConnectionLostError,
    CredentialsError,
    NotFoundError,
    ObjectChangedError,
    ServerError,
    ThrottledError,
    TruncatedError,
)
from stoker.store.protocol import ObjectInfo
from stoker.tier import ObjectRef

FAULTS = ("throttle", "error", "reset", "truncate", "corrupt", "stall", "drip")


@dataclass(kw_only=True)
class Weather:
    """How the store behaves: probabilities per request, and times in seconds."""

    first_byte_seconds: float = 0.02
    bytes_per_second: float = 90e6
    tail_sigma: float = 0.3
    probability: dict[str, float] = field(default_factory=dict)
    outages: list[tuple[float, float]] = field(default_factory=list)
    retry_after_seconds: float | None = None
    credentials_expire_at: float = float("inf")
    closing_seconds: float = 0.0


def pin(objects: Mapping[str, bytes], tag: str = "v1") -> list[ObjectRef]:
    """What a manifest would pin of these objects."""
    return [ObjectRef(key=key, size_bytes=len(data), crc32c=crc32c(data), tag=tag) for key, data in objects.items()]


class FaultyStore:
    """Readable. ``faults`` counts what was injected; ``sent_seconds`` has the time of every request."""

    url = "faulty://bucket"

    def __init__(
        self, objects: Mapping[str, bytes], *, weather: Weather | None = None, seed: int = 0, tag: str = "v1"
    ) -> None:
        self.objects = dict(objects)
        self.tags = dict.fromkeys(self.objects, tag)
        self.weather = weather or Weather()
        self.faults: Counter[str] = Counter()
        self.sent_seconds: list[float] = []
        self.sent_tags: list[str | None] = []
        self.sent_ranges: list[tuple[str, int, int]] = []
        self.reading: Counter[tuple[str, int]] = Counter()
        self.active = 0
        self.peak_active = 0
        self.script: Callable[[int, str], str | None] | None = None
        self._rng = random.Random(seed)
        self._writing: dict[int, tuple[int, int]] = {}

    async def get_range(
        self, key: str, start: int, end: int, *, into: memoryview, tag: str | None = None
    ) -> ObjectInfo:
        assert len(into) == end - start, "into has exactly the range's bytes"
        number = len(self.sent_seconds)
        self.sent_seconds.append(asyncio.get_running_loop().time())
        self.sent_tags.append(tag)
        self.sent_ranges.append((key, start, end))
        self._begin_writing(number, into)
        self.active += 1
        self.reading[key, start] += 1
        self.peak_active = max(self.peak_active, self.active)
        try:
            return await self._serve(number, key, start, end, into, tag)
        except asyncio.CancelledError:
            await self._close_slowly(into)
            raise
        finally:
            self.active -= 1
            self.reading[key, start] -= 1
            del self._writing[number]

    async def _serve(
        self, number: int, key: str, start: int, end: int, into: memoryview, tag: str | None
    ) -> ObjectInfo:
        now = asyncio.get_running_loop().time()
        weather = self.weather
        await asyncio.sleep(weather.first_byte_seconds * self._rng.lognormvariate(0.0, weather.tail_sigma))
        if any(begin <= now < end_ for begin, end_ in weather.outages):
            self.faults["outage"] += 1
            raise ConnectionLostError(f"{key}: connection refused")
        if now >= weather.credentials_expire_at:
            self.faults["expired"] += 1
            raise CredentialsError(f"{key}: the token has expired")
        if key not in self.objects:
            self.faults["missing"] += 1
            raise NotFoundError(f"{self.url}/{key} does not exist")
        if tag is not None and tag != self.tags[key]:
            self.faults["changed"] += 1
            raise ObjectChangedError(f"{self.url}/{key} has another tag than {tag}")
        fault = self._draw(number, key)
        if fault is not None:
            self.faults[fault] += 1
        self._refuse(fault, key)
        return await self._send(fault, key, start, end, into)

    def _draw(self, number: int, key: str) -> str | None:
        if self.script is not None:
            return self.script(number, key)
        lot = self._rng.random()
        for fault in FAULTS:
            lot -= self.weather.probability.get(fault, 0.0)
            if lot < 0.0:
                return fault
        return None

    def _refuse(self, fault: str | None, key: str) -> None:
        if fault == "throttle":
            raise ThrottledError(f"{key}: slow down", retry_after_seconds=self.weather.retry_after_seconds)
        if fault == "error":
            raise ServerError(f"{key}: internal error")

    async def _send(self, fault: str | None, key: str, start: int, end: int, into: memoryview) -> ObjectInfo:
        data = self.objects[key]
        size = end - start
        rate = self.weather.bytes_per_second / (1000.0 if fault == "drip" else 1.0)
        half = size // 2
        into[:half] = data[start : start + half]
        await asyncio.sleep(half / rate)
        if fault == "reset":
            raise ConnectionLostError(f"{key}: connection reset by peer")
        if fault == "stall":
            await asyncio.sleep(1e6)
        if fault == "truncate" or end > len(data):
            raise TruncatedError(f"{key}: {half} of {size} bytes")
        into[half:] = data[start + half : end]
        await asyncio.sleep((size - half) / rate)
        if fault == "corrupt":
            into[self._rng.randrange(size)] ^= 0xFF
        return ObjectInfo(key=key, size_bytes=len(data), tag=self.tags[key])

    async def _close_slowly(self, into: memoryview) -> None:
        """A transport that is closing may still write what had arrived; cancelled again, it ends at once."""
        into[:] = b"\xee" * len(into)
        if self.weather.closing_seconds:
            await asyncio.sleep(self.weather.closing_seconds * self._rng.random())
            into[:] = b"\xdd" * len(into)

    def _begin_writing(self, number: int, into: memoryview) -> None:
        begin = int(np.frombuffer(into, np.uint8).ctypes.data)
        end = begin + len(into)
        for other_begin, other_end in self._writing.values():
            assert end <= other_begin or other_end <= begin, "two transfers write to the same memory"
        self._writing[number] = (begin, end)

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        data = self.objects[key]
        return data, ObjectInfo(key=key, size_bytes=len(data), tag=self.tags[key])

    async def head(self, key: str) -> ObjectInfo:
        return (await self.get(key))[1]

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        for key in sorted(self.objects):
            if key.startswith(prefix) and key > start_after:
                yield await self.head(key)
