from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import safetensors.numpy
from safetensors import SafetensorError

from stoker._format.tensorfile import (
    DTYPES,
    MAX_HEADER_BYTES,
    TensorInfo,
    encode_header,
    lay_out,
    parse_header,
    parse_length,
)
from stoker.errors import FormatError
from support.cases import for_each


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: object, start: object, end: object, dtype: object = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def parsed(file: bytes) -> tuple[TensorInfo, ...]:
    return parse_header(file, len(file)).tensors


def test_a_written_header_is_read_back_and_its_data_starts_at_a_multiple_of_8() -> None:
    tensors = lay_out([("a", DTYPES["int16"], (3,)), ("b", DTYPES["bfloat16"], ()), ("c", DTYPES["uint8"], (0, 4))])
    assert [(tensor.start, tensor.end) for tensor in tensors] == [(0, 6), (6, 8), (8, 8)]
    for length in range(9):
        header = encode_header({"k": "é" * length}, tensors)
        assert len(header) % 8 == 0
        back = parse_header(header, len(header) + 8)
        assert (back.metadata, back.tensors) == ({"k": "é" * length}, tensors)
        assert (back.header_bytes, back.tensors[-1].end) == (len(header), 8)


def test_a_file_without_tensors_has_no_data() -> None:
    assert parse_header(encode_header({}, ()), len(encode_header({}, ()))).tensors == ()


def test_a_header_that_would_be_too_large_is_refused_when_written() -> None:
    with pytest.raises(FormatError, match="shorten the schema"):
        encode_header({"k": "x" * MAX_HEADER_BYTES}, ())


def test_the_length_is_checked_before_the_header_is_there() -> None:
    assert parse_length(struct.pack("<Q", 100), 1000) == 108
    for data, object_bytes in ((b"1234567", 1000), (struct.pack("<Q", 100), 107), (struct.pack("<Q", 1), 1000)):
        with pytest.raises(FormatError):
            parse_length(data, object_bytes)
    with pytest.raises(FormatError, match="18446744073709551615 does not fit"):
        parse_length(b"\xff" * 8, 1 << 60)


def test_a_truncated_header_is_reported() -> None:
    file = file_of({"x": entry([1], 0, 1)}, b"x")
    with pytest.raises(FormatError, match=r"is cut off after 20"):
        parse_header(file[:20], len(file))


ACCEPTED = {
    "leading space": file_of(b' \n{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "trailing space": file_of(b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}} \n\t', b"x"),
    "any order of tensors": file_of({"b": entry([2], 1, 3), "a": entry([1], 0, 1)}, b"xyz"),
    "empty tensors anywhere": file_of({"a": entry([0], 0, 0), "b": entry([1], 0, 1), "c": entry([0, 3], 1, 1)}, b"x"),
    "any name": file_of({"": entry([], 0, 1), "é😀": entry([], 1, 2), "a.b": entry([], 2, 3)}, b"xyz"),
    "metadata": file_of({"__metadata__": {"é": "😀"}, "x": entry([], 0, 1)}, b"x"),
    "32 dimensions": file_of({"x": entry([1] * 32, 0, 1)}, b"x"),
    "nothing": file_of({}),
}

REFUSED = {
    "empty": b"",
    "no header": struct.pack("<Q", 0),
    "not JSON": file_of(b"{]"),
    "cut JSON": file_of(b'{"x":{"dtype":"U8"'),
    "two documents": file_of(b"{} {}"),
    "a list": file_of([]),
    "a number": file_of(b"12"),
    "UTF-16": file_of("{}".encode("utf-16-le")),
    "UTF-32": file_of("{}".encode("utf-32")),
    "byte order mark": file_of("\ufeff{}".encode()),
    "Latin-1": file_of('{"é":1}'.encode("latin-1")),
    "encoded surrogate": file_of(b'{"__metadata__":{"a":"\xed\xa0\x80"}}'),
    "escaped lone surrogate": file_of(b'{"__metadata__":{"a":"\\ud800"}}'),
    "lone surrogate as key": file_of(b'{"__metadata__":{"\\udc00":"a"}}'),
    "lone surrogate as name": file_of({"\ud800": entry([], 0, 1)}, b"x"),
    "control character": file_of(b'{"__metadata__":{"a":"\n"}}'),
    "deep": file_of(b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "deep objects": file_of(b'{"x":' * 50_000 + b"1" + b"}" * 50_000),
    "long number": file_of(b'{"x":' + b"9" * 5000 + b"}"),
    "repeated tensor": file_of(b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":1}'),
    "repeated field": file_of(b'{"x":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "repeated metadata": file_of(b'{"__metadata__":{"a":"b","a":"b"}}'),
    "metadata list": file_of({"__metadata__": []}),
    "metadata null": file_of({"__metadata__": None}),
    "metadata number": file_of({"__metadata__": {"a": 1}}),
    "tensor list": file_of({"x": []}),
    "tensor null": file_of({"x": None}),
    "field missing": file_of({"x": {"dtype": "U8", "shape": [0]}}),
    "field unknown": file_of({"x": entry([0], 0, 0) | {"more": 1}}),
    "dtype unknown": file_of({"x": entry([1], 0, 1, "U7")}, b"x"),
    "dtype complex": file_of({"x": entry([1], 0, 8, "C64")}, b"xxxxxxxx"),
    "dtype list": file_of({"x": entry([1], 0, 1, ["U8"])}, b"x"),
    "dtype null": file_of({"x": entry([1], 0, 1, None)}, b"x"),
    "shape text": file_of({"x": entry("1", 0, 1)}, b"x"),
    "shape negative": file_of({"x": entry([-1, -1], 0, 1)}, b"x"),
    "shape minus zero": file_of(b'{"x":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
    "shape float": file_of({"x": entry([1.0], 0, 1)}, b"x"),
    "shape NaN": file_of({"x": entry([float("nan")], 0, 1)}, b"x"),
    "shape bool": file_of({"x": entry([True], 0, 1)}, b"x"),
    "shape huge": file_of({"x": entry([1 << 64], 0, 1)}, b"x"),
    "shape overflows": file_of({"x": entry([1 << 47, 1 << 47, 0], 0, 0)}),
    "shape of 33 dimensions": file_of({"x": entry([1] * 33, 0, 1)}, b"x"),
    "shape lies": file_of({"x": entry([2], 0, 1)}, b"x"),
    "offsets of one": file_of({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, b"x"),
    "offsets text": file_of({"x": entry([1], "0", "1")}, b"x"),
    "offsets negative": file_of({"x": entry([1], -1, 0)}, b"x"),
    "offsets falling": file_of({"x": entry([1], 1, 0)}, b"x"),
    "offsets infinite": file_of({"x": entry([1], 0, float("inf"))}, b"x"),
    "overlap": file_of({"x": entry([2], 0, 2), "y": entry([2], 1, 3)}, b"xyz"),
    "same bytes": file_of({"x": entry([2], 0, 2), "y": entry([2], 0, 2)}, b"xy"),
    "hole in front": file_of({"x": entry([1], 1, 2)}, b"xy"),
    "hole between": file_of({"x": entry([1], 0, 1), "y": entry([1], 2, 3)}, b"xyz"),
    "trailing byte": file_of({"x": entry([1], 0, 1)}, b"xy"),
    "missing byte": file_of({"x": entry([2], 0, 2)}, b"x"),
}

# What stoker refuses of what safetensors reads: there repeated keys are the last one, and unknown things are passed by.
STRICTER = {"repeated metadata", "metadata null", "field unknown", "dtype complex", "shape of 33 dimensions"}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_safetensors_reads_too_with_the_same_shapes(name: str) -> None:
    shapes = {tensor.name: tensor.shape for tensor in parsed(ACCEPTED[name])}
    assert {key: array.shape for key, array in safetensors.numpy.load(ACCEPTED[name]).items()} == shapes


@for_each("name", REFUSED)
def test_a_wrong_or_malformed_header_is_refused(name: str) -> None:
    with pytest.raises(FormatError) as refused:
        parsed(REFUSED[name])
    assert len(str(refused.value)) < 400


@for_each("name", REFUSED)
def test_safetensors_refuses_it_too_but_for_what_is_listed(name: str) -> None:
    try:
        safetensors.numpy.load(REFUSED[name])
        read = True
    except (SafetensorError, KeyError, TypeError, ValueError):
        read = False
    assert read == (name in STRICTER)
