from __future__ import annotations

import asyncio
import base64
import json
from io import BytesIO
from typing import Any

import aiohttp
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from yarl import URL

from stoker_local.functions import FunctionCloud
from support.function_cloud import cloud_of, function

SECRET = "stoker-secret"


async def ask(cloud: FunctionCloud, target: str, method: str = "GET", **options: Any) -> tuple[int, Any, bytes]:
    """Send a request to the page's URL, its target as it is; return status, headers and body."""
    url = URL(cloud.function_urls["page"] + target, encoded=True)
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, allow_redirects=False, **options) as answer,
    ):
        return answer.status, answer.headers, await answer.read()


def signed(cloud: FunctionCloud, target: str, *, secret: str = SECRET, body: bytes = b"") -> dict[str, str]:
    request = AWSRequest(method="POST", url=cloud.function_urls["page"] + target, data=body)
    SigV4Auth(Credentials("stoker", secret), "lambda", "us-east-1").add_auth(request)
    return dict(request.headers.items())


def test_a_request_reaches_the_function_and_its_result_comes_back() -> None:
    async def scenario() -> None:
        async with cloud_of(function("page", url_auth="NONE")) as cloud:
            status, _, body = await ask(cloud, "/v1/a%2Fb/..%20c?x=1&x=2&y=%C3%BC", headers={"Cookie": "a=1; b=2"})
            event = json.loads(body)
            assert status == 200
            assert (event["rawPath"], event["rawQueryString"]) == ("/v1/a%2Fb/..%20c", "x=1&x=2&y=%C3%BC")
            assert event["queryStringParameters"] == {"x": "1,2", "y": "ü"}
            assert event["cookies"] == ["a=1", "b=2"]
            wanted = {
                "statusCode": 307,
                "headers": {"Location": "https://elsewhere/", "Content-Length": "99"},
                "cookies": ["s=1", "t=2"],
                "isBase64Encoded": True,
                "body": base64.b64encode(b"\x00\xff").decode(),
            }
            status, headers, body = await ask(cloud, "/", "POST", json=wanted)
            assert (status, headers["Location"], body) == (307, "https://elsewhere/", b"\x00\xff")
            assert headers.getall("Set-Cookie") == ["s=1", "t=2"]

    asyncio.run(scenario())


def test_a_url_of_iam_lets_in_who_signs() -> None:
    async def scenario() -> None:
        async with cloud_of(function("page", url_auth="AWS_IAM")) as cloud:
            for target in ("/", "/v1/a%20b//c/../d?y=%2F&x=1&empty="):
                body = b'{"statusCode": 204}'
                headers = {**signed(cloud, target, body=body), "Content-Type": "application/json"}
                status, _, _ = await ask(cloud, target, "POST", data=body, headers=headers)
                assert status == 204
            assert cloud.statistics()["page"].invocations == 2
            refused: list[dict[str, Any]] = [
                {},
                {"headers": signed(cloud, "/", secret="wrong")},
                {"headers": signed(cloud, "/other")},
                {"headers": signed(cloud, "/"), "data": b"another body"},
                {"headers": {"Authorization": "Bearer token"}},
            ]
            for options in refused:
                status, _, answer = await ask(cloud, "/", "POST", **options)
                assert (status, json.loads(answer)) == (403, {"Message": "Forbidden"})
            assert cloud.statistics()["page"].invocations == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "result",
    [
        {"statusCode": "200"},
        {"statusCode": 200, "headers": {"x": "a\r\nset-cookie: b"}},
        {"statusCode": 200, "headers": {"x y": "a"}},
        {"statusCode": 200, "body": "?", "isBase64Encoded": True},
    ],
)
def test_a_result_that_is_no_response_is_a_bad_gateway(result: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with cloud_of(function("page", url_auth="NONE")) as cloud:
            status, _, _ = await ask(cloud, "/", "POST", json=result)
            assert status == 502

    asyncio.run(scenario())


def test_errors_large_requests_and_throttles_have_their_statuses() -> None:
    async def scenario() -> None:
        page = function("page", url_auth="NONE", concurrency=1)
        async with cloud_of(page) as cloud:
            status, _, _ = await ask(cloud, "/", "POST", data=b"no json", headers={"Content-Type": "text/plain"})
            assert status == 502
            assert (await ask(cloud, "/", "POST", data=BytesIO(bytes(6_291_457))))[0] == 413
            assert (await ask(cloud, "/", "POST", data=BytesIO(bytes(5_000_000))))[
                0
            ] == 413  # as base64 it is too large
            assert (await ask(cloud, "/?%FF"))[0] == 400
            cloud.reclaim()
            statuses = [status for status, _, _ in await asyncio.gather(ask(cloud, "/"), ask(cloud, "/"))]
            assert sorted(statuses) == [200, 429]

    asyncio.run(scenario())
