"""The same events have the same results on Lambda and at Google, over S3 and over Google's storage."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote_plus

import functions_framework.aio as framework
import pytest

import stoker_functions.aws
import stoker_functions.gcp
from stoker import open_store
from stoker._format import versions
from stoker._sources.folders import files_schema
from stoker._sources.parts import SourcePart
from stoker.abc import ObjectInfo
from support.packing import contents

_serial = itertools.count()
SAMPLES = 24


class LambdaContext:
    """Lambda's context of an invocation."""

    def get_remaining_time_in_millis(self) -> int:
        return 60_000


class Lambda:
    """Handlers as Lambda's runtime client calls them."""

    def call(self, name: str, event: object) -> tuple[Any, str]:
        """Return what a handler returns, and the name of its error, if it raised one."""
        handler = getattr(stoker_functions.aws, name)
        try:
            return handler(event, LambdaContext()), ""
        except Exception as error:  # noqa: BLE001 - the runtime client answers with any
            return None, type(error).__name__

    def announce(self, bucket: str, objects: Sequence[ObjectInfo]) -> list[bool]:
        """Say that objects were created, each in a message of its own; return which were taken in."""
        records = [
            {
                "eventName": "ObjectCreated:Put",
                "s3": {
                    "bucket": {"name": bucket},
                    "object": {"key": quote_plus(info.key, safe="/"), "size": info.size_bytes, "eTag": info.tag},
                },
            }
            for info in objects
        ]
        messages = [
            {"messageId": str(number), "body": json.dumps({"Records": [record]})}
            for number, record in enumerate(records)
        ]
        result, error = self.call("ingest", {"Records": messages})
        assert not error
        failed = {failure["itemIdentifier"] for failure in result["batchItemFailures"]}
        return [message["messageId"] not in failed for message in messages]

    def close(self) -> None:
        deployment, runner = stoker_functions.aws._instance()
        runner.run(deployment.close())
        runner.close()
        stoker_functions.aws._instance.cache_clear()


class Google:
    """Handlers as Google's functions framework calls them, without a server in between."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def call(self, name: str, event: object) -> tuple[Any, str]:
        """Return what a handler returns, and the name of its error, if it answered with one."""
        status, answer = self._runner.run(self._request(name, json.dumps(event).encode(), {}))
        assert (status == 200) != ("errorType" in answer)
        return (answer, "") if status == 200 else (None, answer["errorType"])

    def announce(self, bucket: str, objects: Sequence[ObjectInfo]) -> list[bool]:
        """Say that objects were created, each in an event of its own; return which were taken in.

        Every second one is a CloudEvent, the others are notifications that Pub/Sub pushes unwrapped.
        """
        cloud_event = {
            "ce-specversion": "1.0",
            "ce-type": "google.cloud.storage.object.v1.finalized",
            "ce-source": f"//storage.googleapis.com/projects/_/buckets/{bucket}",
            "ce-id": "1",
        }
        events = [
            {"bucket": bucket, "name": info.key, "size": str(info.size_bytes), "generation": info.tag}
            for info in objects
        ]

        async def announce() -> list[int]:
            requests = (
                self._request("ingest", json.dumps(event).encode(), cloud_event if number % 2 else {})
                for number, event in enumerate(events)
            )
            return [status for status, _ in await asyncio.gather(*requests)]

        return [status == 200 for status in self._runner.run(announce())]

    async def _request(self, name: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, Any]:
        source = str(stoker_functions.gcp.__file__)
        make: Any = framework.create_asgi_app_from_module  # it has no types
        app = make(name, source, None, stoker_functions.gcp, None)
        sent: list[dict[str, Any]] = []
        received = iter([{"type": "http.request", "body": body, "more_body": False}])
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "https",
            "path": "/",
            "raw_path": b"/",
            "query_string": b"",
            "headers": [
                (name.encode(), value.encode())
                for name, value in {"content-type": "application/json", **headers}.items()
            ],
            "server": ("localhost", 443),
            "client": ("127.0.0.1", 50_000),
        }

        async def receive() -> dict[str, Any]:
            return next(received, {"type": "http.disconnect"})

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await app(scope, receive, send)
        answer = b"".join(message.get("body", b"") for message in sent[1:])
        return sent[0]["status"], json.loads(answer) if answer.startswith(b"{") else answer

    def close(self) -> None:
        self._runner.run(stoker_functions.gcp._deployment().close())
        stoker_functions.gcp._deployment.cache_clear()
        self._runner.close()


PLATFORMS: dict[str, type[Lambda] | type[Google]] = {"lambda": Lambda, "google": Google}


class Bucket:
    """A bucket that an environment leads to, with a folder of its own.

    Attributes:
        url: of the folder.
        name: of the bucket.
        prefix: of the keys in it.
    """

    def __init__(self, scheme: str) -> None:
        self.name, self.prefix = "stoker", f"function-contract-{next(_serial)}"
        self.url = f"{scheme}://{self.name}/{self.prefix}"

    def put(self, objects: Mapping[str, bytes]) -> list[ObjectInfo]:
        """Write raw objects; return their metadata."""

        async def put() -> list[ObjectInfo]:
            store = open_store(f"{self.url}/raw")
            try:
                return [await store.put(key, data) for key, data in objects.items()]
            finally:
                await store.close()

        return asyncio.run(put())

    def announced(self, objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
        """Return objects as the bucket itself calls them."""
        return [
            ObjectInfo(key=f"{self.prefix}/raw/{info.key}", size_bytes=info.size_bytes, tag=info.tag)
            for info in objects
        ]

    def samples(self, dataset: str) -> list[tuple[str, bytes]]:
        """Return path and content of every sample of a data set."""

        async def read() -> list[tuple[str, bytes]]:
            store = open_store(dataset)
            try:
                manifest = await versions.read_manifest(store)
                return [(sample["path"], bytes(sample["data"])) for sample in await contents(store, manifest)]
            finally:
                await store.close()

        return asyncio.run(read())


@pytest.fixture(params=["s3", "gs"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket of S3 and one of Google, each on this machine."""
    return reached(request.param, request, monkeypatch)


def reached(scheme: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Return a bucket that this process, which has no cloud, reaches on this machine."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("local_bucket").url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stoker")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "stoker-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", request.getfixturevalue("local_gcs").url)
    monkeypatch.setenv("AWS_LAMBDA_FUNCTION_MEMORY_SIZE", "1024")
    for name in ("FUNCTION_TARGET", "FUNCTION_SIGNATURE_TYPE"):  # the framework sets them
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    bucket = Bucket(scheme)
    monkeypatch.setenv("STOKER_DATASETS", " ".join(f"{name}={bucket.url}/{name}" for name in PLATFORMS))
    monkeypatch.setenv("STOKER_SOURCES", f"{bucket.url}/raw")
    monkeypatch.delenv("STOKER_INGEST", raising=False)
    return bucket


@pytest.fixture
def platforms() -> Iterator[dict[str, Lambda | Google]]:
    """Both platforms, without an instance yet."""
    started = {name: make() for name, make in PLATFORMS.items()}
    yield started
    for platform in started.values():
        platform.close()


def content(number: int) -> bytes:
    return f"raw object {number} ".encode() * 20


def story(platform: Lambda | Google, dataset: str, parts: Sequence[SourcePart]) -> list[tuple[Any, str]]:
    """Return what the handlers make of good events, of repeated ones, and of bad ones."""
    events: list[tuple[str, Any]] = []
    for part in parts:
        events += [("pack", {**part.to_json(), "dataset": dataset})] * 2
    job = {"dataset": dataset, "job": parts[0].job, "mode": "create"}
    events += [
        ("commit", {"dataset": dataset}),
        ("commit", {**job, "runs": [*(part.run for part in parts), "0" * 16]}),
        ("commit", {**job, "runs": [part.run for part in parts]}),
        ("commit", {**job, "runs": [part.run for part in parts]}),
        ("compact", {"dataset": dataset, "super_sample_bytes": 100_000}),
        ("compact", {"dataset": dataset, "super_sample_bytes": 100_000}),
        ("pack", {**parts[0].to_json(), "dataset": f"{dataset}-other"}),
        ("pack", {**parts[0].to_json(), "dataset": dataset, "source": "file:///etc"}),
        ("pack", {**parts[0].to_json(), "dataset": dataset, "objects": [["raw-of-nobody", 3, "1"]]}),
        ("pack", {**parts[0].to_json(), "dataset": dataset, "super_sample_bytes": 32 << 20 | 1}),
        ("commit", {"dataset": dataset, "jobs": "0" * 16}),
        ("compact", {"dataset": f"{dataset}/nothing"}),
        ("shuffle", {"dataset": dataset, "nonsense": 1}),
    ]
    nonsense: list[Any] = [None, [], {}, "x"]
    events += itertools.product(("pack", "commit", "compact", "shuffle"), nonsense)
    called = (platform.call(name, event) for name, event in events)
    # The number of requests per URL depends on time.
    return [({**result, "requests": None} if result else None, error) for result, error in called]


def test_the_same_events_have_the_same_results(bucket: Bucket, platforms: dict[str, Lambda | Google]) -> None:
    objects = bucket.put({f"{number:03d}+ü.bin": content(number) for number in range(SAMPLES)})
    parts = [
        SourcePart(
            dataset="",
            dataset_id="d" * 16,
            source=f"{bucket.url}/raw",
            kind="files",
            schema=files_schema(),
            super_sample_bytes=2000,
            objects=tuple(objects[start : start + 8]),
            job="a" * 16,
        )
        for start in range(0, SAMPLES, 8)
    ]
    results = {name: story(platform, f"{bucket.url}/{name}", parts) for name, platform in platforms.items()}
    assert results["lambda"] == results["google"]
    refused = ["EventError", "EventError", "NotFoundError", "EventError", "EventError", "", "EventError"]
    expected = [*[""] * 7, "PackError", *[""] * 4, *refused, *["EventError"] * 16]
    assert [error for _, error in results["lambda"]] == expected
    for name in platforms:
        samples = [(f"{number:03d}+ü.bin", content(number)) for number in range(SAMPLES)]
        assert bucket.samples(f"{bucket.url}/{name}") == samples


@pytest.mark.parametrize(("platform", "scheme"), [("lambda", "s3"), ("google", "gs")])
def test_what_is_announced_is_in_the_data_set_once(
    platform: str, scheme: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = reached(scheme, request, monkeypatch)
    monkeypatch.setenv("STOKER_INGEST", json.dumps({"dataset": platform, "super_sample_bytes": 2000}))
    objects = bucket.put({f"{number:03d}+ü %.bin": content(number) for number in range(SAMPLES)})
    told = bucket.announced(objects)
    foreign = ObjectInfo(key="elsewhere/x.bin", size_bytes=3, tag="1")
    started = PLATFORMS[platform]()
    try:
        assert started.announce(bucket.name, [*told[:10], foreign, *told[10:15]]) == [True] * 10 + [False] + [True] * 5
        assert started.announce(bucket.name, told[5:]) == [True] * (SAMPLES - 5)
        result, error = started.call("commit", {"dataset": f"{bucket.url}/{platform}"})
        assert (error, result["samples"], result["repeated_samples"]) == ("", SAMPLES, 10)
    finally:
        started.close()
    expected = [(f"{number:03d}+ü %.bin", content(number)) for number in range(SAMPLES)]
    assert sorted(bucket.samples(f"{bucket.url}/{platform}")) == expected
