"""Invocations and their outcomes in Lambda's terms, and the statistics and cost of every function."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import count

from aiohttp import web

from stoker._base.arguments import explain_arguments
from stoker._cost.prices import GB_BYTES, FunctionPrices, Prices
from stoker_local.functions._config import FunctionFaultKind, FunctionSpec

_MAX_EVENTS = 10_000
_MAX_LOGS = 200


@explain_arguments("FunctionEvent", renamed={"what": "kind"})
@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionEvent:
    """An event in the life of a function.

    Example:
        >>> event = FunctionEvent(number=0, seconds=0.5, function="ingest", instance="ingest-0", kind="cold-start")
        >>> print(f"{event.seconds:.1f} s: {event.kind} of {event.instance}")
        0.5 s: cold-start of ingest-0

    Attributes:
        number: sequence number, from 0 without gaps.
        seconds: time since the cloud's start, in seconds.
        function: name of the function.
        instance: name of the instance; empty if the event concerns none.
        kind: kind of the event: ``cold-start``, ``start-failed``, ``invoke``, ``answer``, ``error``, ``throttle``,
            ``kill``, ``freeze``, ``duplicate``, ``reclaim``, ``retry``, ``dropped`` (all attempts have failed) or
            ``undelivered`` (dropped, and too large for the failure queue).
        detail: further information, such as the type of an error.
    """

    number: int
    seconds: float
    function: str
    instance: str
    kind: str
    detail: str = ""


@dataclass(slots=True, kw_only=True)
class FunctionStatistics:
    """Statistics of a function since the cloud's start.

    Example:
        >>> from collections import Counter
        >>> statistics = FunctionStatistics(cold_starts=3, invocations=200, faults=Counter())
        >>> f"{statistics.cold_starts / statistics.invocations:.1%} cold starts"
        '1.5% cold starts'

    Attributes:
        instances: instances alive now, without those being killed.
        busy: instances with an invocation now.
        peak_instances: largest number of instances alive at once.
        cold_starts: instances started, including failed starts.
        invocations: invocations that have ended; each delivery of an event counts.
        errors: invocations that failed.
        throttles: invocations refused because of the concurrency limit.
        reclaimed: instances ended while idle.
        faults: injected faults by kind; kills and freezes count only if they took effect.
        billed_seconds: billed time of invocations and cold starts, in seconds.
        gb_seconds: billed time multiplied by the configured memory, in GB-seconds.
        dollars: cost at list prices, including the price per request, in US dollars.
    """

    instances: int = 0
    busy: int = 0
    peak_instances: int = 0
    cold_starts: int = 0
    invocations: int = 0
    errors: int = 0
    throttles: int = 0
    reclaimed: int = 0
    faults: Counter[str]
    billed_seconds: float = 0.0
    gb_seconds: float = 0.0
    dollars: float = 0.0


@dataclass(slots=True, eq=False)
class FunctionRecorder:
    """Collects one function's statistics, events and logs.

    Attributes:
        function: name of the function.
        figures: counters so far, without cost, which :meth:`statistics` adds.
        logs: output of the newest 200 invocations.
    """

    function: str
    _cloud_recorder: CloudRecorder
    _prices: FunctionPrices
    _memory_bytes: int
    _vcpus: float
    figures: FunctionStatistics = field(default_factory=lambda: FunctionStatistics(faults=Counter()))
    logs: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_LOGS))

    def record_event(self, kind: str, *, instance: str = "", detail: str = "") -> None:
        """Add an event of this function."""
        self._cloud_recorder.record_event(self.function, kind, instance=instance, detail=detail)

    def record_start(self, *, instances: int) -> None:
        """Count a cold start; ``instances`` is the number of instances after it."""
        self.figures.cold_starts += 1
        self.figures.instances = instances
        self.figures.peak_instances = max(self.figures.peak_instances, instances)

    def record_fault(self, kind: FunctionFaultKind) -> None:
        """Count an injected fault."""
        self.figures.faults[kind.value] += 1
        self.record_event(kind.value, detail="injected")

    def record_log(self, log: bytes) -> None:
        """Keep and echo the output of an invocation."""
        if log:
            text = log.decode("utf-8", "replace")
            self.logs.append(text)
            self._cloud_recorder.echo(text)

    def statistics(self) -> FunctionStatistics:
        """Return a copy of the statistics, including their cost."""
        figures, prices = self.figures, self._prices
        per_second = prices.invocation_dollars(seconds=1.0, memory_bytes=self._memory_bytes, vcpus=self._vcpus)
        per_second -= prices.dollars_per_request
        return replace(
            figures,
            faults=figures.faults.copy(),
            gb_seconds=figures.billed_seconds * self._memory_bytes / GB_BYTES,
            dollars=figures.invocations * prices.dollars_per_request + figures.billed_seconds * per_second,
        )


class CloudRecorder:
    """Collects the statistics of all functions and the newest 10,000 events.

    Attributes:
        recorders: function name → statistics, events and logs.
        echo: is called with the output of every invocation.
    """

    def __init__(self, *, clock: Callable[[], float], echo: Callable[[str], object]) -> None:
        self.recorders: dict[str, FunctionRecorder] = {}
        self.echo = echo
        self._prices = Prices.load().functions
        self._clock = clock
        self._started_at = clock()
        self._events: deque[FunctionEvent] = deque(maxlen=_MAX_EVENTS)
        self._numbers = count()

    def add_function(self, function: str, platform: str, *, memory_bytes: int, vcpus: float = 0.0) -> FunctionRecorder:
        """Start to collect a function's statistics, at the prices of ``platform`` (``lambda`` or ``cloud-run``)."""
        account = FunctionRecorder(function, self, self._prices[platform], memory_bytes, vcpus)
        self.recorders[function] = account
        return account

    def record_event(self, function: str, kind: str, *, instance: str = "", detail: str = "") -> None:
        """Add an event."""
        number, seconds = next(self._numbers), self._clock() - self._started_at
        event = FunctionEvent(
            number=number, seconds=seconds, function=function, instance=instance, kind=kind, detail=detail
        )
        self._events.append(event)

    def statistics(self) -> dict[str, FunctionStatistics]:
        """Return the statistics of every function."""
        return {name: account.statistics() for name, account in self.recorders.items()}

    def events(self, since: int) -> list[FunctionEvent]:
        """Return the events from number ``since`` on, oldest first; only the newest 10,000 are kept."""
        return [event for event in self._events if event.number >= since]


def sum_statistics(figures: Mapping[str, FunctionStatistics]) -> FunctionStatistics:
    """Sum the statistics of all functions; ``peak_instances`` is the sum of the functions' peaks.

    Args:
        figures: statistics by the name of the function.

    Example:
        >>> from collections import Counter
        >>> one = FunctionStatistics(invocations=2, faults=Counter(kill=1))
        >>> sum_statistics({"a": one, "b": one}).invocations
        4
    """
    names = [field.name for field in fields(FunctionStatistics) if field.name != "faults"]
    sums = {name: sum(getattr(each, name) for each in figures.values()) for name in names}
    return FunctionStatistics(**sums, faults=sum((Counter(each.faults) for each in figures.values()), Counter()))


_STATUS_BY_CODE = {
    "IncompleteSignatureException": 400,
    "InvalidParameterValueException": 400,
    "InvalidRequestContentException": 400,
    "RequestTooLargeException": 413,
    "ResourceNotFoundException": 404,
    "TooManyRequestsException": 429,
}
"""Error code → HTTP status; all other errors have status 403."""
MAX_REQUEST_BYTES = 6_291_456
MAX_EVENT_BYTES = 1 << 20  # of asynchronous invocations
MAX_RESULT_BYTES = 6_291_556


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One delivery of an event to a function.

    Attributes:
        request_id: id of the event; equal for all its attempts and duplicates.
        payload: event as JSON.
        client_context: client context of the caller as JSON; empty if there is none.
    """

    request_id: str
    payload: bytes
    client_context: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerResult:
    """The result of a handler, or the error of its instance.

    Attributes:
        payload: result or error object, as JSON.
        error_type: type of the error; empty for a result.
    """

    payload: bytes
    error_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of an invocation.

    Example:
        >>> import json
        >>> outcome = Outcome(
        ...     request_id="1", payload=b'{"samples": 100}', error_type="", seconds=0.8, init_seconds=None,
        ...     billed_milliseconds=801, memory_bytes=90 << 20, log=b"",
        ... )
        >>> json.loads(outcome.payload)["samples"]
        100

    Attributes:
        request_id: id of the event.
        payload: result or, if ``error_type`` is not empty, error object, as JSON.
        error_type: type of the error, such as ``ValueError``, ``Runtime.OutOfMemory`` or ``Sandbox.Timedout``; empty
            for a result.
        seconds: duration of the invocation without the cold start, in seconds.
        init_seconds: duration of the cold start, in seconds; None if an idle instance was used.
        billed_milliseconds: sum of both, rounded up to milliseconds.
        memory_bytes: peak resident memory of the instance so far, in bytes; 0 if the system does not report it.
        log: last 4 KiB of the output, with Lambda's START, END and REPORT lines.
    """

    request_id: str
    payload: bytes
    error_type: str
    seconds: float
    init_seconds: float | None
    billed_milliseconds: int
    memory_bytes: int
    log: bytes

    @property
    def is_cold(self) -> bool:
        """Whether the invocation needed a cold start."""
        return self.init_seconds is not None


def failure_result(error_type: str, message: str, request_id: str) -> HandlerResult:
    """Return an error in Lambda's format, for an instance that could not report it itself."""
    error = {"errorType": error_type, "errorMessage": f"RequestId: {request_id} Error: {message}"}
    return HandlerResult(payload=json.dumps(error).encode(), error_type=error_type)


def billed_milliseconds(seconds: float, init_seconds: float | None) -> int:
    """Return the billed duration: the cold start and the invocation together, rounded up to milliseconds."""
    return math.ceil((seconds + (init_seconds or 0.0)) * 1000)


def report_lines(spec: FunctionSpec, outcome: Outcome) -> bytes:
    """Return the END and REPORT lines that Lambda appends to an invocation's log."""
    fields = [
        f"REPORT RequestId: {outcome.request_id}",
        f"Duration: {outcome.seconds * 1000:.2f} ms",
        f"Billed Duration: {outcome.billed_milliseconds} ms",
        f"Memory Size: {spec.memory_mb} MB",
        f"Max Memory Used: {math.ceil(outcome.memory_bytes / (1 << 20))} MB",
    ]
    if outcome.init_seconds is not None:
        fields.append(f"Init Duration: {outcome.init_seconds * 1000:.2f} ms")
    if outcome.error_type.startswith(("Runtime.", "Sandbox.", "Function.")):
        status = "timeout" if outcome.error_type == "Sandbox.Timedout" else "error"
        fields += [f"Status: {status}", f"Error Type: {outcome.error_type}"]
    lines = f"END RequestId: {outcome.request_id}\n" + "\t".join(fields) + "\n"
    return lines.encode()


class ServiceError(Exception):
    """A Lambda service error; the function was not run.

    Example:
        >>> reason = "ConcurrentInvocationLimitExceeded"
        >>> ServiceError("TooManyRequestsException", "Rate Exceeded.", reason=reason).code
        'TooManyRequestsException'

    Attributes:
        code: Lambda's error code, such as ``TooManyRequestsException``.
        reason: reason of a throttle; empty for other errors.
    """

    def __init__(self, code: str, message: str, *, reason: str = "") -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.reason = reason

    @property
    def status(self) -> int:
        """HTTP status of the error."""
        return _STATUS_BY_CODE.get(self.code, 403)

    def response(self) -> web.Response:
        """Return the HTTP response, which botocore turns into its exception of the same name."""
        body = {"Type": "User", "message": self.message}
        if self.reason:
            body["Reason"] = self.reason
        return web.json_response(body, status=self.status, headers={"x-amzn-ErrorType": self.code})
