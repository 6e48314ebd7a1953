"""The part of Lambda's service API that callers of functions speak, with signatures as Lambda verifies them.

Source: AWS Lambda API Reference, "Invoke".
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType

from aiohttp import web

from stoker_local._http1 import BadRequestError, Request, parse_query
from stoker_local._s3.model import S3Error
from stoker_local._s3.signature import KeyPair, read_claim, verify
from stoker_local.functions._fleet import EventInvoker, Fleet
from stoker_local.functions._outcome import MAX_EVENT_BYTES, MAX_REQUEST_BYTES, Invocation, ServiceError, read_body

__all__ = ["Authority", "InvokeApi", "joined_headers"]

_MAX_CONTEXT_CHARACTERS = 3583
_TYPES = ("RequestResponse", "Event", "DryRun")
_CODES = MappingProxyType(
    {
        "InvalidAccessKeyId": "UnrecognizedClientException",
        "InvalidToken": "UnrecognizedClientException",
        "SignatureDoesNotMatch": "InvalidSignatureException",
        "RequestTimeTooSkewed": "InvalidSignatureException",
        "ExpiredToken": "ExpiredTokenException",
        "AccessDenied": "AccessDeniedException",
    }
)


class InvokeApi:
    """``Invoke`` over HTTP, as boto3's and aioboto3's Lambda clients call it."""

    def __init__(
        self,
        fleets: Mapping[str, Fleet],
        events: EventInvoker,
        authority: Authority,
        *,
        new_id: Callable[[], str],
    ) -> None:
        self._fleets = fleets
        self._events = events
        self._authority = authority
        self._new_id = new_id

    def application(self) -> web.Application:
        """Return it as a web application."""
        application = web.Application(middlewares=[_with_refusals])
        application.router.add_post("/2015-03-31/functions/{name}/invocations", self._invoke)
        return application

    async def _invoke(self, request: web.Request) -> web.Response:
        body = await read_body(request, limit_bytes=MAX_REQUEST_BYTES)
        if body is None:
            raise _too_large(MAX_REQUEST_BYTES)
        self._authority.admit(request, body)
        fleet = self._fleet(request.match_info["name"], request.query.get("Qualifier", "$LATEST"))
        kind = request.headers.get("X-Amz-Invocation-Type", "RequestResponse")
        if kind not in _TYPES:
            raise ServiceError("InvalidParameterValueException", f"InvocationType {kind!r} is not one of {_TYPES}.")
        if kind == "Event" and len(body) > MAX_EVENT_BYTES:
            raise _too_large(MAX_EVENT_BYTES)
        context = _client_context(request.headers.get("X-Amz-Client-Context", ""))
        invocation = Invocation(request_id=self._new_id(), payload=_checked(body), client_context=context)
        headers = {"x-amzn-RequestId": invocation.request_id}
        if kind == "DryRun":
            return web.Response(status=204, headers=headers)
        if kind == "Event":
            self._events.accept(fleet, invocation)
            return web.Response(status=202, headers=headers)
        return await self._respond(request, fleet, invocation, headers)

    async def _respond(
        self, request: web.Request, fleet: Fleet, invocation: Invocation, headers: dict[str, str]
    ) -> web.Response:
        outcome = await fleet.invoke(invocation)
        headers["X-Amz-Executed-Version"] = "$LATEST"
        if outcome.error_type:
            headers["X-Amz-Function-Error"] = "Unhandled"
        if request.headers.get("X-Amz-Log-Type") == "Tail":
            headers["X-Amz-Log-Result"] = base64.b64encode(outcome.log).decode()
        return web.Response(body=outcome.payload, headers=headers, content_type="application/json")

    def _fleet(self, name: str, qualifier: str) -> Fleet:
        """Return the function of a name, a partial or a whole ARN, with or without the only version there is."""
        name = name.removesuffix(":$LATEST").rpartition(":")[2]
        fleet = self._fleets.get(name)
        if fleet is None or qualifier != "$LATEST":
            wanted = f"{name}:{qualifier}"
            raise ServiceError("ResourceNotFoundException", f"Function not found: {wanted}")
        return fleet


@web.middleware
async def _with_refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ServiceError as refusal:
        return refusal.response()


def _too_large(limit_bytes: int) -> ServiceError:
    message = f"Request must be smaller than {limit_bytes} bytes for the InvokeFunction operation"
    return ServiceError("RequestTooLargeException", message)


def _checked(body: bytes) -> bytes:
    """Return the event; nothing is an empty object."""
    try:
        json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        message = f"Could not parse request body into json: {type(error).__name__}"
        raise ServiceError("InvalidRequestContentException", message) from error
    return body or b"{}"


def _client_context(header: str) -> str:
    if len(header) > _MAX_CONTEXT_CHARACTERS:
        raise ServiceError("InvalidParameterValueException", "Client context must be no more than 3583 bytes.")
    if not header:
        return ""
    try:
        context = json.loads(base64.b64decode(header, validate=True))
        return json.dumps(context)  # on one line, in ASCII: it is sent on as a header
    except (binascii.Error, ValueError, RecursionError) as error:
        raise ServiceError("InvalidParameterValueException", "Client context is not base64 of JSON.") from error


class Authority:
    """Lets in who signs with one of its keys, for one region's Lambda."""

    def __init__(self, keys: Iterable[KeyPair], *, region: str, clock: Callable[[], float]) -> None:
        self._keys = {key.access_key: key for key in keys}
        self._region = region
        self._clock = clock

    def admit(self, request: web.BaseRequest, body: bytes) -> KeyPair:
        """Return whose request it is.

        Raises:
            ServiceError: it is nobody's: unsigned, wrongly signed, or signed with an unknown or expired key.
        """
        try:
            head = _head_of(request)
            claim = read_claim(head, service="lambda")
            if claim is None:
                raise ServiceError("MissingAuthenticationTokenException", "Missing Authentication Token")
            digest = hashlib.sha256(body).hexdigest()
            if claim.payload_hash not in ("", digest):
                raise S3Error("SignatureDoesNotMatch", "The body is not the one that was signed.")
            if claim.region != self._region:
                raise S3Error("SignatureDoesNotMatch", f"Credential should be scoped to {self._region}.")
            claim = replace(claim, payload_hash=claim.payload_hash or digest)
            return verify(head, claim, self._keys, now=datetime.fromtimestamp(self._clock(), UTC))
        except S3Error as refusal:
            code = _CODES.get(refusal.code, "IncompleteSignatureException")
            raise ServiceError(code, refusal.message) from refusal
        except (BadRequestError, UnicodeDecodeError) as error:
            raise ServiceError("IncompleteSignatureException", "The request is not UTF-8.") from error


def _head_of(request: web.BaseRequest) -> Request:
    raw_path, _, raw_query = request.raw_path.partition("?")
    return Request(
        method=request.method,
        raw_path=raw_path,
        path=request.path,
        query=parse_query(raw_query),
        headers=joined_headers(request),
        body_bytes=request.content_length,
        keep_alive=True,
    )


def joined_headers(request: web.BaseRequest) -> dict[str, str]:
    """Return the headers by name in lower case, values of a repeated name joined with a comma."""
    return {name.lower(): ",".join(request.headers.getall(name)) for name in request.headers}
