"""The tiers of a process, as its settings say, and what they follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker._cache.disk_folder import FolderConfig
from stoker._cache.disk_tier import DiskTier
from stoker._cache.future import Future
from stoker._cache.keeper import KeepingTier
from stoker._cache.memory_tier import MemoryTier
from stoker._cache.spec import CacheSpec
from stoker._format.manifest import Manifest
from stoker._order.sharding import Dealing
from stoker._order.steps import Stretch
from stoker.errors import ConfigError

__all__ = ["Sharers", "follow", "made_tiers"]


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
        What is to be told of every item that is taken; see :meth:`~stoker._cache.future.Future.take`.
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
