"""The local function cloud's configuration, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from stoker_local._config import WELL_KNOWN, is_this_machine, read_json, unique_names
from stoker_local._s3.signature import KeyPair
from stoker_local.functions._faults import FunctionFaultPlan
from stoker_local.functions._specs import (
    EventSource,
    FunctionSpec,
    GoogleSpec,
    Notification,
    ObjectFinalized,
    QueueSpec,
    Schedule,
    check_variables,
)

__all__ = ["FunctionCloudConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCloudConfig:
    """What the local function cloud runs.

    Attributes:
        host: a loopback address; other machines are never let in.
        keys: who may sign requests; the first one is in :meth:`FunctionCloud.environment`.
        environment: variables that every function gets from its platform: endpoints, its role's credentials.
        notifications: from the local bucket to queues.
        sources: from queues to functions.
        finalized: from the local GCS to Google functions.
        idle_seconds: an instance without work for so long is reclaimed.
        init_seconds: a cold start that takes longer fails.
        event_retry_seconds: waits before the first and the second retry of an event. Lambda's are 60 and 120.
        tmp: ``tmpfs`` gives every instance a ``/tmp`` of its own in a private mount namespace; ``folder`` a folder in
            ``TMPDIR``, in which one file, but not all together, is limited; ``auto`` the first where the system allows.
        seed: of request ids and of duplicates in queues.
    """

    host: str = "127.0.0.1"
    port: int = 0
    region: str = "us-east-1"
    account: str = "000000000000"
    keys: tuple[KeyPair, ...] = (WELL_KNOWN,)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    functions: tuple[FunctionSpec, ...] = ()
    queues: tuple[QueueSpec, ...] = ()
    notifications: tuple[Notification, ...] = ()
    sources: tuple[EventSource, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    google: tuple[GoogleSpec, ...] = ()
    finalized: tuple[ObjectFinalized, ...] = ()
    idle_seconds: float = 300.0
    init_seconds: float = 10.0
    event_retry_seconds: tuple[float, float] = (1.0, 2.0)
    tmp: Literal["auto", "tmpfs", "folder"] = "auto"
    faults: FunctionFaultPlan = field(default_factory=FunctionFaultPlan)
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_this_machine(self.host):
            raise ValueError(f"host={self.host!r} is open to other machines; functions run only for this one")
        if not self.keys:
            raise ValueError("keys are empty: nobody could sign a request")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port={self.port} is not within [0, 65535]")
        if not (self.idle_seconds > 0 and self.init_seconds > 0 and min(self.event_retry_seconds) >= 0):
            raise ValueError(
                f"idle_seconds={self.idle_seconds} and init_seconds={self.init_seconds} must be positive, "
                f"event_retry_seconds={self.event_retry_seconds} not negative"
            )
        if self.tmp not in ("auto", "tmpfs", "folder"):
            raise ValueError(f"tmp={self.tmp!r} is not 'auto', 'tmpfs' or 'folder'")
        check_variables(self.environment, owner="every function")
        self._check_names()
        self._check_visibility()
        self._check_dead_letters()

    def _check_names(self) -> None:
        """Refuse a name that two have, and one that nothing has."""
        unique_names("function", [*(spec.name for spec in self.functions), *(spec.name for spec in self.google)])
        unique_names("schedule", (schedule.name for schedule in self.schedules))
        queues = unique_names("queue", (spec.name for spec in self.queues))
        functions, google = {spec.name for spec in self.functions}, {spec.name for spec in self.google}
        told: tuple[tuple[str, set[str], Sequence[object], str], ...] = (
            ("queue", queues | {""}, self.queues, "dead_letters"),
            ("queue", queues | {""}, self.functions, "on_failure"),
            ("queue", queues, self.notifications, "queue"),
            ("queue", queues, self.finalized, "queue"),
            ("queue", queues, self.sources, "queue"),
            ("function", functions, self.sources, "function"),
            ("function", functions, self.schedules, "function"),
            ("Google function", google, self.finalized, "function"),
        )
        for what, known, records, field_name in told:
            if unknown := sorted({getattr(record, field_name) for record in records} - known):
                there = ", ".join(sorted(known - {""})) or "none"
                raise ValueError(f"there is no {what} {', '.join(unknown)}; there are: {there}")

    def _check_visibility(self) -> None:
        """Refuse what Lambda refuses: messages that would come back while their function may still be at work."""
        timeouts = {spec.name: spec.timeout_seconds for spec in self.functions}
        visible = {spec.name: spec.visibility_seconds for spec in self.queues}
        for source in self.sources:
            if visible[source.queue] < timeouts[source.function]:
                raise ValueError(
                    f"visibility_seconds={visible[source.queue]} of {source.queue} is less than "
                    f"timeout_seconds={timeouts[source.function]} of {source.function}"
                )

    def _check_dead_letters(self) -> None:
        following = {spec.name: spec.dead_letters for spec in self.queues}
        for name in following:
            passed, at = {name}, following[name]
            while at:
                if at in passed:
                    raise ValueError(f"the dead letters of {name} come back to {at}")
                passed.add(at)
                at = following[at]

    @classmethod
    def from_json(cls, text: str) -> FunctionCloudConfig:
        """Return the configuration that a JSON object names; what it leaves out has its default.

        Raises:
            ValueError: it is not a JSON object, has an unknown name, or a value is not valid.
        """
        return read_json(cls, text, where="the configuration")
