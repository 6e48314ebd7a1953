"""Verified bytes: whole objects in ring slots, from nearer tiers first; or ranges, in whatever memory they are for."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Sequence
from itertools import count, pairwise

from stoker._base.checksum import crc32c
from stoker._base.fetch_record import Phase, spoilt, strand
from stoker._base.task_group import task_group
from stoker._fetch.config import FetchConfig
from stoker._fetch.race import Found, TierChain
from stoker._fetch.range_reader import Pursuit, RangePart, RangeReader
from stoker._fetch.statistics import FetchStatistics, FetchTally
from stoker._memory.ring import Ring, RingStateError
from stoker.abc import ObjectRef, Readable, Tier
from stoker.errors import (
    BucketNotFoundError,
    BudgetError,
    ChecksumError,
    CopiedBucketWarning,
    FetchError,
    NotFoundError,
    ObjectChangedError,
    ObjectDamagedError,
    ObjectTruncatedError,
    StokerError,
)

__all__ = ["FetchConfig", "FetchStatistics", "Fetcher", "RangePart"]

_log = logging.getLogger("stoker")


class Fetcher:
    """Fetches objects of one store into one ring. Lives on one event loop; any number of fetches may run at once."""

    def __init__(
        self,
        store: Readable,
        *,
        ring: Ring,
        rng: random.Random,
        config: FetchConfig | None = None,
        tiers: Sequence[Tier] = (),
        warm: Tier | None = None,
        small_hedge_bytes: int = 0,
        is_start: bool = False,
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
            warm: the last of them, across a network.
            small_hedge_bytes: hedges up to this size share memory of their own, ``config.hedge_burst`` times as much,
                while there is room; every other one needs a free slot.
            is_start: whether a start begins, in which each request may be hedged twice beside the budget; until
                :meth:`end_start`.
            log: told of tiers that are left alone; a simulation brings its own.
            checksum: of a whole object; a model of a bucket, which moves no bytes, brings its own.
        """
        self.config = config or FetchConfig()
        self._store = store
        self._ring = ring
        self._checksum = checksum
        self._tally = FetchTally()
        self._reader = RangeReader(
            store,
            ring=ring,
            rng=rng,
            config=self.config,
            tally=self._tally,
            small_hedge_bytes=small_hedge_bytes,
            is_start=is_start,
        )
        places = tuple(tiers) if warm is None else (*tiers, warm)
        self._tiers = TierChain(places, self._reader, self.config, self._tally, self._verify_whole, log)
        self._sends_tags = True

    @property
    def stats(self) -> FetchStatistics:
        """A snapshot of everything counted so far."""
        return self._reader.statistics(self._tiers.states())

    def end_start(self) -> None:
        """The first batch is there: hedge by the budget alone. Idempotent; from any thread."""
        self._reader.end_start()

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
        if ref.size_bytes > self._ring.slot_bytes:
            raise BudgetError(f"{ref.key} has {ref.size_bytes} bytes: more than the ring's {self._ring.slot_bytes}")
        slot = self._ring.acquire()
        if slot is None:
            raise RingStateError(f"no free slot for {ref.key}: {self._ring!r}")
        try:
            await self.fetch_whole(ref, self._ring.view(slot, ref.size_bytes), urgent=urgent)
        except BaseException:
            self._ring.abort(slot)
            raise
        self._ring.commit(slot)
        return slot

    async def fetch_whole(self, ref: ObjectRef, into: memoryview, *, urgent: bool = False) -> None:
        """Read an object, verified by checksum, into memory of its size that is the caller's in every case.

        When the call ends, however it ends, no transport writes to the memory. The rest is as for :meth:`fetch`.

        Raises:
            FetchError: not fetched by the deadline or the last attempt.
            ObjectChangedError: the object is another than the one pinned, shorter, or its checksum always differs.
            NotFoundError: it does not exist.
            StoreError: what the store raised, if trying again cannot help.
        """

        async def read_store(into: memoryview) -> None:
            parts = self.split(RangePart(0, ref.size_bytes, 0), urgent=urgent)
            await self.fetch_ranges(
                ref, parts, into=into, verify=lambda data: self._verify_whole(ref, data), urgent=urgent
            )

        match await self._tiers.read(ref, into, read_store):
            case Found.TIER:
                self._delivered(ref.size_bytes)
            case Found.STORE:
                self._tiers.offer(ref, into)
            case Found.NOWHERE:
                try:
                    await read_store(into)
                except StokerError:
                    if not await self._tiers.read_patiently(ref, into):
                        raise
                    self._delivered(ref.size_bytes)
                self._tiers.offer(ref, into)

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
        pursuit = Pursuit(
            ref=ref,
            name=f"{self._store.url.rstrip('/')}/{ref.key}",
            into=into,
            urgent=urgent,
            tag=(ref.tag or None) if self._sends_tags else None,
            size_bytes=sum(part.size_bytes for part in parts),
        )
        try:
            async with pursuit.deadline:
                await self._read_and_verify(pursuit, parts, verify)
        except TimeoutError as error:
            self._tally.failed += 1
            if not pursuit.deadline.expired:
                raise
            raise self._reader.gave_up(pursuit, "its deadline passed") from (pursuit.last_error or error)
        except StokerError as error:
            self._tally.failed += 1
            if isinstance(error, NotFoundError | ObjectChangedError) and not isinstance(error, BucketNotFoundError):
                # Not chained: what led to it says less than it does.
                raise type(error)(f"{error}. {self._remedy}") from None
            raise
        self._delivered(pursuit.size_bytes)

    async def _read_and_verify(
        self, pursuit: Pursuit, parts: Sequence[RangePart], verify: Callable[[memoryview], None]
    ) -> None:
        """Read until the checksum is right. A tag that differs is let pass if size and checksum do not."""
        changed: ObjectChangedError | None = None
        sent_tag = pursuit.tag
        for reading in count(1):
            try:
                await self._read_all(pursuit, parts)
                with strand(pursuit.ref.key, Phase.VERIFY):
                    verify(pursuit.into)
                break
            except ObjectChangedError as error:  # another reading confirms it, without a tag if that is what differs
                if changed is not None:
                    raise
                changed = error
                if not isinstance(error, ObjectTruncatedError):
                    pursuit.tag = None
            except FetchError as error:
                raise (changed or error) from error.__cause__  # a changed object may have become shorter, too
            except ChecksumError as error:
                self._tally.checksum_failures += 1
                self._reader.failed(pursuit, error)
                if reading >= self.config.checksum_attempts:
                    raise ObjectDamagedError(
                        f"{pursuit.name} is not what was packed, its checksum always differs: {error}"
                    ) from None
                with strand(pursuit.ref.key, Phase.RETRY):
                    spoilt(pursuit.ref.key)
                    await self._reader.back_off(pursuit, reading, error)
        if pursuit.tag != sent_tag:
            self._accept_copies(pursuit)

    @property
    def _remedy(self) -> str:
        url = self._store.url
        return (
            f"'stoker verify {url}' lists all objects that are not as they were packed: restore them from a copy, or "
            f"leave them out with 'stoker rebuild-manifest {url} --verify'"
        )

    async def _read_all(self, pursuit: Pursuit, parts: Sequence[RangePart]) -> None:
        if len(parts) == 1:
            await self._reader.read(pursuit, parts[0])
            return
        async with task_group() as readings:
            for part in parts:
                readings.create_task(self._reader.read(pursuit, part))

    async def read_tiers(self, ref: ObjectRef, into: memoryview) -> bool:
        """Ask the nearer places in turn for an object; return whether ``into`` has it now, whole and verified.

        A place that lacks, spoils or fails costs time and nothing else.
        """
        if await self._tiers.read(ref, into) is Found.NOWHERE:
            return False
        self._delivered(ref.size_bytes)
        return True

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

    def _delivered(self, size_bytes: int) -> None:
        self._tally.objects += 1
        self._tally.useful_bytes += size_bytes

    def _accept_copies(self, pursuit: Pursuit) -> None:
        if self._sends_tags:
            self._sends_tags = False
            warnings.warn(
                f"{pursuit.name} has another ETag or generation than the manifest pins, but the same size and "
                "checksum: the bucket seems to be a copy. From here on checksums alone identify objects.",
                CopiedBucketWarning,
                stacklevel=2,
            )

    def _verify_whole(self, ref: ObjectRef, data: memoryview) -> None:
        found = self._checksum(data)
        if found != ref.crc32c:
            raise ChecksumError(f"{ref.key}: crc32c is {found:08x}, the manifest says {ref.crc32c:08x}")
