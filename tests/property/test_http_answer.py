"""An answer is the same however the network cuts it, and whatever arrives stays within the caller's memory."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from stoker._stores.http import Destination, HttpRequest, HttpResponse
from stoker._stores.http_exchange import DirectExchange
from stoker.errors import ServerError, StokerError

BODY = bytes(range(200))
CALL = HttpRequest(method="GET", url="http://host/b/k", headers={}, address="s3://b/k")
GUARD = b"\xa5" * 64
SIGNER = SigV4Auth(Credentials("a", "s"), "s3", "us-east-1")


def head(*lines: str, status: str = "206 Partial Content") -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *lines, "", "")).encode()


def chunked(data: bytes, sizes: list[int]) -> bytes:
    parts, done = [], 0
    for size in [*sizes, len(data)]:
        piece = data[done : done + size]
        if piece:
            parts.append(b"%x\r\n%s\r\n" % (len(piece), piece))
        done += len(piece)
    return b"".join([*parts, b"0\r\n\r\n"])


RANGE = "Content-Range: bytes 20-119/200"
ANSWERS = {
    "sized": head(RANGE, "Content-Length: 100", "ETag: x") + BODY[20:120],
    "chunked": head(RANGE, "Transfer-Encoding: chunked", "ETag: x") + chunked(BODY[20:120], [1, 7, 50]),
    "continued": b"HTTP/1.1 100 Continue\r\n\r\n" + head(RANGE, "Content-Length: 100", "ETag: x") + BODY[20:120],
    "refused": head("Content-Length: 5", "ETag: x", status="503 No") + b"later",
    "refused-chunked": head("Transfer-Encoding: chunked", "ETag: x", status="403 No") + chunked(b"never", [2]),
}
UNSIZED = head(RANGE, "ETag: x") + BODY[20:120]


def play(data: bytes, cuts: list[int], *, hangs_up: bool = False) -> tuple[HttpResponse | None, bytes, bool]:
    """Deliver ``data`` in the pieces that ``cuts`` make; return the reply, what was received, and if it is the last."""
    memory = bytearray(GUARD + bytes(100) + GUARD)
    answer = DirectExchange(CALL, Destination(memoryview(memory)[64:164], 20, 120))
    scratch = memoryview(bytearray(32))
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    try:
        for start, end in pairwise(places):
            while start < end and answer.response is None:
                buffer = answer.buffer(scratch)
                assert len(buffer) > 0
                count = min(len(buffer), end - start)
                buffer[:count] = data[start : start + count]
                start += count
                assert answer.receive_count(count, scratch) == (answer.response is not None)
        if hangs_up and answer.response is None:
            assert answer.receive_eof() == (answer.response is not None)
    finally:
        assert memory[:64] == memory[164:] == GUARD
    return answer.response, bytes(memory[64:164]), answer.is_last


@given(name=st.sampled_from(list(ANSWERS)), cuts=st.lists(st.integers(0, 400), max_size=30))
def test_however_it_is_cut_an_answer_is_the_same(name: str, cuts: list[int]) -> None:
    reply, received, is_last = play(ANSWERS[name], cuts)
    assert reply is not None
    assert reply.headers["etag"] == "x"
    assert not is_last
    if reply.is_error:
        assert reply.body in (b"later", b"never")
        assert received == bytes(100)
    else:
        assert (reply.size_bytes, received) == (200, BODY[20:120])


@given(cuts=st.lists(st.integers(0, 400), max_size=30))
def test_a_body_of_unknown_length_is_whole_when_the_connection_ends(cuts: list[int]) -> None:
    reply, received, is_last = play(UNSIZED, cuts, hangs_up=True)
    assert reply is not None
    assert (received, is_last) == (BODY[20:120], True)


@given(
    name=st.sampled_from([*ANSWERS, "unsized"]),
    edits=st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=12)), min_size=1, max_size=4),
    length=st.integers(0, 400),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_a_mangled_answer_is_an_answer_or_a_typed_error(
    name: str, edits: list[tuple[int, bytes]], length: int, cuts: list[int]
) -> None:
    data = bytearray(ANSWERS.get(name, UNSIZED))
    for place, piece in edits:
        data[place : place + len(piece)] = piece
    with suppress(StokerError):
        play(bytes(data[:length]), cuts, hangs_up=True)


@pytest.mark.parametrize(
    ("lines", "is_last"),
    [
        ((), False),
        (("Connection: keep-alive",), False),
        (("Connection: close",), True),
        (("connection:CLOSE ",), True),
        (("Connection: x, Close",), True),
        (("Connection: keep-alive", "Connection: close"), True),
    ],
    ids=["silent", "keep-alive", "close", "loud", "listed", "twice"],
)
def test_a_connection_is_kept_unless_the_server_says_otherwise(lines: tuple[str, ...], is_last: bool) -> None:
    assert play(head(RANGE, "Content-Length: 100", *lines) + BODY[20:120], [])[2] is is_last


def test_an_old_protocol_keeps_no_connection() -> None:
    answer = head(RANGE, "Content-Length: 100").replace(b"HTTP/1.1", b"HTTP/1.0") + BODY[20:120]
    assert play(answer, [])[2]


def test_what_is_sent_asks_the_host_by_name_and_for_no_compression() -> None:
    call = HttpRequest(
        method="HEAD", url="https://b.host:9000/a%2Fb?x=%2F", headers={"Range": "bytes=0-1"}, address="s3://b/k"
    )
    assert DirectExchange(call).request_bytes == (
        b"HEAD /a%2Fb?x=%2F HTTP/1.1\r\nHost: b.host:9000\r\nRange: bytes=0-1\r\nAccept-Encoding: identity\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://host:80", "host"),
        ("https://host:443", "host"),
        ("https://host:80", "host:80"),
        ("https://Bucket.Example:9000", "bucket.example:9000"),
        ("http://[::1]", "[::1]"),
        ("http://[::1]:9000", "[::1]:9000"),
    ],
)
def test_the_host_is_named_as_it_was_signed(origin: str, host: str) -> None:
    call = HttpRequest(method="GET", url=f"{origin}/k", headers={}, address="s3://b/k")
    assert f"\r\nHost: {host}\r\n".encode() in DirectExchange(call).request_bytes
    assert f"host:{host}" in SIGNER.canonical_headers(SIGNER.headers_to_sign(AWSRequest("GET", call.url)))


@pytest.mark.parametrize("name", ["refused", "refused-chunked"])
def test_a_connection_with_something_behind_an_answer_is_not_kept(name: str) -> None:
    assert not play(ANSWERS[name], [])[2]
    assert play(ANSWERS[name] + b"H", [])[2]


def test_a_body_behind_an_answer_to_head_is_no_answer_to_the_next() -> None:
    call = HttpRequest(method="HEAD", url="http://host/k", headers={}, address="s3://b/k")
    answer, scratch = DirectExchange(call), memoryview(bytearray(1 << 10))
    data = head("Content-Length: 4", status="200 OK") + b"HTTP"
    scratch[: len(data)] = data
    assert answer.receive_count(len(data), scratch)
    assert answer.is_last


@pytest.mark.parametrize("lines", [("Content-Length: 100", "Content-Length: 7"), ("Content-Length: +100",)])
def test_lengths_that_contradict_each_other_are_a_typed_error(lines: tuple[str, ...]) -> None:
    with pytest.raises(ServerError):
        play(head(RANGE, *lines) + BODY[20:120], [])


def test_chunks_go_before_a_length() -> None:
    answer = head(RANGE, "Content-Length: 3", "Transfer-Encoding: chunked") + chunked(BODY[20:120], [])
    reply, received, _ = play(answer, [])
    assert reply is not None
    assert received == BODY[20:120]


@pytest.mark.parametrize("end", [b"0;x=y\r\n\r\n", b"0\r\nETag: other\r\n\r\n"], ids=["extension", "trailer"])
def test_what_stands_behind_chunks_changes_nothing(end: bytes) -> None:
    reply, received, is_last = play(ANSWERS["chunked"].removesuffix(b"0\r\n\r\n") + end, [])
    assert reply is not None
    assert (received, reply.headers["ETag"], is_last) == (BODY[20:120], "x", False)


@pytest.mark.parametrize("status", ["204 None", "304 Same"])
def test_an_answer_without_a_body_is_whole_with_its_head(status: str) -> None:
    reply, received, is_last = play(head("ETag: x", status=status), [])
    assert reply is not None
    assert (reply.is_error, received, is_last) == (True, bytes(100), False)


def test_an_unrequested_protocol_is_a_typed_error() -> None:
    with pytest.raises(ServerError):
        play(head("Upgrade: x", "Connection: Upgrade", status="101 Switch"), [])


def test_an_answer_to_head_has_the_objects_size_and_no_body() -> None:
    call = HttpRequest(method="HEAD", url="http://host/k", headers={}, address="s3://b/k")
    answer, scratch = DirectExchange(call), memoryview(bytearray(1 << 10))
    data = head("Content-Length: 12345", status="200 OK")
    scratch[: len(data)] = data
    assert answer.receive_count(len(data), scratch)
    assert answer.response is not None
    assert (answer.response.size_bytes, answer.response.body, answer.is_last) == (12345, b"", False)
