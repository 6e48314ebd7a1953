"""Measures a bucket with a few reads: time to the first byte, bandwidth of one connection and of several.

The duration of a request is the time to its first byte, in which many requests can wait at once, plus the time of its
bytes, for which requests share a link. The probe separates the two. Requests and bytes have limits.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice, pairwise
from statistics import median
from typing import Annotated, TypeVar

from stoker._base.arguments import Bound, Bounded, Positive
from stoker._base.sizes import counted, format_bytes
from stoker._base.task_group import task_group
from stoker._diagnostics.latency import BucketModel, Recorded, TimedRead, TimedReader, rate_limit_of
from stoker.abc import ObjectRef, Readable
from stoker.errors import ConfigError, DeadlineError

T = TypeVar("T")
_SMALL_BYTES = 1024
_LARGE_BYTES = 8 << 20
LEAST_PROBE_BYTES = 64 << 10
_READ_SECONDS = 0.5
"""Approximate maximum duration of a measured transfer: the slower a connection, the fewer bytes are requested."""
_LEAVE_SECONDS = 3.0
"""Time to wait for late responses at the end, to know how late they are."""
_CONNECTIONS = (8, 32)
"""Numbers of connections to try in turn, until the link is full."""
_READS_ALONE, _TRIES = 3, 5
"""Reads, and attempts at them, to measure the rate of one connection: some attempts may be late or fail."""
_READS_EACH, _READS_STEADY = 2, 3
"""Reads per connection while looking for a full link, and once it is full: the first reads of all connections begin
together and leave the link idle."""
_PART = 0.4
"""Fraction of the remaining bytes to use: more connections may follow, and the last measurement does."""
_LOOKING_CONNECTIONS, _LOOKING_REQUESTS = 16, 48
"""Connections and requests that look for a request rate limit."""
_LOOKS = 2
"""Number of times that a limit must be found: a busy machine delays requests, too, but rarely twice."""
_RATE_CONNECTIONS, _RATE_REQUESTS, _RATE_SECONDS = 8, 80, 1.5
"""Connections, requests and maximum seconds with which to measure a limit that was found."""
_PRESSURE, _LEAST_SPAN_SECONDS, _LONGEST_PAUSE_SECONDS = 4.0, 0.1, 0.5
"""While measuring a limit: requests sent per answered one; minimum time after which that ratio is known; and maximum
pause of a connection after a refusal."""
_OBSERVED_SECONDS, _TELLING_SECONDS, _MUCH_LESS = 0.5, 0.1, 0.5
"""Duration of the last measurement with several connections; its minimum duration; and the fraction of the expected
rate below which the link is full."""
_MOST_ERRORS, _FAILING = 0.9, 0.1
"""Maximum fraction of errors of a simulated bucket; and the fraction from which on failures are not due to the rate."""
_SPACING, _READS_PACED, _PACED_SECONDS = 1.1, 6, 8.0
"""Once there is a limit: spacing of requests as a multiple of its interval; number of small reads that measure first
bytes without a queue; and maximum seconds of the remaining measurement."""
_SLOWER, _MUCH_SLOWER = 1.3, 1.6
"""The link is full if several transfers take this many times as long as one alone; the second factor is for whole
reads, of which the time to the first byte is a large part."""
_BELIEVED = 8
"""Number of connections whose assumed rates are added up if no rate could be measured."""
_TELLING_BYTES = 512 << 10
_USUAL_BYTES_PER_SECOND = 90e6
"""Smaller transfers may come from buffers almost at once; then a connection is assumed to have the usual rate of an
object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLimits(Bounded):
    """Limits of a probe.

    Attributes:
        requests: maximum number of reads.
        size_bytes: maximum number of bytes that they request in total.
        seconds: maximum duration of the probe, in seconds.
        first_bytes: number of small reads, which measure the time to the first byte.
    """

    requests: int = 256
    size_bytes: Annotated[int, Bound(">=", LEAST_PROBE_BYTES)] = 256 << 20
    seconds: Positive[float] = 30.0
    first_bytes: Annotated[int, Bound(">=", 2)] = 12

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)  # super() does not know a class with slots
        if not self.first_bytes < self.requests - 2:
            raise ConfigError(f"a probe needs at least 2 small reads and 3 more, not {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Measurements of a bucket.

    Attributes:
        connect_seconds: median time that a new connection adds to its first request (DNS, handshakes), in seconds.
        connect_range_seconds: minimum and maximum of that time.
        first_byte_seconds: times to the first byte, one per response: those of small reads, repeated, and the late
            ones of all reads. A response that never began counts with the time that it was waited for.
        late: number of late first bytes; a fetcher would hedge these requests.
        connection_bytes_per_second: rate of a single transfer, without the time to the first byte.
        is_rate_assumed: whether that rate is the usual one because the objects are too small to measure it.
        observed_alone_bytes_per_second: rate of reads in sequence, including the time to the first byte.
        total_bytes_per_second: rate of several transfers together.
        observed_bytes_per_second: rate of several connections, including the times to the first byte, over half a
            second if the limits allow.
        failed_part: fraction of requests, 0 to 1, that failed although they respected the bucket's request rate.
        is_saturated: whether more connections would not be faster; if not, ``total_bytes_per_second`` is a lower bound.
        connections: number of connections with that total rate.
        requests: number of requests sent.
        failed: number of requests that ended in a transient error.
        throttled: number of failed requests that the bucket refused because there were too many.
        limit: model of a bucket with the request rate limit; None if none was found.
        read_bytes: bytes received, without those of late reads.
        seconds: duration of the probe, in seconds.
    """

    connect_seconds: float
    connect_range_seconds: tuple[float, float]
    first_byte_seconds: tuple[float, ...] = field(repr=False)
    late: int
    connection_bytes_per_second: float
    is_rate_assumed: bool
    observed_alone_bytes_per_second: float
    total_bytes_per_second: float
    observed_bytes_per_second: float
    failed_part: float
    is_saturated: bool
    connections: int
    requests: int
    failed: int
    throttled: int
    limit: BucketModel | None
    read_bytes: int
    seconds: float

    @property
    def median_seconds(self) -> float:
        """The median time to the first byte, in seconds."""
        return median(self.first_byte_seconds)

    @property
    def slowest_seconds(self) -> float:
        """The longest time to the first byte, in seconds."""
        return max(self.first_byte_seconds)

    def bucket(self) -> BucketModel:
        """Return a model of this bucket; its nodes share the request rate, not the network bandwidth."""
        return replace(
            self.limit or BucketModel(),
            first_byte=Recorded(self.first_byte_seconds),
            connection_bytes_per_second=self.connection_bytes_per_second,
            error_fraction=min(_MOST_ERRORS, self.failed_part),
        )


async def probe(store: Readable, refs: Sequence[ObjectRef], limits: ProbeLimits | None = None) -> Probe:
    """Measure a store by reading parts of some of its objects; nothing is verified or kept.

    Args:
        store: store to measure.
        refs: objects that may be read, not all empty; larger objects give better rates.
        limits: limits of requests, bytes and time.

    Raises:
        ConfigError: all objects are empty.
        DeadlineError: the probe exceeded its time limit.
        StoreError: a read failed with an error that is not transient, or every read of a kind failed.
    """
    if not any(ref.size_bytes for ref in refs):
        raise ConfigError(f"there is nothing to read at {store.url}")
    limits = limits or ProbeLimits()
    deadline, reader = asyncio.timeout(limits.seconds), None
    try:
        async with deadline, task_group() as group:
            reader = TimedReader(store, [ref for ref in refs if ref.size_bytes], group)
            return await _Prober(reader, limits).run()
    except TimeoutError:
        if reader is None or not deadline.expired():
            raise
        raise DeadlineError(
            f"{store.url} was not measured within {limits.seconds:g} seconds: "
            f"{counted(reader.requests, 'request')} brought {format_bytes(reader.read_bytes)}; "
            "measure fewer bytes, or plan with given figures"
        ) from reader.last


class _Prober:
    def __init__(self, reader: TimedReader, limits: ProbeLimits) -> None:
        self._reader, self._limits = reader, limits
        self._brought = 0.0
        self._connects: tuple[float, ...] = ()
        self._limit: BucketModel | None = None
        self._asked = self._failed = 0
        """Requests, and failed requests, before the probe respected a request rate limit."""

    async def run(self) -> Probe:
        reader, loop = self._reader, asyncio.get_running_loop()
        begun = loop.time()
        waits = await self._first_bytes()
        reads = await self._alone()
        alone, is_assumed = _connection_rate(reads, median(waits))
        total, is_saturated, connections = await self._together(alone, is_assumed, median(waits))
        observed, is_full = await self._observed(connections, total, median(waits))
        if is_full and not is_saturated:
            total, is_saturated = observed, True
        asked, failed = reader.requests - self._asked, reader.failed - self._failed
        failed_part = failed / max(1, asked)
        if self._limit is None and reader.throttled and failed_part < _FAILING:  # too many requests at once
            await self._press(_RATE_CONNECTIONS, self._limits.requests - reader.requests)
            self._limit = rate_limit_of(reader.sent, median(waits))
            total, is_saturated = max(total, _BELIEVED * alone), False
        late_seconds = self._late_seconds  # before the late responses become the majority of the recent ones
        await reader.leave(min(_LEAVE_SECONDS, (self._limits.seconds - (loop.time() - begun)) / 2))
        told = reader.first_byte_seconds + (reader.patient_seconds if self._limit is None else [])
        late = [wait for wait in told if wait > late_seconds]
        usual = [wait for wait in waits if wait <= late_seconds]
        connects = [max(0.0, each - median(waits)) for each in self._connects] or [0.0]
        answers = max(len(told), len(waits))
        return Probe(
            connect_seconds=connects[len(connects) // 2],
            connect_range_seconds=(connects[0], connects[-1]),
            first_byte_seconds=(*islice(cycle(usual), answers - len(late)), *late),
            late=len(late),
            connection_bytes_per_second=alone,
            is_rate_assumed=is_assumed,
            observed_alone_bytes_per_second=_observed_rate(reads),
            total_bytes_per_second=total,
            observed_bytes_per_second=observed,
            failed_part=failed_part,
            is_saturated=is_saturated,
            connections=connections,
            requests=reader.requests,
            failed=reader.failed,
            throttled=reader.throttled,
            limit=self._limit,
            read_bytes=reader.read_bytes,
            seconds=loop.time() - begun,
        )

    @property
    def _late_seconds(self) -> float:
        return self._reader.late_seconds or math.inf

    async def _first_bytes(self) -> list[float]:
        """Return the times of small reads in sequence, at most as fast as the bucket's request rate allows."""
        reader, reads = self._reader, list[TimedRead | None]()
        while len(reads) < self._limits.first_bytes and not reader.throttled:
            reads.append(await reader.read(_SMALL_BYTES))
        waits = [read.done - read.sent for read in reads[1:] if read is not None]  # the first one may connect
        self._limit = await self._rate_limit(median(waits or [0.0]))
        if self._limit is None:
            return waits or [read.done - read.sent for read in self._some(reads)]
        self._asked, self._failed = reader.requests, reader.failed
        reader.spacing_seconds = _SPACING / self._limit.requests_per_second
        reads = [await reader.read(_SMALL_BYTES) for _ in range(_READS_PACED)]
        return [read.done - read.sent for read in self._some(reads)]

    async def _rate_limit(self, first_byte_seconds: float) -> BucketModel | None:
        """Return the bucket's request limit: many small requests at once find it, more of them measure its rate."""
        reader, left = self._reader, self._limits.requests - self._reader.requests
        for _ in range(_LOOKS):
            if reader.throttled:
                break
            begun = len(reader.sent)
            firsts = await self._press(_LOOKING_CONNECTIONS, min(_LOOKING_REQUESTS, left // 4), looking=True)
            self._connects = self._connects or tuple(sorted(read.begun - read.sent for read in firsts))
            if rate_limit_of(reader.sent[begun:], first_byte_seconds) is None:
                return None
        if reader.throttled:
            await self._press(_RATE_CONNECTIONS, min(_RATE_REQUESTS, left // 3))
        return rate_limit_of(reader.sent[1:], first_byte_seconds)

    async def _press(self, connections: int, requests: int, *, looking: bool = False) -> list[TimedRead]:
        """Send small requests, a few times as fast as the bucket answers them; return each connection's first answer.

        Sending stops at the time limit and, while ``looking``, at the first refusal.
        """
        loop, reader, answered = asyncio.get_running_loop(), self._reader, 0
        begun_seconds, most = loop.time(), reader.requests + requests
        rng = random.Random(0)  # noqa: S311 - jitter of the pauses

        async def connection() -> TimedRead | None:
            nonlocal answered
            first = None
            while loop.time() < begun_seconds + _RATE_SECONDS and reader.requests < most:
                if looking and reader.throttled:
                    break
                read = await reader.read(_SMALL_BYTES, patience_seconds=_LEAVE_SECONDS)
                first, answered = first or read, answered + (read is not None)
                if read is None:
                    each_seconds = max(_LEAST_SPAN_SECONDS, loop.time() - begun_seconds) / max(1, answered)
                    pause_seconds = rng.uniform(0.0, 2.0) * each_seconds * connections / _PRESSURE
                    await asyncio.sleep(min(_LONGEST_PAUSE_SECONDS, pause_seconds))
            return first

        return [read for read in await _on_each(connections, connection) if read is not None]

    async def _alone(self) -> list[TimedRead]:
        """Return the last two of three reads in sequence, of growing size."""
        reads: list[TimedRead] = []
        size_bytes = min(_LARGE_BYTES, self._limits.size_bytes // 16)
        for _ in range(min(_TRIES, self._limits.requests - self._limits.first_bytes)):
            wanted = size_bytes if reads else size_bytes // 8
            read = await self._reader.read(self._sized(wanted, reads))
            reads += [] if read is None else [read]
            if len(reads) == _READS_ALONE:
                break
        return self._some(reads)[-2:]

    async def _together(self, alone: float, is_assumed: bool, first_byte_seconds: float) -> tuple[float, bool, int]:
        """Return the bytes per second of several transfers, whether the link is full, and the number of connections.

        The link is full if transfers take longer than one alone; then twice as many connections keep it full for a
        while. Small reads never replace the result of large ones, which is more precise.
        """
        found, tried_bytes = (alone, False, 1), 0
        for connections in _CONNECTIONS:
            size_bytes = self._share(connections * _READS_EACH, alone, _PART)
            if not size_bytes or (size_bytes <= _TELLING_BYTES <= tried_bytes):
                break
            tried_bytes = size_bytes
            connected = await self._at_once(connections, _READS_EACH, size_bytes)
            batch = self._some(chain.from_iterable(connected))
            sent = min(read.sent for read in batch)
            self._brought = sum(read.size_bytes for read in batch) / max(1e-6, max(read.done for read in batch) - sent)
            if _slower(batch, alone, first_byte_seconds) <= 1.0:
                believed = min(connections, _BELIEVED) if is_assumed else connections
                found = believed * min(alone, _typical(batch, first_byte_seconds)), False, connections
                continue
            rough = _steady(connected) or sum(read.size_bytes for read in batch) / _span(batch)
            connections = min(2 * connections, _CONNECTIONS[-1])
            size_bytes = min(
                self._share(connections * _READS_STEADY, alone, 1.0), int(rough / connections / _READS_STEADY)
            )
            if size_bytes < LEAST_PROBE_BYTES:
                return rough, True, connections
            return _steady(await self._at_once(connections, _READS_STEADY, size_bytes)) or rough, True, connections
        return found

    async def _observed(self, connections: int, total: float, first_byte_seconds: float) -> tuple[float, bool]:
        """Return the bytes per second of several connections over some time, and whether they show a full link.

        Short transfers come from buffers: only their sum is reliable.
        """
        loop, reader = asyncio.get_running_loop(), self._reader
        size_bytes = min(_LARGE_BYTES, max(LEAST_PROBE_BYTES, int(total / connections * _READ_SECONDS)))
        begun_seconds, before_bytes, is_whole = loop.time(), reader.read_bytes, self._limit is None

        async def connection() -> None:
            nonlocal is_whole
            while loop.time() < begun_seconds + _OBSERVED_SECONDS:
                left = self._limits.size_bytes - reader.asked_bytes
                if left < size_bytes or reader.requests >= self._limits.requests:
                    is_whole = False
                    return
                is_whole = await reader.read(size_bytes) is not None and is_whole

        await _on_each(connections, connection)
        seconds = loop.time() - begun_seconds
        if reader.read_bytes == before_bytes or seconds < _TELLING_SECONDS:
            return (self._brought or total), False
        observed = max(self._brought, (reader.read_bytes - before_bytes) / seconds)
        each_seconds = first_byte_seconds + size_bytes * connections / total
        return observed, is_whole and observed < _MUCH_LESS * connections * size_bytes / each_seconds

    def _share(self, reads: int, alone: float, part: float) -> int:
        """Return how many bytes each of ``reads`` may request at a connection's rate; 0 if too few are left.

        Together they use at most the fraction ``part`` of the remaining bytes, unless that is too little to measure.
        """
        left_bytes = max(0, self._limits.size_bytes - self._reader.asked_bytes) // reads
        left_bytes = max(int(part * left_bytes), min(left_bytes, _TELLING_BYTES))
        size_bytes = min(left_bytes, _LARGE_BYTES, max(LEAST_PROBE_BYTES, int(alone * _READ_SECONDS)))
        most = self._limits.requests
        if self._limit is not None:
            most = min(most, self._reader.requests + int(_PACED_SECONDS * self._limit.requests_per_second))
        is_enough = self._reader.requests + reads <= most and size_bytes >= LEAST_PROBE_BYTES
        return size_bytes if is_enough else 0

    async def _at_once(self, connections: int, reads: int, size_bytes: int) -> list[list[TimedRead]]:
        """Return the reads of each of several connections, without failed and late ones."""

        async def connection() -> list[TimedRead | None]:
            return [await self._reader.read(size_bytes) for _ in range(reads)]

        found = await _on_each(connections, connection)
        if not self._connects:  # all connections but one are new
            firsts = [first for first, *_ in found if first is not None]
            self._connects = tuple(sorted(read.begun - read.sent for read in firsts))
        return [[read for read in each if read is not None] for each in found]

    def _sized(self, size_bytes: int, before: Sequence[TimedRead]) -> int:
        """Return how many bytes to request, given the rate of the last read."""
        if not before:
            return size_bytes
        return min(size_bytes, max(LEAST_PROBE_BYTES, int(_rate(before[-1], 0.0) * _READ_SECONDS)))

    def _some(self, reads: Iterable[TimedRead | None]) -> list[TimedRead]:
        """Return the successful reads.

        Raises:
            TransientError: there are none.
        """
        found = [read for read in reads if read is not None]
        if not found:
            raise self._reader.last or DeadlineError(f"no answer began within {self._late_seconds:.3g} seconds")
        return found


async def _on_each(connections: int, connection: Callable[[], Coroutine[None, None, T]]) -> list[T]:
    """Run ``connection`` several times at once and return the results."""
    async with task_group() as group:
        tasks = [group.create_task(connection()) for _ in range(connections)]
    return [task.result() for task in tasks]


def _seconds(read: TimedRead, first_byte_seconds: float) -> float:
    """Return the transfer time of a read: without its own first-byte time, or the usual one if that is not reported."""
    waited = read.begun - read.sent or first_byte_seconds
    return max(1e-6, read.done - read.sent - waited)


def _rate(read: TimedRead, first_byte_seconds: float) -> float:
    return read.size_bytes / _seconds(read, first_byte_seconds)


def _connection_rate(reads: Sequence[TimedRead], first_byte_seconds: float) -> tuple[float, bool]:
    """Return the bytes per second of one transfer alone, and whether that is assumed."""
    found = median(_rate(read, first_byte_seconds) for read in reads)
    is_assumed = reads[-1].size_bytes < _TELLING_BYTES and found >= _USUAL_BYTES_PER_SECOND
    return (_USUAL_BYTES_PER_SECOND if is_assumed else found), is_assumed


def _observed_rate(reads: Sequence[TimedRead]) -> float:
    """Return the bytes per second of reads in sequence, including the times to the first byte."""
    return sum(read.size_bytes for read in reads) / max(1e-6, sum(read.done - read.sent for read in reads))


def _typical(reads: Sequence[TimedRead], first_byte_seconds: float) -> float:
    """Return the median bytes per second of reads; infinity if they are too small to measure."""
    if median(read.size_bytes for read in reads) < _TELLING_BYTES:
        return math.inf
    return median(_rate(read, first_byte_seconds) for read in reads)


def _slower(reads: Sequence[TimedRead], alone: float, first_byte_seconds: float) -> float:
    """Return how much longer reads took than one alone, as a multiple of the factor that shows a full link."""
    if median(read.size_bytes for read in reads) >= _TELLING_BYTES:
        return median(_seconds(read, first_byte_seconds) / (read.size_bytes / alone) for read in reads) / _SLOWER
    return (
        median((read.done - read.sent) / (first_byte_seconds + read.size_bytes / alone) for read in reads)
        / _MUCH_SLOWER
    )


def _span(reads: Sequence[TimedRead]) -> float:
    return max(1e-6, max(read.done for read in reads) - min(read.begun for read in reads))


def _steady(connections: Sequence[Sequence[TimedRead]]) -> float:
    """Return the bytes per second while at least half of the connections were receiving; 0 if that never was so.

    Connections that start together wait for first bytes together, and the link is idle meanwhile; so it is at the end,
    while the last ones wait for late responses. Half of the connections are assumed to fill the link and to share it
    evenly, so a read's bytes are spread over time in inverse proportion to the number of receiving connections.
    """
    half = sum(1 for reads in connections if reads) / 2
    reads = list(chain.from_iterable(connections))
    changes = sorted(chain.from_iterable(((read.begun, 1), (read.done, -1)) for read in reads))
    receiving, part, steady, seconds = 0, 0.0, 0.0, 0.0
    parts = {changes[0][0]: (part, steady)} if changes else {}
    for (moment, more), (following, _) in pairwise(changes):
        receiving += more
        part += (following - moment) / max(receiving, half)
        if receiving >= half:
            steady, seconds = steady + (following - moment) / receiving, seconds + following - moment
        parts[following] = part, steady
    brought = 0.0
    for read in reads:
        (part, steady), (part_after, steady_after) = parts[read.begun], parts[read.done]
        if part_after > part:
            brought += read.size_bytes * (steady_after - steady) / (part_after - part)
    return brought / seconds if seconds > 0.0 else 0.0
