"""Verified bytes: whole objects in ring slots, from nearer tiers first; or ranges, in whatever memory they are for."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import fields
from functools import partial
from itertools import pairwise
from typing import NoReturn

from stoker._base.checksum import crc32c
from stoker._base.fetch_record import Phase, spoilt, strand
from stoker._base.task_group import task_group
from stoker._fetch.config import FetchConfig, FetchCounters
from stoker._fetch.hedge import Hedges
from stoker._fetch.range_reader import ObjectFetch, RangePart, RangeReader
from stoker._fetch.tier_chain import TierChain
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

__all__ = ["FetchConfig", "Fetcher", "RangePart"]

_log = logging.getLogger("stoker")


class Fetcher:
    """Fetches objects of one store into one ring. Lives on one event loop; any number of fetches may run at once.

    Attributes:
        config: deadlines, retries, hedges and concurrency.
        tiers: nearer places, which are asked for whole objects first.
    """

    def __init__(
        self,
        store: Readable,
        *,
        ring: Ring,
        rng: random.Random,
        config: FetchConfig | None = None,
        tiers: Sequence[Tier] = (),
        small_hedge_bytes: int = 0,
        is_start: bool = False,
        counters: FetchCounters | None = None,
        log: logging.Logger = _log,
        checksum: Callable[[memoryview], int] = crc32c,
    ) -> None:
        """Prepare; nothing is requested before the first fetch.

        Args:
            store: where the objects are.
            ring: into whose slots they are fetched; its free slots are for hedges, too.
            rng: for jitter.
            config: deadlines, retries, hedges and concurrency.
            tiers: nearer places to ask for whole objects first, in turn; one that is late is not waited for.
            small_hedge_bytes: hedges up to this size share memory of their own, ``config.hedge_burst`` times as much,
                while there is room; every other one needs a free slot.
            is_start: whether a start begins, in which each request may be hedged twice beside the budget; until
                :meth:`end_start`.
            counters: of what is done; its own by default.
            log: told of tiers that are left alone; a simulation brings its own.
            checksum: of a whole object; a model of a bucket, which moves no bytes, brings its own.
        """
        self.config = config or FetchConfig()
        self._store = store
        self._ring = ring
        self._checksum = checksum
        self._counters = FetchCounters() if counters is None else counters
        self._hedges = Hedges(self.config, ring, self._counters, small_bytes=small_hedge_bytes, is_start=is_start)
        self._reader = RangeReader(store, rng=rng, config=self.config, counters=self._counters, hedges=self._hedges)
        self.tiers = TierChain(tiers, self._hedges, self.config, self._counters, self._verify_whole, log)
        self._sends_tags = True

    @property
    def stats(self) -> FetchCounters:
        """A snapshot of everything counted so far."""
        counted = {each.name: copy(getattr(self._counters, each.name)) for each in fields(self._counters)}
        return FetchCounters(**counted)

    def end_start(self) -> None:
        """The first batch is there: hedge by the budget alone. Idempotent; from any thread."""
        self._hedges.budget.is_start = False

    async def fetch(self, ref: ObjectRef, *, urgent: bool = False) -> int:
        """Return a READY slot whose first ``ref.size_bytes`` bytes are the object's, verified by checksum.

        The slot is acquired before the first await. ``urgent`` objects go before others and are read in parallel
        ranges. Cancelling waits until no transport writes to the slot and frees it, as every error does. Takes
        ``deadline_seconds`` at most and what its bytes take at ``least_bytes_per_second``, not counting the wait in
        line before the first request. A tier adds 0.1 s at most, or what the store takes if the tier's reads are known
        to take longer; where the store then cannot, each tier may take ``attempt_seconds``.

        Raises:
            FetchError: not fetched by the deadline or the last attempt.
            ObjectChangedError: the object is another than the one pinned, shorter, or its checksum always differs.
            NotFoundError: it does not exist.
            StoreError: what the store raised, if trying again cannot help.
            BudgetError: the object is larger than a slot.
            RingStateError: no slot was free; admission is the caller's part.
        """
        with self._ring.filling(ref.key, ref.size_bytes) as slot:
            await self.fetch_whole(ref, self._ring.view(slot, ref.size_bytes), urgent=urgent)
        return slot

    def fetch_whole(self, ref: ObjectRef, into: memoryview, *, urgent: bool = False) -> Awaitable[None]:
        """Read an object, verified by checksum, into memory of its size that is the caller's in every case.

        To be awaited. When the call ends, however it ends, no transport writes to the memory. The rest is as for
        :meth:`fetch`.

        Raises:
            FetchError: not fetched by the deadline or the last attempt.
            ObjectChangedError: the object is another than the one pinned, shorter, or its checksum always differs.
            NotFoundError: it does not exist.
            StoreError: what the store raised, if trying again cannot help.
        """
        parts, verify = self.split(RangePart(0, ref.size_bytes, 0), urgent=urgent), partial(self._verify_whole, ref)

        def from_store(into: memoryview) -> Awaitable[None]:
            return self.fetch_ranges(ref, parts, into=into, verify=verify, urgent=urgent)

        return self.tiers.fetch(ref, into, from_store) if self.tiers else from_store(into)

    async def fetch_ranges(
        self,
        ref: ObjectRef,
        parts: Sequence[RangePart],
        *,
        into: memoryview,
        verify: Callable[[memoryview], None],
        urgent: bool = False,
    ) -> None:
        """Read parts of an object into memory that is the caller's in every case, a slot's for example.

        ``verify`` is given ``into`` once all parts are there, and raises ChecksumError if they are not right. When the
        call ends, however it ends, no transport writes to the memory.

        Raises:
            FetchError: not fetched by the deadline or the last attempt.
            ObjectChangedError: the object is another than the one pinned, shorter, or the checksum always differs.
            NotFoundError: it does not exist.
            StoreError: what the store raised, if trying again cannot help.
        """
        fetch = ObjectFetch(
            ref=ref,
            name=f"{self._store.url.rstrip('/')}/{ref.key}",
            into=into,
            urgent=urgent,
            tag=(ref.tag or None) if self._sends_tags else None,
            size_bytes=sum(part.size_bytes for part in parts),
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
                        with strand(ref.key, Phase.VERIFY):
                            verify(into)
                        break
                    except StokerError as error:
                        damage = self._read_again(fetch, error)
                    if damage is not None:
                        with strand(ref.key, Phase.RETRY):
                            spoilt(ref.key)
                            await self._reader.back_off(fetch, fetch.failed_readings, damage)
        except (TimeoutError, StokerError) as error:
            self._counters.failed += 1
            self._end(fetch, error)
        if fetch.tag != sent_tag:
            self._accept_copies(fetch)
        self._counters.delivered(fetch.size_bytes)

    def _read_again(self, fetch: ObjectFetch, error: StokerError) -> ChecksumError | None:
        """Decide what follows a reading that failed; raise if another one cannot help.

        A change is confirmed by another reading, without a tag if that is what differs: a tag that differs is let pass
        if size and checksum do not.

        Returns:
            The error, if it is to be backed off from first; None to read again at once.
        """
        fetch.failed_readings += 1
        match error:
            case ObjectChangedError():
                if fetch.changed is not None:
                    raise error
                fetch.changed = error
                if not isinstance(error, ObjectTruncatedError):
                    fetch.tag = None
                return None
            case FetchError():
                raise (fetch.changed or error) from error.__cause__  # a changed object may have become shorter, too
            case ChecksumError():
                self._counters.checksum_failures += 1
                self._reader.failed(fetch, error)
                if fetch.failed_readings >= self.config.checksum_attempts:
                    raise ObjectDamagedError(
                        f"{fetch.name} is not what was packed, its checksum always differs: {error}"
                    ) from None
                return error
        raise error

    def _end(self, fetch: ObjectFetch, error: TimeoutError | StokerError) -> NoReturn:
        """Raise what ends a fetch, as the caller gets it."""
        if isinstance(error, TimeoutError):
            if not fetch.deadline.expired:
                raise error
            raise self._reader.gave_up(fetch, "its deadline passed") from (fetch.last_error or error)
        if isinstance(error, NotFoundError | ObjectChangedError) and not isinstance(error, BucketNotFoundError):
            url = self._store.url
            # Not chained: what led to it says less than it does.
            raise type(error)(
                f"{error}. 'stoker verify {url}' lists all objects that are not as they were packed: restore them from "
                f"a copy, or leave them out with 'stoker rebuild-manifest {url} --verify'"
            ) from None
        raise error

    def split(self, part: RangePart, *, urgent: bool) -> list[RangePart]:
        """Cut what is urgent into ranges of nearly equal size; nothing of an empty one needs to be read."""
        size_bytes = part.size_bytes
        pieces = min(self.config.split_parts, size_bytes // self.config.split_least_bytes) if urgent else 1
        pieces = max(1, pieces)
        cuts = [size_bytes * piece // pieces for piece in range(pieces + 1)]
        return [
            RangePart(part.start + begin, part.start + end, part.offset + begin)
            for begin, end in pairwise(cuts)
            if begin < end
        ]

    def _accept_copies(self, fetch: ObjectFetch) -> None:
        if self._sends_tags:
            self._sends_tags = False
            warnings.warn(
                f"{fetch.name} has another ETag or generation than the manifest pins, but the same size and "
                "checksum: the bucket seems to be a copy. From here on checksums alone identify objects.",
                CopiedBucketWarning,
                stacklevel=2,
            )

    def _verify_whole(self, ref: ObjectRef, data: memoryview) -> None:
        found = self._checksum(data)
        if found != ref.crc32c:
            raise ChecksumError(f"{ref.key}: crc32c is {found:08x}, the manifest says {ref.crc32c:08x}")
