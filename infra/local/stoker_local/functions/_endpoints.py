"""HTTP endpoints of Lambda functions: ``Invoke`` and function URLs, with Lambda's verification of signatures.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from stoker_local._host import catch_all_application, read_body
from stoker_local._http1 import BadRequestError, ServerRequest, parse_query
from stoker_local._s3.model import S3Error
from stoker_local._s3.signature import KeyPair, parse_claim, verify
from stoker_local.functions._instance_pool import LambdaService
from stoker_local.functions._statistics import MAX_EVENT_BYTES, MAX_REQUEST_BYTES, Invocation, ServiceError

_MAX_CONTEXT_CHARACTERS = 3583
_INVOCATION_TYPES = ("RequestResponse", "Event", "DryRun")
_LAMBDA_CODES = {
    "InvalidAccessKeyId": "UnrecognizedClientException",
    "InvalidToken": "UnrecognizedClientException",
    "SignatureDoesNotMatch": "InvalidSignatureException",
    "RequestTimeTooSkewed": "InvalidSignatureException",
    "ExpiredToken": "ExpiredTokenException",
    "AccessDenied": "AccessDeniedException",
}


def invoke_api(
    services: Mapping[str, LambdaService], authenticator: RequestAuthenticator, *, new_id: Callable[[], str]
) -> web.Application:
    """Return the application of Lambda's ``Invoke`` API, which boto3's and aioboto3's Lambda clients call."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return await _invoke(request, services, authenticator, new_id)
        except ServiceError as refusal:
            return refusal.response()

    application = web.Application()
    application.router.add_post("/2015-03-31/functions/{name}/invocations", answer)
    return application


async def _invoke(
    request: web.Request,
    services: Mapping[str, LambdaService],
    authenticator: RequestAuthenticator,
    new_id: Callable[[], str],
) -> web.Response:
    body = await read_body(request, limit_bytes=MAX_REQUEST_BYTES)
    if body is None:
        raise _too_large(MAX_REQUEST_BYTES)
    authenticator.authenticate(request, body)
    fleet = _find_service(services, request.match_info["name"], request.query.get("Qualifier", "$LATEST"))
    kind = request.headers.get("X-Amz-Invocation-Type", "RequestResponse")
    if kind not in _INVOCATION_TYPES:
        raise ServiceError(
            "InvalidParameterValueException", f"InvocationType {kind!r} is not one of {_INVOCATION_TYPES}."
        )
    if kind == "Event" and len(body) > MAX_EVENT_BYTES:
        raise _too_large(MAX_EVENT_BYTES)
    context = _client_context(request.headers.get("X-Amz-Client-Context", ""))
    invocation = Invocation(request_id=new_id(), payload=_validate_event(body), client_context=context)
    headers = {"x-amzn-RequestId": invocation.request_id}
    if kind == "DryRun":
        return web.Response(status=204, headers=headers)
    if kind == "Event":
        fleet.deliver_event(invocation)
        return web.Response(status=202, headers=headers)
    outcome = await fleet.invoke(invocation)
    headers["X-Amz-Executed-Version"] = "$LATEST"
    if outcome.error_type:
        headers["X-Amz-Function-Error"] = "Unhandled"
    if request.headers.get("X-Amz-Log-Type") == "Tail":
        headers["X-Amz-Log-Result"] = base64.b64encode(outcome.log).decode()
    return web.Response(body=outcome.payload, headers=headers, content_type="application/json")


def _find_service(services: Mapping[str, LambdaService], name: str, qualifier: str) -> LambdaService:
    """Return the function of a name, partial ARN or full ARN; ``$LATEST`` is the only version."""
    name = name.removesuffix(":$LATEST").rpartition(":")[2]
    fleet = services.get(name)
    if fleet is None or qualifier != "$LATEST":
        raise ServiceError("ResourceNotFoundException", f"Function not found: {name}:{qualifier}")
    return fleet


def _too_large(limit_bytes: int) -> ServiceError:
    message = f"Request must be smaller than {limit_bytes} bytes for the InvokeFunction operation"
    return ServiceError("RequestTooLargeException", message)


def _validate_event(body: bytes) -> bytes:
    """Validate and return an event in JSON; an empty body stands for an empty object."""
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
        return json.dumps(context)  # on one line, in ASCII, because it is forwarded as a header
    except (binascii.Error, ValueError, RecursionError) as error:
        raise ServiceError("InvalidParameterValueException", "Client context is not base64 of JSON.") from error


class RequestAuthenticator:
    """Authenticates Lambda requests that are signed with one of its keys, for one region."""

    def __init__(self, keys: Iterable[KeyPair], *, region: str, clock: Callable[[], float]) -> None:
        self._keys = {key.access_key: key for key in keys}
        self._region = region
        self._clock = clock

    def authenticate(self, request: web.BaseRequest, body: bytes) -> KeyPair:
        """Return the key pair that signed a request.

        Raises:
            ServiceError: the request is unsigned, wrongly signed, or signed with an unknown or expired key.
        """
        try:
            head = _request_head(request)
            claim = parse_claim(head, service="lambda")
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
            code = _LAMBDA_CODES.get(refusal.code, "IncompleteSignatureException")
            raise ServiceError(code, refusal.message) from refusal
        except (BadRequestError, UnicodeDecodeError) as error:
            raise ServiceError("IncompleteSignatureException", "The request is not UTF-8.") from error


def _request_head(request: web.BaseRequest) -> ServerRequest:
    raw_path, _, raw_query = request.raw_path.partition("?")
    return ServerRequest(
        method=request.method,
        raw_path=raw_path,
        path=request.path,
        query=parse_query(raw_query),
        headers=header_dict(request),
    )


def header_dict(request: web.BaseRequest) -> dict[str, str]:
    """Return the headers by lower-case name; values of a repeated name are joined with commas."""
    return {name.lower(): ",".join(request.headers.getall(name)) for name in request.headers}


_OWN_HEADERS = ("content-length", "connection", "transfer-encoding", "date")
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", re.ASCII)
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\ud7ff\ue000-\U0010ffff]*")
_TEXTUAL = ("application/json", "application/javascript", "application/xml")


def function_url(
    service: LambdaService, authenticator: RequestAuthenticator, *, new_id: Callable[[], str]
) -> web.Application:
    """Return the application of a function URL, open to this machine, or to signed requests only (``AWS_IAM``)."""

    async def answer(request: web.Request) -> web.Response:
        if not request.raw_path.startswith("/"):  # meant for a proxy
            return _error_response(400, "Bad Request")
        body = await read_body(request, limit_bytes=MAX_REQUEST_BYTES)
        if body is None:
            return _error_response(413, "Request Entity Too Large")
        request_id = new_id()
        try:
            caller = authenticator.authenticate(request, body).access_key if service.spec.url_auth == "AWS_IAM" else ""
            event = request_event(request, body, caller=caller, request_id=request_id, received_at=time.time())
            payload = json.dumps(event).encode()
            if len(payload) > MAX_REQUEST_BYTES:
                return _error_response(413, "Request Entity Too Large")
            outcome = await service.invoke(Invocation(request_id=request_id, payload=payload))
        except UnicodeDecodeError:
            return _error_response(400, "Bad Request")
        except ServiceError as refusal:
            throttled = refusal.code == "TooManyRequestsException"
            return _error_response(429, refusal.message) if throttled else _error_response(403, "Forbidden")
        if outcome.error_type:
            return _error_response(502, "Internal Server Error")
        try:
            response = parse_reply(outcome.payload)
        except ValueError:
            return _error_response(502, "Internal Server Error")
        response.headers["x-amzn-RequestId"] = request_id
        return response

    return catch_all_application(answer)


def _error_response(status: int, message: str) -> web.Response:
    return web.json_response({"Message": message}, status=status)


def request_event(
    request: web.BaseRequest, body: bytes, *, caller: str, request_id: str, received_at: float
) -> dict[str, Any]:
    """Return the event that a function URL passes to its function (payload format 2.0).

    Args:
        request: request to the function URL.
        body: body of the request.
        caller: access key that signed the request; empty if signatures are not required.
        request_id: id of the invocation.
        received_at: time of the request, in POSIX seconds.
    """
    raw_path, _, raw_query = request.raw_path.partition("?")
    headers = header_dict(request)
    headers.pop("cookie", None)
    cookies = [cookie.strip() for line in request.headers.getall("Cookie", []) for cookie in line.split(";")]
    text = _decode_text(body, headers.get("content-type", ""))
    context = _context(request, headers.get("host", ""), caller=caller, request_id=request_id, received_at=received_at)
    event: dict[str, Any] = {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": raw_path,
        "rawQueryString": raw_query,
        "headers": headers,
        "requestContext": context,
        "isBase64Encoded": text is None,
    }
    if cookies:
        event["cookies"] = cookies
    if raw_query:
        event["queryStringParameters"] = _join_values(parse_query(raw_query))
    if body:
        event["body"] = base64.b64encode(body).decode() if text is None else text
    return event


def _context(
    request: web.BaseRequest, domain: str, *, caller: str, request_id: str, received_at: float
) -> dict[str, Any]:
    context: dict[str, Any] = {
        "accountId": caller or "anonymous",
        "apiId": domain.partition(".")[0],
        "domainName": domain,
        "domainPrefix": domain.partition(".")[0],
        "http": {
            "method": request.method,
            "path": request.raw_path.partition("?")[0],
            "protocol": "HTTP/1.1",
            "sourceIp": request.remote or "",
            "userAgent": request.headers.get("User-Agent", ""),
        },
        "requestId": request_id,
        "routeKey": "$default",
        "stage": "$default",
        "time": datetime.fromtimestamp(received_at, UTC).strftime("%d/%b/%Y:%H:%M:%S +0000"),
        "timeEpoch": int(received_at * 1000),
    }
    if caller:
        context["authorizer"] = {"iam": {"accessKey": caller, "callerId": caller}}
    return context


def _decode_text(body: bytes, content_type: str) -> str | None:
    """Return a body as text, or None if it must be sent as base64."""
    kind = content_type.partition(";")[0].strip().lower()
    if body and not kind.startswith("text/") and kind not in _TEXTUAL:
        return None
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _join_values(pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    joined: dict[str, str] = {}
    for name, value in pairs:
        joined[name] = f"{joined[name]},{value}" if name in joined else value
    return joined


def parse_reply(payload: bytes) -> web.Response:
    """Convert a function's result to an HTTP response; a result without a status code is the body of a 200.

    Raises:
        ValueError: the result has a status code, but is not a valid response.
    """
    try:
        result = json.loads(payload)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict) or "statusCode" not in result:
        return web.Response(body=payload, headers={"content-type": "application/json"})
    status = result["statusCode"]
    headers = result.get("headers") or {}
    body = result.get("body") or ""
    cookies = result.get("cookies") or []
    if type(status) is not int or not 200 <= status <= 599:
        raise ValueError(f"statusCode {status!r} is not an HTTP status from 200 to 599")
    if not isinstance(headers, dict) or not isinstance(body, str) or not isinstance(cookies, list):
        raise ValueError("headers, body and cookies of a result must be an object, a text and a list")
    response = web.Response(
        status=status,
        headers=_reply_headers(headers),
        body=_decode_base64(body) if result.get("isBase64Encoded") else body.encode(),
    )
    for cookie in map(_header_value, cookies):
        response.headers.add("set-cookie", cookie)
    return response


def _reply_headers(headers: Mapping[str, object]) -> dict[str, str]:
    sent = {"content-type": "application/json"} | {_header_name(n): _header_value(v) for n, v in headers.items()}
    return {name: value for name, value in sent.items() if name not in _OWN_HEADERS}


def _header_name(name: str) -> str:
    if not _TOKEN.fullmatch(name):
        raise ValueError(f"{name!r} is not a valid header name")
    return name.lower()


def _header_value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if not _VALUE.fullmatch(text):
        raise ValueError("the value of a header contains a line end or another forbidden character")
    return text


def _decode_base64(body: str) -> bytes:
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise ValueError("the body is not base64") from error
