"""``stoker cache``: fills a disk cache before training, so that the first epoch reads from it.

After H. Zhao and others, "SiloD", EuroSys 2023.
"""

from __future__ import annotations

import random
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from stoker._base.progress import ProgressReporter, WorkAmount
from stoker._base.sizes import format_bytes
from stoker._base.task_group import for_each
from stoker._cache.disk_folder import disk_space_bytes
from stoker._cache.disk_tier import DiskTier
from stoker._cache.index import AccessForecast
from stoker._cache.tiers import CacheSharing, CacheSpec, create_tiers
from stoker._fetch.batch_stream import StepQueue
from stoker._fetch.config import FetchConfig
from stoker._fetch.fetcher import Fetcher
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker._memory.ring import Ring
from stoker._order.order import OrderConfig
from stoker._order.sharding import RankSharding
from stoker._order.steps import PositionRange, SuperSampleSteps
from stoker.abc import Readable
from stoker.cli.flags import add_actions, add_dataset, add_json, open_store_from_args, rate_from, whole_number_to
from stoker.cli.output import format_count, json_text
from stoker.errors import ConfigError, StokerError

_MAX_CONCURRENT_FETCHES = 4
"""Concurrent fetches: the number of objects of any size that may wait to be written; a tier declines more."""
_HEDGE_SLOTS = 2
_BATCH_SIZE = 1024
_parse_number = whole_number_to((1 << 64) - 1)
_DESCRIPTION = (
    "Read super-samples into a disk cache, in the order in which training needs them, until the limit is reached. "
    "Super-samples that the cache has are checked and kept, so an interrupted run resumes. The exit code is 1 if the "
    "cache lacks super-samples that fit."
)


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    example = "stoker cache warm s3://bucket/dataset --cache 'disk:/mnt/nvme/cache?limit=200GB'"
    warm = add_actions(parser)("warm", "fill a disk cache before training", description=_DESCRIPTION, example=example)
    cache = "the cache, disk:PATH?limit=SIZE, as given to the Loader"
    warm.add_argument("--cache", required=True, metavar="SPEC", help=cache)
    seed = "seed of the training; matters if the data set is larger than the limit (default: 0)"
    warm.add_argument("--seed", type=_parse_number, default=0, metavar="N", help=seed)
    warm.add_argument("--epoch", type=_parse_number, default=0, metavar="N", help="epoch to begin with (default: 0)")
    rate = "maximum rate of reads from the bucket, such as 1Gbit (default: unlimited)"
    warm.add_argument("--max-rate", type=rate_from(1.0), metavar="RATE", help=rate)
    warm.add_argument("--quiet", action="store_true", help="show no progress")
    add_json(warm)
    add_dataset(warm)


async def run(args: Namespace) -> int:
    """Fill a disk cache with the super-samples that a run needs first, print what it holds, and return the exit code.

    Raises:
        ConfigError: the cache is in memory.
        MemoryBudgetError: the cache has no room for a super-sample.
        StokerError: another process writes to the cache, or a super-sample could not be read; earlier ones are kept.
    """
    spec = CacheSpec.parse(args.cache)
    config = FetchConfig(max_bytes_per_second=args.max_rate)
    async with open_store_from_args(args) as store:
        manifest = await read_manifest(store, args.at)
        partition = RankSharding(samples=manifest.samples, batch_size=_BATCH_SIZE)
        order = OrderConfig(seed=args.seed)
        positions = PositionRange(order=order, sharding=partition, epoch=args.epoch, end_epoch=args.epoch + 1)
        total = WorkAmount(count=len(manifest), size_bytes=min(manifest.size_bytes, spec.limit_bytes))
        async with (
            ProgressReporter("filling", "super-samples", total, sys.stderr, quiet=args.quiet or args.json) as progress,
            _open_disk_tier(manifest, spec, positions) as tier,
        ):
            rows = _select_rows(manifest, positions, spec.limit_bytes)
            read = await _fill(store, manifest, tier, rows, config, progress)
            held_refs = [ref for row in rows if tier.holds(ref := manifest.ref(row))]
    size_bytes = sum(ref.size_bytes for ref in held_refs)
    if args.json:
        figures = {"url": args.url, "version": manifest.version, "cache": f"disk:{spec.path}"}
        figures |= {"super_samples": len(manifest), "fit": len(rows), "held": len(held_refs), "held_bytes": size_bytes}
        print(json_text({**figures, "read": read}))
    else:
        print(
            f"disk:{spec.path} holds {len(held_refs):,} of {format_count(len(manifest), 'super-sample')} of version "
            f"{manifest.version}, {format_bytes(size_bytes)}: {read:,} came from the bucket, {len(rows) - read:,} "
            "were there"
        )
    if len(held_refs) < len(rows):
        print(
            f"{len(rows) - len(held_refs):,} that fit into the limit were not cached: the disk is full or failed; "
            "free some space and run the command again",
            file=sys.stderr,
        )
    return 1 if len(held_refs) < len(rows) else 0


@asynccontextmanager
async def _open_disk_tier(
    manifest: Manifest, spec: CacheSpec, positions: PositionRange
) -> AsyncGenerator[DiskTier, None]:
    """Yield the cache that a loader would open; it keeps the super-samples that ``positions`` needs first."""
    if spec.path is None:
        raise ConfigError("a cache in memory ends with its process and cannot be filled ahead; use disk:PATH")
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


async def _fill(
    store: Readable,
    manifest: Manifest,
    tier: DiskTier,
    rows: Sequence[int],
    config: FetchConfig,
    progress: ProgressReporter,
) -> int:
    """Read super-samples into the tier and return how many came from the bucket; the others' checksums were checked."""
    ring = Ring(_MAX_CONCURRENT_FETCHES + _HEDGE_SLOTS, manifest.largest_bytes)
    fetcher = Fetcher(store, ring=ring, rng=random.Random(), config=config, tiers=[tier])  # noqa: S311 - jitter

    async def fill(row: int) -> None:
        ref = manifest.ref(row)
        ring.release(await fetcher.fetch(ref))
        await tier.flush()
        progress.add(ref.size_bytes)

    await for_each(rows, fill, concurrency=_MAX_CONCURRENT_FETCHES)
    return len(rows) - fetcher.stats.tier_hits.get(tier.name, 0)


def _select_rows(manifest: Manifest, positions: PositionRange, limit_bytes: int) -> list[int]:
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
