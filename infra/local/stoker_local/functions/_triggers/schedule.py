"""What a clock sends to a function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from stoker_local.functions._tasks import Tasks
from stoker_local.functions._triggers.spec import Schedule

__all__ = ["Timetable", "keep_firing", "scheduled_event"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """All schedules of a cloud.

    Attributes:
        schedules: by name.
        send: hands a function an event; the task ends when that has been handled or given up.
        new_id: makes ids of events.
        clock: POSIX seconds.
    """

    schedules: Mapping[str, Schedule]
    send: Callable[[str, dict[str, Any]], asyncio.Task[None]]
    region: str
    account: str
    new_id: Callable[[], str]
    clock: Callable[[], float]

    def start(self, tasks: Tasks) -> None:
        """Keep firing what is enabled."""
        for name, schedule in self.schedules.items():
            if schedule.enabled:
                tasks.start(keep_firing(schedule, partial(self.fire, name)))

    def fire(self, name: str) -> asyncio.Task[None]:
        """Fire a schedule at once.

        Raises:
            KeyError: there is no such schedule.
        """
        schedule = self.schedules[name]
        event = scheduled_event(
            schedule, region=self.region, account=self.account, event_id=self.new_id(), now=self.clock()
        )
        return self.send(schedule.function, event)


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
