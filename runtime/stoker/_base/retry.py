"""Trying again: back-off, deadlines that count only time in which this process ran, and stores that retry.

Packing, commits and maintenance read and write through a :class:`RetryingStore`; the prefetcher has a policy of its
own, with hedges and budgets, and shares the back-off and the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from stoker._base.arguments import AtLeastOne, Bounded, NotNegative, Positive
from stoker._base.checksum import crc32c
from stoker._base.meter import Operation, ReaderWrapper, StoreWrapper
from stoker.abc import Buffer, ObjectInfo, Readable, Store
from stoker.errors import (
    ConfigError,
    NotFoundError,
    ObjectChangedError,
    PreconditionFailedError,
    RangeBeyondEndError,
    TransientError,
    UnexpectedAnswerError,
)

T = TypeVar("T")
R_co = TypeVar("R_co", bound=Readable, covariant=True)

LONG_SECONDS = 10.0
"""A wait longer than this is logged: nobody should have to guess why nothing happens."""


def backoff_seconds(
    failures: int,
    *,
    base_seconds: float,
    cap_seconds: float,
    rng: random.Random,
    retry_after_seconds: float | None = None,
    left_seconds: float = math.inf,
) -> float:
    """Return the wait after ``failures`` >= 1 failures in a row.

    What the store asked for (``retry_after_seconds``) is waited out, and the jitter comes on top of it. Where that
    would take longer than the ``left_seconds`` until the deadline, half of them are waited out: the store is asked a
    few more times, and less often than it would be without its word.
    """
    doublings = min(failures - 1, 64)  # enough for any cap, and no overflow
    jitter = rng.uniform(0.0, min(cap_seconds, base_seconds * 2.0**doublings))
    asked_seconds = max(0.0, retry_after_seconds or 0.0)
    if asked_seconds and jitter + asked_seconds >= left_seconds:
        return max(jitter, left_seconds / 2)
    return jitter + asked_seconds


STOPPED_SECONDS = 5.0
"""A timer that fires so much too late was not delayed by other work."""


class Deadline:
    """Ends the block that it is entered for, with TimeoutError, some time after :meth:`start`; until then, never."""

    __slots__ = ("_begin_seconds", "_scope", "_seconds", "_timer")

    def __init__(self) -> None:
        self._scope = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._begin_seconds = 0.0
        self._seconds = (0.0, 0.0)

    def start(self, seconds: float, grace_seconds: float) -> None:
        """Count from now, unless it does: ``seconds`` in which things may begin, then grace for what has begun."""
        if self._timer is None:
            self._seconds = seconds, grace_seconds
            self._count()

    def forbids(self, wait_seconds: float) -> bool:
        """Return whether nothing may be begun any more after such a wait."""
        return wait_seconds >= self.left_seconds

    @property
    def left_seconds(self) -> float:
        """How long things may begin yet; no limit until it counts."""
        return math.inf if self._timer is None else self._begin_seconds - asyncio.get_running_loop().time()

    @property
    def expired(self) -> bool:
        """Whether it has ended its block."""
        return self._scope.expired()

    def _count(self) -> None:
        loop = asyncio.get_running_loop()
        seconds, grace_seconds = self._seconds
        self._begin_seconds = loop.time() + seconds
        self._timer = loop.call_at(self._begin_seconds + grace_seconds, self._due)

    def _due(self) -> None:
        now_seconds = asyncio.get_running_loop().time()
        if now_seconds - self._begin_seconds - self._seconds[1] > STOPPED_SECONDS:
            self._count()
        else:
            self._scope.reschedule(now_seconds)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()

    async def __aexit__(self, *exception: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._scope.__aexit__(*exception)


_COMPARED_BYTES = 1 << 20
_READINGS = 10
_LEAST_ATTEMPTS = 3  # after a write of minutes, and where this process was stopped during an attempt
_ANSWERS: tuple[tuple[type[TransientError], int], ...] = ((RangeBeyondEndError, 2), (UnexpectedAnswerError, 8))
"""What a store may mean as it says it, and how many such answers confirm that it does."""

_log = logging.getLogger("stoker.retry")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy(Bounded):
    """How often and how soon to try again after a :class:`~stoker.errors.TransientError`.

    Attributes:
        attempts: in all, the first included; at most.
        first_seconds: the longest wait before the second attempt; it doubles with each.
        longest_seconds: the longest wait, unless the store asks for more.
        deadline_seconds: no attempt begins later than this after the operation began, or after the first failure of a
            write; but three attempts are made in any case.
        seed: of the jitter; None draws one from the operating system.
    """

    attempts: AtLeastOne[int] = 256
    first_seconds: NotNegative[float] = 0.1
    longest_seconds: float = 5.0
    deadline_seconds: Positive[float] = 60.0
    seed: int | None = None

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)  # super() does not know a class with slots
        if not self.first_seconds <= self.longest_seconds:
            raise ConfigError("a retry policy needs first_seconds <= longest_seconds")


PACK_POLICY = RetryPolicy(deadline_seconds=300.0)
"""Of whatever has work of hours to lose."""


class _Attempts:
    """The attempts of one operation: counts failures in a row, and waits after each.

    Args:
        reader: whose operation it is.
        key: that it is about.
        counts_at_once: whether the deadline counts from here on, or else from the first failure.
    """

    def __init__(self, reader: RetryingReader[Any], key: str, *, counts_at_once: bool) -> None:
        self._reader, self._policy, self._address = reader, reader.policy, f"{reader.url}/{key}"
        self._failures: list[TransientError] = []
        self._begun_seconds: float | None = asyncio.get_running_loop().time() if counts_at_once else None
        self._since_seconds = asyncio.get_running_loop().time()

    async def failed(self, error: TransientError) -> None:
        """Wait before the next attempt, or raise ``error`` if it was the last."""
        policy, loop = self._policy, asyncio.get_running_loop()
        self._failures.append(error)
        if self._begun_seconds is None:
            self._begun_seconds = loop.time()
        left_seconds = self._begun_seconds + policy.deadline_seconds - loop.time()
        number = len(self._failures)
        wait_seconds = backoff_seconds(
            number,
            base_seconds=policy.first_seconds,
            cap_seconds=policy.longest_seconds,
            rng=self._reader.rng,
            retry_after_seconds=error.retry_after_seconds,
            left_seconds=max(0.0, left_seconds),
        )
        if number >= self._most(error) or (wait_seconds >= left_seconds and number >= _LEAST_ATTEMPTS):
            raise error
        self._tell(error, wait_seconds, left_seconds)
        due_seconds = loop.time() + wait_seconds
        await asyncio.sleep(wait_seconds)
        if loop.time() - due_seconds > STOPPED_SECONDS:  # this process did not run
            self._begun_seconds = loop.time()

    def _most(self, error: TransientError) -> int:
        """Return after how many failures to give up; of an answer that means what it says, few are enough."""
        for kind, answers in _ANSWERS:
            if isinstance(error, kind):
                others = sum(not isinstance(each, kind) for each in self._failures)
                return min(self._policy.attempts, others + answers)
        return self._policy.attempts

    def _tell(self, error: TransientError, wait_seconds: float, left_seconds: float) -> None:
        """Log a long wait, and now and then that there still is one."""
        now_seconds = asyncio.get_running_loop().time()
        silent_seconds = now_seconds - max(self._since_seconds, self._reader.told_seconds)
        if max(wait_seconds, silent_seconds) <= LONG_SECONDS:
            return
        self._reader.told_seconds = now_seconds
        said = str(error) if self._address in str(error) else f"{self._address}: {error}"
        _log.warning("trying again in %.1f s, and for %.0f s more at most: %s", wait_seconds, left_seconds, said)


class RetryingReader(ReaderWrapper[R_co]):
    """Reads through another store, trying again; of one that does so already, only the policy may change.

    Cancellation ends a wait at once.

    Attributes:
        policy: how often and how soon it is tried again.
        hedges: requests that callers sent a second time because they were late; counted by those who do.
        rng: draws the jitter.
        told_seconds: when it was last logged that something is tried again, in loop time; for all operations.
    """

    def __init__(self, store: R_co, policy: RetryPolicy | None = None) -> None:
        super().__init__(store)
        self.policy = policy or RetryPolicy()
        if isinstance(store, RetryingReader):
            self.wrapped, self.policy = store.wrapped, policy or store.policy
        self.hedges = 0
        self.told_seconds = -math.inf
        self.rng = random.Random(self.policy.seed)  # noqa: S311 - jitter is no secret

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield the objects under ``prefix``; a listing that breaks goes on behind the last one that it gave."""
        attempts = _Attempts(self, prefix, counts_at_once=False)
        while True:
            try:
                async for info in super().list(prefix, start_after=start_after):
                    attempts, start_after = _Attempts(self, prefix, counts_at_once=False), info.key
                    yield info
            except TransientError as error:
                await attempts.failed(error)
            else:
                return

    async def _perform(self, operation: Operation, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """Send a request until it succeeds; the time of a write counts from its first failure."""
        attempts = _Attempts(self, key, counts_at_once=operation is not Operation.PUT)
        while True:
            try:
                return await request()
            except TransientError as error:
                await attempts.failed(error)


class RetryingStore(RetryingReader[Store], StoreWrapper):
    """Reads and writes through another store, trying again."""

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        """Write an object; a conditional write whose answer was lost is recognised as one's own by its bytes."""
        unsure = False

        async def attempt() -> ObjectInfo:
            nonlocal unsure
            try:
                return await self.wrapped.put(key, data, if_absent=if_absent, if_tag=if_tag)
            except TransientError:
                unsure = True
                raise
            except PreconditionFailedError:
                if unsure and (info := await holds(self.wrapped, key, data)):
                    return info
                raise

        return await self._perform(Operation.PUT, key, attempt)

    async def put_once(self, key: str, data: Buffer) -> ObjectInfo | None:
        """Write an object unless it is there already; return what the store says of it, None if another one is there.

        It may be there of a process that was killed, or of one that is at work on the same.
        """
        try:
            return await self.put(key, data, if_absent=True)
        except PreconditionFailedError:
            return await holds(self, key, data)

    async def keeps_conditions(self, key: str, data: Buffer) -> bool:
        """Return whether the store refuses to write ``data`` where there is an object only if there is none.

        One request where it does. Where it seems not to, it is asked again: somebody may have deleted the object.
        """
        for _ in range(2):
            try:
                await self._perform(Operation.PUT, key, lambda: self.wrapped.put(key, data, if_absent=True))
            except PreconditionFailedError:
                return True
        return False


async def holds(store: Readable, key: str, data: Buffer) -> ObjectInfo | None:
    """Return what the store says of the object at ``key`` if its bytes are ``data``, else None.

    Reads in small pieces, so that no second object is held in memory.
    """
    wanted = memoryview(data).cast("B")
    try:
        info = await store.head(key)
        if info.size_bytes != len(wanted):
            return None
        piece = memoryview(bytearray(min(_COMPARED_BYTES, len(wanted))))
        for start in range(0, len(wanted), _COMPARED_BYTES):
            part = wanted[start : start + _COMPARED_BYTES]
            if not await _is_at(store, info, start, part, piece[: len(part)]):
                return None
    except (NotFoundError, ObjectChangedError):
        return None
    return info


async def _is_at(store: Readable, info: ObjectInfo, start: int, wanted: memoryview, into: memoryview) -> bool:
    """Return whether an object has the wanted bytes at ``start``.

    A reading may be damaged on its way; what is read twice alike is what is there.
    """
    seen: set[int] = set()
    for _ in range(_READINGS):
        await store.get_range(info.key, start, start + len(wanted), into=into, tag=info.tag)
        if into == wanted:
            return True
        found = crc32c(into)
        if found in seen:
            break
        seen.add(found)
    return False
