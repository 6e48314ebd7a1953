"""Conditions and ranges of a request, against an object of 100 bytes with the tag "abc"."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_functions.serve import HttpError
from stoker_functions.serve._messages import is_not_modified, parse_range
from support.cases import for_each

ETAG = '"abc"'


@for_each(
    ("headers", "unchanged"),
    [
        ({}, False),
        ({"if-none-match": ETAG}, True),
        ({"if-none-match": f"W/{ETAG}"}, True),
        ({"if-none-match": f'"x", {ETAG} ,"y"'}, True),
        ({"if-none-match": "*"}, True),
        ({"if-none-match": '"abcd"'}, False),
        ({"if-match": ETAG}, False),
        ({"if-match": "*"}, False),
        ({"if-match": f'"x",{ETAG}'}, False),
        ({"if-match": ETAG, "if-none-match": ETAG}, True),
    ],
)
def test_a_client_with_the_object_gets_not_modified(headers: dict[str, str], unchanged: bool) -> None:
    assert is_not_modified(headers, ETAG) is unchanged


@pytest.mark.parametrize("wanted", ['"x"', f"W/{ETAG}", '""', '"ABC"'])
def test_another_object_than_the_expected_one_is_412(wanted: str) -> None:
    with pytest.raises(HttpError) as caught:
        is_not_modified({"if-match": wanted, "if-none-match": ETAG}, ETAG)
    assert caught.value.status == 412


@for_each("text", ["abc", '"abc', "", '"a" "b"', ",", '*,"a"', '"a\tb"', '"abc "', '"é"', '"a",' * 40 + '"a"'])
@for_each("name", ["if-match", "if-none-match"])
def test_a_condition_that_is_none_is_400(name: str, text: str) -> None:
    with pytest.raises(HttpError) as caught:
        is_not_modified({name: text}, ETAG)
    assert caught.value.status == 400


@for_each(
    ("text", "span"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=0-99", (0, 100)),
        ("bytes=10-", (10, 100)),
        ("bytes=99-", (99, 100)),
        ("bytes=-1", (99, 100)),
        ("bytes=-100", (0, 100)),
        ("bytes=-999999999999999999", (0, 100)),
        ("bytes=50-999999999999999999", (50, 100)),
        ("lines=1-2", None),
        ("Bytes=0-1", None),
        ("0-1", None),
    ],
)
def test_one_range_of_bytes_is_cut_to_the_object(text: str, span: tuple[int, int] | None) -> None:
    assert parse_range({"range": text}, 100, ETAG) == span


@for_each(
    "text",
    [
        "bytes=100-",
        "bytes=100-200",
        "bytes=-0",
        "bytes=-",
        "bytes=5-4",
        "bytes=0-1,2-3",
        "bytes=" + ",".join(["0-0"] * 500),
        "bytes=0-1, 5-",
        "bytes=--1",
        "bytes= 0-1",
        "bytes=0-1 ",
        "bytes=\u0660-\u0661",
        "bytes=0x0-0x1",
        "bytes=1" + "0" * 18 + "-",
        "bytes=+1-2",
        "bytes=",
    ],
)
def test_a_range_that_cannot_be_had_is_416_and_says_the_size(text: str) -> None:
    with pytest.raises(HttpError) as caught:
        parse_range({"range": text}, 100, ETAG)
    assert caught.value.status == 416
    assert caught.value.headers["Content-Range"] == "bytes */100"


def test_a_range_of_another_object_is_ignored() -> None:
    assert parse_range({"range": "bytes=0-1", "if-range": ETAG}, 100, ETAG) == (0, 2)
    for other in ('"abcd"', f"W/{ETAG}", "Wed, 21 Oct 2015 07:28:00 GMT"):
        assert parse_range({"range": "bytes=0-1", "if-range": other}, 100, ETAG) is None


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 120))
def test_the_returned_range_is_within_the_object_and_the_request(first: int, last: int, size: int) -> None:
    headers = {"range": f"bytes={first}-{last}"}
    if first < size and first <= last:
        assert parse_range(headers, size, ETAG) == (first, min(last + 1, size))
    else:
        with pytest.raises(HttpError):
            parse_range(headers, size, ETAG)
