"""Readers of texts: schemas, loader states, and responses of stores."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace

from stoker import Schema
from stoker._format import schema as schema_module
from stoker._stores import gcs, s3
from stoker._stores.http import HttpResponse, create_error, retry_after_seconds
from stoker.errors import SchemaError, ServerError, StateError, StoreError, UnexpectedAnswerError
from stoker_torch._state import RunState, _parse_source, read_integer
from support.fuzzed.files import SMALL
from support.fuzzed.mutations import mutated_bytes, mutated_json
from support.fuzzed.reader import Reader
from support.supersamples import EVERY_KIND

__all__ = ["TEXTS"]


def _read_schema(data: bytes) -> str:
    schema = Schema.from_json(data.decode(errors="surrogateescape"))
    assert Schema.from_json(schema.to_json()) == schema
    for column in schema.values():
        assert 0 < column.element_bytes < 2**31
        for name in getattr(column, "classes", None) or ():
            name.encode()
    hash(schema)
    repr(schema)
    return "read"


def _schemas() -> list[bytes]:
    return [schema.to_json().encode() for schema in (SMALL, EVERY_KIND)]


def _read_state(data: bytes) -> str:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise StateError("not JSON, which is not the reader's business") from None
    state = RunState.from_dict(value)
    assert RunState.from_dict(state.to_dict()) == state
    for name in ("seed", "version", "window", "lanes", "epoch", "position"):
        assert type(getattr(state, name)) is int, f"{name} is {getattr(state, name)!r}"
        assert 0 <= getattr(state, name) < 1 << 64
    assert state.limit is None or (type(state.limit) is int and state.limit > 0)
    assert 0 <= state.sticky < 1
    assert isinstance(state.dataset, str)
    assert isinstance(state.shuffle, str)
    return "read"


def _states() -> list[bytes]:
    state = RunState(
        epoch=3, position=1234, dataset="digits", version=2, seed=7, shuffle="window", window=8, lanes=4, limit=None
    )
    states = state, replace(state, limit=5000, shuffle="full"), replace(state, sticky=0.9)
    return [json.dumps(each.to_dict()).encode() for each in states]


# Responses of stores.


STATUSES = [300, 301, 307, 400, 401, 403, 404, 408, 409, 412, 416, 418, 429, 500, 503, 599]
S3_CODES = [code.encode() for code in (*s3._BY_CODE, "Other")]
HEADER_VALUES = [
    b"-1",
    b"\x1c5",
    b" 5\t",
    b"1e9",
    b"9" * 400,
    "٣".encode(),
    b"nan",
    b"\xff",
    b"eu\nx",
    b"",
    b"us-east-1",
]
MARKUP = [b"<Code>", b"</Code>", b"<Message>", b"<Region>", b"\x1b[2J", b"{0}{region.x}", b"\xff\xfe", b"{"]
_ALIKE = ("DeadlineError", "NotFoundError", "ObjectChangedError", "PermissionDeniedError", "PreconditionFailedError")
BOTH = (*_ALIKE, "ServerError", "StoreError", "ThrottledError", "RangeBeyondEndError", "ExpiredCredentialsError")
S3_ERRORS = (*BOTH, "BucketNotFoundError", "CredentialsError", "WrongRegionError")


def _http(data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of an HTTP response in a plain notation."""
    head, _, body = data.partition(b"\n\n")
    status, *lines = head.decode("utf-8", "surrogateescape").split("\n")
    headers = {name: value for name, _, value in (line.partition(": ") for line in lines)}
    return int(status) if re.fullmatch(r"[3-5][0-9]{2}", status) else 400, headers, body


def _checked(error: StoreError, headers: dict[str, str]) -> str:
    assert isinstance(error, StoreError)
    assert str(error).isprintable()
    assert len(str(error)) < 5000
    wait = retry_after_seconds(headers)
    assert wait is None or 0 <= wait < 1e9
    return type(error).__name__


def _read_s3_refusal(data: bytes) -> str:
    status, headers, body = _http(data)
    reply = HttpResponse(status=status, headers=headers, body=body)
    return _checked(s3._parse_error("s3://bucket/key", reply), headers)


def _read_gcs_refusal(data: bytes) -> str:
    status, headers, body = _http(data)
    reply = HttpResponse(status=status, headers=headers, body=body)
    return _checked(create_error("gs://bucket/key", reply, gcs._BY_CODE, *gcs._parse_error(reply)), headers)


def _s3_refusals() -> list[bytes]:
    texts = [("403", "AccessDenied"), ("503", "SlowDown"), ("301", "PermanentRedirect"), ("404", "NoSuchKey")]
    return [
        f"{status}\nretry-after: 7\nx-amz-bucket-region: eu-west-1\n\n<?xml version='1.0'?><Error><Code>{code}</Code>"
        f"<Message>No {{region}}</Message><Region>eu-west-3</Region></Error>".encode()
        for status, code in texts
    ]


def _gcs_refusals() -> list[bytes]:
    reasons = [(429, "rateLimitExceeded"), (401, "authError"), (404, "notFound"), (400, "userProjectMissing")]
    return [
        f"{code}\nRetry-After: 3\n\n".encode()
        + json.dumps({"error": {"code": code, "message": "no", "errors": [{"reason": reason}]}}).encode()
        for code, reason in reasons
    ]


def _mutated_answer(data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
    """Change status, a header or the document of a response."""
    head, _, body = data.partition(b"\n\n")
    action = rng.randrange(5)
    if action == 0:
        return mutated_bytes(data, pool, rng)
    if action == 1:
        head = str(rng.choice(STATUSES)).encode() + head[3:]
    elif action == 2:
        head += b"\n" + rng.choice([b"Retry-After: ", b"x-amz-bucket-region: "]) + rng.choice(HEADER_VALUES)
    elif action == 3 and b'{"' in body:
        start = body.index(b'{"')
        body = body[:start] + mutated_json(body[start:], pool, rng)
    elif action == 3:
        body = re.sub(rb"<Code>[^<]*", lambda _: b"<Code>" + rng.choice(S3_CODES), body)
    else:
        tag = rng.choice(MARKUP)
        spread = body.replace(b"<Code>", tag * 2)
        body = rng.choice([spread, tag + body, body + tag * rng.randrange(1, 9000), mutated_bytes(body, pool, rng)])
    return head + b"\n\n" + body


def _read_gcs_object(data: bytes) -> str:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise ServerError("not JSON, which the client library says") from None
    info = gcs._object_info("key", document, "gs://bucket/key")
    assert 0 <= info.size_bytes < 10**18
    gcs._generation(info.tag).encode()
    return "read"


def _gcs_objects() -> list[bytes]:
    return [json.dumps({"size": "123", "generation": "1732147200123456", "name": "data/0/1"}).encode()]


TEXTS = {
    "schema": Reader(
        read=_read_schema,
        seeds=_schemas,
        mutate=mutated_json,
        errors=(SchemaError,),
        refusing=(schema_module._parse_schema.__wrapped__, schema_module._column_from_json),
    ),
    "loader state": Reader(
        read=_read_state,
        seeds=_states,
        mutate=mutated_json,
        errors=(StateError,),
        refusing=(RunState.from_dict, _parse_source, read_integer),
    ),
    "refusal of S3": Reader(
        read=_read_s3_refusal, seeds=_s3_refusals, mutate=_mutated_answer, errors=(), kinds=S3_ERRORS
    ),
    "refusal of GCS": Reader(
        read=_read_gcs_refusal, seeds=_gcs_refusals, mutate=_mutated_answer, errors=(), kinds=BOTH
    ),
    "object of GCS": Reader(
        read=_read_gcs_object,
        seeds=_gcs_objects,
        mutate=mutated_json,
        errors=(ServerError, UnexpectedAnswerError),
        refusing=(gcs._object_info, gcs._read_field),
    ),
}
