from __future__ import annotations

import asyncio
import json
from urllib.parse import unquote_plus

import pytest

from stoker.testing import run_virtual
from stoker_local._s3.model import ObjectCreated, StoredObject
from stoker_local.functions import Notification, Schedule
from stoker_local.functions._google import finalized_message
from stoker_local.functions._triggers import created_message, matches, run_schedule, scheduled_event, setup_message


def created(key: str = "k", bucket: str = "raw") -> ObjectCreated:
    stored = StoredObject(data=b"abc", tag='"900150"', modified_at=0.25, headers={"content-type": "image/png"})
    return ObjectCreated(bucket=bucket, key=key, event="ObjectCreated:Put", stored=stored)


@pytest.mark.parametrize(
    "key", ["plain", "a/b c.jpg", "plus+and%percent", "ünïcode/日本", "quote\"'&<>", "tab\tline\n"]
)
def test_keys_are_url_encoded_and_come_back_whole(key: str) -> None:
    record = json.loads(created_message(created(key), region="us-east-1", sequence=1))["Records"][0]
    encoded = record["s3"]["object"]["key"]
    assert encoded.isascii()
    assert " " not in encoded
    assert unquote_plus(encoded) == key


def test_a_notification_says_what_was_created() -> None:
    record = json.loads(created_message(created(), region="eu-west-1", sequence=255))["Records"][0]
    assert (record["eventSource"], record["eventName"]) == ("aws:s3", "ObjectCreated:Put")
    assert (record["awsRegion"], record["eventTime"]) == ("eu-west-1", "1970-01-01T00:00:00.250Z")
    assert record["s3"]["bucket"] == {
        "name": "raw",
        "ownerIdentity": {"principalId": "local"},
        "arn": "arn:aws:s3:::raw",
    }
    told = {"key": "k", "size": 3, "eTag": "900150", "sequencer": "00000000000000FF"}
    assert record["s3"]["object"] == told


def test_later_notifications_have_greater_sequencers() -> None:
    messages = [json.loads(created_message(created(), region="r", sequence=n)) for n in (9, 10, 4095, 4096)]
    sequencers = [message["Records"][0]["s3"]["object"]["sequencer"] for message in messages]
    assert sequencers == sorted(sequencers)


def test_the_first_message_of_a_notification_is_a_test_without_records() -> None:
    message = json.loads(setup_message("raw", 0.0))
    assert (message["Event"], message["Bucket"]) == ("s3:TestEvent", "raw")
    assert "Records" not in message


@pytest.mark.parametrize(
    ("key", "bucket", "told"),
    [
        ("in/a.jpg", "raw", True),
        ("in/.jpg", "raw", True),
        ("in/a.png", "raw", False),
        ("out/a.jpg", "raw", False),
        ("in/a.jpg", "cooked", False),
    ],
)
def test_a_queue_gets_notifications_of_its_bucket_prefix_and_suffix_only(key: str, bucket: str, told: bool) -> None:
    notification = Notification(bucket="raw", queue="q", prefix="in/", suffix=".jpg")
    assert matches(notification, created(key, bucket)) is told


def test_a_finalized_object_is_a_cloud_event_whose_headers_can_be_sent() -> None:
    message = json.loads(finalized_message(created('a b/"ü"\n%')))
    headers = message["headers"]
    assert headers["ce-type"] == "google.cloud.storage.object.v1.finalized"
    assert headers["ce-subject"] == "objects/a%20b/%22%C3%BC%22%0A%25"
    assert message["body"]["name"] == 'a b/"ü"\n%'
    assert (message["body"]["bucket"], message["body"]["size"]) == ("raw", "3")


def test_a_schedule_fires_once_in_every_period_however_late_the_loop_is() -> None:
    async def scenario() -> list[float]:
        loop, fired = asyncio.get_running_loop(), list[float]()
        task = asyncio.create_task(
            run_schedule(Schedule(name="s", function="f", rate="rate(1 minute)"), lambda: fired.append(loop.time()))
        )
        await asyncio.sleep(200)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return fired

    assert run_virtual(scenario()) == pytest.approx([60.0, 120.0, 180.0])


def test_a_schedule_sends_its_input_or_what_event_bridge_sends() -> None:
    plain = Schedule(name="s", function="f", rate="rate(1 day)")
    event = scheduled_event(plain, region="r", account="1", event_id="i", now=0.0)
    assert (event["detail-type"], event["time"]) == ("Scheduled Event", "1970-01-01T00:00:00Z")
    assert event["resources"] == ["arn:aws:events:r:1:rule/s"]
    own = Schedule(name="s", function="f", rate="rate(1 day)", input={"dataset": "s3://b/d"})
    assert scheduled_event(own, region="r", account="1", event_id="i", now=0.0) == {"dataset": "s3://b/d"}
