import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_local._http1 import BadRequestError, ServerResponse, compose_head, parse_head
from support.cases import for_each


def test_a_request_head_is_parsed_into_decoded_parts() -> None:
    request = parse_head(b"GET /b/a%20b%2Fc?list-type=2&prefix=a+b%26&flag HTTP/1.1\r\nHost: x\r\nX-A:  1 \r\nx-a: 2")
    assert (request.method, request.raw_path, request.path) == ("GET", "/b/a%20b%2Fc", "/b/a b/c")
    assert request.query == (("list-type", "2"), ("prefix", "a b&"), ("flag", ""))
    assert request.headers == {"host": "x", "x-a": "1,2"}
    assert request.body_bytes == 0
    assert request.keep_alive


def test_the_first_value_of_a_repeated_parameter_wins() -> None:
    assert parse_head(b"GET /?a=1&a=2 HTTP/1.1").parameters == {"a": "1"}


@pytest.mark.parametrize(
    ("head", "keep_alive"),
    [
        (b"GET / HTTP/1.1\r\nConnection: close", False),
        (b"GET / HTTP/1.0", False),
        (b"GET / HTTP/1.0\r\nConnection: Keep-Alive", True),
    ],
)
def test_connections_are_kept_as_the_version_and_header_say(head: bytes, keep_alive: bool) -> None:
    assert parse_head(head).keep_alive is keep_alive


@for_each(
    "head",
    [
        b"",
        b"GET",
        b"GET / HTTP/2.0",
        b"GET  / HTTP/1.1",
        b"GET relative HTTP/1.1",
        b"GET http://elsewhere/ HTTP/1.1",
        b"G ET / HTTP/1.1",
        b"GET /\x00 HTTP/1.1",
        b"GET /%ff HTTP/1.1",
        b"GET /?a=%ff HTTP/1.1",
        b"GET / HTTP/1.1\r\nno colon",
        b"GET / HTTP/1.1\r\n folded: x",
        b"GET / HTTP/1.1\r\nA: x\r\n y",
        b"GET / HTTP/1.1\r\nA : x",
        b"GET / HTTP/1.1\r\nA: x\nB: y",
        b"GET / HTTP/1.1\r\nA: x\x00",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b",
        b"PUT / HTTP/1.1\r\nContent-Length: -1",
        b"PUT / HTTP/1.1\r\nContent-Length: +1",
        b"PUT / HTTP/1.1\r\nContent-Length: 1e3",
        "PUT / HTTP/1.1\r\nContent-Length: ²".encode("latin-1"),
        b"PUT / HTTP/1.1\r\nContent-Length: 99999999999999999999",
        b"PUT / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1",
        b"PUT / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked",
        b"PUT / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked",
    ],
)
def test_a_malformed_or_ambiguous_head_is_refused(head: bytes) -> None:
    with pytest.raises(BadRequestError):
        parse_head(head)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_parsed_or_refused(noise: bytes) -> None:
    for head in (noise, b"GET /" + noise + b" HTTP/1.1", b"GET / HTTP/1.1\r\n" + noise):
        try:
            parse_head(head)
        except BadRequestError:
            continue


def test_a_response_head_states_the_length_of_the_body() -> None:
    head = compose_head(ServerResponse(headers={"ETag": '"x"'}, body=bytes(7)), keep_alive=False)
    assert head == b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 7\r\nConnection: close\r\n\r\n'


def test_no_content_has_no_length() -> None:
    assert compose_head(ServerResponse(status=204), keep_alive=True) == b"HTTP/1.1 204 No Content\r\n\r\n"
