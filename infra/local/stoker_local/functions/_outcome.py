"""One invocation and how it ended or was refused, in Lambda's words."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from aiohttp import web

from stoker_local.functions._config import FunctionSpec

__all__ = [
    "MAX_EVENT_BYTES",
    "MAX_REQUEST_BYTES",
    "MAX_RESULT_BYTES",
    "Answer",
    "Invocation",
    "Outcome",
    "ServiceError",
    "billed_milliseconds",
    "failure",
    "read_body",
    "report",
]

_STATUS = {
    "AccessDeniedException": 403,
    "ExpiredTokenException": 403,
    "IncompleteSignatureException": 400,
    "InvalidParameterValueException": 400,
    "InvalidRequestContentException": 400,
    "InvalidSignatureException": 403,
    "MissingAuthenticationTokenException": 403,
    "RequestTooLargeException": 413,
    "ResourceNotFoundException": 404,
    "TooManyRequestsException": 429,
    "UnrecognizedClientException": 403,
}
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
        code: Lambda's name of the error, a key of ``_STATUS``.
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
        return _STATUS[self.code]

    def response(self) -> web.Response:
        """Return the answer that botocore turns into its exception of the same name."""
        body = {"Type": "User", "message": self.message}
        if self.reason:
            body["Reason"] = self.reason
        return web.json_response(body, status=self.status, headers={"x-amzn-ErrorType": self.code})


async def read_body(request: web.BaseRequest, *, limit_bytes: int) -> bytes | None:
    """Return a request's body, or None if it is longer than ``limit_bytes``, of which no more is kept."""
    if (request.content_length or 0) > limit_bytes:
        return None
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > limit_bytes:
            return None
    return bytes(body)
