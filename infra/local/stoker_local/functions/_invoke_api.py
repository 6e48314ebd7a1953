"""The part of Lambda's service API that callers of functions speak.

Source: AWS Lambda API Reference, "Invoke".
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from stoker_local.functions._authority import Authority
from stoker_local.functions._errors import ServiceError
from stoker_local.functions._event_invoke import EventInvoker
from stoker_local.functions._fleet import Fleet
from stoker_local.functions._outcome import Invocation
from stoker_local.functions._payload import MAX_EVENT_BYTES, MAX_REQUEST_BYTES, read_body

__all__ = ["InvokeApi"]

_MAX_CONTEXT_CHARACTERS = 3583
_TYPES = ("RequestResponse", "Event", "DryRun")


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
