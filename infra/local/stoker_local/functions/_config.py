"""The local function cloud's configuration: functions, queues and triggers, each checked, and as a whole."""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal

from stoker._base.arguments import AtLeastOne, Bound, Bounded, NotNegative, Positive
from stoker._stores.options import is_this_machine
from stoker_local._bucket import WELL_KNOWN, JsonConfig, unique_names
from stoker_local._network import check_probabilities, kind_at
from stoker_local._s3.signature import KeyPair

_LAMBDA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_ENVIRONMENT_BYTES = 4096
_RATE = re.compile(r"rate\((?P<count>[1-9][0-9]{0,8}) (?P<unit>second|minute|hour|day)(?P<plural>s?)\)", re.ASCII)
_UNIT_SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}
_SERVICE_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_VARIABLE_VALUE = re.compile(r"[\x01-\ud7ff\ue000-\U0010ffff]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec(Bounded):
    """A Lambda function.

    Attributes:
        handler: ``module.function``, importable from ``task_root`` or from this Python's packages.
        task_root: folder of the code, where the function's processes run.
        timeout_seconds: of one invocation.
        concurrency: most invocations at once, each in an instance of its own; one more is throttled.
        tmp_mb: size of ``/tmp``.
        environment: the function's variables, at most 4 KB in all.
        url_auth: who may call its function URL; empty gives it none.
        retries: of events (``InvocationType="Event"``) whose function failed.
        on_failure: queue that takes events which failed every time; empty drops them.
    """

    name: str
    handler: str
    task_root: str = "."
    memory_mb: Annotated[int, Bound(">=", 128), Bound("<=", 10_240)] = 128
    timeout_seconds: Annotated[float, Bound(">", 0), Bound("<=", 900)] = 3.0
    concurrency: AtLeastOne[int] = 10
    tmp_mb: Annotated[int, Bound(">=", 512), Bound("<=", 10_240)] = 512
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    url_auth: Literal["", "AWS_IAM", "NONE"] = ""
    retries: Annotated[int, Bound(">=", 0), Bound("<=", 2)] = 2
    on_failure: str = ""

    def __post_init__(self) -> None:
        if not _LAMBDA_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a function name: 1 to 64 of A-Z, a-z, 0-9, '-' and '_'")
        if "." not in self.handler:
            raise ValueError(f"handler={self.handler!r} of {self.name} is not module.function")
        if not Path(self.task_root).is_dir():
            raise ValueError(f"task_root={self.task_root!r} of {self.name} is no folder")
        Bounded.__post_init__(self)
        size_bytes = check_variables(self.environment, owner=self.name)
        if size_bytes > _ENVIRONMENT_BYTES:
            raise ValueError(f"the environment of {self.name} has {size_bytes} bytes; Lambda takes 4096")

    @property
    def memory_bytes(self) -> int:
        """The configured memory."""
        return self.memory_mb << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec(Bounded):
    """A queue.

    Attributes:
        visibility_seconds: how long a received message is hidden; not deleted by then, it comes back.
        max_receives: a message received so often without being deleted goes to ``dead_letters``.
        dead_letters: a queue; empty gives messages back for ever.
        duplicate_probability: chance that a received message will come again although it is deleted, as queues that
            deliver at least once may do.
    """

    name: str
    visibility_seconds: Positive[float] = 30.0
    max_receives: AtLeastOne[int] = 5
    dead_letters: str = ""
    duplicate_probability: Annotated[float, Bound(">=", 0), Bound("<", 1)] = 0.0

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        if self.dead_letters == self.name:
            raise ValueError(f"{self.name} cannot be its own queue of dead letters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """Tells a queue of objects that are created in a bucket of the local S3, by keys' beginning and end."""

    bucket: str
    queue: str
    prefix: str = ""
    suffix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSource(Bounded):
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
    batch_size: Annotated[int, Bound(">=", 1), Bound("<=", 10_000)] = 10
    window_seconds: Annotated[float, Bound(">=", 0), Bound("<=", 300)] = 0.0
    concurrency: AtLeastOne[int] = 2
    report_failures: bool = True


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GoogleSpec(Bounded):
    """A Google Cloud Function, second generation.

    Attributes:
        source: the Python file.
        target: the function in it.
        signature: what it takes.
        cpus: of an instance; billed beside its memory.
        timeout_seconds: of one request.
        instances: most instances at once.
        concurrency: most requests at once in one instance.
        environment: the function's variables.
        token: bearer token that requests must carry, as the platform demands of who may not be anybody; empty lets
            everybody on this machine in.
    """

    name: str
    source: str
    target: str
    signature: Literal["http", "cloudevent"] = "http"
    memory_mb: Annotated[int, Bound(">=", 128)] = 512
    cpus: Positive[float] = 1.0
    timeout_seconds: Annotated[float, Bound(">", 0), Bound("<=", 3600)] = 60.0
    instances: AtLeastOne[int] = 4
    concurrency: Annotated[int, Bound(">=", 1), Bound("<=", 1000)] = 1
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not _SERVICE_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a service name: 1 to 63 of a-z, 0-9 and '-'")
        if not Path(self.source).is_file():
            raise ValueError(f"source={self.source!r} of {self.name} is no file")
        if not self.target.isidentifier():
            raise ValueError(f"target={self.target!r} of {self.name} is not the name of a function")
        Bounded.__post_init__(self)
        check_variables(self.environment, owner=self.name)

    @property
    def folder(self) -> str:
        """Where the code lies."""
        return str(Path(self.source).absolute().parent)

    @property
    def memory_bytes(self) -> int:
        """The configured memory."""
        return self.memory_mb << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFinalized(Bounded):
    """Tells a Google function of objects that are created in a bucket of the local GCS, as CloudEvents.

    Attributes:
        queue: holds events until the function has answered them with a 2xx status; its dead letters take the others.
        concurrency: most events under way at once.
    """

    bucket: str
    function: str
    queue: str
    concurrency: AtLeastOne[int] = 2


def check_variables(variables: Mapping[str, str], *, owner: str) -> int:
    """Return the size of the variables in bytes; errors name them and never show a value.

    Raises:
        ValueError: a process cannot have them.
    """
    size_bytes = 0
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} in the environment of {owner} is no name: letters, digits and '_'")
        if not isinstance(value, str) or not _VARIABLE_VALUE.fullmatch(value):
            raise ValueError(f"{name} in the environment of {owner} is not a text that a process can have")
        size_bytes += len(name) + len(value.encode())
    return size_bytes


class FunctionFaultKind(StrEnum):
    """The ways in which a cloud can treat an invocation badly."""

    KILL = "kill"  # its instance is killed in mid-invocation
    FREEZE = "freeze"  # its instance stands still in mid-invocation for a while
    DUPLICATE = "duplicate"  # its event is delivered twice
    RECLAIM = "reclaim"  # the idle instances are gone, so it is a cold start
    THROTTLE = "throttle"  # it is refused: 429 TooManyRequestsException


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFault(Bounded):
    """One fault.

    Attributes:
        after_seconds: when a kill or a freeze strikes, from the start of the handler; if that has ended, it misses.
        freeze_seconds: how long a freeze lasts.
    """

    kind: FunctionFaultKind
    after_seconds: NotNegative[float] = 0.0
    freeze_seconds: NotNegative[float] = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFaultPlan(Bounded):
    """Which invocations are struck.

    Attributes:
        script: faults of the first matching invocations, in order of arrival; None lets one pass.
        probabilities: chance of each kind, for matching invocations after the script; at most 1 in all.
        functions: names of functions that match; empty is all.
        within_seconds: kills and freezes drawn by chance strike at a moment drawn from [0, ``within_seconds``).
        freeze_seconds: of freezes drawn by chance.
        seed: of the draws. What hits a function's n-th invocation depends on nothing but this, its name and n.
    """

    script: tuple[FunctionFault | None, ...] = ()
    probabilities: Mapping[FunctionFaultKind, float] = field(default_factory=dict)
    functions: tuple[str, ...] = ()
    within_seconds: NotNegative[float] = 0.5
    freeze_seconds: NotNegative[float] = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        check_probabilities(self.probabilities)
        Bounded.__post_init__(self)


class FunctionFaultInjector:
    """A fault plan in operation."""

    __slots__ = ("_ordinals", "_plan", "_script")

    def __init__(self, plan: FunctionFaultPlan) -> None:
        self.replace(plan)

    def replace(self, plan: FunctionFaultPlan) -> None:
        """Follow another plan, from its beginning."""
        self._plan = plan
        self._script = deque(plan.script)
        self._ordinals: Counter[str] = Counter()

    def draw(self, function: str) -> FunctionFault | None:
        """Return the fault of the invocation that has just arrived, if it has one."""
        plan = self._plan
        if plan.functions and function not in plan.functions:
            return None
        if self._script:
            return self._script.popleft()
        if not plan.probabilities:
            return None
        self._ordinals[function] += 1
        # A generator of its own for each invocation: what one draws does not depend on the others' order of arrival.
        chance = random.Random(f"{plan.seed}/{function}/{self._ordinals[function]}")  # noqa: S311  (not secrets)
        kind = kind_at(chance.random(), plan.probabilities)
        if kind is None:
            return None
        return FunctionFault(
            kind=kind,
            after_seconds=chance.random() * plan.within_seconds,
            freeze_seconds=plan.freeze_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCloudConfig(JsonConfig):
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
    port: Annotated[int, Bound(">=", 0), Bound("<=", 65535)] = 0
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
    idle_seconds: Positive[float] = 300.0
    init_seconds: Positive[float] = 10.0
    event_retry_seconds: tuple[float, float] = (1.0, 2.0)
    tmp: Literal["auto", "tmpfs", "folder"] = "auto"
    faults: FunctionFaultPlan = field(default_factory=FunctionFaultPlan)
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_this_machine(self.host):
            raise ValueError(f"host={self.host!r} is open to other machines; functions run only for this one")
        if not self.keys:
            raise ValueError("keys are empty: nobody could sign a request")
        Bounded.__post_init__(self)
        if not min(self.event_retry_seconds) >= 0:
            raise ValueError(f"event_retry_seconds={self.event_retry_seconds} is negative")
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
        try:
            TopologicalSorter({spec.name: [spec.dead_letters] for spec in self.queues}).prepare()
        except CycleError as error:
            name = min(error.args[1])
            raise ValueError(f"the dead letters of {name} come back to {name}") from error
