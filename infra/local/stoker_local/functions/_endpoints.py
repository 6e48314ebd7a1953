"""How callers reach functions: Lambda's ``Invoke`` and function URLs, with signatures as Lambda verifies them.

Sources: AWS Lambda API Reference, "Invoke"; AWS Lambda Developer Guide, "Invoking Lambda function URLs", request and
response payloads (format 2.0).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from aiohttp import web

from stoker_local._http1 import BadRequestError, Request, parse_query
from stoker_local._s3.model import S3Error
from stoker_local._s3.signature import KeyPair, read_claim, verify
from stoker_local.functions._fleet import Fleet
from stoker_local.functions._statistics import MAX_EVENT_BYTES, MAX_REQUEST_BYTES, Invocation, ServiceError, read_body

__all__ = [
    "Authority",
    "FunctionUrl",
    "InvokeApi",
    "Reply",
    "UrlRequest",
    "joined_headers",
    "reply_of",
    "request_event",
]

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
        authority: Authority,
        *,
        new_id: Callable[[], str],
    ) -> None:
        self._fleets = fleets
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
            fleet.accept(invocation)
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


_OWN_HEADERS = ("content-length", "connection", "transfer-encoding", "date")
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", re.ASCII)
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\ud7ff\ue000-\U0010ffff]*")
_TEXTUAL = ("application/json", "application/javascript", "application/xml")


class FunctionUrl:
    """The endpoint of one function, open to all on this machine or to those who sign (``AWS_IAM``)."""

    def __init__(self, fleet: Fleet, authority: Authority, *, new_id: Callable[[], str]) -> None:
        self._fleet = fleet
        self._authority = authority
        self._new_id = new_id

    def application(self) -> web.Application:
        """Return it as a web application."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        return application

    async def _answer(self, request: web.Request) -> web.Response:
        if not request.raw_path.startswith("/"):  # meant for a proxy
            return _refusal(400, "Bad Request")
        body = await read_body(request, limit_bytes=MAX_REQUEST_BYTES)
        if body is None:
            return _refusal(413, "Request Entity Too Large")
        request_id = self._new_id()
        try:
            caller = ""
            if self._fleet.spec.url_auth == "AWS_IAM":
                caller = self._authority.admit(request, body).access_key
            event = json.dumps(request_event(_read(request, body, caller=caller, request_id=request_id))).encode()
            if len(event) > MAX_REQUEST_BYTES:
                return _refusal(413, "Request Entity Too Large")
            outcome = await self._fleet.invoke(Invocation(request_id=request_id, payload=event))
        except UnicodeDecodeError:
            return _refusal(400, "Bad Request")
        except ServiceError as refusal:
            throttled = refusal.code == "TooManyRequestsException"
            return _refusal(429, refusal.message) if throttled else _refusal(403, "Forbidden")
        if outcome.error_type:
            return _refusal(502, "Internal Server Error")
        return _response(outcome.payload, request_id)


def _read(request: web.Request, body: bytes, *, caller: str, request_id: str) -> UrlRequest:
    raw_path, _, raw_query = request.raw_path.partition("?")
    headers = joined_headers(request)
    headers.pop("cookie", None)
    cookies = [cookie.strip() for line in request.headers.getall("Cookie", []) for cookie in line.split(";")]
    return UrlRequest(
        method=request.method,
        raw_path=raw_path,
        raw_query=raw_query,
        headers=headers,
        cookies=tuple(cookies),
        body=body,
        source_ip=request.remote or "",
        caller=caller,
        request_id=request_id,
        received_at=time.time(),
    )


def _response(payload: bytes, request_id: str) -> web.Response:
    try:
        reply = reply_of(payload)
    except ValueError:
        return _refusal(502, "Internal Server Error")
    response = web.Response(status=reply.status, body=reply.body)
    for name, value in reply.headers.items():
        if name not in _OWN_HEADERS:
            response.headers[name] = value
    for cookie in reply.cookies:
        response.headers.add("set-cookie", cookie)
    response.headers["x-amzn-RequestId"] = request_id
    return response


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"Message": message}, status=status)


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlRequest:
    """A request to a function URL.

    Attributes:
        raw_path: as sent, percent-encoded, as is ``raw_query``.
        headers: names in lower case, values of a repeated name joined with a comma; without cookies.
        caller: access key of who signed it; empty if nobody had to.
        received_at: POSIX seconds.
    """

    method: str
    raw_path: str
    raw_query: str
    headers: Mapping[str, str]
    cookies: tuple[str, ...]
    body: bytes
    source_ip: str
    caller: str
    request_id: str
    received_at: float


def request_event(request: UrlRequest) -> dict[str, Any]:
    """Return the event that the function gets."""
    text = _text_of(request)
    event: dict[str, Any] = {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": request.raw_path,
        "rawQueryString": request.raw_query,
        "headers": dict(request.headers),
        "requestContext": _context(request),
        "isBase64Encoded": text is None,
    }
    if request.cookies:
        event["cookies"] = list(request.cookies)
    if request.raw_query:
        event["queryStringParameters"] = _joined(parse_query(request.raw_query))
    if request.body:
        event["body"] = base64.b64encode(request.body).decode() if text is None else text
    return event


def _context(request: UrlRequest) -> dict[str, Any]:
    domain = request.headers.get("host", "")
    context: dict[str, Any] = {
        "accountId": request.caller or "anonymous",
        "apiId": domain.partition(".")[0],
        "domainName": domain,
        "domainPrefix": domain.partition(".")[0],
        "http": {
            "method": request.method,
            "path": request.raw_path,
            "protocol": "HTTP/1.1",
            "sourceIp": request.source_ip,
            "userAgent": request.headers.get("user-agent", ""),
        },
        "requestId": request.request_id,
        "routeKey": "$default",
        "stage": "$default",
        "time": datetime.fromtimestamp(request.received_at, UTC).strftime("%d/%b/%Y:%H:%M:%S +0000"),
        "timeEpoch": int(request.received_at * 1000),
    }
    if request.caller:
        context["authorizer"] = {"iam": {"accessKey": request.caller, "callerId": request.caller}}
    return context


def _text_of(request: UrlRequest) -> str | None:
    """Return a body that is text, or None if it must be sent as base64."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.body and not kind.startswith("text/") and kind not in _TEXTUAL:
        return None
    try:
        return request.body.decode()
    except UnicodeDecodeError:
        return None


def _joined(pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    joined: dict[str, str] = {}
    for name, value in pairs:
        joined[name] = f"{joined[name]},{value}" if name in joined else value
    return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a function URL answers."""

    status: int
    headers: Mapping[str, str]
    cookies: tuple[str, ...]
    body: bytes


def reply_of(payload: bytes) -> Reply:
    """Return the response that a result stands for; one without a status code is itself the body of a 200.

    Raises:
        ValueError: it says that it is a response, and is none.
    """
    try:
        result = json.loads(payload)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict) or "statusCode" not in result:
        return Reply(status=200, headers={"content-type": "application/json"}, cookies=(), body=payload)
    status, headers, body = result["statusCode"], result.get("headers") or {}, result.get("body") or ""
    cookies = result.get("cookies") or []
    if type(status) is not int or not 200 <= status <= 599:
        raise ValueError(f"statusCode {status!r} is no HTTP status")
    if not isinstance(headers, dict) or not isinstance(body, str) or not isinstance(cookies, list):
        raise ValueError("headers, body and cookies of a result are an object, a text and a list")
    return Reply(
        status=status,
        headers={"content-type": "application/json"} | {_name(n): _plain(v) for n, v in headers.items()},
        cookies=tuple(map(_plain, cookies)),
        body=_decoded(body) if result.get("isBase64Encoded") else body.encode(),
    )


def _name(name: str) -> str:
    if not _TOKEN.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a header")
    return name.lower()


def _plain(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if not _VALUE.fullmatch(text):
        raise ValueError("a header has a line end, or another character that none may have")
    return text


def _decoded(body: str) -> bytes:
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise ValueError("the body is not base64") from error
