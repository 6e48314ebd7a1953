"""``stoker mount``: shows a data set as read-only files to every program, through FUSE."""

from __future__ import annotations

import signal
from argparse import ArgumentParser, Namespace
from pathlib import Path
from queue import SimpleQueue

from stoker._base.sizes import format_bytes, parse_bytes
from stoker._files.fuse import Mount, check_folder, check_machine, load_binding, unmount_command
from stoker._files.mounted import MountedFiles
from stoker._files.packed import FileSettings, PackedFiles
from stoker.cli.flags import add_store_options, positive, size_from, store_options
from stoker.cli.output import format_count, make_printable

_DEFAULT_MEMORY = "256MB"
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Show a data set as read-only files, through FUSE, until Ctrl-C, SIGTERM or fusermount3 -u FOLDER. "
        "samples/ has a file for each sample, objects/ has the super-samples."
    )
    add = parser.add_argument
    add("url", metavar="URL", help="the data set: a path, or an s3://, gs:// or stoker+https:// URL")
    add("folder", type=Path, metavar="FOLDER", help="an empty folder, where the files appear")
    template = "paths of the samples (default: samples/{__id__:08d}, with .txt or .npy for text and arrays)"
    add("--template", metavar="TEXT", help=template)
    add("--content", metavar="COLUMN", help="column whose values are the files (default: the only one, or of bytes)")
    memory = f"memory to fetch samples, and as much again for files read ahead (default: {_DEFAULT_MEMORY})"
    add("--memory", type=size_from(1), default=parse_bytes(_DEFAULT_MEMORY), metavar="SIZE", help=memory)
    add("--at", "--version", type=positive, metavar="N", help="version of the data set (default: the newest)")
    add_store_options(parser)
    example = "stoker mount s3://bucket/photos /mnt/photos --template 'samples/{path}' --content image"
    parser.set_defaults(example=example)


def run(args: Namespace) -> int:
    """Mount a data set, wait until it is unmounted or a signal arrives, and return the exit code.

    Raises:
        ConfigError: the folder or a setting is not valid.
        MissingExtraError: mfusepy is not installed.
        NotFoundError: the URL has no data set.
        StokerError: this machine permits no mount, or the data set cannot be read.
    """
    binding, folder = load_binding(), args.folder.resolve()
    unmount = unmount_command(binding, folder)
    check_machine(binding)
    check_folder(folder, unmount)
    files = PackedFiles(
        FileSettings(
            url=args.url,
            template=args.template,
            content=args.content,
            version=args.at,
            memory=args.memory,
            options=store_options(args, args.url),
            fetch=None,
        )
    )
    ended: SimpleQueue[object] = SimpleQueue()
    mount = Mount(binding, MountedFiles(files, args.memory), folder, args.url, lambda: ended.put(None))
    before = {number: signal.signal(number, lambda *_: ended.put(None)) for number in _END_SIGNALS}
    try:
        mount.open()
        print(_format_mounted(args.url, files, folder, unmount), flush=True)
        ended.get()
    finally:
        mount.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _format_mounted(url: str, files: PackedFiles, folder: Path, unmount: str) -> str:
    manifest = files.manifest
    size = f"{format_count(manifest.samples, 'sample')}, {format_bytes(manifest.size_bytes)}"
    return make_printable(
        f"mounted {url} version {manifest.version} at {folder}: {size}; unmount with Ctrl-C or {unmount}"
    )
