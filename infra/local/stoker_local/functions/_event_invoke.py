"""Asynchronous invocations: accepted at once, retried, and given to a queue when all attempts have failed.

Source: AWS Lambda Developer Guide, "How Lambda handles errors and retries with asynchronous invocation" and "Capturing
records of Lambda asynchronous invocations".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from stoker_local.functions._errors import ServiceError
from stoker_local.functions._fleet import Fleet
from stoker_local.functions._outcome import Invocation, Outcome
from stoker_local.functions._tasks import Tasks
from stoker_local.functions._triggers.queue import LocalQueue

__all__ = ["EventInvoker"]


class EventInvoker:
    """Lambda's queue of events, before the functions."""

    def __init__(
        self,
        queues: Mapping[str, LocalQueue],
        *,
        retry_seconds: tuple[float, float],
        tasks: Tasks,
    ) -> None:
        self._queues = queues
        self._retry_seconds = retry_seconds
        self._tasks = tasks

    def accept(self, fleet: Fleet, invocation: Invocation) -> asyncio.Task[None]:
        """Take an event over; the task ends when it has been handled or given up."""
        return self._tasks.start(self._deliver(fleet, invocation))

    async def _deliver(self, fleet: Fleet, invocation: Invocation) -> None:
        for attempt in range(1 + fleet.spec.retries):
            if attempt:
                fleet.account.note("retry", detail=str(attempt))
                await asyncio.sleep(self._retry_seconds[attempt - 1])
            outcome = await self._attempt(fleet, invocation)
            if not outcome.error_type:
                return
        fleet.account.note("dropped", detail=outcome.error_type)
        if fleet.spec.on_failure:
            self._hand_over(fleet, invocation, outcome)

    def _hand_over(self, fleet: Fleet, invocation: Invocation, outcome: Outcome) -> None:
        """Give what has failed to the queue of failures, unless it is more than a message can be."""
        try:
            record = json.dumps(_record(fleet.arn, invocation, outcome, attempts=1 + fleet.spec.retries))
            self._queues[fleet.spec.on_failure].send(record)
        except (ValueError, RecursionError):
            fleet.account.note("undelivered", detail=fleet.spec.on_failure)

    async def _attempt(self, fleet: Fleet, invocation: Invocation) -> Outcome:
        """Wait for the function's concurrency; being throttled all the same is no failed attempt."""
        while True:
            try:
                return await fleet.invoke(invocation, waits=True)
            except ServiceError:
                await asyncio.sleep(self._retry_seconds[0])


def _record(arn: str, invocation: Invocation, outcome: Outcome, *, attempts: int) -> dict[str, Any]:
    return {
        "version": "1.0",
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "requestContext": {
            "requestId": invocation.request_id,
            "functionArn": f"{arn}:$LATEST",
            "condition": "RetriesExhausted",
            "approximateInvokeCount": attempts,
        },
        "requestPayload": json.loads(invocation.payload),
        "responseContext": {"statusCode": 200, "executedVersion": "$LATEST", "functionError": "Unhandled"},
        "responsePayload": json.loads(outcome.payload),
    }
