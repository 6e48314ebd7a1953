"""``stoker rebuild-manifest``: a new manifest from the super-samples themselves."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable

from stoker._maintenance import BadObject, RebuildReport, rebuild_manifest
from stoker.cli.flags import add_store_options, add_written_dataset, opened
from stoker.cli.output import bad_object, counted, printable

__all__ = ["configure", "run"]


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_written_dataset(parser)
    parser.add_argument(
        "--adopt",
        action="store_true",
        help="take in super-samples that no manifest and no finished pack tells of, too, after reading them whole",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every super-sample whole, and leave out those that are damaged (default: only their heads)",
    )
    add_store_options(parser)


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    report = asyncio.run(_rebuild(args))
    manifest = report.manifest
    what = "made" if report.is_new else "nothing is missing from"
    found = f"{counted(len(manifest), 'super-sample')}, {counted(manifest.samples, 'sample')}"
    print(f"{what} version {manifest.version}: {found}")
    _list("lost", _problems(report.lost))
    _list("adopted", report.adopted)
    _list("not adopted", _problems(report.refused))
    if not args.adopt:
        _list("in no version and no finished pack (--adopt takes them in)", report.orphans)
    _list("missing", _problems(report.gaps))
    _list("perhaps twice", _problems(report.repeats))
    return 1 if report.lost or report.refused or report.gaps or report.repeats else 0


async def _rebuild(args: Namespace) -> RebuildReport:
    async with opened(args) as store:
        return await rebuild_manifest(store, adopt=args.adopt, verify=args.verify)


def _problems(objects: Iterable[BadObject]) -> list[str]:
    return [bad_object(item) for item in objects]


def _list(title: str, lines: Iterable[str]) -> None:
    if lines := list(lines):
        print(f"{title}: {len(lines):,}")
        for line in lines:
            print(f"  {printable(line)}")
