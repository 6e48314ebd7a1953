"""What a tier keeps: entries by name, under a policy that knows the order by rows.

Names say what the bytes must be, and :func:`rows_of` which row of a manifest has a name. :class:`Future` tells when a
rank needs each row next: an order that is fixed by a seed tells that before anything is read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stoker._cache.eviction import Residents, policy_factory
from stoker._format.manifest import Manifest, NameIndex
from stoker._order.order import Order
from stoker._order.sharding import Dealing
from stoker._order.steps import OrderSource, Stretch
from stoker.abc import ObjectRef, Tier

_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)


def name_of(ref: ObjectRef) -> str:
    """Return an object's name: its checksum, its size and a hash of its key, 32 hexadecimal digits."""
    return f"{ref.crc32c:08x}{ref.size_bytes:08x}{blake2b(ref.key.encode(), digest_size=8).hexdigest()}"


def is_name(text: str) -> bool:
    """Return whether a text could be the name of an object."""
    return _NAME.fullmatch(text) is not None


def size_of(name: str) -> int:
    """Return how many bytes the object of a name has."""
    return int(name[8:16], 16)


def rows_of(names: Iterable[str], manifest: Manifest) -> dict[str, int]:
    """Return the rows of those names that a manifest has. Looks at no more keys than there are names, mostly."""
    rows = manifest.rows
    prefixes = (rows.crc32c.astype(np.uint64) << np.uint64(32)) | rows.size_bytes.astype(np.uint64)
    index = NameIndex(manifest, name_of, prefixes)
    found = {name: index.find(name) for name in names}
    return {name: ref.row for name, ref in found.items() if ref is not None}


NEVER = sys.maxsize
"""The time of what is not needed again, as far as one looks ahead."""
_NOT_HERE = -1
"""In an epoch's plan: this rank does not need it, or had it before the run went on from the middle of the epoch."""


class Future:
    """Tells, of each super-sample, when the rank needs it next. Times are positions of the run, epoch after epoch.

    What was dealt to this rank in one epoch may fall to another one in the next, so epochs are looked through until one
    needs it. Of a super-sample that is cut at the border of two lanes, an epoch's first use is told. An epoch's plan is
    made when it is first looked into, and costs 8 bytes a super-sample of the data set.

    Where the rank, or all that share a cache with it, read everything in each epoch, uses are told as the end of their
    epoch. A cache has as many hits then whatever of the next epoch it keeps; but by their very times it would keep the
    first ones, and an epoch would begin with nothing but hits and end with nothing but misses, faster than any network.

    Args:
        samples: ``[super-samples]``, samples of each.
        stretch: what the rank walks.
        order: gives the order of an epoch; who plans for many ranks has each made once.
        horizon_epochs: how many epochs to look into beyond the present one.
        others: how whole epochs are dealt to others whose needs count as the rank's own: those that share a cache with
            it. They are believed to be where it is.
    """

    def __init__(
        self,
        samples: NDArray[np.integer],
        stretch: Stretch,
        order: OrderSource = Order,
        *,
        horizon_epochs: int = 8,
        others: Sequence[Dealing] = (),
    ) -> None:
        self._samples, self._stretch, self._order = samples, stretch, order
        self._horizon_epochs = horizon_epochs
        self._others = tuple(others)
        self._reads_all = len(self._others) + 1 >= stretch.partition.takers
        self._taken: set[int] = set()
        self._epoch_length = int(np.sum(samples, dtype=np.int64)) + 1
        self._plans: dict[int, NDArray[np.int64]] = {}
        self.present = stretch.epoch * self._epoch_length + stretch.position
        """The time that has passed: all that is needed up to it was asked for."""
        self._taking = self.present

    def reach(self, epoch: int, position: int) -> None:
        """Everything before a position of an epoch was asked for. Never goes back."""
        self.present = max(self.present, epoch * self._epoch_length + position)
        for passed in [each for each in self._plans if each < self.present // self._epoch_length]:
            del self._plans[passed]

    def take(self, super_sample: int, epoch: int, position: int) -> None:
        """A super-sample was asked for, for its uses before a position of an epoch: the end of a step.

        Steps are taken from in their order. What a step needs besides, and has not taken yet, is still needed.
        """
        taking = epoch * self._epoch_length + position
        if taking > self._taking:
            self.reach(*divmod(self._taking, self._epoch_length))
            self._taking = taking
            self._taken.clear()
        self._taken.add(super_sample)

    def next_use(self, super_sample: int) -> int:
        """Return the time, behind the present, at which a super-sample is needed next; :data:`NEVER` if it is not."""
        passed = self._taking if super_sample in self._taken else self.present
        first = passed // self._epoch_length
        for epoch in range(first, first + self._horizon_epochs + 1):
            if self._stretch.end_epoch is not None and epoch >= self._stretch.end_epoch:
                break
            position = int(self._plan(epoch)[super_sample])
            time = epoch * self._epoch_length + position + 1
            if position >= 0 and time > passed:
                return (epoch + 1) * self._epoch_length if self._reads_all else time
        return NEVER

    def _plan(self, epoch: int) -> NDArray[np.int64]:
        """Return from which position of an epoch the rank needs each super-sample, negative where it does not."""
        if epoch not in self._plans:
            self._plans[epoch] = self._planned(epoch)
        return self._plans[epoch]

    def _planned(self, epoch: int) -> NDArray[np.int64]:
        stretch = self._stretch
        if stretch.order.shuffle == "full":  # all over the epoch
            return np.zeros(len(self._samples), np.int64)
        order = self._order(self._samples, stretch.order, epoch)
        own = stretch.partition if epoch == stretch.epoch else stretch.partition.from_start()
        plan = np.full(len(self._samples), NEVER, np.int64)
        for dealing in (own, *self._others):
            for number in dealing.own_lanes.tolist():
                lane = order.lane(number)
                np.minimum.at(plan, lane.super_samples, dealing.positions_of(number, lane.first_places()))
        plan[plan == NEVER] = _NOT_HERE
        return plan


@dataclass(slots=True, kw_only=True)
class CacheStatistics:
    """Counts of one tier in one process, and what it holds.

    Attributes:
        look_ups: objects that were asked for.
        hits: of these, those that were delivered; of a folder that is shared, from whosever part.
        added: objects that were taken in.
        evicted: objects that went for others.
        declined: objects that were not taken in, since all that is there is needed sooner or there was no room to
            write.
        damaged: files that were not what their names say, and were removed.
        objects: held now, in this process's part.
        used_bytes: what these have.
        limit_bytes: what they may have.
    """

    look_ups: int = 0
    hits: int = 0
    added: int = 0
    evicted: int = 0
    declined: int = 0
    damaged: int = 0
    objects: int = 0
    used_bytes: int = 0
    limit_bytes: int


class Keeper:
    """Decides what stays, and counts; the bytes are elsewhere. Not thread-safe.

    Objects outlive manifests and futures: what a version does not have, or a run never needs again, goes first.

    Args:
        policy: its name.
        limit_bytes: what all objects together may have.
        block_bytes: what an object takes is a multiple of this.

    Attributes:
        counts: what was asked for, and what became of it.
    """

    def __init__(self, policy: str, limit_bytes: int, block_bytes: int = 1) -> None:
        self.limit_bytes = limit_bytes
        self._create_policy, self._block_bytes = policy_factory(policy), block_bytes
        self._rows: dict[str, int] = {}
        self._used: dict[str, None] = {}
        self._future: Future | None = None
        self._residents = Residents[str](self._create_policy(self), limit_bytes)
        self.counts = CacheStatistics(limit_bytes=limit_bytes)

    def follow(self, manifest: Manifest, future: Future) -> None:
        """Keep by the order of another stretch, over rows of a manifest. Who is resident stays it."""
        self._rows, self._future = rows_of(self._residents, manifest), future
        before, self._residents = self._residents, Residents[str](self._create_policy(self), self.limit_bytes)
        for name in before:
            self._residents.offer(name, self._taken_bytes(size_of(name)))

    def adopt(self, names: Sequence[str], manifest: Manifest) -> list[str]:
        """Take in what was left by somebody before; return what of it cannot stay."""
        self._rows.update(rows_of(names, manifest))
        for name in names:
            self._residents.offer(name, self._taken_bytes(size_of(name)))
        return [name for name in names if name not in self._residents]

    def clear(self) -> None:
        """Let all objects go; the counts stay."""
        for name in list(self._residents):
            self.drop(name)

    @property
    def present(self) -> int:
        """The time that has passed."""
        return 0 if self._future is None else self._future.present

    def next_use(self, name: str) -> int:
        """Return when an object is needed next."""
        row = self._rows.get(name, -1)
        return NEVER if row < 0 or self._future is None else self._future.next_use(row)

    def __contains__(self, name: str) -> bool:
        return name in self._residents

    def look_up(self, name: str) -> bool:
        """Return whether an object is resident, and count this as a use of it.

        The policy hears of it before its next decision: by then the future has this use behind it.
        """
        self.counts.look_ups += 1
        if name not in self._residents:
            return False
        self._used.pop(name, None)
        self._used[name] = None
        return True

    def offer(self, ref: ObjectRef) -> list[str] | None:
        """Take an object in if that is worth it.

        Returns:
            Who goes for it; None if it is not taken in, or is here already.
        """
        name = name_of(ref)
        if name in self._residents:
            return None
        self._rows[name] = ref.row
        for used in self._used:
            self._residents.look_up(used)
        self._used.clear()
        evicted = self._residents.offer(name, self._taken_bytes(ref.size_bytes))
        if evicted is None:
            del self._rows[name]
            self.counts.declined += 1
            return None
        self.counts.added += 1
        self.counts.evicted += len(evicted)
        for each in evicted:
            self._rows.pop(each, None)
        return evicted

    def drop(self, name: str) -> None:
        """Let an object go, if it is there."""
        self._residents.drop(name)
        self._rows.pop(name, None)

    def statistics(self) -> CacheStatistics:
        """Return a snapshot."""
        return replace(self.counts, objects=len(self._residents), used_bytes=self._residents.used)

    def _taken_bytes(self, size_bytes: int) -> int:
        return -(-size_bytes // self._block_bytes) * self._block_bytes


class KeepingTier(Tier, Protocol):
    """A :class:`~stoker.abc.Tier` that decides by the order what to keep.

    It opens at the first :meth:`follow`.
    """

    @property
    def is_shared(self) -> bool:
        """Whether other processes of the machine read what this one keeps."""
        ...

    async def follow(self, manifest: Manifest, future: Future) -> None:
        """Keep what a stretch of the order needs; what is held stays, as far as there is room.

        Before anything is read, and again after a close or a fork. Trouble is logged, and costs hits only.

        Args:
            manifest: says which rows the super-samples are.
            future: of the rank, or of all that share the tier if it is shared; moves on as the run does.
        """
        ...

    def statistics(self) -> CacheStatistics:
        """Return a snapshot; from any thread."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Nearer:
    """Places that are nearer than the store.

    Attributes:
        tiers: of this machine, that keep by the order, the nearest first.
        warm: behind them, across a network.
    """

    tiers: Sequence[KeepingTier] = ()
    warm: Tier | None = None

    async def close(self) -> None:
        """Release what they hold. Idempotent."""
        for tier in (*self.tiers, *([self.warm] if self.warm is not None else [])):
            await tier.close()
