"""``stoker cache``: fills a disk cache or a cluster cache before training, so that the first epoch reads from it.

After H. Zhao and others, "SiloD", EuroSys 2023.
"""

from __future__ import annotations

import math
import random
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from stoker._base.batch_read import ObjectPart, RangePart
from stoker._base.progress import ProgressReporter, WorkAmount
from stoker._base.sizes import format_bytes
from stoker._base.task_group import for_each
from stoker._cache.disk_folder import disk_space_bytes
from stoker._cache.disk_tier import DiskTier
from stoker._cache.index import AccessForecast, Presence
from stoker._cache.tiers import CacheSharing, CacheSpec, create_tiers
from stoker._cluster.client import ClusterTier
from stoker._cluster.connection import UNSENT_BYTES
from stoker._cluster.meeting import find_meeting
from stoker._cluster.spec import ClusterSpec
from stoker._fetch.batch_stream import StepQueue
from stoker._fetch.config import FetchConfig
from stoker._fetch.fetcher import Fetcher
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker._memory.ring import Ring
from stoker._order.order import OrderConfig
from stoker._order.sharding import RankSharding
from stoker._order.steps import PositionRange, SuperSampleSteps
from stoker.abc import ObjectRef, Readable, Tier
from stoker.cli.flags import add_actions, add_dataset, add_json, open_store_from_args, rate_from, whole_number_to
from stoker.cli.output import format_count, json_text
from stoker.errors import ConfigError, StokerError

_MAX_CONCURRENT_FETCHES = 4
"""Concurrent fetches: the number of objects of any size that may wait to be written; a tier declines more."""
_HEDGE_SLOTS = 2
_BATCH_SIZE = 1024
_parse_number = whole_number_to((1 << 64) - 1)
_DESCRIPTION = (
    "Read super-samples into a disk cache, or into the cache process of this machine, in the order in which training "
    "needs them, until the limit is reached. Super-samples that the cache has are kept, so an interrupted run resumes. "
    "The exit code is 1 if the cache lacks super-samples that fit."
)


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    example = "stoker cache warm s3://bucket/dataset --cache 'disk:/mnt/nvme/cache?limit=200GB'"
    warm = add_actions(parser)("warm", "fill a cache before training", description=_DESCRIPTION, example=example)
    caches = warm.add_mutually_exclusive_group(required=True)
    cache = "the disk cache, disk:PATH?limit=SIZE, as given to the Loader"
    caches.add_argument("--cache", metavar="SPEC", help=cache)
    cluster = "the cluster cache, such as memory:?limit=SIZE&linger=SECONDS, as given to the Loader"
    caches.add_argument("--cluster", metavar="SPEC", help=cluster)
    seed = "seed of the training; matters if the data set is larger than the limit (default: 0)"
    warm.add_argument("--seed", type=_parse_number, default=0, metavar="N", help=seed)
    warm.add_argument("--epoch", type=_parse_number, default=0, metavar="N", help="epoch to begin with (default: 0)")
    rate = "maximum rate of reads from the bucket, such as 1Gbit (default: unlimited)"
    warm.add_argument("--max-rate", type=rate_from(1.0), metavar="RATE", help=rate)
    warm.add_argument("--quiet", action="store_true", help="show no progress")
    add_json(warm)
    add_dataset(warm)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filled:
    """What a cache holds.

    Attributes:
        place: the cache.
        fits: number of super-samples that fit into it.
        held: those that it holds.
        read: number of them that came from the bucket.
    """

    place: str
    fits: int
    held: Sequence[ObjectRef]
    read: int


async def run(args: Namespace) -> int:
    """Fill a cache with the super-samples that a run needs first, print what it holds, and return the exit code.

    Raises:
        ConfigError: the setting is wrong, or the cache is in the memory of a process that ends.
        MemoryBudgetError: the cache has no room for a super-sample.
        StokerError: another process writes to the disk, the cache process cannot be reached, or a super-sample could
            not be read; earlier ones are kept.
    """
    spec = (CacheSpec if args.cluster is None else ClusterSpec).parse(args.cluster or args.cache)
    async with open_store_from_args(args) as store:
        manifest = await read_manifest(store, args.at)
        partition = RankSharding(samples=manifest.samples, batch_size=_BATCH_SIZE)
        order = OrderConfig(seed=args.seed)
        positions = PositionRange(order=order, sharding=partition, epoch=args.epoch, end_epoch=args.epoch + 1)
        total = WorkAmount(count=len(manifest), size_bytes=min(manifest.size_bytes, spec.limit_bytes))
        async with ProgressReporter(
            "filling", "super-samples", total, sys.stderr, quiet=args.quiet or args.json
        ) as progress:
            source = _Source(store, manifest, FetchConfig(max_bytes_per_second=args.max_rate), progress)
            if isinstance(spec, CacheSpec):
                filled = await _fill_disk(source, spec, positions)
            else:
                filled = await _fill_cluster(source, spec, args.cluster, positions)
    size_bytes = sum(ref.size_bytes for ref in filled.held)
    if args.json:
        figures = {"url": args.url, "version": manifest.version, "cache": filled.place}
        figures |= {"super_samples": len(manifest), "fit": filled.fits, "held": len(filled.held)}
        print(json_text({**figures, "held_bytes": size_bytes, "read": filled.read}))
    else:
        print(
            f"{filled.place} holds {len(filled.held):,} of {format_count(len(manifest), 'super-sample')} of version "
            f"{manifest.version}, {format_bytes(size_bytes)}: {filled.read:,} came from the bucket, "
            f"{filled.fits - filled.read:,} were there"
        )
    if len(filled.held) < filled.fits:
        reason = (
            "the disk is full or failed; free some space and" if args.cluster is None else "the process has failed;"
        )
        print(
            f"{filled.fits - len(filled.held):,} that fit into the limit were not cached: {reason} run the command "
            "again",
            file=sys.stderr,
        )
    return 1 if len(filled.held) < filled.fits else 0


@dataclass(frozen=True, slots=True)
class _Source:
    """The data set, and how it is read."""

    store: Readable
    manifest: Manifest
    config: FetchConfig
    progress: ProgressReporter

    def open(self, tier: Tier) -> tuple[Fetcher, Ring]:
        """Return what reads objects and offers them to a tier, and its memory."""
        ring = Ring(_MAX_CONCURRENT_FETCHES + _HEDGE_SLOTS, self.manifest.largest_bytes)
        rng = random.Random()  # noqa: S311 - jitter
        return Fetcher(self.store, ring=ring, rng=rng, config=self.config, tiers=[tier]), ring


async def _fill_cluster(source: _Source, spec: ClusterSpec, text: str, positions: PositionRange) -> _Filled:
    """Read super-samples into the processes of the machines until they have no room."""
    manifest = source.manifest
    rows = _select_rows(manifest, positions, math.inf)
    held: list[ObjectRef] = []
    fits = kept = 0
    tier = ClusterTier(text, registry=find_meeting(spec))
    fetcher, ring = source.open(tier)

    async def find(ref: ObjectRef) -> Presence:
        part = ObjectPart(ref, RangePart(0, min(1, ref.size_bytes), 0))
        return (await tier.read_parts([part], memoryview(bytearray(1))))[0]

    async def fill(row: int) -> None:
        nonlocal fits, kept
        ref = manifest.ref(row)
        presence = await find(ref)
        kept += presence is Presence.COPIED
        if presence is Presence.LACKING:
            ring.release(await fetcher.fetch(ref))
            presence = await find(ref)  # answered when the process has it
        fits += presence is not Presence.UNAVAILABLE
        if presence is Presence.COPIED:
            held.append(ref)
            source.progress.add(ref.size_bytes)

    try:
        if not await tier.connect():
            raise StokerError(f"{text}: the cache process of this machine cannot be reached")
        concurrency = max(1, min(_MAX_CONCURRENT_FETCHES, UNSENT_BYTES // manifest.largest_bytes))
        await for_each(rows, fill, concurrency=concurrency)
    finally:
        await tier.close()
    copied = fetcher.stats.tier_hits.get(tier.name, 0)  # from other machines
    return _Filled(place=text, fits=fits, held=held, read=max(0, fits - kept - copied))


async def _fill_disk(source: _Source, spec: CacheSpec, positions: PositionRange) -> _Filled:
    """Read super-samples into a disk cache; those that are there are verified."""
    manifest = source.manifest
    async with _open_disk_tier(manifest, spec, positions) as tier:
        fetcher, ring = source.open(tier)

        async def fill(row: int) -> None:
            ref = manifest.ref(row)
            ring.release(await fetcher.fetch(ref))
            await tier.flush()
            source.progress.add(ref.size_bytes)

        rows = _select_rows(manifest, positions, spec.limit_bytes)
        await for_each(rows, fill, concurrency=_MAX_CONCURRENT_FETCHES)
        return _Filled(
            place=f"disk:{spec.path}",
            fits=len(rows),
            held=[ref for row in rows if tier.holds(ref := manifest.ref(row))],
            read=len(rows) - fetcher.stats.tier_hits.get(tier.name, 0),
        )


@asynccontextmanager
async def _open_disk_tier(
    manifest: Manifest, spec: CacheSpec, positions: PositionRange
) -> AsyncGenerator[DiskTier, None]:
    """Yield the cache that a loader would open; it keeps the super-samples that ``positions`` needs first."""
    if spec.path is None:
        raise ConfigError(
            "a cache in memory ends with its process and cannot be filled ahead; use disk:PATH or --cluster"
        )
    (tier,) = create_tiers([spec], manifest, CacheSharing())
    assert isinstance(tier, DiskTier)  # noqa: S101 - the path says so
    try:
        await tier.follow(manifest, AccessForecast(manifest.rows.samples, positions))
        if not tier.accepts_writes:
            raise StokerError(
                f"{tier.name} cannot be filled: another process writes to it, or this user cannot write to the folder "
                "or lock it; stop the process, or let it fill the cache itself"
            )
        yield tier
    finally:
        await tier.close()


def _select_rows(manifest: Manifest, positions: PositionRange, limit_bytes: float) -> list[int]:
    """Return the rows of the super-samples that ``positions`` uses first and that fit into ``limit_bytes`` together."""
    queue = StepQueue(SuperSampleSteps(manifest.rows.samples, positions))
    rows: dict[int, None] = {}
    left_bytes = limit_bytes
    while (item := queue.next_item()) is not None:
        if item.ref not in rows:
            left_bytes -= disk_space_bytes(int(manifest.rows.size_bytes[item.ref]))
            if left_bytes < 0:
                break
            rows[item.ref] = None
        queue.next_step()
    return list(rows)
