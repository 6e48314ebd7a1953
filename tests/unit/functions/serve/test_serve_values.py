"""Requests for values: bodies of one spelling, ranges within super-samples, and the bytes in the order asked for."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import MutableMapping
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import open_store
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker._stores.served_values import (
    ANSWER_BYTES_HEADER,
    MAX_BODY_BYTES,
    MAX_RANGES,
    ValueRange,
    encode_ranges,
    parse_answer_bytes,
    parse_ranges,
)
from stoker.abc import Store
from stoker.errors import EventError
from stoker.testing import WatchedStore, run_virtual
from stoker_functions.serve import Request, Response, Service, from_lambda_url, receive_asgi
from stoker_functions.serve._values import merge_ranges
from support.cases import for_each
from support.datasets import pack_numbers
from support.places import with_store
from support.served_requests import error_of, serving, with_service


@cache
def packed() -> tuple[str, Manifest, list[bytes]]:
    """Return a data set's URL, its manifest and its super-samples."""
    url = pack_numbers(60, super_sample_bytes=800)

    async def read(store: Store) -> tuple[Manifest, list[bytes]]:
        manifest = await read_manifest(store)
        return manifest, [(await store.get(manifest.key(row)))[0] for row in range(len(manifest))]

    return url, *with_store(url, read)


def ask_values(body: bytes, query: str = "version=1", method: str = "POST", **changes: Any) -> Response:
    request = Request(method=method, path="/v1/ds/values", query=query, body=body)
    response: Response = with_service(serving(packed()[0], **changes), lambda service: service.answer(request))
    return response


def test_the_answer_has_the_bytes_of_all_ranges_in_their_order() -> None:
    _, manifest, bodies = packed()
    assert len(manifest) > 3
    ranges = [ValueRange(3, 10, 30), ValueRange(0, 0, len(bodies[0])), ValueRange(3, 10, 30), ValueRange(1, 7, 8)]
    response = ask_values(encode_ranges(ranges))
    assert (response.status, bytes(response.body)) == (200, b"".join(bodies[r][a:b] for r, a, b in ranges))
    assert response.headers["Stoker-Version"] == "1"
    assert response.headers["Cache-Control"] == "no-store"
    assert parse_answer_bytes(response.headers) == 4_500_000


SPANS = st.tuples(st.integers(0, 3), st.integers(0, 3 << 20), st.integers(1, 1 << 19))


@given(st.lists(SPANS.map(lambda span: ValueRange(span[0], span[1], span[1] + span[2])), min_size=1, max_size=30))
def test_near_ranges_are_one_read_of_the_bucket(ranges: list[ValueRange]) -> None:
    reads = merge_ranges(ranges)
    assert sorted(number for each in reads for number in each.numbers) == list(range(len(ranges)))
    for each in reads:
        held = [ranges[number] for number in each.numbers]
        assert {row for row, _, _ in held} == {each.row}
        assert (min(held).start, max(part.end for part in held)) == (each.start, each.end)
        assert len(held) == 1 or each.end - each.start <= 1 << 20
        wanted = {place for part in held for place in range(part.start >> 10, (part.end >> 10) + 1)}
        assert max(b - a for a, b in pairwise(sorted(wanted))) <= 33 if len(wanted) > 1 else True, "gaps are small"


@settings(max_examples=50)
@given(st.data())
def test_overlapping_ranges_in_any_order_are_answered(data: st.DataObject) -> None:
    _, _, bodies = packed()
    row = st.integers(0, len(bodies) - 1)
    ranges = []
    for number in data.draw(st.lists(row, min_size=1, max_size=12)):
        start = data.draw(st.integers(0, len(bodies[number]) - 1))
        ranges.append(ValueRange(number, start, data.draw(st.integers(start + 1, len(bodies[number])))))
    response = ask_values(encode_ranges(ranges))
    assert (response.status, bytes(response.body)) == (200, b"".join(bodies[r][a:b] for r, a, b in ranges))


@given(st.lists(st.tuples(st.integers(0, 10**10 - 1), st.integers(0, 10**12), st.integers(1, 10**12)), min_size=1))
def test_what_is_encoded_is_parsed(parts: list[tuple[int, int, int]]) -> None:
    ranges = [ValueRange(row, start, start + size) for row, start, size in parts]
    assert parse_ranges(encode_ranges(ranges)) == ranges


@for_each(
    "body",
    [
        b"", b"\n", b"0 0 1", b"0 0 1\r\n", b" 0 0 1\n", b"0 0 1 \n", b"0  0 1\n", b"0\t0\t1\n", b"0 0 1\n\n", b"0 0\n",
        b"0 0 1 2\n", b"00 0 1\n", b"0 01 2\n", b"0 0 01\n", b"-1 0 1\n", b"+1 0 1\n", b"0 -1 1\n", b"0 1 1\n",
        b"0 2 1\n", b"0 0 0\n", b"0 0 1e3\n", b"0 0 1_0\n", b"0 0 0x1\n", b"0 0 1\n0 0 1", b"0 0 1\n\x000 0 1\n",
        "0 0 \u0661\n".encode(), b"0 0 99999999999999\n", b"99999999999 0 1\n", b"\xff\xfe", b"[[0, 0, 1]]",
        b"0 0 1\n" * (MAX_RANGES + 1), b"0 0 1\n" + b"9" * MAX_BODY_BYTES, b"\x80\x04K\x01.",
    ],
)  # fmt: skip
def test_any_other_body_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="body"):
        parse_ranges(body)
    response = ask_values(body)
    assert (response.status, error_of(response)) == (400, "bad-body")


@given(st.binary(max_size=60) | st.text(alphabet="0123456789 \n-", max_size=60).map(str.encode))
def test_a_body_is_parsed_only_in_its_one_spelling(body: bytes) -> None:
    try:
        ranges = parse_ranges(body)
    except ValueError:
        return
    assert encode_ranges(ranges) == body
    assert all(0 <= start < end for _, start, end in ranges)


def test_the_largest_request_is_within_the_limits() -> None:
    body = encode_ranges([ValueRange(10**10 - 1, 10**13 - 2, 10**13 - 1)] * MAX_RANGES)
    assert len(body) <= MAX_BODY_BYTES
    assert len(parse_ranges(body)) == MAX_RANGES


@pytest.mark.parametrize("query", ["", "version=", "version=0", "version=1&version=1", "size=1&version=1", "seed=1"])
def test_the_version_and_nothing_else_is_a_parameter(query: str) -> None:
    response = ask_values(b"0 0 1\n", query)
    assert (response.status, error_of(response)) == (400, "bad-parameter")


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "post"])
def test_only_post_is_allowed(method: str) -> None:
    response = ask_values(b"0 0 1\n", method=method)
    assert (response.status, response.headers["Allow"]) == (405, "POST")


def test_a_range_that_does_not_exist_is_refused_before_anything_is_read() -> None:
    url, manifest, bodies = packed()
    watched = WatchedStore(open_store(url))

    def ask_watched(body: bytes, query: str = "version=1") -> Response:
        request = Request(method="POST", path="/v1/ds/values", query=query, body=body)
        answered: Response = with_service(
            serving(url), lambda service: service.answer(request), store=lambda _: watched
        )
        return answered

    for body, status, code in (
        (f"0 0 1\n{len(manifest)} 0 1\n", 404, "no-such-super-sample"),
        (f"0 0 1\n1 0 {len(bodies[1]) + 1}\n", 416, "bad-range"),
    ):
        response = ask_watched(body.encode())
        assert (response.status, error_of(response)) == (status, code)
    assert not [call for call in watched.calls if " data/" in call]
    missing = ask_watched(b"0 0 1\n", "version=9")
    assert (missing.status, error_of(missing)) == (404, "not-found")


def test_more_bytes_than_an_answer_has_are_refused_with_the_limit() -> None:
    assert ask_values(b"0 0 100\n", answer_bytes=100).status == 200
    response = ask_values(b"0 0 100\n1 0 1\n", answer_bytes=100)
    assert (response.status, error_of(response)) == (413, "too-large")
    assert response.headers[ANSWER_BYTES_HEADER] == "100"


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1e9", "٣", "9" * 12, "abc"])
def test_a_limit_that_is_none_is_not_heeded(text: str) -> None:
    assert parse_answer_bytes({ANSWER_BYTES_HEADER: text}) is None
    assert parse_answer_bytes({}) is None


def test_an_overwritten_or_missing_super_sample_is_refused_at_once() -> None:
    for spoil, status, code in (("overwrite", 412, "changed"), ("delete", 404, "not-found")):
        url = pack_numbers(20)

        async def damage(store: Store, spoil: str = spoil) -> None:
            key = (await read_manifest(store)).key(0)
            await (store.delete(key) if spoil == "delete" else store.put(key, b"short"))

        with_store(url, damage)
        request = Request(method="POST", path="/v1/ds/values", query="version=1", body=b"0 0 4\n")
        response = with_service(serving(url), partial(Service.answer, request=request))
        assert (response.status, error_of(response)) == (status, code)


def event(**changes: Any) -> dict[str, Any]:
    http = {"method": "POST"}
    return {"version": "2.0", "rawPath": "/v1/ds/values", "requestContext": {"http": http}, **changes}


def test_a_function_urls_event_has_the_body_as_text_or_base64() -> None:
    assert from_lambda_url(event(body="0 0 1\n", isBase64Encoded=False)).body == b"0 0 1\n"
    assert from_lambda_url(event(body="0 0 1\n")).body == b"0 0 1\n"
    encoded = b64encode(b"0 0 1\n").decode()
    assert from_lambda_url(event(body=encoded, isBase64Encoded=True)).body == b"0 0 1\n"
    assert from_lambda_url(event(body=None)).body == b""


@pytest.mark.parametrize("body", [("no base64!", True), (3, True), (3, False), (["0 0 1"], False), ("\ud800", False)])
def test_an_event_with_another_body_is_refused(body: tuple[Any, bool]) -> None:
    with pytest.raises(EventError):
        from_lambda_url(event(body=body[0], isBase64Encoded=body[1]))


def received(messages: list[MutableMapping[str, Any]], method: str = "POST") -> tuple[bytes, int]:
    """Return the body of an ASGI request, and how many of its messages were received; the last one never comes."""
    count = 0

    async def receive() -> MutableMapping[str, Any]:
        nonlocal count
        count += 1
        if count > len(messages):
            await asyncio.sleep(1e6)
        return messages[count - 1]

    scope = {"method": method, "path": "/v1/ds/values", "headers": []}
    return run_virtual(receive_asgi(scope, receive)).body, count


def test_a_body_is_received_in_pieces_up_to_a_limit_of_size_and_time() -> None:
    pieces: list[MutableMapping[str, Any]] = [{"body": b"0 0", "more_body": True}, {"body": b" 1\n"}]
    assert received(pieces) == (b"0 0 1\n", 2)
    assert received([{"body": b"", "more_body": False}]) == (b"", 1)
    assert received([{"type": "http.disconnect"}]) == (b"", 1)
    assert received(pieces, "GET") == (b"", 0)
    endless: list[MutableMapping[str, Any]] = [{"body": bytes(100_000), "more_body": True}] * 50
    body, count = received(endless)
    assert MAX_BODY_BYTES < len(body) <= MAX_BODY_BYTES + 1
    assert count == 4
    assert received([{"body": b"0 0", "more_body": True}]) == (b"0 0", 2), "the rest did not come within 10 s"
