"""One range of an object, however many requests it takes: permit, attempts, back-off, hedge.

:meth:`RangeReader.read` makes attempts and holds a permit meanwhile; an attempt is one request and perhaps its hedge;
a request is one call of the store. Whether the bytes are right is for the caller to say.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from stoker.errors import (
    DeadlineError,
    FetchError,
    ObjectChangedError,
    StoreError,
    ThrottledError,
    TransientError,
)
from stoker.fetch.aimd import Aimd
from stoker.fetch.backoff import backoff_seconds
from stoker.fetch.config import FetchConfig
from stoker.fetch.gate import Gate
from stoker.fetch.hedge import HedgeBudget, TransferTimes
from stoker.fetch.statistics import FetchStatistics, FetchTally
from stoker.ring import Ring
from stoker.store.protocol import Readable
from stoker.task_group import task_group
from stoker.tier import ObjectRef

__all__ = ["Pursuit", "RangePart", "RangeReader"]


@dataclass(frozen=True, slots=True)
class RangePart:
    """Bytes ``[start, end)`` of an object, and where in the caller's memory they go.

    Attributes:
        start: first byte.
        end: byte after the last.
        offset: of the first byte in the memory, in bytes.
    """

    start: int
    end: int
    offset: int

    @property
    def size_bytes(self) -> int:
        """How many bytes."""
        return self.end - self.start


@dataclass(slots=True, kw_only=True)
class Pursuit:
    """An object being fetched: what all its requests share.

    Attributes:
        ref: the object.
        name: its URL, for messages.
        into: where its bytes go; the caller's.
        urgent: whether its requests go before others.
        tag: precondition of its requests; None sends none.
        scope: ends the fetch at its deadline.
        deadline_seconds: that moment in loop time; None until the first request may be sent.
        requests: sent so far.
        last_error: of the last request that failed.
    """

    ref: ObjectRef
    name: str
    into: memoryview
    urgent: bool
    tag: str | None
    scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    deadline_seconds: float | None = None
    requests: int = 0
    last_error: StoreError | None = None

    def begin(self, seconds: float) -> None:
        """Start the clock: from the first permit on time counts, not while waiting in line."""
        if self.deadline_seconds is None:
            self.deadline_seconds = asyncio.get_running_loop().time() + seconds
            self.scope.reschedule(self.deadline_seconds)


class RangeReader:
    """Reads ranges of one store, on one event loop; the ring's free slots are for the hedges.

    A read that backs off keeps its permit, so in an outage the request rate is bounded by the concurrency and the
    back-off, however many reads wait.
    """

    def __init__(
        self,
        store: Readable,
        *,
        ring: Ring,
        rng: random.Random,
        config: FetchConfig,
        tally: FetchTally,
        small_hedge_bytes: int,
    ) -> None:
        self._store = store
        self._ring = ring
        self._rng = rng
        self._config = config
        self._tally = tally
        self._aimd = Aimd(start=config.concurrency_start, least=config.concurrency_least, most=config.concurrency_most)
        self._gate = Gate(self._aimd)
        self._budget = HedgeBudget(config.hedge_fraction, config.hedge_burst)
        self._times = TransferTimes()
        self._small_hedge_bytes = small_hedge_bytes
        self._small_hedges = 0

    def statistics(self) -> FetchStatistics:
        """Return what was counted, with what is expected and allowed now."""
        return self._tally.snapshot(
            fit=self._times.fit(),
            transfer_seconds=self._times.median_seconds(),
            concurrency=self._aimd.limit,
            in_flight=self._gate.in_flight,
        )

    async def read(self, pursuit: Pursuit, part: RangePart) -> None:
        """Fill a part of the pursuit's memory. When the call ends, however it ends, nothing writes there any more.

        Raises:
            FetchError: every attempt failed, or the next one would miss the deadline.
            StoreError: what the store raised, if trying again cannot help.
        """
        self._budget.earn()
        async with self._gate.permit(urgent=pursuit.urgent):
            pursuit.begin(self._config.deadline_seconds)
            for attempt in count(1):
                error = await self._attempt(pursuit, part)
                if error is None:
                    return
                if not isinstance(error, TransientError):
                    raise error
                if attempt >= self._config.attempts:
                    raise self.gave_up(pursuit, f"a range failed {attempt} times") from error
                await self.back_off(pursuit, attempt, error)

    async def back_off(self, pursuit: Pursuit, failures: int, error: TransientError) -> None:
        """Wait before another try.

        Raises:
            FetchError: at once, if the deadline would pass meanwhile.
        """
        wait_seconds = backoff_seconds(
            failures,
            base_seconds=self._config.backoff_base_seconds,
            cap_seconds=self._config.backoff_cap_seconds,
            rng=self._rng,
            retry_after_seconds=error.retry_after_seconds,
        )
        deadline_seconds = pursuit.deadline_seconds
        if deadline_seconds is not None and asyncio.get_running_loop().time() + wait_seconds >= deadline_seconds:
            raise self.gave_up(pursuit, "its deadline would pass before the next try") from error
        self._tally.retries[type(error).__name__] += 1
        await asyncio.sleep(wait_seconds)

    def failed(self, pursuit: Pursuit, error: StoreError) -> None:
        """Count a reading that failed."""
        pursuit.last_error = error
        self._tally.failures[type(error).__name__] += 1

    def gave_up(self, pursuit: Pursuit, reason: str) -> FetchError:
        """Return the error that ends a pursuit."""
        config = self._config
        return FetchError(
            f"{pursuit.name} was not fetched with {pursuit.requests} requests: {reason} "
            f"(deadline_seconds={config.deadline_seconds:g}, attempts={config.attempts}, "
            f"checksum_attempts={config.checksum_attempts}); last error: {pursuit.last_error}"
        )

    async def _attempt(self, pursuit: Pursuit, part: RangePart) -> StoreError | None:
        """Send a request and, if it is late, a second one; return the first one's error if neither succeeds."""
        into = pursuit.into[part.offset : part.offset + part.size_bytes]
        if not self._config.hedge:
            return await self._request(pursuit, part, into)
        async with task_group() as legs:
            primary = legs.create_task(self._request(pursuit, part, into))
            await asyncio.wait((primary,), timeout=self._lateness_seconds(part.size_bytes))
            if not primary.done() and await self._hedge(pursuit, part, into, primary):
                return None
        return primary.result()

    async def _hedge(
        self, pursuit: Pursuit, part: RangePart, into: memoryview, primary: asyncio.Task[StoreError | None]
    ) -> bool:
        """Race a second request, in memory of its own, against a late one; return whether the second one won.

        Then its bytes are in ``into``, the late one has ended, and the memory is free again.
        """
        with self._spare(part.size_bytes) as data:
            if data is None:
                return False
            self._tally.hedges += 1
            with self._gate.extra():
                won = await _race(primary, self._request(pursuit, part, data))
            if won:
                into[:] = data
                self._tally.hedge_wins += 1
            self._tally.hedged_bytes += part.size_bytes
            return won

    @contextmanager
    def _spare(self, size_bytes: int) -> Iterator[memoryview | None]:
        """Lend memory for a hedge that the budget allows: one of the small buffers, else a slot; None if there is none.

        There are ``hedge_burst`` small buffers.
        """
        is_small = size_bytes <= self._small_hedge_bytes and self._small_hedges < self._config.hedge_burst
        if not (is_small or (self._ring.spare and size_bytes <= self._ring.slot_bytes)) or not self._budget.spend():
            yield None
            return
        if is_small:
            self._small_hedges += 1
            try:
                yield memoryview(bytearray(size_bytes))
            finally:
                self._small_hedges -= 1
            return
        slot = self._ring.acquire()
        assert slot is not None  # noqa: S101 - it has a spare slot, and nothing ran in between
        try:
            yield self._ring.view(slot, size_bytes)
        finally:
            self._ring.abort(slot)

    async def _request(self, pursuit: Pursuit, part: RangePart, into: memoryview) -> StoreError | None:
        """Call the store once; return its error: in a race, a leg that fails must not stop the other."""
        loop = asyncio.get_running_loop()
        sent_seconds = loop.time()
        self._tally.requests += 1
        pursuit.requests += 1
        try:
            await self._get(pursuit, part, into)
        except StoreError as error:
            if isinstance(error, ThrottledError):
                self._aimd.throttled(sent_seconds, loop.time())
            self.failed(pursuit, error)
            return error
        now_seconds = loop.time()
        self._tally.bytes += part.size_bytes
        self._times.observe(part.size_bytes, now_seconds - sent_seconds)
        self._aimd.completed(part.size_bytes, now_seconds, saturated=self._gate.saturated)
        return None

    async def _get(self, pursuit: Pursuit, part: RangePart, into: memoryview) -> None:
        ref = pursuit.ref
        try:
            async with asyncio.timeout(self._config.attempt_seconds):
                info = await self._store.get_range(ref.key, part.start, part.end, into=into, tag=pursuit.tag)
        except StoreError:
            raise
        except TimeoutError as error:
            raise DeadlineError(
                f"{pursuit.name}: bytes {part.start} to {part.end} are not there after "
                f"{self._config.attempt_seconds:g} s; on a slow link raise attempt_seconds"
            ) from error
        if info.size_bytes != ref.size_bytes:
            raise ObjectChangedError(
                f"{pursuit.name} has {info.size_bytes} bytes where the manifest says {ref.size_bytes}: it was "
                "overwritten since it was packed"
            )

    def _lateness_seconds(self, size_bytes: int) -> float:
        expected_seconds = self._times.expected_seconds(size_bytes)
        if expected_seconds is None:
            return self._config.hedge_first_seconds
        return max(self._config.hedge_least_seconds, self._config.hedge_after_factor * expected_seconds)


async def _race(primary: asyncio.Task[StoreError | None], rival: Coroutine[Any, Any, StoreError | None]) -> bool:
    """Run ``rival`` against a task until one succeeds or both fail; return whether the rival won.

    The loser is cancelled, and has ended when this returns: not before may its memory be used.
    """
    async with task_group() as group:
        hedge = group.create_task(rival)
        running = {primary, hedge}
        winner: asyncio.Task[StoreError | None] | None = None
        while running and winner is None:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            winner = next((leg for leg in (primary, hedge) if leg in done and leg.result() is None), None)
        for leg in running:
            leg.cancel()
        if running:
            await asyncio.wait(running)
    return winner is hedge
