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

from stoker._base.arguments import BoundedConfig, NumberBound, Positive
from stoker._base.sizes import format_bytes, format_count
from stoker._base.task_group import task_group
from stoker._diagnostics.latency import BucketModel, RecordedLatency, TimedRead, TimedReader, estimate_rate_limit
from stoker.abc import ObjectRef, Readable
from stoker.errors import ConfigError, DeadlineError

T = TypeVar("T")
_SMALL_READ_BYTES = 1024
_MAX_READ_BYTES = 8 << 20
MIN_PROBE_BYTES = 64 << 10
_READ_SECONDS = 0.5
"""Approximate maximum duration of a measured transfer: the slower a connection, the fewer bytes are requested."""
_LATE_TIMEOUT_SECONDS = 3.0
"""Time to wait for late responses at the end, to know how late they are."""
_CONNECTIONS = (8, 32)
"""Numbers of connections to try in turn, until the link is full."""
_READS_ALONE, _MAX_ATTEMPTS = 3, 5
"""Reads, and attempts at them, to measure the rate of one connection: some attempts may be late or fail."""
_READS_EACH, _READS_STEADY = 2, 3
"""Reads per connection while looking for a full link, and once it is full: the first reads of all connections begin
together and leave the link idle."""
_BYTES_FRACTION = 0.4
"""Fraction of the remaining bytes to use: more connections may follow, and the last measurement does."""
_DETECTION_CONNECTIONS, _DETECTION_REQUESTS = 16, 48
"""Connections and requests that look for a request rate limit."""
_LIMIT_DETECTIONS = 2
"""Number of times that a limit must be found: a busy machine delays requests, too, but rarely twice."""
_RATE_CONNECTIONS, _RATE_REQUESTS, _RATE_SECONDS = 8, 80, 1.5
"""Connections, requests and maximum seconds with which to measure a limit that was found."""
_REQUESTS_PER_ANSWER, _MIN_SPAN_SECONDS, _MAX_PAUSE_SECONDS = 4.0, 0.1, 0.5
"""While measuring a limit: requests sent per answered one; minimum time after which that ratio is known; and maximum
pause of a connection after a refusal."""
_OBSERVED_SECONDS, _MIN_OBSERVED_SECONDS, _SATURATED_FRACTION = 0.5, 0.1, 0.5
"""Duration of the last measurement with several connections; its minimum duration; and the fraction of the expected
rate below which the link is full."""
_MAX_ERROR_FRACTION, _FAILING_FRACTION = 0.9, 0.1
"""Maximum fraction of errors of a simulated bucket; and the fraction from which on failures are not due to the rate."""
_SPACING_FACTOR, _PACED_READS, _PACED_SECONDS = 1.1, 6, 8.0
"""Once there is a limit: spacing of requests as a multiple of its interval; number of small reads that measure first
bytes without a queue; and maximum seconds of the remaining measurement."""
_SATURATED_FACTOR, _SATURATED_WHOLE_FACTOR = 1.3, 1.6
"""The link is full if several transfers take this many times as long as one alone; the second factor is for whole
reads, of which the time to the first byte is a large part."""
_ASSUMED_CONNECTIONS = 8
"""Number of connections whose assumed rates are added up if no rate could be measured."""
_MIN_MEASURABLE_BYTES = 512 << 10
_USUAL_BYTES_PER_SECOND = 90e6
"""Smaller transfers may come from buffers almost at once; then a connection is assumed to have the usual rate of an
object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLimits(BoundedConfig):
    """Limits of a probe.

    Attributes:
        requests: maximum number of reads.
        size_bytes: maximum number of bytes that they request in total.
        seconds: maximum duration of the probe, in seconds.
        first_bytes: number of small reads, which measure the time to the first byte.
    """

    requests: int = 256
    size_bytes: Annotated[int, NumberBound(">=", MIN_PROBE_BYTES)] = 256 << 20
    seconds: Positive[float] = 30.0
    first_bytes: Annotated[int, NumberBound(">=", 2)] = 12

    def __post_init__(self) -> None:
        BoundedConfig.__post_init__(self)  # super() does not know a class with slots
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
            first_byte=RecordedLatency(self.first_byte_seconds),
            connection_bytes_per_second=self.connection_bytes_per_second,
            error_fraction=min(_MAX_ERROR_FRACTION, self.failed_part),
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
            f"{format_count(reader.requests, 'request')} brought {format_bytes(reader.read_bytes)}; "
            "measure fewer bytes, or plan with given figures"
        ) from reader.last_error


class _Prober:
    def __init__(self, reader: TimedReader, limits: ProbeLimits) -> None:
        self._reader, self._limits = reader, limits
        self._batch_bytes_per_second = 0.0
        self._connects: tuple[float, ...] = ()
        self._limit: BucketModel | None = None
        self._unpaced_requests = self._unpaced_failures = 0
        """Requests, and failed requests, before the probe respected a request rate limit."""

    async def run(self) -> Probe:
        reader, loop = self._reader, asyncio.get_running_loop()
        started = loop.time()
        waits = await self._first_bytes()
        reads = await self._measure_alone()
        alone, is_assumed = _connection_rate(reads, median(waits))
        total, is_saturated, connections = await self._measure_together(alone, is_assumed, median(waits))
        observed, is_full = await self._measure_sustained(connections, total, median(waits))
        if is_full and not is_saturated:
            total, is_saturated = observed, True
        requests, failed = reader.requests - self._unpaced_requests, reader.failed - self._unpaced_failures
        failed_part = failed / max(1, requests)
        if self._limit is None and reader.throttled and failed_part < _FAILING_FRACTION:  # too many requests at once
            await self._send_burst(_RATE_CONNECTIONS, self._limits.requests - reader.requests)
            self._limit = estimate_rate_limit(reader.sent_requests, median(waits))
            total, is_saturated = max(total, _ASSUMED_CONNECTIONS * alone), False
        late_seconds = self._late_seconds  # before the late responses become the majority of the recent ones
        await reader.wait_for_late(min(_LATE_TIMEOUT_SECONDS, (self._limits.seconds - (loop.time() - started)) / 2))
        first_bytes = reader.first_byte_seconds + (reader.slow_first_byte_seconds if self._limit is None else [])
        late = [wait for wait in first_bytes if wait > late_seconds]
        usual = [wait for wait in waits if wait <= late_seconds]
        connects = [max(0.0, each - median(waits)) for each in self._connects] or [0.0]
        answers = max(len(first_bytes), len(waits))
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
            seconds=loop.time() - started,
        )

    @property
    def _late_seconds(self) -> float:
        return self._reader.late_seconds or math.inf

    async def _first_bytes(self) -> list[float]:
        """Return the times of small reads in sequence, at most as fast as the bucket's request rate allows."""
        reader, reads = self._reader, list[TimedRead | None]()
        while len(reads) < self._limits.first_bytes and not reader.throttled:
            reads.append(await reader.read(_SMALL_READ_BYTES))
        # The first one may connect.
        waits = [read.ended_seconds - read.sent_seconds for read in reads[1:] if read is not None]
        self._limit = await self._rate_limit(median(waits or [0.0]))
        if self._limit is None:
            return waits or [read.ended_seconds - read.sent_seconds for read in self._successful(reads)]
        self._unpaced_requests, self._unpaced_failures = reader.requests, reader.failed
        reader.spacing_seconds = _SPACING_FACTOR / self._limit.requests_per_second
        reads = [await reader.read(_SMALL_READ_BYTES) for _ in range(_PACED_READS)]
        return [read.ended_seconds - read.sent_seconds for read in self._successful(reads)]

    async def _rate_limit(self, first_byte_seconds: float) -> BucketModel | None:
        """Return the bucket's request limit: many small requests at once find it, more of them measure its rate."""
        reader, left = self._reader, self._limits.requests - self._reader.requests
        for _ in range(_LIMIT_DETECTIONS):
            if reader.throttled:
                break
            begun = len(reader.sent_requests)
            firsts = await self._send_burst(
                _DETECTION_CONNECTIONS, min(_DETECTION_REQUESTS, left // 4), stop_at_refusal=True
            )
            self._connects = self._connects or tuple(sorted(read.begun_seconds - read.sent_seconds for read in firsts))
            if estimate_rate_limit(reader.sent_requests[begun:], first_byte_seconds) is None:
                return None
        if reader.throttled:
            await self._send_burst(_RATE_CONNECTIONS, min(_RATE_REQUESTS, left // 3))
        return estimate_rate_limit(reader.sent_requests[1:], first_byte_seconds)

    async def _send_burst(self, connections: int, requests: int, *, stop_at_refusal: bool = False) -> list[TimedRead]:
        """Send small requests, a few times as fast as the bucket answers them; return each connection's first answer.

        Sending stops at the time limit and, while ``stop_at_refusal``, at the first refusal.
        """
        loop, reader, answered = asyncio.get_running_loop(), self._reader, 0
        begun_seconds, most = loop.time(), reader.requests + requests
        rng = random.Random(0)  # noqa: S311 - jitter of the pauses

        async def connection() -> TimedRead | None:
            nonlocal answered
            first = None
            while loop.time() < begun_seconds + _RATE_SECONDS and reader.requests < most:
                if stop_at_refusal and reader.throttled:
                    break
                read = await reader.read(_SMALL_READ_BYTES, patience_seconds=_LATE_TIMEOUT_SECONDS)
                first, answered = first or read, answered + (read is not None)
                if read is None:
                    each_seconds = max(_MIN_SPAN_SECONDS, loop.time() - begun_seconds) / max(1, answered)
                    pause_seconds = rng.uniform(0.0, 2.0) * each_seconds * connections / _REQUESTS_PER_ANSWER
                    await asyncio.sleep(min(_MAX_PAUSE_SECONDS, pause_seconds))
            return first

        return [read for read in await _run_connections(connections, connection) if read is not None]

    async def _measure_alone(self) -> list[TimedRead]:
        """Return the last two of three reads in sequence, of growing size."""
        reads: list[TimedRead] = []
        size_bytes = min(_MAX_READ_BYTES, self._limits.size_bytes // 16)
        for _ in range(min(_MAX_ATTEMPTS, self._limits.requests - self._limits.first_bytes)):
            read_bytes = size_bytes if reads else size_bytes // 8
            read = await self._reader.read(self._next_read_bytes(read_bytes, reads))
            reads += [] if read is None else [read]
            if len(reads) == _READS_ALONE:
                break
        return self._successful(reads)[-2:]

    async def _measure_together(
        self, alone: float, is_assumed: bool, first_byte_seconds: float
    ) -> tuple[float, bool, int]:
        """Return the bytes per second of several transfers, whether the link is full, and the number of connections.

        The link is full if transfers take longer than one alone; then twice as many connections keep it full for a
        while. Small reads never replace the result of large ones, which is more precise.
        """
        result, tried_bytes = (alone, False, 1), 0
        for connections in _CONNECTIONS:
            size_bytes = self._share_bytes(connections * _READS_EACH, alone, _BYTES_FRACTION)
            if not size_bytes or (size_bytes <= _MIN_MEASURABLE_BYTES <= tried_bytes):
                break
            tried_bytes = size_bytes
            connected = await self._read_in_parallel(connections, _READS_EACH, size_bytes)
            batch = self._successful(chain.from_iterable(connected))
            sent = min(read.sent_seconds for read in batch)
            self._batch_bytes_per_second = sum(read.size_bytes for read in batch) / max(
                1e-6, max(read.ended_seconds for read in batch) - sent
            )
            if _relative_slowdown(batch, alone, first_byte_seconds) <= 1.0:
                believed = min(connections, _ASSUMED_CONNECTIONS) if is_assumed else connections
                result = believed * min(alone, _median_rate(batch, first_byte_seconds)), False, connections
                continue
            rough = _steady_rate(connected) or sum(read.size_bytes for read in batch) / _span_seconds(batch)
            connections = min(2 * connections, _CONNECTIONS[-1])
            size_bytes = min(
                self._share_bytes(connections * _READS_STEADY, alone, 1.0), int(rough / connections / _READS_STEADY)
            )
            if size_bytes < MIN_PROBE_BYTES:
                return rough, True, connections
            steady = _steady_rate(await self._read_in_parallel(connections, _READS_STEADY, size_bytes))
            return steady or rough, True, connections
        return result

    async def _measure_sustained(self, connections: int, total: float, first_byte_seconds: float) -> tuple[float, bool]:
        """Return the bytes per second of several connections over some time, and whether they show a full link.

        Short transfers come from buffers: only their sum is reliable.
        """
        loop, reader = asyncio.get_running_loop(), self._reader
        size_bytes = min(_MAX_READ_BYTES, max(MIN_PROBE_BYTES, int(total / connections * _READ_SECONDS)))
        begun_seconds, before_bytes, is_whole = loop.time(), reader.read_bytes, self._limit is None

        async def connection() -> None:
            nonlocal is_whole
            while loop.time() < begun_seconds + _OBSERVED_SECONDS:
                left = self._limits.size_bytes - reader.requested_bytes
                if left < size_bytes or reader.requests >= self._limits.requests:
                    is_whole = False
                    return
                is_whole = await reader.read(size_bytes) is not None and is_whole

        await _run_connections(connections, connection)
        seconds = loop.time() - begun_seconds
        if reader.read_bytes == before_bytes or seconds < _MIN_OBSERVED_SECONDS:
            return (self._batch_bytes_per_second or total), False
        observed = max(self._batch_bytes_per_second, (reader.read_bytes - before_bytes) / seconds)
        each_seconds = first_byte_seconds + size_bytes * connections / total
        return observed, is_whole and observed < _SATURATED_FRACTION * connections * size_bytes / each_seconds

    def _share_bytes(self, reads: int, alone: float, part: float) -> int:
        """Return how many bytes each of ``reads`` may request at a connection's rate; 0 if too few are left.

        Together they use at most the fraction ``part`` of the remaining bytes, unless that is too little to measure.
        """
        left_bytes = max(0, self._limits.size_bytes - self._reader.requested_bytes) // reads
        left_bytes = max(int(part * left_bytes), min(left_bytes, _MIN_MEASURABLE_BYTES))
        size_bytes = min(left_bytes, _MAX_READ_BYTES, max(MIN_PROBE_BYTES, int(alone * _READ_SECONDS)))
        most = self._limits.requests
        if self._limit is not None:
            most = min(most, self._reader.requests + int(_PACED_SECONDS * self._limit.requests_per_second))
        is_enough = self._reader.requests + reads <= most and size_bytes >= MIN_PROBE_BYTES
        return size_bytes if is_enough else 0

    async def _read_in_parallel(self, connections: int, reads: int, size_bytes: int) -> list[list[TimedRead]]:
        """Return the reads of each of several connections, without failed and late ones."""

        async def connection() -> list[TimedRead | None]:
            return [await self._reader.read(size_bytes) for _ in range(reads)]

        reads_by_connection = await _run_connections(connections, connection)
        if not self._connects:  # all connections but one are new
            firsts = [first for first, *_ in reads_by_connection if first is not None]
            self._connects = tuple(sorted(read.begun_seconds - read.sent_seconds for read in firsts))
        return [[read for read in each if read is not None] for each in reads_by_connection]

    def _next_read_bytes(self, size_bytes: int, before: Sequence[TimedRead]) -> int:
        """Return how many bytes to request, given the rate of the last read."""
        if not before:
            return size_bytes
        return min(size_bytes, max(MIN_PROBE_BYTES, int(_transfer_rate(before[-1], 0.0) * _READ_SECONDS)))

    def _successful(self, reads: Iterable[TimedRead | None]) -> list[TimedRead]:
        """Return the successful reads.

        Raises:
            TransientError: there are none.
        """
        successful = [read for read in reads if read is not None]
        if not successful:
            raise self._reader.last_error or DeadlineError(f"no answer began within {self._late_seconds:.3g} seconds")
        return successful


async def _run_connections(connections: int, connection: Callable[[], Coroutine[None, None, T]]) -> list[T]:
    """Run ``connection`` several times at once and return the results."""
    async with task_group() as group:
        tasks = [group.create_task(connection()) for _ in range(connections)]
    return [task.result() for task in tasks]


def _transfer_seconds(read: TimedRead, first_byte_seconds: float) -> float:
    """Return the transfer time of a read: without its own first-byte time, or the usual one if that is not reported."""
    waited = read.begun_seconds - read.sent_seconds or first_byte_seconds
    return max(1e-6, read.ended_seconds - read.sent_seconds - waited)


def _transfer_rate(read: TimedRead, first_byte_seconds: float) -> float:
    return read.size_bytes / _transfer_seconds(read, first_byte_seconds)


def _connection_rate(reads: Sequence[TimedRead], first_byte_seconds: float) -> tuple[float, bool]:
    """Return the bytes per second of one transfer alone, and whether that is assumed."""
    rate = median(_transfer_rate(read, first_byte_seconds) for read in reads)
    is_assumed = reads[-1].size_bytes < _MIN_MEASURABLE_BYTES and rate >= _USUAL_BYTES_PER_SECOND
    return (_USUAL_BYTES_PER_SECOND if is_assumed else rate), is_assumed


def _observed_rate(reads: Sequence[TimedRead]) -> float:
    """Return the bytes per second of reads in sequence, including the times to the first byte."""
    return sum(read.size_bytes for read in reads) / max(
        1e-6, sum(read.ended_seconds - read.sent_seconds for read in reads)
    )


def _median_rate(reads: Sequence[TimedRead], first_byte_seconds: float) -> float:
    """Return the median bytes per second of reads; infinity if they are too small to measure."""
    if median(read.size_bytes for read in reads) < _MIN_MEASURABLE_BYTES:
        return math.inf
    return median(_transfer_rate(read, first_byte_seconds) for read in reads)


def _relative_slowdown(reads: Sequence[TimedRead], alone: float, first_byte_seconds: float) -> float:
    """Return how much longer reads took than one alone, as a multiple of the factor that shows a full link."""
    if median(read.size_bytes for read in reads) >= _MIN_MEASURABLE_BYTES:
        return (
            median(_transfer_seconds(read, first_byte_seconds) / (read.size_bytes / alone) for read in reads)
            / _SATURATED_FACTOR
        )
    return (
        median(
            (read.ended_seconds - read.sent_seconds) / (first_byte_seconds + read.size_bytes / alone) for read in reads
        )
        / _SATURATED_WHOLE_FACTOR
    )


def _span_seconds(reads: Sequence[TimedRead]) -> float:
    return max(1e-6, max(read.ended_seconds for read in reads) - min(read.begun_seconds for read in reads))


def _steady_rate(connections: Sequence[Sequence[TimedRead]]) -> float:
    """Return the bytes per second while at least half of the connections were receiving; 0 if that never was so.

    Connections that start together wait for first bytes together, and the link is idle meanwhile; so it is at the end,
    while the last ones wait for late responses. Half of the connections are assumed to fill the link and to share it
    evenly, so a read's bytes are spread over time in inverse proportion to the number of receiving connections.
    """
    half = sum(1 for reads in connections if reads) / 2
    reads = list(chain.from_iterable(connections))
    changes = sorted(chain.from_iterable(((read.begun_seconds, 1), (read.ended_seconds, -1)) for read in reads))
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
        (part, steady), (part_after, steady_after) = parts[read.begun_seconds], parts[read.ended_seconds]
        if part_after > part:
            brought += read.size_bytes * (steady_after - steady) / (part_after - part)
    return brought / seconds if seconds > 0.0 else 0.0
