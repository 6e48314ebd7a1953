from __future__ import annotations

import asyncio
import io
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from stoker import GcsOptions, StoreOptions, open_store
from stoker._sources import open_source
from stoker.errors import ConfigError, NotFoundError
from stoker_local import BucketConfig, Fault, FaultKind, FaultPlan, LocalBucket, LocalGcs, running_bucket
from support.local_bucket import s3_options
from support.places import tar_of

Place = tuple[str, StoreOptions | None]


def array_file(save: Any, *arrays: Any) -> bytes:
    data = io.BytesIO()
    save(data, *arrays)
    return data.getvalue()


ROWS = np.arange(120, dtype="float32").reshape(40, 3)
OBJECTS = {
    "images/a + b/%41 ü.jpg": b"1",
    "images/c/empty.png": b"",
    "files/x=1&y?.bin": b"22",
    "files/#/~": b"333",
    "x.npy": array_file(np.save, ROWS),
    "stored.npz": array_file(np.savez, ROWS, ROWS[:, 0]),
    "packed.npz": array_file(np.savez_compressed, ROWS, ROWS[:, 0]),
    "t-000.tar": tar_of([("ü.txt", b"a"), ("ü.bin", bytes(2000))]),
    "t-001.tar": tar_of([("1.txt", b"b"), ("1.bin", b"")]),
}
SOURCES = ("images", "files", "x.npy", "stored.npz", "packed.npz", "t-001.tar", "t-{000..001}.tar")


async def upload(place: Place) -> None:
    store = open_store(place[0], options=place[1])
    for key, data in OBJECTS.items():
        await store.put(key, data)
    await store.close()


async def read(place: Place, name: str, start: int = 0) -> list[tuple[str, list[bytes]]]:
    source = await open_source(f"{place[0]}/{name}", options=place[1])
    async with aclosing(source.read(start)) as samples:
        found = [(where, source.schema.encode(sample, where)) async for where, sample in samples]
    await source.close()
    return [(where.rpartition("/")[2], values) for where, values in found]


@pytest.fixture(params=["s3", "gs"])
def cloud(request: pytest.FixtureRequest, local_bucket: LocalBucket, local_gcs: LocalGcs) -> Place:
    if request.param == "s3":
        return "s3://stoker/sources/a b/ü", s3_options(local_bucket)
    return "gs://stoker/sources/a b/ü", GcsOptions(endpoint_url=local_gcs.url)


def test_a_source_reads_the_same_wherever_it_is(cloud: Place) -> None:
    async def check() -> None:
        elsewhere: Place = ("memory://elsewhere", None)
        await upload(elsewhere)
        await upload(cloud)
        for name in SOURCES:
            for start in (0, 1):
                found = await read(cloud, name, start)
                assert found == await read(elsewhere, name, start)
                assert found or start

    asyncio.run(check())


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ({"a.bin": b"1", "b": b"PAR1" + bytes(9)}, "first: b, Parquet table.*--kind files"),
        ({"a.bin": b"1", "b.csv": b""}, "first: b.csv, CSV table.*--kind files"),
        ({"train/cat/1.jpg": b"1", "val/cat/2.jpg": b"2"}, "pack .*/train, .*/val one by one"),
    ],
)
def test_what_would_be_packed_wrong_is_refused_wherever_it_is(
    cloud: Place, objects: dict[str, bytes], said: str
) -> None:
    async def check() -> None:
        url = f"{cloud[0]}/refused-{sum(map(len, objects))}"
        store = open_store(url, options=cloud[1])
        for key, data in objects.items():
            await store.put(key, data)
        await store.close()
        with pytest.raises(ConfigError, match=said):
            await open_source(url, options=cloud[1])

    asyncio.run(check())


def test_a_missing_object_is_an_error(cloud: Place) -> None:
    with pytest.raises(NotFoundError):
        asyncio.run(open_source(f"{cloud[0]}/nothing.npy", options=cloud[1]))


def test_transient_errors_while_listing_and_reading_are_tried_again() -> None:
    async def check(place: Place) -> list[Any]:
        await upload(place)
        return await read(place, "images")

    plan = FaultPlan(
        script=tuple(Fault(kind=kind) for kind in (FaultKind.SLOW_DOWN, FaultKind.RESET, FaultKind.INTERNAL_ERROR)),
        operations=("ListObjectsV2", "GetObject"),
    )
    with running_bucket(BucketConfig(faults=plan)) as bucket:
        assert len(asyncio.run(check(("s3://stoker", s3_options(bucket))))) == 2
        assert bucket.counts.faults.total() == 3
