"""One invocation and how it ended, in Lambda's words."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from stoker_local.functions._spec import FunctionSpec

__all__ = ["Answer", "Invocation", "Outcome", "billed_milliseconds", "failure", "report"]


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
