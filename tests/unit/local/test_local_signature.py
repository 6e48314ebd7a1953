from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from stoker_local import BucketSpec, KeyPair
from stoker_local._http1 import ServerRequest, parse_head
from stoker_local._s3 import S3Service
from support.local_bucket import signed_request

HOST = "http://127.0.0.1:9"
TOKEN = Credentials("guest", "guest-secret", "the-token")


class Clock:
    """A wall clock that tests push."""

    def __init__(self) -> None:
        self.ahead_seconds = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(clock: Clock) -> S3Service:
    keys = (
        KeyPair(access_key="stoker", secret_key="stoker-secret"),
        KeyPair(
            access_key="guest", secret_key="guest-secret", session_token="the-token", expires_at=time.time() + 3600
        ),
        KeyPair(access_key="reader", secret_key="s", read_only=True, buckets=("home",)),
    )
    buckets = (
        BucketSpec(name="home"),
        BucketSpec(name="abroad", region="eu-west-1"),
        BucketSpec(name="open", anonymous=True),
        BucketSpec(name="paid", requester_pays=True),
    )
    return S3Service(region="us-east-1", keys=keys, buckets=buckets, clock=clock)


def _signed(path: str, **signing: object) -> tuple[ServerRequest, bytes]:
    head, _, body = signed_request(f"{HOST}{path}", **signing).partition(b"\r\n\r\n")  # type: ignore[arg-type]  # as its own
    return parse_head(head), body


def _answer(service: S3Service, request: ServerRequest, body: bytes = b"") -> tuple[int, str]:
    response = service.perform(service.route(request, body))
    text = bytes(response.body).decode()
    return response.status, text.partition("<Code>")[2].partition("</Code>")[0]


def _unsigned(path: str, **headers: str) -> ServerRequest:
    lines = "".join(f"\r\n{name.replace('_', '-')}: {value}" for name, value in headers.items())
    return parse_head(f"GET {path} HTTP/1.1\r\nHost: x{lines}".encode())


@pytest.mark.parametrize("key", ["plain", "a%20b/%C3%BC%2B%25", "tilde~-_.", "x//y", "%E2%98%83?prefix=a%2Bb&x=%20y"])
def test_what_botocore_signs_verifies(service: S3Service, key: str) -> None:
    request, body = _signed(f"/home/{key}")
    assert _answer(service, request, body) == (404, "NoSuchKey")


def test_a_write_with_metadata_verifies(service: S3Service) -> None:
    request, body = _signed("/home/k", method="PUT", data=b"abc", headers={"x-amz-meta-note": "two  blanks"})
    assert _answer(service, request, body) == (200, "")
    assert service.buckets["home"].objects["k"].headers["x-amz-meta-note"] == "two  blanks"


def test_a_wrong_secret_does_not_match(service: S3Service) -> None:
    request, _ = _signed("/home/k", credentials=Credentials("stoker", "wrong"))
    assert _answer(service, request) == (403, "SignatureDoesNotMatch")


def test_an_unknown_key_is_named_so(service: S3Service) -> None:
    request, _ = _signed("/home/k", credentials=Credentials("nobody", "x"))
    assert _answer(service, request) == (403, "InvalidAccessKeyId")


TAMPERING: dict[str, Callable[[ServerRequest], ServerRequest]] = {
    "method": lambda r: replace(r, method="DELETE"),
    "path": lambda r: replace(r, path="/home/other"),
    "query": lambda r: replace(r, query=(*r.query, ("x", "y"))),
    "host": lambda r: replace(r, headers={**r.headers, "host": "elsewhere"}),
    "header": lambda r: replace(r, headers={**r.headers, "x-amz-meta-a": "2"}),
    "date": lambda r: replace(r, headers={**r.headers, "x-amz-date": r.headers["x-amz-date"][:-2] + "Z"}),
    "payload": lambda r: replace(r, headers={**r.headers, "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}),
}


@pytest.mark.parametrize("what", TAMPERING)
def test_nothing_that_was_signed_can_be_changed(service: S3Service, what: str) -> None:
    request, _ = _signed("/home/k", headers={"x-amz-meta-a": "1"})
    status, code = _answer(service, TAMPERING[what](request))
    assert (status, code) == ((403, "AccessDenied") if what == "date" else (403, "SignatureDoesNotMatch"))


def test_a_header_that_should_have_been_signed_cannot_be_added(service: S3Service) -> None:
    request, _ = _signed("/home/k")
    added = replace(request, headers={**request.headers, "x-amz-meta-new": "1"})
    assert _answer(service, added) == (403, "AccessDenied")


def test_a_body_other_than_the_signed_one_is_refused(service: S3Service) -> None:
    request, _ = _signed("/home/k", method="PUT", data=b"abc", headers={"x-amz-content-sha256": "0" * 64})
    assert _answer(service, request, b"abd")[1] in ("XAmzContentSHA256Mismatch", "SignatureDoesNotMatch")
    assert "k" not in service.buckets["home"].objects


@pytest.mark.parametrize("ahead_seconds", [16 * 60, -16 * 60])
def test_a_skewed_clock_is_refused(service: S3Service, clock: Clock, ahead_seconds: float) -> None:
    request, _ = _signed("/home/k")
    clock.ahead_seconds = ahead_seconds
    assert _answer(service, request) == (403, "RequestTimeTooSkewed")


def test_a_session_token_is_required_and_expires(service: S3Service, clock: Clock) -> None:
    request, _ = _signed("/home/k", credentials=TOKEN)
    assert _answer(service, request) == (404, "NoSuchKey")
    without, _ = _signed("/home/k", credentials=Credentials("guest", "guest-secret"))
    assert _answer(service, without) == (400, "InvalidToken")
    clock.ahead_seconds = 3601
    assert _answer(service, request) == (400, "ExpiredToken")


def _presigned(path: str, *, expires_seconds: int = 60) -> str:
    request = AWSRequest(method="GET", url=f"{HOST}{path}")
    S3SigV4QueryAuth(Credentials("stoker", "stoker-secret"), "s3", "us-east-1", expires=expires_seconds).add_auth(
        request
    )
    return str(request.url).removeprefix(HOST)


def _get(target: str) -> ServerRequest:
    return parse_head(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:9".encode())


def test_a_presigned_url_is_valid_until_it_expires(service: S3Service, clock: Clock) -> None:
    request = _get(_presigned("/home/a%20b"))
    assert _answer(service, request) == (404, "NoSuchKey")
    clock.ahead_seconds = 61
    assert _answer(service, request) == (403, "AccessDenied")


def test_a_presigned_url_cannot_be_given_a_longer_life(service: S3Service) -> None:
    longer = _presigned("/home/k").replace("X-Amz-Expires=60", "X-Amz-Expires=6000")
    assert _answer(service, _get(longer)) == (403, "SignatureDoesNotMatch")


@pytest.mark.parametrize(
    "authorization",
    [
        "AWS stoker:abc",
        "AWS4-HMAC-SHA256",
        "AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders=host, Signature=" + "0" * 64,
    ],
)
def test_a_malformed_authorization_is_named_so(service: S3Service, authorization: str) -> None:
    request = _unsigned("/home/k", authorization=authorization, x_amz_content_sha256="UNSIGNED-PAYLOAD")
    assert _answer(service, request) == (400, "AuthorizationHeaderMalformed")


def test_only_anonymous_buckets_are_read_without_a_signature(service: S3Service) -> None:
    assert _answer(service, _unsigned("/home/k")) == (403, "AccessDenied")
    assert _answer(service, _unsigned("/open/k")) == (404, "NoSuchKey")
    assert _answer(service, replace(_unsigned("/open/k"), method="PUT")) == (403, "AccessDenied")
    assert _answer(service, _unsigned("/nowhere/k")) == (403, "AccessDenied")


def test_a_requester_must_agree_to_pay(service: S3Service) -> None:
    assert _answer(service, _signed("/paid/k")[0]) == (403, "AccessDenied")
    agreed, _ = _signed("/paid/k", headers={"x-amz-request-payer": "requester"})
    assert _answer(service, agreed) == (404, "NoSuchKey")


def test_a_key_is_held_to_its_buckets_and_to_reading(service: S3Service) -> None:
    reader = Credentials("reader", "s")
    assert _answer(service, _signed("/home/k", credentials=reader)[0]) == (404, "NoSuchKey")
    assert _answer(service, _signed("/paid/k", credentials=reader)[0]) == (403, "AccessDenied")
    assert _answer(service, *_signed("/home/k", credentials=reader, method="PUT", data=b"x")) == (403, "AccessDenied")


def test_a_bucket_abroad_redirects_to_its_region(service: S3Service) -> None:
    request, _ = _signed("/abroad/k")
    response = service.perform(service.route(request, b""))
    assert response.status == 301
    assert response.headers["x-amz-bucket-region"] == "eu-west-1"
    assert _answer(service, _signed("/abroad/k", region="eu-west-1")[0]) == (404, "NoSuchKey")


def test_a_scope_of_another_region_is_refused_with_the_right_one(service: S3Service) -> None:
    request, _ = _signed("/abroad/k", region="ap-south-1")
    response = service.perform(service.route(request, b""))
    assert response.status == 400
    assert b"<Code>AuthorizationHeaderMalformed</Code>" in bytes(response.body)
    assert b"<Region>eu-west-1</Region>" in bytes(response.body)


def test_unimplemented_requests_are_refused_as_such(service: S3Service) -> None:
    for path in ("/home/k?acl", "/home?acl", "/home/k?attributes", "/home?lifecycle", "/home/k?torrent"):
        assert _answer(service, _get(_presigned(path))) == (501, "NotImplemented")
