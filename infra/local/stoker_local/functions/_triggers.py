"""Triggers of functions: schedules, object notifications, and queues with at-least-once delivery.

Sources: Amazon S3 User Guide, "Event message structure"; Amazon EventBridge, "Scheduled Event"; Amazon SQS Developer
Guide, "visibility timeout", "dead-letter queues" and "at-least-once delivery"; AWS Lambda Developer Guide, "Using
Lambda with Amazon SQS" and "Reporting batch item failures".
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from graphlib import TopologicalSorter
from typing import Any
from urllib.parse import quote_plus

from stoker._deprecation import alias_attributes
from stoker_local._s3.model import ObjectCreated
from stoker_local.functions._config import EventSource, Notification, QueueSpec, Schedule
from stoker_local.functions._statistics import MAX_REQUEST_BYTES, Outcome, ServiceError


async def run_schedule(schedule: Schedule, fire: Callable[[], object]) -> None:
    """Call ``fire`` after every period, until cancelled; the periods do not drift if the event loop is late."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due += schedule.period_seconds
        await asyncio.sleep(due - loop.time())
        fire()


def scheduled_event(schedule: Schedule, *, region: str, account: str, event_id: str, now: float) -> dict[str, Any]:
    """Return the event of a schedule: its input, or EventBridge's scheduled event."""
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
    """Return whether a notification applies to an object."""
    return (
        created.bucket == notification.bucket
        and created.key.startswith(notification.prefix)
        and created.key.endswith(notification.suffix)
    )


def _iso(posix_seconds: float) -> str:
    return datetime.fromtimestamp(posix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def setup_message(bucket: str, now: float) -> str:
    """Return the test message that S3 sends when a notification is set up."""
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
    """Return S3's message about a created object; its key is URL-encoded, with a plus for a space."""
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
    """Create the queues, each after its dead-letter queue; return them by name."""
    queues: dict[str, LocalQueue] = {}
    specs_by_name = {spec.name: spec for spec in specs}
    for name in TopologicalSorter({spec.name: [spec.dead_letters] for spec in specs}).static_order():
        if spec := specs_by_name.get(name):
            chance = random.Random(f"{seed}/{name}")  # noqa: S311  (reproducible duplicates, not secrets)
            queues[name] = LocalQueue(spec, chance=chance, dead_letters=queues.get(spec.dead_letters), clock=clock)
    return queues


@contextmanager
def watch_objects(
    watchers: list[Callable[[ObjectCreated], None]], callback: Callable[[ObjectCreated], None]
) -> Iterator[None]:
    """Call ``callback`` on this event loop for each new object, even if the bucket runs in another thread."""
    loop = asyncio.get_running_loop()

    def on_created(created: ObjectCreated) -> None:
        loop.call_soon_threadsafe(callback, created)

    watchers.append(on_created)
    try:
        yield
    finally:
        watchers.remove(on_created)


_MAX_MESSAGE_BYTES = 1 << 20
_RECORD_BYTES = 640  # maximum size of a record without its body


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMessage:
    """An immutable message of a queue.

    Attributes:
        message_id: id of the message.
        body: content.
        sent_at: time of sending, in POSIX seconds.
        first_received_at: time of the first receive, in POSIX seconds; 0 if it was never received.
        receive_count: number of receives.
        receipt: receipt handle of the latest receive, which deletes the message while it is hidden.
    """

    message_id: str
    body: str
    sent_at: float
    first_received_at: float = 0.0
    receive_count: int = 0
    receipt: str = ""


@alias_attributes("LocalQueue", {"drained": "wait_until_empty"})
class LocalQueue:
    """An in-memory queue with at-least-once delivery; use it on one event loop.

    Args:
        spec: configuration of the queue.
        chance: generator of message ids and duplicates.
        dead_letters: queue that receives messages after ``spec.max_receives`` receives; None redelivers for ever.
        clock: returns the current time in POSIX seconds; default ``time.time``.

    Example:
        >>> import random
        >>> queue = LocalQueue(QueueSpec(name="raw"), chance=random.Random(0))
        >>> _ = queue.send("hello")
        >>> queue.bodies
        ['hello']
    """

    def __init__(
        self,
        spec: QueueSpec,
        *,
        chance: random.Random,
        dead_letters: LocalQueue | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.spec = spec
        self._chance = chance
        self._dead_letters = dead_letters
        self._clock = clock
        self._visible: deque[LocalMessage] = deque()
        self._hidden: dict[str, tuple[LocalMessage, asyncio.TimerHandle]] = {}
        self._receipts = 0
        self._change_event = asyncio.Event()

    def __repr__(self) -> str:
        return f"<LocalQueue {self.spec.name} {len(self._visible)} visible, {len(self._hidden)} hidden>"

    def __len__(self) -> int:
        return len(self._visible) + len(self._hidden)

    @property
    def bodies(self) -> list[str]:
        """Bodies of the visible messages, oldest first; reading them does not receive them."""
        return [message.body for message in self._visible]

    async def wait_until_empty(self) -> None:
        """Wait until the queue has neither visible nor hidden messages."""
        while len(self):
            await self._wait_for_change()

    def send(self, body: str) -> str:
        """Send a message and return its id.

        Raises:
            ValueError: the body is empty or longer than 1 MiB.
        """
        if not 0 < len(body.encode()) <= _MAX_MESSAGE_BYTES:
            raise ValueError(f"a message for {self.spec.name} has {len(body.encode())} bytes; it takes 1 to 1048576")
        message_id = f"{self._chance.getrandbits(128):032x}"
        self.add(LocalMessage(message_id=message_id, body=body, sent_at=self._clock()))
        return message_id

    async def receive(
        self,
        limit: int,
        *,
        window_seconds: float = 0.0,
        limit_bytes: int = 6_000_000,
        size_of: Callable[[str], int] = len,
    ) -> list[LocalMessage]:
        """Wait for a batch of messages; return and hide them, oldest first.

        The batch ends at ``limit`` messages, at ``limit_bytes``, or when the window is over.

        Args:
            limit: maximum number of messages.
            window_seconds: time to wait for further messages after the first, in seconds.
            limit_bytes: maximum total size, in bytes; a longer message is returned alone.
            size_of: returns the size that a body counts, in bytes.
        """
        messages: list[LocalMessage] = []
        left_bytes = self._receive_into(messages, limit, limit_bytes, size_of)
        while not messages:
            await self._wait_for_change()
            left_bytes = self._receive_into(messages, limit, limit_bytes, size_of)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(window_seconds):
                while len(messages) < limit and not self._visible:  # a visible message here is one that does not fit
                    await self._wait_for_change()
                    left_bytes = self._receive_into(messages, limit, left_bytes, size_of)
        return messages

    async def _wait_for_change(self) -> None:
        self._change_event.clear()
        await self._change_event.wait()

    def delete(self, receipt: str) -> None:
        """Delete a message; a receipt that is no longer valid is ignored."""
        if hidden := self._hidden.pop(receipt, None):
            hidden[1].cancel()
            self._change_event.set()

    def close(self) -> None:
        """Discard all messages."""
        for _, timer in self._hidden.values():
            timer.cancel()
        self._hidden.clear()
        self._visible.clear()
        self._change_event.set()

    def add(self, message: LocalMessage) -> None:
        """Append a message, visible."""
        self._visible.append(message)
        self._change_event.set()

    def _receive_into(
        self, messages: list[LocalMessage], limit: int, left_bytes: int, size_of: Callable[[str], int]
    ) -> int:
        """Hide visible messages and append them to ``messages`` while they fit; return the remaining bytes.

        Messages that have been received ``max_receives`` times move to the dead-letter queue instead.
        """
        while self._visible and len(messages) < limit:
            message = self._visible[0]
            if self._dead_letters is not None and message.receive_count >= self.spec.max_receives:
                self._visible.popleft()
                self._dead_letters.add(replace(message, receive_count=0, first_received_at=0.0))
                self._change_event.set()
                continue
            size_bytes = size_of(message.body)
            if messages and size_bytes > left_bytes:
                break
            left_bytes -= size_bytes
            self._visible.popleft()
            messages.append(self._hide(message))
        return left_bytes

    def _hide(self, message: LocalMessage) -> LocalMessage:
        self._receipts += 1
        message = replace(
            message,
            receipt=f"{message.message_id}-{self._receipts}",
            receive_count=message.receive_count + 1,
            first_received_at=message.first_received_at or self._clock(),
        )
        if self._chance.random() < self.spec.duplicate_probability:
            self.add(message)
        timer = asyncio.get_running_loop().call_later(self.spec.visibility_seconds, self._reappear, message.receipt)
        self._hidden[message.receipt] = (message, timer)
        return message

    def _reappear(self, receipt: str) -> None:
        message, _ = self._hidden.pop(receipt)
        self.add(message)


async def poll_queue(
    source: EventSource, queue: LocalQueue, invoke: Callable[[dict[str, Any]], Awaitable[Outcome]], *, queue_arn: str
) -> None:
    """Invoke a function with batches from a queue until cancelled, one batch at a time.

    Messages that were not handled stay in the queue and become visible again after their visibility time.
    """
    while True:
        batch = await queue.receive(
            source.batch_size,
            window_seconds=source.window_seconds,
            limit_bytes=MAX_REQUEST_BYTES - _RECORD_BYTES,
            size_of=lambda body: _RECORD_BYTES + len(json.dumps(body)),
        )
        try:
            outcome = await invoke(batch_event(batch, queue_arn=queue_arn))
        except ServiceError:
            continue
        failed = failed_messages(batch, outcome, reports_failures=source.report_failures)
        for delivery in batch:
            if delivery.message_id not in failed:
                queue.delete(delivery.receipt)


def batch_event(batch: Sequence[LocalMessage], *, queue_arn: str) -> dict[str, Any]:
    """Return the event that Lambda passes to a function for a batch."""
    records = [
        {
            "messageId": delivery.message_id,
            "receiptHandle": delivery.receipt,
            "body": delivery.body,
            "attributes": {
                "ApproximateReceiveCount": str(delivery.receive_count),
                "SentTimestamp": str(int(delivery.sent_at * 1000)),
                "SenderId": "local",
                "ApproximateFirstReceiveTimestamp": str(int(delivery.first_received_at * 1000)),
            },
            "messageAttributes": {},
            "md5OfBody": hashlib.md5(delivery.body.encode(), usedforsecurity=False).hexdigest(),
            "eventSource": "aws:sqs",
            "eventSourceARN": queue_arn,
            "awsRegion": queue_arn.split(":")[3],
        }
        for delivery in batch
    ]
    return {"Records": records}


def failed_messages(batch: Sequence[LocalMessage], outcome: Outcome, *, reports_failures: bool) -> set[str]:
    """Return the ids of the messages that were not handled.

    These are all messages if the function failed, or if its report is malformed or names a message outside the batch.
    """
    everything = {delivery.message_id for delivery in batch}
    if outcome.error_type:
        return everything
    if not reports_failures:
        return set()
    try:
        result = json.loads(outcome.payload)
        failures = [] if result is None else result.get("batchItemFailures") or []
        named: set[str] = {failure["itemIdentifier"] for failure in failures}
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
        return everything
    return named if named.issubset(everything) else everything
