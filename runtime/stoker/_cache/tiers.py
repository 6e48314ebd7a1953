"""Tiers as settings write them: the caches of a process, what these follow, and tiers that machines share.

A cache is in memory, between epochs and above the ring, or on disk (:mod:`stoker._cache.disk_tier`).

Settings are texts such as ``"disk:/mnt/nvme/stoker?limit=20GB&policy=next-use"`` and ``"memory:?limit=2GB"``;
a shared tier is a URL, whose scheme is the name of an entry point.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl

from stoker._base.arguments import AtLeastOne, Bounded
from stoker._base.fields import shown
from stoker._base.plugins import load_plugin
from stoker._base.sizes import format_bytes, parse_bytes
from stoker._cache.disk_folder import FolderConfig
from stoker._cache.disk_tier import DiskTier
from stoker._cache.eviction import policy_factory
from stoker._cache.keeper import CacheStatistics, Future, Keeper, KeepingTier, name_of
from stoker._format.manifest import Manifest
from stoker._memory.ring import ALIGNMENT_BYTES, Ring, populate
from stoker._order.sharding import Dealing
from stoker._order.steps import Stretch
from stoker.abc import ObjectRef, Readable, Tier
from stoker.errors import BudgetError, ConfigError

_EXAMPLE = "write for example disk:/mnt/nvme/stoker?limit=20GB or memory:?limit=2GB"
_NODE = "node:"
_TIERS = "stoker.tiers"


class MemoryTier:
    """A :class:`~stoker._cache.keeper.KeepingTier` in fixed slots of anonymous memory, of one process.

    One copy in and one out, both on the event loop: that of 8 MiB takes less than a millisecond, and handing it to a
    thread would cost slots that are neither free nor in use.

    Args:
        limit_bytes: of all slots; their memory is taken as they are filled.
        policy: name of the eviction policy, one of :func:`~stoker._cache.eviction.policy_names`.
        largest_bytes: of the super-samples; what is larger is not kept.

    Raises:
        BudgetError: not one super-sample fits.
        ConfigError: there is no such policy.
    """

    name = "memory"
    is_shared = False

    def __init__(self, limit_bytes: int, policy: str, *, largest_bytes: int) -> None:
        slot_bytes = -(-largest_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if limit_bytes < slot_bytes:
            raise BudgetError(
                f"a cache in memory of {format_bytes(limit_bytes)} a process holds no super-sample, of which the "
                f"largest has {format_bytes(slot_bytes)}: raise its limit, or leave it out"
            )
        self._ring = Ring(limit_bytes // slot_bytes, slot_bytes)
        self._keeper = Keeper(policy, self._ring.slots * slot_bytes, slot_bytes)
        self._slots: dict[str, int] = {}
        self._touched = 0
        self._pid = os.getpid()

    async def follow(self, manifest: Manifest, future: Future) -> None:
        """Keep what a stretch of the order needs; a forked child begins with nothing."""
        if self._pid != os.getpid():
            self._forget()
            self._pid = os.getpid()
        self._keeper.follow(manifest, future)

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Copy an object, if it is here."""
        name = name_of(ref)
        if not self._keeper.look_up(name):
            return False
        into[:] = self._ring.view(self._slots[name], ref.size_bytes)
        self._keeper.counts.hits += 1
        return True

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Copy an object into a slot, if that is worth it."""
        if ref.size_bytes > self._ring.slot_bytes:
            self._keeper.counts.declined += 1
            return
        evicted = self._keeper.offer(ref)
        if evicted is None:
            return
        for name in evicted:
            self._ring.release(self._slots.pop(name))
        slot = self._ring.acquire()
        self._touch_next()
        assert slot is not None  # noqa: S101 - the keeper counts in slots
        self._ring.view(slot, ref.size_bytes)[:] = data
        self._ring.commit(slot)
        self._slots[name_of(ref)] = slot

    def _touch_next(self) -> None:
        """Have the pages of one more slot taken in a thread, so that the copy into it does not wait for them.

        Fresh slots are filled in their order.
        """
        self._touched += 1
        if self._touched < self._ring.slots:
            start = -(-self._ring.offset(self._touched) // mmap.PAGESIZE) * mmap.PAGESIZE
            if piece := self._ring.memory[start : start + self._ring.slot_bytes]:  # none is left of a small last slot
                asyncio.get_running_loop().run_in_executor(None, populate, piece)

    async def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._forget()

    def statistics(self) -> CacheStatistics:
        """Return a snapshot."""
        return self._keeper.statistics()

    def _forget(self) -> None:
        self._keeper.clear()
        self._slots.clear()
        self._touched = 0
        self._ring = Ring(self._ring.slots, self._ring.slot_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec(Bounded):
    """One cache.

    Attributes:
        path: of a disk's folder; None for memory.
        limit_bytes: what it may hold: of a disk on the whole machine, of memory in one rank, unless ``is_of_node``.
        is_of_node: whether the limit is the machine's, divided by its ranks; always so for a disk.
        policy: who goes.
    """

    path: Path | None
    limit_bytes: AtLeastOne[int]
    is_of_node: bool
    policy: str = "next-use"

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)  # super() does not know a class with slots
        policy_factory(self.policy)

    @classmethod
    def parse(cls, text: str) -> CacheSpec:
        """Return what a text says: ``disk:PATH`` or ``memory:``, then ``?limit=SIZE`` and, if wanted, ``&policy=NAME``.

        Raises:
            ConfigError: it says something else.
        """
        if not isinstance(text, str):
            raise ConfigError(f"a cache is told by a text, not by {text!r:.80}; {_EXAMPLE}")
        kind, _, rest = text.partition(":")
        path, _, query = rest.partition("?")
        if kind not in ("disk", "memory") or bool(path) != (kind == "disk") or "\0" in path:
            raise ConfigError(f"{text!r:.200} is not a cache; {_EXAMPLE}")
        try:
            given = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
            settings = dict(given)
            if "limit" not in settings or len(settings) < len(given) or not settings.keys() <= {"limit", "policy"}:
                raise ConfigError("it takes limit=, and policy= if wanted, each once")
            limit = settings.pop("limit").replace(" ", "")
            return cls(
                path=Path(path).expanduser().absolute() if path else None,
                limit_bytes=parse_bytes(limit.removeprefix(_NODE)),
                is_of_node=bool(path) or limit.startswith(_NODE),
                **settings,
            )
        except (ValueError, RuntimeError) as error:  # RuntimeError: there is no such home
            raise ConfigError(f"cache {text!r:.200}: {error}; {_EXAMPLE}") from None

    @classmethod
    def parse_all(cls, cache: str | Sequence[str] | None) -> tuple[CacheSpec, ...]:
        """Return caches, the nearest first.

        Raises:
            ConfigError: one is not right, or two are the same.
        """
        given: object = () if cache is None else cache
        texts: list[Any] = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
        specs = tuple(cls.parse(text) for text in texts)
        if len({spec.path for spec in specs}) < len(specs):
            raise ConfigError("caches are in different places: one in memory at most, and each disk's folder once")
        return specs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharers:
    """Who shares the caches of a machine.

    Attributes:
        ranks: of the machine.
        workers: processes of each rank that read.
        number: of this process among all of them, from 0.
    """

    ranks: int = 1
    workers: int = 1
    number: int = 0

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.workers < 1 or not 0 <= self.number < self.ranks * self.workers:
            raise ConfigError(f"there is no process {self.number} of {self.ranks} ranks with {self.workers} workers")


def made_tiers(specs: Sequence[CacheSpec], manifest: Manifest, sharers: Sharers) -> tuple[KeepingTier, ...]:
    """Return tiers for a data set's super-samples, the nearest first; nothing is opened yet.

    Raises:
        BudgetError: the part of a limit that falls to this process holds no super-sample.
    """
    return tuple(_made(spec, manifest, sharers) for spec in specs)


def _made(spec: CacheSpec, manifest: Manifest, sharers: Sharers) -> KeepingTier:
    share_bytes = spec.limit_bytes // (sharers.ranks * sharers.workers if spec.is_of_node else sharers.workers)
    if spec.path is None:
        return MemoryTier(share_bytes, spec.policy, largest_bytes=manifest.largest_bytes)
    config = FolderConfig(
        path=spec.path,
        dataset=manifest.dataset,
        owners=sharers.ranks * sharers.workers,
        preferred=sharers.number,
        share_bytes=share_bytes,
    )
    return DiskTier(config, spec.policy, largest_bytes=manifest.largest_bytes)


async def follow(
    tiers: Sequence[KeepingTier], manifest: Manifest, stretch: Stretch, others: Sequence[Dealing] = ()
) -> Callable[[int, int, int], None]:
    """Have tiers keep what a stretch needs, and those that are shared what the others of the machine need, too.

    Returns:
        What is to be told of every item that is taken; see :meth:`~stoker._cache.keeper.Future.take`.
    """
    own = shared = Future(manifest.rows.samples, stretch)
    if others:
        shared = Future(manifest.rows.samples, stretch, others=others)
    for tier in tiers:
        await tier.follow(manifest, shared if tier.is_shared else own)
    followed = {id(future): future for future in (own, shared)}

    def taken(super_sample: int, epoch: int, position: int) -> None:
        for future in followed.values():
            future.take(super_sample, epoch, position)

    return taken


class TierFactory(Protocol):
    """What an entry point of the group ``stoker.tiers`` names; the entry point's name is the scheme of its URLs."""

    def __call__(self, url: str, *, store: Readable, processes: int) -> Tier:
        """Return a tier; see :func:`open_tier` for the arguments.

        Raises:
            ConfigError: the URL is not right.
        """
        ...


def open_tier(url: str, *, store: Readable, processes: int = 1) -> Tier:
    """Return the shared tier at a URL, from the plug-in of its scheme; nothing is connected to before a read.

    Args:
        url: of the tier, such as ``warm://10.0.0.5:7411``.
        store: of the data set, for tiers that read from it what they lack.
        processes: number of processes of the whole job that open a tier each.

    Raises:
        ConfigError: there is no such scheme, or the plug-in refuses the URL.
        MissingExtraError: the plug-in cannot be loaded.
    """
    scheme, separator, _ = url.partition("://") if isinstance(url, str) else ("", "", "")
    if not separator:
        given = "what is given" if isinstance(url, str) and "@" in url else shown(url)  # it may hold a secret
        raise ConfigError(f"a tier is a URL, such as warm://10.0.0.5:7411, and {given} is none")
    factory: TierFactory = load_plugin(_TIERS, scheme, "tier for the scheme")
    return factory(url, store=store, processes=processes)
