"""``stoker rm``: delete a data set, after asking."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path

from stoker.cli.bill import RequestBill
from stoker.cli.command import Command
from stoker.cli.flags import add_store_options, add_written_dataset, opened
from stoker.cli.output import counted, printable
from stoker.errors import ConfigError
from stoker.maintenance import Removal, plan_removal, remove
from stoker.progress import Amount, Progress
from stoker.sizes import format_bytes
from stoker.store import Store
from stoker.store.location import parse_url
from stoker.store.protocol import ObjectInfo

__all__ = ["command"]

_SHOWN_OTHERS = 5


def _configure(parser: ArgumentParser) -> None:
    add_written_dataset(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--quiet", action="store_true", help="show no progress and no summary")
    add_store_options(parser)
    parser.set_defaults(when_interrupted="interrupted; run the same command again to delete the rest")


def _run(args: Namespace) -> int:
    if not args.yes and not (sys.stdin is not None and sys.stdin.isatty()):
        raise ConfigError("stoker rm asks before it deletes, and there is no terminal to ask at; give --yes")
    return asyncio.run(_remove(args))


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
    manifest = removal.manifest
    if manifest is None:
        return f"what is left of a data set at {store.url} ({size})"
    return f"the data set at {store.url}: {counted(manifest.samples, 'sample')}, version {manifest.version} ({size})"


def _is_confirmed(what: str) -> bool:
    try:
        return input(f"delete {printable(what)}? [y/N] ").strip().lower() in ("y", "yes")
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


def _remove_empty_folders(url: str) -> None:
    """Remove the local folders that the data set leaves behind empty, and no others."""
    location = parse_url(url)
    if location.scheme != "file":
        return
    root = Path(location.bucket)
    own = [root / name for name in ("data", "epochs", "manifests", "packs")]
    below = [path for folder in own for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()]
    for folder in (*sorted(below, key=lambda path: -len(path.parts)), *own, root):
        with suppress(OSError):  # it does not exist, or is not empty
            folder.rmdir()


command = Command(name="rm", help="delete a data set, after asking", configure=_configure, run=_run)
