"""Parsing of requests: one spelling of everything, and no part of a key from the caller."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker import OrderConfig
from stoker_functions.serve import HttpError, Request
from stoker_functions.serve._messages import DatasetRequest, parse_request
from support.cases import for_each


def parse_path(path: str, query: str = "", method: str = "GET") -> DatasetRequest:
    return parse_request(Request(method=method, path=path, query=query))


def refused(path: str, query: str = "", method: str = "GET") -> HttpError:
    with pytest.raises(HttpError) as caught:
        parse_path(path, query, method)
    return caught.value


def test_each_path_requests_what_it_says() -> None:
    assert parse_path("/v1/train/manifest") == DatasetRequest(dataset="train", what="manifest", version=None)
    assert parse_path("/v1/train/manifest", "version=3", "HEAD") == DatasetRequest(
        dataset="train", what="manifest", version=3
    )
    assert parse_path("/v1/a-b_9/super-samples/0") == DatasetRequest(
        dataset="a-b_9", what="super-samples", version=None, number=0
    )
    assert parse_path("/v1/t/super-samples/17", "version=2") == DatasetRequest(
        dataset="t", what="super-samples", version=2, number=17
    )
    assert parse_path("/v1/t/batches/0", "size=8") == DatasetRequest(
        dataset="t", what="batches", version=None, number=0, size=8, epoch=0, order=OrderConfig()
    )
    query = "shuffle=full&size=5&seed=18446744073709551615&epoch=7&version=4&window=3&lanes=2"
    assert parse_path("/v1/t/batches/99", query) == DatasetRequest(
        dataset="t",
        what="batches",
        version=4,
        number=99,
        size=5,
        epoch=7,
        order=OrderConfig(seed=2**64 - 1, shuffle="full", window=3, lanes=2),
    )


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "get", "", "GET\r\nX: y"])
def test_another_method_is_not_allowed(method: str) -> None:
    refusal = refused("/v1/train/manifest", method=method)
    assert refusal.status == 405
    assert refusal.headers == {"Allow": "GET, HEAD"}


TRAVERSALS = [
    "/v1/../manifest",
    "/v1/..%2fother/manifest",
    "/v1/%2e%2e/manifest",
    "/v1/%252e%252e%252fetc/manifest",
    "/v1/..%c0%af/manifest",
    "/v1/..\\other/manifest",
    "/v1/train%00/manifest",
    "/v1/train\0/manifest",
    "/v1/train/../train/manifest",
    "/v1/train//manifest",
    "//v1/train/manifest",
    "/v1/train/manifest/",
    "/v1/train/manifest/3",
    "/v1/train/manifest.safetensors",
    "/v1/train/data/0123456789abcdef/00000000",
    "/v1/train/super-samples/../manifest",
    "/v1/train/super-samples",
    "/v1/train/super-samples/",
    "/v1/train;x=1/manifest",
    "/v1/tr ain/manifest",
    "/v1/trаin/manifest",  # noqa: RUF001 - a Cyrillic letter
    "/v1/.hidden/manifest",
    "/v1/-dash/manifest",
    f"/v1/{'a' * 65}/manifest",
    "/v1/s3://bucket/manifest",
    "http://other/v1/train/manifest",
    "/v2/train/manifest",
    "/V1/train/manifest",
    "/",
    "",
    "/robots.txt",
    "/v1/train/manifest\n",
]


@for_each("path", TRAVERSALS)
def test_a_path_that_leads_elsewhere_leads_nowhere(path: str) -> None:
    assert refused(path).status == 404


@for_each(
    "number",
    [
        "-1",
        "+1",
        "01",
        "1.0",
        "1e3",
        "0x10",
        "1_000",
        " 1",
        "1 ",
        "\u0661",
        "\uff11",
        "²",
        "9" * 21,
        "NaN",
        "1\n",
        "",
        "1%30",
    ],
)
def test_a_number_has_one_spelling(number: str) -> None:
    for path in (f"/v1/t/super-samples/{number}", f"/v1/t/batches/{number}"):
        assert refused(path, "size=1").status == 404
    for name in ("size", "seed", "epoch", "version", "window", "lanes"):
        rest = "" if name == "size" else "&size=1"
        assert refused("/v1/t/batches/0", f"{name}={number}{rest}").status == 400


@for_each(
    "query",
    [
        "",
        "size=0",
        "size=16385",
        "size=1&version=0",
        "size=1&version=1000000000",
        "size=1&seed=18446744073709551616",
        "size=1&epoch=4294967296",
        "size=1&window=65",
        "size=1&window=0",
        "size=1&lanes=1025",
        "size=1&shuffle=",
        "size=1&shuffle=FULL",
        "size=1&shuffle=full%20",
        "size=1&size=1",
        "size=1&size=2",
        "size=1&",
        "&size=1",
        "size=1;seed=2",
        "size[]=1",
        "SIZE=1",
        "size=1&key=data/x",
        "size=1&__proto__=1",
        "size=1&seed",
        "size",
        "size=1#seed=2",
    ],
)
def test_parameters_of_a_batch_are_known_single_and_within_bounds(query: str) -> None:
    assert refused("/v1/t/batches/0", query).status == 400


@pytest.mark.parametrize("query", ["version=0", "version=01", "version=1&version=1", "size=1", "version=", "v=1", "?"])
def test_an_object_is_requested_with_no_parameter_but_a_version(query: str) -> None:
    assert refused("/v1/t/manifest", query).status == 400
    assert refused("/v1/t/super-samples/1", query).status == 400


def test_what_is_too_long_is_not_looked_at() -> None:
    assert refused("/v1/t/batches/0", "size=1&" * 200).status == 414
    assert refused("/v1/" + "a" * 2000).status == 414


@given(st.text(max_size=60), st.text(max_size=60))
def test_what_is_understood_was_spelled_in_the_one_way(path: str, query: str) -> None:
    for start in ("", "/v1/t/", "/v1/t/super-samples/", "/v1/t/batches/"):
        for spelled in (start + path, start + quote(path, safe="")):
            try:
                ask = parse_path(spelled, query)
            except HttpError:
                continue
            assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", ask.dataset)
            assert spelled.startswith(f"/v1/{ask.dataset}/")
