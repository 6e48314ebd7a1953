"""What a clock sends to a function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from stoker_local.functions.triggers.spec import Schedule

__all__ = ["keep_firing", "scheduled_event"]


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
