"""``stoker compact``: many small super-samples into few large ones."""

from __future__ import annotations

import asyncio
import sys
import time
from argparse import ArgumentParser, Namespace

from stoker._base.retry import RetryingStore
from stoker._maintenance.compaction import Compacted, compact
from stoker._pack.catalog import BucketCatalog
from stoker.cli.flags import add_store_options, add_written_dataset, opened, super_sample_size
from stoker.cli.output import RequestBill, counted, json_text

__all__ = ["configure", "run"]

_DEFAULT_BYTES = 8 << 20


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_written_dataset(parser)
    parser.add_argument(
        "--super-sample-bytes",
        type=super_sample_size,
        default=_DEFAULT_BYTES,
        metavar="SIZE",
        help="how large a super-sample should be: those below half of it are packed again (default: 8MiB)",
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    add_store_options(parser)


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    bill = RequestBill()
    done = asyncio.run(_compact(args, bill))
    if args.json:
        figures = {
            "url": args.url,
            "version": done.manifest.version,
            "objects_before": done.objects_before,
            "objects_after": done.objects_after,
            "left_objects": done.left_objects,
        }
        print(json_text({**figures, **bill.to_dict()}))
        return 0
    if done.objects_before:
        what = f"{counted(done.objects_before, 'super-sample')} became {done.objects_after:,}"
        print(
            f"{what}: version {done.manifest.version}; when no training runs on an older one, the old ones go with: "
            "stoker gc --keep-versions 1 --delete"
        )
        if done.left_objects:
            print(f"{counted(done.left_objects, 'small super-sample')} left for another time: run it again")
    else:
        print(f"nothing to gain in version {done.manifest.version}")
    print(bill.line(), file=sys.stderr)
    return 0


async def _compact(args: Namespace, bill: RequestBill) -> Compacted:
    async with opened(args) as inner:
        store = bill.metered(inner)
        return await compact(
            RetryingStore(store),
            BucketCatalog(store),
            now_seconds=time.time(),
            super_sample_bytes=args.super_sample_bytes,
        )
