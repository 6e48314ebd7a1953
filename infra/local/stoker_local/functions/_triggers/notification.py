"""Objects that are created, as S3 tells queues of them and as Google tells functions.

Sources: Amazon S3 User Guide, "Event message structure"; Google Cloud Storage, "Object finalized" (CloudEvents).
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote_plus

from stoker_local._objects import ObjectCreated
from stoker_local.functions._triggers.spec import Notification

__all__ = ["created_message", "matches", "opening_message"]


def matches(notification: Notification, created: ObjectCreated) -> bool:
    """Whether a queue is to be told of an object."""
    return (
        created.bucket == notification.bucket
        and created.key.startswith(notification.prefix)
        and created.key.endswith(notification.suffix)
    )


def _iso(posix_seconds: float) -> str:
    return datetime.fromtimestamp(posix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def opening_message(bucket: str, now: float) -> str:
    """Return what S3 sends first, when a notification is set up."""
    event = {
        "Service": "Amazon S3",
        "Event": "s3:TestEvent",
        "Time": _iso(now),
        "Bucket": bucket,
        "RequestId": "local",
        "HostId": "local",
    }
    return json.dumps(event)


def created_message(created: ObjectCreated, *, region: str, sequence: int) -> str:
    """Return what S3 sends of an object; its key is URL-encoded, with a plus for a blank."""
    record: dict[str, Any] = {
        "eventVersion": "2.1",
        "eventSource": "aws:s3",
        "awsRegion": region,
        "eventTime": _iso(created.stored.modified_at),
        "eventName": created.event,
        "userIdentity": {"principalId": "local"},
        "requestParameters": {"sourceIPAddress": "127.0.0.1"},
        "responseElements": {"x-amz-request-id": "local", "x-amz-id-2": "local"},
        "s3": {
            "s3SchemaVersion": "1.0",
            "configurationId": "local",
            "bucket": {
                "name": created.bucket,
                "ownerIdentity": {"principalId": "local"},
                "arn": f"arn:aws:s3:::{created.bucket}",
            },
            "object": {
                "key": quote_plus(created.key, safe="/"),
                "size": len(created.stored.data),
                "eTag": created.stored.tag.strip('"'),
                "sequencer": f"{sequence:016X}",
            },
        },
    }
    return json.dumps({"Records": [record]})
