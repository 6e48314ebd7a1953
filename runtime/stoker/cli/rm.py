"""``stoker rm``: delete a data set, after asking."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path

from stoker._base.progress import Amount, Progress
from stoker._base.sizes import format_bytes
from stoker._maintenance import Removal, plan_removal, remove
from stoker._stores import Store
from stoker._stores.location import parse_url
from stoker.abc import ObjectInfo
from stoker.cli.flags import add_store_options, add_written_dataset, opened
from stoker.cli.output import RequestBill, counted, printable
from stoker.errors import ConfigError

__all__ = ["configure", "run"]

_SHOWN_OTHERS = 5


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_written_dataset(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--quiet", action="store_true", help="show no progress and no summary")
    add_store_options(parser)
    parser.set_defaults(when_interrupted="interrupted; run the same command again to delete the rest")


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    if not args.yes and not (sys.stdin is not None and sys.stdin.isatty()):
        raise ConfigError("stoker rm asks before it deletes, and there is no terminal to ask at; give --yes")
    _check_no_links(args.url)
    return asyncio.run(_remove(args))


def _check_no_links(url: str) -> None:
    """Refuse a local data set with links to folders: what lies there may be another's.

    Raises:
        ConfigError: it has one.
    """
    for folder in _own_folders(url):
        if folder.is_symlink():
            raise ConfigError(
                f"{printable(str(folder))} is a link to another folder, whose files would be deleted; remove the link "
                "first, or name the data set that it leads to"
            )


async def _remove(args: Namespace) -> int:
    bill = RequestBill()
    async with opened(args) as inner:
        store = bill.metered(inner)
        removal = await plan_removal(store)
        what = _described(store, removal)
        if not args.yes and not _is_confirmed(what):
            print("nothing was deleted", file=sys.stderr)
            return 1
        await _delete(args, store, removal)
    _remove_empty_folders(args.url)
    if not args.quiet:
        print(f"deleted {what}; {bill.line()}", file=sys.stderr)
        if removal.others:
            shown = ", ".join(printable(info.key) for info in removal.others[:_SHOWN_OTHERS])
            print(f"left alone, since stoker did not make them: {len(removal.others):,}: {shown}", file=sys.stderr)
    return 0


def _described(store: Store, removal: Removal) -> str:
    size = f"{counted(len(removal.objects), 'object')}, {format_bytes(removal.size_bytes)}"
    manifest, url = removal.manifest, printable(store.url)
    if manifest is None:
        return f"what is left of a data set at {url} ({size})"
    return f"the data set at {url}: {counted(manifest.samples, 'sample')}, version {manifest.version} ({size})"


def _is_confirmed(what: str) -> bool:
    try:
        return input(f"delete {what}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


async def _delete(args: Namespace, store: Store, removal: Removal) -> None:
    total = Amount(count=len(removal.objects), size_bytes=removal.size_bytes)
    objects = size_bytes = 0
    async with Progress("deleting", "objects", total, sys.stderr, quiet=args.quiet) as progress:

        def show(info: ObjectInfo) -> None:
            nonlocal objects, size_bytes
            objects, size_bytes = objects + 1, size_bytes + info.size_bytes
            progress.update(Amount(count=objects, size_bytes=size_bytes))

        await remove(store, removal, show)


def _own_folders(url: str) -> list[Path]:
    """Return the folders, and links to folders, that a local data set has, the outer ones first."""
    location = parse_url(url)
    if location.scheme != "file":
        return []
    own = [Path(location.bucket) / name for name in ("data", "epochs", "manifests", "packs")]
    return [path for folder in own for path in (folder, *sorted(folder.rglob("*"))) if path.is_dir()]


def _remove_empty_folders(url: str) -> None:
    """Remove the local folders that the data set leaves behind empty, and no others."""
    if folders := _own_folders(url):
        folders.insert(0, folders[0].parent)
    for folder in reversed(folders):
        with suppress(OSError):  # it is not empty
            folder.rmdir()
