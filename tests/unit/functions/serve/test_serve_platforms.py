"""The platforms' forms of requests and responses, and protection against header injection."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import EventError
from stoker_functions.serve import (
    LAMBDA_ANSWER_BYTES,
    HttpError,
    Request,
    Response,
    asgi_app,
    from_asgi,
    from_lambda_url,
    to_asgi,
    to_lambda_url,
)
from support.cases import for_each
from support.datasets import pack_numbers
from support.served_requests import ask, serving
from support.serving_host import hosting

EVENT: dict[str, Any] = {
    "version": "2.0",
    "routeKey": "$default",
    "rawPath": "/v1/train/super-samples/3",
    "rawQueryString": "version=2",
    "headers": {"Range": "bytes=0-1", "authorization": "Bearer x"},
    "requestContext": {"http": {"method": "GET", "path": "/v1/train/super-samples/3", "sourceIp": "192.0.2.1"}},
    "isBase64Encoded": False,
}


def test_a_function_urls_event_is_a_request() -> None:
    assert from_lambda_url(EVENT) == Request(
        method="GET",
        path="/v1/train/super-samples/3",
        query="version=2",
        headers={"range": "bytes=0-1", "authorization": "Bearer x"},
    )
    plain = {name: value for name, value in EVENT.items() if name not in ("headers", "rawQueryString")}
    assert from_lambda_url(plain) == Request(method="GET", path="/v1/train/super-samples/3")
    assert from_lambda_url({**EVENT, "headers": None}).headers == {}


@for_each(
    "event",
    [
        {},
        [],
        None,
        "event",
        {**EVENT, "version": "1.0"},
        {**EVENT, "version": 2.0},
        {**EVENT, "rawPath": None},
        {**EVENT, "rawPath": ["/v1"]},
        {**EVENT, "rawQueryString": 3},
        {**EVENT, "headers": "x"},
        {**EVENT, "headers": {"a": 1}},
        {**EVENT, "headers": {"a": ["b"]}},
        {**EVENT, "requestContext": {}},
        {**EVENT, "requestContext": {"http": "GET"}},
        {**EVENT, "requestContext": {"http": {"method": None}}},
        {"Records": [{"eventSource": "aws:sqs"}]},
    ],
)
def test_an_event_of_another_kind_is_refused(event: Any) -> None:
    with pytest.raises(EventError):
        from_lambda_url(event)


def test_a_response_has_the_form_of_function_urls() -> None:
    body = bytes(range(256))
    answer = to_lambda_url(Response(status=206, headers={"ETag": '"x"'}, body=body))
    assert (answer["statusCode"], b64decode(answer["body"]), answer["isBase64Encoded"]) == (206, body, True)
    assert answer["headers"]["etag"] == '"x"'
    assert answer["headers"]["x-content-type-options"] == "nosniff"
    assert json.loads(json.dumps(answer)) == answer


def test_the_largest_answer_fits_what_lambda_sends() -> None:
    answer = to_lambda_url(Response(status=200, headers={"Location": "x" * 8000}, body=bytes(LAMBDA_ANSWER_BYTES)))
    assert len(json.dumps(answer)) <= 6 * 1024 * 1024


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Location", "https://x\r\nSet-Cookie: a=b"),
        ("ETag", '"é"'),
        ("ETag", '"\0"'),
        ("X-A\r\nB", "1"),
        ("X A", "1"),
        ("", "1"),
    ],
)
def test_a_header_that_holds_another_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match="header"):
        Response(status=200, headers={name: value})


def test_a_refusal_is_json_whatever_its_message() -> None:
    response = HttpError(400, "bad", 'quotes " and\nlines and é').response()
    assert json.loads(response.body) == {"error": "bad", "message": 'quotes " and\nlines and é'}
    assert HttpError(400, "bad", "x").response(with_body=False).body == b""


def test_a_scope_of_asgi_is_a_request_with_its_path_as_it_was_sent() -> None:
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/v1/../x",
        "raw_path": b"/v1/%2e%2e/x?ignored",
        "query_string": b"version=2",
        "headers": [(b"Range", b"bytes=0-1"), (b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")],
    }
    assert from_asgi(scope) == Request(
        method="GET",
        path="/v1/%2e%2e/x",
        query="version=2",
        headers={"range": "bytes=0-1", "authorization": "Bearer a, Bearer b"},
    )
    assert from_asgi({**scope, "raw_path": None}).path == "/v1/../x"


def sent_by(app: Any, scope: dict[str, Any]) -> list[MutableMapping[str, Any]]:
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "lifespan.startup" if not sent else "lifespan.shutdown"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


def test_a_response_is_an_asgi_application() -> None:
    start, body = sent_by(to_asgi(Response(status=200, headers={"ETag": '"x"'}, body=b"12345")), {})
    headers = dict(start["headers"])
    assert (start["status"], headers[b"content-length"], headers[b"etag"]) == (200, b"5", b'"x"')
    assert body["body"] == b"12345"
    start, _ = sent_by(to_asgi(Response(status=200, headers={"Content-Length": "7"})), {})
    assert dict(start["headers"])[b"content-length"] == b"7"


def test_an_answer_is_sent_piece_by_piece_and_never_copied_whole() -> None:
    data = bytes(range(256)) * 10_000
    _, *bodies = sent_by(to_asgi(Response(status=200, body=bytearray(data))), {})
    assert b"".join(message["body"] for message in bodies) == data
    assert max(len(message["body"]) for message in bodies) <= 1 << 20
    assert [message["more_body"] for message in bodies] == [True] * (len(bodies) - 1) + [False]
    assert all(type(message["body"]) is bytes for message in bodies), "which ASGI wants"
    _, only = sent_by(to_asgi(Response(status=200)), {})
    assert (only["body"], only["more_body"]) == (b"", False)


def test_a_not_modified_response_has_no_content_length() -> None:
    start, _ = sent_by(to_asgi(Response(status=304, headers={"ETag": '"x"'})), {})
    assert b"content-length" not in dict(start["headers"])


def test_an_error_for_head_has_the_content_length_of_that_for_get() -> None:
    refusal = HttpError(404, "not-found", "there is none")
    asked, seen = refusal.response(), refusal.response(with_body=False)
    assert seen.body == b""
    assert seen.headers["Content-Length"] == str(len(asked.body))


def test_an_asgi_server_can_start_and_stop_it_and_gets_no_websocket() -> None:
    async def answer(_: Request) -> Response:
        return Response(status=204)

    app = asgi_app(answer)
    messages = [message["type"] for message in sent_by(app, {"type": "lifespan"})]
    assert messages == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    with pytest.raises(ValueError, match="websocket"):
        sent_by(app, {"type": "websocket"})


SOURCE = """
from stoker import open_store
from stoker_functions.serve import ServeConfig, Service, from_asgi, to_asgi

service = Service(ServeConfig(datasets={"ds": %r}), open_store)


async def serve(request):
    return to_asgi(await service.answer(from_asgi(request.scope)))
"""


def test_it_is_a_function_of_functions_framework(tmp_path: Path) -> None:
    import aiohttp
    from functions_framework.aio import create_asgi_app

    url = pack_numbers(20)
    source = tmp_path / "main.py"
    source.write_text(SOURCE % url)
    wanted = ask(serving(url), "/v1/ds/batches/3", "size=4")
    app = create_asgi_app("serve", str(source), "http")  # type: ignore[no-untyped-call]  # it has no annotations

    async def main() -> None:
        async with hosting(app) as at, aiohttp.ClientSession() as session:
            async with session.get(f"{at}/v1/ds/batches/3?size=4") as response:
                assert (response.status, await response.read()) == (200, wanted.body)
                assert response.headers["ETag"] == wanted.headers["ETag"]
            async with session.head(f"{at}/v1/ds/batches/3?size=4") as response:
                assert response.headers["Content-Length"] == str(len(wanted.body))
            async with session.get(f"{at}/v1/ds/batches/3") as response:
                assert response.status == 400
            async with session.post(f"{at}/v1/ds/manifest", data=b"x") as response:
                assert response.status == 405
            async with session.get(f"{at}/v1/ds/manifest", headers={"If-None-Match": "*"}) as response:
                assert response.status == 304

    asyncio.run(main())
