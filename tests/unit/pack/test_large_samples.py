"""Samples that are larger than a request: packed in parts, and trained from in the memory that they need."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker import open_store
from stoker._base.upload import UPLOAD_PART_BYTES, ObjectUpload, PartWritable
from stoker._pack.packer import AsyncPacker
from stoker._pack.plan import PackConfig
from stoker.errors import MemoryBudgetError
from stoker_torch import Loader
from support.local_bucket import s3_options

SCHEMA = {"volume": stoker.Bytes(), "number": stoker.Array("int64")}
SIZES = [1000, UPLOAD_PART_BYTES + 5, 1000, 3 * UPLOAD_PART_BYTES, 2_000_000, 1000]


def volume(number: int) -> bytes:
    return random.Random(number).randbytes(SIZES[number])


@pytest.fixture(scope="module", params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Return the URL of the packed data set, and the options of its store."""
    if request.param == "folder":
        return pack(str(tmp_path_factory.mktemp("large") / "data")), None
    options = s3_options(request.getfixturevalue("local_bucket"))
    return pack("s3://stoker/large", options), options


def pack(url: str, options: Any = None) -> str:
    with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=1 << 20, options=options) as packer:
        for number in range(len(SIZES)):
            packer.write({"volume": volume(number), "number": number})
    assert packer.manifest is not None
    assert packer.manifest.rows.samples.tolist() == [1] * len(SIZES)
    return url


@pytest.mark.parametrize("shuffle", ["none", "window", "full"])
def test_every_sample_arrives_whole_with_the_smallest_memory(place: tuple[str, Any], shuffle: str) -> None:
    url, options = place
    settings: dict[str, Any] = {"options": options, "batch_size": 2, "shuffle": shuffle, "window": 2, "seed": 3}
    with pytest.raises(MemoryBudgetError, match=r"give memory=\d+") as caught:
        Loader(url, memory="1MB", **settings)
    figure = int(str(caught.value).partition("memory=")[2].split()[0])
    assert figure < (5 * max(SIZES) if shuffle == "full" else 2.5 * sum(SIZES))
    with Loader(url, memory=figure, **settings) as loader:
        assert loader.plan.memory_bytes <= figure
        for epoch in range(2):
            found = [
                (int(number), bytes(data))
                for batch in loader
                for number, data in zip(batch["number"], batch["volume"], strict=True)
            ]
            assert sorted(number for number, _ in found) == list(range(len(SIZES))), epoch
            assert all(data == volume(number) for number, data in found)


def test_a_large_sample_is_read_by_number(place: tuple[str, Any]) -> None:
    url, options = place
    with stoker.open(url, options=options, memory="100MB") as dataset:
        assert dataset[3]["volume"] == volume(3)


def test_a_killed_pack_leaves_a_hidden_file_that_the_next_one_removes(tmp_path: Path) -> None:
    def hidden_files() -> list[Path]:
        return list(tmp_path.rglob("*.partial"))

    async def main() -> None:
        store = open_store(str(tmp_path))
        assert isinstance(store, PartWritable)
        upload = await store.begin_upload("data/run/0", 10)
        assert isinstance(upload, ObjectUpload)
        await upload.put_part(0, 0, b"12345")
        assert len(hidden_files()) == 1
        upload._file.close()  # type: ignore[attr-defined]  # as the end of a process does
        assert [info async for info in store.list("")] == []
        async with AsyncPacker(open_store(str(tmp_path)), PackConfig(schema=stoker.Schema(SCHEMA))) as packer:
            await packer.write({"volume": b"", "number": 0})
        await open_store(str(tmp_path)).put("data/run/1", b"x")
        assert hidden_files() == []

    asyncio.run(main())
