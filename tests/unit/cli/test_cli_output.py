from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from stoker import Array, Bytes, Column, Ragged, Text
from stoker._maintenance.inspection import BadObject
from stoker.cli.output import describe, format_bad_object, format_count, json_text, make_printable, preview, table
from support.cases import for_each


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (Bytes(), "bytes"),
        (Text(), "text"),
        (Array("int64"), "int64"),
        (Array("uint8", (32, 32, 3)), "uint8[32, 32, 3]"),
        (Ragged("uint16"), "uint16[any]"),
        (Ragged("float32", (4,)), "float32[any, 4]"),
        (Array("int64", classes=("a", "b\x1b")), "int64, 2 classes: a, b\\x1b"),
        (Array("int8", classes=tuple("abcdefg")), "int8, 7 classes: a, b, c, d, e, …"),
    ],
)
def test_columns_are_described(column: Column, text: str) -> None:
    assert describe(column) == text


@for_each(
    ("column", "value", "text"),
    [
        (Bytes(), b"", "0 bytes"),
        (Bytes(), b"\xff\xd8", "2 bytes: ff d8"),
        (Bytes(), bytes(1000), "1,000 bytes: " + " ".join(["00"] * 16) + "…"),
        (Text(), "a\nb\x1b[31m\u202eü", '"a\\nb\\x1b[31m\\u202eü"'),
        (Text(), "x" * 100, '"' + "x" * 60 + '"… and 40 more'),
        (Array("int64", classes=("cat", "dog")), np.int64(1), "1 (dog)"),
        (Array("int64", classes=("cat",)), np.int64(-1), "-1"),
        (Array("float32"), np.float32(0.5), "0.5"),
        (Array("bool"), np.bool_(True), "True"),
        (Array("int32", (2, 2)), np.array([[1, 2], [3, 4]], "i4"), "int32[2, 2]: 1 2 3 4"),
        (Array("uint8", (16,)), np.arange(16, dtype="u1"), "uint8[16], 0 to 15, mean 7.5"),
        (Array("bool", (8,)), np.ones(8, "?"), "bool[8], 1 to 1, mean 1"),
        (Ragged("uint16"), np.zeros(0, "u2"), "uint16[0]:"),
        (Array("bfloat16", (2,)), np.array([0x3F80, 0], "u2"), "bfloat16[2], bits 3f80 0"),
    ],
)
def test_values_are_previewed_on_one_line(column: Column, value: Any, text: str) -> None:
    assert preview(column, value).rstrip() == text


def test_control_characters_never_reach_a_terminal() -> None:
    assert make_printable("a\x1b]0;x\x07\x9b\u200b ü") == "a\\x1b]0;x\\x07\\x9b\\u200b ü"


def test_tables_are_aligned_without_trailing_spaces() -> None:
    assert table([("a", "1"), ("long", "")]) == "  a     1\n  long"


def test_a_bad_object_is_named_once() -> None:
    assert format_bad_object(BadObject("data/1", "data/1 has 0 bytes, not 9")) == "data/1: has 0 bytes, not 9"
    assert format_bad_object(BadObject("data/1", "its header lies")) == "data/1: its header lies"


def test_one_is_singular_and_a_thousand_has_a_comma() -> None:
    assert [format_count(count, "object") for count in (0, 1, 1000)] == ["0 objects", "1 object", "1,000 objects"]


def test_json_has_no_number_that_json_has_not() -> None:
    document = {"a": [math.inf, -math.inf, math.nan, 1.5], "b": (1, "x", None, True), "c": {"d": math.inf}}
    assert json.loads(json_text(document), parse_constant=pytest.fail) == {
        "a": [None, None, None, 1.5],
        "b": [1, "x", None, True],
        "c": {"d": None},
    }
