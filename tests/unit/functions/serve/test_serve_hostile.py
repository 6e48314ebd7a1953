"""Any request gets an HTTP response, and reads only objects of the manifest."""

from __future__ import annotations

import json
import re
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import open_store
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker.testing import WatchedStore
from stoker_functions.serve import Request, Response, from_lambda_url, to_lambda_url
from support.datasets import pack_numbers
from support.places import with_store
from support.served_requests import serving, with_service

_PIECES = [
    "/v1/ds/super-samples/", "/v1/ds/batches/", "/v1/ds/manifest", "/v1/ds/values", "/v1/", "ds", "/", "..",
    "%2e%2e", "%2F", "\\", "\0", "data/", "manifest.safetensors", "0", "7", "99999999999", "-1", "é", "\u0661", "?",
    "#", ";", "s3://bucket/x",
]  # fmt: skip
_PARAMETERS = ["version", "size", "seed", "epoch", "shuffle", "window", "lanes", "key", "..", ""]
_VALUES = [
    "0",
    "1",
    "2",
    "16384",
    "18446744073709551615",
    "-1",
    "full",
    "none",
    "block",
    "../x",
    "%30",
    "é",
    "\r\nX: y",
    "",
]
_HEADERS = ["range", "if-match", "if-none-match", "if-range", "authorization", "host", "x-forwarded-host"]
_HEADER_VALUES = [
    "bytes=0-0",
    "bytes=0-",
    "bytes=-1",
    "bytes=9-3",
    "bytes=0-0,1-1",
    "*",
    '"x"',
    'W/"x"',
    "é",
    "\r\n",
    "",
]

_right_paths = st.builds(
    "{}{}".format, st.sampled_from(["/v1/ds/super-samples/", "/v1/ds/batches/"]), st.integers(0, 70)
) | st.just("/v1/ds/manifest")
_right_queries = st.sampled_from(["", "version=1", "size=3", "size=3&version=1&shuffle=full"])
paths = _right_paths | st.lists(st.sampled_from(_PIECES), max_size=5).map("".join) | st.text(max_size=30)
queries = _right_queries | st.lists(
    st.tuples(st.sampled_from(_PARAMETERS), st.sampled_from(_VALUES)).map("=".join), max_size=4
).map("&".join)
headers = st.dictionaries(st.sampled_from(_HEADERS), st.sampled_from(_HEADER_VALUES) | st.text(max_size=20), max_size=3)
methods = st.sampled_from(["GET", "GET", "GET", "HEAD", "POST"])
_lines = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300), st.integers(0, 3000)), max_size=5)
bodies = _lines.map(lambda lines: "".join(f"{row} {start} {end}\n" for row, start, end in lines).encode())
values = st.builds(
    Request,
    method=st.just("POST"),
    path=st.just("/v1/ds/values"),
    query=st.just("version=1") | queries,
    headers=headers,
    body=bodies | st.binary(max_size=30),
)
_OBJECT = re.compile(
    r"(?:get|head) (?:manifest\.safetensors|manifests/[0-9]{8,9}\.safetensors|data/[0-9a-f]{16}/[0-9]{8})"
)


@cache
def packed() -> tuple[str, Manifest]:
    url = pack_numbers(60)
    return url, with_store(url, read_manifest)


@settings(max_examples=300)
@given(st.builds(Request, method=methods, path=paths, query=queries, headers=headers, body=bodies) | values)
def test_every_request_is_answered_and_reads_only_objects_of_the_manifest(request: Request) -> None:
    url, manifest = packed()
    watched = WatchedStore(open_store(url))
    response: Response = with_service(serving(url), lambda service: service.answer(request), store=lambda _: watched)
    assert response.status in (200, 206, 304, 400, 404, 405, 412, 413, 414, 416)
    assert [call for call in watched.calls if not _OBJECT.fullmatch(call)] == []
    touched = {call.partition(" ")[2] for call in watched.calls if " data/" in call}
    assert touched <= {manifest.key(row) for row in range(len(manifest))}
    for value in response.headers.values():
        assert value.isprintable()
    if response.status >= 400 and request.method != "HEAD":
        assert set(json.loads(response.body)) == {"error", "message"}
        assert b"memory://" not in response.body
    json.dumps(to_lambda_url(response))


@given(paths, queries)
def test_an_event_of_a_function_url_is_the_request_that_it_says(path: str, query: str) -> None:
    http = {"method": "GET", "path": "/elsewhere"}
    event = {"version": "2.0", "rawPath": path, "rawQueryString": query, "requestContext": {"http": http}}
    assert from_lambda_url(event) == Request(method="GET", path=path, query=query)
