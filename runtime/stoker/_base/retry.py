"""Retries: back-off, deadlines that exclude suspensions of this process, and stores that retry.

Packing, commits and maintenance read and write through a :class:`RetryingStore`. The prefetcher has a policy of its
own, with hedges and budgets, and shares the back-off and the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from stoker._base.arguments import AtLeastOne, BoundedConfig, NotNegative, Positive, explain_arguments
from stoker._base.checksum import crc32c
from stoker._base.meter import Operation, ReaderWrapper, StoreWrapper
from stoker._base.segments import SegmentedBytes
from stoker._base.upload import UPLOAD_PART_BYTES, ObjectUpload, abort_upload, send_parts
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

LONG_WAIT_SECONDS = 10.0
"""A longer wait is logged, to explain the silence."""


def backoff_seconds(
    failures: int,
    *,
    base_seconds: float,
    cap_seconds: float,
    rng: random.Random,
    retry_after_seconds: float | None = None,
    left_seconds: float = math.inf,
) -> float:
    """Return the wait in seconds after ``failures`` >= 1 consecutive failures: full jitter, exponential, capped.

    The wait is the delay that the store asked for, ``retry_after_seconds``, plus the jitter. If that exceeds the
    ``left_seconds`` until the deadline, the wait is half of those: a few more attempts are made, but less often than
    without the store's request.
    """
    doublings = min(failures - 1, 64)  # reaches any cap without an overflow
    jitter = rng.uniform(0.0, min(cap_seconds, base_seconds * 2.0**doublings))
    asked_seconds = max(0.0, retry_after_seconds or 0.0)
    if asked_seconds and jitter + asked_seconds >= left_seconds:
        return max(jitter, left_seconds / 2)
    return jitter + asked_seconds


MIN_SUSPENSION_SECONDS = 5.0
"""A timer that fires later by more than this indicates that the process was suspended."""


class SuspensionAwareDeadline:
    """A timeout for an ``async with`` block, which counts from :meth:`start` and raises TimeoutError."""

    __slots__ = ("_begin_seconds", "_scope", "_seconds", "_timer")

    def __init__(self) -> None:
        self._scope = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._begin_seconds = 0.0
        self._seconds = (0.0, 0.0)

    def start(self, seconds: float, grace_seconds: float) -> None:
        """Start the deadline unless it has started.

        Args:
            seconds: time during which attempts may begin.
            grace_seconds: additional time for attempts that have begun.
        """
        if self._timer is None:
            self._seconds = seconds, grace_seconds
            self._set_timer()

    def restart(self) -> None:
        """Count from now on, if the deadline has started: there was progress."""
        if self._timer is not None:
            self._timer.cancel()
            self._set_timer()

    def expires_within(self, wait_seconds: float) -> bool:
        """Return whether no attempt may begin after a wait of ``wait_seconds``."""
        return wait_seconds >= self.left_seconds

    @property
    def left_seconds(self) -> float:
        """Remaining time in which attempts may begin, in seconds; infinite before :meth:`start`."""
        return math.inf if self._timer is None else self._begin_seconds - asyncio.get_running_loop().time()

    @property
    def is_expired(self) -> bool:
        """Whether the deadline has ended its block."""
        return self._scope.expired()

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        seconds, grace_seconds = self._seconds
        self._begin_seconds = loop.time() + seconds
        self._timer = loop.call_at(self._begin_seconds + grace_seconds, self._on_timer)

    def _on_timer(self) -> None:
        now_seconds = asyncio.get_running_loop().time()
        if now_seconds - self._begin_seconds - self._seconds[1] > MIN_SUSPENSION_SECONDS:
            self._set_timer()
        else:
            self._scope.reschedule(now_seconds)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()

    async def __aexit__(self, *exception: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._scope.__aexit__(*exception)


_COMPARISON_CHUNK_BYTES = 1 << 20
_MAX_COMPARISONS = 10
_MIN_ATTEMPTS = 3  # even after a write of minutes, or if this process was suspended during an attempt
_CONFIRMATIONS: tuple[tuple[type[TransientError], int], ...] = ((RangeBeyondEndError, 2), (UnexpectedAnswerError, 8))
"""Errors that may be permanent, each with the number of occurrences that confirm it."""

_log = logging.getLogger("stoker.retry")


@explain_arguments(
    "RetryPolicy",
    renamed={"first_seconds": "backoff_base_seconds", "longest_seconds": "backoff_cap_seconds"},
)
@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy(BoundedConfig):
    """Number and delays of retries after a :class:`~stoker.errors.TransientError`.

    Attributes:
        attempts: maximum number of attempts, including the first; default 256.
        backoff_base_seconds: maximum wait before the second attempt, which doubles with each further attempt;
            default 0.1.
        backoff_cap_seconds: maximum wait, unless the store asks for a longer one; default 5.
        deadline_seconds: time in which attempts may begin, from the begin of the operation, or for a write from its
            first failure; three attempts are made in any case. Default 60.
        seed: seed of the jitter; None, the default, draws one from the operating system.

    Example:
        >>> policy = RetryPolicy(attempts=10, deadline_seconds=300)
        >>> store = RetryingStore(stoker.open_store("s3://bucket"), policy)
    """

    attempts: AtLeastOne[int] = 256
    backoff_base_seconds: NotNegative[float] = 0.1
    backoff_cap_seconds: float = 5.0
    deadline_seconds: Positive[float] = 60.0
    seed: int | None = None

    def __post_init__(self) -> None:
        BoundedConfig.__post_init__(self)  # super() does not know a class with slots
        if not self.backoff_base_seconds <= self.backoff_cap_seconds:
            raise ConfigError(
                f"backoff_base_seconds {self.backoff_base_seconds} exceeds backoff_cap_seconds "
                f"{self.backoff_cap_seconds}: lower it"
            )


PACK_RETRY_POLICY = RetryPolicy(deadline_seconds=300.0)
"""Policy for operations whose failure would waste hours of work."""


class _RetryState:
    """The attempts of one operation: counts consecutive failures, and waits after each.

    Args:
        reader: reader that performs the operation.
        key: key of the object, or prefix of the listing.
        counts_at_once: whether the deadline counts from the start of the operation or from its first failure.
    """

    def __init__(self, reader: RetryingReader[Any], key: str, *, counts_at_once: bool) -> None:
        self._reader = reader
        self._policy = reader.policy
        self._address = f"{reader.url}/{key}"
        self._failures: list[TransientError] = []
        self._begun_seconds: float | None = asyncio.get_running_loop().time() if counts_at_once else None
        self._since_seconds = asyncio.get_running_loop().time()

    async def handle_failure(self, error: TransientError) -> None:
        """Wait before the next attempt, or raise ``error`` if it was the last."""
        policy, loop = self._policy, asyncio.get_running_loop()
        self._failures.append(error)
        if self._begun_seconds is None:
            self._begun_seconds = loop.time()
        left_seconds = self._begun_seconds + policy.deadline_seconds - loop.time()
        number = len(self._failures)
        wait_seconds = backoff_seconds(
            number,
            base_seconds=policy.backoff_base_seconds,
            cap_seconds=policy.backoff_cap_seconds,
            rng=self._reader.rng,
            retry_after_seconds=error.retry_after_seconds,
            left_seconds=max(0.0, left_seconds),
        )
        if number >= self._max_failures(error) or (wait_seconds >= left_seconds and number >= _MIN_ATTEMPTS):
            raise error
        self._log_wait(error, wait_seconds, left_seconds)
        due_seconds = loop.time() + wait_seconds
        await asyncio.sleep(wait_seconds)
        if loop.time() - due_seconds > MIN_SUSPENSION_SECONDS:  # this process was suspended
            self._begun_seconds = loop.time()

    def _max_failures(self, error: TransientError) -> int:
        """Return the number of failures after which to give up: few for an error that may be permanent."""
        for kind, answers in _CONFIRMATIONS:
            if isinstance(error, kind):
                others = sum(not isinstance(each, kind) for each in self._failures)
                return min(self._policy.attempts, others + answers)
        return self._policy.attempts

    def _log_wait(self, error: TransientError, wait_seconds: float, left_seconds: float) -> None:
        """Log a long wait, and at intervals that it continues."""
        now_seconds = asyncio.get_running_loop().time()
        silent_seconds = now_seconds - max(self._since_seconds, self._reader.last_logged_seconds)
        if max(wait_seconds, silent_seconds) <= LONG_WAIT_SECONDS:
            return
        self._reader.last_logged_seconds = now_seconds
        message = str(error) if self._address in str(error) else f"{self._address}: {error}"
        _log.warning("retrying in %.1f s, for at most %.0f s more: %s", wait_seconds, left_seconds, message)


class RetryingReader(ReaderWrapper[R_co]):
    """Reads through another store with retries. If that is a RetryingReader itself, its store is wrapped directly.

    A cancellation ends a wait at once.

    Attributes:
        policy: number and delays of retries.
        hedges: number of hedges, counted by the callers that send them.
        rng: random number generator of the jitter.
        last_logged_seconds: time of the last log message, in loop time, over all operations.
    """

    def __init__(self, store: R_co, policy: RetryPolicy | None = None) -> None:
        super().__init__(store)
        self.policy = policy or RetryPolicy()
        if isinstance(store, RetryingReader):
            self.wrapped, self.policy = store.wrapped, policy or store.policy
        self.hedges = 0
        self.last_logged_seconds = -math.inf
        self.rng = random.Random(self.policy.seed)  # noqa: S311 - jitter is no secret

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield the objects under ``prefix``; after a failure, the listing resumes behind the last object."""
        attempts = _RetryState(self, prefix, counts_at_once=False)
        while True:
            try:
                async for info in super().list(prefix, start_after=start_after):
                    attempts = _RetryState(self, prefix, counts_at_once=False)
                    start_after = info.key
                    yield info
            except TransientError as error:
                await attempts.handle_failure(error)
            else:
                return

    async def _perform(self, operation: Operation, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """Send a request until it succeeds; the deadline of a write counts from its first failure."""
        attempts = _RetryState(self, key, counts_at_once=operation is not Operation.PUT)
        while True:
            try:
                return await request()
            except TransientError as error:
                await attempts.handle_failure(error)


class RetryingStore(RetryingReader[Store], StoreWrapper):
    """Reads and writes through another store with retries.

    Example:
        >>> store = RetryingStore(stoker.open_store("s3://bucket"), RetryPolicy(attempts=10))
        >>> (await store.head("train/manifest.safetensors")).size_bytes > 0
        True
        >>> await store.close()

    Args:
        store: store to wrap; :meth:`close` closes it, too.
        policy: number and delays of retries; default ``RetryPolicy()``, or that of a wrapped RetryingReader.
    """

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        """Write an object. If the response to a conditional write is lost, its success is recognised by the bytes."""
        unsure = False

        async def attempt() -> ObjectInfo:
            nonlocal unsure
            try:
                return await self.wrapped.put(key, data, if_absent=if_absent, if_tag=if_tag)
            except TransientError:
                unsure = True
                raise
            except PreconditionFailedError:
                if unsure and (info := await head_if_equal(self.wrapped, key, data)):
                    return info
                raise

        return await self._perform(Operation.PUT, key, attempt)

    async def put_once(self, key: str, data: Buffer | SegmentedBytes) -> ObjectInfo | None:
        """Write an object unless it exists; return its metadata, or None if it exists with other bytes.

        The object may have been written by an earlier process that was killed, or by a concurrent one. One of several
        buffers that is larger than a part is sent in parts, if the store can.
        """
        try:
            if not isinstance(data, SegmentedBytes):
                return await self.put(key, data, if_absent=True)
            if len(data) > UPLOAD_PART_BYTES and (upload := await self.begin_upload(key, len(data))) is not None:
                return await self._put_parts(key, data, upload)
            return await self.put(key, data[:], if_absent=True)
        except PreconditionFailedError:
            return await head_if_equal(self, key, data)

    async def _put_parts(self, key: str, data: SegmentedBytes, upload: ObjectUpload) -> ObjectInfo:
        """Send the parts of a new object and complete it; if that fails, or is cancelled, discard the parts."""
        try:
            await send_parts(upload, data, partial(self._perform, Operation.PUT, key))
            return await self._complete_upload(key, data, upload)
        except BaseException:
            await abort_upload(upload)
            raise

    async def _complete_upload(self, key: str, data: SegmentedBytes, upload: ObjectUpload) -> ObjectInfo:
        """Create an object from its parts. If the response is lost, success is recognised by the bytes."""
        unsure = False

        async def attempt() -> ObjectInfo:
            nonlocal unsure
            try:
                return await upload.complete()
            except TransientError:
                unsure = True
                raise
            except (PreconditionFailedError, NotFoundError):
                if unsure and (info := await head_if_equal(self.wrapped, key, data)):
                    return info
                raise

        return await self._perform(Operation.PUT, key, attempt)

    async def keeps_conditions(self, key: str, data: Buffer) -> bool:
        """Return whether the store honours ``if_absent``: it refuses to write ``data`` to a key that exists.

        Sends one request if it does. Otherwise a second request excludes that the object had just been deleted.
        """
        for _ in range(2):
            try:
                await self._perform(Operation.PUT, key, lambda: self.wrapped.put(key, data, if_absent=True))
            except PreconditionFailedError:
                return True
        return False


async def head_if_equal(store: Readable, key: str, data: Buffer | SegmentedBytes) -> ObjectInfo | None:
    """Return the metadata of the object at ``key`` if its bytes are ``data``, otherwise None.

    Reads in small chunks, to avoid a second copy of the object in memory.
    """
    wanted = data if isinstance(data, SegmentedBytes) else memoryview(data).cast("B")
    try:
        info = await store.head(key)
        if info.size_bytes != len(wanted):
            return None
        piece = memoryview(bytearray(min(_COMPARISON_CHUNK_BYTES, len(wanted))))
        for start in range(0, len(wanted), _COMPARISON_CHUNK_BYTES):
            part = memoryview(wanted[start : start + _COMPARISON_CHUNK_BYTES])
            if not await _has_bytes_at(store, info, start, part, piece[: len(part)]):
                return None
    except (NotFoundError, ObjectChangedError):
        return None
    return info


async def _has_bytes_at(store: Readable, info: ObjectInfo, start: int, wanted: memoryview, into: memoryview) -> bool:
    """Return whether an object has the wanted bytes at ``start``.

    A read may be damaged in transit; two equal reads are trusted.
    """
    seen: set[int] = set()
    for _ in range(_MAX_COMPARISONS):
        await store.get_range(info.key, start, start + len(wanted), into=into, tag=info.tag)
        if into == wanted:
            return True
        checksum = crc32c(into)
        if checksum in seen:
            break
        seen.add(checksum)
    return False
