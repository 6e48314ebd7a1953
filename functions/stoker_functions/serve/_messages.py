"""Requests, responses and HTTP errors, their form in Lambda's function URLs and ASGI, and the parsing of requests.

functions-framework passes a function Starlette's request, whose ``scope`` is that of ASGI, and calls the function's
result as an ASGI application, as uvicorn does.

ASGI: https://asgi.readthedocs.io/en/latest/specs/www.html

Parsing is strict: each part has one spelling, and anything else is refused. Nothing is percent-decoded, since valid
names and numbers need no escapes. The results are names and numbers within bounds, never a part of an object's key.

Conditional and ranged requests are those of RFC 9110, sections 13 and 14, for objects that have an entity tag and no
date.
"""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from stoker._order.order import OrderConfig, Shuffle
from stoker._stores.access_token import DATASET_NAME
from stoker._stores.served_values import MAX_BODY_BYTES, ValueRange, parse_ranges
from stoker.errors import EventError, StokerError

_HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)
_SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Strict-Transport-Security": "max-age=31536000",
    "X-Content-Type-Options": "nosniff",
}
_CHUNK_BYTES = 256 << 10
_BODY_SECONDS = 10.0

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An HTTP request.

    Attributes:
        method: HTTP method.
        path: path as the client sent it or the platform decoded it; it is not decoded (again) here.
        query: query as the client sent it, without the question mark; default empty.
        headers: lower-case header name → value; values of repeated headers are joined by commas. Default empty.
        body: body of a POST request; of a larger one than any that is answered, only the beginning. Default empty.

    Example:
        >>> service = Service(ServeConfig(datasets={"train": "data"}), stoker.open_store)
        >>> response = await service.answer(Request(method="GET", path="/v1/train/manifest"))
        >>> response.status
        200
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """An HTTP response. Each response gets security headers, so that browsers neither run nor embed it.

    Example:
        >>> response = Response(status=200, headers={"Content-Type": "text/plain"}, body=b"ready")
        >>> response.headers["X-Content-Type-Options"]
        'nosniff'

    Attributes:
        status: HTTP status.
        headers: header name → value; ``Content-Length`` only if it differs from the length of the body.
        body: bytes of the body; default empty.

    Raises:
        ValueError: a header has characters that HTTP does not allow.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes | bytearray = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not value.isascii() or not value.isprintable():
                raise ValueError(f"the header {name!r} of a response has characters that HTTP does not allow")
        object.__setattr__(self, "headers", {**_SECURITY_HEADERS, **self.headers})


class HttpError(StokerError):
    """An HTTP error response with the body ``{"error": code, "message": text}``.

    Attributes:
        status: HTTP status.
        code: error code for programs, such as ``"not-found"``.
        headers: more headers of the response; default none.

    Example:
        >>> HttpError(404, "not-found", "there is no such data set").response().body
        b'{"error": "not-found", "message": "there is no such data set"}'
    """

    def __init__(self, status: int, code: str, message: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}

    def response(self, *, with_body: bool = True) -> Response:
        """Return the response.

        Args:
            with_body: whether to send the body; False answers a HEAD request with the length of the body.
        """
        body = json.dumps({"error": self.code, "message": str(self)}).encode()
        headers = {"Cache-Control": "no-store", "Content-Type": "application/json", **self.headers}
        if not with_body:
            headers["Content-Length"], body = str(len(body)), b""
        return Response(status=self.status, headers=headers, body=body)


def from_lambda_url(event: Mapping[str, Any]) -> Request:
    """Return the request in an event of a Lambda function URL or an HTTP API.

    Example:
        >>> http = {"method": "GET"}
        >>> from_lambda_url({"version": "2.0", "rawPath": "/v1/train/manifest", "requestContext": {"http": http}})
        Request(method='GET', path='/v1/train/manifest', query='')

    Args:
        event: event of payload format 2.0.

    Raises:
        EventError: ``event`` is not such an event.
    """
    try:
        method, path = event["requestContext"]["http"]["method"], event["rawPath"]
        query = event.get("rawQueryString", "")
        headers = dict(event.get("headers") or {})
        text = event.get("body") or ""
        body = b64decode(text, validate=True) if event.get("isBase64Encoded") else text.encode()
        is_known = event["version"] == "2.0"
    except (LookupError, TypeError, ValueError, AttributeError):
        is_known = False
    if not is_known or not all(isinstance(text, str) for text in (method, path, query, *headers, *headers.values())):
        raise EventError("the event is not a request of payload format 2.0, which function URLs and HTTP APIs send")
    named = {name.lower(): value for name, value in headers.items()}
    return Request(method=method, path=path, query=query, headers=named, body=body)


def to_lambda_url(response: Response) -> dict[str, Any]:
    """Return a response in the form that a Lambda function returns, with the body in base64.

    Args:
        response: response to send.

    Example:
        >>> to_lambda_url(Response(status=200, body=b"ready"))["body"]
        'cmVhZHk='
    """
    return {
        "statusCode": response.status,
        "headers": {name.lower(): value for name, value in response.headers.items()},
        "body": b64encode(response.body).decode(),
        "isBase64Encoded": True,
    }


def from_asgi(scope: MutableMapping[str, Any]) -> Request:
    """Return the request of an ASGI scope of type ``http``, without a body.

    The path is the raw one if the server passes it.

    Args:
        scope: scope of one request, as the server passes it to an ASGI application.

    Example:
        >>> from_asgi({"type": "http", "method": "GET", "path": "/v1/train/manifest", "headers": []})
        Request(method='GET', path='/v1/train/manifest', query='')
    """
    headers: dict[str, str] = {}
    for name, value in scope.get("headers", ()):
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
    return Request(
        method=scope["method"],
        path=raw_path.partition(b"?")[0].decode("latin-1"),
        query=scope.get("query_string", b"").decode("latin-1"),
        headers=headers,
    )


async def receive_asgi(scope: MutableMapping[str, Any], receive: Receive) -> Request:
    """Return the request of an ASGI scope of type ``http``, with the body of a POST request.

    A longer body than any that is answered is not received to its end, nor one that takes longer than 10 s.

    Args:
        scope: scope of one request, as the server passes it to an ASGI application.
        receive: function that returns the next message of the request, as the server passes it.

    Example:
        >>> async def app(scope, receive, send):
        ...     request = await receive_asgi(scope, receive)
        ...     await to_asgi(Response(status=200, body=request.body))(scope, receive, send)
    """
    request = from_asgi(scope)
    body = bytearray()
    is_whole = request.method != "POST"
    with suppress(TimeoutError):
        async with asyncio.timeout(_BODY_SECONDS):
            while not is_whole and len(body) <= MAX_BODY_BYTES:
                message = await receive()
                body += message.get("body", b"")
                is_whole = not message.get("more_body", False)
    return replace(request, body=bytes(body[: MAX_BODY_BYTES + 1]))


def to_asgi(response: Response) -> AsgiApp:
    """Return an ASGI application that answers every request with this response.

    The body is copied in pieces of 256 KiB, each when the server is ready for it.

    Args:
        response: response to every request.

    Example:
        >>> async def app(scope, receive, send):
        ...     request = from_asgi(scope)
        ...     await to_asgi(Response(status=200, body=request.path.encode()))(scope, receive, send)
    """

    async def app(_scope: Message, _receive: Receive, send: Send) -> None:
        # With status 304 the length would be that of the whole object (RFC 9110, section 8.6), which is unknown here.
        length = {} if response.status == 304 else {"Content-Length": str(len(response.body))}
        named = {**length, **response.headers}
        headers = [(name.lower().encode(), value.encode()) for name, value in named.items()]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        body, end = memoryview(response.body), len(response.body)
        for start in range(0, max(end, 1), _CHUNK_BYTES):
            piece = body[start : start + _CHUNK_BYTES]
            is_last = start + _CHUNK_BYTES >= end
            await send({"type": "http.response.body", "body": bytes(piece), "more_body": not is_last})

    return app


def asgi_app(answer: Callable[[Request], Awaitable[Response]]) -> AsgiApp:
    """Return an ASGI application for your own server.

    Args:
        answer: asynchronous function from a request to its response, such as :meth:`Service.answer`.

    Example:
        >>> async def answer(request):
        ...     return Response(status=200, body=request.path.encode())
        >>> app = asgi_app(answer)  # uvicorn module:app
    """

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            await to_asgi(await answer(await receive_asgi(scope, receive)))(scope, receive, send)
        else:
            raise ValueError(f"ASGI scopes of type {scope['type']!r} are not supported, only http and lifespan")

    return app


MAX_URL_CHARACTERS = 1024
MAX_SIZE = 16_384
MAX_LANES = 1024
MAX_WINDOW = 64
_NUMBER = re.compile(r"0|[1-9][0-9]{0,19}", re.ASCII)
_PATH = re.compile(
    rf"/v1/({DATASET_NAME.pattern})/(?:(manifest|values)|(super-samples|batches)/({_NUMBER.pattern}))", re.ASCII
)
_NUMBERS: Mapping[str, tuple[int, int]] = {
    "version": (1, 999_999_999),
    "size": (1, MAX_SIZE),
    "seed": (0, (1 << 64) - 1),
    "epoch": (0, (1 << 32) - 1),
    "window": (1, MAX_WINDOW),
    "lanes": (1, MAX_LANES),
}
"""Parameter → its minimum and maximum."""
_ORDER_PARAMETERS = ("seed", "shuffle", "window", "lanes")
_TAG = r'(?:W/)?"[\x21\x23-\x7e]*"'
_TAGS = re.compile(rf"\*|{_TAG}(?:[ \t]*,[ \t]*{_TAG}){{0,31}}", re.ASCII)
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRequest:
    """A parsed request for a part of a data set.

    Attributes:
        dataset: name of the data set.
        what: ``manifest``, ``super-samples``, ``batches`` or ``values``: the manifest, one super-sample, a batch of an
            epoch, or ranges of super-samples.
        number: number of the super-sample in the manifest, or position of the batch's first sample in the epoch.
        version: version of the manifest, None for the newest.
        size: number of samples of the batch.
        epoch: number of the epoch, from 0.
        order: order of the epoch.
        ranges: the requested ranges, in their order; at least one of ``values``, else none.
    """

    dataset: str
    what: str
    number: int = 0
    version: int | None = None
    size: int = 0
    epoch: int = 0
    order: OrderConfig = field(default_factory=OrderConfig)
    ranges: Sequence[ValueRange] = ()


def parse_request(request: Request) -> DatasetRequest:
    """Parse a request.

    Raises:
        HttpError: the method is not that of the path (405), the URL is too long (414), the path is unknown (404), or a
            parameter is unknown, repeated, missing or out of bounds, or the body is malformed (400).
    """
    match = _PATH.fullmatch(request.path[: MAX_URL_CHARACTERS + 1])
    resource = "" if match is None else match[2] or match[3]
    methods = ("POST",) if resource == "values" else ("GET", "HEAD")
    if request.method not in methods:
        allowed = {"Allow": ", ".join(methods)}
        raise HttpError(405, "method-not-allowed", f"only {' and '.join(methods)} are answered here", headers=allowed)
    if len(request.path) + len(request.query) > MAX_URL_CHARACTERS:
        raise HttpError(414, "too-long", f"path and query have more than {MAX_URL_CHARACTERS} characters")
    if match is None:
        raise HttpError(
            404,
            "not-found",
            "paths are /v1/NAME/manifest, /v1/NAME/super-samples/NUMBER, /v1/NAME/batches/POSITION and /v1/NAME/values",
        )
    parameters = _parse_parameters(request.query, (*_NUMBERS, "shuffle") if resource == "batches" else ("version",))
    if resource == "batches" and "size" not in parameters:
        raise HttpError(400, "bad-parameter", "the parameter size is missing: the number of samples of the batch")
    if resource == "values":
        parameters["ranges"] = _parse_body(request.body, parameters)
    order = OrderConfig(**{name: parameters.pop(name) for name in _ORDER_PARAMETERS if name in parameters})
    return DatasetRequest(dataset=match[1], what=resource, number=int(match[4] or 0), order=order, **parameters)


def _parse_body(body: bytes, parameters: Mapping[str, Any]) -> Sequence[ValueRange]:
    if "version" not in parameters:
        raise HttpError(400, "bad-parameter", "the parameter version is missing: the manifest whose rows are meant")
    try:
        return parse_ranges(body)
    except ValueError as error:
        raise HttpError(400, "bad-body", str(error)) from None


def _parse_parameters(query: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of a query by name, with numbers as integers."""
    parameters: dict[str, Any] = {}
    for pair in query.split("&") if query else ():
        name, _, text = pair.partition("=")
        if name not in names or name in parameters:
            raise HttpError(400, "bad-parameter", f"the parameters are, each at most once: {', '.join(names)}")
        parameters[name] = _parse_shuffle(text) if name == "shuffle" else _parse_number(name, text)
    return parameters


def _parse_shuffle(text: str) -> str:
    if text not in get_args(Shuffle):
        raise HttpError(400, "bad-parameter", f"shuffle is one of {', '.join(get_args(Shuffle))}")
    return text


def _parse_number(name: str, text: str) -> int:
    min_value, max_value = _NUMBERS[name]
    if not _NUMBER.fullmatch(text) or not min_value <= int(text) <= max_value:
        raise HttpError(
            400, "bad-parameter", f"{name} is a whole number from {min_value} to {max_value}, without leading zeros"
        )
    return int(text)


def is_not_modified(headers: Mapping[str, str], etag: str) -> bool:
    """Return whether the client has the object already, so that the answer is 304.

    Args:
        headers: headers of the request.
        etag: entity tag of the object, strong and in quotes.

    Raises:
        HttpError: the object does not match ``If-Match`` (412), or a condition is malformed (400).
    """
    matches = _parse_tags(headers, "if-match")
    if matches is not None and "*" not in matches and etag not in matches:
        raise HttpError(412, "changed", "the object's tag does not match If-Match", headers={"ETag": etag})
    known = _parse_tags(headers, "if-none-match")
    return known is not None and ("*" in known or etag in {tag.removeprefix("W/") for tag in known})


def parse_range(headers: Mapping[str, str], size_bytes: int, etag: str) -> tuple[int, int] | None:
    """Return the byte range ``[start, end)`` of a request, None for the whole object.

    Args:
        headers: headers of the request.
        size_bytes: size of the object.
        etag: entity tag of the object, strong and in quotes.

    Raises:
        HttpError: the range is beyond the object's end, has several parts, or is malformed (416).
    """
    text = headers.get("range")
    if text is None or not text.startswith("bytes=") or headers.get("if-range", etag) != etag:
        return None
    match = _RANGE.fullmatch(text)
    span = _resolve_range(match[1], match[2], size_bytes) if match else None
    if span is None:
        raise HttpError(
            416,
            "bad-range",
            f"give one range within the {size_bytes} bytes: bytes=FIRST-LAST, bytes=FIRST- or bytes=-COUNT",
            headers={"Content-Range": f"bytes */{size_bytes}", "ETag": etag},
        )
    return span


def _resolve_range(first: str, last: str, size_bytes: int) -> tuple[int, int] | None:
    """Return ``[start, end)``, None if there is no such range."""
    if not first:
        start, end = size_bytes - min(int(last or 0), size_bytes), size_bytes
    else:
        start = int(first)
        end = size_bytes if not last else min(int(last) + 1, size_bytes)
    is_reversed = bool(first and last) and int(last) < int(first)
    return (start, end) if start < end and not is_reversed else None


def _parse_tags(headers: Mapping[str, str], name: str) -> frozenset[str] | None:
    text = headers.get(name)
    if text is None:
        return None
    if not _TAGS.fullmatch(text):
        raise HttpError(400, "bad-header", f"{name} is neither * nor up to 32 entity tags")
    return frozenset(re.findall(rf"\*|{_TAG}", text))
