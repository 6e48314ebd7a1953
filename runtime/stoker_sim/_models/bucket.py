"""A bucket as it behaves, without its bytes: what a fetcher sees of one in virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable

from stoker._diagnostics.latency import BucketModel
from stoker.abc import ObjectInfo
from stoker.errors import NotFoundError, ServerError, ThrottledError
from stoker_sim._models.link import SharedLink

__all__ = ["BucketView", "SimulatedBucket"]


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

    def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Refuse: a run starts from its manifest and never lists."""
        raise NotFoundError(f"{self.url} lists nothing: a run reads its manifest and never lists")

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
