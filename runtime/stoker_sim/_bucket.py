"""A bucket as it behaves, without its bytes: data sets, what a fetcher sees of them, and shared links."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np

from stoker._diagnostics.latency import BucketModel
from stoker._format.manifest import Manifest, PackRun, Rows
from stoker._format.schema import Bytes, Schema
from stoker.abc import ObjectInfo
from stoker.errors import ConfigError, NotFoundError, ServerError, ThrottledError

__all__ = [
    "BucketView",
    "Shared",
    "SharedLink",
    "SimulatedBucket",
    "bodiless",
    "described",
    "size_of",
]

_RUN = "0" * 16


def described(*, super_samples: int, samples: int, super_sample_bytes: int, head_bytes: int = 4096) -> Manifest:
    """Return the manifest of a data set of so many super-samples that are all alike.

    Args:
        super_samples: how many.
        samples: in each.
        super_sample_bytes: size of each.
        head_bytes: of its head, at most the whole.

    Raises:
        ConfigError: a number is not positive, or more than the format has room for.
    """
    for name, number in (
        ("super_samples", super_samples),
        ("samples", samples),
        ("super_sample_bytes", super_sample_bytes),
    ):
        if not 0 < number < 1 << 32:
            raise ConfigError(f"{name} must be in [1, 2**32), not {number}")
    full = np.ones(super_samples, "<u4")
    rows = Rows(
        size_bytes=full * np.uint32(super_sample_bytes),
        samples=full * np.uint32(samples),
        head_bytes=full * np.uint32(min(head_bytes, super_sample_bytes)),
        head_crc32c=full * np.uint32(0),
        crc32c=full * np.uint32(0),
        tags=np.zeros((super_samples, 16), np.uint8),
    )
    schema = Schema({"data": Bytes()})
    return Manifest(dataset=_RUN, version=1, schema=schema, rows=rows, runs=(PackRun(_RUN, 0, super_samples),))


def bodiless(manifest: Manifest) -> Manifest:
    """Return a manifest whose objects all have the checksum of what is never there: 0."""
    rows = replace(manifest.rows, crc32c=np.zeros_like(manifest.rows.crc32c))
    return replace(manifest, rows=rows)


def size_of(manifest: Manifest) -> Callable[[str], int]:
    """Return a function that tells the size in bytes of an object of a manifest by its key; KeyError if it has none."""
    if len(manifest.runs) > 1:
        return {manifest.key(row): int(manifest.rows.size_bytes[row]) for row in range(len(manifest))}.__getitem__
    # Keys end in the row's number: no dictionary of a million keys is needed.
    first, prefix = manifest.runs[0].first_number, manifest.key(0).rpartition("/")[0]
    sizes = manifest.rows.size_bytes

    def of_one_run(key: str) -> int:
        folder, _, number = key.rpartition("/")
        if folder != prefix or not number.isdecimal() or not 0 <= int(number) - first < len(sizes):
            raise KeyError(key)
        return int(sizes[int(number) - first])

    return of_one_run


_End = tuple[float, int, asyncio.Future[None]]
"""The work that is done for all when somebody's is, a number that nobody else has, and his turn to go."""


class Shared:
    """Processor sharing: all who are served are served at one rate, which depends on how many they are.

    So one number says how far everybody has come: the work done for each so far. Somebody is done when that number has
    grown by his work (A. Demers, S. Keshav, S. Shenker, "Analysis and Simulation of a Fair Queueing Algorithm", SIGCOMM
    1989, section 2). Serving costs O(log n).

    Args:
        rate: of each, in units of work a second, by how many are served.
    """

    def __init__(self, rate: Callable[[int], float]) -> None:
        self._rate_of = rate
        self._done = 0.0
        self._settled_seconds = 0.0
        self._served = 0
        self._order = count()
        self._ends: list[_End] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timed: tuple[_End, float] | None = None
        """Who is waited for, and at which rate."""

    @property
    def next_end_seconds(self) -> float:
        """When somebody is done if nobody comes or goes before, in the loop's time; infinity if nobody is served."""
        return math.inf if self._timer is None else self._timer.when()

    async def serve(self, work: float) -> None:
        """Return when so much work has been done; cancelled, leave the rest to the others."""
        loop = asyncio.get_running_loop()
        self._settle(loop.time())
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._ends, (self._done + work, next(self._order), turn))
        self._served += 1
        self._plan(loop)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():  # else it was done just before
                self._settle(loop.time())
                self._served -= 1
                self._plan(loop)
            raise

    def set_rate(self, rate: Callable[[int], float]) -> None:
        """Serve all at another rate from now on; what has been done stays done."""
        loop = asyncio.get_running_loop()
        self._settle(loop.time())
        self._rate_of = rate
        self._plan(loop)

    def _rate(self) -> float:
        return self._rate_of(max(1, self._served))

    def _settle(self, now_seconds: float) -> None:
        self._done += (now_seconds - self._settled_seconds) * self._rate()
        self._settled_seconds = now_seconds

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the one timer to who is done first; those that were cancelled have nothing to wait for."""
        while self._ends and self._ends[0][2].done():
            heapq.heappop(self._ends)
        timed = (self._ends[0], self._rate()) if self._ends else None
        if timed == self._timed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timed, self._timer = timed, None
        if timed is not None:
            (end, _, _), rate = timed
            self._timer = loop.call_later(max(0.0, end - self._done) / rate, self._end_first)

    def _end_first(self) -> None:
        loop = asyncio.get_running_loop()
        self._settle(loop.time())
        self._done = max(self._done, self._ends[0][0])  # what rounding has left of it
        self._timed = self._timer = None
        while self._ends and self._ends[0][0] <= self._done:
            turn = heapq.heappop(self._ends)[2]
            if not turn.done():
                turn.set_result(None)
                self._served -= 1
        self._plan(loop)


class SharedLink(Shared):
    """A network: every transfer gets ``min(connection, total / transfers)`` bytes a second.

    Args:
        connection_bytes_per_second: of one transfer at most.
        total_bytes_per_second: of all together.
    """

    def __init__(self, *, connection_bytes_per_second: float, total_bytes_per_second: float = math.inf) -> None:
        super().__init__(self._share)
        self.connection_bytes_per_second = connection_bytes_per_second
        self.total_bytes_per_second = total_bytes_per_second

    def _share(self, transfers: int) -> float:
        return min(self.connection_bytes_per_second, self.total_bytes_per_second / transfers)


class SimulatedBucket:
    """What all nodes share of a bucket: its bandwidth and its request rate.

    Args:
        model: how it answers.
        size_of: the size in bytes of the object under a key; raises KeyError if there is none.
    """

    def __init__(self, model: BucketModel, size_of: Callable[[str], int]) -> None:
        self.model, self.size_of = model, size_of
        self.link = SharedLink(
            connection_bytes_per_second=model.connection_bytes_per_second,
            total_bytes_per_second=model.total_bytes_per_second,
        )
        self._free_seconds = 0.0

    def line_seconds(self) -> float:
        """Take a place in line for a request and return how long it takes until it is its turn.

        Raises:
            ThrottledError: the line is too long.
        """
        now_seconds = asyncio.get_running_loop().time()
        each_seconds = 1.0 / self.model.requests_per_second
        wait_seconds = max(0.0, self._free_seconds - now_seconds - (self.model.burst - 1) * each_seconds)
        if wait_seconds > self.model.longest_line_seconds:
            raise ThrottledError("simulated://bucket answers with 503: too many requests")
        self._free_seconds = max(now_seconds, self._free_seconds) + each_seconds
        return wait_seconds


class BucketView:
    """A bucket as one machine sees it: a :class:`~stoker.abc.Readable` that moves no bytes.

    Args:
        bucket: what it shares with other machines.
        rng: for what is drawn.
        bytes_per_second: of the machine's network. A transfer takes as long as the slower of it and the bucket.
        seed: of draws that depend on an object and on how often it was asked for, and on nothing else: two runs that
            differ in a setting then meet the same late answers. None draws from ``rng`` in the order of requests.
    """

    url = "simulated://bucket"

    def __init__(
        self,
        bucket: SimulatedBucket,
        rng: random.Random,
        *,
        bytes_per_second: float = math.inf,
        seed: str | None = None,
    ) -> None:
        self._bucket, self._rng, self._seed = bucket, rng, seed
        self._asked = Counter[str]()
        self._rate = rate = bucket.model.connection_bytes_per_second
        own = SharedLink(connection_bytes_per_second=rate, total_bytes_per_second=bytes_per_second)
        self._links = [link for link in (own, bucket.link) if link.total_bytes_per_second < math.inf]

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
        """Take the time that the bytes would; ``into`` is left as it is."""
        info = await self.head(key)
        if begun is not None:
            begun()
        match self._links:
            case []:
                await asyncio.sleep((end - start) / self._rate)
            case [link]:
                await link.serve(end - start)
            case links:
                await asyncio.gather(*(link.serve(end - start) for link in links))
        return info

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return zeros, as many as the object has bytes."""
        data = bytearray(self._size_bytes(key))
        info = await self.get_range(key, 0, len(data), into=memoryview(data))
        return bytes(data), info

    async def head(self, key: str) -> ObjectInfo:
        """Take the time of a first byte.

        Raises:
            NotFoundError: there is no such object.
            ThrottledError: there are too many requests.
            ServerError: as often as the model says.
        """
        model, rng = self._bucket.model, self._rng_of(key)
        first_byte_seconds = model.first_byte.draw(rng)
        try:
            line_seconds = self._bucket.line_seconds() if model.requests_per_second < math.inf else 0.0
        except ThrottledError:
            await asyncio.sleep(first_byte_seconds)
            raise
        await asyncio.sleep(line_seconds + first_byte_seconds)
        if model.error_fraction and rng.random() < model.error_fraction:
            raise ServerError(f"{self.url}/{key}: 500, as the model wants it")
        return ObjectInfo(key=key, size_bytes=self._size_bytes(key), tag="")

    def _rng_of(self, key: str) -> random.Random:
        if self._seed is None:
            return self._rng
        self._asked[key] += 1
        return random.Random(f"{self._seed} {key} {self._asked[key]}")  # noqa: S311 - a model's

    def _size_bytes(self, key: str) -> int:
        try:
            return self._bucket.size_of(key)
        except KeyError:
            raise NotFoundError(f"{self.url}/{key} does not exist") from None
