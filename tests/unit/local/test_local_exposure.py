"""Access to the local servers: this machine by default, others only with a secret, all within bounds."""

from __future__ import annotations

import io
import socket
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from stoker._stores.options import is_loopback
from stoker_local import BucketConfig, BucketSpec, GcsConfig, KeyPair, LocalBucket, running_bucket
from stoker_local.__main__ import _bucket_config, _parser, main
from support.cases import for_each
from support.local_bucket import exchange, signed_request

OPEN = BucketSpec(name="open", anonymous=True)
OWN = (KeyPair(access_key="own", secret_key="own-secret"),)
EVERYWHERE = "0.0.0.0"  # noqa: S104  (nothing here binds to it)
ELSEWHERE = [EVERYWHERE, "::", "", "192.0.2.1", "example.com"]


def address(bucket: LocalBucket) -> tuple[str, int]:
    parts = urlsplit(bucket.url)
    return str(parts.hostname), int(parts.port or 0)


@pytest.mark.parametrize(
    ("host", "here"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)]
    + [(host, False) for host in ELSEWHERE],
)
def test_this_machine_is_distinguished_from_others(host: str, here: bool) -> None:
    assert is_loopback(host) is here


def test_by_default_only_this_machine_is_served() -> None:
    assert is_loopback(BucketConfig().host)
    assert is_loopback(GcsConfig().host)
    assert is_loopback(_parser().parse_args(["bucket"]).host)


@for_each("host", ELSEWHERE)
@for_each(
    "make",
    [
        lambda host: BucketConfig(host=host),
        lambda host: BucketConfig(host=host, keys=OWN, buckets=(OPEN,)),
        lambda host: GcsConfig(host=host),
    ],
    ids=["well-known-key", "anonymous-bucket", "gcs-without-token"],
)
def test_other_machines_are_not_let_in_without_a_secret(host: str, make: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match="open to other machines"):
        make(host)
    make("localhost")


def test_other_machines_are_let_in_with_one() -> None:
    BucketConfig(host=EVERYWHERE, keys=OWN)
    GcsConfig(host=EVERYWHERE, token="t")


def test_the_program_makes_a_secret_up_where_others_can_reach_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bucket", "--host", EVERYWHERE]
    first, second = (_bucket_config(_parser().parse_args(arguments)).keys[0].secret_key for _ in range(2))
    assert first != second
    assert len(first) == 64
    assert main([*arguments, "--anonymous"]) == 1
    assert "open to other machines" in capsys.readouterr().err


def test_one_connection_too_many_is_dropped_and_its_place_taken_when_another_leaves() -> None:
    with running_bucket(BucketConfig(max_connections=2)) as bucket:
        kept = [socket.create_connection(address(bucket), timeout=60) for _ in range(2)]
        try:
            for held in kept:
                held.sendall(b"GET /-/counts HTTP/1.1\r\n\r\n")
                assert held.recv(12) == b"HTTP/1.1 200"
            with socket.create_connection(address(bucket), timeout=60) as dropped:
                assert _ended(dropped)
        finally:
            for held in kept:
                held.close()
        answer = b""
        while not answer.startswith(b"HTTP/1.1 200"):  # the server learns that they left a moment later
            try:
                answer = exchange(bucket, b"GET /-/counts HTTP/1.1\r\nConnection: close\r\n\r\n")
            except ConnectionError:
                continue


@pytest.mark.parametrize(
    "part", [b"", b"GET /sto", b"PUT /stoker/k HTTP/1.1\r\nContent-Length: 9\r\n\r\nhalf", b"PUT / HTTP/1.1\r\nA: "]
)
def test_a_request_that_does_not_arrive_ends_its_connection(part: bytes) -> None:
    with (
        running_bucket(BucketConfig(request_seconds=0.05)) as bucket,
        socket.create_connection(address(bucket), timeout=60) as slow,
    ):
        slow.sendall(part)
        assert _ended(slow)


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("region", ["a\r\nSet-Cookie: x", "a b", "é", "x" * 33])
def test_a_region_cannot_carry_a_header(region: str) -> None:
    with pytest.raises(ValueError, match="not a region"):
        BucketSpec(name="one", region=region)
    with running_bucket() as bucket:
        data = f"<C><LocationConstraint>{region.replace(chr(13), '&#13;')}</LocationConstraint></C>".encode()
        answer = exchange(bucket, signed_request(f"{bucket.url}/fresh", method="PUT", data=data))
        assert b"InvalidBucketName" in answer
        assert "fresh" not in bucket.objects


@pytest.mark.parametrize(
    "target", ["/stoker/%0d%0aSet-Cookie:%20x", "/stoker/..%2f..%2fetc%2fpasswd", "/%0d%0aX:%20y/k"]
)
def test_a_key_is_a_name_and_neither_a_header_nor_a_path(target: str) -> None:
    with running_bucket() as bucket:
        for method in ("PUT", "GET"):
            head = exchange(bucket, signed_request(f"{bucket.url}{target}", method=method)).partition(b"\r\n\r\n")[0]
            assert head.startswith(b"HTTP/1.1 ")
            assert b"Set-Cookie" not in head
            assert b"\nX:" not in head
        assert all(".." not in bucket_name for bucket_name in bucket.objects)


def test_a_configuration_from_a_pipe_is_held_to_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = BucketConfig().to_json().replace("127.0.0.1", EVERYWHERE)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text + "\n"))
    assert main(["bucket", "--config", "-"]) == 1
    assert "open to other machines" in capsys.readouterr().err
