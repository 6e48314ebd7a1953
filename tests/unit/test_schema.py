from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from stoker import Array, Bytes, Column, Ragged, Schema, Text
from stoker._format.schema import MAX_COLUMNS, MAX_DIMENSIONS
from stoker._format.tensorfile import DTYPES
from stoker.errors import ConfigError, FormatError, SchemaError
from support.cases import for_each
from support.supersamples import EVERY_KIND, every_dtype, value_of

NUMPY_HAS = [name for name, dtype in DTYPES.items() if not dtype.is_bits]
ONLY_BITS = [name for name, dtype in DTYPES.items() if dtype.is_bits]


def decoded(column: Column, data: bytes) -> Any:
    return column.decode(memoryview(data))


@for_each("name", list(DTYPES))
@for_each("kind", [Array, Ragged])
def test_an_array_of_every_dtype_comes_back_bit_for_bit(name: str, kind: Callable[..., Column]) -> None:
    column = kind(name, (3, 2))
    value = value_of(column, random.Random(1))
    back = decoded(column, column.encode(value))
    assert back.dtype == DTYPES[name].holder
    assert back.shape == value.shape
    assert back.tobytes() == value.tobytes()


@for_each("name", list(DTYPES))
def test_a_tensor_of_every_dtype_is_stored_as_its_bits(name: str) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    stored = Array(name, (2, 3)).encode(tensor)
    assert torch.frombuffer(bytearray(stored), dtype=tensor.dtype).reshape(2, 3).equal(tensor)


@for_each("name", NUMPY_HAS)
def test_big_endian_arrays_are_stored_little_endian(name: str) -> None:
    value, column = np.arange(6).astype(np.dtype(name).newbyteorder(">")), Array(name, (6,))
    assert decoded(column, column.encode(value)).tolist() == value.tolist()


def test_tensors_with_strides_or_gradients_are_stored_by_value() -> None:
    tensor = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    column = Array("float32", (3, 2))
    assert decoded(column, column.encode(tensor)).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_arrays_with_strides_are_stored_in_c_order() -> None:
    column = Array("int16", (3, 2))
    value = np.arange(24, dtype=np.int16).reshape(4, 6)[::-2, 1::2].T
    assert decoded(column, column.encode(value)).tolist() == value.tolist()


@pytest.mark.parametrize("name", ONLY_BITS)
def test_bits_may_be_given_as_an_array_of_unsigned_integers(name: str) -> None:
    bits = np.array([1, 2, 200], DTYPES[name].holder)
    assert Array(name, 3).encode(bits) == bits.tobytes()


@pytest.mark.parametrize("name", ONLY_BITS)
@pytest.mark.parametrize("value", [[1.0, 2.0], np.zeros(2, np.float32), torch.zeros(2)], ids=type)
def test_bits_are_not_made_from_other_numbers(name: str, value: object) -> None:
    with pytest.raises(SchemaError, match=name):
        Array(name, 2).encode(value)


@for_each(
    ("column", "value"),
    [
        (Array("int64"), 3),
        (Array("int64"), np.int64(3)),
        (Array("uint8", 2), [0, 255]),
        (Array("uint64"), 2**64 - 1),
        (Array("int64"), -(2**63)),
        (Array("bool"), True),
        (Array("float32"), 1),
        (Array("float64", (2,)), (0.5, 1)),
        (Ragged("uint16"), []),
        (Ragged("uint16"), [1, 2]),
        (Ragged("float32", (2,)), []),
        (Ragged("float32", (2,)), [[1, 2], [3, 4], [5, 6]]),
    ],
    ids=repr,
)
def test_python_numbers_that_fit_are_stored(column: Column, value: object) -> None:
    assert decoded(column, column.encode(value)).tolist() == np.asarray(value).tolist()


@for_each(
    ("column", "value", "problem"),
    [
        (Array("uint8"), 256, "256 does not fit uint8"),
        (Array("uint8"), -1, "-1 does not fit uint8"),
        (Array("int8", 2), [0, -129], "-129 does not fit int8"),
        (Array("uint64"), 2**64, "does not fit uint64"),
        (Array("int64"), 1.5, "float64.* is not int64"),
        (Array("int64"), True, "bool.* is not int64"),
        (Array("bool"), 1, "is not bool"),
        (Array("float32"), "1", "str.* is not float32"),
        (Array("float32"), None, "is not float32"),
        (Array("float32"), 1e39, "too large for float32"),
        (Ragged("float16"), [1, 70_000], "too large for float16"),
        (Array("float32"), 1j, "is not float32"),
        (Array("float32", 2), [[1], [1, 2]], "not a regular array"),
        (Array("float32", 2), [1, 2, 3], r"shape is \(3,\), expected \(2,\)"),
        (Array("float32", 2), 1.0, r"shape is \(\), expected \(2,\)"),
        (Array("float32"), np.zeros((), np.float64), r"float64, expected float32; convert it with .astype"),
        (Array("float32"), torch.zeros((), dtype=torch.float64), r"float64, expected float32; convert it with .to"),
        (Array("float32"), np.array("x", object), "object, expected float32"),
        (Ragged("float32", (4,)), np.zeros((2, 3), np.float32), r"shape is \(2, 3\), expected \(any, 4\)"),
        (Ragged("float32"), np.zeros((2, 3), np.float32), r"shape is \(2, 3\), expected \(any\)"),
        (Ragged("float32"), 3.0, r"shape is \(\), expected \(any\)"),
        (Bytes(), "text", "str is not bytes"),
        (Bytes(), [1, 2], "list is not bytes"),
        (Text(), b"bytes", "bytes is not str"),
        (Text(), None, "NoneType is not str"),
        (Text(), "\ud800", "cannot be stored as UTF-8"),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_its_column_is_refused_not_cast(column: Column, value: object, problem: str) -> None:
    with pytest.raises(SchemaError, match=problem):
        column.encode(value)


@pytest.mark.parametrize("value", [b"abc", bytearray(b"abc"), memoryview(b"abc"), b""])
def test_bytes_come_back_as_bytes(value: bytes) -> None:
    assert decoded(Bytes(), Bytes().encode(value)) == bytes(value)


@pytest.mark.parametrize("value", ["", "a truck", "naïve 漢字 😀 \0"])
def test_text_comes_back_as_text(value: str) -> None:
    assert decoded(Text(), Text().encode(value)) == value


def test_text_that_is_not_utf8_is_a_format_error() -> None:
    with pytest.raises(FormatError, match="not UTF-8"):
        decoded(Text(), b"\xff")


def test_decoded_arrays_own_their_memory() -> None:
    data = bytearray(Array("int16", 2).encode([1, 2]))
    value = decoded(Array("int16", 2), bytes(data))
    value += 1
    assert value.tolist() == [2, 3]


@for_each("shape", [(0,), (-1,), (True,), (2.0,), "ab", None, (1,) * (MAX_DIMENSIONS + 1), (1 << 20, 1 << 20)])
@for_each("kind", [Array, Ragged])
def test_a_shape_that_cannot_be_is_refused(kind: Callable[[str, object], Column], shape: object) -> None:
    with pytest.raises(SchemaError, match="shape"):
        kind("uint8", shape)


def test_a_shape_may_be_one_number() -> None:
    assert Array("uint8", 3) == Array("uint8", (3,))


def test_a_value_larger_than_numpy_can_copy_is_refused() -> None:
    assert Array("uint8", (1 << 31) - 1).element_bytes == (1 << 31) - 1
    for dtype, count in (("uint8", 1 << 31), ("int16", 1 << 30), ("float64", 1 << 28)):
        with pytest.raises(SchemaError, match="too large"):
            Array(dtype, count)
        with pytest.raises(SchemaError, match="too large"):
            Ragged(dtype, count)


def test_classes_must_be_unicode_that_can_be_written() -> None:
    with pytest.raises(SchemaError, match="valid Unicode"):
        Array("int64", classes=("cat", "\ud800"))


def test_classes_must_be_text() -> None:
    with pytest.raises(SchemaError, match="classes must be strings"):
        Array("int64", classes=(1, 2))  # type: ignore[arg-type]


@for_each("name", ["", "1a", "__crc32c__", "__x", "a.offsets", "a b", "é", "a\n", 3, None])
def test_a_column_name_that_is_not_an_identifier_is_refused(name: Any) -> None:
    with pytest.raises(SchemaError, match=r"column name .* is invalid"):
        Schema({name: Text()})


@pytest.mark.parametrize("name", ["a", "_a", "A_1", "_", "x" * 300])
def test_an_identifier_is_a_column_name(name: str) -> None:
    assert list(Schema({name: Text()})) == [name]


def test_a_schema_has_columns_of_the_right_kind_and_not_too_many() -> None:
    with pytest.raises(SchemaError, match="at least one column"):
        Schema({})
    with pytest.raises(SchemaError, match="at most 1024 columns, not 1025"):
        Schema({f"c{i}": Text() for i in range(MAX_COLUMNS + 1)})
    with pytest.raises(SchemaError, match=r"column 'x' must be a stoker.Array, .* not 'uint8'"):
        Schema({"x": "uint8"})  # type: ignore[dict-item]


def test_schemas_are_equal_if_names_order_and_types_are() -> None:
    first = Schema({"a": Text(), "b": Bytes()})
    assert first == Schema({"a": Text(), "b": Bytes()})
    assert hash(first) == hash(Schema({"a": Text(), "b": Bytes()}))
    for other in ({"b": Bytes(), "a": Text()}, {"a": Bytes(), "b": Bytes()}, {"a": Text(), "c": Bytes()}):
        assert first != Schema(other)


def test_columns_are_chosen_by_name_in_the_order_asked() -> None:
    schema = Schema({"a": Text(), "b": Bytes(), "c": Array("int64")})
    assert list(schema.select(None)) == ["a", "b", "c"]
    assert schema.select(["c", "a"]) == {"c": Array("int64"), "a": Text()}
    assert list(schema.select(("c", "a"))) == ["c", "a"]


@pytest.mark.parametrize(
    ("names", "problem"),
    [("abc", r"columns=\['abc'\]"), ([], "columns is empty"), (["a", "x"], "no column x; its columns are a, b$")],
)
def test_columns_that_cannot_be_chosen_are_named(names: Sequence[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Schema({"a": Text(), "b": Bytes()}).select(names)


def test_a_sample_is_encoded_in_the_schema_s_order() -> None:
    schema = Schema({"a": Text(), "b": Bytes()})
    assert schema.encode({"b": b"2", "a": "1"}) == [b"1", b"2"]


def test_a_column_is_shown_as_it_is_written() -> None:
    assert repr(Array("float32", 3)) == "Array(dtype='float32', shape=(3,), classes=None)"


def test_a_bad_sample_names_itself_the_column_and_the_remedy() -> None:
    schema = Schema({"image": Array("uint8", 2), "label": Array("int64")})
    with pytest.raises(SchemaError, match=r"^x\.png, column 'image': dtype is float64, expected uint8; convert"):
        schema.encode({"image": np.zeros(2), "label": 1}, where="x.png")
    with pytest.raises(SchemaError, match=r"^sample has no column 'label'; give exactly the columns image, label$"):
        schema.encode({"image": [1, 2]})
    with pytest.raises(SchemaError, match=r"^sample has no column 'label' and unknown column 'lable'; give"):
        schema.encode({"image": [1, 2], "lable": 1})
    with pytest.raises(
        SchemaError, match=r"^sample is of type list, not a mapping; give exactly the columns image, label$"
    ):
        schema.encode([1, 2])  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match=r"unknown column 'more'"):
        schema.encode({"image": [1, 2], "label": 1, "more": 2})


@pytest.mark.parametrize("schema", [EVERY_KIND, every_dtype(), Schema({"x": Array("bool")})], ids=len)
def test_a_schema_comes_back_from_its_json_and_the_json_is_canonical(schema: Schema) -> None:
    text = schema.to_json()
    assert text.isascii()
    assert Schema.from_json(text) == schema
    assert Schema.from_json(text).to_json() == text
    assert [column.classes for column in schema.values() if isinstance(column, Array)] == [
        column.classes for column in Schema.from_json(text).values() if isinstance(column, Array)
    ]


COLUMN = {"name": "x", "kind": "array", "dtype": "uint8", "shape": [2]}
WRONG: dict[str, list[object]] = {
    "name": [3, None, "__x", "a.offsets"],
    "kind": ["tensor", [], None, "bytes", "text"],
    "dtype": [3, None, "complex64", "(,f4", "f4,f4"],
    "shape": [None, "2", [0], [-1], [1.5], [10**30], [2] * 5000, [True], {"a": 1}, [float("nan")]],
    "classes": [3, None, [3], "ab"],
    "more": [1],
}
NOT_A_SCHEMA = [
    *("", "{", "null", "3", "{}", "[]", "[3]", "[[]]", "[{}]", "[" * 100_000, "9" * 5000),
    *(json.dumps([COLUMN | {key: value}]) for key, values in WRONG.items() for value in values),
    json.dumps([COLUMN | {"kind": "ragged", "classes": ["a"]}]),
    json.dumps([COLUMN, COLUMN]),
    json.dumps([{"name": "x", "kind": "array"}]),
    json.dumps([{"name": f"c{i}", "kind": "text"} for i in range(MAX_COLUMNS + 1)]),
    '[{"name":"x","name":"x","kind":"text"}]',
    '[{"name":"x","kind":"bytes","kind":"text"}]',
    '[{"name": "x","kind":"text"}]',
    '[{"kind":"text","name":"x"}]',
    '[{"name":"x","kind":"array","dtype":"int64","shape":3}]',
    '[{"name":"x","kind":"array","dtype":"torch.int64","shape":[]}]',
    '[{"name":"x","kind":"array","dtype":"int64","shape":[],"classes":["\\ud800"]}]',
    '[{"name":"x","kind":"array","dtype":"int64","shape":[],"classes":["é"]}]',
]


@for_each("text", NOT_A_SCHEMA, ids=lambda text: text[:80])
def test_json_that_is_no_schema_is_a_schema_error(text: str) -> None:
    with pytest.raises(SchemaError) as refused:
        Schema.from_json(text)
    assert len(str(refused.value)) < 500
