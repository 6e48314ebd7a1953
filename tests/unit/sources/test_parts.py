"""Parts of a source: all of them together are the whole, and each is what it was when it was cut."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker import Array, Bytes, RetryingStore, Schema, open_store
from stoker._sources import ObjectSource
from stoker._sources.folders import files_schema
from stoker._sources.parts import MAX_PART_OBJECTS, SourcePart, open_part, split_source
from stoker.abc import ObjectInfo, SourceListing, Store
from stoker.errors import ConfigError, NotFoundError, ObjectChangedError, PackError, SchemaError, StoreError
from support.places import look, put_all, read_all, tar_of, with_source, with_store

COMMON = SourcePart(
    dataset="memory://elsewhere",
    dataset_id="d" * 16,
    source="",
    kind="files",
    schema=files_schema(),
    super_sample_bytes=4000,
    job="a" * 16,
)


_serial = itertools.count()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def tar(first: int, last: int) -> bytes:
    members = [(f"{n:04d}.{end}", f"{n} {end}".encode()) for n in range(first, last) for end in ("jpg", "txt")]
    return tar_of(members)


SOURCES: dict[str, tuple[str, Mapping[str, bytes]]] = {
    "files": ("", {f"{n % 7}/ü{n:03d}": b"x" * n for n in range(120)}),
    "many files": ("", {f"{n:05d}": b"" for n in range(110)}),
    "image-folder": (
        "",
        {f"{'ca' if n % 2 else 'dog'}/{n:04d}.jpg": b"x" * (n % 50) for n in range(110)} | {"a.txt": b""},
    ),
    "npy": ("x.npy", {"x.npy": npy(np.arange(1000, dtype=np.int32).reshape(250, 4)), "y.npy": b""}),
    "npz": ("x.npz", {"x.npz": npz(a=np.arange(100), b=np.ones((100, 3), np.uint8))}),
    "tars": ("", {f"{n:02d}.tar": tar(10 * n, 10 * n + 10) for n in range(9)}),
    "a pattern of tars": ("{08..02}.tar", {f"{n:02d}.tar": tar(10 * n, 10 * n + 10) for n in range(9)}),
}


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "in put") if request.param == "local" else f"memory://parts-{next(_serial)}/in put"


@pytest.fixture(autouse=True)
def few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make parts of more than fifty objects ranges of keys, so that tests need no more objects."""
    monkeypatch.setattr("stoker._sources.parts._MAX_NAMED_OBJECTS", 50)


def parts_of(
    url: str, part_bytes: int, kind: str | None = None, *, follow_links: bool = False, **changes: Any
) -> list[SourcePart]:
    """Return the parts of a source as they arrive at a function: through JSON."""

    async def work(source: ObjectSource) -> list[SourcePart]:
        return [
            SourcePart.from_json(part.to_json())
            for part in split_source(source, replace(COMMON, **changes), part_bytes)
        ]

    found: list[SourcePart] = with_source(url, work, kind, follow_links=follow_links)
    return found


def samples_of(*parts: SourcePart, start: int = 0) -> list[dict[str, Any]]:
    """Return the samples of parts, one behind the other, of each from its number ``start`` on."""

    async def work(store: Store) -> list[dict[str, Any]]:
        samples: list[dict[str, Any]] = []
        for part in parts:
            opened = await open_part(part, RetryingStore(store))
            async with aclosing(opened.read(start)) as found:
                samples += [sample async for _, sample in found]
        return samples

    found: list[dict[str, Any]] = with_store(parts[0].source, work)
    return found


def plain(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in sample.items()}


@pytest.mark.parametrize("part_bytes", [1, 500, 3000, 1 << 30])
@pytest.mark.parametrize("name", SOURCES)
def test_all_parts_together_are_the_whole_source_in_order(name: str, part_bytes: int, folder: str) -> None:
    rest, objects = SOURCES[name]
    url = f"{folder}/{rest}" if rest else folder
    put_all(folder, objects)
    parts = parts_of(url, part_bytes)
    assert len({part.run for part in parts}) == len(parts)
    together = samples_of(*parts)
    assert [plain(sample) for sample in together] == [plain(sample) for _, sample in read_all(url)]
    assert [part.run for part in parts_of(url, part_bytes)] == [part.run for part in parts]


@pytest.mark.parametrize("name", SOURCES)
def test_a_part_is_read_from_any_of_its_samples_on(name: str, folder: str) -> None:
    rest, objects = SOURCES[name]
    put_all(folder, objects)
    for part in parts_of(f"{folder}/{rest}" if rest else folder, 700)[:4]:
        whole = [plain(sample) for sample in samples_of(part)]
        for start in {0, 1, len(whole) // 2, len(whole) - 1, len(whole)}:
            assert [plain(sample) for sample in samples_of(part, start=start)] == whole[start:]


@pytest.mark.parametrize("part_bytes", [1, 100, 101, 350, 10_000])
def test_a_part_is_as_large_as_it_may_be_unless_one_object_is_larger(part_bytes: int, folder: str) -> None:
    sizes = [90, 10, 1, 300, 49, 50, 51, 0, 400, 7]
    put_all(folder, {f"{n:02d}": b"x" * size for n, size in enumerate(sizes)})
    parts = parts_of(folder, part_bytes)
    totals = [sum(item.size_bytes for item in part.objects) for part in parts]
    for number, (part, total) in enumerate(zip(parts, totals, strict=True)):
        assert total <= part_bytes or len(part.objects) == 1
        if number + 1 < len(parts):
            assert total + parts[number + 1].objects[0].size_bytes > part_bytes
    assert sum(totals) == sum(sizes)


def test_rows_of_an_array_are_shared_out_by_their_bytes(folder: str) -> None:
    put_all(folder, {"x.npy": npy(np.zeros((1000, 25), np.float32))})
    parts = parts_of(f"{folder}/x.npy", 10_000)
    bounds = [part.rows for part in parts if part.rows is not None]
    assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]
    assert (bounds[0][0], bounds[-1][1]) == (0, 1000)
    assert {stop - start for start, stop in bounds[:-1]} == {99}
    assert len(parts_of(f"{folder}/x.npy", 1)) == 1000


def test_many_objects_are_named_by_the_first_and_the_last_of_them() -> None:
    folder = "memory://parts-named/x"
    put_all(folder, {f"{n:05d}": b"" for n in range(110)})
    (part,) = parts_of(folder, 1 << 30)
    assert part.objects == ()
    assert part.keys is not None
    assert (part.keys.after, part.keys.until, part.keys.objects) == ("", "00109", 110)
    assert len(str(part.to_json())) < 600


class Unread(ObjectSource):
    """A source of a number of objects, which are never read."""

    def __init__(self, objects: int) -> None:
        listed = tuple(ObjectInfo(key=f"{n:07d}", size_bytes=1, tag="t") for n in range(objects))
        store = RetryingStore(open_store("memory://unread"))
        super().__init__("files", files_schema(), SourceListing("memory://unread", store, listed, True), listed)

    def read(self, start: int = 0) -> Any:
        raise AssertionError


def test_a_part_has_a_maximum_number_of_objects_of_any_size() -> None:
    parts = list(split_source(Unread(2 * MAX_PART_OBJECTS + 1), COMMON, 1 << 40))
    assert [len(part.objects) for part in parts] == [MAX_PART_OBJECTS, MAX_PART_OBJECTS, 1]


CHANGES: dict[str, tuple[dict[str, bytes], list[str]]] = {
    "one more": ({"00060x": b""}, []),
    "one replaced": ({"00060": b"x"}, []),
    "one at the beginning": ({"0": b""}, []),
    "one deleted": ({}, ["00060"]),
    "all deleted": ({}, [f"{n:05d}" for n in range(110)]),
}


def delete(folder: str, *keys: str) -> None:
    async def work(store: Store) -> None:
        for key in keys:
            await store.delete(key)

    with_store(folder, work)


@pytest.mark.parametrize("change", CHANGES)
def test_objects_that_are_named_by_a_range_are_those_that_were_there_when_it_was_cut(change: str, folder: str) -> None:
    put_all(folder, {f"{n:05d}": b"" for n in range(110)})
    (part,) = parts_of(folder, 1 << 30)
    written, deleted = CHANGES[change]
    put_all(folder, written)
    delete(folder, *deleted)
    with pytest.raises(PackError, match="has changed between '' and '00109'"):
        samples_of(part)


def test_what_comes_behind_a_range_or_is_hidden_does_not_matter_to_it(folder: str) -> None:
    put_all(folder, {f"{n:05d}": b"" for n in range(110)})
    (part,) = parts_of(folder, 1 << 30)
    put_all(folder, {"00109x": b"", "x": b"", ".hidden": b"", "00020x/.hidden": b""})
    assert len(samples_of(part)) == 110


def test_links_out_of_a_local_folder_are_no_more_followed_than_when_it_was_cut(tmp_path: Path) -> None:
    folder, secret = tmp_path / "in", tmp_path / "secret"
    put_all(str(folder), {f"{n:05d}": b"" for n in range(110)})
    put_all(str(secret), {"key": b"of the house"})
    (part,) = parts_of(str(folder), 1 << 30)
    (folder / "00060x").symlink_to(secret / "key")
    (folder / "00070x").symlink_to(secret)
    assert [sample for sample in samples_of(part) if sample["data"]] == []


def test_objects_that_links_lead_to_are_named_one_by_one_and_read(tmp_path: Path) -> None:
    folder, outside = tmp_path / "in", tmp_path / "outside"
    put_all(str(outside), {f"{n:05d}": b"%d" % n for n in range(110)})
    folder.mkdir()
    for path in outside.iterdir():
        (folder / path.name).symlink_to(path)
    with pytest.raises(ConfigError, match="110 links"):
        parts_of(str(folder), 1 << 30)
    (part,) = parts_of(str(folder), 1 << 30, follow_links=True)
    assert len(part.objects) == 110
    assert [sample["data"] for sample in samples_of(part)] == [b"%d" % n for n in range(110)]


def test_an_object_that_was_replaced_or_deleted_since_is_an_error_of_the_store(folder: str) -> None:
    put_all(folder, {f"{n:02d}": b"x" for n in range(10)} | {"empty": b""})
    parts = parts_of(folder, 1 << 30)
    put_all(folder, {"05": b"y"})
    with pytest.raises(ObjectChangedError, match="05"):
        samples_of(parts[0])
    delete(folder, "05")
    with pytest.raises(NotFoundError, match="05"):
        samples_of(parts[0])
    put_all(folder, {"05": b"x", "empty": b"no longer"})
    (again,) = parts_of(folder, 1 << 30)
    put_all(folder, {"empty": b""})
    with pytest.raises(StoreError):
        samples_of(again)


def test_rows_missing_from_a_changed_array_are_reported(folder: str) -> None:
    put_all(folder, {"x.npy": npy(np.zeros((100, 4), np.int32))})
    last = parts_of(f"{folder}/x.npy", 500)[-1]
    put_all(folder, {"x.npy": npy(np.zeros((90, 4), np.int32))})
    (now,) = look(f"{folder}/x.npy").objects
    with pytest.raises(PackError, match="has 90 rows, not 100: it was replaced"):
        samples_of(replace(last, objects=(now,)))


def test_a_part_with_other_columns_than_the_data_set_is_refused(folder: str) -> None:
    put_all(folder, {"x.npy": npy(np.zeros((10, 4), np.int32)), "a.tar": tar(0, 3)})
    (array,) = parts_of(f"{folder}/x.npy", 1 << 30)
    (tars,) = parts_of(f"{folder}/a.tar", 1 << 30)
    for part, schema in (
        (array, Schema({"x": Array("int64", (4,))})),
        (tars, Schema({"key": Bytes(), "jpg": Bytes(), "txt": Bytes()})),
    ):
        with pytest.raises(SchemaError, match="must have the same columns"):
            samples_of(replace(part, schema=schema))


def test_tars_whose_files_are_in_another_order_have_the_same_columns(folder: str) -> None:
    swapped = [(f"{n:04d}.{end}", f"{n} {end}".encode()) for n in range(10, 20) for end in ("txt", "jpg")]
    put_all(folder, {"a.tar": tar(0, 10), "b.tar": tar_of(swapped)})
    together = samples_of(*parts_of(folder, 1))
    assert together == [sample for _, sample in read_all(folder)]
    assert len(together) == 20
