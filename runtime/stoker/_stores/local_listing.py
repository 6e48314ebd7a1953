"""The files below a folder as object keys, in a bucket's order, without reading folders that cannot hold any wanted."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeAlias

from stoker.errors import StoreError

__all__ = ["Found", "walk"]

Found: TypeAlias = tuple[str, os.stat_result]


def walk(root: Path, prefix: str, start_after: str, *, hidden: Callable[[str], bool]) -> Generator[Found, None, None]:
    """Yield (key, status) of the regular files below ``root``, in ascending UTF-8 order of key.

    Links are followed; a folder that contains itself through links is entered once per path. ``hidden(name)`` leaves
    a file out.

    Raises:
        OSError: a folder cannot be read. One that vanishes during the walk is left out, unless it is ``root``.
        StoreError: a file's name is not valid UTF-8, so that it has no key.
    """
    status = root.stat()
    yield from _folder(root, "", prefix, start_after, hidden, frozenset([(status.st_dev, status.st_ino)]))


def _folder(
    folder: Path,
    path: str,
    prefix: str,
    start_after: str,
    hidden: Callable[[str], bool],
    above: frozenset[tuple[int, int]],
) -> Generator[Found, None, None]:
    for name, is_folder in _entries(folder):
        key = path + name
        if not _may_match(key, prefix, start_after, is_folder) or (not is_folder and hidden(name)):
            continue
        try:
            status = (folder / name.rstrip("/")).stat()
        except FileNotFoundError:
            continue
        if not is_folder:
            if stat.S_ISREG(status.st_mode):
                yield key, status
        elif (here := (status.st_dev, status.st_ino)) not in above:
            try:
                yield from _folder(folder / name, key, prefix, start_after, hidden, above | {here})
            except FileNotFoundError:
                continue


def _entries(folder: Path) -> list[tuple[str, bool]]:
    """Return (name, is a folder), folders with a slash at the end: so they stand where their keys belong."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir()) for entry in entries]
    try:
        return sorted(
            ((f"{name}/" if is_folder else name, is_folder) for name, is_folder in found),
            key=lambda entry: entry[0].encode(),
        )
    except UnicodeEncodeError as error:
        raise StoreError(f"{folder} holds a file whose name is not valid UTF-8: {error.object!r}; rename it") from None


def _may_match(key: str, prefix: str, start_after: str, is_folder: bool) -> bool:
    if not is_folder:
        return key.startswith(prefix) and key.encode() > start_after.encode()
    overlaps = key.startswith(prefix) or prefix.startswith(key)
    return overlaps and (start_after.startswith(key) or key.encode() > start_after.encode())
