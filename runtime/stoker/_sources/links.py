"""Symbolic links in a local folder that is a source.

A link that leads out of the folder is an error, unless it is to be followed. Links to files and folders inside are
followed like everything else, and no folder is entered again below itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from stoker._base.sizes import counted
from stoker.abc import ObjectInfo
from stoker.errors import ConfigError, PackError

__all__ = ["check_links", "without_links_out"]


def check_links(root: Path, *, follow: bool) -> None:
    """Raise for links below ``root`` that would be left out of a pack, or take in what contains the folder itself.

    Hidden links and what lies in hidden folders do not matter.

    Args:
        root: the folder.
        follow: whether links out of the folder are to be followed; then those in the folders that they lead to count.

    Raises:
        ConfigError: links lead out of the folder, and ``follow`` is false.
        PackError: links lead to nothing that can be read; or one leads to a folder that contains ``root``.
    """
    real_root = root.resolve()
    outside: list[Path] = []
    broken: list[Path] = []
    for path, real in _links(root, real_root, follow=follow):
        if not os.path.exists(path):  # noqa: PTH110 - Path.exists raises where it may not look
            broken.append(path)
        elif not real.is_relative_to(real_root):
            outside.append(path)
            if follow and real_root.is_relative_to(real):
                raise PackError(f"{path} is a link to {real}, which contains {root} itself; remove the link")
    if broken:
        raise PackError(
            f"{root} has {counted(len(broken), 'link')} to what does not exist or cannot be read (first: "
            f"{_shown(broken, root)}); restore the files or remove the links"
        )
    if outside and not follow:
        raise ConfigError(
            f"{root} has {counted(len(outside), 'link')} out of it (first: {_shown(outside, root)}), so those files "
            "would be left out; say --follow-links to pack what they lead to, or remove them"
        )


def _links(root: Path, real_root: Path, *, follow: bool) -> Iterator[tuple[Path, Path]]:
    """Yield the links below a folder, and below what they lead to if that is inside or followed; and their real paths.

    A folder is entered behind the yield of the link to it, and once.
    """
    pending, seen = [(root, real_root)], {real_root}
    while pending:
        for path, real, is_link in _visible(*pending.pop()):
            if is_link:
                yield path, real
            is_entered = follow or real.is_relative_to(real_root)
            if is_entered and real not in seen and os.path.isdir(path):  # noqa: PTH112 - Path.is_dir may raise
                seen.add(real)
                pending.append((path, real))


def _visible(folder: Path, real_folder: Path) -> list[tuple[Path, Path, bool]]:
    """Return the links and folders of a folder that are not hidden: path, real path, and whether it is a link."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_symlink():
                    found.append((folder / entry.name, Path(os.path.realpath(entry)), True))
                elif entry.is_dir():
                    found.append((folder / entry.name, real_folder / entry.name, False))
    except OSError:  # gone meanwhile, or not to be read, which the listing tells
        return []
    return found


def _shown(paths: list[Path], root: Path) -> str:
    first = min(paths)
    name = first.relative_to(root) if first.is_relative_to(root) else first
    return f"{name} -> {os.readlink(first)}"  # noqa: PTH115 - the link's own text, as the user wrote it


def without_links_out(root: Path, found: list[ObjectInfo]) -> list[ObjectInfo]:
    """Leave out what links lead to outside of ``root``."""
    real_root = root.resolve()

    @cache
    def is_inside(folder: Path) -> bool:
        return folder.resolve().is_relative_to(real_root)

    def is_kept(path: Path) -> bool:
        return path.resolve().is_relative_to(real_root) if path.is_symlink() else is_inside(path.parent)

    return [item for item in found if is_kept(root / item.key)]
