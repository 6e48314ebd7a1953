"""The index of a cache: which objects it holds, under a policy that knows when each is needed next.

An object's name determines its bytes, and :func:`rows_of` maps names to rows of a manifest. :class:`AccessForecast`
forecasts when a rank needs each row next, since the seed fixes the order before anything is read.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stoker._base.arguments import explain_arguments
from stoker._base.batch_read import ObjectPart
from stoker._cache.eviction import CacheEntries, policy_factory
from stoker._format.display import PLAIN_KEY
from stoker._format.manifest import Manifest, NameIndex
from stoker._order.order import Order
from stoker._order.sharding import Sharding
from stoker._order.steps import OrderSource, PositionRange
from stoker.abc import ObjectRef, Tier

_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)


def name_of(ref: ObjectRef) -> str:
    """Return an object's name, 32 hexadecimal digits: its CRC-32C, its size in bytes, and a hash of its key."""
    return f"{ref.crc32c:08x}{ref.size_bytes:08x}{blake2b(ref.key.encode(), digest_size=8).hexdigest()}"


def is_name(text: str) -> bool:
    """Return whether a text has the form of an object's name."""
    return _NAME.fullmatch(text) is not None


def size_of(name: str) -> int:
    """Return the size in bytes of the object with a name."""
    return int(name[8:16], 16)


def rows_of(names: Iterable[str], manifest: Manifest) -> dict[str, int]:
    """Return the row of each name that a manifest has. Usually reads no more keys than there are names."""
    rows = manifest.rows
    prefixes = (rows.crc32c.astype(np.uint64) << np.uint64(32)) | rows.size_bytes.astype(np.uint64)
    index = NameIndex(manifest, name_of, prefixes)
    refs = {name: index.find(name) for name in names}
    return {name: ref.row for name, ref in refs.items() if ref is not None}


NEVER = sys.maxsize
"""Time of the next use of an object that is not needed again within the horizon."""
_NOT_NEEDED = -1
"""In an epoch's plan: this rank does not need the object, or used it before the position that the run resumed from."""


class AccessForecast:
    """Forecasts when a rank needs each super-sample next. A time is a position of the run, counted over all epochs.

    A super-sample of this rank in one epoch may belong to another rank in the next, so the forecast searches epoch
    after epoch. For a super-sample that two lanes share, an epoch's first use counts. The plan of an epoch is computed
    at its first use and takes 8 bytes per super-sample of the data set.

    If the rank, or the ranks that share a cache with it, read the whole data set in each epoch, every use is reported
    at the end of its epoch. The number of hits is then the same whichever super-samples the cache keeps; but exact
    times would make it keep the first ones, so that each epoch would begin with hits only and end with misses only, at
    a rate that no network sustains.

    Args:
        samples: ``[super-samples]``, number of samples of each.
        positions: Range of positions that the rank reads.
        order: Returns the order of an epoch; a caller that plans for many ranks can share the orders.
        horizon_epochs: Number of epochs to search beyond the present one. Default: 8.
        others: Sharding of whole epochs among other ranks that share a cache with this one. Their uses count as this
            rank's own, at this rank's position.
    """

    def __init__(
        self,
        samples: NDArray[np.integer],
        positions: PositionRange,
        order: OrderSource = Order,
        *,
        horizon_epochs: int = 8,
        others: Sequence[Sharding] = (),
    ) -> None:
        self._samples, self._positions, self._order = samples, positions, order
        self._horizon_epochs = horizon_epochs
        self._others = tuple(others)
        self._reads_all = len(self._others) + 1 >= positions.sharding.readers
        self._requested: set[int] = set()
        self._epoch_length = int(np.sum(samples, dtype=np.int64)) + 1
        self._plans: dict[int, NDArray[np.int64]] = {}
        self.present = positions.epoch * self._epoch_length + positions.position
        """Present time: everything that is needed up to it was requested."""
        self._step_end = self.present

    def advance(self, epoch: int, position: int) -> None:
        """Set the present to a position of an epoch, before which everything was requested. Never goes back."""
        self.present = max(self.present, epoch * self._epoch_length + position)
        for passed in [each for each in self._plans if each < self.present // self._epoch_length]:
            del self._plans[passed]

    def record_request(self, super_sample: int, epoch: int, position: int) -> None:
        """Record that a super-sample was requested for its uses before a position of an epoch, the end of a step.

        Steps come in order. The other super-samples of a step count as needed until they are requested, too.
        """
        taking = epoch * self._epoch_length + position
        if taking > self._step_end:
            self.advance(*divmod(self._step_end, self._epoch_length))
            self._step_end = taking
            self._requested.clear()
        self._requested.add(super_sample)

    def next_use(self, super_sample: int) -> int:
        """Return the time after the present at which a super-sample is needed next; :data:`NEVER` if it is not."""
        passed = self._step_end if super_sample in self._requested else self.present
        first = passed // self._epoch_length
        for epoch in range(first, first + self._horizon_epochs + 1):
            if self._positions.end_epoch is not None and epoch >= self._positions.end_epoch:
                break
            position = int(self._plan(epoch)[super_sample])
            time = epoch * self._epoch_length + position + 1
            if position >= 0 and time > passed:
                return (epoch + 1) * self._epoch_length if self._reads_all else time
        return NEVER

    def _plan(self, epoch: int) -> NDArray[np.int64]:
        """Return the position in an epoch of the first use of each super-sample, negative if there is none."""
        if epoch not in self._plans:
            self._plans[epoch] = self._compute_plan(epoch)
        return self._plans[epoch]

    def _compute_plan(self, epoch: int) -> NDArray[np.int64]:
        positions = self._positions
        if positions.order.shuffle == "full":  # all over the epoch
            return np.zeros(len(self._samples), np.int64)
        order = self._order(self._samples, positions.order, epoch)
        own = positions.sharding if epoch == positions.epoch else positions.sharding.from_start()
        plan = np.full(len(self._samples), NEVER, np.int64)
        for sharding in (own, *self._others):
            for number in sharding.own_lanes.tolist():
                lane = order.lane(number)
                np.minimum.at(plan, lane.super_samples, sharding.positions_of(number, lane.first_places()))
        plan[plan == NEVER] = _NOT_NEEDED
        return plan


@explain_arguments("CacheTierStatistics", renamed={"look_ups": "lookups"})
@dataclass(slots=True, kw_only=True)
class CacheTierStatistics:
    """Counters and size of one tier in one process.

    Attributes:
        lookups: Number of objects that were requested.
        hits: Number of requested objects that were delivered, from any process's part of a shared folder.
        added: Number of objects that were added.
        evicted: Number of objects that were evicted.
        declined: Number of objects that were not added, since all others are needed sooner or there was no room to
            write.
        damaged: Number of files that did not match their names and were removed.
        objects: Number of objects held now, in this process's part.
        used_bytes: Size of these objects, in bytes.
        limit_bytes: Maximum size of these objects, in bytes.
    """

    lookups: int = field(default=0, metadata={PLAIN_KEY: "look_ups"})
    hits: int = 0
    added: int = 0
    evicted: int = 0
    declined: int = 0
    damaged: int = 0
    objects: int = 0
    used_bytes: int = 0
    limit_bytes: int


class CacheIndex:
    """Index of a cache: decides which objects stay, and counts; the data is stored elsewhere. Not thread-safe.

    Objects stay when the manifest or the forecast changes; those that the new version lacks, or the run never needs
    again, are evicted first.

    Args:
        policy: Name of the eviction policy.
        limit_bytes: Maximum size of all objects together, in bytes.
        block_bytes: Unit to which the size of each object is rounded up, in bytes. Default: 1.

    Attributes:
        counts: Counters so far.
    """

    def __init__(self, policy: str, limit_bytes: int, block_bytes: int = 1) -> None:
        self.limit_bytes = limit_bytes
        self._create_policy, self._block_bytes = policy_factory(policy), block_bytes
        self._rows: dict[str, int] = {}
        self._reported_hits: dict[str, None] = {}
        self._forecast: AccessForecast | None = None
        self._entries = CacheEntries[str](self._create_policy(self), limit_bytes)
        self.counts = CacheTierStatistics(limit_bytes=limit_bytes)

    def follow(self, manifest: Manifest, forecast: AccessForecast) -> None:
        """Use the forecast of another range of positions, over the rows of a manifest. Entries stay."""
        self._rows, self._forecast = rows_of(self._entries, manifest), forecast
        before, self._entries = self._entries, CacheEntries[str](self._create_policy(self), self.limit_bytes)
        for name in before:
            self._entries.offer(name, self._rounded_bytes(size_of(name)))

    def add_existing(self, names: Sequence[str], manifest: Manifest) -> list[str]:
        """Add objects that an earlier owner left; return those that do not fit."""
        self._rows.update(rows_of(names, manifest))
        for name in names:
            self._entries.offer(name, self._rounded_bytes(size_of(name)))
        return [name for name in names if name not in self._entries]

    def clear(self) -> None:
        """Remove all objects; the counters stay."""
        for name in list(self._entries):
            self.remove(name)

    @property
    def present(self) -> int:
        """Present time of the forecast, 0 without one."""
        return 0 if self._forecast is None else self._forecast.present

    def next_use(self, name: str) -> int:
        """Return the time at which an object is needed next; :data:`NEVER` if that is unknown."""
        row = self._rows.get(name, -1)
        return NEVER if row < 0 or self._forecast is None else self._forecast.next_use(row)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def look_up(self, name: str) -> bool:
        """Return whether the cache holds an object, and count a lookup.

        The policy is informed before its next decision; by then this use lies in the past of the forecast.
        """
        self.counts.lookups += 1
        if name not in self._entries:
            return False
        self._reported_hits.pop(name, None)
        self._reported_hits[name] = None
        return True

    def offer(self, ref: ObjectRef) -> list[str] | None:
        """Add an object if the policy accepts it.

        Returns:
            The names of evicted objects; None if the object was not added, or is here already.
        """
        name = name_of(ref)
        if name in self._entries:
            return None
        self._rows[name] = ref.row
        for used in self._reported_hits:
            self._entries.look_up(used)
        self._reported_hits.clear()
        evicted = self._entries.offer(name, self._rounded_bytes(ref.size_bytes))
        if evicted is None:
            del self._rows[name]
            self.counts.declined += 1
            return None
        self.counts.added += 1
        self.counts.evicted += len(evicted)
        for each in evicted:
            self._rows.pop(each, None)
        return evicted

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        self._entries.remove(name)
        self._rows.pop(name, None)

    def statistics(self) -> CacheTierStatistics:
        """Return a snapshot."""
        return replace(self.counts, objects=len(self._entries), used_bytes=self._entries.used)

    def _rounded_bytes(self, size_bytes: int) -> int:
        return -(-size_bytes // self._block_bytes) * self._block_bytes


class ManagedTier(Tier, Protocol):
    """A :class:`~stoker.abc.Tier` of this machine that the loader manages by the order of the epoch.

    It opens at the first :meth:`follow`.
    """

    @property
    def is_shared(self) -> bool:
        """Whether other processes of the machine can read this tier's objects."""
        ...

    async def follow(self, manifest: Manifest, forecast: AccessForecast) -> None:
        """Keep what a range of positions needs; objects that are held stay as far as there is room.

        Called before the first read, and again after a close or a fork. Failures are logged and cost only hits.

        Args:
            manifest: Manifest that maps super-samples to rows.
            forecast: Forecast of the rank, or of all ranks that share the tier; advances with the run.
        """
        ...

    def statistics(self) -> CacheTierStatistics:
        """Return a snapshot; callable from any thread."""
        ...


class Found(NamedTuple):
    """What a mapped tier knows of an object.

    Attributes:
        memory: The object's bytes, for reading; None if it is not there.
        has_room: Whether the tier would keep an object that is not there.
        is_remote: Whether only copies of its ranges can be had: its place is on another machine, or cannot be mapped.
    """

    memory: memoryview | None
    has_room: bool = False
    is_remote: bool = False


NOT_FOUND = Found(None)
"""What a tier knows that has no room for an object, or does not answer."""


class Presence(enum.Enum):
    """Whether a part of an object that is not mapped was copied."""

    COPIED = enum.auto()
    LACKING = enum.auto()
    """The object is not there, and there is room for it."""
    UNAVAILABLE = enum.auto()
    """The object is not there, and there is no room for it, or there was no answer in time."""


@runtime_checkable
class MappedTier(Tier, Protocol):
    """A tier whose objects are in memory that its readers map, so that they may copy any part of one."""

    async def find(self, ref: ObjectRef) -> Found:
        """Return an object's bytes, which stay, or whether there is room for it. Waits for no other client.

        Raises:
            StoreError: The tier failed.
        """
        ...

    async def read_parts(self, parts: Sequence[ObjectPart], into: memoryview) -> Sequence[Presence]:
        """Copy parts of objects that are not mapped; return for each one whether it was copied.

        When the call ends in any way, nothing writes to ``into`` any more.
        """
        ...

    def reject(self, ref: ObjectRef) -> None:
        """Forget an object whose bytes are not what they should be. Must not block."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TierSet:
    """The chain of tiers between the loader and the store.

    Attributes:
        tiers: Caches of this process, the nearest first.
        cluster_tier: Cache that the processes of this machine share, behind them.
        shared_tier: Shared tier behind that, across a network.
    """

    tiers: Sequence[ManagedTier] = ()
    cluster_tier: Tier | None = None
    shared_tier: Tier | None = None

    @property
    def chain(self) -> tuple[Tier, ...]:
        """All tiers, the nearest first."""
        behind = (self.cluster_tier, self.shared_tier)
        return *self.tiers, *(tier for tier in behind if tier is not None)

    async def close(self) -> None:
        """Close all tiers. Idempotent."""
        for tier in self.chain:
            await tier.close()
