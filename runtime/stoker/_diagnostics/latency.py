"""Latency distributions and a model of a bucket's responses, and timed reads from which to estimate its request rate.

A timed read that is late, by the same rule as a hedged request of the fetcher, is no longer waited for.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Annotated, Any, Protocol

from stoker._base.arguments import (
    AtLeastOne,
    BoundedConfig,
    Fraction,
    NotNegative,
    NumberBound,
    Positive,
    explain_arguments,
)
from stoker._base.task_group import end_tasks
from stoker._fetch.config import FetchConfig
from stoker._fetch.hedge import TransferTimes
from stoker.abc import ObjectRef, Readable
from stoker.errors import ConfigError, StoreError, ThrottledError, TransientError

MAX_SECONDS = 86400.0
"""Maximum duration, one day: a first byte or a step never takes longer, and sums keep their precision."""

Duration = Annotated[float, NumberBound(">=", 0), NumberBound("<=", MAX_SECONDS)]
MIN_MEDIAN_SECONDS = 1e-9
"""Minimum median: 0 has no logarithm."""
_LOG_MAX_SECONDS = math.log(MAX_SECONDS)
_Z_99 = 2.3263478740408408
"""The 99th percentile of the standard normal distribution."""


class Latency(Protocol):
    """A distribution of durations in seconds."""

    def draw(self, rng: random.Random) -> float:
        """Return one duration in seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Constant(BoundedConfig):
    """Always the same duration.

    Attributes:
        seconds: the duration, in seconds.
    """

    seconds: Duration

    def draw(self, rng: random.Random) -> float:
        """Return the duration."""
        return self.seconds


@dataclass(frozen=True, slots=True)
class LogNormal(BoundedConfig):
    """Log-normal durations, as of requests to a healthy store: a sharp rise and a long tail.

    Attributes:
        median_seconds: 50th percentile, in seconds.
        p99_seconds: 99th percentile, in seconds.
    """

    median_seconds: Duration
    p99_seconds: Duration

    def __post_init__(self) -> None:
        BoundedConfig.__post_init__(self)  # super() does not know a class with slots
        if not self.p99_seconds >= self.median_seconds >= MIN_MEDIAN_SECONDS:
            raise ConfigError(f"LogNormal needs p99_seconds >= median_seconds >= {MIN_MEDIAN_SECONDS:g}, not {self}")

    def draw(self, rng: random.Random) -> float:
        """Return a random duration, at most :data:`MAX_SECONDS`."""
        sigma = math.log(self.p99_seconds / self.median_seconds) / _Z_99
        return math.exp(min(rng.normalvariate(math.log(self.median_seconds), sigma), _LOG_MAX_SECONDS))


@dataclass(frozen=True, slots=True)
class RecordedLatency:
    """Measured durations, all equally likely.

    Attributes:
        seconds: the durations, in seconds; at least one.
    """

    seconds: Sequence[float] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ConfigError("a recorded distribution needs at least one duration")
        for each in self.seconds:
            Constant(each)

    def draw(self, rng: random.Random) -> float:
        """Return a random one of the durations."""
        return self.seconds[rng.randrange(len(self.seconds))]


@dataclass(frozen=True, slots=True)
class LateTail(BoundedConfig):
    """A distribution with a late tail.

    Attributes:
        usual: distribution of the durations without the delay.
        fraction: fraction of durations that are delayed, 0 to 1.
        seconds: delay, in seconds.
    """

    usual: Latency
    fraction: Fraction[float]
    seconds: Duration

    def draw(self, rng: random.Random) -> float:
        """Return a random duration."""
        return self.usual.draw(rng) + (self.seconds if rng.random() < self.fraction else 0.0)


@explain_arguments("BucketModel", renamed={"longest_line_seconds": "max_queue_seconds"})
@dataclass(frozen=True, slots=True, kw_only=True)
class BucketModel(BoundedConfig):
    """Model of a bucket: latency, bandwidth, request rate and errors.

    Example:
        >>> bucket = BucketModel(connection_bytes_per_second=50e6, requests_per_second=3500)
        >>> seconds = (8 << 20) / bucket.connection_bytes_per_second  # transfer of 8 MiB

    Attributes:
        first_byte: distribution of the time from a request to its first byte.
        connection_bytes_per_second: maximum rate of one transfer.
        total_bytes_per_second: maximum rate of all transfers of all nodes together.
        requests_per_second: maximum rate of answered requests; faster requests queue.
        max_queue_seconds: maximum time in the queue, in seconds; a request that would wait longer gets a 503.
        burst: number of requests that are answered at once after a pause.
        error_fraction: fraction of requests that end in a server error, after the time to the first byte.
    """

    first_byte: Latency = field(default_factory=lambda: LogNormal(0.02, 0.08))
    connection_bytes_per_second: Positive[float] = 90e6
    total_bytes_per_second: Positive[float] = math.inf
    requests_per_second: Positive[float] = math.inf
    max_queue_seconds: NotNegative[float] = math.inf
    burst: AtLeastOne[int] = 1
    error_fraction: Annotated[float, NumberBound(">=", 0), NumberBound("<", 1)] = 0.0


_QUEUED_FACTOR, _QUEUED_SECONDS = 1.6, 0.02
"""Factor and seconds by which the first byte of a queued request is later than that of a request sent alone."""
_MIN_ANSWERS, _MIN_QUEUED_FRACTION = 4, 1 / 3
"""Minimum number of answers from which to estimate a rate; and minimum fraction of queued requests if there is a queue:
a few are late by chance."""
_MIN_SECONDS, _EVEN_SPACING_FACTOR = 1e-3, 1.6


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request of a probe.

    Attributes:
        sent_seconds: time at which it was sent, in seconds of the event loop.
        begun_seconds: time at which its response began; None if it did not, or the store does not report it.
        is_refused: whether the bucket asked for fewer requests (503 SlowDown, 429).
    """

    sent_seconds: float
    begun_seconds: float | None
    is_refused: bool


def estimate_rate_limit(requests: Sequence[SentRequest], usual_seconds: float) -> BucketModel | None:
    """Return a model of the bucket with the request limit that requests show; None if they show none.

    Args:
        requests: requests of a probe; the last of them were sent as fast as the bucket accepts them.
        usual_seconds: time to the first byte of requests that are sent one by one, in seconds.
    """
    requests = sorted(requests, key=lambda each: each.sent_seconds)
    refused_at = [each.sent_seconds for each in requests if each.is_refused]
    answered = [
        (each.sent_seconds, each.begun_seconds)
        for each in requests
        if each.begun_seconds is not None and not each.is_refused
    ]
    queued = _queued_requests(answered, usual_seconds)
    if not refused_at and not queued:
        return None
    if refused_at:
        after = [sent for sent, _ in answered if sent > refused_at[0] + usual_seconds / 2]
        rate = _events_per_second(after, requests[-1].sent_seconds - refused_at[0])
        longest = max((begun - sent - usual_seconds for sent, begun in queued), default=0.0)
    else:
        moments = sorted(begun for _, begun in queued)
        rate = (len(moments) - 1) / max(moments[-1] - moments[0], _MIN_SECONDS)
        longest = math.inf
    full = refused_at[0] if refused_at else queued[0][0]
    at_once = sum(sent < full for sent, _ in answered) - rate * (full - requests[0].sent_seconds)
    return BucketModel(requests_per_second=rate, burst=max(1, round(at_once)), max_queue_seconds=longest)


def _queued_requests(answered: Sequence[tuple[float, float]], usual_seconds: float) -> list[tuple[float, float]]:
    """Return when queued requests were sent and answered; nothing if they are few."""
    late_seconds = _QUEUED_FACTOR * usual_seconds + _QUEUED_SECONDS
    queued = [(sent, begun) for sent, begun in answered if begun - sent > late_seconds]
    return queued if len(queued) >= max(_MIN_ANSWERS + 1, _MIN_QUEUED_FRACTION * len(answered)) else []


def _events_per_second(moments: Sequence[float], seconds: float) -> float:
    """Return the number of events per second.

    If no two events are much closer than the mean, there was no burst, and the closest two show the possible rate.
    """
    mean = max(1, len(moments)) / max(seconds, _MIN_SECONDS)
    if len(moments) <= _MIN_ANSWERS:
        return mean
    nearest = min(later - sooner for sooner, later in pairwise(moments))
    return 1 / nearest if nearest * mean * _EVEN_SPACING_FACTOR > 1 else mean


_LATE_FACTOR = FetchConfig().hedge_first_byte_factor
_MIN_LATE_SECONDS = 0.5
"""Minimum time before a read is late: opening dozens of connections at once takes CPU time."""


@dataclass(frozen=True, slots=True)
class TimedRead:
    """One completed read; times are in seconds of the event loop.

    Attributes:
        sent_seconds: time at which the request was sent.
        begun_seconds: time at which its response began; ``sent_seconds`` if the store does not report it.
        ended_seconds: time at which the response was complete.
        size_bytes: bytes read.
    """

    sent_seconds: float
    begun_seconds: float
    ended_seconds: float
    size_bytes: int


class TimedReader:
    """Reads the starts of objects in turn, discards the data and records the times.

    Args:
        store: store that contains the objects.
        refs: the objects, at least one; none may be empty.
        group: task group that runs the requests.

    Attributes:
        requests: number of requests sent.
        failed: number of requests that ended in a transient error.
        throttled: number of failed requests that the bucket refused because there were too many.
        requested_bytes: bytes requested.
        read_bytes: bytes received, without those of late reads.
        last_error: last transient error; None if there was none.
        sent_requests: outcome of each request, in the order of sending.
        spacing_seconds: minimum time between the starts of two requests, in seconds.
        first_byte_seconds: times to the first byte, in seconds, without the first, which may include connecting.
        slow_first_byte_seconds: times to the first byte of reads with their own ``patience_seconds``.
    """

    def __init__(self, store: Readable, refs: Sequence[ObjectRef], group: asyncio.TaskGroup) -> None:
        self._store, self._group = store, group
        self._refs: Iterator[ObjectRef] = cycle(refs)
        self._times = TransferTimes()
        self._late_tasks: set[asyncio.Task[None]] = set()
        self.requests = self.failed = self.throttled = self.requested_bytes = self.read_bytes = 0
        self.sent_requests: list[SentRequest] = []
        self.spacing_seconds = 0.0
        self._next_seconds = -math.inf
        self.last_error: TransientError | None = None
        self.first_byte_seconds: list[float] = []
        self.slow_first_byte_seconds: list[float] = []

    @property
    def late_seconds(self) -> float | None:
        """Time without a first byte after which a read is late, in seconds; None with too few measurements."""
        usual_seconds = self._times.expected_first_byte_seconds()
        if usual_seconds is None:
            return None
        return max(_MIN_LATE_SECONDS, _LATE_FACTOR * usual_seconds)

    async def read(self, size_bytes: int, *, patience_seconds: float | None = None) -> TimedRead | None:
        """Read the start of the next object; return None if the read is late or fails with a transient error.

        Args:
            size_bytes: maximum number of bytes to read.
            patience_seconds: time without a first byte after which the read is cancelled and not counted in
                :attr:`first_byte_seconds`; None for :attr:`late_seconds`.

        Raises:
            StoreError: the read failed with an error that is not transient.
        """
        await self._pace()
        ref = next(self._refs)
        end = min(size_bytes, ref.size_bytes)
        self.requests += 1
        self.requested_bytes += end
        is_first, loop = self.requests == 1, asyncio.get_running_loop()
        sent, begun = loop.time(), loop.create_future()
        request = self._group.create_task(self._request(ref.key, end, begun))
        is_patient = patience_seconds is not None
        await _wait_for_either(request, begun, patience_seconds if is_patient else self.late_seconds)
        is_refused = request.done() and isinstance(request.result(), ThrottledError)
        self.sent_requests.append(SentRequest(sent, begun.result() if begun.done() else None, is_refused))
        if not request.done() and not begun.done():
            if is_patient:
                request.cancel()
                return None
            leaving = self._group.create_task(self._observe_late(request, sent, begun))
            self._late_tasks.add(leaving)
            leaving.add_done_callback(self._late_tasks.discard)
            return None
        if (error := await request) is not None:
            if isinstance(error, TransientError):
                return None
            raise error
        self.read_bytes += end
        if begun.done() and is_patient:
            self.slow_first_byte_seconds.append(begun.result() - sent)
        elif begun.done() and not is_first:
            self._record_first_byte(begun.result() - sent)
        return TimedRead(sent, begun.result() if begun.done() else sent, loop.time(), end)

    async def _pace(self) -> None:
        """Wait until the next request may be sent."""
        now_seconds = asyncio.get_running_loop().time()
        wait_seconds = self._next_seconds - now_seconds
        self._next_seconds = max(now_seconds, self._next_seconds) + self.spacing_seconds
        if wait_seconds > 0:
            await asyncio.sleep(wait_seconds)

    async def wait_for_late(self, timeout_seconds: float) -> None:
        """Wait at most ``timeout_seconds`` for first bytes of late reads; the rest count as if they came then."""
        if not self._late_tasks:
            return
        _, waiting = await asyncio.wait(self._late_tasks, timeout=timeout_seconds)
        await end_tasks(waiting)

    async def _request(self, key: str, end: int, begun: asyncio.Future[float]) -> StoreError | None:
        loop = asyncio.get_running_loop()

        def begin() -> None:
            if not begun.done():
                begun.set_result(loop.time())

        try:
            await self._store.get_range(key, 0, end, into=memoryview(bytearray(end)), begun=begin)
        except TransientError as error:
            self.failed, self.last_error = self.failed + 1, error
            self.throttled += isinstance(error, ThrottledError)
            return error
        except StoreError as error:
            return error
        return None

    async def _observe_late(
        self, request: asyncio.Task[StoreError | None], sent: float, begun: asyncio.Future[float]
    ) -> None:
        """Record when the response of a late read begins, and cancel it: its bytes would compete with other reads."""
        loop = asyncio.get_running_loop()
        try:
            await _wait_for_either(request, begun, None)
        finally:
            if begun.done() or not request.done():
                self._record_first_byte((begun.result() if begun.done() else loop.time()) - sent)
            request.cancel()

    def _record_first_byte(self, seconds: float) -> None:
        self._times.observe_first_byte(seconds)
        self.first_byte_seconds.append(seconds)


async def _wait_for_either(one: asyncio.Future[Any], other: asyncio.Future[Any], seconds: float | None) -> None:
    await asyncio.wait([one, other], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
