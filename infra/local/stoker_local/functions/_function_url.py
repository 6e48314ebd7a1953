"""Function URLs: HTTP requests as events of payload format 2.0, and results as HTTP responses.

Source: AWS Lambda Developer Guide, "Invoking Lambda function URLs", request and response payloads.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from stoker_local._http1 import parse_query
from stoker_local.functions._fleet import Fleet
from stoker_local.functions._invoke_api import Authority, joined_headers
from stoker_local.functions._outcome import MAX_REQUEST_BYTES, Invocation, ServiceError, read_body

__all__ = ["FunctionUrl", "Reply", "UrlRequest", "reply_of", "request_event"]

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
