"""The suite of ``stoker.testing`` for sources: the built-in kinds and the example pass it, and faulty ones do not."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker import Column, Text
from stoker._sources.arrays import open_npy, open_npz
from stoker._sources.folders import open_files, open_image_folder
from stoker._sources.webdataset import open_webdataset
from stoker.abc import Sample, Source, SourceListing
from stoker.testing import SourceTests
from support.places import tar_of

spec = importlib.util.spec_from_file_location("json_lines", Path(__file__).parents[2] / "examples/json_lines.py")
assert spec is not None
assert spec.loader is not None
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


def saved(**arrays: Any) -> bytes:
    """Return what numpy saves: a file of one array, or of several."""
    file = io.BytesIO()
    if len(arrays) > 1:
        np.savez_compressed(file, **arrays)
    else:
        np.save(file, *arrays.values())
    return file.getvalue()


class TestFiles(SourceTests):
    """The samples of a folder of files."""

    def objects(self) -> dict[str, bytes]:
        """Return raw objects."""
        return {"a": b"1", "b/c": b"22", "d": b"333"}

    async def open_source(self, listing: SourceListing) -> Source:
        """Return it."""
        return open_files(listing)


class TestImageFolder(SourceTests):
    """The samples of a folder of images."""

    def objects(self) -> dict[str, bytes]:
        """Return raw objects."""
        return {"cat/1.png": b"1", "dog/2.png": b"22", "dog/3.png": b"333"}

    async def open_source(self, listing: SourceListing) -> Source:
        """Return it."""
        return open_image_folder(listing)


class TestArray(SourceTests):
    """The rows of an array."""

    def objects(self) -> dict[str, bytes]:
        """Return raw objects."""
        return {"x.npy": saved(x=np.arange(20).reshape(5, 4))}

    async def open_source(self, listing: SourceListing) -> Source:
        """Return it."""
        return await open_npy(listing)


class TestArrays(SourceTests):
    """The rows of compressed arrays."""

    def objects(self) -> dict[str, bytes]:
        """Return raw objects."""
        return {"x.npz": saved(x=np.arange(20).reshape(5, 4), y=np.arange(5.0))}

    async def open_source(self, listing: SourceListing) -> Source:
        """Return it."""
        return await open_npz(listing)


class TestWebDataset(SourceTests):
    """The samples of tars."""

    def objects(self) -> dict[str, bytes]:
        """Return raw objects."""
        return {f"{n}.tar": tar_of([(f"{n}{i}.{e}", b"1") for i in range(3) for e in ("cls", "bin")]) for n in "ab"}

    async def open_source(self, listing: SourceListing) -> Source:
        """Return it."""
        return await open_webdataset(listing)


class TestJsonLines(SourceTests):
    """The example."""

    def objects(self) -> dict[str, bytes]:
        """Return raw objects."""
        return {"a.jsonl": b'{"x": 1}\n\n{"x": 2}\n', "b.jsonl": b'{"x": 3}'}

    async def open_source(self, listing: SourceListing) -> Source:
        """Return it."""
        source: Source = await example.open_json_lines(listing)
        return source


class Letters:
    """Bytes as samples; its children each do something wrong."""

    def __init__(self, listing: SourceListing) -> None:
        self.schema: dict[str, Column] = {"text": Text()}
        self.listing = listing
        self.readings = 0

    async def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        self.readings += 1
        number = 0
        for item in self.listing.objects:
            data = bytearray(item.size_bytes)
            await self.listing.store.get_range(item.key, 0, len(data), into=memoryview(data), tag=item.tag)
            for letter in data.decode():
                if number >= start:
                    yield f"letter {number}", {"text": letter}
                number += 1


class BeginsAtTheStart(Letters):
    async def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        async with aclosing(super().read()) as samples:
            async for sample in samples:
                yield sample


class HasAnotherColumn(Letters):
    async def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        async with aclosing(super().read(start)) as samples:
            async for where, sample in samples:
                yield where, {**sample, "more": 1}


class HasAnotherOrder(Letters):
    async def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        async with aclosing(super().read(start)) as samples:
            found = [sample async for sample in samples]
        for sample in found[:: -1 if self.readings % 2 else 1]:
            yield sample


class ReadsWithoutTags(Letters):
    async def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        data = b"".join([(await self.listing.store.get(item.key))[0] for item in self.listing.objects])
        for number, letter in enumerate(data.decode()):
            if number >= start:
                yield f"letter {number}", {"text": letter}


def failing(kind: Callable[[SourceListing], Source]) -> set[str]:
    """Return the tests of the suite that a source fails."""

    class Suite(SourceTests):
        def objects(self) -> dict[str, bytes]:
            """Return raw objects."""
            return {"a": b"abc", "b": b"de"}

        async def open_source(self, listing: SourceListing) -> Source:
            return kind(listing)

    failed = set()
    for name in dir(Suite):
        if name.startswith("test_"):
            try:
                getattr(Suite(), name)()
            except Exception:  # noqa: BLE001 - whatever a test fails with
                failed.add(name.removeprefix("test_"))
    return failed


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (BeginsAtTheStart, "reading_begins_at_any_sample"),
        (HasAnotherColumn, "every_sample_has_the_columns_of_the_schema"),
        (HasAnotherOrder, "samples_and_their_order_are_the_same_every_time"),
        (ReadsWithoutTags, "an_object_that_was_replaced_or_deleted_is_an_error"),
    ],
)
def test_a_faulty_source_fails_the_test_of_its_fault(kind: Callable[[SourceListing], Source], test: str) -> None:
    assert test in failing(kind)


def test_a_good_source_passes() -> None:
    assert not failing(Letters)
