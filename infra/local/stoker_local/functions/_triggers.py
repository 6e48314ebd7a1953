"""What calls functions by itself: schedules, and objects that are created, as S3 tells queues of them.

Sources: Amazon S3 User Guide, "Event message structure"; Amazon EventBridge, "Scheduled Event".
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote_plus

from stoker_local._objects import ObjectCreated
from stoker_local.functions._config import Notification, QueueSpec, Schedule
from stoker_local.functions._queue import LocalQueue

__all__ = [
    "create_queues",
    "created_message",
    "keep_firing",
    "matches",
    "opening_message",
    "scheduled_event",
    "watching",
]


async def keep_firing(schedule: Schedule, fire: Callable[[], object]) -> None:
    """Fire after every period, until cancelled; a late event loop delays no later firing."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due += schedule.period_seconds
        await asyncio.sleep(due - loop.time())
        fire()


def scheduled_event(schedule: Schedule, *, region: str, account: str, event_id: str, now: float) -> dict[str, Any]:
    """Return the event that a schedule sends: its own input, or what EventBridge sends."""
    if schedule.input is not None:
        return dict(schedule.input)
    return {
        "version": "0",
        "id": event_id,
        "detail-type": "Scheduled Event",
        "source": "aws.events",
        "account": account,
        "time": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "region": region,
        "resources": [f"arn:aws:events:{region}:{account}:rule/{schedule.name}"],
        "detail": {},
    }


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


def create_queues(specs: Sequence[QueueSpec], *, seed: int, clock: Callable[[], float]) -> dict[str, LocalQueue]:
    """Return the queues by name, each made after the one that takes its dead letters."""
    queues: dict[str, LocalQueue] = {}
    waiting = {spec.name: spec for spec in specs}
    while waiting:
        spec = next(spec for spec in waiting.values() if spec.dead_letters not in waiting)
        del waiting[spec.name]
        chance = random.Random(f"{seed}/{spec.name}")  # noqa: S311  (reproducible duplicates, not secrets)
        queues[spec.name] = LocalQueue(spec, chance=chance, dead_letters=queues.get(spec.dead_letters), clock=clock)
    return queues


@contextmanager
def watching(watchers: list[Callable[[ObjectCreated], None]], react: Callable[[ObjectCreated], None]) -> Iterator[None]:
    """React to objects that are created, on this event loop, whatever thread the bucket runs on."""
    loop = asyncio.get_running_loop()

    def on_created(created: ObjectCreated) -> None:
        loop.call_soon_threadsafe(react, created)

    watchers.append(on_created)
    try:
        yield
    finally:
        watchers.remove(on_created)
