"""Folders and the numbers of their files: those of the samples of a template, and those of the objects."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Protocol

from stoker._files.template import SAMPLES, PathTemplate
from stoker._format.manifest import Manifest
from stoker.errors import ConfigError

OBJECTS = "objects"
"""Folder of the objects."""
_FOLDER = -1
_OBJECT = re.compile(r"objects/data/([0-9a-f]{16})/(\d{8,})", re.ASCII)


class Paths(Protocol):
    """The files below a folder, each with its number: of a sample, or of a row of the manifest."""

    def find(self, path: str) -> int | None:
        """Return the number of a file; None if there is no such file."""

    def names(self, folder: str) -> Iterator[tuple[str, int | None]] | None:
        """Return the names in a folder with their numbers, None for those of folders; None if there is no such one."""


class OrderedPaths(Paths, Protocol):
    """Paths whose files have ascending numbers in each folder."""

    def numbers(self, folder: str) -> Sequence[int]:
        """Return the numbers of the files in a folder, ascending."""

    def all_names(self) -> Iterator[str]:
        """Return all names of files and folders, or those of them that may be the longest."""


class NumberedPaths:
    """Paths of samples that have nothing but the number of the sample: they are computed, and take no memory.

    Args:
        numbering: text before and after the number, and its format.
        samples: number of samples.
    """

    def __init__(self, numbering: tuple[str, str, str], samples: int) -> None:
        self._before, self._after, self._spec = numbering
        self._samples = samples
        self._folder, _, self._prefix = self._before.rpartition("/")

    def find(self, path: str) -> int | None:
        """Return the number of a sample."""
        digits = path.removeprefix(self._before).removesuffix(self._after)
        if not digits.isascii() or not digits.isdecimal() or len(digits) > 128:
            return None
        number = int(digits)
        is_path = number < self._samples and path == f"{self._before}{format(number, self._spec)}{self._after}"
        return number if is_path else None

    def names(self, folder: str) -> Iterator[tuple[str, int | None]] | None:
        """Return the names in a folder."""
        if folder == self._folder:
            prefix, spec, after = self._prefix, self._spec, self._after
            return ((f"{prefix}{format(number, spec)}{after}", number) for number in range(self._samples))
        if self._folder.startswith(f"{folder}/"):
            below = self._folder[len(folder) + 1 :].partition("/")[0]
            return iter([(below, None)])
        return None

    def numbers(self, folder: str) -> range:
        """Return the numbers of the files in a folder."""
        return range(self._samples if folder == self._folder else 0)

    def all_names(self) -> Iterator[str]:
        """Return the names of the folders, and the name of the last sample."""
        last = format(max(0, self._samples - 1), self._spec)
        return iter([*self._folder.split("/"), f"{self._prefix}{last}{self._after}"])


class SamplePaths:
    """Paths of samples that depend on their values; takes about 200 bytes a sample.

    Args:
        template: template of the paths, for messages.
    """

    def __init__(self, template: PathTemplate) -> None:
        self._template = template
        self._folders: dict[str, dict[str, int]] = {SAMPLES: {}}
        self._numbers: dict[str, array[int]] = {}

    def add(self, path: str, number: int) -> None:
        """Add the file of a sample, and the folders above it.

        Raises:
            ConfigError: the path is that of another sample, or one of both paths is a folder of the other.
        """
        folder, _, name = path.rpartition("/")
        names = self._folders.get(folder)
        if names is None:
            names = self._add_folder(folder, number)
        other = names.setdefault(name, number)
        if other == _FOLDER:
            raise self._conflict(path, number, f"and sample {self._first_below(path)} is a file in it")
        if other != number:
            raise self._conflict(path, other, f"and so would sample {number}")

    def _add_folder(self, folder: str, number: int) -> dict[str, int]:
        parts = folder.split("/")
        for end in range(1, len(parts)):
            above, name = "/".join(parts[:end]), parts[end]
            other = self._folders[above].setdefault(name, _FOLDER)
            if other != _FOLDER:
                raise self._conflict(f"{above}/{name}", other, f"and sample {number} would be a file in it")
            self._folders.setdefault(f"{above}/{name}", {})
        return self._folders[folder]

    def _first_below(self, folder: str) -> int:
        name, number = next(iter(self._folders[folder].items()))
        return self._first_below(f"{folder}/{name}") if number == _FOLDER else number

    def _conflict(self, path: str, number: int, other: str) -> ConfigError:
        return ConfigError(
            f"sample {number} would be the file {path!r}, {other}: add {{__id__}} to the template "
            f"{self._template.text!r}, or another column that tells them apart"
        )

    def find(self, path: str) -> int | None:
        """Return the number of a sample."""
        folder, _, name = path.rpartition("/")
        number = self._folders.get(folder, {}).get(name, _FOLDER)
        return None if number == _FOLDER else number

    def names(self, folder: str) -> Iterator[tuple[str, int | None]] | None:
        """Return the names in a folder."""
        if folder not in self._folders:
            return None
        return ((name, None if number == _FOLDER else number) for name, number in self._folders[folder].items())

    def numbers(self, folder: str) -> Sequence[int]:
        """Return the numbers of the files in a folder, which takes 8 bytes a file from then on."""
        if (found := self._numbers.get(folder)) is None:
            found = array("q", (each for each in self._folders.get(folder, {}).values() if each != _FOLDER))
            self._numbers[folder] = found
        return found

    def all_names(self) -> Iterator[str]:
        """Return all names."""
        return chain.from_iterable(self._folders.values())


class ObjectPaths:
    """Paths of the objects of a data set: ``objects/`` and the key.

    Args:
        manifest: index of the data set.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._runs: dict[str, list[tuple[range, int]]] = {}
        row = 0
        for run in manifest.runs:
            numbers = range(run.first_number, run.first_number + run.rows)
            self._runs.setdefault(run.run, []).append((numbers, row))
            row += run.rows

    def find(self, path: str) -> int | None:
        """Return the manifest row of an object."""
        if (match := _OBJECT.fullmatch(path)) is None or len(match[2]) > 12:
            return None
        number = int(match[2])
        rows = (row + number - numbers.start for numbers, row in self._runs.get(match[1], ()) if number in numbers)
        return next(rows, None) if match[2] == f"{number:08d}" else None

    def names(self, folder: str) -> Iterator[tuple[str, int | None]] | None:
        """Return the names in a folder."""
        if folder == OBJECTS:
            return iter([("data", None)])
        if folder == f"{OBJECTS}/data":
            return ((run, None) for run in self._runs)
        if (intervals := self._runs.get(folder.removeprefix(f"{OBJECTS}/data/"))) is None:
            return None
        if not folder.startswith(f"{OBJECTS}/data/"):
            return None
        return chain.from_iterable(
            ((f"{number:08d}", row + number - numbers.start) for number in numbers) for numbers, row in intervals
        )
