"""The operations of a mounted data set, called as the FUSE library does, without a mount."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import stoker
from stoker import Array, Bytes, Column, Ragged, Text
from stoker._files import blocks, mounted
from stoker._files.mounted import MountedFiles
from stoker._files.packed import FileSettings, PackedFiles
from stoker.errors import ConfigError
from stoker.files import DatasetFileSystem

SCHEMA: dict[str, Column] = {
    "image": Bytes(),
    "label": Array("int64", classes=("cat", "dog", "øre")),
    "name": Text(),
    "boxes": Ragged("float32", (4,)),
}
COUNT = 90
MEMORY = "256MB"
_names = itertools.count()


def sample_of(number: int) -> dict[str, Any]:
    return {
        "image": random.Random(number).randbytes(number * 37 % 500),
        "label": number % 3,
        "name": f"né {number}",
        "boxes": np.full((number % 4, 4), number, np.float32),
    }


def pack(samples: Any, schema: dict[str, Column] = SCHEMA, super_sample_bytes: int = 3000) -> str:
    url = f"memory://mounted-{next(_names)}/ds"
    with stoker.Packer(url, schema=schema, super_sample_bytes=super_sample_bytes) as packer:
        packer.extend(samples)
    return url


@pytest.fixture(scope="module")
def url() -> str:
    return pack(map(sample_of, range(COUNT)))


Mounted = Callable[..., MountedFiles]


@pytest.fixture
def files_of() -> Iterator[Mounted]:
    """Return a function that returns the operations of a data set; they are closed at the end."""
    opened: list[MountedFiles] = []

    def create(url: str, *, cache_bytes: int = 1 << 20, **settings: Any) -> MountedFiles:
        fetch = stoker.FetchConfig(hedge=False, backoff_base_seconds=1e-6, backoff_cap_seconds=1e-5)
        defaults = {"template": None, "content": None, "version": None, "memory": MEMORY, "options": None}
        files = PackedFiles(FileSettings(**{"url": url, "fetch": fetch, **defaults, **settings}))
        opened.append(MountedFiles(files, cache_bytes))
        return opened[-1]

    yield create
    for each in opened:
        each.close(lambda: None)


@pytest.fixture(autouse=True, scope="module")
def no_threads_stay() -> Iterator[None]:
    """Collect the file systems that open files refer to in circles."""
    yield
    gc.collect()


def contents(files: MountedFiles, path: str, step: int = 1 << 17) -> bytes:
    """Read a file as the kernel does."""
    parts = [files.read(path, step, start, 0) for start in range(0, max(1, files.getattr(path)["st_size"]), step)]
    return b"".join(parts)


def tree(files: MountedFiles, folder: str = "/") -> dict[str, dict[str, int]]:
    """Return the attributes of all files and folders below a folder."""
    found = {}
    for name, listed, _ in files.readdir(folder, 0):
        if name not in (".", ".."):
            path = f"{folder.rstrip('/')}/{name}"
            found[path] = attributes = files.getattr(path)
            assert stat.S_IFMT(attributes["st_mode"]) == listed["st_mode"]
            assert attributes["st_ino"] == listed["st_ino"]
            if stat.S_ISDIR(attributes["st_mode"]):
                found |= tree(files, path)
    return found


@pytest.mark.parametrize("content", list(SCHEMA))
@pytest.mark.parametrize("template", [None, "samples/{label!c}/{name}.x", "samples/a/b/{__id__:04d}"])
def test_files_and_sizes_are_those_of_the_file_system_for_fsspec(
    url: str, files_of: Mounted, template: str | None, content: str
) -> None:
    files = files_of(url, template=template, content=content)
    other = DatasetFileSystem(url, template=template, content=content)
    found = {path[1:]: each["st_size"] for path, each in tree(files).items() if stat.S_ISREG(each["st_mode"])}
    assert found == {path: info["size"] for path, info in other.find("", detail=True).items()}
    for path, data in other.cat(other.find("samples")).items():
        assert contents(files, f"/{path}", 100) == data


def test_attributes_say_read_only_and_are_always_the_same(url: str, files_of: Mounted) -> None:
    files = files_of(url, template="samples/{label}/{__id__}", content="image")
    found = tree(files)
    assert {oct(stat.S_IMODE(each["st_mode"])) for each in found.values()} == {"0o555", "0o444"}
    assert {each["st_uid"] for each in found.values()} == {os.getuid()}
    assert {each["st_mtime"] for each in found.values()} == {315_619_200_000_000_000}
    assert len({each["st_ino"] for each in found.values()} | {files.getattr("/")["st_ino"]}) == len(found) + 1
    assert found == tree(files)
    size = sample_of(7)["image"]
    assert files.getattr("/samples/1/7")["st_blocks"] == -(-len(size) // 512)


def test_listings_are_in_the_order_of_the_inodes(url: str, files_of: Mounted) -> None:
    files = files_of(url, template="samples/{label}/{__id__}", content="image")
    inodes = [each["st_ino"] for name, each, _ in files.readdir("/samples/2", 0) if name not in (".", "..")]
    assert inodes == sorted(inodes)


def test_objects_are_the_super_samples(url: str, files_of: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounted, "_PART_BYTES", 700)
    files = files_of(url, content="image")
    with stoker.open(url) as dataset:
        wanted = {f"/objects/{dataset.manifest.key(row)}": dataset.read_object(row) for row in range(3)}
    for path, data in wanted.items():
        assert contents(files, path, 512) == data
        assert files.read(path, 10**6, 650, 0) == data[650:]
        assert files.read(path, 100, 10**6, 0) == b""


def test_reads_beyond_the_end_are_empty(url: str, files_of: Mounted) -> None:
    files = files_of(url, content="image")
    data = sample_of(7)["image"]
    assert files.read("/samples/00000007", 1 << 17, 0, 0) == data
    assert files.read("/samples/00000007", 10, len(data) - 3, 0) == data[-3:]
    assert files.read("/samples/00000007", 10, len(data), 0) == b""
    assert files.getattr("/samples/00000000")["st_size"] == 0
    assert files.read("/samples/00000000", 10, 0, 0) == b""


def test_what_is_missing_or_would_be_written_has_the_error_of_a_read_only_file_system(
    url: str, files_of: Mounted
) -> None:
    files = files_of(url, content="image")
    attempts: list[tuple[int, Callable[[], object]]] = [
        (errno.ENOENT, lambda: files.getattr("/samples/none")),
        (errno.ENOENT, lambda: files.getattr("/other")),
        (errno.ENOENT, lambda: files.getattr("/samples/00000007\udcff")),
        (errno.ENOENT, lambda: list(files.readdir("/samples/none", 0))),
        (errno.ENOENT, lambda: files.read("/samples/none", 1, 0, 0)),
        (errno.EROFS, lambda: files.open("/samples/00000007", os.O_WRONLY)),
        (errno.EROFS, lambda: files.open("/samples/00000007", os.O_RDWR | os.O_TRUNC)),
    ]
    for number, attempt in attempts:
        with pytest.raises(OSError) as failure:  # noqa: PT011 - its number is checked
            attempt()
        assert failure.value.errno == number


def test_on_linux_the_kernel_is_told_to_open_files_by_itself(
    url: str, files_of: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of(url, content="image")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    with pytest.raises(OSError, match="not implemented") as failure:
        files.open("/samples/00000007", os.O_RDONLY)
    assert failure.value.errno == errno.ENOSYS
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert files.open("/samples/00000007", os.O_RDONLY) == 0


def test_the_file_system_is_as_large_as_the_data_set_and_full(url: str, files_of: Mounted) -> None:
    found = files_of(url, content="image").statfs("/")
    with stoker.open(url) as dataset:
        assert found["f_blocks"] * found["f_frsize"] - dataset.manifest.size_bytes in range(512)
        assert found["f_files"] == COUNT + len(dataset.manifest)
    assert "f_bfree" not in found


def test_samples_are_read_ahead_in_the_order_of_a_folder(
    url: str, files_of: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[int]] = []
    read = PackedFiles.read_samples

    def watched(self: PackedFiles, numbers: Any) -> list[bytes]:
        calls.append(list(numbers))
        return read(self, numbers)

    monkeypatch.setattr(PackedFiles, "read_samples", watched)
    files = files_of(url, template="samples/{label!c}/{__id__}", content="image")
    for number in range(1, COUNT, 3):
        assert contents(files, f"/samples/dog/{number}") == sample_of(number)["image"]
    assert sorted(number for call in calls for number in call) == list(range(1, COUNT, 3))
    assert len(calls) == 5  # 1, 2, 4, 8 and the other 15


def test_large_samples_are_read_in_smaller_blocks(url: str, files_of: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounted, "_MAX_BLOCK_BYTES", 1000)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 10**9)
    sizes: list[int] = []
    read = PackedFiles.read_samples

    def watched(self: PackedFiles, numbers: Any) -> list[bytes]:
        found = read(self, numbers)
        sizes.append(sum(map(len, found)))
        return found

    monkeypatch.setattr(PackedFiles, "read_samples", watched)
    files = files_of(url, content="image")
    for number in range(COUNT):
        assert contents(files, f"/samples/{number:08d}") == sample_of(number)["image"]
    assert max(sizes) <= 1000
    assert sum(sizes) == sum(len(sample_of(number)["image"]) for number in range(COUNT))


def test_sizes_of_consecutive_super_samples_are_read_ahead(
    url: str, files_of: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    read = stoker.Dataset.value_sizes

    def watched(self: stoker.Dataset, column: str, numbers: Any) -> Any:
        calls.append(len(numbers))
        return read(self, column, numbers)

    monkeypatch.setattr(stoker.Dataset, "value_sizes", watched)
    files = files_of(url, content="image")
    with stoker.open(url) as dataset:
        assert len(dataset.manifest) > 5
    for number in range(COUNT):
        files.getattr(f"/samples/{number:08d}")
    assert (len(calls), sum(calls)) == (2, COUNT)


def test_threads_read_at_the_same_time(url: str, files_of: Mounted) -> None:
    files = files_of(url, template="samples/{label}/{__id__}", content="image", cache_bytes=20_000)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            number = rng.randrange(COUNT)
            path = f"/samples/{number % 3}/{number}"
            assert contents(files, path, rng.randrange(1, 300)) == sample_of(number)["image"]
            assert len(list(files.readdir(f"/samples/{number % 3}", 0))) == COUNT // 3 + 2

    with ThreadPoolExecutor(8) as threads:
        for each in [threads.submit(work, seed) for seed in range(8)]:
            each.result(60)


def test_a_folder_of_100_000_files_is_listed_and_measured_quickly(files_of: Mounted) -> None:
    count = 100_000
    samples = ({"data": b"x" * (number % 7), "name": f"{number}"} for number in range(count))
    url = pack(samples, {"data": Bytes(), "name": Text()}, super_sample_bytes=1 << 20)
    for template in ("samples/{__id__:08d}", "samples/{name}"):
        files = files_of(url, template=template, content="data")
        begun = time.process_time()
        names = [name for name, _, _ in files.readdir("/samples", 0)]
        assert len(names) == count + 2
        for name in names[2:]:
            files.getattr(f"/samples/{name}")
        assert time.process_time() - begun < 20


def test_a_damaged_file_is_an_input_output_error_that_the_log_explains_and_others_are_read(
    files_of: Mounted, caplog: pytest.LogCaptureFixture
) -> None:
    url = pack([{"data": name} for name in (b"a", b"bb", b"c")], {"data": Bytes()})
    files = files_of(url)
    (path,) = (path for path in tree(files) if path.startswith("/objects/data/") and path.count("/") == 4)
    key = path.removeprefix("/objects/")

    async def change(old: bytes, new: bytes) -> None:
        store = stoker.open_store(url)
        await store.put(key, bytes((await store.get(key))[0]).replace(old, new))

    asyncio.run(change(b"bb", b"bx"))
    with pytest.warns(stoker.CopiedBucketWarning):
        assert contents(files, "/samples/00000000") == b"a"
    for _ in range(2):
        with pytest.raises(OSError) as failure:  # noqa: PT011 - its number is checked
            contents(files, "/samples/00000001")
        assert failure.value.errno == errno.EIO
    assert [each for each in caplog.messages if "cannot read" in each] == [caplog.messages[-1]]
    assert "cannot read samples/00000001: " in caplog.text
    assert contents(files, "/samples/00000002") == b"c"
    with pytest.raises(OSError, match="Input/output error"):
        contents(files, "/samples/00000001")
    assert caplog.text.count("cannot read samples/00000001") == 2
    asyncio.run(change(b"bx", b"bb"))
    assert contents(files, "/samples/00000001") == b"bb"


def test_sizes_that_cannot_be_read_are_an_input_output_error(
    url: str, files_of: Mounted, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of(url, content="image")

    def fail(*_: Any) -> None:
        raise stoker.NotFoundError("the object is gone")

    monkeypatch.setattr(stoker.Dataset, "value_sizes", fail)
    with pytest.raises(OSError, match="Input/output error"):
        files.getattr("/samples/00000003")
    assert "cannot read samples/00000003: the object is gone" in caplog.text


def test_reading_a_file_again_for_want_of_memory_is_logged_once(
    url: str, files_of: Mounted, caplog: pytest.LogCaptureFixture
) -> None:
    files = files_of(url, content="image", cache_bytes=1)
    for start in range(0, 40, 10):
        for number in (10, 30, 50):
            part = files.read(f"/samples/{number:08d}", 10, start, 0)
            assert part == sample_of(number)["image"][start : start + 10]
    assert [each for each in caplog.messages if "raise --memory" in each] == [caplog.messages[0]]


def test_a_closed_data_set_ends_the_requests_and_reads_nothing(
    url: str, files_of: Mounted, caplog: pytest.LogCaptureFixture
) -> None:
    files, ended = files_of(url, content="image"), []
    files.close(lambda: ended.append(True))
    assert ended == []
    with pytest.raises(OSError, match="not connected"):
        files.getattr("/samples/any")
    assert ended == [True]
    with pytest.raises(OSError, match="Input/output error"):
        files.read("/samples/00000003", 10, 0, 0)
    assert caplog.messages == []


def test_names_that_no_file_system_holds_are_refused(files_of: Mounted) -> None:
    url = pack([{"name": "é" * 128, "data": b""}], {"name": Text(), "data": Bytes()})
    with pytest.raises(ConfigError, match=r"'samples/\{name\}' gives a name of 256 bytes, 'ééé.* permits 255"):
        files_of(url, template="samples/{name}", content="data")
    with pytest.raises(ConfigError, match="a name of 256 bytes"):
        files_of(url, template="samples/{name}/x", content="data")
    with pytest.raises(ConfigError, match="a name of 301 bytes"):
        files_of(url, template="samples/" + "x" * 300 + "{__id__}", content="data")
