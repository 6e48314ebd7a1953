from __future__ import annotations

from stoker import Array, Bytes, Column, Ragged, Schema, Text
from stoker._pack.plan import describe_schema_difference
from support.cases import for_each

COLUMNS: dict[str, Column] = {"data": Bytes(), "label": Array("int64", classes=("cat", "dog"))}


@for_each(
    ("given", "said"),
    [
        (COLUMNS, ""),
        ({"data": Bytes()}, "no column 'label'"),
        ({**COLUMNS, "path": Text()}, "an unknown column 'path'"),
        ({**COLUMNS, "data": Text()}, "column 'data' as text, not bytes"),
        ({**COLUMNS, "data": Ragged("uint8", (2,))}, "column 'data' as ragged uint8 [2], not bytes"),
        ({**COLUMNS, "label": Array("int32")}, "column 'label' as array int32 [], not array int64 []"),
        ({**COLUMNS, "label": Array("int64")}, "column 'label' without names of its classes"),
        (
            {**COLUMNS, "label": Array("int64", classes=("cat", "cow", "dog"))},
            "column 'label' with 3 classes, not 2; the first that differs is number 1: 'cow', not 'dog'",
        ),
        (
            {**COLUMNS, "label": Array("int64", classes=("cat",))},
            "column 'label' with 1 classes, not 2; the first that differs is number 1: none, not 'dog'",
        ),
        (dict(reversed(COLUMNS.items())), "the columns in the order label, data, not data, label"),
        (
            {"data": Text(), "size": Text()},
            "no column 'label', an unknown column 'size', column 'data' as text, not bytes",
        ),
    ],
)
def test_a_difference_names_what_differs_and_nothing_else(given: dict[str, Column], said: str) -> None:
    assert describe_schema_difference(Schema(COLUMNS), Schema(given)) == said


def test_classes_that_one_side_lacks_are_a_difference_even_where_there_are_none() -> None:
    empty, without = Schema({"x": Array("int64", classes=())}), Schema({"x": Array("int64")})
    assert describe_schema_difference(empty, without) == "column 'x' without names of its classes"
    assert describe_schema_difference(without, empty) == "column 'x' with names of its classes"


def test_a_difference_stays_readable_with_a_thousand_columns_and_classes() -> None:
    many = {f"c{number}": Array("int64", classes=("x" * 10_000,) * 1000) for number in range(1000)}
    others = {name: Array("int64", classes=("y" * 10_000,) * 1000) for name in many}
    assert len(describe_schema_difference(Schema(many), Schema(others))) < 2000
    assert len(describe_schema_difference(Schema(many), Schema(dict(reversed(many.items()))))) < 200
    assert describe_schema_difference(Schema(many), Schema({"c0": many["c0"]})).endswith("and 994 more")
