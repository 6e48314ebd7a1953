"""``stoker pack``: from a source to a data set."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from contextlib import aclosing
from typing import Any

from stoker._base.progress import Amount, Progress
from stoker._base.sizes import format_bytes
from stoker._format.manifest import Manifest
from stoker._pack.packer import AsyncPacker, PackConfig, PackProgress
from stoker._sources import KINDS, Source, open_source
from stoker._stores import Store, open_store
from stoker._stores.location import parse_url
from stoker.cli.flags import add_store_options, positive, store_options, super_sample_size, writable
from stoker.cli.output import RequestBill, counted, json_text, printable, sample_lines
from stoker.cli.pack_on import add_fanout_options, check_fanout_options, pack_on, say_notes
from stoker.errors import ConfigError

__all__ = ["configure", "run"]

_OWN_FOLDERS = ("data", "epochs", "manifests", "packs")


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a folder (of images in class folders, of files, of .tar files), an .npy, .npz or .tar file, or several "
        "WebDataset tars as 'train-{000..099}.tar'; a path, or an s3:// or gs:// URL",
    )
    parser.add_argument(
        "url", type=writable, metavar="DST", help="where the data set is to be: a path, or an s3:// or gs:// URL"
    )
    parser.add_argument("--kind", choices=KINDS, help="what SRC is (default: its names tell)")
    parser.add_argument(
        "--strict", action="store_true", help="a tar without an end marker, which may be cut off, is an error"
    )
    parser.add_argument(
        "--follow-links",
        action="store_true",
        help="pack what symbolic links in a local SRC lead to outside of it (default: such links are an error)",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--append", action="store_true", help="add to the data set that is there")
    modes.add_argument(
        "--overwrite", action="store_true", help="replace the data set that is there; its earlier versions stay"
    )
    parser.add_argument(
        "--super-sample-bytes",
        type=super_sample_size,
        metavar="SIZE",
        help="limit of a super-sample, at most 32MiB (default: 8MiB)",
    )
    parser.add_argument("--concurrency", type=positive, metavar="N", help="uploads at once (default: 8)")
    parser.add_argument(
        "--single-writer",
        action="store_true",
        help="nobody else writes to DST meanwhile, so its store needs no conditional writes",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress and no summary")
    parser.add_argument("--json", action="store_true", help="write the summary as JSON")
    add_fanout_options(parser)
    add_store_options(parser, of="DST, and SRC unless --source-… says otherwise")
    add_store_options(parser, prefix="source-", of="SRC")
    parser.set_defaults(when_interrupted="interrupted; what was packed stays: resume by running the same command again")


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    _check_apart(args.source, args.url)
    check_fanout_options(args)
    asyncio.run(_pack(args))
    return 0


async def _pack(args: Namespace) -> None:
    _say(args, f"opening {args.source}")
    options = store_options(args, args.source, prefix="source_") or store_options(args, args.source)
    bill = RequestBill()
    source = await open_source(
        args.source, args.kind, options, strict=args.strict, follow_links=args.follow_links, wrap=bill.metered
    )
    try:
        store = open_store(args.url, options=store_options(args, args.url))
        try:
            if args.on:
                await pack_on(args, source, store)
            else:
                await _from_source_to_store(args, source, bill.metered(store), bill)
        finally:
            await store.close()
    finally:
        await source.close()


async def _from_source_to_store(args: Namespace, source: Source, store: Store, bill: RequestBill) -> None:
    started_seconds = asyncio.get_running_loop().time()
    notes = source.notes
    _say(args, f"packing {args.source} as {source.kind}")
    say_notes(notes, quiet=args.quiet)
    total = Amount(count=source.samples, size_bytes=source.size_bytes)
    progress = Progress("packing", "samples", total, sys.stderr, quiet=args.quiet)
    last = PackProgress()

    def show(done: PackProgress) -> None:
        nonlocal last
        last = done
        progress.update(_amount(done))

    async with AsyncPacker(store, _config(args, source), on_progress=show) as packer:
        if durable := packer.durable_samples:
            packer.skip(durable)
        async with aclosing(source.read(durable)) as samples:
            found = await anext(samples, None)
            _say(args, *sample_lines(source, durable, found))
            async with progress:
                progress.start(_amount(last))
                while found is not None:
                    where, sample = found
                    await packer.write(sample, where)
                    found = await anext(samples, None)
                manifest = await packer.commit()
    say_notes([note for note in source.notes if note not in notes], quiet=args.quiet)
    seconds = asyncio.get_running_loop().time() - started_seconds
    if args.json:
        print(json_text({**_figures(args, manifest, last, durable, seconds), **bill.to_dict()}))
    _say(args, bill.line(), _summary(store.url, manifest, last, durable, seconds))


def _config(args: Namespace, source: Source) -> PackConfig:
    given = {name: getattr(args, name) for name in ("super_sample_bytes", "concurrency")}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    mode: Any = "append" if args.append else "overwrite" if args.overwrite else "create"
    settings["single_writer"] = args.single_writer
    return PackConfig(schema=source.schema, source=source.fingerprint, mode=mode, **settings)


def _amount(done: PackProgress) -> Amount:
    return Amount(count=done.samples, size_bytes=done.size_bytes)


def _figures(
    args: Namespace, manifest: Manifest, done: PackProgress, durable: int, seconds: float
) -> dict[str, object]:
    return {
        "url": args.url,
        "version": manifest.version,
        "samples": done.samples,
        "resumed_samples": durable,
        "super_samples": done.objects,
        "size_bytes": done.size_bytes,
        "seconds": seconds,
    }


def _summary(url: str, manifest: Manifest, done: PackProgress, durable: int, seconds: float) -> str:
    fresh = done.samples - durable
    rest = f" (there already: {counted(durable, 'sample')})" if durable else ""
    what = f"{counted(done.samples, 'sample')} into {counted(done.objects, 'super-sample')}"
    return (
        f"packed {what}, {format_bytes(done.size_bytes)}, in {seconds:.1f} s "
        f"({fresh / max(seconds, 1e-3):,.0f} samples/s): {url}, version {manifest.version}{rest}"
    )


def _say(args: Namespace, *lines: str) -> None:
    if not args.quiet:
        for line in lines:
            print(printable(line), file=sys.stderr)


def _check_apart(source: str, destination: str) -> None:
    """Refuse a data set inside its own source, and a source where the data set keeps its objects."""
    src, dst = parse_url(source).place, parse_url(destination).place
    if dst.startswith(src):
        raise ConfigError(f"DST {destination} lies inside SRC {source}, which would change while it is packed; move it")
    if any(src.startswith(f"{dst}{folder}/") for folder in _OWN_FOLDERS):
        raise ConfigError(f"SRC {source} lies where DST {destination} keeps its own objects; choose another DST")
