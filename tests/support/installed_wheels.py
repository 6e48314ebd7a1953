"""The installed wheels that an image or a zip would have, and their size on disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["closure", "copied", "size_bytes"]

ROOT = Path(__file__).parents[2]
OURS = [ROOT / "runtime/stoker", ROOT / "loader/stoker_torch", ROOT / "functions/stoker_functions"]


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Return the distributions that pip would install for some requirements, by name; all are installed here.

    Raises:
        importlib.metadata.PackageNotFoundError: one of them is not installed.
    """
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(text) for text in requirements]
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if (name, frozenset(wanted.extras)) in seen:
            continue
        seen.add((name, frozenset(wanted.extras)))
        found[name] = distribution(wanted.name)
        for requirement in map(Requirement, found[name].requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                left.append(requirement)
    return found


def _files(found: Distribution) -> list[Path]:
    """Return the files of a distribution, relative to its installation folder, without programs."""
    return [Path(file) for file in found.files or () if ".." not in file.parts]


def size_bytes(distributions: Iterable[Distribution]) -> int:
    """Return the size of distributions, with compiled modules, in bytes; our own in the source tree."""
    total = sum(file.stat().st_size for folder in OURS for file in folder.rglob("*") if file.is_file())
    for found in distributions:
        files = (Path(str(found.locate_file(file))) for file in _files(found))
        total += sum(file.stat().st_size for file in files if file.exists())
    return total


def copied(distributions: Iterable[Distribution], folder: Path) -> None:
    """Copy distributions into a folder as ``pip install --target`` would, with our own packages beside them."""
    for found in distributions:
        for file in _files(found):
            source = Path(str(found.locate_file(file)))
            if source.exists() and file.suffix != ".pyc":
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    for package in OURS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package, folder / package.name, ignore=ignored, dirs_exist_ok=True)
