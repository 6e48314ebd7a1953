"""Cache and tier settings: parses cache specs, creates the caches of a process, and opens shared tiers by URL.

A cache is in memory, between epochs and above the ring, or on disk (:mod:`stoker._cache.disk_tier`). Its setting is a
string such as ``"disk:/mnt/nvme/stoker?limit=20GB&policy=next-use"`` or ``"memory:?limit=2GB"``. The setting of a
shared tier is a URL, whose scheme is the name of an entry point.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stoker._base.arguments import AtLeastOne, BoundedConfig
from stoker._base.fields import quote_value
from stoker._base.plugins import load_plugin
from stoker._base.sizes import format_bytes, parse_bytes
from stoker._cache.disk_folder import FolderConfig
from stoker._cache.disk_tier import DiskTier
from stoker._cache.eviction import policy_factory, present_policy
from stoker._cache.index import AccessForecast, CacheIndex, CacheTierStatistics, ManagedTier, name_of
from stoker._cache.place import parse_place
from stoker._format.manifest import Manifest
from stoker._memory.ring import ALIGNMENT_BYTES, Ring, prefault
from stoker._order.sharding import Sharding
from stoker._order.steps import PositionRange
from stoker.abc import ObjectRef, Readable, Tier
from stoker.errors import ConfigError, MemoryBudgetError

_EXAMPLE = "write for example disk:/mnt/nvme/stoker?limit=20GB or memory:?limit=2GB"
_NODE = "node:"
_TIERS = "stoker.tiers"


class MemoryTier:
    """A :class:`~stoker._cache.index.ManagedTier` in fixed slots of anonymous memory, private to one process.

    Each object is copied once in and once out, both on the event loop: a copy of 8 MiB takes less than a millisecond,
    and copying in a thread would need extra slots for the objects in transit.

    Args:
        limit_bytes: Size of all slots together, in bytes; memory is allocated as slots are filled.
        policy: Name of the eviction policy, one of :func:`~stoker._cache.eviction.policy_names`.
        largest_bytes: Size of the largest super-sample, in bytes; larger objects are not kept.

    Raises:
        MemoryBudgetError: The limit is smaller than one super-sample.
        ConfigError: There is no such policy.
    """

    name = "memory"
    is_shared = False

    def __init__(self, limit_bytes: int, policy: str, *, largest_bytes: int) -> None:
        slot_bytes = -(-largest_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if limit_bytes < slot_bytes:
            raise MemoryBudgetError(
                f"a memory cache of {format_bytes(limit_bytes)} per process is smaller than the largest super-sample "
                f"({format_bytes(slot_bytes)}); raise limit=, or leave the cache out"
            )
        self._ring = Ring(limit_bytes // slot_bytes, slot_bytes)
        self._index = CacheIndex(policy, self._ring.slots * slot_bytes, slot_bytes)
        self._slots: dict[str, int] = {}
        self._touched = 0
        self._pid = os.getpid()

    async def follow(self, manifest: Manifest, forecast: AccessForecast) -> None:
        """Keep what a range of positions needs; a forked child starts with an empty cache."""
        if self._pid != os.getpid():
            self._reset()
            self._pid = os.getpid()
        self._index.follow(manifest, forecast)

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Copy an object into memory; return False if it is not here."""
        name = name_of(ref)
        if not self._index.look_up(name):
            return False
        into[:] = self._ring.view(self._slots[name], ref.size_bytes)
        self._index.counts.hits += 1
        return True

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Copy an object into a slot if the policy accepts it."""
        if ref.size_bytes > self._ring.slot_bytes:
            self._index.counts.declined += 1
            return
        evicted = self._index.offer(ref)
        if evicted is None:
            return
        for name in evicted:
            self._ring.release(self._slots.pop(name))
        slot = self._ring.acquire()
        self._touch_next()
        assert slot is not None  # noqa: S101 - the index counts sizes in whole slots
        self._ring.view(slot, ref.size_bytes)[:] = data
        self._ring.commit(slot)
        self._slots[name_of(ref)] = slot

    def _touch_next(self) -> None:
        """Fault in the pages of the next slot in a thread, so that the copy into it does not wait for them.

        Fresh slots are filled in ascending order.
        """
        self._touched += 1
        if self._touched < self._ring.slots:
            start = -(-self._ring.offset(self._touched) // mmap.PAGESIZE) * mmap.PAGESIZE
            if piece := self._ring.memory[start : start + self._ring.slot_bytes]:  # may be empty for a small last slot
                asyncio.get_running_loop().run_in_executor(None, prefault, piece)

    async def close(self) -> None:
        """Release the memory. Idempotent."""
        self._reset()

    def statistics(self) -> CacheTierStatistics:
        """Return a snapshot."""
        return self._index.statistics()

    def _reset(self) -> None:
        self._index.clear()
        self._slots.clear()
        self._touched = 0
        self._ring = Ring(self._ring.slots, self._ring.slot_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec(BoundedConfig):
    """Parsed setting of one cache.

    Attributes:
        path: Folder of a disk cache; None for memory.
        limit_bytes: Maximum size, in bytes: of the whole machine if ``is_per_node``, else of one rank.
        is_per_node: Whether the limit applies to the machine and is divided by its ranks; always true for a disk.
        policy: Name of the eviction policy.
    """

    path: Path | None
    limit_bytes: AtLeastOne[int]
    is_per_node: bool
    policy: str = "next-use"

    def __post_init__(self) -> None:
        BoundedConfig.__post_init__(self)  # super() does not know a class with slots
        object.__setattr__(self, "policy", present_policy(self.policy))
        policy_factory(self.policy)

    @classmethod
    def parse(cls, text: str) -> CacheSpec:
        """Parse ``disk:PATH?limit=SIZE`` or ``memory:?limit=SIZE``, optionally followed by ``&policy=NAME``.

        Raises:
            ConfigError: The text has another form.

        Example:
            >>> CacheSpec.parse("memory:?limit=2GB&policy=lru").limit_bytes
            2000000000
        """
        try:
            path, options = parse_place(text, ["policy"])
            limit = options.pop("limit").replace(" ", "")
            return cls(
                path=path,
                limit_bytes=parse_bytes(limit.removeprefix(_NODE)),
                is_per_node=path is not None or limit.startswith(_NODE),
                **options,
            )
        except ValueError as error:
            raise ConfigError(f"cache {text!r:.200}: {error}; {_EXAMPLE}") from None

    @classmethod
    def parse_all(cls, cache: str | Sequence[str] | None) -> tuple[CacheSpec, ...]:
        """Parse one or several cache settings, the nearest cache first.

        Raises:
            ConfigError: A setting is malformed, or two name the same place.
        """
        settings: object = () if cache is None else cache
        texts: list[Any] = (
            list(settings) if isinstance(settings, Sequence) and not isinstance(settings, str) else [settings]
        )
        specs = tuple(cls.parse(text) for text in texts)
        if len({spec.path for spec in specs}) < len(specs):
            raise ConfigError(
                "two caches use the same memory or folder; give at most one in memory, and each folder once"
            )
        return specs


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSharing:
    """The processes that share the caches of a machine.

    Attributes:
        ranks: Number of ranks on the machine.
        workers: Number of reading processes per rank.
        process_index: Number of this process among all of them, from 0.
    """

    ranks: int = 1
    workers: int = 1
    process_index: int = 0

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.workers < 1 or not 0 <= self.process_index < self.ranks * self.workers:
            raise ConfigError(
                f"process number {self.process_index} is not within {self.ranks} ranks with {self.workers} workers each"
            )


def create_tiers(specs: Sequence[CacheSpec], manifest: Manifest, sharing: CacheSharing) -> tuple[ManagedTier, ...]:
    """Create the caches for a data set's super-samples, the nearest first, without opening them.

    Raises:
        MemoryBudgetError: This process's share of a limit is smaller than one super-sample.
    """
    return tuple(_create_tier(spec, manifest, sharing) for spec in specs)


def _create_tier(spec: CacheSpec, manifest: Manifest, sharing: CacheSharing) -> ManagedTier:
    share_bytes = spec.limit_bytes // (sharing.ranks * sharing.workers if spec.is_per_node else sharing.workers)
    if spec.path is None:
        return MemoryTier(share_bytes, spec.policy, largest_bytes=manifest.largest_bytes)
    config = FolderConfig(
        path=spec.path,
        dataset=manifest.dataset,
        owners=sharing.ranks * sharing.workers,
        preferred=sharing.process_index,
        share_bytes=share_bytes,
    )
    return DiskTier(config, spec.policy, largest_bytes=manifest.largest_bytes)


async def track_positions(
    tiers: Sequence[ManagedTier], manifest: Manifest, positions: PositionRange, others: Sequence[Sharding] = ()
) -> Callable[[int, int, int], None]:
    """Have tiers keep what a range of positions needs, and shared tiers also what the machine's other ranks need.

    Returns:
        A function to call with each item that is read; see :meth:`~stoker._cache.index.AccessForecast.take`.
    """
    own = shared = AccessForecast(manifest.rows.samples, positions)
    if others:
        shared = AccessForecast(manifest.rows.samples, positions, others=others)
    for tier in tiers:
        await tier.follow(manifest, shared if tier.is_shared else own)
    followed = {id(future): future for future in (own, shared)}

    def record_request(super_sample: int, epoch: int, position: int) -> None:
        for future in followed.values():
            future.record_request(super_sample, epoch, position)

    return record_request


class TierFactory(Protocol):
    """Type of the entry points in the group ``stoker.tiers``; an entry point's name is the scheme of its URLs."""

    def __call__(self, url: str, *, store: Readable, processes: int) -> Tier:
        """Return a tier; see :func:`open_tier` for the arguments.

        Raises:
            ConfigError: The URL is malformed.
        """
        ...


def open_tier(url: str, *, store: Readable, processes: int = 1) -> Tier:
    """Return the shared tier at a URL, from the plug-in of its scheme. Tiers connect at their first read.

    Args:
        url: URL of the tier, such as ``warm://10.0.0.5:7411``.
        store: Store of the data set, from which some tiers read what they lack.
        processes: Number of processes of the whole job that each open a tier. Default: 1.

    Raises:
        ConfigError: No plug-in has this scheme, or the plug-in refuses the URL.
        MissingExtraError: The plug-in cannot be loaded.
    """
    scheme, separator, _ = url.partition("://") if isinstance(url, str) else ("", "", "")
    if not separator:
        quoted = "the given text" if isinstance(url, str) and "@" in url else quote_value(url)  # it may hold a secret
        raise ConfigError(f"a tier must be a URL such as warm://10.0.0.5:7411, not {quoted}")
    factory: TierFactory = load_plugin(_TIERS, scheme, "tier for the scheme")
    return factory(url, store=store, processes=processes)
