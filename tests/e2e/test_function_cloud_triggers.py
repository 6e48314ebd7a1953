from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import pytest

from stoker_local import BucketConfig, LocalBucket, running_bucket
from stoker_local.functions import (
    EventSource,
    FunctionCloudConfig,
    FunctionFault,
    FunctionFaultKind,
    FunctionFaultPlan,
    Notification,
    QueueSpec,
    Schedule,
    function_cloud,
)
from support.function_cloud import cloud_of, function
from support.local_bucket import s3_client
from support.waiting import until


def counter(file: Path, **changes: Any) -> Any:
    return function("count", environment={"COUNT_FILE": str(file)}, **changes)


def events_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def bodies_of(file: Path) -> list[str]:
    return [record["body"] for event in events_of(file) for record in event["Records"]]


def put(bucket: LocalBucket, *keys: str) -> None:
    with s3_client(bucket) as client:
        for key in keys:
            client.put_object(Bucket="stoker", Key=key, Body=b"abc")


def test_objects_that_are_put_reach_the_function_with_a_test_event_before_them(tmp_path: Path) -> None:
    async def scenario(bucket: LocalBucket) -> None:
        file = tmp_path / "calls"
        async with cloud_of(
            counter(file),
            bucket=bucket,
            tmp="folder",
            queues=(QueueSpec(name="raw"),),
            notifications=(Notification(bucket="stoker", queue="raw", prefix="in/", suffix=".jpg"),),
            sources=(EventSource(queue="raw", function="count", batch_size=4),),
        ) as cloud:
            await cloud.queues["raw"].wait_until_empty()
            keys = [f"in/{name}.jpg" for name in ("a", "b c", "d+e%", "ü", "e", "f")]
            await asyncio.to_thread(put, bucket, "in/a.png", "out/a.jpg", *keys)
            await until(lambda: len(bodies_of(file)) >= 7)
            await cloud.queues["raw"].wait_until_empty()
            first, *others = bodies_of(file)
            assert json.loads(first)["Event"] == "s3:TestEvent"
            records = [json.loads(body)["Records"][0]["s3"] for body in others]
            assert sorted(unquote_plus(record["object"]["key"]) for record in records) == sorted(keys)
            assert {record["bucket"]["name"] for record in records} == {"stoker"}
            assert cloud.statistics()["count"].errors == 0
        await asyncio.to_thread(put, bucket, "in/later.jpg")  # there is no listener, and no error

    with running_bucket(BucketConfig()) as bucket:
        asyncio.run(scenario(bucket))


def test_a_multipart_upload_is_notified_once_it_is_complete() -> None:
    async def scenario() -> None:
        async with (
            LocalBucket() as bucket,
            cloud_of(
                bucket=bucket,
                queues=(QueueSpec(name="raw"),),
                notifications=(Notification(bucket="stoker", queue="raw"),),
            ) as cloud,
        ):

            def work() -> None:
                with s3_client(bucket) as client:
                    upload = client.create_multipart_upload(Bucket="stoker", Key="k")["UploadId"]
                    place = {"Bucket": "stoker", "Key": "k", "UploadId": upload}
                    tag = client.upload_part(PartNumber=1, Body=b"abc", **place)["ETag"]
                    parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
                    client.complete_multipart_upload(MultipartUpload=parts, **place)
                    client.delete_object(Bucket="stoker", Key="k")

            await asyncio.to_thread(work)
            await until(lambda: len(cloud.queues["raw"].bodies) == 2)
            record = json.loads(cloud.queues["raw"].bodies[1])["Records"][0]
            assert record["eventName"] == "ObjectCreated:CompleteMultipartUpload"
            assert record["s3"]["object"]["size"] == 3

    asyncio.run(scenario())


def test_messages_that_fail_come_back_and_end_among_the_dead_letters(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "calls"
        async with cloud_of(
            counter(file, timeout_seconds=1.5),
            tmp="folder",
            queues=(
                QueueSpec(name="q", visibility_seconds=1.5, max_receives=2, dead_letters="dead"),
                QueueSpec(name="dead"),
            ),
            sources=(EventSource(queue="q", function="count", batch_size=3, window_seconds=0.1, concurrency=1),),
        ) as cloud:
            await cloud.invoke("count", {"Records": []})  # a slow cold start must not outlast the visibility
            for body in ("good 1", "bad", "good 2"):
                cloud.queues["q"].send(body)
            await cloud.queues["q"].wait_until_empty()
            assert cloud.queues["dead"].bodies == ["bad"]
            assert bodies_of(file)[:3] == ["good 1", "bad", "good 2"]
            receives = [
                record["attributes"]["ApproximateReceiveCount"]
                for event in events_of(file)
                for record in event["Records"]
                if record["body"] == "bad"
            ]
            assert receives == ["1", "2"]

    asyncio.run(scenario())


def test_a_batch_whose_function_is_killed_comes_back_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "calls"
        kill = FunctionFault(kind=FunctionFaultKind.KILL)
        # It takes a second, so that it is killed before it has ended, however late the order comes.
        slow = {"COUNT_FILE": str(file), "COUNT_SECONDS": "1"}
        async with cloud_of(
            function("count", environment=slow, timeout_seconds=3.0),
            tmp="folder",
            faults=FunctionFaultPlan(script=(kill,)),
            queues=(QueueSpec(name="q", visibility_seconds=3.0),),
            sources=(EventSource(queue="q", function="count", batch_size=2, window_seconds=0.2, concurrency=1),),
        ) as cloud:
            cloud.queues["q"].send("a")
            cloud.queues["q"].send("b")
            await cloud.queues["q"].wait_until_empty()
            assert [record["body"] for record in events_of(file)[0]["Records"]] == ["a", "b"]
            figures = cloud.statistics()["count"]
            # Once it has come back: again, if the cold start has outlasted the visibility.
            assert figures.errors >= 1
            assert figures.invocations >= 2

    asyncio.run(scenario())


def test_a_queue_does_not_exceed_the_concurrency_of_its_source(tmp_path: Path) -> None:
    async def scenario() -> None:
        slow = function("count", environment={"COUNT_FILE": str(tmp_path / "calls"), "COUNT_SECONDS": "0.05"})
        async with cloud_of(
            slow,
            tmp="folder",
            queues=(QueueSpec(name="q"),),
            sources=(EventSource(queue="q", function="count", batch_size=1, concurrency=2),),
        ) as cloud:
            for number in range(12):
                cloud.queues["q"].send(str(number))
            await cloud.queues["q"].wait_until_empty()
            figures = cloud.statistics()["count"]
            assert (figures.peak_instances, figures.throttles, figures.invocations) == (2, 0, 12)

    asyncio.run(scenario())


def test_a_schedule_fires_on_time_and_on_demand(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "calls"
        async with cloud_of(
            counter(file),
            tmp="folder",
            schedules=(
                Schedule(name="often", function="count", rate="rate(1 second)"),
                Schedule(name="never", function="count", rate="rate(1 second)", input={"job": "7"}, enabled=False),
                Schedule(name="failing", function="count", rate="rate(1 day)", input={"fails": True}),
            ),
        ) as cloud:
            await cloud.fire("never")
            assert events_of(file) == [{"job": "7"}]
            await cloud.fire("failing")
            assert events_of(file).count({"fails": True}) == 3
            await until(lambda: sum(event.get("source") == "aws.events" for event in events_of(file)) >= 2)
            assert events_of(file).count({"job": "7"}) == 1
            with pytest.raises(KeyError):
                cloud.fire("unknown")

    asyncio.run(scenario())


def test_a_bucket_that_is_not_there_cannot_notify() -> None:
    async def scenario() -> None:
        config = FunctionCloudConfig(
            queues=(QueueSpec(name="q"),), notifications=(Notification(bucket="nowhere", queue="q"),)
        )
        async with LocalBucket() as bucket:
            with pytest.raises(ValueError, match=r"names a bucket .* nowhere"):
                async with function_cloud(config, bucket=bucket):
                    pytest.fail("it has started")

    asyncio.run(scenario())
