from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import stoker
from stoker import Array, Bytes, Column, Dataset, Ragged, Text
from stoker._files import packed
from stoker._files.packed import PackedFiles
from stoker._files.paths import NumberedPaths, SamplePaths
from stoker._files.template import PathTemplate
from stoker._format.manifest import POINTER_KEY, Manifest
from stoker._stores.object_store import MemoryStore
from stoker.errors import ArgumentError, ConfigError, FormatError, NotFoundError, StokerError
from stoker.files import DatasetFileSystem

SCHEMA: dict[str, Column] = {
    "image": Bytes(),
    "label": Array("int64", classes=("cat", "dog", "øre")),
    "score": Array("float32"),
    "name": Text(),
    "pixels": Array("uint8", (2, 3)),
    "flat": Array("uint8", (5,)),
    "boxes": Ragged("float32", (4,)),
    "codes": Ragged("uint8"),
}
COUNT = 90
_names = itertools.count()


def sample_of(number: int) -> dict[str, Any]:
    return {
        "image": b"\xff\xd8" * (number % 11),
        "label": number % 3,
        "score": number / 4,
        "name": f"né {number}",
        "pixels": np.full((2, 3), number, np.uint8),
        "flat": np.arange(5, dtype=np.uint8) + np.uint8(number),
        "boxes": np.full((number % 4, 4), number, np.float32),
        "codes": np.arange(number % 5, dtype=np.uint8),
    }


def pack(samples: Iterable[Mapping[str, Any]], schema: Mapping[str, Column] = SCHEMA) -> str:
    url = f"memory://files-{next(_names)}/ds"
    with stoker.Packer(url, schema=schema, super_sample_bytes=3000) as packer:
        packer.extend(samples)
    return url


def pack_named(*names: str) -> str:
    schema = {"name": Text(), "data": Bytes()}
    return pack(({"name": name, "data": name.encode()} for name in names), schema)


@pytest.fixture(scope="module")
def url() -> str:
    return pack(map(sample_of, range(COUNT)))


@pytest.fixture(autouse=True, scope="module")
def no_threads_stay() -> Iterator[None]:
    """Collect the file systems that frames of caught exceptions and open files refer to in circles."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def registered() -> None:
    fsspec.register_implementation("stoker", DatasetFileSystem, clobber=True)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Ranges of objects that are read from memory stores."""
    found: list[tuple[str, int, int]] = []
    read = MemoryStore.get_range

    async def watched(self: MemoryStore, key: str, start: int, end: int, **settings: Any) -> Any:
        if key.startswith("data/"):
            found.append((key, start, end))
        return await read(self, key, start, end, **settings)

    monkeypatch.setattr(MemoryStore, "get_range", watched)
    return found


# What there is.


def test_the_root_has_samples_and_objects(url: str) -> None:
    files = DatasetFileSystem(url)
    assert files.ls("", detail=False) == files.ls("/", detail=False) == ["objects", "samples"]
    assert [each["type"] for each in files.ls("stoker://")] == ["directory", "directory"]
    assert files.info("")["type"] == "directory"


def test_samples_have_their_numbers_as_names_unless_a_template_says_more(url: str) -> None:
    assert DatasetFileSystem(url).ls("samples", detail=False) == [f"samples/{n:08d}" for n in range(COUNT)]
    assert DatasetFileSystem(url, content="name").ls("samples", detail=False)[3] == "samples/00000003.txt"
    assert DatasetFileSystem(url, content="boxes").ls("samples", detail=False)[3] == "samples/00000003.npy"


def test_a_template_makes_folders_of_columns(url: str) -> None:
    files = DatasetFileSystem(url, template="samples/{label!c}/{score:06.2f}-{{{name}}}.jpg")
    assert files.ls("samples", detail=False) == ["samples/cat", "samples/dog", "samples/øre"]
    assert files.ls("samples/dog", detail=False)[:2] == [
        "samples/dog/000.25-{né 1}.jpg",
        "samples/dog/001.00-{né 4}.jpg",
    ]
    assert files.cat("samples/øre/000.50-{né 2}.jpg") == sample_of(2)["image"]
    assert files.info("samples/øre/000.50-{né 2}.jpg") == {
        "name": "samples/øre/000.50-{né 2}.jpg",
        "size": 4,
        "type": "file",
        "sample": 2,
    }


@pytest.mark.parametrize("content", list(SCHEMA))
def test_listed_sizes_are_those_of_the_files(url: str, content: str) -> None:
    files = DatasetFileSystem(url, content=content, template="samples/{label}/{__id__}")
    listed = files.find("samples", detail=True)
    assert len(listed) == COUNT
    assert {name: info["size"] for name, info in listed.items()} == {
        name: len(data) for name, data in files.cat("samples", recursive=True).items()
    }
    one = DatasetFileSystem(url, content=content)
    name = one.ls("samples", detail=False)[7]
    assert one.size(name) == len(one.cat(name))


def test_contents_are_the_values(url: str) -> None:
    for content in ("image", "flat", "codes"):
        files = DatasetFileSystem(url, content=content)
        assert files.cat("samples/00000009") == bytes(sample_of(9)[content])
    assert DatasetFileSystem(url, content="name").cat("samples/00000009.txt") == "né 9".encode()
    for content in ("label", "pixels", "boxes"):
        with DatasetFileSystem(url, content=content).open("samples/00000009.npy") as file:
            found, wanted = np.load(file), np.asarray(sample_of(9)[content])
        assert (found.shape, found.tolist()) == (wanted.shape, wanted.tolist())


def test_objects_are_the_super_samples(url: str) -> None:
    files = DatasetFileSystem(url)
    with stoker.open(url) as dataset:
        manifest, whole = dataset.manifest, dataset.read_object(1)
    found = files.find("objects", detail=True)
    assert list(found) == [f"objects/{manifest.key(row)}" for row in range(len(manifest))]
    assert [info["size"] for info in found.values()] == manifest.rows.size_bytes.tolist()
    path = f"objects/{manifest.key(1)}"
    assert files.info(path) == {"name": path, "size": len(whole), "type": "file", "row": 1, "tag": manifest.rows.tag(1)}
    assert files.cat(path) == whole
    with files.open(path, block_size=64) as file:
        assert file.seek(-7, 2) == len(whole) - 7
        assert file.read() == whole[-7:]
        assert file.seek(3) == 3
        assert file.read(10) == whole[3:13]
    for start, end in ((None, 5), (3, -3), (-4, None), (9, 2), (0, 10**9), (-(10**9), 4)):
        assert files.cat_file(path, start, end) == whole[start:end]


def test_a_data_set_of_several_runs_has_the_objects_of_all() -> None:
    url = pack_named("a", "b")
    with stoker.Packer(url, schema={"name": Text(), "data": Bytes()}, mode="append") as packer:
        packer.write({"name": "c", "data": b"c"})
    files = DatasetFileSystem(url, template="samples/{name}")
    assert len(files.ls("objects/data")) == len(files.find("objects")) == 2
    assert files.ls("samples", detail=False) == ["samples/a", "samples/b", "samples/c"]
    assert DatasetFileSystem(url, version=1).find("samples") == ["samples/00000000", "samples/00000001"]


@pytest.mark.parametrize("template", [None, "samples/{label}/{__id__}", "samples/a/b/x{__id__:03d}"])
def test_glob_walk_and_find_agree(url: str, template: str | None) -> None:
    files = DatasetFileSystem(url, template=template)
    everything = files.find("")
    assert len([name for name in everything if name.startswith("samples/")]) == COUNT
    assert files.glob("samples/**") == files.find("samples", withdirs=True)
    assert sorted(name for folder, _, names in files.walk("") for name in map(f"{folder}/{{}}".format, names)) == (
        everything
    )
    for name in files.glob("samples/**/*7*"):
        assert files.exists(name)
    detailed = files.glob("samples/**/*7*", detail=True)
    assert detailed == {name: files.info(name) for name in detailed}
    assert files.find(everything[-1]) == [everything[-1]]
    assert files.find(everything[-1], detail=True) == {everything[-1]: files.info(everything[-1])}
    assert files.du("samples") == sum(len(data) for data in files.cat("samples", recursive=True).values())


# What is read.


def test_names_are_listed_without_reading_values_and_sizes_from_heads(
    url: str, ranges: list[tuple[str, int, int]]
) -> None:
    with stoker.open(url) as dataset:
        manifest = dataset.manifest
    heads = {(manifest.key(row), 0, int(manifest.rows.head_bytes[row])) for row in range(len(manifest))}
    fetch = stoker.FetchConfig(hedge=False)
    assert len(DatasetFileSystem(url, fetch=fetch).find("samples")) == COUNT
    assert ranges == []
    files = DatasetFileSystem(url, template="samples/{label}/{__id__}", fetch=fetch)
    assert len(files.glob("samples/*/*")) == COUNT
    assert (set(ranges), len(ranges)) == (heads, len(heads))
    files.ls("samples/1", detail=False)
    list(files.walk("samples"))
    assert len(ranges) == len(heads)
    ranges.clear()
    files.ls("samples/0")
    files.ls("samples/1")
    assert (set(ranges), len(ranges)) == (heads, len(heads))


def test_many_files_are_read_by_one_call(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = DatasetFileSystem(url)
    calls: list[int] = []
    read = Dataset.samples

    def count(self: Dataset, numbers: Any) -> list[dict[str, Any]]:
        calls.append(len(numbers))
        return read(self, numbers)

    monkeypatch.setattr(Dataset, "samples", count)
    paths = [f"samples/{number:08d}" for number in (5, 80, 3, 5)]
    assert files.cat(paths) == {path: sample_of(int(path[-8:]))["image"] for path in sorted(set(paths))}
    assert files.cat("samples/0000001?").keys() == {f"samples/{number:08d}" for number in range(10, 20)}
    assert files.cat([paths[0]]) == {paths[0]: sample_of(5)["image"]}
    assert calls == [3, 10, 1]


def test_copied_files_are_read_in_blocks(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = DatasetFileSystem(url, template="samples/{label!c}/{__id__:02d}")
    calls: list[int] = []
    read = PackedFiles.read_samples

    def count(self: PackedFiles, numbers: Any) -> list[bytes]:
        calls.append(len(numbers))
        return read(self, numbers)

    monkeypatch.setattr(PackedFiles, "read_samples", count)
    monkeypatch.setattr(packed, "_AHEAD_SAMPLES", 40)
    files.get("samples", f"{tmp_path}/all", recursive=True)
    assert calls == [40, 40, 10]
    wanted = {name: sample_of(int(name[-2:]))["image"] for name in files.find("samples")}
    found = {f"samples/{file.relative_to(tmp_path / 'all')}": file.read_bytes() for file in tmp_path.rglob("*/??")}
    assert found == wanted
    monkeypatch.setattr(packed, "_AHEAD_BYTES", 30)
    calls.clear()
    files.get("samples/cat/*", f"{tmp_path}/cats/")
    assert sum(calls) == len(list((tmp_path / "cats").iterdir())) == 30
    assert max(calls) < 30
    twice = ["stoker://samples/dog/01", "/samples/dog/01", files.find("objects")[0]]
    files.get(twice, [f"{tmp_path}/{number}" for number in range(3)])
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes() == sample_of(1)["image"]
    assert (tmp_path / "2").read_bytes() == files.cat(twice[2])
    files.get_file("samples/dog/04", tmp_path / "new" / "file")
    assert (tmp_path / "new" / "file").read_bytes() == sample_of(4)["image"]
    with pytest.raises(FileNotFoundError, match="samples/none"):
        files.get(["samples/dog/01", "samples/none"], [f"{tmp_path}/a", f"{tmp_path}/b"])


def test_cat_has_an_exception_in_place_of_a_missing_file_if_it_shall(url: str) -> None:
    files, good = DatasetFileSystem(url), "samples/00000004"
    with pytest.raises(FileNotFoundError, match="samples/none"):
        files.cat([good, "samples/none"])
    assert files.cat([good, "samples/none"], on_error="omit") == {good: sample_of(4)["image"]}
    found = files.cat([good, "samples/none", "samples"], on_error="return")
    assert {name: type(value) for name, value in found.items()} == {
        good: bytes,
        "samples": IsADirectoryError,
        "samples/none": FileNotFoundError,
    }
    assert set(files.cat("", recursive=True)) == set(files.find(""))


def test_a_damaged_sample_does_not_hide_the_others(tmp_path: Path) -> None:
    url = pack_named("a", "b")
    files = DatasetFileSystem(
        url, fetch=stoker.FetchConfig(hedge=False, backoff_base_seconds=1e-6, backoff_cap_seconds=1e-5)
    )
    (path,) = files.find("objects")

    async def spoil() -> None:
        store = stoker.open_store(url)
        data = bytearray((await store.get(path.removeprefix("objects/")))[0])
        data[data.rindex(b"b")] ^= 1
        await store.put(path.removeprefix("objects/"), data)

    asyncio.run(spoil())
    with pytest.warns(stoker.CopiedBucketWarning):
        found = files.cat("samples/*", on_error="return")
    kinds = {name: type(value) for name, value in found.items()}
    assert issubclass(kinds["samples/00000001"], StokerError), kinds
    with pytest.raises(StokerError):
        files.cat("samples/*")
    with pytest.raises(StokerError, match="row 1"):
        files.get("samples/*", f"{tmp_path}/copies/")
    assert (tmp_path / "copies" / "00000000").read_bytes() == b"a"


def test_an_open_file_seeks_and_reads_lines_and_text(url: str) -> None:
    files = DatasetFileSystem(url, content="name")
    with files.open("samples/00000012.txt") as file:
        assert file.read(3) == "né".encode()
        assert file.seek(-2, 2) == file.size - 2
        assert file.read() == b"12"
        assert file.seek(0) == file.tell() == 0
        assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
        assert list(file) == ["né 12".encode()]
    with files.open("samples/00000012.txt", "r", encoding="utf-8") as file:
        assert file.read() == "né 12"
    assert files.read_text("samples/00000012.txt", encoding="utf-8") == "né 12"
    assert (files.head("samples/00000012.txt", 2), files.tail("samples/00000012.txt", 2)) == (b"n\xc3", b"12")
    assert files.cat_file("samples/00000012.txt", -2) == b"12"


def test_a_file_may_be_empty(url: str) -> None:
    files = DatasetFileSystem(url)
    with files.open("samples/00000000") as file:
        assert (file.read(), file.read(1), file.size) == (b"", b"", 0)
    assert (files.cat("samples/00000000"), files.size("samples/00000000")) == (b"", 0)


# Where it is.


def test_fsspec_opens_a_data_set_by_option_or_chained_url(url: str, tmp_path: Path) -> None:
    with stoker.Packer(tmp_path / "ds", schema={"text": Text()}) as packer:
        packer.write({"text": "hello"})
    place = f"{tmp_path}/ds"
    for each in (place, f"file://{place}"):
        with fsspec.open(f"stoker://samples/00000000.txt::{each}") as file:
            assert file.read() == b"hello"
        with fsspec.open("stoker://samples/00000000.txt", url=each) as file:
            assert file.read() == b"hello"
    with fsspec.open(f"stoker://samples/1/7::{url}", template="samples/{label}/{__id__}") as file:
        assert file.read() == sample_of(7)["image"]
    assert [file.path for file in fsspec.open_files(f"stoker://samples/*1::{url}")] == [
        f"samples/{number:08d}" for number in range(1, COUNT, 10)
    ]
    assert fsspec.filesystem("stoker", fo=url) == DatasetFileSystem(url)


def test_a_chained_bucket_keeps_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    class Stop(Exception):  # noqa: N818 - not an error
        pass

    def stop(settings: Any) -> None:
        opened.append(settings.url)
        raise Stop

    monkeypatch.setattr("stoker.files.open_files", stop)
    with pytest.raises(Stop):
        fsspec.open("stoker://samples/00000012::s3://bucket/train/part")
    assert opened == ["s3://bucket/train/part"]
    with pytest.raises(ConfigError, match=r"key.*options=stoker.S3Options"):
        fsspec.open("stoker://samples/00000012::s3://bucket/train", s3={"key": "x", "secret": "y"})


def test_settings_that_do_not_fit_are_explained(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give url="):
        DatasetFileSystem()
    with pytest.raises(ConfigError, match="give url="):
        DatasetFileSystem(url, fo=url)
    with pytest.raises(ConfigError, match="must be a path or URL"):
        DatasetFileSystem(stoker.open_store(url))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="did you mean template="):
        DatasetFileSystem(url, templte="x")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="no column picture; its columns are image"):
        DatasetFileSystem(url, content="picture")
    with pytest.raises(ConfigError, match="several columns may be the files; name one by content=: a, b"):
        DatasetFileSystem(pack([{"a": 1, "b": 2}], {"a": Array("int64"), "b": Array("int64")}))
    with pytest.raises(NotFoundError):
        DatasetFileSystem(tmp_path / "nothing")


def test_a_place_without_samples_is_no_data_set() -> None:
    with pytest.raises(NotFoundError, match="memory://files-empty/ds"):
        DatasetFileSystem("memory://files-empty/ds")
    empty = Manifest.of("0" * 16, stoker.Schema(SCHEMA), []).to_bytes()

    async def write() -> None:
        await stoker.open_store("memory://files-empty/ds").put(POINTER_KEY, empty)

    asyncio.run(write())
    with pytest.raises(FormatError, match="the manifest has no super-sample"):
        DatasetFileSystem("memory://files-empty/ds")


def test_it_can_be_pickled_with_its_version_and_without_secrets(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-in-the-environment")
    files = DatasetFileSystem(url, template="samples/{label}/{__id__}", content="flat")
    path = files.find("samples")[0]
    data = pickle.dumps(files)
    other = pickle.loads(data)  # noqa: S301 - this test's own
    assert b"hidden" not in data
    assert (other, hash(other), other.fsid) == (files, hash(files), files.fsid)
    assert other._files is files._files
    assert other != DatasetFileSystem(url)
    assert other.cat(path) == files.cat(path)
    with pickle.loads(pickle.dumps(files.open(path))) as file:  # noqa: S301 - as above
        assert file.read() == files.cat(path)


def test_data_sets_with_other_credentials_are_not_shared() -> None:
    from stoker._files.packed import FileSettings

    kinds = [
        FileSettings(
            url="s3://bucket/train",
            template=None,
            content=None,
            version=1,
            memory=1,
            options=stoker.S3Options(access_key_id="key", secret_access_key=secret),
            fetch=stoker.FetchConfig(),
        )
        for secret in ("one", "two", "one")
    ]
    assert len(set(kinds)) == 2


def test_it_reads_after_a_fork_and_in_several_threads(url: str) -> None:
    files = DatasetFileSystem(url, template="samples/{label}/{__id__}")
    assert files.cat("samples/1/7") == sample_of(7)["image"]
    files._files._lock.acquire()  # as another thread of the parent may hold it
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if files.cat("samples/2/8") == sample_of(8)["image"] and files.size("samples/0/9") == 18:
                status = 0
        finally:
            os._exit(status)
    files._files._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with ThreadPoolExecutor(8) as pool:
        names = files.find("samples") * 3
        assert list(pool.map(files.size, names)) == [len(data) for data in pool.map(files.cat_file, names)]


def test_tokens_of_files_differ_by_data_set_version_and_column(url: str) -> None:
    kinds = [DatasetFileSystem(url), DatasetFileSystem(url, content="codes"), DatasetFileSystem(pack_named("a"))]
    assert len({files.ukey("samples/00000000") for files in kinds}) == 3
    assert kinds[0].ukey("samples/00000000") != kinds[0].ukey("samples/00000001")


# What there is not.


WRITES: list[Callable[[Any], object]] = [
    lambda files: files.open("samples/new", "wb"),
    lambda files: files.open("samples/00000000", "ab"),
    lambda files: files.open("samples/00000000", "r+b"),
    lambda files: files.open("samples/new", "w"),
    lambda files: files.open("samples/new", "xb"),
    lambda files: files.pipe("samples/new", b"x"),
    lambda files: files.pipe_file("samples/new", b"x"),
    lambda files: files.write_text("samples/new", "x"),
    lambda files: files.write_bytes("samples/new", b"x"),
    lambda files: files.put("/dev/null", "samples/new"),
    lambda files: files.put_file("/dev/null", "samples/new"),
    lambda files: files.upload("/dev/null", "samples/new"),
    lambda files: files.touch("samples/00000000"),
    lambda files: files.mkdir("samples/new"),
    lambda files: files.makedirs("samples/new", exist_ok=True),
    lambda files: files.mkdirs("samples/new"),
    lambda files: files.rmdir("samples"),
    lambda files: files.rm("samples/00000000"),
    lambda files: files.rm("samples", recursive=True),
    lambda files: files.rm_file("samples/00000000"),
    lambda files: files.delete("samples/00000000"),
    lambda files: files.cp("samples/00000000", "samples/new"),
    lambda files: files.copy("samples/00000000", "samples/new"),
    lambda files: files.cp_file("samples/00000000", "samples/new"),
    lambda files: files.mv("samples/00000000", "samples/new"),
    lambda files: files.rename("samples/00000000", "samples/new"),
]


@pytest.mark.parametrize("write", WRITES)
def test_it_is_read_only(url: str, write: Callable[[Any], object]) -> None:
    with pytest.raises(OSError, match=r"is read-only; to write a data set, use stoker\.Packer") as raised:
        write(DatasetFileSystem(url))
    assert raised.value.errno == errno.EROFS


@pytest.mark.parametrize(
    "path",
    [
        "samples/00000090",
        "samples/0000000",
        "samples/000000000",
        "samples/-0000001",
        "samples/+0000001",
        "samples/0000000\u0661",
        "samples/0000_001",
        "samples/00000001/x",
        "samples//00000001",
        "samples/../samples/00000001",
        "samples/./00000001",
        "samples/00000001\0",
        f"samples/{'9' * 5000}",
        "samplesx",
        "..",
        "other",
        "objects/data/0000000000000000/00000000",
        "objects/manifest.safetensors",
        "objects/data/../data",
        "data",
    ],
)
def test_another_path_is_not_found(url: str, path: str) -> None:
    files = DatasetFileSystem(url)
    assert not files.exists(path)
    assert not files.isfile(path)
    assert not files.isdir(path)
    for call in (files.info, files.ls, files.cat_file, files.open, files.cat):
        with pytest.raises(FileNotFoundError, match="has no such file") as raised:
            call(path)
        assert raised.value.filename == path
    assert files.find(path) == []


def test_a_folder_is_not_read(url: str) -> None:
    files = DatasetFileSystem(url)
    for call in (files.open, files.cat_file):
        with pytest.raises(IsADirectoryError):
            call("samples")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{__id__}", "must begin with samples/"),
        ("/samples/{__id__}", "must begin with samples/"),
        ("objects/{__id__}", "must begin with samples/"),
        (7, "must begin with samples/"),
        ("samples/{nmae}", "names 'nmae', which is no column; write __id__ or one of label, score, name"),
        ("samples/{}", "names '', which is no column"),
        ("samples/{0}", "names '0', which is no column"),
        ("samples/{name.__class__}", "which is no column"),
        ("samples/{name[0]}", "which is no column"),
        ("samples/{__id__.__class__.__mro__}", "which is no column"),
        ("samples/{image}", "'image', which is neither text nor one number"),
        ("samples/{pixels}", "'pixels', which is neither text nor one number"),
        ("samples/{boxes}", "'boxes', which is neither text nor one number"),
        ("samples/{name!r}", "'!c' shows the name of a class"),
        ("samples/{score!c}", "'!c' shows the name of a class"),
        ("samples/{label!c:>9}", "'!c' shows the name of a class"),
        ("samples/{name:08d}", "has the format '08d' for 'name'"),
        ("samples/{score:d}", "has the format 'd' for 'score'"),
        ("samples/{__id__:{label}}", "has the format"),
        ("samples/{__id__:099999999d}", "has the format"),
        ("samples/{__id__:.999999f}", "has the format"),
        ("samples/{__id__", "is not valid"),
        ("samples/}", "is not valid"),
    ],
)
def test_a_template_that_does_not_fit_is_explained(url: str, template: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        DatasetFileSystem(url, template=template)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    "name",
    ["..", ".", "../../etc/passwd", "a/../b", "/etc/passwd", "a//b", "a/", "", "a\0b", "a/" * 3000 + "b"],
)
def test_a_value_that_is_no_path_is_an_error_at_the_first_use(name: str) -> None:
    files = DatasetFileSystem(pack_named("fine", name), template="samples/{name}")
    for call in (files.exists, files.info, files.find, files.isfile, files.open):
        with pytest.raises(ConfigError, match=r"sample 1 would be the file 'samples/.*change the template"):
            call("samples")
    assert files.find("objects")


def test_slashes_of_text_make_folders_and_other_characters_are_names() -> None:
    names = ["a/b/c", "a/b/d", "a.b", "a[1]*?", "日本/é", "…", "...", "a\\b", "x\ny", "::", "stoker:"]
    files = DatasetFileSystem(pack_named(*names), template="samples/{name}")
    assert files.find("samples") == sorted(f"samples/{name}" for name in names)
    assert files.ls("samples/a/b", detail=False) == ["samples/a/b/c", "samples/a/b/d"]
    for name in names:
        assert files.cat(f"samples/{name}") == files.open(f"samples/{name}").read() == name.encode()


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a", "b", "a"], "sample 0 would be the file 'samples/a', and so would sample 2"),
        (["a", "b", "a/c"], "sample 0 would be the file 'samples/a', and sample 2 would be a file in it"),
        (["x/y/z", "b", "x"], "sample 2 would be the file 'samples/x', and sample 0 is a file in it"),
    ],
)
def test_two_samples_with_one_path_are_an_error_that_names_both(names: list[str], problem: str) -> None:
    files = DatasetFileSystem(pack_named(*names), template="samples/{name}")
    for _ in range(2):
        with pytest.raises(ConfigError) as raised:
            files.ls("samples")
        assert problem in str(raised.value)
        assert "add {__id__} to the template 'samples/{name}'" in str(raised.value)


def test_a_template_without_a_field_fits_one_sample() -> None:
    assert DatasetFileSystem(pack_named("a"), template="samples/only").cat("samples/only") == b"a"
    with pytest.raises(ConfigError, match="and so would sample 1"):
        DatasetFileSystem(pack_named("a", "b"), template="samples/only").ls("samples")


@pytest.mark.parametrize(
    "text", ["samples/{__id__}", "samples/{__id__:08d}.jpg", "samples/x/y-{__id__:03d}", "samples/1{__id__}0"]
)
def test_computed_paths_are_those_of_the_template(text: str) -> None:
    template = PathTemplate(text, {})
    assert template.numbering is not None
    computed, listed = NumberedPaths(template.numbering, 120), SamplePaths(template)
    for number in range(120):
        listed.add(template.path(number, {}), number)
    folder = text.rpartition("/")[0]
    for each in ("samples", folder, "samples/x", "sample", "samples/z", f"{folder}/q"):
        found, wanted = computed.names(each), listed.names(each)
        assert (found and sorted(found, key=str)) == (wanted and sorted(wanted, key=str))
    for number in range(-1, 121):
        path = template.path(number, {})
        assert computed.find(path) == listed.find(path)


@pytest.mark.parametrize("text", ["samples/{__id__:x}", "samples/{__id__}/a", "samples/{__id__}{__id__}", "samples/a"])
def test_paths_that_are_no_plain_numbers_are_not_computed(text: str) -> None:
    assert PathTemplate(text, {}).numbering is None


def test_a_data_set_without_use_is_closed() -> None:
    before = {thread for thread in threading.enumerate() if thread.name == "stoker-dataset"}
    files = DatasetFileSystem(pack_named("a", "b"), template="samples/{name}")
    files.find("samples")
    files.cat("samples/a")
    assert len([each for each in threading.enumerate() if each.name == "stoker-dataset" and each not in before]) == 1
    del files
    assert {thread for thread in threading.enumerate() if thread.name == "stoker-dataset"} <= before
