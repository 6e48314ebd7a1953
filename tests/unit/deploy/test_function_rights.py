"""The rights that the deployment files give are enough for everything that the functions do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from stoker import open_store
from stoker.abc import Store
from stoker.errors import PermissionDeniedError
from stoker_functions._commit import commit, compact
from stoker_functions._deployment import Deployment
from stoker_functions._ingest import ingest_objects
from stoker_functions._pack import pack
from stoker_functions._shuffle_job.work import shuffle
from stoker_functions.serve import Request, ServeConfig, Service
from support.deployments import Place, plenty
from support.function_rights import RIGHTS, GuardedStore
from support.materialized import WAYS, plan_tasks

RAW = 40


def guard(name: str) -> Callable[[Store], Store]:
    return lambda store: GuardedStore(store, RIGHTS[name], "functions-raw" in store.url)


def deployed(place: Place, name: str) -> Deployment:
    """Return a deployment whose stores let a function do what its rights are."""
    return place.deployment(guard(name))


async def committed(place: Place) -> int:
    answer = await commit({"dataset": place.dataset}, deployed(place, "commit"), plenty())
    version: int = answer["version"]
    return version


def test_raw_objects_are_packed_committed_compacted_and_shuffled_with_the_rights_that_are_given() -> None:
    async def check() -> None:
        place = Place()
        objects = await place.put(range(RAW))
        for first in range(0, RAW, 4):
            part = place.part(objects[first : first + 4]).to_json()
            for _ in range(2):  # events come more than once
                assert (await pack(part, deployed(place, "pack"), plenty()))["state"] == "complete"
            assert await committed(place) == first // 4 + 1
        compacted = await compact({"dataset": place.dataset}, deployed(place, "compact"), plenty())
        assert compacted["objects_before"] > compacted["objects_after"] > 0
        for epoch, way in enumerate(WAYS):
            version = compacted["version"]
            for phase in plan_tasks(way, slices=2, epoch=epoch, url=place.dataset, version=version, keep=0):
                for task in phase:
                    assert (await shuffle(task.to_event(), deployed(place, "shuffle"), plenty()))["state"] == "complete"
        assert await place.keys("epochs/")
        assert sorted(await place.numbers()) == list(range(RAW))

    asyncio.run(check())


def test_raw_objects_that_are_announced_repeatedly_or_vanish_are_ingested_with_the_rights_that_are_given() -> None:
    async def check() -> None:
        place = Place()
        objects = await place.put(range(RAW))
        ingest = deployed(place, "ingest")
        assert not any(await ingest_objects(place.notified(objects[:20]), ingest, plenty()))
        await committed(place)
        await open_store(place.raw).delete(objects[25].key)  # between its announcement and its packing
        again = await ingest_objects(place.notified(objects[10:]), ingest, plenty())  # ten of them again
        assert not any(again)
        await committed(place)
        assert sorted(await place.numbers()) == [number for number in range(RAW) if number != 25]

    asyncio.run(check())


def test_a_data_set_is_served_with_the_rights_that_are_given() -> None:
    async def check() -> None:
        place = Place()
        objects = await place.put(range(RAW))
        await pack(place.part(objects).to_json(), deployed(place, "pack"), plenty())
        await committed(place)
        opened = guard("serve")
        service = Service(ServeConfig(datasets={"train": place.dataset}), lambda url: opened(open_store(url)))
        for path, query in (("manifest", ""), ("super-samples/1", "version=1"), ("batches/3", "size=8&version=1")):
            response = await service.answer(Request(method="GET", path=f"/v1/train/{path}", query=query))
            assert response.status == 200, response
            assert response.body

    asyncio.run(check())


@pytest.mark.parametrize("name", RIGHTS)
def test_a_function_can_neither_write_elsewhere_nor_touch_raw_objects(name: str) -> None:
    async def check() -> None:
        place = Place()
        await place.put(range(1))
        data, raw = (guard(name)(open_store(url)) for url in (place.dataset, place.raw))
        for write in (data.put("runs/checkpoint.pt", b"x"), raw.put("00000.bin", b"x"), raw.delete("00000.bin")):
            with pytest.raises(PermissionDeniedError):
                await write

    asyncio.run(check())
