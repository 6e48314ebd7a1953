"""From a queue to a function: batches, and which of their messages have been handled.

Source: AWS Lambda Developer Guide, "Using Lambda with Amazon SQS" and "Reporting batch item failures".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from stoker_local.functions._errors import ServiceError
from stoker_local.functions._outcome import Outcome
from stoker_local.functions._payload import MAX_REQUEST_BYTES
from stoker_local.functions._triggers.queue import Delivery, LocalQueue
from stoker_local.functions._triggers.spec import EventSource

__all__ = ["batch_event", "failed_messages", "poll"]

_RECORD_BYTES = 640  # of a record beside its body, at most


async def poll(
    source: EventSource, queue: LocalQueue, invoke: Callable[[dict[str, Any]], Awaitable[Outcome]], *, queue_arn: str
) -> None:
    """Feed a function from a queue until cancelled, one batch at a time.

    Messages that were not handled are left to the queue: they come back when their visibility ends.
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
        failed = failed_messages(batch, outcome, reports=source.report_failures)
        for delivery in batch:
            if delivery.message_id not in failed:
                queue.delete(delivery.receipt)


def batch_event(batch: Sequence[Delivery], *, queue_arn: str) -> dict[str, Any]:
    """Return a batch as Lambda hands it to a function."""
    records = [
        {
            "messageId": delivery.message_id,
            "receiptHandle": delivery.receipt,
            "body": delivery.body,
            "attributes": {
                "ApproximateReceiveCount": str(delivery.receives),
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


def failed_messages(batch: Sequence[Delivery], outcome: Outcome, *, reports: bool) -> set[str]:
    """Return the ids of the messages that were not handled.

    All of them, if the function failed, or if what it reports is malformed or names a message that is not in the batch.
    """
    everything = {delivery.message_id for delivery in batch}
    if outcome.error_type:
        return everything
    if not reports:
        return set()
    try:
        result = json.loads(outcome.payload)
    except (ValueError, RecursionError):
        return everything
    if result is None:
        return set()
    if not isinstance(result, dict):
        return everything
    failures = result.get("batchItemFailures") or []
    if not isinstance(failures, list):
        return everything
    named = [item.get("itemIdentifier") if isinstance(item, dict) else None for item in failures]
    known = {name for name in named if isinstance(name, str) and name in everything}
    return known if all(isinstance(name, str) and name in everything for name in named) else everything
