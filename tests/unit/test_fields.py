"""Fields of a JSON object from outside: taken as they are, or an error that names the field and shows little of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker._base.arguments import Fraction
from stoker._base.fields import JsonFields, read_record
from stoker.errors import ConfigError, EventError
from support.cases import for_each

Take = Callable[[JsonFields], object]

TAKES: dict[str, Take] = {
    "text": lambda fields: fields.text("x"),
    "pattern": lambda fields: fields.text("x", pattern="[0-9a-f]{16}"),
    "integer": lambda fields: fields.integer("x", min_value=1, max_value=10),
    "choice": lambda fields: fields.choice("x", ("a", "b")),
    "array": lambda fields: fields.array("x", max_length=3),
    "within": lambda fields: fields.nested("x"),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def test_fields_are_returned_as_they_are() -> None:
    fields = JsonFields({"t": "té", "i": 3, "c": "b", "a": [1, "x", None], "o": {"y": 1}, "v": None}, "event")
    assert (fields.text("t"), fields.integer("i"), fields.choice("c", ("a", "b"))) == ("té", 3, "b")
    assert fields.array("a", max_length=3) == [1, "x", None]
    assert fields.nested("o").integer("y") == 1
    assert fields.value("v") is None
    fields.check_no_fields_left()


def test_a_field_that_is_missing_has_its_default_or_is_an_error_that_names_it() -> None:
    fields = JsonFields({}, "pack event")
    assert (fields.text("t", default=""), fields.integer("i", default=0)) == ("", 0)
    assert (fields.choice("c", ("a",), default="a"), fields.array("a", max_length=1, default=[])) == ("a", [])
    for take in TAKES.values():
        with pytest.raises(EventError, match="the pack event has no field 'x'"):
            take(fields)


@for_each(
    ("name", "value"),
    [
        ("text", 3),
        ("text", None),
        ("text", ["x"]),
        ("text", "x" * 4097),
        ("pattern", "0123456789abcde"),
        ("pattern", "0123456789ABCDEF"),
        ("pattern", "0123456789abcdef\n"),
        ("pattern", "\u0660" * 16),
        ("pattern", ""),
        ("integer", "3"),
        ("integer", True),
        ("integer", 3.0),
        ("integer", 0),
        ("integer", 11),
        ("integer", float("nan")),
        ("choice", "c"),
        ("choice", ["a"]),
        ("choice", "ab"),
        ("array", {}),
        ("array", "abc"),
        ("array", [1, 2, 3, 4]),
        ("within", []),
        ("within", None),
        ("within", {1: 2}),
    ],
)
def test_a_field_of_another_type_or_out_of_bounds_is_an_error_that_names_it(name: str, value: object) -> None:
    with pytest.raises(EventError, match="the pack event's 'x' is"):
        TAKES[name](JsonFields({"x": value}, "pack event"))


def test_nested_fields_are_named_by_their_path() -> None:
    with pytest.raises(EventError, match="the pack event's 'slice''s 'objects' is -1"):
        JsonFields({"slice": {"objects": -1}}, "pack event").nested("slice").integer("objects")


def test_an_unknown_field_is_an_error() -> None:
    fields = JsonFields({"a": 1, "supersample_bytes": 2}, "pack event")
    fields.integer("a")
    with pytest.raises(EventError, match="unknown field 'supersample_bytes'"):
        fields.check_no_fields_left()
    assert "a" not in fields
    assert "supersample_bytes" in fields


@pytest.mark.parametrize("value", [None, 3, "{}", [], [{}], {1: 2}, {None: 1}])
def test_what_is_no_object_has_no_fields(value: object) -> None:
    with pytest.raises(EventError, match=r"the pack event is .*, not a JSON object"):
        JsonFields(value, "pack event")


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000, ["\x1b[31m"] * 10_000, nested(5_000), 10**6000, "\ud800"],
    ids=["long", "escapes", "deep", "huge", "half a pair"],
)
def test_an_error_shows_a_little_of_a_value_however_large_deep_or_odd_it_is(value: object) -> None:
    for take in (TAKES["pattern"], TAKES["integer"], TAKES["within"]):
        with pytest.raises(EventError) as caught:
            take(JsonFields({"x": value}, "event"))
        text = str(caught.value)
        assert len(text) < 300
        assert text.isprintable()


@given(JSON)
def test_whatever_is_sent_is_taken_or_an_event_error(value: Any) -> None:
    for take in TAKES.values():
        try:
            taken = take(JsonFields({"x": json.loads(json.dumps(value))}, "event"))
        except EventError:
            continue
        assert isinstance(taken, (str, int, list, JsonFields))


class Kind(StrEnum):
    """A choice."""

    NEAR = "near"
    FAR = "far"


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a record."""

    kind: Kind
    share: Fraction[float] = 1.0

    def __post_init__(self) -> None:
        if self.kind is Kind.FAR and self.share == 1:
            raise ValueError("far places have a part")


@dataclass(frozen=True, slots=True)
class Record:
    """A field of each type."""

    name: str
    count: int | None = None
    order: Literal["up", "down"] = "up"
    pair: tuple[int, float] = (0, 0.0)
    places: tuple[Place, ...] = ()
    prices: Mapping[Kind, Fraction[float]] = field(default_factory=dict)
    anything: Any = None


def test_a_record_is_read_by_its_annotations() -> None:
    said: dict[str, Any] = {
        "name": "x",
        "count": None,
        "order": "down",
        "pair": [1, 2],
        "places": [{"kind": "near"}, {"kind": "far", "share": 0}],
        "prices": {"near": 0.5},
        "anything": [{}],
    }
    assert read_record(Record, said, "file") == Record(
        "x", None, "down", (1, 2), (Place(Kind.NEAR), Place(Kind.FAR, 0)), {Kind.NEAR: 0.5}, [{}]
    )


@for_each(
    ("said", "message"),
    [
        ([], "file is of type list, not an object"),
        ({}, "file lacks the field 'name'"),
        ({"name": "x", "naem": 1}, "file has an unknown field 'naem'; the fields are: anything, count"),
        ({"name": 1}, r"file\.name is of type int, not str"),
        ({"name": "x", "count": True}, r"file\.count is of type bool, not int"),
        ({"name": "x", "count": 1.0}, r"file\.count is of type float, not int"),
        ({"name": "x", "order": "left"}, r"file\.order is not one of 'up', 'down'"),
        ({"name": "x", "pair": [1]}, r"file\.pair has 1 elements, not 2"),
        ({"name": "x", "places": [{"kind": "near", "share": 2}]}, r"file\.places\[0\]\.share must be at most 1, not 2"),
        ({"name": "x", "places": [{"kind": "far"}]}, r"file\.places\[0\]: far places have a part"),
        ({"name": "x", "prices": {"here": 1}}, r"a name in file\.prices is not one of 'near', 'far'"),
        ({"name": "x", "prices": {"near": "1"}}, r"file\.prices\.near is of type str, not float"),
    ],
)
def test_what_is_no_such_record_is_refused_with_its_place(said: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        read_record(Record, said, "file")
