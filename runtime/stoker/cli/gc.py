"""``stoker gc``: list, and with ``--delete`` delete, what no version of a data set needs."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace

from stoker.cli.command import Command
from stoker.cli.flags import add_store_options, opened, positive
from stoker.cli.output import counted, printable
from stoker.maintenance import GarbageReport, gc
from stoker.manifest import version_key
from stoker.sizes import format_bytes

__all__ = ["command"]


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="of the data set: a path, or an s3:// or gs:// URL")
    parser.add_argument("--delete", action="store_true", help="delete what is listed")
    parser.add_argument(
        "--keep-versions",
        type=positive,
        metavar="N",
        help="only the newest N versions are needed (default: all); no training may run on an older one",
    )
    parser.add_argument(
        "--abandoned", action="store_true", help="unfinished packs are not needed either; none may be running"
    )
    add_store_options(parser)


def _run(args: Namespace) -> int:
    report = asyncio.run(_collect(args))
    for info in report.objects:
        print(f"{info.key}  {format_bytes(info.size_bytes)}")
    for key in (*report.records, *map(version_key, report.versions)):
        print(printable(key))
    count = len(report.objects) + len(report.records) + len(report.versions)
    verb = "deleted" if report.is_deleted else "could be deleted with --delete"
    print(
        f"{counted(count, 'object')} {verb}, {format_bytes(report.size_bytes)} of super-samples"
        if count
        else "no garbage"
    )
    for run, objects in report.unfinished.items():
        print(
            f"left alone: the unfinished pack {run}, {counted(objects, 'super-sample')}; resume it, or say --abandoned"
        )
    return 0


async def _collect(args: Namespace) -> GarbageReport:
    async with opened(args) as store:
        return await gc(store, delete=args.delete, keep_versions=args.keep_versions, abandoned=args.abandoned)


command = Command(name="gc", help="list or delete what no version of a data set needs", configure=_configure, run=_run)
