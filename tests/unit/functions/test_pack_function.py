"""pack: a part becomes super-samples and a record, however often and by how many it is invoked."""

from __future__ import annotations

import asyncio
import io
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from stoker import open_store
from stoker._pack.record import PackRecord, record_key
from stoker.errors import (
    ConfigError,
    DeadlineError,
    EventError,
    ObjectChangedError,
    PackError,
    SchemaError,
    ServerError,
    StoreError,
)
from stoker.testing import DyingStore, WatchedStore, run_virtual
from stoker_functions._deployment import InvocationDeadline
from stoker_functions._pack import pack
from support.cases import for_each
from support.deployments import DelayedStore, Place, plenty
from support.packing import read_objects


def test_a_part_becomes_super_samples_and_a_finished_record_and_no_manifest() -> None:
    async def main() -> None:
        place = Place()
        part = place.part(await place.put(range(20)))
        result = await pack(part.to_json(), place.deployment(), plenty())
        assert (result["run"], result["state"], result["samples"]) == (part.run, "complete", 20)
        assert await place.keys("data/") == [f"data/{part.run}/{n:08d}" for n in range(result["objects"])]
        data, _ = await open_store(place.dataset).get(record_key(part.run))
        record = PackRecord.from_bytes(data)
        assert (record.state, record.mode, record.samples) == ("complete", "deferred", 20)
        assert await place.manifest() is None

    asyncio.run(main())


def test_the_same_event_again_writes_nothing() -> None:
    async def main() -> None:
        place = Place()
        event = place.part(await place.put(range(20))).to_json()
        first = await pack(event, place.deployment(), plenty())
        before = await read_objects(open_store(place.dataset))
        watched: list[WatchedStore] = []

        def watch(store: Any) -> Any:
            watched.append(WatchedStore(store))
            return watched[-1]

        assert first["requests"] == {place.dataset: {"GET": 1, "PUT": 6}, place.raw: {"GET": 20}}
        again = await pack(event, place.deployment(watch), plenty())
        assert again == {**first, "requests": {place.dataset: {"GET": 1}}}
        assert await read_objects(open_store(place.dataset)) == before
        assert not [call for store in watched for call in store.calls if call.startswith("put")]

    asyncio.run(main())


def test_the_same_event_at_the_same_time_gives_the_same_objects_once() -> None:
    async def main() -> None:
        alone, place = Place(), Place()
        place.raw = alone.raw
        objects = await alone.put(range(60))
        await pack(alone.part(objects).to_json(), alone.deployment(), plenty())
        event = place.part(objects).to_json()
        results = await asyncio.gather(*(pack(event, place.deployment(), plenty()) for _ in range(4)))
        assert {(result["state"], result["samples"], result["objects"]) for result in results} == {
            ("complete", 60, results[0]["objects"])
        }
        assert await read_objects(open_store(place.dataset), "data/") == await read_objects(
            open_store(alone.dataset), "data/"
        )

    asyncio.run(main())


def test_it_stops_before_the_deadline_and_the_same_event_continues_to_the_same_objects() -> None:
    async def main() -> None:
        whole, place = Place(), Place()
        place.raw = whole.raw
        objects = await whole.put(range(600))
        await pack(whole.part(objects).to_json(), whole.deployment(), plenty())
        event = place.part(objects).to_json()
        states: list[str] = []
        while not states or states[-1] == "packing":
            started = asyncio.get_running_loop().time()
            result = await pack(
                event, place.deployment(lambda store: DelayedStore(store, 0.3)), InvocationDeadline.after(4.0)
            )
            assert asyncio.get_running_loop().time() - started < 4
            states.append(result["state"])
        assert len(states) > 1
        assert await read_objects(open_store(place.dataset), "data/") == await read_objects(
            open_store(whole.dataset), "data/"
        )

    run_virtual(main())


def test_an_invocation_without_progress_fails_instead_of_repeating_for_ever() -> None:
    async def main() -> None:
        place = Place()
        event = place.part(await place.put(range(20))).to_json()
        with pytest.raises(PackError, match=r"not finish a single super-sample of 1\.95 KiB in 4 s"):
            await pack(event, place.deployment(lambda store: DelayedStore(store, 1.5)), InvocationDeadline.after(4.0))

    run_virtual(main())


@pytest.mark.parametrize("error", [ServerError, DeadlineError, ObjectChangedError])
def test_what_is_durable_when_a_raw_object_cannot_be_read_is_recorded(error: type[StoreError]) -> None:
    async def main() -> None:
        place = Place()
        event = place.part(await place.put(range(40))).to_json()

        class Failing(WatchedStore):
            async def before(self, number: int, operation: str, key: str) -> None:
                if key == "00030.bin":
                    raise error("it cannot be read")

        with pytest.raises(error, match="cannot be read"):
            await pack(event, place.deployment(Failing), plenty())
        (record,) = await place.deployment().catalog(place.dataset).records()
        assert (record.state, len(record)) == ("packing", 5)

    run_virtual(main())


@pytest.mark.parametrize("late", [False, True], ids=["before its effect", "after its effect"])
def test_after_a_death_at_any_operation_the_same_event_gives_every_sample_once(late: bool) -> None:
    async def main() -> None:
        whole = Place()
        objects = await whole.put(range(40))
        await pack(whole.part(objects).to_json(), whole.deployment(), plenty())
        expected = await read_objects(open_store(whole.dataset), "data/")
        for lives in range(40):
            place = Place()
            place.raw = whole.raw
            deaths: list[DyingStore] = []
            event = place.part(objects).to_json()

            def dying(store: Any, lives: int = lives, deaths: list[DyingStore] = deaths) -> Any:
                deaths.append(DyingStore(store, lives, late=late))
                return deaths[-1]

            with suppress(StoreError):
                await pack(event, place.deployment(dying), plenty())
            assert (await pack(event, place.deployment(), plenty()))["state"] == "complete"
            assert await read_objects(open_store(place.dataset), "data/") == expected

    run_virtual(main())


def test_a_source_that_was_replaced_since_is_refused_and_leaves_nothing_visible() -> None:
    async def main() -> None:
        place = Place()
        objects = await place.put(range(20))
        await open_store(place.raw).put("00007.bin", b"other")
        with pytest.raises(ObjectChangedError, match="00007"):
            await pack(place.part(objects).to_json(), place.deployment(), plenty())
        assert await place.manifest() is None

    asyncio.run(main())


def test_places_that_the_deployment_may_not_touch_are_refused_before_anything_is_read() -> None:
    async def main() -> None:
        place = Place()
        objects = await place.put(range(2))
        for change in (
            {"dataset": "memory://elsewhere"},
            {"dataset": f"{place.dataset}-other"},
            {"dataset": "file:///etc"},
            {"source": "memory://functions-raw"},
            {"source": "/etc"},
            {"source": "file:///etc"},
            {"source": "s3://user:secret@bucket/x"},
        ):
            with pytest.raises(EventError, match=r"may not use|not a URL"):
                await pack(place.part(objects, **change).to_json(), place.deployment(), plenty())

    asyncio.run(main())


def test_a_place_below_one_of_the_deployment_is_allowed() -> None:
    async def main() -> None:
        place = Place()
        part = place.part(await place.put(range(3)), dataset=f"{place.dataset}/below")
        assert (await pack(part.to_json(), place.deployment(), plenty()))["samples"] == 3

    asyncio.run(main())


def test_an_instance_that_is_too_small_says_how_large_it_must_be() -> None:
    async def main() -> None:
        place = Place()
        event = place.part(await place.put(range(2)), super_sample_bytes=8 << 20).to_json()
        with pytest.raises(ConfigError, match="at least 224 MiB"):
            await pack(event, place.deployment(memory_bytes=128 << 20), plenty())

    asyncio.run(main())


def test_rows_of_an_array_are_packed_alone() -> None:
    async def main() -> None:
        place = Place()
        file = io.BytesIO()
        np.save(file, np.arange(5000, dtype=np.int32).reshape(100, 50))
        info = await open_store(place.raw).put("x.npy", file.getvalue())
        schema_of_file = {"x": {"kind": "array", "dtype": "int32", "shape": [50]}}
        event = place.part([info], kind="npy", rows=(20, 50)).to_json()
        event["schema"] = [{"name": name, **column} for name, column in schema_of_file.items()]
        result = await pack(event, place.deployment(), plenty())
        assert (result["samples"], result["state"]) == (30, "complete")
        event["rows"] = [50, 120]
        with pytest.raises(PackError, match="has 100 rows, not 120"):
            await pack(event, place.deployment(), plenty())
        event["schema"][0]["dtype"] = "int64"
        event["rows"] = [0, 10]
        with pytest.raises(SchemaError, match="same columns"):
            await pack(event, place.deployment(), plenty())

    asyncio.run(main())


GOOD: dict[str, Any] = {
    "dataset": "memory://a",
    "dataset_id": "0" * 16,
    "source": "memory://b",
    "kind": "files",
    "schema": [{"name": "data", "kind": "bytes"}],
    "super_sample_bytes": 1000,
    "objects": [["key", 3, "tag"]],
}


SLICE: dict[str, Any] = {"after": "a", "until": "b", "objects": 1, "fingerprint": "0" * 64}
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@for_each(
    ("change", "problem"),
    [
        ({"dataset": None}, "'dataset' is None"),
        ({"dataset_id": "x"}, "'dataset_id'"),
        ({"dataset_id": "../../etc/passwd0"}, "'dataset_id'"),
        ({"kind": "pickle"}, "'kind' is 'pickle'"),
        ({"schema": [{"name": "x"}]}, "'schema' is not valid"),
        ({"schema": "x" * (2 << 20)}, "'schema' has"),
        ({"super_sample_bytes": 0}, "'super_sample_bytes' is 0"),
        ({"super_sample_bytes": True}, "'super_sample_bytes' is True"),
        ({"super_sample_bytes": 1 << 40}, "'super_sample_bytes'"),
        ({"job": "1234"}, "'job'"),
        ({"objects": []}, "neither 'objects' nor a 'slice'"),
        ({"objects": [["key", 3]]}, "write \\[key"),
        ({"objects": [["key", -3, "tag"]]}, "'size_bytes' is -3"),
        ({"objects": [["/etc/passwd", 3, "tag"]]}, "has an invalid key"),
        ({"objects": [["\ud800", 3, "tag"]]}, "has an invalid key"),
        ({"objects": [["key", 3, "tag\r\nx-amz-acl: public-read"]]}, "'tag' is"),
        ({"objects": [DEEP]}, "write \\[key"),
        ({"schema": DEEP}, "nested too deeply"),
        ({"rows": [DEEP], "kind": "npy"}, "write \\[start, end\\]"),
        ({"objects": [["key", 3, "tag"], ["key", 3, "other"]]}, "twice"),
        ({"slice": {"after": "", "until": "x", "objects": 1, "fingerprint": "0" * 64}}, "or both"),
        ({"objects": [], "slice": {"after": "x", "until": "x", "objects": 1, "fingerprint": "0" * 64}}, "slice ends"),
        ({"objects": [], "slice": {**SLICE, "until": "\ud800"}}, "has an invalid key"),
        ({"objects": [], "slice": {**SLICE, "after": "/"}}, "has an invalid key"),
        ({"objects": [], "slice": {**SLICE, "fingerprint": "0"}}, "'fingerprint'"),
        ({"objects": [], "slice": SLICE, "kind": "webdataset"}, "'slice' of kind webdataset"),
        ({"objects": [["a", 1, "t"], ["b", 1, "t"]], "kind": "npz"}, "2 objects of kind npz"),
        ({"objects": [["a", 1, "t"], ["b", 1, "t"]], "kind": "webdataset", "remembered": 1}, "'remembered'"),
        ({"rows": [0, 1]}, "which is only for a single npy object"),
        ({"rows": [1, 0], "kind": "npy"}, "write \\[start, end\\]"),
        ({"nonsense": 1}, "unknown field 'nonsense'"),
    ],
)
def test_a_malformed_event_names_its_field(change: dict[str, Any], problem: str) -> None:
    async def main() -> None:
        event = {**GOOD, **change}
        if "slice" in change and not event["objects"]:
            del event["objects"]
        with pytest.raises(EventError, match=problem):
            await pack(event, Place().deployment(), plenty())

    asyncio.run(main())


@pytest.mark.parametrize("event", [None, 3, "pack", [], [GOOD], {}, {1: 2}])
def test_what_is_no_object_is_no_event(event: object) -> None:
    async def main() -> None:
        with pytest.raises(EventError, match="pack event"):
            await pack(event, Place().deployment(), plenty())

    asyncio.run(main())
