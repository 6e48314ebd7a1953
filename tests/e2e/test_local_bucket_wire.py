from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp
import pytest

from stoker_local import (
    BucketConfig,
    BucketSpec,
    Fault,
    FaultKind,
    FaultPlan,
    LocalBucket,
    NetworkShape,
    running_bucket,
)
from support.local_bucket import exchange, signed_headers, signed_request

BODY = os.urandom(1 << 20)
LARGE_BYTES = 8 << 20
OPEN = BucketSpec(name="open", anonymous=True)


@pytest.fixture(scope="module")
def served() -> Iterator[LocalBucket]:
    with running_bucket(BucketConfig(buckets=(OPEN,), max_object_bytes=8 << 20)) as running:
        running.put("open", "k", BODY)
        running.put("open", "large", bytes(LARGE_BYTES))
        yield running


@pytest.fixture
def bucket(served: LocalBucket) -> Iterator[LocalBucket]:
    served.counts.reset()
    yield served
    served.inject(FaultPlan())
    served.reshape(NetworkShape())


GET = b"GET /open/k HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def _split(answer: bytes) -> tuple[int, bytes, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), head, body


# --- hostile and unusual requests -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x16\x03\x01 not http at all\r\n\r\n", 400),
        (b"GET /open/k HTTP/3.0\r\n\r\n", 505),
        (b"GET /%ff HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"A: " + b"x" * (1 << 16), 431),
        (b"PUT /open/k HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"PUT /open/k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"PUT /open/k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcde", 400),
        (b"PUT /open/k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\n", 413),
        (b"PUT /open/k HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n", 400),
    ],
)
def test_a_hostile_request_is_answered_once_and_disconnected(
    bucket: LocalBucket, request_bytes: bytes, status: int
) -> None:
    assert _split(exchange(bucket, request_bytes))[0] == status
    assert bucket.counts.requests == {"Malformed": 1}
    assert _split(exchange(bucket, GET))[2] == BODY


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(bucket: LocalBucket) -> None:
    host, _, port = urlsplit(bucket.url).netloc.rpartition(":")
    for part in (b"", b"GET /op", b"PUT /open/n HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf", GET):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(part)
    _wait_for(lambda: bucket.counts.connections_opened == 4 and bucket.counts.connections == 0)
    assert "n" not in bucket.objects["open"]


def _wait_for(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come true within a minute"
        time.sleep(0.01)


def test_requests_sent_ahead_are_answered_in_order(bucket: LocalBucket) -> None:
    ahead = b"GET /open/k HTTP/1.1\r\nRange: bytes=0-3\r\n\r\nGET /open/k HTTP/1.1\r\nRange: bytes=4-9\r\n\r\n"
    parts = exchange(bucket, ahead + GET).split(b"HTTP/1.1 ")[1:4]
    assert [part.partition(b"\r\n\r\n")[2] for part in parts[:2]] == [BODY[:4], BODY[4:10]]


def test_a_body_is_taken_after_100_continue_or_in_http_chunks(bucket: LocalBucket) -> None:
    url = f"{bucket.url}/open/new"
    whole = signed_request(url, method="PUT", data=BODY)
    expecting = whole.replace(b"Connection: close", b"Expect: 100-continue\r\nConnection: close", 1)
    answer = exchange(bucket, expecting)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    chunks = b"".join(b"%x\r\n%s\r\n" % (1 << 16, BODY[i : i + (1 << 16)]) for i in range(0, len(BODY), 1 << 16))
    length = b"Content-Length: %d" % len(BODY)
    chunked = whole.replace(length, b"Transfer-Encoding: chunked").replace(BODY, chunks + b"0\r\nA: b\r\n\r\n")
    bucket.objects["open"]["new"] = bucket.put("open", "other", b"")
    assert _split(exchange(bucket, chunked))[0] == 200
    assert bucket.objects["open"]["new"].data == BODY


def test_an_aws_chunked_body_with_a_trailer_is_stored_decoded(bucket: LocalBucket) -> None:
    headers = {
        "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        "Content-Encoding": "aws-chunked",
        "x-amz-decoded-content-length": "3",
        "x-amz-trailer": "x-amz-checksum-crc32",
    }
    data = b"3\r\nabc\r\n0\r\nx-amz-checksum-crc32:NSRBwg==\r\n\r\n"
    answer = exchange(bucket, signed_request(f"{bucket.url}/open/c", method="PUT", data=data, headers=headers))
    assert _split(answer)[0] == 200
    assert bucket.objects["open"]["c"].data == b"abc"
    assert "content-encoding" not in bucket.objects["open"]["c"].headers


def test_this_machine_can_read_and_reset_the_counts(bucket: LocalBucket) -> None:
    exchange(bucket, GET)
    ask = b"GET /-/counts HTTP/1.1\r\nConnection: close\r\n\r\n"
    counts = json.loads(_split(exchange(bucket, ask))[2])
    assert counts["requests"] == {"GetObject": 1}
    assert counts["statuses"] == {"200": 1}
    assert (counts["bytes_out"], counts["peak_connections"]) == (len(BODY), 1)
    assert _split(exchange(bucket, ask.replace(b"GET /-/counts", b"POST /-/reset")))[0] == 204
    assert json.loads(_split(exchange(bucket, ask))[2])["requests"] == {}


# --- faults -----------------------------------------------------------------------------------------------------


def _faulty(bucket: LocalBucket, **fault: object) -> None:
    bucket.inject(FaultPlan(script=(Fault(**fault),)))  # type: ignore[arg-type]  # as its own


def test_a_503_asks_to_slow_down_and_how_long_to_wait(bucket: LocalBucket) -> None:
    _faulty(bucket, kind=FaultKind.SLOW_DOWN, retry_after_seconds=7)
    status, head, body = _split(exchange(bucket, GET))
    assert status == 503
    assert b"Retry-After: 7\r\n" in head
    assert b"<Code>SlowDown</Code>" in body
    assert bucket.counts.faults == {"slow_down": 1}


def test_a_500_is_an_internal_error(bucket: LocalBucket) -> None:
    _faulty(bucket, kind=FaultKind.INTERNAL_ERROR)
    status, _, body = _split(exchange(bucket, GET))
    assert (status, b"<Code>InternalError</Code>" in body) == (500, True)


def test_a_reset_is_a_reset_and_the_next_request_succeeds(bucket: LocalBucket) -> None:
    _faulty(bucket, kind=FaultKind.RESET)
    with pytest.raises(ConnectionResetError):
        exchange(bucket, GET)
    assert _split(exchange(bucket, GET))[2] == BODY
    assert bucket.counts.faults == {"reset": 1}


def test_a_truncated_body_promises_more_than_it_has(bucket: LocalBucket) -> None:
    _faulty(bucket, kind=FaultKind.TRUNCATE, position=0.25)
    _, head, body = _split(exchange(bucket, GET))
    assert b"Content-Length: %d" % len(BODY) in head
    assert body == BODY[: len(BODY) // 4]


def test_a_corrupt_answer_has_one_wrong_byte_and_the_object_is_untouched(bucket: LocalBucket) -> None:
    _faulty(bucket, kind=FaultKind.CORRUPT)
    _, _, body = _split(exchange(bucket, GET))
    assert sum(a != b for a, b in zip(body, BODY, strict=True)) == 1
    assert _split(exchange(bucket, GET))[2] == BODY


def test_a_stalled_body_sends_nothing_until_the_stall_ends(bucket: LocalBucket) -> None:
    host, _, port = urlsplit(bucket.url).netloc.rpartition(":")
    _faulty(bucket, kind=FaultKind.STALL, stall_seconds=3600.0)
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(GET)
        received = b""
        while len(received.partition(b"\r\n\r\n")[2]) < len(BODY) // 2:
            received += connection.recv(1 << 16)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    assert received.partition(b"\r\n\r\n")[2] == BODY[: len(BODY) // 2]
    _faulty(bucket, kind=FaultKind.STALL, stall_seconds=0.05)
    assert _split(exchange(bucket, GET))[2] == BODY


def test_faults_drawn_by_chance_are_counted_as_often_as_clients_see_them(bucket: LocalBucket) -> None:
    kinds = {FaultKind.SLOW_DOWN: 0.2, FaultKind.TRUNCATE: 0.2, FaultKind.CORRUPT: 0.2}
    bucket.inject(FaultPlan(probabilities=kinds, seed=1))
    seen = {"slow_down": 0, "truncate": 0, "corrupt": 0}
    for _ in range(60):
        status, _, body = _split(exchange(bucket, GET))
        kind = "slow_down" if status == 503 else "truncate" if len(body) < len(BODY) else "corrupt"
        if body != BODY:
            seen[kind] += 1
    assert bucket.counts.faults == seen
    assert min(seen.values()) > 0


# --- shapes -----------------------------------------------------------------------------------------------------


def _read_all(bucket: LocalBucket, connections: int) -> float:
    """Read the large object once on each of several connections and return the seconds that took."""

    async def read() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()

        async def one() -> None:
            async with session.get(f"{bucket.url}/open/large") as response:
                assert len(await response.read()) == LARGE_BYTES

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(one() for _ in range(connections)))
        return loop.time() - start

    return asyncio.run(read())


@pytest.mark.parametrize("software", [False, True])
def test_a_connection_is_not_faster_than_its_rate(bucket: LocalBucket, software: bool) -> None:
    bucket.reshape(NetworkShape(connection_bytes_per_second=40e6, software_pacing=software))
    assert LARGE_BYTES / _read_all(bucket, 1) < 40e6 * 1.2


def test_all_connections_together_are_not_faster_than_the_total_rate(bucket: LocalBucket) -> None:
    bucket.reshape(NetworkShape(total_bytes_per_second=80e6))
    assert 4 * LARGE_BYTES / _read_all(bucket, 4) < 80e6 * 1.2
    assert bucket.counts.peak_connections == 4


def test_every_operation_waits_for_its_first_byte(bucket: LocalBucket) -> None:
    bucket.reshape(NetworkShape(first_byte_seconds=0.1))
    for request in (GET, GET.replace(b"GET", b"HEAD"), GET.replace(b"/k", b"?list-type=2")):
        start = time.monotonic()
        assert _split(exchange(bucket, request))[0] == 200
        assert time.monotonic() - start >= 0.1


def test_only_gets_are_in_the_tail_and_they_are_overtaken(bucket: LocalBucket) -> None:
    bucket.reshape(NetworkShape(tail_fraction=1.0, tail_seconds=3600.0))
    host, _, port = urlsplit(bucket.url).netloc.rpartition(":")
    with socket.create_connection((host, int(port))) as delayed:
        delayed.sendall(GET)
        _wait_for(lambda: bucket.counts.faults["tail"] == 1)
        assert _split(exchange(bucket, GET.replace(b"GET", b"HEAD")))[0] == 200
        delayed.settimeout(0.1)
        with pytest.raises(TimeoutError):
            delayed.recv(1)
    assert bucket.counts.faults == {"tail": 1}


# --- back-pressure and the end ----------------------------------------------------------------------------------


def test_a_client_that_does_not_read_holds_up_only_itself() -> None:
    large = bytes(64 << 20)
    with running_bucket(BucketConfig(buckets=(OPEN,))) as bucket:
        bucket.put("open", "k", large)
        host, _, port = urlsplit(bucket.url).netloc.rpartition(":")
        with socket.create_connection((host, int(port))) as idle:
            idle.sendall(GET)
            _wait_for(lambda: bucket.counts.requests["GetObject"] == 1)
            for wire in bucket._connections:
                _wait_for(lambda w=wire: w._paused)
                assert wire.transport.get_write_buffer_size() < 1 << 20
            assert len(_split(exchange(bucket, GET))[2]) == len(large)


def test_leaving_ends_open_connections_and_frees_the_port() -> None:
    with running_bucket() as bucket:
        url = bucket.url
        host, _, port = urlsplit(url).netloc.rpartition(":")
        idle = socket.create_connection((host, int(port)))
        idle.sendall(b"GET /half HTTP/1.1\r\n")
        _wait_for(lambda: bucket.counts.connections == 1)
    with idle, suppress(ConnectionResetError):
        assert idle.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    with running_bucket(BucketConfig(port=int(port))) as again:
        assert again.url == url


def test_a_port_in_use_is_an_error_where_the_bucket_is_started() -> None:
    with running_bucket() as bucket:
        port = urlsplit(bucket.url).port or 0
        with pytest.raises(OSError, match="address already in use"), running_bucket(BucketConfig(port=port)):
            pytest.fail("two servers cannot share a port")


def test_a_peer_that_resets_while_it_is_served_does_no_harm(bucket: LocalBucket) -> None:
    host, _, port = urlsplit(bucket.url).netloc.rpartition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as rude:
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            rude.sendall(GET)
    _wait_for(lambda: bucket.counts.connections_opened == 20 and bucket.counts.connections == 0)
    assert _split(exchange(bucket, GET))[2] == BODY


def test_signed_reads_on_one_connection_verify_each_time(bucket: LocalBucket) -> None:
    headers = signed_headers(f"{bucket.url}/open/k", headers={"Range": "bytes=0-9"})
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    once = f"GET /open/k HTTP/1.1\r\n{lines}\r\n".encode()
    forged = once.replace(b"Signature=", b"Signature=0")[: len(once)]
    assert exchange(bucket, once * 3 + GET).count(b"206 Partial Content") == 3
    assert b"206" not in exchange(bucket, forged + GET).partition(b"\r\n")[0]
