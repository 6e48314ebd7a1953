"""Fetches verified bytes: whole objects into ring slots, from tiers first; or ranges of objects into given memory."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import fields
from itertools import pairwise
from typing import NoReturn

from stoker._base.batch_read import BatchLimits, BatchReadable, BatchRefusedError, ObjectPart, RangePart
from stoker._base.checksum import combine_crc32c, crc32c
from stoker._base.fetch_record import Phase, mark_wasted, start_activity
from stoker._base.task_group import Limiter, for_each, for_each_in_turn, task_group
from stoker._fetch.batch_fetch import BatchFetch, split_batches
from stoker._fetch.concurrency import LinkUse
from stoker._fetch.config import LARGE_REQUEST_BYTES, FetchConfig, FetchCounters
from stoker._fetch.hedge import HedgePolicy
from stoker._fetch.range_reader import ObjectFetch, RangeChecks, RangeReader
from stoker._fetch.tier_chain import Patience, TierChain
from stoker._memory.ring import Ring
from stoker.abc import ObjectRef, Readable, Tier
from stoker.errors import (
    BucketNotFoundError,
    ChecksumError,
    CopiedBucketWarning,
    FetchError,
    NotFoundError,
    ObjectChangedError,
    ObjectDamagedError,
    ObjectTruncatedError,
    StokerError,
)

__all__ = ["FetchConfig", "Fetcher"]

_log = logging.getLogger("stoker")


class Fetcher:
    """Fetches objects of one store into one ring. Belongs to one event loop; any number of fetches may run at once.

    Attributes:
        config: retries, hedged requests and concurrency.
        tiers: tiers to read whole objects from first.
    """

    def __init__(
        self,
        store: Readable,
        *,
        ring: Ring,
        rng: random.Random,
        config: FetchConfig | None = None,
        tiers: Sequence[Tier] = (),
        request_bytes: float = LARGE_REQUEST_BYTES,
        small_hedge_bytes: int = 0,
        is_start: bool = False,
        counters: FetchCounters | None = None,
        log: logging.Logger = _log,
        checksum: Callable[[memoryview], int] = crc32c,
    ) -> None:
        """Create a fetcher; nothing is requested before the first fetch.

        Args:
            store: store of the objects.
            ring: ring to fetch into; hedges use its free slots, too.
            rng: random numbers for jitter.
            config: retries, hedged requests and concurrency; default ``FetchConfig()``.
            tiers: tiers to read whole objects from first, in this order; a late tier is not waited for.
            request_bytes: expected size of most requests; more small ones are in flight at the start.
            small_hedge_bytes: size up to which hedges use separate memory, ``config.hedge_burst`` times as large,
                while it has room; all other hedges need a free slot.
            is_start: whether to hedge each request up to twice outside the budget until :meth:`end_start`.
            counters: counters to update; default new ones.
            log: logger for tiers whose breaker opens or closes; default ``stoker``.
            checksum: function for the checksum of a whole object; default CRC-32C, other for models of a bucket.
        """
        self.config = config or FetchConfig()
        self.rng = rng
        self._store = store
        self._ring = ring
        self._checksum = checksum
        self._counters = FetchCounters() if counters is None else counters
        self._hedges = HedgePolicy(self.config, ring, self._counters, small_bytes=small_hedge_bytes, is_start=is_start)
        self._reader = RangeReader(
            store,
            rng=rng,
            config=self.config,
            counters=self._counters,
            hedges=self._hedges,
            request_bytes=request_bytes,
        )
        self.tiers = TierChain(tiers, self._hedges, self.config, self._counters, self._verify_whole, log)
        self._use_tags = True
        self._batches = store if isinstance(store, BatchReadable) else None

    @property
    def batch_limits(self) -> BatchLimits | None:
        """Limits of a request for ranges of several objects; None if the store has no such request."""
        return None if self._batches is None else self._batches.batch_limits

    @property
    def link(self) -> LinkUse:
        """The link to the store, as measured."""
        return self._reader.link

    @property
    def ranges(self) -> Limiter:
        """Limit of the calls of :meth:`fetch_ranges` at a time, for callers with many; that of requests in flight."""
        return self._reader.ranges

    @property
    def stats(self) -> FetchCounters:
        """A copy of the current counters."""
        counted = {each.name: copy(getattr(self._counters, each.name)) for each in fields(self._counters)}
        return FetchCounters(**counted)

    def end_start(self) -> None:
        """Hedge only within the budget from now on: the first batch is complete. Idempotent; from any thread."""
        self._hedges.budget.is_start = False

    def count_slots(self, ref: ObjectRef) -> int:
        """Return the number of slots that an object takes."""
        return self._ring.count_slots(ref.size_bytes)

    async def fetch(self, ref: ObjectRef, *, urgent: bool = False) -> int:
        """Return a READY slot whose first ``ref.size_bytes`` bytes are the object, verified by checksum.

        The slot is acquired before the first await. ``urgent`` objects go before others and are read in parallel
        ranges. Cancellation and errors wait until no transport writes to the slot, and free it. A fetch takes at most
        ``deadline_seconds`` plus the time of its bytes at ``min_bytes_per_second``, not counting the wait before its
        first request. A tier adds at most 0.1 s, or the store's usual time if the tier is known to be slower, and one
        that may wait for another client's fetch a second; if the store then fails, each tier gets up to
        ``attempt_seconds``.

        Raises:
            FetchError: the object was not fetched by the deadline or the last attempt.
            ObjectChangedError: the object is not the pinned one, is shorter, or always has a wrong checksum.
            NotFoundError: the object does not exist.
            StoreError: the store raised an error that a retry cannot fix.
            MemoryBudgetError: the object is larger than the ring.
            RingStateError: no slot was free; admission is up to the caller.
        """
        with self._ring.fill_slot(ref.key, ref.size_bytes) as slot:
            await self.fetch_whole(ref, self._ring.view(slot, ref.size_bytes), urgent=urgent)
        return slot

    def fetch_whole(
        self, ref: ObjectRef, into: memoryview, *, urgent: bool = False, patience: Patience | None = None
    ) -> Awaitable[None]:
        """Return an awaitable that reads an object, verified by checksum, into the caller's memory of its size.

        When it ends, even by an error or cancellation, no transport writes to the memory. ``patience`` limits the waits
        for tiers of several calls together. Otherwise like :meth:`fetch`.

        Raises:
            FetchError: the object was not fetched by the deadline or the last attempt.
            ObjectChangedError: the object is not the pinned one, is shorter, or always has a wrong checksum.
            NotFoundError: the object does not exist.
            StoreError: the store raised an error that a retry cannot fix.
        """
        parts = self.split(RangePart(0, ref.size_bytes, 0), urgent=urgent)

        def from_store(into: memoryview) -> Awaitable[None]:
            checksums = _RangeChecksums(ref, self._checksum)
            return self.fetch_ranges(ref, parts, into=into, verify=checksums.verify, urgent=urgent, checks=checksums)

        return self.tiers.fetch(ref, into, from_store, patience) if self.tiers else from_store(into)

    async def fetch_ranges(
        self,
        ref: ObjectRef,
        parts: Sequence[RangePart],
        *,
        into: memoryview,
        verify: Callable[[memoryview], None],
        urgent: bool = False,
        checks: RangeChecks | None = None,
    ) -> None:
        """Read parts of an object into the caller's memory, for example that of a slot.

        ``checks`` gets the checksum of each part that was read. Once all parts are read, ``verify(into)`` is
        called, which raises ChecksumError if they are wrong. When the call ends, even by an error or cancellation, no
        transport writes to the memory.

        Raises:
            FetchError: the parts were not fetched by the deadline or the last attempt.
            ObjectChangedError: the object is not the pinned one, is shorter, or always has a wrong checksum.
            NotFoundError: the object does not exist.
            StoreError: the store raised an error that a retry cannot fix.
        """
        fetch = ObjectFetch(
            ref=ref,
            name=f"{self._store.url.rstrip('/')}/{ref.key}",
            into=into,
            urgent=urgent,
            tag=(ref.tag or None) if self._use_tags else None,
            size_bytes=sum(part.size_bytes for part in parts),
            checks=checks,
        )
        sent_tag = fetch.tag
        try:
            async with fetch.deadline:
                while True:
                    try:
                        if len(parts) == 1:
                            await self._reader.read(fetch, parts[0])
                        else:
                            async with task_group() as readings:
                                for part in parts:
                                    readings.create_task(self._reader.read(fetch, part))
                        with start_activity(ref.key, Phase.VERIFY):
                            verify(into)
                        break
                    except StokerError as error:
                        damage = self._classify_failure(fetch, error)
                    if damage is not None:
                        with start_activity(ref.key, Phase.RETRY):
                            mark_wasted(ref.key)
                            await self._reader.back_off(fetch, fetch.failed_reads, damage)
        except (TimeoutError, StokerError) as error:
            self._counters.failed += 1
            self._raise_final(fetch, error)
        if fetch.tag != sent_tag:
            self._accept_copies(fetch)
        self._counters.count_delivery(fetch.size_bytes)

    async def fetch_parts(
        self,
        parts: Sequence[ObjectPart],
        *,
        into: memoryview,
        verify: Callable[[int], None],
        limits: BatchLimits,
        urgent: bool = False,
    ) -> None:
        """Read ranges of several objects into the caller's memory, by one request for as many as the store allows.

        ``verify(number)`` is called for each part that was read, and raises ChecksumError if its bytes in ``into`` are
        wrong. Such parts are read again, by requests of their own, and so are those of a request that the store
        refuses. When the call ends in any way, no transport writes to the memory.

        Raises:
            StoreError: a part could not be read; see :meth:`fetch_ranges`.
        """

        async def read_part(number: int) -> None:
            ref, part = parts[number]
            ranges = self.split(part, urgent=urgent)
            await self.fetch_ranges(ref, ranges, into=into, verify=lambda _: verify(number), urgent=urgent)

        async def read_run(run: range) -> None:
            left: Sequence[int] = run
            if len(run) > 1:
                batch = [parts[number] for number in run]
                fetch = BatchFetch.of(
                    self._store.url, batch, into, lambda number: verify(run.start + number), urgent=urgent
                )
                left = [run.start + number for number in await self._fetch_batch(fetch)]
            if left:
                await for_each_in_turn(left, read_part, self.ranges, urgent=urgent)

        runs = split_batches(parts, limits)
        await for_each(runs, read_run, concurrency=min(len(runs), self.config.max_concurrency))

    async def _fetch_batch(self, fetch: BatchFetch) -> Sequence[int]:
        """Read the parts of a batch by one request; return the numbers of those to read by requests of their own."""
        try:
            async with fetch.deadline:
                await self._reader.read(fetch, fetch.part)
        except BatchRefusedError:
            return range(len(fetch.parts))
        except (TimeoutError, StokerError) as error:
            self._counters.failed += 1
            self._raise_final(fetch, error)
        with start_activity(fetch.ref.key, Phase.VERIFY):
            wrong = [number for number in range(len(fetch.parts)) if not fetch.is_right(number)]
        for number in wrong:
            key = fetch.parts[number].ref.key
            self._counters.checksum_failures += 1
            self._reader.count_failure(fetch, ChecksumError(f"{key}: a value in a batch is not what was packed"))
            self._counters.retries[ChecksumError.__name__] += 1
        wrong_bytes = sum(fetch.parts[number].part.size_bytes for number in wrong)
        self._counters.count_delivery(fetch.size_bytes - wrong_bytes)
        return wrong

    def _classify_failure(self, fetch: ObjectFetch, error: StokerError) -> ChecksumError | None:
        """Decide what follows a failed read; raise if another read cannot help.

        A second read confirms that an object has changed. If its tag differs, that read sends no tag: an object with
        another tag is accepted if its size and checksum are right.

        Returns:
            The error to back off from before the next read; None to read again at once.
        """
        fetch.failed_reads += 1
        match error:
            case ObjectChangedError():
                if fetch.change_error is not None:
                    raise error
                fetch.change_error = error
                if not isinstance(error, ObjectTruncatedError):
                    fetch.tag = None
                return None
            case FetchError():
                raise (fetch.change_error or error) from error.__cause__  # a changed object may also be shorter
            case ChecksumError():
                self._counters.checksum_failures += 1
                self._reader.count_failure(fetch, error)
                if fetch.failed_reads >= self.config.checksum_attempts:
                    detail = str(error).removeprefix(f"{fetch.ref.key}: ")
                    raise ObjectDamagedError(
                        f"{fetch.name} is corrupt: its checksum always differs ({detail})"
                    ) from None
                return error
        raise error

    def _raise_final(self, fetch: ObjectFetch, error: TimeoutError | StokerError) -> NoReturn:
        """Raise the error that ends a fetch, with advice for the user."""
        if isinstance(error, TimeoutError):
            if not fetch.deadline.is_expired:
                raise error
            raise self._reader.fetch_error(fetch, "its deadline passed") from (fetch.last_error or error)
        if isinstance(error, NotFoundError | ObjectChangedError) and not isinstance(error, BucketNotFoundError):
            url = self._store.url
            # Not chained: the cause says less than this error.
            raise type(error)(
                f"{error}. 'stoker verify {url}' lists all missing or changed objects: restore them from "
                f"a copy, or leave them out with 'stoker rebuild-manifest {url} --verify'"
            ) from None
        raise error

    def split(self, part: RangePart, *, urgent: bool) -> list[RangePart]:
        """Split a large or urgent part into ranges of nearly equal size; an empty part into none."""
        size_bytes = part.size_bytes
        pieces = min(self.config.split_parts, size_bytes // self.config.split_min_bytes) if urgent else 1
        pieces = max(1, pieces, -(-size_bytes // self.config.max_request_bytes))
        cuts = [size_bytes * piece // pieces for piece in range(pieces + 1)]
        return [
            RangePart(part.start + begin, part.start + end, part.offset + begin)
            for begin, end in pairwise(cuts)
            if begin < end
        ]

    def _accept_copies(self, fetch: ObjectFetch) -> None:
        if self._use_tags:
            self._use_tags = False
            warnings.warn(
                f"{fetch.name} has another ETag or generation than the manifest pins, but the same size and "
                "checksum: the bucket seems to be a copy. From now on, only checksums identify objects.",
                CopiedBucketWarning,
                stacklevel=2,
            )

    def _verify_whole(self, ref: ObjectRef, data: memoryview) -> None:
        _check_crc32c(ref, self._checksum(data))


class _RangeChecksums:
    """Verifies an object by the checksums of its ranges, computed as they arrive."""

    def __init__(self, ref: ObjectRef, checksum: Callable[[memoryview], int]) -> None:
        self._ref, self._checksum = ref, checksum
        self._by_start: dict[int, tuple[int, int]] = {}

    def compute(self, data: memoryview) -> int:
        """Return the checksum of bytes; callable from any thread."""
        return self._checksum(data)

    def record(self, part: RangePart, checksum: int) -> None:
        """Record the checksum of a range."""
        self._by_start[part.start] = checksum, part.size_bytes

    def verify(self, _: memoryview) -> None:
        """Raise ChecksumError unless the ranges, which must be the whole object, have its checksum."""
        combined = 0
        for start, (checksum, size_bytes) in sorted(self._by_start.items()):
            combined = combine_crc32c(combined, checksum, size_bytes) if start else checksum
        _check_crc32c(self._ref, combined)


def _check_crc32c(ref: ObjectRef, checksum: int) -> None:
    if checksum != ref.crc32c:
        raise ChecksumError(f"{ref.key}: CRC-32C is {checksum:08x}, but the manifest has {ref.crc32c:08x}")
