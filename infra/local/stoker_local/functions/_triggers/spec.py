"""What triggers are told to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["EventSource", "Notification", "QueueSpec", "Schedule"]

_RATE = re.compile(r"rate\((?P<count>[1-9][0-9]{0,8}) (?P<unit>second|minute|hour|day)(?P<plural>s?)\)", re.ASCII)
_UNIT_SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}
_MAX_BATCH = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """A queue.

    Attributes:
        visibility_seconds: how long a received message is hidden; not deleted by then, it comes back.
        max_receives: a message received so often without being deleted goes to ``dead_letters``.
        dead_letters: a queue; empty gives messages back for ever.
        duplicate_probability: chance that a received message will come again although it is deleted, as queues that
            deliver at least once may do.
    """

    name: str
    visibility_seconds: float = 30.0
    max_receives: int = 5
    dead_letters: str = ""
    duplicate_probability: float = 0.0

    def __post_init__(self) -> None:
        if not self.visibility_seconds > 0 or self.max_receives < 1:
            raise ValueError(
                f"visibility_seconds={self.visibility_seconds} or max_receives={self.max_receives} of {self.name} "
                "is not positive"
            )
        if self.dead_letters == self.name:
            raise ValueError(f"{self.name} cannot be its own queue of dead letters")
        if not 0 <= self.duplicate_probability < 1:
            raise ValueError(f"duplicate_probability={self.duplicate_probability} of {self.name} is not within [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """Tells a queue of objects that are created in a bucket of the local S3, by keys' beginning and end."""

    bucket: str
    queue: str
    prefix: str = ""
    suffix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSource:
    """Feeds a function from a queue.

    Attributes:
        batch_size: most messages of one invocation.
        window_seconds: how long a batch waits to be full, from its first message.
        concurrency: most invocations at once; each waits for the function's own concurrency rather than be throttled.
        report_failures: the function says which messages failed (``ReportBatchItemFailures``); else a batch succeeds
            or fails whole.
    """

    queue: str
    function: str
    batch_size: int = 10
    window_seconds: float = 0.0
    concurrency: int = 2
    report_failures: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= _MAX_BATCH or self.concurrency < 1 or not 0 <= self.window_seconds <= 300:
            raise ValueError(
                f"batch_size={self.batch_size} is not within [1, {_MAX_BATCH}], concurrency={self.concurrency} "
                f"not positive or window_seconds={self.window_seconds} not within [0, 300]"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Calls a function again and again.

    Attributes:
        rate: ``rate(5 minutes)``; beside EventBridge's units there are seconds.
        input: the event; None is what EventBridge sends.
        enabled: if not, it only fires when it is told to.
    """

    name: str
    function: str
    rate: str
    input: Mapping[str, Any] | None = field(default=None)
    enabled: bool = True

    def __post_init__(self) -> None:
        match = _RATE.fullmatch(self.rate)
        if match is None or (match["count"] == "1") == bool(match["plural"]):
            raise ValueError(f"{self.rate!r} of {self.name} is not like 'rate(1 minute)' or 'rate(5 minutes)'")

    @property
    def period_seconds(self) -> float:
        """The time between two calls."""
        match = _RATE.fullmatch(self.rate)
        assert match is not None  # noqa: S101  (checked when it was made)
        return int(match["count"]) * _UNIT_SECONDS[match["unit"]]
