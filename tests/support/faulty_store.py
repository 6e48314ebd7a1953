"""A bucket in virtual time with all the faults of a real one, which also checks its client's use of memory.

Times to the first byte have a lognormal tail; rates are limited per connection and in total. Faults are drawn per
request from a seeded generator, or forced for periods of time (outages). The store also checks its client: no two
transfers may write to the same memory, and a cancelled transfer continues to write until it has really ended.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from stoker._base.checksum import crc32c
from stoker._stores.http_objects import ExpiredCredentialsError
from stoker.abc import ObjectInfo, ObjectRef
from stoker.errors import (
    ConnectionLostError,
    NotFoundError,
    ObjectChangedError,
    RangeBeyondEndError,
    ServerError,
    ThrottledError,
    TruncatedError,
)
from stoker_sim._bucket import SharedLink

FAULTS = (
    "throttle",  # 503, with Retry-After if the settings have one
    "throttle_bare",  # 503 without
    "error", "dns", "reset", "truncate", "corrupt", "stall", "drip",
)  # fmt: skip
MAX_STORM_REQUESTS = 3
"""Concurrent requests that are served during throttling."""


@dataclass(kw_only=True)
class StoreProfile:
    """Behaviour of the store: probabilities per request, and times in seconds.

    In an outage no connection succeeds; during throttling only a few concurrent requests are served. The adapter renews
    expired credentials, or fails to.
    """

    first_byte_seconds: float = 0.02
    bytes_per_second: float = 90e6
    total_bytes_per_second: float = float("inf")
    tail_sigma: float = 0.3
    late_fraction: float = 0.0
    late_seconds: float = 2.0
    probability: dict[str, float] = field(default_factory=dict)
    outages: list[tuple[float, float]] = field(default_factory=list)
    storms: list[tuple[float, float]] = field(default_factory=list)
    retry_after_seconds: float | None = None
    credentials_expire_at: float = float("inf")
    credentials_renewable: bool = False
    closing_seconds: float = 0.0
    tells_when_it_begins: bool = True


def pin(objects: Mapping[str, bytes], tag: str = "v1") -> list[ObjectRef]:
    """Return the references to these objects that a manifest would have."""
    return [ObjectRef(key=key, size_bytes=len(data), crc32c=crc32c(data), tag=tag) for key, data in objects.items()]


class FaultyStore:
    """A readable store. ``faults`` counts injected faults, ``sent_seconds`` has the time of every request, and ``late``
    the extra time to the first byte of some requests."""

    url = "faulty://bucket"

    def __init__(
        self, objects: Mapping[str, bytes], *, profile: StoreProfile | None = None, seed: int = 0, tag: str = "v1"
    ) -> None:
        self.objects = dict(objects)
        self.tags = dict.fromkeys(self.objects, tag)
        self.profile = profile or StoreProfile()
        self.faults: Counter[str] = Counter()
        self.sent_seconds: list[float] = []
        self.sent_tags: list[str | None] = []
        self.sent_ranges: list[tuple[str, int, int]] = []
        self.reading: Counter[tuple[str, int]] = Counter()
        self.active = 0
        self.peak_active = 0
        self.script: Callable[[int, str], str | None] | None = None
        self.late: dict[int, float] = {}
        self.link = SharedLink(
            connection_bytes_per_second=self.profile.bytes_per_second,
            total_bytes_per_second=self.profile.total_bytes_per_second,
        )
        self._rng = random.Random(seed)
        self._writing: dict[int, tuple[int, int]] = {}
        self._lost_before = 0
        self._renewed = False

    async def get_range(
        self,
        key: str,
        start: int,
        end: int,
        *,
        into: memoryview,
        tag: str | None = None,
        begun: Callable[[], None] | None = None,
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
            used = await self.current()
            try:
                return await self._serve(number, used, (key, start, end), into, tag, begun)
            except ExpiredCredentialsError:
                if (renewed := await self.renew(used)) == used:
                    raise
            return await self._serve(number, renewed, (key, start, end), into, tag, begun)
        except asyncio.CancelledError:
            await self._close_slowly(into)
            raise
        finally:
            self.active -= 1
            self.reading[key, start] -= 1
            del self._writing[number]

    def lose_connections(self) -> None:
        """Break every transfer in flight; each fails when it would continue."""
        self._lost_before = len(self.sent_seconds)

    async def current(self) -> bool:
        """Return the credentials: True for the renewed ones."""
        return self._renewed

    async def renew(self, used: bool) -> bool:
        await asyncio.sleep(0.1)
        self._renewed = self.profile.credentials_renewable
        return self._renewed

    async def _serve(
        self,
        number: int,
        renewed: bool,
        wanted: tuple[str, int, int],
        into: memoryview,
        tag: str | None,
        begun: Callable[[], None] | None,
    ) -> ObjectInfo:
        now = asyncio.get_running_loop().time()
        profile, key = self.profile, wanted[0]
        late = profile.late_fraction and self._rng.random() < profile.late_fraction
        self.faults["late"] += bool(late)
        await asyncio.sleep(
            profile.first_byte_seconds * self._rng.lognormvariate(0.0, profile.tail_sigma)
            + profile.late_seconds * bool(late)
            + self.late.get(number, 0.0)
        )
        self._check_connection(number, key)
        if _within(now, profile.outages):
            self.faults["outage"] += 1
            raise ConnectionLostError(f"{key}: connection refused")
        if _within(now, profile.storms) and self.active > MAX_STORM_REQUESTS:
            self.faults["storm"] += 1
            raise ThrottledError(f"{key}: slow down")
        if now >= profile.credentials_expire_at and not renewed:
            self.faults["expired, renewed" if profile.credentials_renewable else "expired"] += 1
            raise ExpiredCredentialsError(f"{key}: the token has expired")
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
        if begun is not None and profile.tells_when_it_begins:
            begun()
        return await self._send(number, fault, wanted, into)

    def _check_connection(self, number: int, key: str) -> None:
        if number < self._lost_before:
            self.faults["lost"] += 1
            raise ConnectionLostError(f"{key}: connection reset by peer")

    def _draw(self, number: int, key: str) -> str | None:
        if self.script is not None:
            return self.script(number, key)
        lot = self._rng.random()
        for fault in FAULTS:
            lot -= self.profile.probability.get(fault, 0.0)
            if lot < 0.0:
                return fault
        return None

    def _refuse(self, fault: str | None, key: str) -> None:
        if fault == "throttle":
            raise ThrottledError(f"{key}: slow down", retry_after_seconds=self.profile.retry_after_seconds)
        if fault == "throttle_bare":
            raise ThrottledError(f"{key}: slow down")
        if fault == "error":
            raise ServerError(f"{key}: internal error")
        if fault == "short":
            raise RangeBeyondEndError(f"{key} has 1 bytes")
        if fault == "dns":
            raise ConnectionLostError(f"{key}: cannot connect to host bucket: temporary failure in name resolution")

    async def _send(self, number: int, fault: str | None, wanted: tuple[str, int, int], into: memoryview) -> ObjectInfo:
        key, start, end = wanted
        data = self.objects[key]
        if end > len(data):
            raise RangeBeyondEndError(f"{self.url}/{key} has {len(data)} bytes; [{start}, {end}) goes beyond its end")
        size = end - start
        half = size // 2
        into[:half] = data[start : start + half]
        await self._carry(half, slowly=fault == "drip")
        if fault == "reset":
            raise ConnectionLostError(f"{key}: connection reset by peer")
        if fault == "stall":
            await asyncio.sleep(1e6)
        if fault == "truncate":
            raise TruncatedError(f"{key}: {half} of {size} bytes")
        into[half:] = data[start + half : end]
        await self._carry(size - half, slowly=fault == "drip")
        self._check_connection(number, key)
        if fault == "corrupt":
            into[self._rng.randrange(size)] ^= 0xFF
        return ObjectInfo(key=key, size_bytes=len(data), tag=self.tags[key])

    async def _carry(self, size_bytes: int, *, slowly: bool) -> None:
        if slowly:
            await asyncio.sleep(1000 * size_bytes / self.profile.bytes_per_second)
        else:
            self.link.connection_bytes_per_second = self.profile.bytes_per_second  # tests change it
            await self.link.serve(size_bytes)

    async def _close_slowly(self, into: memoryview) -> None:
        """Write bytes that had arrived, as a closing transport may; end at once if cancelled again."""
        into[:] = b"\xee" * len(into)
        if self.profile.closing_seconds:
            await asyncio.sleep(self.profile.closing_seconds * self._rng.random())
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


def _within(now: float, periods: list[tuple[float, float]]) -> bool:
    return any(begin <= now < end for begin, end in periods)
