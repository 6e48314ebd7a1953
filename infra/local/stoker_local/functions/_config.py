"""Configuration of the local function cloud: functions, queues, triggers and faults, with their validation."""

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

from stoker._base.arguments import AtLeastOne, BoundedConfig, NotNegative, NumberBound, Positive
from stoker._stores.options import is_loopback
from stoker_local._bucket import WELL_KNOWN_KEY, JsonConfig, unique_names
from stoker_local._network import check_probabilities, draw_kind
from stoker_local._s3.signature import KeyPair

_LAMBDA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_MAX_ENVIRONMENT_BYTES = 4096
_RATE = re.compile(r"rate\((?P<count>[1-9][0-9]{0,8}) (?P<unit>second|minute|hour|day)(?P<plural>s?)\)", re.ASCII)
_UNIT_SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}
_SERVICE_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_VARIABLE_VALUE = re.compile(r"[\x01-\ud7ff\ue000-\U0010ffff]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec(BoundedConfig):
    """Configuration of a Lambda function.

    Attributes:
        name: name of the function: 1 to 64 of A-Z, a-z, 0-9, '-' and '_'.
        handler: ``module.function``, importable from ``task_root`` or from this Python's packages.
        task_root: folder of the code and working folder of the function's processes.
        memory_mb: memory of an instance, in MiB (128 to 10,240).
        timeout_seconds: time limit of one invocation, in seconds (at most 900).
        concurrency: maximum number of concurrent invocations, each in its own instance; further ones are throttled.
        tmp_mb: size of ``/tmp``, in MiB (512 to 10,240).
        environment: environment variables, at most 4 KB in total.
        url_auth: access check of the function URL, ``AWS_IAM`` or ``NONE``; empty gives the function no URL.
        retries: number of retries of an asynchronous event (``InvocationType="Event"``) that failed (0 to 2).
        on_failure: queue that receives events whose retries all failed; empty drops them.

    Example:
        >>> FunctionSpec(name="ingest", handler="stoker_functions.aws.ingest", memory_mb=1769).memory_bytes >> 20
        1769
    """

    name: str
    handler: str
    task_root: str = "."
    memory_mb: Annotated[int, NumberBound(">=", 128), NumberBound("<=", 10_240)] = 128
    timeout_seconds: Annotated[float, NumberBound(">", 0), NumberBound("<=", 900)] = 3.0
    concurrency: AtLeastOne[int] = 10
    tmp_mb: Annotated[int, NumberBound(">=", 512), NumberBound("<=", 10_240)] = 512
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    url_auth: Literal["", "AWS_IAM", "NONE"] = ""
    retries: Annotated[int, NumberBound(">=", 0), NumberBound("<=", 2)] = 2
    on_failure: str = ""

    def __post_init__(self) -> None:
        if not _LAMBDA_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a function name: 1 to 64 of A-Z, a-z, 0-9, '-' and '_'")
        if "." not in self.handler:
            raise ValueError(f"handler={self.handler!r} of {self.name} is not of the form module.function")
        if not Path(self.task_root).is_dir():
            raise ValueError(f"task_root={self.task_root!r} of {self.name} is not a folder")
        BoundedConfig.__post_init__(self)
        size_bytes = check_variables(self.environment, owner=self.name)
        if size_bytes > _MAX_ENVIRONMENT_BYTES:
            raise ValueError(f"the environment of {self.name} has {size_bytes} bytes; Lambda allows 4096")

    @property
    def memory_bytes(self) -> int:
        """Memory of an instance, in bytes."""
        return self.memory_mb << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec(BoundedConfig):
    """Configuration of a queue with at-least-once delivery.

    Attributes:
        name: name of the queue.
        visibility_seconds: time for which a received message is hidden, in seconds; if it has not been deleted by
            then, it becomes visible again.
        max_receives: number of receives after which a message that was never deleted moves to ``dead_letters``.
        dead_letters: name of the dead-letter queue; empty redelivers messages without limit.
        duplicate_probability: probability that a received message is delivered a second time even if it is deleted.

    Example:
        >>> QueueSpec(name="raw", dead_letters="dead").max_receives
        5
    """

    name: str
    visibility_seconds: Positive[float] = 30.0
    max_receives: AtLeastOne[int] = 5
    dead_letters: str = ""
    duplicate_probability: Annotated[float, NumberBound(">=", 0), NumberBound("<", 1)] = 0.0

    def __post_init__(self) -> None:
        BoundedConfig.__post_init__(self)
        if self.dead_letters == self.name:
            raise ValueError(f"{self.name} cannot be its own queue of dead letters; name another in dead_letters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """Sends a message to a queue for every object that is created in a bucket of the local S3.

    Example:
        >>> notification = Notification(bucket="raw", queue="raw", suffix=".jpg")

    Attributes:
        bucket: name of the bucket.
        queue: name of the queue.
        prefix: prefix of the keys that are notified; empty is every key.
        suffix: suffix of the keys that are notified; empty is every key.
    """

    bucket: str
    queue: str
    prefix: str = ""
    suffix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSource(BoundedConfig):
    """Invokes a Lambda function with batches of messages from a queue.

    Example:
        >>> source = EventSource(queue="raw", function="ingest", batch_size=100, window_seconds=5)

    Attributes:
        queue: name of the queue.
        function: name of the Lambda function.
        batch_size: maximum number of messages per invocation.
        window_seconds: time to wait for a full batch after its first message, in seconds.
        concurrency: maximum number of concurrent invocations; each waits for the function's own concurrency instead of
            being throttled.
        report_failures: whether the function reports which messages failed (``ReportBatchItemFailures``); otherwise a
            batch succeeds or fails as a whole.
    """

    queue: str
    function: str
    batch_size: Annotated[int, NumberBound(">=", 1), NumberBound("<=", 10_000)] = 10
    window_seconds: Annotated[float, NumberBound(">=", 0), NumberBound("<=", 300)] = 0.0
    concurrency: AtLeastOne[int] = 2
    report_failures: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Invokes a Lambda function periodically.

    Attributes:
        name: name of the schedule.
        function: name of the Lambda function.
        rate: period in EventBridge's syntax, such as ``rate(5 minutes)``; seconds are allowed, too.
        input: event to send; None sends EventBridge's scheduled event.
        enabled: whether the schedule fires periodically; if not, only :meth:`FunctionCloud.fire` fires it.

    Example:
        >>> Schedule(name="commit", function="commit", rate="rate(5 minutes)").period_seconds
        300.0
    """

    name: str
    function: str
    rate: str
    input: Mapping[str, Any] | None = field(default=None)
    enabled: bool = True

    def __post_init__(self) -> None:
        match = _RATE.fullmatch(self.rate)
        if match is None or (match["count"] == "1") == bool(match["plural"]):
            raise ValueError(
                f"rate={self.rate!r} of {self.name} is not of the form 'rate(1 minute)' or 'rate(5 minutes)'"
            )

    @property
    def period_seconds(self) -> float:
        """Time between two invocations, in seconds."""
        match = _RATE.fullmatch(self.rate)
        assert match is not None  # noqa: S101  (checked in __post_init__)
        return int(match["count"]) * _UNIT_SECONDS[match["unit"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoogleSpec(BoundedConfig):
    """Configuration of a Google Cloud Function (second generation).

    Example:
        >>> from pathlib import Path
        >>> Path("main.py").touch()
        >>> GoogleSpec(name="pack", source="main.py", target="pack", memory_mb=1024).concurrency
        1

    Attributes:
        name: name of the function: 1 to 63 of a-z, 0-9 and '-'.
        source: path of the Python file.
        target: name of the function in the file.
        signature: type of the function: ``http`` or ``cloudevent``.
        memory_mb: memory of an instance, in MiB (at least 128).
        cpus: CPUs of an instance; billed in addition to its memory.
        timeout_seconds: time limit of one request, in seconds (at most 3600).
        instances: maximum number of instances.
        concurrency: maximum number of concurrent requests per instance.
        environment: environment variables.
        token: bearer token that requests must carry; empty accepts every request from this machine.
    """

    name: str
    source: str
    target: str
    signature: Literal["http", "cloudevent"] = "http"
    memory_mb: Annotated[int, NumberBound(">=", 128)] = 512
    cpus: Positive[float] = 1.0
    timeout_seconds: Annotated[float, NumberBound(">", 0), NumberBound("<=", 3600)] = 60.0
    instances: AtLeastOne[int] = 4
    concurrency: Annotated[int, NumberBound(">=", 1), NumberBound("<=", 1000)] = 1
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not _SERVICE_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a service name: 1 to 63 of a-z, 0-9 and '-'")
        if not Path(self.source).is_file():
            raise ValueError(f"source={self.source!r} of {self.name} is not a file")
        if not self.target.isidentifier():
            raise ValueError(f"target={self.target!r} of {self.name} is not the name of a function")
        BoundedConfig.__post_init__(self)
        check_variables(self.environment, owner=self.name)

    @property
    def folder(self) -> str:
        """Folder of the source file."""
        return str(Path(self.source).absolute().parent)

    @property
    def memory_bytes(self) -> int:
        """Memory of an instance, in bytes."""
        return self.memory_mb << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFinalized(BoundedConfig):
    """Sends a CloudEvent to a Google function for every object that is created in a bucket of the local GCS.

    Example:
        >>> trigger = ObjectFinalized(bucket="raw", function="ingest", queue="raw")

    Attributes:
        bucket: name of the bucket.
        function: name of the Google function.
        queue: queue that holds each event until the function answers with a 2xx status; events that are never
            acknowledged go to its dead-letter queue.
        concurrency: maximum number of events in delivery at once.
    """

    bucket: str
    function: str
    queue: str
    concurrency: AtLeastOne[int] = 2


def check_variables(variables: Mapping[str, str], *, owner: str) -> int:
    """Validate environment variables and return their size in bytes; errors contain names, never values.

    Raises:
        ValueError: a name or a value is not possible in a process's environment.
    """
    size_bytes = 0
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} in the environment of {owner} is not a name: letters, digits and '_'")
        if not isinstance(value, str) or not _VARIABLE_VALUE.fullmatch(value):
            raise ValueError(f"{name} in the environment of {owner} must be a text without NUL and lone surrogates")
        size_bytes += len(name) + len(value.encode())
    return size_bytes


class FunctionFaultKind(StrEnum):
    """Kinds of faults that an invocation can have.

    Example:
        >>> plan = FunctionFaultPlan(probabilities={FunctionFaultKind.KILL: 0.1, FunctionFaultKind.DUPLICATE: 0.05})
    """

    KILL = "kill"  # its instance is killed during the invocation
    FREEZE = "freeze"  # its instance is stopped for a while during the invocation
    DUPLICATE = "duplicate"  # its event is delivered twice
    RECLAIM = "reclaim"  # all idle instances are ended first, so it needs a cold start
    THROTTLE = "throttle"  # it is refused: 429 TooManyRequestsException


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFault(BoundedConfig):
    """One fault.

    Attributes:
        kind: kind of the fault.
        after_seconds: time of a kill or freeze after the handler's start, in seconds; without effect if the handler
            has ended by then.
        freeze_seconds: duration of a freeze, in seconds.

    Example:
        >>> FunctionFault(kind=FunctionFaultKind.KILL, after_seconds=0.1).freeze_seconds
        0.5
    """

    kind: FunctionFaultKind
    after_seconds: NotNegative[float] = 0.0
    freeze_seconds: NotNegative[float] = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFaultPlan(BoundedConfig):
    """Selects the invocations that fail, by script or at random.

    Attributes:
        script: faults of the first matching invocations, in order of arrival; None means no fault.
        probabilities: probability of each kind for matching invocations after the script; their sum is at most 1.
        functions: names of the functions whose invocations match; empty is all functions.
        within_seconds: random kills and freezes occur at a uniform time in [0, ``within_seconds``) after the start.
        freeze_seconds: duration of random freezes, in seconds.
        seed: seed of the random faults; the fault of a function's n-th invocation depends only on it, the name and n.

    Example:
        >>> FunctionFaultPlan(probabilities={FunctionFaultKind.KILL: 0.1}, functions=("ingest",)).within_seconds
        0.5
    """

    script: tuple[FunctionFault | None, ...] = ()
    probabilities: Mapping[FunctionFaultKind, float] = field(default_factory=dict)
    functions: tuple[str, ...] = ()
    within_seconds: NotNegative[float] = 0.5
    freeze_seconds: NotNegative[float] = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        check_probabilities(self.probabilities)
        BoundedConfig.__post_init__(self)


class FunctionFaultInjector:
    """Draws the faults of a :class:`FunctionFaultPlan`, invocation by invocation."""

    __slots__ = ("_ordinals", "_plan", "_script")

    def __init__(self, plan: FunctionFaultPlan) -> None:
        self.replace(plan)

    def replace(self, plan: FunctionFaultPlan) -> None:
        """Switch to another plan, from its beginning."""
        self._plan = plan
        self._script = deque(plan.script)
        self._ordinals: Counter[str] = Counter()

    def draw(self, function: str) -> FunctionFault | None:
        """Return the fault of the function's next invocation, or None."""
        plan = self._plan
        if plan.functions and function not in plan.functions:
            return None
        if self._script:
            return self._script.popleft()
        if not plan.probabilities:
            return None
        self._ordinals[function] += 1
        # One generator per invocation: its fault does not depend on the order in which functions are invoked.
        chance = random.Random(f"{plan.seed}/{function}/{self._ordinals[function]}")  # noqa: S311  (not secrets)
        kind = draw_kind(chance.random(), plan.probabilities)
        if kind is None:
            return None
        return FunctionFault(
            kind=kind,
            after_seconds=chance.random() * plan.within_seconds,
            freeze_seconds=plan.freeze_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCloudConfig(JsonConfig):
    """Configuration of a local function cloud: functions, queues, triggers and faults.

    Attributes:
        host: address to listen on; must be a loopback address.
        port: port of the Lambda endpoint; 0 chooses a free port.
        region: AWS region in requests, events and ARNs.
        account: AWS account id in ARNs.
        keys: key pairs that may sign requests; :meth:`FunctionCloud.environment` contains the first.
        environment: environment variables of every function, such as endpoints and credentials.
        functions: Lambda functions.
        queues: queues of the triggers.
        notifications: notifications from the local S3 to queues.
        sources: queues that invoke Lambda functions.
        schedules: schedules that invoke Lambda functions.
        google: Google functions.
        finalized: events from the local GCS to Google functions.
        idle_seconds: time without work after which an instance is reclaimed, in seconds.
        init_seconds: time limit of a cold start, in seconds.
        event_retry_seconds: waits before the first and the second retry of an event, in seconds; Lambda's are 60 and
            120.
        tmp: ``tmpfs`` gives each instance its own ``/tmp`` in a private mount namespace; ``folder`` gives it a folder
            in ``TMPDIR``, where only the size of single files is limited; ``auto`` is ``tmpfs`` if the system allows.
        faults: faults to inject; default none.
        seed: seed of request ids and of duplicates in queues.

    Example:
        >>> config = FunctionCloudConfig(
        ...     functions=(FunctionSpec(name="ingest", handler="stoker_functions.aws.ingest", timeout_seconds=20),),
        ...     queues=(QueueSpec(name="raw"),),
        ...     notifications=(Notification(bucket="raw", queue="raw", suffix=".jpg"),),
        ...     sources=(EventSource(queue="raw", function="ingest"),),
        ... )
    """

    host: str = "127.0.0.1"
    port: Annotated[int, NumberBound(">=", 0), NumberBound("<=", 65535)] = 0
    region: str = "us-east-1"
    account: str = "000000000000"
    keys: tuple[KeyPair, ...] = (WELL_KNOWN_KEY,)
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
        if not is_loopback(self.host):
            raise ValueError(f"host={self.host!r} is open to other machines; set it to a loopback address")
        if not self.keys:
            raise ValueError("keys are empty, so no request could be signed; set at least one key pair")
        BoundedConfig.__post_init__(self)
        if not min(self.event_retry_seconds) >= 0:
            raise ValueError(f"event_retry_seconds={self.event_retry_seconds} must not be negative")
        check_variables(self.environment, owner="every function")
        self._check_names()
        self._check_visibility()
        self._check_dead_letters()

    def _check_names(self) -> None:
        """Refuse duplicate names and references to names that do not exist."""
        unique_names("function", [*(spec.name for spec in self.functions), *(spec.name for spec in self.google)])
        unique_names("schedule", (schedule.name for schedule in self.schedules))
        queues = unique_names("queue", (spec.name for spec in self.queues))
        functions, google = {spec.name for spec in self.functions}, {spec.name for spec in self.google}
        checks: tuple[tuple[str, set[str], Sequence[object], str], ...] = (
            ("queue", queues | {""}, self.queues, "dead_letters"),
            ("queue", queues | {""}, self.functions, "on_failure"),
            ("queue", queues, self.notifications, "queue"),
            ("queue", queues, self.finalized, "queue"),
            ("queue", queues, self.sources, "queue"),
            ("function", functions, self.sources, "function"),
            ("function", functions, self.schedules, "function"),
            ("Google function", google, self.finalized, "function"),
        )
        for what, known, records, field_name in checks:
            if unknown := sorted({getattr(record, field_name) for record in records} - known):
                names = ", ".join(sorted(known - {""})) or "none"
                raise ValueError(f"there is no {what} {', '.join(unknown)}; there are: {names}")

    def _check_visibility(self) -> None:
        """Refuse, as Lambda does, messages that could become visible again while their function still works on them."""
        timeouts = {spec.name: spec.timeout_seconds for spec in self.functions}
        visible = {spec.name: spec.visibility_seconds for spec in self.queues}
        for source in self.sources:
            if visible[source.queue] < timeouts[source.function]:
                raise ValueError(
                    f"visibility_seconds={visible[source.queue]} of {source.queue} is less than "
                    f"timeout_seconds={timeouts[source.function]} of {source.function}; raise it to at least that"
                )

    def _check_dead_letters(self) -> None:
        try:
            TopologicalSorter({spec.name: [spec.dead_letters] for spec in self.queues}).prepare()
        except CycleError as error:
            name = min(error.args[1])
            raise ValueError(f"the dead letters of {name} come back to {name}; break the cycle") from error
