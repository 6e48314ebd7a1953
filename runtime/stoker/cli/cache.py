"""``stoker cache``: fills a disk cache before a training."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace

from stoker._base.progress import Amount, Progress
from stoker._base.sizes import format_bytes
from stoker._cache.tiers import CacheSpec
from stoker._fetch.config import FetchConfig
from stoker._format.versions import read_manifest
from stoker._maintenance.filling import epoch_stretch, fill_cache
from stoker._order.order import OrderConfig
from stoker.cli.flags import add_dataset, opened, rate_from
from stoker.cli.output import counted

__all__ = ["configure", "run"]

_MOST_DIGITS = 20  # of 2**64
_DESCRIPTION = (
    "Read super-samples into a disk cache, those first that a training needs first, until the limit is reached. What "
    "the cache has already is checked and stays, so a run that was interrupted goes on. Exits with 1 if the cache does "
    "not hold all that fits."
)


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    actions = parser.add_subparsers(dest="action", title="actions", metavar="ACTION", required=True)
    warm = actions.add_parser("warm", help="fill a disk cache before a training", description=_DESCRIPTION)
    cache = "disk:PATH?limit=SIZE, as it is given to the Loader"
    warm.add_argument("--cache", required=True, metavar="SPEC", help=cache)
    seed = "of the training: where not all fits, its order says what is first (default: 0)"
    warm.add_argument("--seed", type=_number, default=0, metavar="N", help=seed)
    warm.add_argument("--epoch", type=_number, default=0, metavar="N", help="that is read first (default: 0)")
    rate = "read no more from the bucket, such as 1Gbit (default: no bound)"
    warm.add_argument("--max-rate", type=rate_from(1.0), metavar="RATE", help=rate)
    warm.add_argument("--quiet", action="store_true", help="show no progress")
    add_dataset(warm)


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ArgumentTypeError(f"{text!r:.40} is not a whole number of at most {_MOST_DIGITS} digits")
    return int(text)


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    return asyncio.run(_warm(args, CacheSpec.parse(args.cache)))


async def _warm(args: Namespace, spec: CacheSpec) -> int:
    async with opened(args) as store:
        manifest = await read_manifest(store, args.at)
        stretch = epoch_stretch(manifest, OrderConfig(seed=args.seed), args.epoch)
        total = Amount(count=len(manifest), size_bytes=min(manifest.size_bytes, spec.limit_bytes))
        async with Progress("filling", "super-samples", total, sys.stderr, quiet=args.quiet) as progress:
            found = await fill_cache(
                store,
                manifest,
                spec,
                stretch=stretch,
                fetch=FetchConfig(max_bytes_per_second=args.max_rate),
                on_object=lambda count, size_bytes: progress.update(Amount(count=count, size_bytes=size_bytes)),
            )
    print(
        f"disk:{spec.path} holds {found.held:,} of {counted(len(manifest), 'super-sample')} of version "
        f"{manifest.version}, {format_bytes(found.size_bytes)}: {found.read:,} came from the bucket, "
        f"{found.chosen - found.read:,} were there"
    )
    if found.held < found.chosen:
        print(
            f"{found.chosen - found.held:,} that fit into the limit were not taken in: the disk is full or failed; "
            "free some of it and run the command again",
            file=sys.stderr,
        )
    return 1 if found.held < found.chosen else 0
