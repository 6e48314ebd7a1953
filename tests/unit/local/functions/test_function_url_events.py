from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from stoker_local.functions._endpoints import parse_reply, request_event
from support.cases import for_each


def event_of(headers: Mapping[str, str] | None = None, body: bytes = b"", caller: str = "") -> dict[str, Any]:
    sent = {"host": "127.0.0.1:1", "user-agent": "me"} if headers is None else headers
    request = make_mocked_request("GET", "/v1/a%20b?size=3&tag=a&tag=b%2Fc", headers=sent)
    return request_event(request.clone(remote="127.0.0.1"), body, caller=caller, request_id="id", received_at=1.25)


def test_a_request_is_an_event_of_payload_format_two() -> None:
    event = event_of({"host": "127.0.0.1:1", "user-agent": "me", "cookie": "a=1; b=2"})
    assert event["headers"] == {"host": "127.0.0.1:1", "user-agent": "me"}
    assert (event["version"], event["routeKey"], event["isBase64Encoded"]) == ("2.0", "$default", False)
    assert (event["rawPath"], event["rawQueryString"]) == ("/v1/a%20b", "size=3&tag=a&tag=b%2Fc")
    assert event["queryStringParameters"] == {"size": "3", "tag": "a,b/c"}
    assert event["cookies"] == ["a=1", "b=2"]
    context = event["requestContext"]
    assert context["http"] == {
        "method": "GET",
        "path": "/v1/a%20b",
        "protocol": "HTTP/1.1",
        "sourceIp": "127.0.0.1",
        "userAgent": "me",
    }
    assert (context["timeEpoch"], context["time"]) == (1250, "01/Jan/1970:00:00:01 +0000")
    assert context["accountId"] == "anonymous"
    assert "body" not in event


def test_the_signer_of_a_request_is_in_its_event() -> None:
    assert event_of(caller="key")["requestContext"]["authorizer"]["iam"]["accessKey"] == "key"


@pytest.mark.parametrize("content_type", ["text/plain", "application/json; charset=utf-8", "TEXT/csv"])
def test_text_stays_text(content_type: str) -> None:
    event = event_of({"content-type": content_type}, "ü".encode())
    assert (event["body"], event["isBase64Encoded"]) == ("ü", False)


@pytest.mark.parametrize(
    ("content_type", "body"),
    [("application/octet-stream", b"abc"), ("", b"abc"), ("text/plain", b"\xff\xfe"), ("image/png", b"\x00")],
)
def test_what_is_not_text_is_base64(content_type: str, body: bytes) -> None:
    event = event_of({"content-type": content_type}, body)
    assert event["isBase64Encoded"]
    assert base64.b64decode(event["body"]) == body


def test_a_result_with_a_status_is_a_response() -> None:
    result = {
        "statusCode": 206,
        "headers": {"Content-Type": "image/png", "X-Number": 3},
        "cookies": ["a=1"],
        "body": base64.b64encode(b"\x00\xff").decode(),
        "isBase64Encoded": True,
    }
    reply = parse_reply(json.dumps(result).encode())
    assert (reply.status, reply.body) == (206, b"\x00\xff")
    assert list(reply.headers.items()) == [("content-type", "image/png"), ("x-number", "3"), ("set-cookie", "a=1")]


@pytest.mark.parametrize("payload", [b'{"a": 1}', b'"text"', b"null", b"not json", b"[" * 100_000])
def test_a_result_without_a_status_is_itself_the_body(payload: bytes) -> None:
    reply = parse_reply(payload)
    assert (reply.status, reply.body, dict(reply.headers)) == (200, payload, {"content-type": "application/json"})


@for_each(
    "result",
    [
        {"statusCode": "200"},
        {"statusCode": 99},
        {"statusCode": 600},
        {"statusCode": True},
        {"statusCode": 200, "headers": ["a"]},
        {"statusCode": 200, "body": {"a": 1}},
        {"statusCode": 200, "cookies": "a=1"},
        {"statusCode": 200, "headers": {"a": "b\r\nset-cookie: c"}},
        {"statusCode": 200, "headers": {"a\r\nb": "c"}},
        {"statusCode": 200, "headers": {"a b": "c"}},
        {"statusCode": 200, "headers": {"": "c"}},
        {"statusCode": 200, "cookies": ["a=1\r\nb: c"]},
        {"statusCode": 200, "body": "no base64!", "isBase64Encoded": True},
    ],
)
def test_a_result_that_cannot_be_sent_is_refused(result: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_reply(json.dumps(result).encode())
