"""How a bucket answers: distributions to draw a first byte's wait or a step's compute time from, rates and refusals.

And reads whose moments are taken, with how many requests a second they show that a bucket answers. A read that is late,
by the rule by which the fetcher sends a request a second time, is left behind.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Annotated, Any, Protocol

from stoker._base.arguments import AtLeastOne, Bound, Bounded, Fraction, NotNegative, Positive
from stoker._base.task_group import end_tasks
from stoker._fetch.config import FetchConfig
from stoker._fetch.hedge import TransferTimes
from stoker.abc import ObjectRef, Readable
from stoker.errors import ConfigError, StoreError, ThrottledError, TransientError

LONGEST_SECONDS = 86400.0
"""Of a duration: what takes longer than a day is neither a first byte nor a step; rounding would lose the others."""

Duration = Annotated[float, Bound(">=", 0), Bound("<=", LONGEST_SECONDS)]
LEAST_MEDIAN_SECONDS = 1e-9
"""Of a median: a logarithm has none of 0."""
_LOG_LONGEST = math.log(LONGEST_SECONDS)
_Z_99 = 2.3263478740408408
"""The 99th percentile of the standard normal distribution."""


class Latency(Protocol):
    """A distribution of durations in seconds."""

    def draw(self, rng: random.Random) -> float:
        """Return one duration in seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Constant(Bounded):
    """Always the same."""

    seconds: Duration

    def draw(self, rng: random.Random) -> float:
        """Return it."""
        return self.seconds


@dataclass(frozen=True, slots=True)
class LogNormal(Bounded):
    """What requests to stores look like when all is well: a sharp rise and a long tail, given by two percentiles."""

    median_seconds: Duration
    p99_seconds: Duration

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)  # super() does not know a class with slots
        if not self.p99_seconds >= self.median_seconds >= LEAST_MEDIAN_SECONDS:
            raise ConfigError(f"LogNormal needs p99_seconds >= median_seconds >= {LEAST_MEDIAN_SECONDS:g}, not {self}")

    def draw(self, rng: random.Random) -> float:
        """Return one of them, at most :data:`LONGEST_SECONDS`."""
        sigma = math.log(self.p99_seconds / self.median_seconds) / _Z_99
        return math.exp(min(rng.normalvariate(math.log(self.median_seconds), sigma), _LOG_LONGEST))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Durations that were measured; each is as likely as every other."""

    seconds: Sequence[float] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ConfigError("a recorded distribution needs at least one duration")
        for each in self.seconds:
            Constant(each)

    def draw(self, rng: random.Random) -> float:
        """Return one of them."""
        return self.seconds[rng.randrange(len(self.seconds))]


@dataclass(frozen=True, slots=True)
class Late(Bounded):
    """Another distribution, of which a part is late: ``fraction`` of its durations are ``seconds`` longer."""

    usual: Latency
    fraction: Fraction[float]
    seconds: Duration

    def draw(self, rng: random.Random) -> float:
        """Return one of them."""
        return self.usual.draw(rng) + (self.seconds if rng.random() < self.fraction else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketModel(Bounded):
    """How a bucket answers.

    Attributes:
        first_byte: from the request to the first byte.
        connection_bytes_per_second: of one transfer at most.
        total_bytes_per_second: of all transfers of all nodes together.
        requests_per_second: answered at most; what comes faster waits in line,
        longest_line_seconds: and is refused with 503 where it would have to wait longer than this.
        burst: requests that are answered at once, after a pause.
        error_fraction: of requests that end in a server's error, after the first byte's time.
    """

    first_byte: Latency = field(default_factory=lambda: LogNormal(0.02, 0.08))
    connection_bytes_per_second: Positive[float] = 90e6
    total_bytes_per_second: Positive[float] = math.inf
    requests_per_second: Positive[float] = math.inf
    longest_line_seconds: NotNegative[float] = math.inf
    burst: AtLeastOne[int] = 1
    error_fraction: Annotated[float, Bound(">=", 0), Bound("<", 1)] = 0.0


_WAITS_FACTOR, _WAITS_SECONDS = 1.6, 0.02
"""Requests wait for their turn if their first bytes take so much longer than those of requests sent one by one."""
_LEAST_TELLING, _QUEUED_PART = 4, 1 / 3
"""Answers, at least, between which a rate is told; and the part of all that waited, where requests do: a few are late
by themselves."""
_LEAST_SECONDS, _EVEN = 1e-3, 1.6


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request of a probe.

    Attributes:
        sent: when it was sent.
        begun: when its answer began; None if none did, or the store does not tell.
        is_refused: whether the bucket asked for fewer requests (503 SlowDown, 429).
    """

    sent: float
    begun: float | None
    is_refused: bool


def rate_limit_of(requests: Sequence[SentRequest], usual_seconds: float) -> BucketModel | None:
    """Return a bucket with the limit that one has set to requests, None if nothing tells of one.

    Args:
        requests: in the order in which they were sent; the last of them as fast as the bucket would have them.
        usual_seconds: of a first byte, where requests are sent one by one.
    """
    requests = sorted(requests, key=lambda each: each.sent)
    refused = [each.sent for each in requests if each.is_refused]
    answered = [(each.sent, each.begun) for each in requests if each.begun is not None and not each.is_refused]
    queued = _queued(answered, usual_seconds)
    if not refused and not queued:
        return None
    if refused:
        after = [sent for sent, _ in answered if sent > refused[0] + usual_seconds / 2]
        rate = _rate(after, requests[-1].sent - refused[0])
        longest = max((begun - sent - usual_seconds for sent, begun in queued), default=0.0)
    else:
        moments = sorted(begun for _, begun in queued)
        rate, longest = (len(moments) - 1) / max(moments[-1] - moments[0], _LEAST_SECONDS), math.inf
    full = refused[0] if refused else queued[0][0]
    at_once = sum(sent < full for sent, _ in answered) - rate * (full - requests[0].sent)
    return BucketModel(requests_per_second=rate, burst=max(1, round(at_once)), longest_line_seconds=longest)


def _queued(answered: Sequence[tuple[float, float]], usual_seconds: float) -> list[tuple[float, float]]:
    """Return when requests that waited for their turn were sent and answered; none if they are few."""
    late_seconds = _WAITS_FACTOR * usual_seconds + _WAITS_SECONDS
    queued = [(sent, begun) for sent, begun in answered if begun - sent > late_seconds]
    return queued if len(queued) >= max(_LEAST_TELLING + 1, _QUEUED_PART * len(answered)) else []


def _rate(moments: Sequence[float], seconds: float) -> float:
    """Return the events a second.

    Where none follow each other much sooner than usual, nothing is saved up for a burst, and the two nearest to each
    other tell what could be had.
    """
    mean = max(1, len(moments)) / max(seconds, _LEAST_SECONDS)
    if len(moments) <= _LEAST_TELLING:
        return mean
    nearest = min(later - sooner for sooner, later in pairwise(moments))
    return 1 / nearest if nearest * mean * _EVEN > 1 else mean


_LATE_FACTOR = FetchConfig().hedge_first_byte_factor
_LEAST_LATE_SECONDS = 0.5
"""No sooner is a read late: opening dozens of connections at once takes the processor a while."""


@dataclass(frozen=True, slots=True)
class TimedRead:
    """One read: when it was sent, when its answer began, when it was complete, and its bytes.

    A store that does not tell when its answers begin has them begin when they are sent.
    """

    sent: float
    begun: float
    done: float
    size_bytes: int


class TimedReader:
    """Reads the beginnings of objects, one object after the other; nothing is kept.

    Args:
        store: where they are.
        refs: the objects, not empty.
        group: has the requests; they end with it.

    Attributes:
        requests: that were sent.
        failed: of them, those that ended in an error that may pass.
        asked_bytes: that they asked for.
        read_bytes: that arrived, late ones aside.
        throttled: of these, those that the bucket refused because there were too many.
        last: the last error.
        sent: what became of each request, in the order in which they were sent.
        spacing_seconds: from sending one request to sending the next, at least.
        first_byte_seconds: of each answer whose beginning was told, the first one aside: that one may have connected.
        patient_seconds: likewise, of reads that had a patience of their own.
    """

    def __init__(self, store: Readable, refs: Sequence[ObjectRef], group: asyncio.TaskGroup) -> None:
        self._store, self._group = store, group
        self._refs: Iterator[ObjectRef] = cycle(refs)
        self._times = TransferTimes()
        self._left: set[asyncio.Task[None]] = set()
        self.requests = self.failed = self.throttled = self.asked_bytes = self.read_bytes = 0
        self.sent: list[SentRequest] = []
        self.spacing_seconds = 0.0
        self._next_seconds = -math.inf
        self.last: TransientError | None = None
        self.first_byte_seconds: list[float] = []
        self.patient_seconds: list[float] = []

    @property
    def late_seconds(self) -> float | None:
        """After how long without a first byte a read is late; None while too few have told of theirs."""
        usual_seconds = self._times.expected_first_byte_seconds()
        if usual_seconds is None:
            return None
        return max(_LEAST_LATE_SECONDS, _LATE_FACTOR * usual_seconds)

    async def read(self, size_bytes: int, *, patience_seconds: float | None = None) -> TimedRead | None:
        """Read the beginning of the next object; None if that failed in a way that may pass, or is late.

        Args:
            size_bytes: to read, at most.
            patience_seconds: after which an answer is late that has not begun, and which then does not count among
                the times to a first byte; None for :attr:`late_seconds`.

        Raises:
            StoreError: it failed for good.
        """
        await self._turn()
        ref = next(self._refs)
        end = min(size_bytes, ref.size_bytes)
        self.requests += 1
        self.asked_bytes += end
        is_first, loop = self.requests == 1, asyncio.get_running_loop()
        sent, begun = loop.time(), loop.create_future()
        request = self._group.create_task(self._request(ref.key, end, begun))
        is_patient = patience_seconds is not None
        await _either(request, begun, patience_seconds if is_patient else self.late_seconds)
        is_refused = request.done() and isinstance(request.result(), ThrottledError)
        self.sent.append(SentRequest(sent, begun.result() if begun.done() else None, is_refused))
        if not request.done() and not begun.done():
            if is_patient:
                request.cancel()
                return None
            leaving = self._group.create_task(self._leave(request, sent, begun))
            self._left.add(leaving)
            leaving.add_done_callback(self._left.discard)
            return None
        if (error := await request) is not None:
            if isinstance(error, TransientError):
                return None
            raise error
        self.read_bytes += end
        if begun.done() and is_patient:
            self.patient_seconds.append(begun.result() - sent)
        elif begun.done() and not is_first:
            self._told(begun.result() - sent)
        return TimedRead(sent, begun.result() if begun.done() else sent, loop.time(), end)

    async def _turn(self) -> None:
        """Wait until the next request may be sent."""
        now_seconds = asyncio.get_running_loop().time()
        wait_seconds = self._next_seconds - now_seconds
        self._next_seconds = max(now_seconds, self._next_seconds) + self.spacing_seconds
        if wait_seconds > 0:
            await asyncio.sleep(wait_seconds)

    async def leave(self, seconds: float) -> None:
        """Wait so long for the first bytes of late reads; what is still to come then counts as if it came then."""
        if not self._left:
            return
        _, waiting = await asyncio.wait(self._left, timeout=seconds)
        await end_tasks(waiting)

    async def _request(self, key: str, end: int, begun: asyncio.Future[float]) -> StoreError | None:
        loop = asyncio.get_running_loop()

        def begin() -> None:
            if not begun.done():
                begun.set_result(loop.time())

        try:
            await self._store.get_range(key, 0, end, into=memoryview(bytearray(end)), begun=begin)
        except TransientError as error:
            self.failed, self.last = self.failed + 1, error
            self.throttled += isinstance(error, ThrottledError)
            return error
        except StoreError as error:
            return error
        return None

    async def _leave(self, request: asyncio.Task[StoreError | None], sent: float, begun: asyncio.Future[float]) -> None:
        """See when a late read begins; its bytes would only be in the way of others."""
        loop = asyncio.get_running_loop()
        try:
            await _either(request, begun, None)
        finally:
            if begun.done() or not request.done():
                self._told((begun.result() if begun.done() else loop.time()) - sent)
            request.cancel()

    def _told(self, seconds: float) -> None:
        self._times.observe_first_byte(seconds)
        self.first_byte_seconds.append(seconds)


async def _either(one: asyncio.Future[Any], other: asyncio.Future[Any], seconds: float | None) -> None:
    await asyncio.wait([one, other], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
