"""``stoker verify``: read a data set and check every checksum."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, Namespace

from stoker._base.progress import Amount, Progress
from stoker._base.sizes import format_bytes
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker._maintenance import BadObject, verify
from stoker._stores import Store
from stoker.abc import ObjectRef
from stoker.cli.flags import add_dataset, opened, positive
from stoker.cli.output import RequestBill, bad_object, counted, json_text, printable

__all__ = ["configure", "run"]


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_dataset(parser)
    parser.add_argument("--deep", action="store_true", help="check every value on its own checksum too")
    parser.add_argument(
        "--concurrency", type=positive, default=4, metavar="N", help="super-samples read at once (default: 4)"
    )
    parser.add_argument("--quiet", action="store_true", help="list bad super-samples only")
    parser.add_argument("--json", action="store_true", help="write JSON")


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    return asyncio.run(_verify(args))


async def _verify(args: Namespace) -> int:
    bill = RequestBill()
    async with opened(args) as inner:
        store = bill.metered(inner)
        manifest = await read_manifest(store, args.at)
        bad = await _read(args, store, manifest)
    if args.json:
        print(json_text({**_summary(args, manifest, bad), **bill.to_dict()}))
    else:
        _show(args, manifest, bad, bill)
    return 1 if bad else 0


def _summary(args: Namespace, manifest: Manifest, bad: list[BadObject]) -> dict[str, object]:
    return {
        "url": args.url,
        "version": manifest.version,
        "super_samples": len(manifest),
        "size_bytes": manifest.size_bytes,
        "bad": [{"key": item.key, "problem": item.problem} for item in bad],
    }


def _show(args: Namespace, manifest: Manifest, bad: list[BadObject], bill: RequestBill) -> None:
    for item in bad:
        print(printable(bad_object(item)))
    if not args.quiet:
        found = f"{len(bad):,} of them bad" if bad else "all of them good"
        size = format_bytes(manifest.size_bytes)
        print(
            f"verified {counted(len(manifest), 'super-sample')} of version {manifest.version}, {size}: {found}",
            file=sys.stderr,
        )
        print(bill.line(), file=sys.stderr)


async def _read(args: Namespace, store: Store, manifest: Manifest) -> list[BadObject]:
    total = Amount(count=len(manifest), size_bytes=manifest.size_bytes)
    objects = size_bytes = 0
    async with Progress("verifying", "super-samples", total, sys.stderr, quiet=args.quiet or args.json) as progress:

        def show(ref: ObjectRef, _: BadObject | None) -> None:
            nonlocal objects, size_bytes
            objects, size_bytes = objects + 1, size_bytes + ref.size_bytes
            progress.update(Amount(count=objects, size_bytes=size_bytes))

        return await verify(store, manifest, deep=args.deep, concurrency=args.concurrency, on_object=show)
