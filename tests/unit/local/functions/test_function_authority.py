from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp.test_utils import make_mocked_request
from aiohttp.web import Request
from botocore.auth import S3SigV4Auth, SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from stoker_local import KeyPair
from stoker_local.functions import ServiceError
from stoker_local.functions._endpoints import RequestAuthenticator
from support.cases import for_each

URL = "http://127.0.0.1:1"
KEYS = (
    KeyPair(access_key="stoker", secret_key="secret"),
    KeyPair(access_key="guest", secret_key="s", session_token="token"),
)


def authority(now: float | None = None) -> RequestAuthenticator:
    return RequestAuthenticator(KEYS, region="us-east-1", clock=time.time if now is None else lambda: now)


def received(url: str, headers: dict[str, str], method: str = "POST") -> Request:
    parts = urlsplit(url)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    return make_mocked_request(method, target, headers={"Host": parts.netloc, **headers})


def signed(target: str, *, body: bytes = b"", signer: Any = SigV4Auth, service: str = "lambda", **more: Any) -> Request:
    request = AWSRequest(method="POST", url=URL + target, data=body, headers=more.get("headers", {}))
    credentials = more.get("credentials", Credentials("stoker", "secret"))
    signer(credentials, service, more.get("region", "us-east-1")).add_auth(request)
    return received(str(request.url), dict(request.headers.items()))


@for_each(
    "target",
    [
        "/2015-03-31/functions/f/invocations",
        "/2015-03-31/functions/arn%3Aaws%3Alambda%3Aus-east-1%3A0%3Afunction%3Af/invocations",
        "/",
        "/a/../b//c/./d/",
        "/..",
        "/%C3%BC%20%2F+~",
        "/p?b=2&a=1&a=0&empty=&%C3%BC=%2F",
    ],
)
@for_each("body", [b"", b'{"a": 1}'])
def test_what_botocore_signs_is_let_in(target: str, body: bytes) -> None:
    assert authority().authenticate(signed(target, body=body), body) is KEYS[0]


def test_a_presigned_request_is_let_in_until_it_expires() -> None:
    request = signed("/p?x=1", signer=SigV4QueryAuth)
    assert authority().authenticate(request, b"") is KEYS[0]
    with pytest.raises(ServiceError, match="AccessDeniedException: Request has expired"):
        authority(time.time() + 7200).authenticate(request, b"")


def test_a_session_token_must_be_the_keys() -> None:
    assert authority().authenticate(signed("/", credentials=Credentials("guest", "s", "token")), b"") is KEYS[1]
    with pytest.raises(ServiceError, match="UnrecognizedClientException"):
        authority().authenticate(signed("/", credentials=Credentials("guest", "s", "other")), b"")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"credentials": Credentials("stoker", "wrong")}, "InvalidSignatureException"),
        ({"credentials": Credentials("nobody", "secret")}, "UnrecognizedClientException"),
        ({"region": "eu-west-1"}, "InvalidSignatureException"),
        ({"service": "s3"}, "IncompleteSignatureException"),
        ({"service": "s3", "signer": S3SigV4Auth}, "IncompleteSignatureException"),
    ],
)
def test_a_signature_for_another_key_region_or_service_is_refused(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(ServiceError, match=code):
        authority().authenticate(signed("/", **changes), b"")


def test_another_body_path_query_header_or_time_than_the_signed_one_is_refused() -> None:
    request = signed("/p?x=1", body=b"a", headers={"X-Amz-Invocation-Type": "DryRun"})
    assert authority().authenticate(request, b"a")
    headers = dict(request.headers.items())
    others = [
        (request, b"b"),
        (received(f"{URL}/q?x=1", headers), b"a"),
        (received(f"{URL}/p?x=2", headers), b"a"),
        (received(f"{URL}/p?x=1", {**headers, "X-Amz-Invocation-Type": "Event"}), b"a"),
        (received(f"{URL}/p?x=1", {**headers, "X-Amz-Log-Type": "Tail"}), b"a"),
        (received(f"{URL}/p?x=1", headers, method="GET"), b"a"),
    ]
    for other, body in others:
        with pytest.raises(ServiceError, match=r"InvalidSignatureException|AccessDeniedException"):
            authority().authenticate(other, body)
    with pytest.raises(ServiceError, match="InvalidSignatureException"):
        authority(time.time() + 3600).authenticate(request, b"a")


def test_a_body_must_be_the_one_whose_hash_the_request_names() -> None:
    request = signed("/", signer=S3SigV4Auth, body=b"a")  # the one signer that sends the hash
    assert authority().authenticate(request, b"a") is KEYS[0]
    with pytest.raises(ServiceError, match="The body is not the one that was signed"):
        authority().authenticate(request, b"b")


def test_an_unsigned_request_is_refused_with_the_missing_token() -> None:
    with pytest.raises(ServiceError) as refusal:
        authority().authenticate(received(f"{URL}/", {}), b"")
    answer = refusal.value.response()
    assert (answer.status, answer.headers["x-amzn-ErrorType"]) == (403, "MissingAuthenticationTokenException")
    assert json.loads(answer.text or "")["message"] == "Missing Authentication Token"


_TEXTS = st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=80)
_CLAIMS = st.builds(
    "AWS4-HMAC-SHA256 Credential={}/{}/us-east-1/lambda/aws4_request, SignedHeaders={}, Signature={}".format,
    st.sampled_from(["stoker", "guest", ""]),
    st.text("0123456789é", max_size=8),
    st.sampled_from(["host", "host;x-amz-date", ";", "host;" * 50]),
    st.text("0123456789abcdef", min_size=64, max_size=64),
)
_QUERIES = st.lists(st.sampled_from(["X-Amz-Signature", "X-Amz-Expires", "a", "=", "&", "%", "%C3", "%FF", "+", "9"]))


@given(authorization=_TEXTS | _CLAIMS | st.none(), date=_TEXTS | st.just("20260101T000000Z"), query=_QUERIES)
def test_random_requests_are_refused_with_typed_errors(authorization: str | None, date: str, query: list[str]) -> None:
    headers = {"X-Amz-Date": date} if authorization is None else {"Authorization": authorization, "X-Amz-Date": date}
    with pytest.raises(ServiceError):
        authority().authenticate(received(f"{URL}/p?{''.join(query)}", headers), b"")
