"""Notifications of S3 in a queue and of Google's storage in Pub/Sub, as in their documentation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.abc import ObjectInfo
from stoker.errors import EventError
from stoker_functions._ingest import NotifiedObject, parse_queue_messages, parse_storage_object
from support.cases import for_each

ETAG = "d41d8cd98f00b204e9800998ecf8427e"


def s3_record(key: str = "happy/face.jpg", **changes: Any) -> dict[str, Any]:
    """Return a record as "Event message structure" of the Amazon S3 User Guide has it."""
    record = {
        "eventVersion": "2.2",
        "eventSource": "aws:s3",
        "awsRegion": "us-west-2",
        "eventTime": "1970-01-01T00:00:00.000Z",
        "eventName": "ObjectCreated:Put",
        "userIdentity": {"principalId": "AIDAJDPLRKLG7UEXAMPLE"},
        "requestParameters": {"sourceIPAddress": "127.0.0.1"},
        "responseElements": {
            "x-amz-request-id": "C3D13FE58DE4C810",
            "x-amz-id-2": "FMyUVURIY8/IgAtTv8xRjskZQpcIZ9KG4V5Wp6S7S/JRWeUWerMUE5JgHvANOjpD",
        },
        "s3": {
            "s3SchemaVersion": "1.0",
            "configurationId": "testConfigRule",
            "bucket": {
                "name": "amzn-s3-demo-bucket",
                "ownerIdentity": {"principalId": "A3NL1KOZZKExample"},
                "arn": "arn:aws:s3:::amzn-s3-demo-bucket",
            },
            "object": {
                "key": key,
                "size": 1024,
                "eTag": ETAG,
                "versionId": "096fKKXTRTtl3on89fVO.nfljtsv6qko",
                "sequencer": "0055AED6DCD90281E5",
            },
        },
    }
    return {**record, **changes}


def sqs_record(body: object, name: str = "059f36b4-87a3-44ab-83d2-661975830a7d") -> dict[str, Any]:
    """Return a record as "Using Lambda with Amazon SQS" of the AWS Lambda Developer Guide has it."""
    return {
        "messageId": name,
        "receiptHandle": "AQEBwJnKyrHigUMZj6rYigCgxlaS3SLy0a...",
        "body": body if isinstance(body, str) else json.dumps(body),
        "attributes": {
            "ApproximateReceiveCount": "1",
            "SentTimestamp": "1545082649183",
            "SenderId": "AIDAIENQZJOLO23YVJ4VO",
            "ApproximateFirstReceiveTimestamp": "1545082649185",
        },
        "messageAttributes": {},
        "md5OfBody": "e4e68fb7bd0e697a0ae8f1bb342846b3",
        "eventSource": "aws:sqs",
        "eventSourceARN": "arn:aws:sqs:us-east-2:123456789012:my-queue",
        "awsRegion": "us-east-2",
    }


def objects_of(*records: dict[str, Any]) -> tuple[NotifiedObject, ...]:
    (message,) = parse_queue_messages({"Records": [sqs_record({"Records": list(records)})]})
    if message.error is not None:
        raise message.error
    return message.objects


def test_a_notification_as_amazon_documents_it_tells_of_an_object() -> None:
    (found,) = objects_of(s3_record())
    assert found == NotifiedObject(
        "s3://amzn-s3-demo-bucket", ObjectInfo(key="happy/face.jpg", size_bytes=1024, tag=ETAG)
    )


@for_each(
    ("sent", "key"),
    [
        ("a.jpg", "a.jpg"),
        ("two+words.jpg", "two words.jpg"),
        ("two%20words.jpg", "two words.jpg"),
        ("one%2Btwo.jpg", "one+two.jpg"),
        ("100%25.jpg", "100%.jpg"),
        ("%252B", "%2B"),
        ("%E6%BC%A2%2F%F0%9F%98%80.jpg", "漢/😀.jpg"),
        ("gr%C3%BCn", "grün"),
        ("a%3Db%26c%3Fd", "a=b&c?d"),
        ("folder/", "folder/"),
        ("a%0Ab", "a\nb"),
    ],
)
def test_a_key_is_decoded_once(sent: str, key: str) -> None:
    (found,) = objects_of(s3_record(sent))
    assert found.info.key == key


@pytest.mark.parametrize(
    "name",
    [
        "ObjectCreated:Put",
        "ObjectCreated:Post",
        "ObjectCreated:Copy",
        "ObjectCreated:CompleteMultipartUpload",
        "s3:ObjectCreated:Put",
    ],
)
def test_every_way_to_create_an_object_counts(name: str) -> None:
    record = s3_record(eventName=name)
    record["s3"]["object"]["eTag"] = f"{ETAG}-17"
    (found,) = objects_of(record)
    assert found.info.tag == f"{ETAG}-17"


@pytest.mark.parametrize(
    "name",
    [
        "ObjectRemoved:Delete",
        "ObjectRemoved:DeleteMarkerCreated",
        "ObjectRestore:Completed",
        "ReducedRedundancyLostObject",
    ],
)
def test_what_does_not_create_an_object_is_passed_over(name: str) -> None:
    removed = s3_record("gone", eventName=name)
    for field in ("size", "eTag"):  # which such events have not
        del removed["s3"]["object"][field]
    assert [found.info.key for found in objects_of(removed, s3_record("here"), removed)] == ["here"]


def test_the_marker_of_a_folder_has_no_size() -> None:
    record = s3_record("folder/")
    del record["s3"]["object"]["size"]
    (found,) = objects_of(record)
    assert found.info.size_bytes == 0


def test_the_message_that_a_bucket_sends_when_it_is_connected_tells_of_nothing() -> None:
    body = {
        "Service": "Amazon S3",
        "Event": "s3:TestEvent",
        "Time": "2014-10-13T15:57:02.089Z",
        "Bucket": "amzn-s3-demo-bucket",
        "RequestId": "5582815E1AEA5ADF",
        "HostId": "8cLeGAmw098X5cv4Zkwcmo8vvZa3eH3eKxsPzbB9wrR+YstdA6Knx4Ip8EXAMPLE",
    }
    (message,) = parse_queue_messages({"Records": [sqs_record(body)]})
    assert (message.objects, message.error) == ((), None)


WRAPPED_BY_SNS = {
    "Type": "Notification",
    "MessageId": "dc1e94d9-56c5-5e96-808d-cc7f68faa162",
    "TopicArn": "arn:aws:sns:us-east-2:111122223333:ExampleTopic1",
    "Message": json.dumps({"Records": [s3_record()]}),
}
BY_EVENT_BRIDGE = {"version": "0", "source": "aws.s3", "detail-type": "Object Created", "detail": {"object": {}}}


def without(*way: str) -> dict[str, Any]:
    record = s3_record()
    at: Any = record
    for name in way[:-1]:
        at = at[name]
    del at[way[-1]]
    return {"Records": [record]}


@for_each(
    "body",
    [
        "",
        "hello",
        "[",
        "3",
        "[" * 200_000,
        "x" * ((1 << 20) + 1),
        [],
        {},
        WRAPPED_BY_SNS,
        BY_EVENT_BRIDGE,
        {"Records": None},
        {"Records": [None]},
        {"Records": [s3_record()] * 1001},
        without("eventName"),
        without("s3"),
        without("s3", "bucket", "name"),
        without("s3", "object", "key"),
        without("s3", "object", "eTag"),
        {"Records": [s3_record(eventName=7)]},
        {"Records": [s3_record(s3=[])]},
        {"Records": [s3_record("k" * 5000)]},
        {"Records": [s3_record(s3={"bucket": {"name": "../b"}, "object": {"key": "k", "size": 1, "eTag": "t"}})]},
        {"Records": [s3_record(s3={"bucket": {"name": "bucket"}, "object": {"key": "k", "size": -1, "eTag": "t"}})]},
        {"Records": [s3_record(s3={"bucket": {"name": "bucket"}, "object": {"key": "k", "size": 1, "eTag": "t\n"}})]},
        {"Records": [s3_record(), s3_record(s3={})]},
    ],
    ids=lambda body: str(body)[:20],
)
def test_a_message_that_is_malformed_has_an_error_and_spoils_no_other(body: object) -> None:
    good = {"Records": [s3_record()]}
    messages = parse_queue_messages({"Records": [sqs_record(good, "1"), sqs_record(body, "2"), sqs_record(good, "3")]})
    assert [(message.id, len(message.objects), message.error is None) for message in messages] == [
        ("1", 1, True),
        ("2", 0, False),
        ("3", 1, True),
    ]
    assert isinstance(messages[1].error, EventError)
    assert len(str(messages[1].error)) < 400


def test_the_largest_batch_of_a_queue_is_read() -> None:
    records = [sqs_record({"Records": [s3_record(f"{number}")]}, str(number)) for number in range(10_000)]
    messages = parse_queue_messages({"Records": records})
    assert [message.id for message in messages] == [str(number) for number in range(10_000)]
    assert [message.objects[0].info.key for message in messages] == [str(number) for number in range(10_000)]
    with pytest.raises(EventError, match="at most 10000"):
        parse_queue_messages({"Records": [*records, records[0]]})


@pytest.mark.parametrize("event", [None, "x", [], {}, {"Records": {}}, {"Records": ["x"]}, {"Records": [{"body": ""}]}])
def test_what_is_no_event_of_a_queue_is_refused_as_a_whole(event: object) -> None:
    with pytest.raises(EventError, match="queue event"):
        parse_queue_messages(event)


def storage_data(**changes: Any) -> dict[str, Any]:
    """Return the data of an event as "Cloud Storage triggers" of Google's Eventarc documentation has it."""
    data = {
        "bucket": "sample-bucket",
        "contentType": "text/plain",
        "crc32c": "rTVTeQ==",
        "etag": "CNHZkbuF/ugCEAE=",
        "generation": "1587627537231057",
        "id": "sample-bucket/folder/Test.cs/1587627537231057",
        "kind": "storage#object",
        "md5Hash": "kF8MuJ5+CTJxvyhHS1xzRg==",
        "mediaLink": "https://www.googleapis.com/download/storage/v1/b/sample-bucket/o/folder%2FTest.cs?alt=media",
        "metageneration": "1",
        "name": "folder/Test.cs",
        "selfLink": "https://www.googleapis.com/storage/v1/b/sample-bucket/o/folder/Test.cs",
        "size": "352",
        "storageClass": "MULTI_REGIONAL",
        "timeCreated": "2020-04-23T07:38:57.230Z",
        "timeStorageClassUpdated": "2020-04-23T07:38:57.230Z",
        "updated": "2020-04-23T07:38:57.230Z",
    }
    return {**data, **changes}


def test_an_event_as_google_documents_it_tells_of_an_object() -> None:
    assert parse_storage_object(storage_data()) == NotifiedObject(
        "gs://sample-bucket", ObjectInfo(key="folder/Test.cs", size_bytes=352, tag="1587627537231057")
    )


@pytest.mark.parametrize("name", ["a+b %2B.jpg", "漢/😀", "folder/"])
def test_names_of_googles_objects_are_not_decoded(name: str) -> None:
    assert parse_storage_object(storage_data(name=name)).info.key == name


@for_each(
    "data",
    [
        None,
        b"{}",
        [],
        {},
        storage_data(size=352),
        storage_data(size="-1"),
        storage_data(size="1e3"),
        storage_data(generation="latest"),
        storage_data(generation=None),
        storage_data(name=None),
        storage_data(bucket="b/../c"),
        storage_data(bucket=""),
    ],
)
def test_what_tells_of_no_object_of_google_is_refused(data: object) -> None:
    with pytest.raises(EventError, match="storage event"):
        parse_storage_object(data)
