"""A few measured reads: how soon a bucket answers, how fast one connection is, and how fast several are together.

Two things are told apart that add up in every request: the time to its first byte, which many requests share by
waiting at once, and the time of its bytes, for which they share a link. Requests and bytes are bounded beforehand.
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
"""About as long as a measured transfer may take: the slower a connection, the fewer bytes are asked for."""
_LEAVE_SECONDS = 3.0
"""For which late answers are waited, in the end, to know how late they are."""
_CONNECTIONS = (8, 32)
"""Tried one after the other, until the link is full."""
_READS_ALONE, _TRIES = 3, 5
"""To know the rate of a connection: some of the reads may be late, or fail."""
_READS_EACH, _READS_STEADY = 2, 3
"""Of each connection while that is found out, and then: the first reads begin together, and leave the link idle."""
_PART = 0.4
"""Of the bytes that are left: more connections may have to be tried, and then there is the last measurement."""
_LOOKING_CONNECTIONS, _LOOKING_REQUESTS = 16, 48
"""That look for a limit on the rate of requests."""
_LOOKS = 2
"""That must find one: a busy machine keeps requests waiting, too, but hardly twice."""
_RATE_CONNECTIONS, _RATE_REQUESTS, _RATE_SECONDS = 8, 80, 1.5
"""With which, once there is one, its rate is found out, and for how long at most."""
_PRESSURE, _LEAST_SPAN_SECONDS, _LONGEST_PAUSE_SECONDS = 4.0, 0.1, 0.5
"""Requests, then, for each that is answered; from when on it is known how many are; and what a connection waits after a
refusal, at most."""
_OBSERVED_SECONDS, _TELLING_SECONDS, _MUCH_LESS = 0.5, 0.1, 0.5
"""For which several connections read, in the end; for which they must; and the part of what was expected of them below
which the link is full."""
_MOST_ERRORS, _FAILING = 0.9, 0.1
"""Of requests, in a simulated bucket; and from which part on they fail for another reason than their rate."""
_SPACING, _READS_PACED, _PACED_SECONDS = 1.1, 6, 8.0
"""Once there is a limit: requests are sent so many times the seconds apart that it leaves to each; small reads that
tell of first bytes without a line; seconds that the rest may take."""
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
class ProbeLimits(Bounded):
    """What a probe may take.

    Attributes:
        requests: reads, at most.
        size_bytes: that they ask for, at most.
        seconds: in all, at most.
        first_bytes: of the requests, those that are for next to nothing.
    """

    requests: int = 256
    size_bytes: Annotated[int, Bound(">=", LEAST_PROBE_BYTES)] = 256 << 20
    seconds: Positive[float] = 30.0
    first_bytes: Annotated[int, Bound(">=", 2)] = 12

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)  # super() does not know a class with slots
        if not self.first_bytes < self.requests - 2:
            raise ConfigError(f"a probe needs 2 small reads and 3 more at least, not {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was measured.

    Attributes:
        connect_seconds: by how much a connection's first request took longer than others: names, handshakes.
        connect_range_seconds: the least and the most of that.
        first_byte_seconds: from a request to its answer: as often as there were answers, those of small reads, and the
            late ones of all. One that was not waited for counts with the seconds that it was.
        late: of them, how many were late: a fetcher would ask for them a second time.
        connection_bytes_per_second: of one transfer alone.
        is_rate_assumed: whether the objects are too small to tell that rate, and the usual one is taken.
        observed_alone_bytes_per_second: that reads one after the other brought, first bytes included.
        total_bytes_per_second: of several together.
        observed_bytes_per_second: that several reads brought, first bytes included, for half a second if there were
            enough bytes to ask for.
        failed_part: of requests, 0 to 1, that failed though they came no faster than the bucket would have them.
        is_saturated: whether more connections would bring no more; if not, there may be more than the total.
        connections: that brought it.
        requests: that were sent.
        failed: of them, those that ended in an error that may pass.
        throttled: of these, those that the bucket refused because there were too many.
        limit: a bucket with the limit on the rate of requests; None if there is none, or none was met.
        read_bytes: that arrived, late ones aside.
        seconds: that it took.
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
        """The median time to a first byte."""
        return median(self.first_byte_seconds)

    @property
    def slowest_seconds(self) -> float:
        """The longest time to a first byte."""
        return max(self.first_byte_seconds)

    def bucket(self) -> BucketModel:
        """Return a bucket that answers like this one; what all share is its request rate, not its network."""
        return replace(
            self.limit or BucketModel(),
            first_byte=Recorded(self.first_byte_seconds),
            connection_bytes_per_second=self.connection_bytes_per_second,
            error_fraction=min(_MOST_ERRORS, self.failed_part),
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
            "measure fewer bytes, or plan with figures that are given"
        ) from reader.last


class _Prober:
    def __init__(self, reader: TimedReader, limits: ProbeLimits) -> None:
        self._reader, self._limits = reader, limits
        self._brought = 0.0
        self._connects: tuple[float, ...] = ()
        self._limit: BucketModel | None = None
        self._asked = self._failed = 0
        """Requests, and failed ones, before a limit to them was kept."""

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
        if self._limit is None and reader.throttled and failed_part < _FAILING:  # so much at once was too much
            await self._press(_RATE_CONNECTIONS, self._limits.requests - reader.requests)
            self._limit = rate_limit_of(reader.sent, median(waits))
            total, is_saturated = max(total, _BELIEVED * alone), False
        late_seconds = self._late_seconds  # before so many late answers are told at once that they are most of the last
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
        """Return the times of small reads, one after the other, as fast as the bucket would have requests."""
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
        """Return the limit that the bucket sets to requests: many small ones at once find one, more tell its rate."""
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

        Nothing is sent, and nothing waited for, once they would take too long; nor, while ``looking``, once one was
        refused.
        """
        loop, reader, answered = asyncio.get_running_loop(), self._reader, 0
        begun_seconds, most = loop.time(), reader.requests + requests
        rng = random.Random(0)  # noqa: S311 - so that pauses do not end together

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
        """Return the last two of three reads of growing size, one after the other."""
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
        """Return the bytes a second of several transfers, whether the link is full, and how many they were.

        It is full when they take longer than one alone would; then twice as many keep it full for a while. What large
        reads have told is not told again, worse, by small ones.
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
        """Return the bytes a second that several connections bring in a while, and whether that tells of a full link.

        Short transfers come out of buffers: of them, only what all bring together is to be believed.
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
        """Return how many bytes each of so many reads may ask for at a connection's rate; 0 if few are left.

        Together they take at most a part of what is left, unless that is too little to tell anything.
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
        """Return the reads of each of several connections, without those that failed or were late."""

        async def connection() -> list[TimedRead | None]:
            return [await self._reader.read(size_bytes) for _ in range(reads)]

        found = await _on_each(connections, connection)
        if not self._connects:  # all of them but one are new
            firsts = [first for first, *_ in found if first is not None]
            self._connects = tuple(sorted(read.begun - read.sent for read in firsts))
        return [[read for read in each if read is not None] for each in found]

    def _sized(self, size_bytes: int, before: Sequence[TimedRead]) -> int:
        """Return how many bytes to ask for, given how fast those before came."""
        if not before:
            return size_bytes
        return min(size_bytes, max(LEAST_PROBE_BYTES, int(_rate(before[-1], 0.0) * _READ_SECONDS)))

    def _some(self, reads: Iterable[TimedRead | None]) -> list[TimedRead]:
        """Return those that ended well.

        Raises:
            TransientError: none did.
        """
        found = [read for read in reads if read is not None]
        if not found:
            raise self._reader.last or DeadlineError(f"no answer began within {self._late_seconds:.3g} seconds")
        return found


async def _on_each(connections: int, connection: Callable[[], Coroutine[None, None, T]]) -> list[T]:
    """Return what several connections bring, all at once."""
    async with task_group() as group:
        tasks = [group.create_task(connection()) for _ in range(connections)]
    return [task.result() for task in tasks]


def _seconds(read: TimedRead, first_byte_seconds: float) -> float:
    """Return how long the bytes took; of a store that does not tell when they begin, without a first byte's time."""
    waited = read.begun - read.sent or first_byte_seconds
    return max(1e-6, read.done - read.sent - waited)


def _rate(read: TimedRead, first_byte_seconds: float) -> float:
    return read.size_bytes / _seconds(read, first_byte_seconds)


def _connection_rate(reads: Sequence[TimedRead], first_byte_seconds: float) -> tuple[float, bool]:
    """Return the bytes a second of one transfer alone, and whether that is assumed."""
    found = median(_rate(read, first_byte_seconds) for read in reads)
    is_assumed = reads[-1].size_bytes < _TELLING_BYTES and found >= _USUAL_BYTES_PER_SECOND
    return (_USUAL_BYTES_PER_SECOND if is_assumed else found), is_assumed


def _observed_rate(reads: Sequence[TimedRead]) -> float:
    """Return the bytes a second of reads one after the other, first bytes included."""
    return sum(read.size_bytes for read in reads) / max(1e-6, sum(read.done - read.sent for read in reads))


def _typical(reads: Sequence[TimedRead], first_byte_seconds: float) -> float:
    """Return the bytes a second of most reads; infinity if they were too small to tell."""
    if median(read.size_bytes for read in reads) < _TELLING_BYTES:
        return math.inf
    return median(_rate(read, first_byte_seconds) for read in reads)


def _slower(reads: Sequence[TimedRead], alone: float, first_byte_seconds: float) -> float:
    """Return how much longer reads took than one alone, by the factor from which on that says something."""
    if median(read.size_bytes for read in reads) >= _TELLING_BYTES:
        return median(_seconds(read, first_byte_seconds) / (read.size_bytes / alone) for read in reads) / _SLOWER
    return (
        median((read.done - read.sent) / (first_byte_seconds + read.size_bytes / alone) for read in reads)
        / _MUCH_SLOWER
    )


def _span(reads: Sequence[TimedRead]) -> float:
    return max(1e-6, max(read.done for read in reads) - min(read.begun for read in reads))


def _steady(connections: Sequence[Sequence[TimedRead]]) -> float:
    """Return the bytes a second while at least half of the connections were receiving; 0 if they never were.

    Connections that begin together wait for first bytes together, and leave the link idle meanwhile; so do the last of
    them, while they wait for late ones. Half of them fill the link, and share it evenly: of a read's bytes, moments get
    parts in inverse proportion to how many were receiving then.
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
