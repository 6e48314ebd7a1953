"""The reading part of fsspec's own suite for file systems, on a packed data set whose files it expects."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from hashlib import md5
from typing import Any
from unittest.mock import patch

import pytest
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests, AbstractOpenTests

import stoker
from stoker.files import DatasetFileSystem

BULK = ("file1", "file2", "subdir/subfile1", "subdir/subfile2", "subdir/nesteddir/nestedfile")
GLOB = ("file1", "file2", *(f"subdir{n}/{name}" for n in "01" for name in ("subfile1", "subfile2")))
SCENARIOS = {
    "bulk": dict.fromkeys(BULK, b""),
    "glob": dict.fromkeys((*GLOB, *(f"subdir{n}/nesteddir/nestedfile" for n in "01")), b""),
    "prefix": dict.fromkeys(("subdir.txt", "subdir/subfile.txt"), b""),
    "hashed": {f"{md5(str(n).encode(), usedforsecurity=False).hexdigest()}.txt": b"%d" % n for n in range(10)},
    "target": {"": b"data"},
    "recursive/src": {"file": b""},
}
"""Name → the files that the suite's scenario of this name has, by their paths below its folder."""


@pytest.fixture(scope="module")
def file_system() -> Iterator[DatasetFileSystem]:
    url = "memory://files-suite/ds"
    with stoker.Packer(url, schema={"name": stoker.Text(), "data": stoker.Bytes()}, mode="overwrite") as packer:
        for scenario, files in SCENARIOS.items():
            for name, data in files.items():
                folder = scenario if "/" in scenario else f"{scenario}/source"
                packer.write({"name": f"{folder}/{name}".rstrip("/"), "data": data})
    yield DatasetFileSystem(url, template="samples/{name}")
    gc.collect()  # its open files refer to themselves


class Fixtures(AbstractFixtures):
    """The packed scenarios, in place of those that the suite writes; the names are fsspec's."""

    @pytest.fixture
    def fs(self, file_system: DatasetFileSystem) -> DatasetFileSystem:
        return file_system

    @pytest.fixture
    def fs_path(self) -> str:
        return "samples/recursive"

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def fs_bulk_operations_scenario_0(self) -> str:
        return "samples/bulk/source"

    @pytest.fixture
    def fs_glob_edge_cases_files(self) -> str:
        return "samples/glob/source"

    @pytest.fixture
    def fs_dir_and_file_with_same_name_prefix(self) -> str:
        return "samples/prefix/source"

    @pytest.fixture
    def fs_10_files_with_hashed_names(self) -> str:
        return "samples/hashed/source"

    @pytest.fixture
    def fs_target(self) -> str:
        return "samples/target/source"


class TestGet(AbstractGetTests, Fixtures):
    def test_get_directory_recursive(
        self, fs: Any, fs_join: Any, fs_path: Any, local_fs: Any, local_join: Any, local_target: Any
    ) -> None:
        """The suite's; what it writes first is packed."""
        with patch.object(fs, "mkdir"), patch.object(fs, "touch"):
            super().test_get_directory_recursive(fs, fs_join, fs_path, local_fs, local_join, local_target)


class TestOpen(AbstractOpenTests, Fixtures):
    def test_open_exclusive(self, fs: DatasetFileSystem, fs_target: str) -> None:
        """As the suite's, but for the file that it writes: this one is packed."""
        with fs.open(fs_target, "rb") as file:
            assert file.read() == b"data"
        with pytest.raises(FileExistsError):
            fs.open(fs_target, "xb")
