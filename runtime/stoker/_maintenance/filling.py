"""Filling a disk cache before a run, so that its first epoch reads it (H. Zhao and others, "SiloD", EuroSys 2023)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker._base.task_group import for_each
from stoker._cache.disk_tier import DiskTier
from stoker._cache.future import Future
from stoker._cache.tiers import CacheSpec, Sharers, made_tiers
from stoker._fetch.fetcher import FetchConfig, Fetcher
from stoker._fetch.prefetcher import StepQueue
from stoker._format.manifest import Manifest
from stoker._memory.ring import Ring
from stoker._order.order import OrderConfig
from stoker._order.sharding import Partition
from stoker._order.steps import Steps, Stretch
from stoker.abc import Readable
from stoker.errors import ConfigError, StokerError

__all__ = ["CacheFilling", "epoch_stretch", "fill_cache", "rows_that_fit"]

_AT_ONCE = 4
"""As many as may wait to be written, whatever their size: a tier declines what is beyond."""
_HEDGE_SLOTS = 2
_BATCH_SIZE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFilling:
    """What a cache holds after it was filled.

    Attributes:
        chosen: super-samples that fit, in order of first use.
        held: of these, those that the cache has.
        read: of these, those that came from the bucket; the others were there, and their checksums are right.
        size_bytes: of those that it has.
    """

    chosen: int
    held: int
    read: int
    size_bytes: int


async def fill_cache(
    store: Readable,
    manifest: Manifest,
    spec: CacheSpec,
    *,
    stretch: Stretch,
    fetch: FetchConfig | None = None,
    on_object: Callable[[int, int], object] = lambda count, size_bytes: None,
) -> CacheFilling:
    """Have a disk cache hold what a run needs first, as much as fits. What is there already is checked and stays.

    Args:
        store: of the data set.
        manifest: of the data set.
        spec: the cache, as the loader is given it.
        stretch: of the order, whose super-samples are kept by first use.
        fetch: deadlines, retries and ``max_bytes_per_second``.
        on_object: called for each super-sample that was looked at, with the number of those so far and their bytes.

    Raises:
        ConfigError: the cache is in memory.
        BudgetError: it has no room for a super-sample.
        StokerError: another process writes to it, or a super-sample could not be read; those before it are kept.
    """
    if spec.path is None:
        raise ConfigError("a cache in memory ends with its process and cannot be filled ahead: name a disk:PATH")
    (tier,) = made_tiers([spec], manifest, Sharers())
    assert isinstance(tier, DiskTier)  # noqa: S101 - the path says so
    try:
        await tier.follow(manifest, Future(manifest.rows.samples, stretch))
        if not tier.takes_in:
            raise StokerError(
                f"{tier.name} cannot be filled: another process writes to it, or it is no folder that this user can "
                "write to and lock; stop the process, or let it fill the cache itself"
            )
        return await _fill(store, manifest, tier, rows_that_fit(manifest, stretch, spec.limit_bytes), fetch, on_object)
    finally:
        await tier.close()


async def _fill(
    store: Readable,
    manifest: Manifest,
    tier: DiskTier,
    rows: Sequence[int],
    config: FetchConfig | None,
    on_object: Callable[[int, int], object],
) -> CacheFilling:
    ring = Ring(_AT_ONCE + _HEDGE_SLOTS, manifest.largest_bytes)
    fetcher = Fetcher(store, ring=ring, rng=random.Random(), config=config, tiers=[tier])  # noqa: S311 - jitter
    count = size_bytes = 0

    async def fill(row: int) -> None:
        nonlocal count, size_bytes
        ref = manifest.ref(row)
        ring.release(await fetcher.fetch(ref))
        await tier.flush()
        count, size_bytes = count + 1, size_bytes + ref.size_bytes
        on_object(count, size_bytes)

    await for_each(rows, fill, concurrency=_AT_ONCE)
    held = [ref for row in rows if tier.holds(ref := manifest.ref(row))]
    read = count - fetcher.stats.tier_hits.get(tier.name, 0)
    return CacheFilling(chosen=len(rows), held=len(held), read=read, size_bytes=sum(ref.size_bytes for ref in held))


def rows_that_fit(manifest: Manifest, stretch: Stretch, limit_bytes: int) -> list[int]:
    """Return the super-samples that a stretch uses first and that fit together on a disk, by their rows."""
    queue = StepQueue(Steps(manifest.rows.samples, stretch))
    rows: dict[int, None] = {}
    left_bytes = limit_bytes
    while (item := queue.next_item()) is not None:
        if item.ref not in rows:
            left_bytes -= DiskTier.taken_bytes(manifest.ref(item.ref))
            if left_bytes < 0:
                break
            rows[item.ref] = None
        queue.next_step()
    return list(rows)


def epoch_stretch(manifest: Manifest, order: OrderConfig, epoch: int) -> Stretch:
    """Return an epoch of a job's only rank, as a stretch."""
    partition = Partition(samples=manifest.samples, batch_size=_BATCH_SIZE)
    return Stretch(order=order, partition=partition, epoch=epoch, end_epoch=epoch + 1)
