"""A packed data set as files: finds, lists, measures and reads them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from stoker._base.threads import fork_aware_objects
from stoker._dataset import Dataset
from stoker._fetch.config import FetchConfig
from stoker._files.contents import Contents
from stoker._files.paths import OBJECTS, NumberedPaths, ObjectPaths, OrderedPaths, Paths, SamplePaths
from stoker._files.template import SAMPLES, PathTemplate
from stoker._format.manifest import sample_starts
from stoker._stores import StoreOptions
from stoker.errors import StokerError

_BLOCK_SAMPLES = 8192
"""Samples whose path columns are read at a time."""
_BLOCK_ROWS = 1024
"""Super-samples whose heads are read at a time for the sizes of files."""
_AHEAD_ROWS = 64
"""Super-samples whose heads are read at a time for the size of one file, after that of the super-sample before."""
_AHEAD_SAMPLES, _AHEAD_BYTES = 1024, 32 << 20
"""Limits of a block that is read ahead; a single larger sample is a block of its own."""
_UNKNOWN = np.iinfo(np.uint32).max  # no sample has as many bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """Settings of a data set as files, which together identify it.

    Attributes:
        url: location of the data set.
        template: paths of the samples, or None for the default.
        content: name of the column whose values are the files, or None for the default.
        version: version of the manifest, or None for the newest.
        memory: memory of each reader, as for :class:`stoker.Dataset`.
        options: connection settings of the bucket.
        fetch: deadlines, retries, hedges and concurrency.
    """

    url: str
    template: str | None
    content: str | None
    version: int | None
    memory: int | str
    options: StoreOptions | None
    fetch: FetchConfig | None

    def open(self, columns: Sequence[str] | None) -> Dataset:
        """Open some columns of the data set."""
        return Dataset(
            self.url,
            columns=columns,
            version=self.version,
            memory=self.memory,
            options=self.options,
            fetch=self.fetch,
        )


class Entry(NamedTuple):
    """A file or a folder.

    Attributes:
        path: its path, without a slash at either end; empty for the root.
        branch: the folder of the root that it is in; empty for the root.
        number: number of the sample, or row of the object; None for a folder.
    """

    path: str
    branch: str
    number: int | None


class PackedFiles:
    """The files of one version of a data set. May be used from several threads, and after a fork.

    Args:
        settings: data set, and how to show it.

    Raises:
        ConfigError: a setting is invalid, or does not fit the data set's columns.
        NotFoundError: the URL has no data set, or the data set has no such version.
        MemoryBudgetError: the memory is too small.
    """

    def __init__(self, settings: FileSettings) -> None:
        if settings.content is None:
            with settings.open(None) as dataset:
                settings = replace(settings, version=dataset.manifest.version)
                content = Contents(None, dataset.schema).name
        else:
            content = settings.content
        self._dataset = settings.open([content])
        self.manifest = self._dataset.manifest
        self.settings = replace(settings, version=self.manifest.version)
        self.contents = Contents(content, self.manifest.schema)
        text = f"{SAMPLES}/{{__id__:08d}}{self.contents.suffix}" if settings.template is None else settings.template
        self.template = PathTemplate(text, self.manifest.schema)
        self._objects = ObjectPaths(self.manifest)
        self._starts = sample_starts(self.manifest.rows.samples)
        self._samples: OrderedPaths | None = None
        self._value_sizes: NDArray[np.uint32] | None = None
        self._lock = threading.Lock()
        fork_aware_objects.add(self)

    def reset_after_fork(self) -> None:
        """In a forked child, forget a lock that another thread of the parent may have held."""
        self._lock = threading.Lock()

    def find(self, path: str) -> Entry | None:
        """Return the file or folder at a path; None if there is none."""
        branch = path.partition("/")[0]
        if not path:
            return Entry("", "", None)
        if branch not in (SAMPLES, OBJECTS):
            return None
        paths = self._paths(branch)
        if (number := paths.find(path)) is None and paths.names(path) is None:
            return None
        return Entry(path, branch, number)

    def entries(self, folder: Entry) -> Iterator[Entry]:
        """Yield the files and folders in a folder."""
        if not folder.path:
            yield from (Entry(branch, branch, None) for branch in (OBJECTS, SAMPLES))
            return
        for name, number in self._paths(folder.branch).names(folder.path) or ():
            yield Entry(f"{folder.path}/{name}", folder.branch, number)

    def sizes(self, files: Sequence[Entry]) -> list[int]:
        """Return the sizes of files in bytes; samples' sizes are computed from heads, whose sizes are then known."""
        numbers = [each.number for each in files if each.branch == SAMPLES and each.number is not None]
        of_samples = iter(self.sample_sizes(numbers).tolist())
        object_bytes = self.manifest.rows.size_bytes
        return [next(of_samples) if each.branch == SAMPLES else int(object_bytes[each.number]) for each in files]

    def size(self, file: Entry) -> int:
        """Return the size of one file in bytes. Heads are read ahead if super-samples are visited in their order."""
        assert file.number is not None  # noqa: S101 - for type checkers: it is a file
        if file.branch == OBJECTS:
            return int(self.manifest.rows.size_bytes[file.number])
        if (known := self._value_sizes) is None or known[file.number] == _UNKNOWN:
            row = int(np.searchsorted(self._starts, file.number, "right")) - 1
            follows = known is not None and row > 0 and known[self._starts[row] - 1] != _UNKNOWN
            end = min(row + _AHEAD_ROWS, len(self.manifest)) if follows else row + 1
            self._sizes_of_values(self._starts[row:end])
        known = self._value_sizes
        assert known is not None  # noqa: S101 - for type checkers: it was just read
        return int(self.contents.file_sizes(known[file.number : file.number + 1].astype(np.int64))[0])

    def sample_sizes(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """Return the sizes of the files of samples, ``int64 [samples]``."""
        return self.contents.file_sizes(self._sizes_of_values(np.array(numbers, np.int64)))

    def sample_paths(self) -> OrderedPaths:
        """Return the paths of the samples.

        Raises:
            ConfigError: two samples have the same path, or the path of a sample is not one that a file can have.
        """
        with self._lock:
            if self._samples is None:
                self._samples = self._index_samples()
            return self._samples

    def read_samples(self, numbers: Sequence[int]) -> list[bytes]:
        """Return the files of samples, which are read concurrently."""
        samples = self._dataset.samples(np.array(numbers, np.int64))
        return [self.contents.encode(sample[self.contents.name]) for sample in samples]

    def read_object(self, row: int, start: int, end: int) -> bytes:
        """Return bytes ``[start, end)`` of an object."""
        return self._dataset.read_object(row, start, end)

    def close(self) -> None:
        """Close connections; concurrent reads raise StokerError, and a later one opens new connections."""
        self._dataset.close()

    def _paths(self, branch: str) -> Paths:
        return self._objects if branch == OBJECTS else self.sample_paths()

    def _index_samples(self) -> OrderedPaths:
        count = self.manifest.samples
        if (numbering := self.template.numbering) is not None:
            return NumberedPaths(numbering, count)
        paths = SamplePaths(self.template)
        if not self.template.columns:
            for number in range(count):
                paths.add(self.template.path(number, {}), number)
            return paths
        with self.settings.open(self.template.columns) as dataset:
            for start in range(0, count, _BLOCK_SAMPLES):
                block = dataset.samples(range(start, min(count, start + _BLOCK_SAMPLES)))
                for number, sample in enumerate(block, start):
                    paths.add(self.template.path(number, sample), number)
        return paths

    def _sizes_of_values(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(numbers):
            return numbers
        if (known := self._value_sizes) is None:
            known = self._value_sizes = np.full(self.manifest.samples, _UNKNOWN, np.uint32)
        missing = numbers[known[numbers] == _UNKNOWN]
        rows = np.unique(np.searchsorted(self._starts, missing, "right") - 1).tolist()
        for first in range(0, len(rows), _BLOCK_ROWS):
            ranges = [np.arange(*self._starts[row : row + 2]) for row in rows[first : first + _BLOCK_ROWS]]
            block = np.concatenate(ranges)
            known[block] = self._dataset.value_sizes(self.contents.name, block)
        return known[numbers].astype(np.int64)


class ReadAhead:
    """Reads many samples in order, in blocks of a few megabytes, each concurrently.

    Args:
        files: data set.
        paths: paths in the order in which they will be needed; those that are no samples are ignored.
    """

    def __init__(self, files: PackedFiles, paths: Sequence[str]) -> None:
        self._files = files
        found = (files.find(path) for path in paths)
        self._samples = [each for each in found if each and each.branch == SAMPLES and each.number is not None]
        self._places = {each.path: place for place, each in enumerate(self._samples)}
        self._data: dict[str, bytes] = {}

    def take(self, path: str) -> bytes | None:
        """Return a sample's file; None if the path is not one of the samples, or the block of it cannot be read."""
        if path not in self._data:
            if (place := self._places.get(path)) is None:
                return None
            self._data = self._read(self._samples[place : place + _AHEAD_SAMPLES])
        return self._data.pop(path, None)

    def _read(self, block: Sequence[Entry]) -> dict[str, bytes]:
        try:
            ends = np.cumsum(self._files.sizes(block))
            block = block[: max(1, int(np.searchsorted(ends, _AHEAD_BYTES, "right")))]
            data = self._files.read_samples([each.number for each in block if each.number is not None])
        except (OSError, StokerError):  # a read of the single sample says which one it is
            return {}
        return {each.path: value for each, value in zip(block, data, strict=True)}


_opened: WeakValueDictionary[FileSettings, PackedFiles] = WeakValueDictionary()
"""Data sets that file systems of this process use, by their settings with the version."""


def open_files(settings: FileSettings) -> PackedFiles:
    """Return a data set as files; file systems with the same settings and the same version share it.

    Raises:
        ConfigError: a setting is invalid, or does not fit the data set's columns.
        NotFoundError: the URL has no data set, or the data set has no such version.
        MemoryBudgetError: the memory is too small.
    """
    if settings.version is None or (files := _opened.get(settings)) is None:
        files = PackedFiles(settings)
        files = _opened.setdefault(files.settings, files)
    return files
