"""Queues and triggers, made and started as the configuration says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from stoker_local._objects import ObjectCreated
from stoker_local.functions._outcome import Outcome
from stoker_local.functions._tasks import Tasks
from stoker_local.functions._triggers.event_source import poll
from stoker_local.functions._triggers.notification import created_message, matches
from stoker_local.functions._triggers.queue import LocalQueue
from stoker_local.functions._triggers.spec import EventSource, Notification, QueueSpec

__all__ = ["Notifier", "make_queues", "start_source", "watching"]


def make_queues(specs: Sequence[QueueSpec], *, seed: int, clock: Callable[[], float]) -> dict[str, LocalQueue]:
    """Return the queues by name, each made after the one that takes its dead letters."""
    queues: dict[str, LocalQueue] = {}
    waiting = {spec.name: spec for spec in specs}
    while waiting:
        spec = next(spec for spec in waiting.values() if spec.dead_letters not in waiting)
        del waiting[spec.name]
        chance = random.Random(f"{seed}/{spec.name}")  # noqa: S311  (reproducible duplicates, not secrets)
        queues[spec.name] = LocalQueue(spec, chance=chance, dead_letters=queues.get(spec.dead_letters), clock=clock)
    return queues


def start_source(
    tasks: Tasks,
    source: EventSource,
    queue: LocalQueue,
    invoke: Callable[[dict[str, Any]], Awaitable[Outcome]],
    *,
    queue_arn: str,
) -> None:
    """Start as many pollers as invocations may run at once."""
    for _ in range(source.concurrency):
        tasks.start(poll(source, queue, invoke, queue_arn=queue_arn))


class Notifier:
    """Tells queues of objects that are created in S3."""

    def __init__(self, notifications: Sequence[Notification], queues: Mapping[str, LocalQueue], *, region: str) -> None:
        self._notifications = notifications
        self._queues = queues
        self._region = region
        self._sequence = 0

    def notify(self, created: ObjectCreated) -> None:
        """Send a message to every queue that is to be told of the object."""
        for notification in self._notifications:
            if matches(notification, created):
                self._sequence += 1
                message = created_message(created, region=self._region, sequence=self._sequence)
                self._queues[notification.queue].send(message)


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
