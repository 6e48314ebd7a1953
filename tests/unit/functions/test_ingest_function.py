"""ingest: what a queue delivers is packed, and exactly the messages that it should keep are named."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote_plus

import pytest

from stoker import Array, Schema, Text, open_store
from stoker._format import versions
from stoker._format.supersample import SuperSample
from stoker._maintenance.garbage import collect_garbage
from stoker._maintenance.inspection import verify
from stoker._pack.catalog import BucketCatalog
from stoker._pack.packer import AsyncPacker
from stoker._pack.plan import PackConfig
from stoker._sources.folders import files_schema
from stoker.abc import ObjectInfo, Store
from stoker.errors import ConfigError, EventError, PermissionDeniedError, StoreError
from stoker.testing import WatchedStore, run_virtual
from stoker_functions._commit import commit
from stoker_functions._deployment import Deployment, IngestSettings, InvocationDeadline
from stoker_functions._ingest import ingest_queue
from support.deployments import DelayedStore, Place, plenty

BUCKET = "raw-of-a-test"


class S3Store(WatchedStore):
    """A store in memory with an S3 URL, as in notifications."""

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}"


class S3Place(Place):
    """A place whose raw objects are in what looks like a bucket of S3."""

    def deployment(self, wrap: Callable[[Store], Store] = lambda store: store, **changes: Any) -> Deployment:
        return Deployment(
            super().deployment(**{"sources": (f"s3://{BUCKET}",), **changes}).settings,
            open_url=lambda url: wrap(S3Store(open_store(self.raw)) if url.startswith("s3://") else open_store(url)),
        )


def message(name: str, *objects: ObjectInfo, **changes: Any) -> dict[str, Any]:
    """Return a queue's message with S3's notification of created objects."""
    records = [
        {
            "eventVersion": "2.1",
            "eventSource": "aws:s3",
            "eventName": "ObjectCreated:Put",
            "s3": {
                "bucket": {"name": BUCKET},
                "object": {"key": info.key, "size": info.size_bytes, "eTag": info.tag, "sequencer": "0A1B"},
            },
        }
        for info in objects
    ]
    return {"messageId": name, "body": json.dumps({"Records": records}), **changes}


def event(*messages: Mapping[str, Any]) -> dict[str, Any]:
    return {"Records": list(messages)}


def one_each(objects: Sequence[ObjectInfo]) -> dict[str, Any]:
    """Return an event with a message for each object, named by its key."""
    return event(*(message(info.key, info) for info in objects))


async def ingested(place: Place, what: Mapping[str, Any], **changes: Any) -> list[str]:
    """Let an instance take an event in, and return which messages it wants to have again."""
    result = await ingest_queue(what, place.deployment(**changes), plenty())
    assert result.keys() == {"batchItemFailures"}
    return [failure["itemIdentifier"] for failure in result["batchItemFailures"]]


async def committed(place: Place) -> list[int]:
    await commit({"dataset": place.dataset}, place.deployment(), plenty())
    return sorted(await place.numbers())


def test_what_a_delivery_announces_becomes_one_run() -> None:
    async def main() -> None:
        place = S3Place()
        assert await ingested(place, one_each(await place.put(range(30)))) == []
        assert len(await place.keys("packs/")) == 1
        assert await committed(place) == list(range(30))

    asyncio.run(main())


def test_a_delivery_without_objects_does_nothing() -> None:
    async def main() -> None:
        place = S3Place()
        test = {"messageId": "t", "body": json.dumps({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "x"})}
        assert await ingested(place, event(test, message("none"))) == []
        assert await ingested(place, event()) == []

    asyncio.run(main())


def test_exactly_the_messages_that_are_wrong_are_kept() -> None:
    async def main() -> None:
        place = S3Place()
        good = await place.put(range(10))
        huge = await open_store(place.raw).put("00100.bin", b"x" * 3000)
        foreign = message("foreign", good[0])
        foreign["body"] = foreign["body"].replace(BUCKET, f"{BUCKET}-of-others")
        wrong = [
            foreign,
            message("no json", body="<xml/>"),
            message("no text", body=17),
            message("no records", body="{}"),
            message("other records", body=json.dumps({"Records": [{"eventName": "ObjectCreated:Put"}]})),
            message("too large", huge),
            message("no key of a store", ObjectInfo(key="%2Fetc%2Fpasswd", size_bytes=3, tag="t")),
            message("half a pair", ObjectInfo(key="\ud800.bin", size_bytes=3, tag="t")),
            message("in part", good[9], ObjectInfo(key="%00", size_bytes=3, tag="t")),
        ]
        mixed = [*one_each(good[:5])["Records"], *wrong, *one_each(good[5:9])["Records"]]
        assert await ingested(place, event(*mixed)) == [each["messageId"] for each in wrong]
        assert await committed(place) == list(range(9))

    asyncio.run(main())


def test_a_key_cannot_write_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        place = S3Place()
        store = open_store(place.raw)
        infos = [
            await store.put("too large\nERROR forged\x1b[31m.bin", b"x" * 3000),
            await store.put(".hidden\r\nERROR forged", b"x"),
            ObjectInfo(key="gone\nERROR forged.bin", size_bytes=3, tag="t"),
        ]
        quoted = [replace(info, key=quote_plus(info.key)) for info in infos]
        assert await ingested(place, one_each(quoted)) == [quoted[0].key]

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert len(caplog.messages) == 3
    assert all(text.isprintable() and "ERROR forged" in text for text in caplog.messages)


def test_an_object_that_cannot_be_packed_fails_alone() -> None:
    async def main() -> None:
        place = S3Place()
        objects = await place.put(range(40))

        class Forbidding(WatchedStore):
            async def before(self, number: int, operation: str, key: str) -> None:
                if key in ("00007.bin", "00031.bin"):
                    raise PermissionDeniedError(f"{key} is forbidden")

        failed = await ingested(place, one_each(objects), wrap=Forbidding)
        assert failed == ["00007.bin", "00031.bin"]
        expected = [n for n in range(40) if n not in (7, 31)]
        assert await committed(place) == expected
        records = await BucketCatalog(open_store(place.dataset)).records()
        assert {record.state for record in records} == {"committed"}, "the runs that could not be finished are left"
        await collect_garbage(open_store(place.dataset), delete=True)
        assert await committed(place) == expected
        assert await ingested(place, one_each([objects[7], objects[31]])) == []
        assert await committed(place) == list(range(40))

    asyncio.run(main())


def test_a_sample_that_exceeds_the_target_size_with_its_path_has_a_super_sample_of_its_own() -> None:
    async def main() -> None:
        place = S3Place()
        objects = await place.put(range(10))
        # Its bytes fit a super-sample, but not with their path and checksums.
        large = await open_store(place.raw).put("00100.bin", b"x" * 1990)
        assert await ingested(place, one_each([*objects[:3], large, *objects[3:]])) == []
        await commit({"dataset": place.dataset}, place.deployment(), plenty())
        manifest = await versions.read_manifest(open_store(place.dataset))
        assert manifest.samples == 11
        assert manifest.rows.samples[int(manifest.rows.size_bytes.argmax())] == 1

    asyncio.run(main())


def test_where_nothing_can_be_packed_every_message_is_kept_and_not_much_is_tried() -> None:
    async def main() -> None:
        place = S3Place()
        objects = await place.put(range(200))
        stores: list[WatchedStore] = []

        class Refusing(WatchedStore):
            def __init__(self, store: Store) -> None:
                super().__init__(store)
                stores.append(self)

            async def before(self, number: int, operation: str, key: str) -> None:
                if operation == "put":
                    raise PermissionDeniedError("read-only")

        assert sorted(await ingested(place, one_each(objects), wrap=Refusing)) == [info.key for info in objects]
        assert sum(len(store.calls) for store in stores) < 200

    asyncio.run(main())


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_objects_that_were_replaced_or_deleted_since_are_left_out_and_their_messages_done(how: str) -> None:
    async def main() -> None:
        place = S3Place()
        objects = await place.put(range(20))
        store = open_store(place.raw)
        changed = [objects[3], objects[17]]
        for info in changed:
            if how == "deleted":
                await store.delete(info.key)
            else:
                await place.put([int(info.key[:5])], value_bytes=200)
        assert await ingested(place, one_each(objects)) == []
        assert await committed(place) == [n for n in range(20) if n not in (3, 17)]
        (record,) = await BucketCatalog(open_store(place.dataset)).records()
        assert record.is_committed, "the run that could not be finished is left"
        if how == "replaced":
            assert await ingested(place, one_each([await store.head(info.key) for info in changed])) == []
            assert await committed(place) == list(range(20))

    asyncio.run(main())


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_an_empty_object_is_one_and_is_not_taken_for_what_came_after_it(change: str) -> None:
    async def main() -> None:
        place = S3Place()
        store = open_store(place.raw)
        empty = await store.put("00000.bin", b"")
        stays = await store.put("00001.bin", b"")
        await (store.delete(empty.key) if change == "deleted" else place.put([0]))
        folder = ObjectInfo(key="photos/", size_bytes=0, tag=empty.tag)
        assert await ingested(place, event(*(message(each.key, each) for each in (empty, stays, folder)))) == []
        assert await committed(place) == [1]

    asyncio.run(main())


def test_an_object_that_is_announced_with_two_tags_at_once_is_taken_as_it_is() -> None:
    async def main() -> None:
        place = S3Place()
        (first,) = await place.put([1], value_bytes=100)
        (second,) = await place.put([1], value_bytes=200)
        others = await place.put(range(2, 6))
        delivered = event(
            message("old", first), message("new", second), message("again", second), message("x", *others)
        )
        assert await ingested(place, delivered) == []
        assert await committed(place) == [1, 2, 3, 4, 5]

    asyncio.run(main())


def test_hidden_objects_and_what_stands_for_folders_are_left_out() -> None:
    async def main() -> None:
        place = S3Place()
        objects = await place.put(range(3))
        store = open_store(place.raw)
        left_out = [await store.put(key, b"x") for key in (".hidden", "a/.git/x", "folder/")]
        assert await ingested(place, one_each([*left_out, *objects])) == []
        assert await committed(place) == [0, 1, 2]

    asyncio.run(main())


def test_keys_are_as_the_bucket_spells_them_whatever_characters_they_have() -> None:
    async def main() -> None:
        place = S3Place()
        store = open_store(place.raw)
        spelled = {
            "a+b.bin": "a%2Bb.bin",
            "two words.bin": "two+words.bin",
            "grün/漢😀.bin": "gr%C3%BCn/%E6%BC%A2%F0%9F%98%80.bin",
            "100%.bin": "100%25.bin",
            "a%2Fb.bin": "a%252Fb.bin",
            "../up.bin": "../up.bin",
        }
        messages = []
        for key, sent in spelled.items():
            info = await store.put(key, key.encode())
            messages.append(message(sent, ObjectInfo(key=sent, size_bytes=info.size_bytes, tag=info.tag)))
        failed = await ingested(place, event(*messages))
        assert failed in ([], ["../up.bin"])  # hidden, since a part of it begins with a dot
        await commit({"dataset": place.dataset}, place.deployment(), plenty())
        found = {text(sample, "path"): bytes(sample["data"]) for sample in await samples(place)}
        assert found == {key: key.encode() for key in spelled if key != "../up.bin"}

    asyncio.run(main())


async def samples(place: Place) -> list[Any]:
    manifest = await place.manifest()
    found: list[Any] = []
    for row in range(0 if manifest is None else len(manifest)):
        assert manifest is not None
        data, _ = await open_store(place.dataset).get(manifest.key(row))
        one = SuperSample(data)
        found += [one[index] for index in range(len(one))]
    return found


def text(sample: Mapping[str, Any], name: str) -> str:
    return str(sample[name])


def test_of_images_those_of_an_unknown_class_fail_alone_and_what_is_no_image_is_left_out() -> None:
    async def main() -> None:
        place = S3Place()
        store = open_store(place.raw)
        keys = ["cat/1.jpg", "dog/2.JPEG", "bird/3.png", "cat/deep/4.webp", "cat/readme.txt", "5.jpg"]
        objects = [await store.put(key, key.encode()) for key in keys]
        images = IngestSettings(dataset="train", kind="image-folder", classes=("dog", "cat"), super_sample_bytes=2000)
        assert await ingested(place, one_each(objects), ingest=images) == ["bird/3.png"]
        await commit({"dataset": place.dataset}, place.deployment(), plenty())
        found = {text(sample, "path"): int(sample["label"]) for sample in await samples(place)}
        assert found == {"cat/1.jpg": 1, "dog/2.JPEG": 0, "cat/deep/4.webp": 1}

    asyncio.run(main())


def test_labels_are_those_of_the_data_set_that_is_there() -> None:
    async def main() -> None:
        place = S3Place()
        store = open_store(place.raw)
        for classes in (("dog", "cat"), ("bird", "cat", "dog")):
            info = await store.put(f"cat/{len(classes)}.jpg", b"x")
            images = IngestSettings(dataset="train", kind="image-folder", classes=classes, super_sample_bytes=2000)
            assert await ingested(place, one_each([info]), ingest=images) == []
            await commit({"dataset": place.dataset}, place.deployment(), plenty())
        assert [int(sample["label"]) for sample in await samples(place)] == [1, 1]

    asyncio.run(main())


def tar_of(numbers: Iterable[int]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number in numbers:
            member = tarfile.TarInfo(f"{number:05d}.cls")
            member.size = len(str(number))
            tar.addfile(member, io.BytesIO(str(number).encode()))
    return file.getvalue()


def test_of_tars_each_is_a_run_and_a_bad_one_fails_alone() -> None:
    async def main() -> None:
        place = S3Place()
        store = open_store(place.raw)
        contents = {"a.tar": tar_of(range(40)), "b.tar": b"no tar" * 200, "c.TAR": tar_of(range(40, 50)), "d.txt": b"x"}
        objects = [await store.put(key, data) for key, data in contents.items()]
        tars = IngestSettings(dataset="train", kind="webdataset", super_sample_bytes=2000)
        assert await ingested(place, one_each(objects), ingest=tars) == ["b.tar"]
        assert await ingested(place, one_each(objects), ingest=tars) == ["b.tar"]
        result = await commit({"dataset": place.dataset}, place.deployment(), plenty())
        assert (result["runs"], result["samples"]) == (2, 50)
        assert await ingested(place, one_each([objects[2]]), ingest=tars) == []  # under its number, a third time
        assert (await commit({"dataset": place.dataset}, place.deployment(), plenty()))["samples"] == 50
        assert sorted(int(sample["cls"]) for sample in await samples(place)) == list(range(50))

    asyncio.run(main())


def test_the_first_tar_of_all_is_opened_as_often_as_any_other() -> None:
    async def main() -> None:
        place = S3Place()
        store = open_store(place.raw)
        tars = IngestSettings(dataset="train", kind="webdataset", super_sample_bytes=2000)
        reads: list[list[str]] = []
        for number, key in enumerate(["first.tar", "second.tar"]):
            info = await store.put(key, tar_of(range(10 * number, 10 * number + 10)))
            watched: list[WatchedStore] = []

            def wrap(store: Store, watched: list[WatchedStore] = watched) -> Store:
                watched.append(WatchedStore(store))
                return watched[-1]

            assert await ingested(place, one_each([info]), ingest=tars, wrap=wrap) == []
            await commit({"dataset": place.dataset}, place.deployment(), plenty())
            reads.append([call.split()[0] for each in watched for call in each.calls if call.endswith(key)])
        assert reads[0] == reads[1]
        manifest = await place.manifest()
        assert manifest is not None
        assert manifest.samples == 20

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["files", "webdataset"])
def test_samples_ingested_before_another_process_created_the_data_set_are_in_it(kind: str) -> None:
    async def main() -> None:
        place = S3Place()
        store, data = open_store(place.raw), open_store(place.dataset)
        if kind == "files":
            objects, schema, count = await place.put(range(10)), files_schema(), 10
        else:
            objects, count = [await store.put("a.tar", tar_of(range(30)))], 30
            schema = Schema({"key": Text(), "cls": Array("int64")})
        taken = IngestSettings(dataset="train", kind=kind, super_sample_bytes=2000)
        assert await ingested(place, one_each(objects), ingest=taken) == []
        config = PackConfig(schema=schema, super_sample_bytes=2000, source="laptop")
        async with AsyncPacker(data, config) as packer:
            values = {"data": b"x", "path": "x", "key": "x", "cls": 7}
            await packer.write({name: values[name] for name in schema})
        result = await commit({"dataset": place.dataset}, place.deployment(), plenty())
        assert (result["refused"], result["added_samples"], result["repeated_samples"]) == ([], count, 0)
        assert await verify(data, await versions.read_manifest(data)) == []
        assert await ingested(place, one_each(objects), ingest=taken) == []
        result = await commit({"dataset": place.dataset}, place.deployment(), plenty())
        assert (result["samples"], result["added_samples"]) == (1 + count, 0)

    asyncio.run(main())


def test_objects_of_two_sources_are_two_runs() -> None:
    async def main() -> None:
        place = S3Place()
        store = open_store(place.raw)
        objects = [
            await store.put(f"{folder}/{n:05d}.bin", b"x" * n) for n in range(1, 5) for folder in ("a", "b", "c")
        ]

        made = Deployment(
            place.deployment(sources=(f"s3://{BUCKET}/a", f"s3://{BUCKET}/b")).settings,
            open_url=lambda url: open_store(f"{place.raw}/{url[-1]}" if url.startswith("s3://") else url),
        )
        result = await ingest_queue(one_each(objects), made, plenty())
        failed = [failure["itemIdentifier"] for failure in result["batchItemFailures"]]
        assert failed == [info.key for info in objects if info.key.startswith("c/")]
        assert len(await place.keys("packs/")) == 2

    asyncio.run(main())


def test_what_does_not_come_to_its_end_in_time_is_kept_by_the_queue_and_the_rest_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        place = S3Place()
        objects = await place.put(range(60), value_bytes=1900)
        slow = place.deployment(lambda store: DelayedStore(store, 0.5))
        monkeypatch.setattr("stoker_functions._ingest._RUN_BYTES", 40_000)
        left, rounds = {info.key: info for info in objects}, []
        while left:
            result = await ingest_queue(one_each(list(left.values())), slow, InvocationDeadline.after(15))
            failed = [failure["itemIdentifier"] for failure in result["batchItemFailures"]]
            left = {key: left[key] for key in failed}
            rounds.append(len(left))
            assert await committed(place) == [n for n in range(60) if f"{n:05d}.bin" not in left]
        assert len(rounds) > 1
        assert 0 < rounds[0] < 60

    run_virtual(main())


def test_without_time_nothing_is_begun() -> None:
    async def main() -> None:
        place = S3Place()
        objects = await place.put(range(10))
        calls: list[str] = []

        class Noting(WatchedStore):
            async def before(self, number: int, operation: str, key: str) -> None:
                calls.append(operation)

        result = await ingest_queue(one_each(objects), place.deployment(Noting), InvocationDeadline.after(0))
        assert len(result["batchItemFailures"]) == 10
        assert "put" not in calls

    run_virtual(main())


def test_a_store_that_fails_keeps_every_message() -> None:
    async def main() -> None:
        place = S3Place()
        objects = await place.put(range(10))

        class Failing(WatchedStore):
            async def before(self, number: int, operation: str, key: str) -> None:
                if operation == "put" and key.startswith("packs/"):
                    raise StoreError("no")

        assert sorted(await ingested(place, one_each(objects), wrap=Failing)) == [info.key for info in objects]
        assert await ingested(place, one_each(objects)) == []
        assert await committed(place) == list(range(10))

    asyncio.run(main())


def test_a_deployment_without_ingestion_refuses_events() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="STOKER_INGEST is not set"):
            await ingested(S3Place(), event(), ingest=None)

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [None, [], {}, {"Records": 3}, {"Records": [3]}, {"Records": [{"body": "{}"}]}])
def test_what_no_queue_sends_is_refused(wrong: Any) -> None:
    async def main() -> None:
        with pytest.raises(EventError, match="queue event"):
            await ingested(S3Place(), wrong)

    asyncio.run(main())
