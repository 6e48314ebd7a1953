"""A few measured reads: how soon a bucket answers, how fast one connection is, and how fast several are together.

Two things are told apart that add up in every request: the time to its first byte, which many requests share by
waiting at once, and the time of its bytes, for which they share a link. Requests and bytes are bounded beforehand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain, cycle, pairwise
from statistics import median

from stoker.errors import ConfigError, DeadlineError, TransientError
from stoker.plan.bucket import BucketModel
from stoker.plan.latency import Recorded
from stoker.sizes import counted, format_bytes
from stoker.store.protocol import Readable
from stoker.task_group import task_group
from stoker.tier import ObjectRef

__all__ = ["LEAST_PROBE_BYTES", "Probe", "ProbeLimits", "probe"]

_SMALL_BYTES = 1024
_LARGE_BYTES = 8 << 20
LEAST_PROBE_BYTES = 64 << 10
_READ_SECONDS = 0.5
"""About as long as a measured transfer may take: the slower a connection, the fewer bytes are asked for."""
_CONNECTIONS = (4, 8, 16, 32)
"""Tried one after the other, until the link is full."""
_READS_EACH, _READS_STEADY = 2, 3
"""Of each connection while that is found out, and then: the first reads begin together, and leave the link idle."""
_SLOWER, _MUCH_SLOWER = 1.3, 1.6
"""The link is full when several transfers take so many times as long as one alone; the second one where that is told by
whole reads, of which first bytes are a large part."""
_BELIEVED = 8
"""Connections whose rates are added up where none of them could be measured."""
_TELLING_BYTES = 512 << 10
_USUAL_BYTES_PER_SECOND = 90e6
"""Transfers of fewer bytes than that may come out of buffers in no time; then a connection is taken to be no faster
than an object store's usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLimits:
    """What a probe may take.

    Attributes:
        requests: reads, at most.
        size_bytes: that they ask for, at most.
        seconds: in all, at most.
        first_bytes: of the requests, those that are for next to nothing.
    """

    requests: int = 256
    size_bytes: int = 256 << 20
    seconds: float = 30.0
    first_bytes: int = 12

    def __post_init__(self) -> None:
        if not 2 <= self.first_bytes < self.requests - 2:
            raise ConfigError(f"a probe needs 2 small reads and 3 more at least, not {self}")
        if self.size_bytes < LEAST_PROBE_BYTES or not self.seconds > 0:
            raise ConfigError(f"a probe needs at least {LEAST_PROBE_BYTES} bytes and some seconds, not {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was measured.

    Attributes:
        connect_seconds: by how much a connection's first request took longer than others: names, handshakes.
        first_byte_seconds: of each small read, from the request to its answer.
        connection_bytes_per_second: of one transfer alone.
        is_rate_assumed: whether the objects are too small to tell that rate, and the usual one is taken.
        total_bytes_per_second: of several together.
        is_saturated: whether more connections would bring no more; if not, there may be more than the total.
        connections: that brought it.
        requests: that were sent.
        failed: of them, those that ended in an error that may pass.
        read_bytes: that arrived.
        seconds: that it took.
    """

    connect_seconds: float
    first_byte_seconds: tuple[float, ...] = field(repr=False)
    connection_bytes_per_second: float
    is_rate_assumed: bool
    total_bytes_per_second: float
    is_saturated: bool
    connections: int
    requests: int
    failed: int
    read_bytes: int
    seconds: float

    @property
    def median_seconds(self) -> float:
        """The median time to a first byte."""
        return median(self.first_byte_seconds)

    @property
    def slowest_seconds(self) -> float:
        """The longest time to a first byte."""
        return max(self.first_byte_seconds)

    def bucket(self) -> BucketModel:
        """Return a bucket that answers like this one; what all share is the machine's network, not the bucket's."""
        return BucketModel(
            first_byte=Recorded(self.first_byte_seconds),
            connection_bytes_per_second=self.connection_bytes_per_second,
        )


async def probe(store: Readable, refs: Sequence[ObjectRef], limits: ProbeLimits | None = None) -> Probe:
    """Measure a store by reading parts of some of its objects; nothing is verified or kept.

    Args:
        store: where they are.
        refs: what may be read, not empty; the larger, the better the rates.
        limits: on requests, bytes and time.

    Raises:
        DeadlineError: it did not end in time.
        StoreError: a read failed for good, or every read of a kind failed.
    """
    if not any(ref.size_bytes for ref in refs):
        raise ConfigError(f"there is nothing to read at {store.url}")
    return await _Prober(store, [ref for ref in refs if ref.size_bytes], limits or ProbeLimits()).run()


@dataclass(frozen=True, slots=True)
class _Read:
    """One read: when it was sent, when its answer began, when it was complete, and its bytes."""

    sent: float
    begun: float
    done: float
    size_bytes: int


class _Prober:
    def __init__(self, store: Readable, refs: Sequence[ObjectRef], limits: ProbeLimits) -> None:
        self._store, self._limits = store, limits
        self._refs: Iterator[ObjectRef] = cycle(refs)
        self._requests = self._failed = self._asked_bytes = self._read_bytes = 0
        self._connecting_seconds = 0.0
        self._last: TransientError | None = None

    async def run(self) -> Probe:
        begun = asyncio.get_running_loop().time()
        async with self._in_time():
            reads = [await self._read(_SMALL_BYTES) for _ in range(self._limits.first_bytes)]
            waits = tuple(read.done - read.sent for read in self._some(reads[1:]))  # the first one may connect
            alone, is_assumed = await self._alone(median(waits))
            total, is_saturated, connections = await self._together(alone, is_assumed, median(waits))
        return Probe(
            connect_seconds=max(0.0, self._connecting_seconds - median(waits)),
            first_byte_seconds=waits,
            connection_bytes_per_second=alone,
            is_rate_assumed=is_assumed,
            total_bytes_per_second=total,
            is_saturated=is_saturated,
            connections=connections,
            requests=self._requests,
            failed=self._failed,
            read_bytes=self._read_bytes,
            seconds=asyncio.get_running_loop().time() - begun,
        )

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        deadline = asyncio.timeout(self._limits.seconds)
        try:
            async with deadline:
                yield
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineError(
                f"{self._store.url} was not measured within {self._limits.seconds:g} seconds: "
                f"{counted(self._requests, 'request')} brought {format_bytes(self._read_bytes)}; "
                "measure fewer bytes, or plan with figures that are given"
            ) from self._last

    async def _alone(self, first_byte_seconds: float) -> tuple[float, bool]:
        """Return the bytes a second of one transfer alone, from three of growing size, and whether that is assumed."""
        reads: list[_Read] = []
        size_bytes = min(_LARGE_BYTES, self._limits.size_bytes // 16)
        for wanted in (size_bytes // 8, size_bytes, size_bytes):
            reads += [read for read in [await self._read(self._sized(wanted, reads))] if read is not None]
        telling = self._some(reads)[-2:]
        found = median(_rate(read, first_byte_seconds) for read in telling)
        is_assumed = telling[-1].size_bytes < _TELLING_BYTES and found >= _USUAL_BYTES_PER_SECOND
        return (_USUAL_BYTES_PER_SECOND if is_assumed else found), is_assumed

    async def _together(self, alone: float, is_assumed: bool, first_byte_seconds: float) -> tuple[float, bool, int]:
        """Return the bytes a second of several transfers, whether the link is full, and how many they were.

        It is full when they take longer than one alone would; then twice as many keep it full for a while.
        """
        found = alone, False, 1
        for connections in _CONNECTIONS:
            size_bytes = self._share(connections * _READS_EACH, alone)
            if not size_bytes:
                break
            batch = self._some(chain.from_iterable(await self._at_once(connections, _READS_EACH, size_bytes)))
            if _slower(batch, alone, first_byte_seconds) <= 1.0:
                believed = min(connections, _BELIEVED) if is_assumed else connections
                found = believed * alone, False, connections
                continue
            rough = sum(read.size_bytes for read in batch) / _span(batch)
            connections = min(2 * connections, _CONNECTIONS[-1])
            size_bytes = min(self._share(connections * _READS_STEADY, alone), int(rough / connections / _READS_STEADY))
            if size_bytes < LEAST_PROBE_BYTES:
                return rough, True, connections
            return _steady(await self._at_once(connections, _READS_STEADY, size_bytes)) or rough, True, connections
        return found

    def _share(self, reads: int, alone: float) -> int:
        """Return how many bytes each of so many reads may ask for at a connection's rate; 0 if few are left."""
        left_bytes = max(0, self._limits.size_bytes - self._asked_bytes) // reads
        size_bytes = min(left_bytes, _LARGE_BYTES, max(LEAST_PROBE_BYTES, int(alone * _READ_SECONDS)))
        return size_bytes if self._requests + reads <= self._limits.requests and size_bytes >= LEAST_PROBE_BYTES else 0

    async def _at_once(self, connections: int, reads: int, size_bytes: int) -> list[list[_Read]]:
        """Return the reads of each of several connections, without those that failed."""

        async def connection() -> list[_Read | None]:
            return [await self._read(size_bytes) for _ in range(reads)]

        async with task_group() as group:
            tasks = [group.create_task(connection()) for _ in range(connections)]
        if not self._connecting_seconds:  # all of them but one are new
            firsts = [task.result()[0] for task in tasks]
            self._connecting_seconds = median(0.0 if read is None else read.begun - read.sent for read in firsts)
        return [[read for read in task.result() if read is not None] for task in tasks]

    def _sized(self, size_bytes: int, before: Sequence[_Read]) -> int:
        """Return how many bytes to ask for, given how fast those before came."""
        if not before:
            return size_bytes
        return min(size_bytes, max(LEAST_PROBE_BYTES, int(_rate(before[-1], 0.0) * _READ_SECONDS)))

    async def _read(self, size_bytes: int) -> _Read | None:
        """Read the beginning of the next object; None if that failed in a way that may pass."""
        loop, begun = asyncio.get_running_loop(), 0.0

        def begin() -> None:
            nonlocal begun
            begun = loop.time()

        ref = next(self._refs)
        end = min(size_bytes, ref.size_bytes)
        self._requests += 1
        self._asked_bytes += end
        sent = loop.time()
        try:
            await self._store.get_range(ref.key, 0, end, into=memoryview(bytearray(end)), begun=begin)
        except TransientError as error:
            self._failed, self._last = self._failed + 1, error
            return None
        self._read_bytes += end
        return _Read(sent, begun or sent, loop.time(), end)

    def _some(self, reads: Iterable[_Read | None]) -> list[_Read]:
        """Return those that ended well.

        Raises:
            TransientError: none did.
        """
        found = [read for read in reads if read is not None]
        if not found and self._last is not None:
            raise self._last
        return found


def _seconds(read: _Read, first_byte_seconds: float) -> float:
    """Return how long the bytes took; of a store that does not tell when they begin, without a first byte's time."""
    waited = read.begun - read.sent or first_byte_seconds
    return max(1e-6, read.done - read.sent - waited)


def _rate(read: _Read, first_byte_seconds: float) -> float:
    return read.size_bytes / _seconds(read, first_byte_seconds)


def _slower(reads: Sequence[_Read], alone: float, first_byte_seconds: float) -> float:
    """Return how much longer reads took than one alone, by the factor from which on that says something."""
    if median(read.size_bytes for read in reads) >= _TELLING_BYTES:
        return median(_seconds(read, first_byte_seconds) / (read.size_bytes / alone) for read in reads) / _SLOWER
    return (
        median((read.done - read.sent) / (first_byte_seconds + read.size_bytes / alone) for read in reads)
        / _MUCH_SLOWER
    )


def _span(reads: Sequence[_Read]) -> float:
    return max(1e-6, max(read.done for read in reads) - min(read.begun for read in reads))


def _steady(connections: Sequence[Sequence[_Read]]) -> float:
    """Return the bytes a second while every connection had something to read and half were receiving; 0 if none did.

    Connections that begin together wait for first bytes together, and leave the link idle meanwhile.
    """
    working = [reads for reads in connections if reads]
    start = max((reads[0].begun for reads in working), default=0.0)
    end = min((reads[-1].done for reads in working), default=0.0)
    changes = [(start, 0, 0.0), (end, 0, 0.0)]
    for read in chain.from_iterable(working):
        begun, done = max(start, read.begun), min(end, read.done)
        if begun < done:
            rate = read.size_bytes / (read.done - read.begun)
            changes += [(begun, 1, rate), (done, -1, -rate)]
    receiving, rate, brought, seconds = 0, 0.0, 0.0, 0.0
    for (moment, more, faster), (following, _, _) in pairwise(sorted(changes)):
        receiving, rate = receiving + more, rate + faster
        if 2 * receiving >= len(working):
            brought, seconds = brought + rate * (following - moment), seconds + following - moment
    return brought / seconds if seconds > 0.0 else 0.0
