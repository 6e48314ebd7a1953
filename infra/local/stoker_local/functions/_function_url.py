"""Function URLs: an HTTP endpoint of a function's own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from aiohttp import web

from stoker_local.functions._authority import Authority
from stoker_local.functions._errors import ServiceError
from stoker_local.functions._fleet import Fleet
from stoker_local.functions._outcome import Invocation
from stoker_local.functions._payload import MAX_REQUEST_BYTES, read_body
from stoker_local.functions._url_event import UrlRequest, reply_of, request_event

__all__ = ["FunctionUrl"]

_OWN_HEADERS = ("content-length", "connection", "transfer-encoding", "date")


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
    headers: dict[str, str] = {}
    for name, value in request.headers.items():
        if (name := name.lower()) != "cookie":
            headers[name] = f"{headers[name]},{value}" if name in headers else value
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
