"""One invocation and how it ended, in Lambda's words; and what every function has done, with what it would cost."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import count

from aiohttp import web

from stoker._cost.prices import GB_BYTES, FunctionPrices, Prices
from stoker_local.functions._config import FunctionFaultKind, FunctionSpec

_KEPT_HAPPENINGS = 10_000
_KEPT_LOGS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that happened.

    Attributes:
        number: ascending, from 0; none is left out.
        seconds: since the cloud's start.
        function: whose.
        instance: whose; empty where none was concerned.
        what: ``cold-start``, ``start-failed``, ``invoke``, ``answer``, ``error``, ``throttle``, ``kill``, ``freeze``,
            ``duplicate``, ``reclaim``, ``retry``, ``dropped`` (all attempts have failed), ``undelivered`` (dropped, and
            too large for the queue of failures).
        detail: such as the error's type.
    """

    number: int
    seconds: float
    function: str
    instance: str
    what: str
    detail: str = ""


@dataclass(slots=True, kw_only=True)
class FunctionStatistics:
    """Figures since the start.

    Attributes:
        instances: alive now, without those that are being killed.
        busy: of these, with an invocation now.
        peak_instances: most that were alive at once.
        cold_starts: instances started, also in vain.
        invocations: that have ended, as often as an event was delivered.
        errors: of these, failed.
        throttles: refused for concurrency.
        reclaimed: instances that were taken back while idle.
        faults: injected, by kind; kills and freezes only if they struck.
        billed_seconds: of invocations and cold starts.
        gb_seconds: of configured memory.
        dollars: at list prices, requests included.
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
class Account:
    """One function's page of a ledger.

    Attributes:
        function: its name.
        figures: as they grow; :meth:`read` adds what they cost.
        logs: what its newest 200 invocations wrote.
    """

    function: str
    _ledger: Ledger
    _prices: FunctionPrices
    _memory_bytes: int
    _vcpus: float
    figures: FunctionStatistics = field(default_factory=lambda: FunctionStatistics(faults=Counter()))
    logs: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LOGS))

    def note(self, what: str, *, instance: str = "", detail: str = "") -> None:
        """Add a happening to the ledger."""
        self._ledger.note(self.function, what, instance=instance, detail=detail)

    def started(self, *, instances: int) -> None:
        """Count a cold start, after which there are so many instances."""
        self.figures.cold_starts += 1
        self.figures.instances = instances
        self.figures.peak_instances = max(self.figures.peak_instances, instances)

    def struck(self, kind: FunctionFaultKind) -> None:
        """Count an injected fault."""
        self.figures.faults[kind.value] += 1
        self.note(kind.value, detail="injected")

    def wrote(self, log: bytes) -> None:
        """Keep what an invocation wrote."""
        if log:
            text = log.decode("utf-8", "replace")
            self.logs.append(text)
            self._ledger.echo(text)

    def read(self) -> FunctionStatistics:
        """Return a copy of the figures, with what they cost."""
        figures, prices = self.figures, self._prices
        per_second = prices.invocation_dollars(seconds=1.0, memory_bytes=self._memory_bytes, vcpus=self._vcpus)
        per_second -= prices.dollars_per_request
        return replace(
            figures,
            faults=figures.faults.copy(),
            gb_seconds=figures.billed_seconds * self._memory_bytes / GB_BYTES,
            dollars=figures.invocations * prices.dollars_per_request + figures.billed_seconds * per_second,
        )


class Ledger:
    """All functions' accounts, and the newest happenings.

    Attributes:
        accounts: by function.
        echo: is given what every invocation writes.
    """

    def __init__(self, *, clock: Callable[[], float], echo: Callable[[str], object]) -> None:
        self.accounts: dict[str, Account] = {}
        self.echo = echo
        self._prices = Prices.load().functions
        self._clock = clock
        self._started_at = clock()
        self._happenings: deque[Happening] = deque(maxlen=_KEPT_HAPPENINGS)
        self._numbers = count()

    def open(self, function: str, platform: str, *, memory_bytes: int, vcpus: float = 0.0) -> Account:
        """Open a function's account, at the prices of a platform (``lambda``, ``cloud-run``)."""
        account = Account(function, self, self._prices[platform], memory_bytes, vcpus)
        self.accounts[function] = account
        return account

    def note(self, function: str, what: str, *, instance: str = "", detail: str = "") -> None:
        """Add a happening."""
        number, seconds = next(self._numbers), self._clock() - self._started_at
        happening = Happening(
            number=number, seconds=seconds, function=function, instance=instance, what=what, detail=detail
        )
        self._happenings.append(happening)

    def statistics(self) -> dict[str, FunctionStatistics]:
        """Return the figures of every function."""
        return {name: account.read() for name, account in self.accounts.items()}

    def events(self, since: int) -> list[Happening]:
        """Return the happenings from ``since`` on, oldest first; of the oldest, only the newest 10,000 are kept."""
        return [happening for happening in self._happenings if happening.number >= since]


def total(figures: Mapping[str, FunctionStatistics]) -> FunctionStatistics:
    """Return the sums over functions; ``peak_instances`` is the sum of their peaks."""
    names = [field.name for field in fields(FunctionStatistics) if field.name != "faults"]
    sums = {name: sum(getattr(each, name) for each in figures.values()) for name in names}
    return FunctionStatistics(**sums, faults=sum((Counter(each.faults) for each in figures.values()), Counter()))


_STATUS = {
    "IncompleteSignatureException": 400,
    "InvalidParameterValueException": 400,
    "InvalidRequestContentException": 400,
    "RequestTooLargeException": 413,
    "ResourceNotFoundException": 404,
    "TooManyRequestsException": 429,
}
"""Of the errors that are not answered 403."""
MAX_REQUEST_BYTES = 6_291_456
MAX_EVENT_BYTES = 1 << 20  # of asynchronous invocations
MAX_RESULT_BYTES = 6_291_556


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One delivery of an event to a function.

    Attributes:
        request_id: the same for every attempt and every duplicate of one event.
        payload: JSON.
        client_context: JSON that the caller sent beside the payload, or empty.
    """

    request_id: str
    payload: bytes
    client_context: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came out of a sandbox: the handler's result, or an error object as JSON.

    Attributes:
        error_type: empty for a result.
    """

    payload: bytes
    error_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An invocation that has ended.

    Attributes:
        payload: the result or, if ``error_type`` is not empty, the error object, as JSON.
        error_type: such as ``ValueError``, ``Runtime.OutOfMemory``, ``Sandbox.Timedout``.
        seconds: of the invocation itself.
        init_seconds: of the cold start that it waited for; None if it found a warm instance.
        billed_milliseconds: both, rounded up.
        memory_bytes: most resident memory that the instance has had so far; 0 where the system does not tell.
        log: the end of what was written, with Lambda's own lines around it.
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
        """Whether an instance was started for it."""
        return self.init_seconds is not None


def failure(error_type: str, message: str, request_id: str) -> Answer:
    """Return the answer of a sandbox that could not give one itself."""
    error = {"errorType": error_type, "errorMessage": f"RequestId: {request_id} Error: {message}"}
    return Answer(payload=json.dumps(error).encode(), error_type=error_type)


def billed_milliseconds(seconds: float, init_seconds: float | None) -> int:
    """Return what is billed: the cold start and the invocation together, a begun millisecond counts whole."""
    return math.ceil((seconds + (init_seconds or 0.0)) * 1000)


def report(spec: FunctionSpec, outcome: Outcome) -> bytes:
    """Return the lines that Lambda writes after an invocation's own."""
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
    """A call that the service refuses; no function has run.

    Attributes:
        code: Lambda's name of the error.
        reason: why a call was throttled, empty for other errors.
    """

    def __init__(self, code: str, message: str, *, reason: str = "") -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.reason = reason

    @property
    def status(self) -> int:
        """The HTTP status that goes with the code."""
        return _STATUS.get(self.code, 403)

    def response(self) -> web.Response:
        """Return the answer that botocore turns into its exception of the same name."""
        body = {"Type": "User", "message": self.message}
        if self.reason:
            body["Reason"] = self.reason
        return web.json_response(body, status=self.status, headers={"x-amzn-ErrorType": self.code})
