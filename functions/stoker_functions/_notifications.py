"""What buckets and queues say of raw objects that have appeared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote_plus

from stoker._base.fields import Fields
from stoker.abc import ObjectInfo
from stoker.errors import EventError

__all__ = ["Message", "Notified", "cloud_storage_object", "queue_messages"]

_MAX_MESSAGES = 10_000  # the largest batch of a queue
_MAX_RECORDS = 1_000
_MAX_BODY_CHARACTERS = 1 << 20  # the largest message of a queue


@dataclass(frozen=True, slots=True)
class Notified:
    """A raw object that has appeared.

    Attributes:
        url: of its bucket.
        info: its key in the bucket, size and tag.
    """

    url: str
    info: ObjectInfo


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a queue.

    Attributes:
        id: that the queue knows it by.
        objects: what has appeared; none for a test message, or where objects were deleted.
        error: what is wrong with it, if anything.
    """

    id: str
    objects: tuple[Notified, ...] = ()
    error: EventError | None = None


def queue_messages(event: object) -> list[Message]:
    """Return the messages of an SQS event; one that is not valid has an error and does not spoil the others.

    Raises:
        EventError: it is no such event.
    """
    fields = Fields(event, "queue event")
    messages = []
    for record in fields.array("Records", most=_MAX_MESSAGES):
        found = Fields(record, "queue event's record")
        name, body = found.text("messageId"), found.value("body")
        try:
            messages.append(Message(name, tuple(_s3_objects(body))))
        except EventError as error:
            messages.append(Message(name, error=error))
    return messages


def _s3_objects(body: object) -> list[Notified]:
    if not isinstance(body, str) or len(body) > _MAX_BODY_CHARACTERS:
        raise EventError(f"the message's body is not a text of at most {_MAX_BODY_CHARACTERS} characters")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise EventError(f"the message's body {body[:80]!r} is not JSON") from None
    if isinstance(content, Mapping) and content.get("Event") == "s3:TestEvent":
        return []
    records = Fields(content, "S3 notification").array("Records", most=_MAX_RECORDS)
    return [found for record in records if (found := _s3_object(record)) is not None]


def _s3_object(record: object) -> Notified | None:
    fields = Fields(record, "S3 notification's record")
    # Amazon leaves the "s3:" out, others that speak S3 do not.
    if not fields.text("eventName").removeprefix("s3:").startswith("ObjectCreated:"):
        return None
    s3 = fields.within("s3")
    bucket, item = s3.within("bucket"), s3.within("object")
    info = ObjectInfo(
        key=unquote_plus(item.text("key")),
        size_bytes=item.integer("size", default=0),
        tag=item.text("eTag", pattern="[ -~]{1,256}"),
    )
    return Notified(f"s3://{bucket.text('name', pattern='[A-Za-z0-9._-]{3,63}')}", info)


def cloud_storage_object(data: object) -> Notified:
    """Return the object that Google's storage tells of, by what the JSON API says of it.

    This is the body of a notification that Pub/Sub pushes unwrapped, and of a CloudEvent
    ``google.cloud.storage.object.v1.finalized`` in binary mode. Source: Cloud Storage, "Pub/Sub notifications".

    Args:
        data: the body.

    Raises:
        EventError: it is none.
    """
    fields = Fields(data, "storage event")
    size, generation = fields.text("size", pattern="[0-9]{1,15}"), fields.text("generation", pattern="[0-9]{1,19}")
    info = ObjectInfo(key=fields.text("name"), size_bytes=int(size), tag=generation)
    return Notified(f"gs://{fields.text('bucket', pattern='[A-Za-z0-9._-]{3,222}')}", info)
