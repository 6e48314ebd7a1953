"""Ragged columns, and what makes tensors of what."""

from __future__ import annotations

import itertools
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import stoker
from stoker._fetch.gather import Columns, RaggedValues
from stoker._format.tensorfile import DTYPES
from stoker_torch import RaggedColumn
from stoker_torch._tensors import pin_batch, stack_values, to_tensor, to_tensors
from support.cases import for_each

LENGTHS = [2, 0, 3, 1]


def ragged(dtype: str = "int64", shape: tuple[int, ...] = ()) -> RaggedColumn:
    """Values ``[0 1] [] [2 3 4] [5]``, each element repeated over ``shape``."""
    elements = torch.arange(6).reshape(-1, *[1] * len(shape)).expand(6, *shape)
    values = (elements % 2).to(torch.bool) if dtype == "bool" else elements.to(getattr(torch, dtype))
    return RaggedColumn(stoker.Ragged(dtype, shape), values, torch.tensor([0, 2, 2, 5, 6]))


def text() -> RaggedColumn:
    data = np.frombuffer("aé漢".encode(), np.uint8).copy()
    return RaggedColumn.of(RaggedValues(stoker.Text(), data, np.array([0, 1, 3, 3, 6])))


def lists(column: RaggedColumn) -> list[list[int]]:
    return [value.tolist() for value in column]


def test_indices_count_from_either_end_and_iteration_goes_through_all() -> None:
    column = ragged()
    assert [column[index].tolist() for index in range(4)] == [[0, 1], [], [2, 3, 4], [5]]
    assert [column[index].tolist() for index in range(-4, 0)] == lists(column)
    assert column[np.int64(2)].tolist() == column[torch.tensor(2)].tolist() == [2, 3, 4]
    assert len(column) == len(list(column)) == 4


@pytest.mark.parametrize("index", [4, -5, [0, 4]])
def test_an_index_beyond_is_an_index_error(index: Any) -> None:
    with pytest.raises(IndexError):
        ragged()[index]


def test_bytes_and_text_are_given_as_python_has_them() -> None:
    assert list(text()) == ["a", "é", "", "漢"]
    data = RaggedColumn(stoker.Bytes(), torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([0, 2, 2]))
    assert list(data) == [b"\x00\xff", b""]


@pytest.mark.parametrize(
    ("selection", "places"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        (slice(2, 2), []),
        ([3, 0, 0], [3, 0, 0]),
        ([-1, 1], [3, 1]),
        (torch.tensor([2, -4]), [2, 0]),
        (torch.tensor([], dtype=torch.int64), []),
        (torch.tensor([True, False, False, True]), [0, 3]),
        (np.array([1, 2]), [1, 2]),
    ],
)
def test_what_selects_several_gives_a_column_of_copies(selection: Any, places: list[int]) -> None:
    column = ragged()
    taken = column[selection]
    assert isinstance(taken, RaggedColumn)
    assert lists(taken) == [lists(column)[place] for place in places]
    assert taken.lengths().tolist() == [LENGTHS[place] for place in places]
    assert taken.offsets.dtype == torch.int64
    taken.values.zero_()
    assert lists(column) == lists(ragged())
    assert list(text()[selection]) == [list(text())[place] for place in places]


@for_each("dtype", DTYPES)
@for_each("shape", [(), (2,)])
def test_every_dtype_can_be_selected_and_padded(dtype: str, shape: tuple[int, ...]) -> None:
    column = ragged(dtype, shape)
    assert column[[2, 0]].values.dtype == column.values.dtype
    assert torch.equal(column[[2, 0]][0].to(torch.float32), column[2].to(torch.float32))
    padded = column.to_padded(1)
    assert padded.dtype == column.values.dtype
    assert padded.shape == (4, 3, *shape)
    for row, value in zip(padded.to(torch.float32), column, strict=True):
        assert torch.equal(row[: len(value)], value.to(torch.float32))
        assert (row[len(value) :] == 1).all()


def test_padding_nothing_gives_nothing() -> None:
    assert ragged()[1:2].to_padded().shape == (1, 0)
    assert ragged()[[]].to_padded().shape == (0, 0)


def test_a_value_is_a_view_and_keeps_the_buffer_alive() -> None:
    column = ragged()
    value = column[2]
    value[0] = 77
    assert column.values[2] == 77


def test_moving_a_column_moves_both_tensors() -> None:
    moved = ragged().to("meta")
    assert moved.values.device == moved.offsets.device == torch.device("meta")


@pytest.mark.parametrize("arguments", [(torch.float32,), ("cpu", torch.float16), (torch.zeros(1),)])
def test_a_column_is_not_moved_to_a_dtype_which_would_be_that_of_its_offsets(arguments: Any) -> None:
    column = ragged()
    with pytest.raises(TypeError, match=r"column\.values\.to\(dtype\)"):
        column.to(*arguments)
    with pytest.raises(TypeError, match=r"to_padded\(\)"):
        column.to(dtype=torch.float32)
    assert column.to("cpu", non_blocking=True).offsets.dtype == torch.int64


NUMBERS: list[Any] = [True, 3, 2.5, np.int16(4), np.float32(1.5), np.float64(0.5)]
ARRAYS: list[Any] = [
    torch.ones(2, 3),
    torch.ones(2, 3, dtype=torch.int32),
    np.ones((2, 3)),
    np.arange(6, dtype=np.uint8).reshape(2, 3),
    np.asfortranarray(np.ones((2, 3), np.float32)),
]


@pytest.mark.parametrize("values", [NUMBERS, ARRAYS], ids=["numbers", "arrays"])
def test_values_are_stacked_as_default_collate_stacks_them(values: list[Any]) -> None:
    for count in (1, 2, 3):
        for some in itertools.product(values, repeat=count):
            alike = [torch.as_tensor(value) if values is ARRAYS else value for value in some]
            expected, found = default_collate(alike), stack_values(some)
            assert found.dtype == expected.dtype, some
            assert torch.equal(found, expected), some


def test_numpys_booleans_are_stacked_beside_other_numbers_too() -> None:
    assert stack_values([np.bool_(True), np.bool_(False)]).dtype == torch.bool
    assert stack_values([3, np.bool_(True)]).tolist() == [3, 1]


@pytest.mark.parametrize(
    "values", [[1, "a"], [1, None], [torch.ones(2), torch.ones(3)], [torch.ones(()), 1], ["a", "b"], [{}, {}]]
)
def test_what_makes_no_tensor_makes_a_list(values: list[Any]) -> None:
    found = stack_values(values)
    assert isinstance(found, list)
    assert all(one is other for one, other in zip(found, values, strict=True))


def test_the_repr_says_what_it_is_without_its_values() -> None:
    assert repr(text()) == "<RaggedColumn text: 4 values of 0 to 3 elements, 6 in all, on cpu>"


@for_each("dtype", DTYPES.values(), ids=DTYPES)
def test_tensors_share_the_arrays_memory_and_have_the_columns_dtype(dtype: Any) -> None:
    array = np.zeros((3, 2), dtype.holder)
    tensor = to_tensor(array, dtype)
    assert tensor.dtype == getattr(torch, dtype.name)
    assert tensor.shape == (3, 2)
    array.view(np.uint8)[:] = 1
    assert (tensor.view(torch.uint8) == 1).all()


def test_a_batch_becomes_tensors_and_ragged_columns() -> None:
    schema = {"x": stoker.Array("int64"), "t": stoker.Text()}
    columns: Columns = {
        "x": np.arange(2),
        "t": RaggedValues(stoker.Text(), np.zeros(0, np.uint8), np.zeros(3, np.int64)),
    }
    batch = to_tensors(columns, schema)
    assert isinstance(batch["x"], torch.Tensor)
    assert list(batch["t"]) == ["", ""]


def test_pinning_reaches_every_tensor_and_column_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    empty_like = torch.empty_like

    def allocate(tensor: torch.Tensor, *, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        made.append(empty_like(tensor))
        return made[-1]

    def is_made(tensor: torch.Tensor) -> bool:
        return any(tensor is each for each in made)

    monkeypatch.setattr(torch, "empty_like", allocate)
    monkeypatch.setattr(torch.Tensor, "is_pinned", is_made)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: allocate(tensor, pin_memory=True).copy_(tensor))
    Pair = namedtuple("Pair", "left right")
    x = torch.tensor([3.0, 4.0])
    column = RaggedColumn(stoker.Ragged("float32"), x, torch.tensor([0, 2]))
    turned = torch.arange(6).reshape(2, 3).T
    batch = pin_batch({"x": x, "r": column, "l": [x, "text"], "t": (x, 1), "p": Pair(x, None), "v": turned})
    assert batch["x"].tolist() == batch["r"][0].tolist() == [3, 4]
    assert batch["v"].tolist() == turned.tolist()
    assert batch["x"].is_pinned()
    assert batch["r"].is_pinned()
    assert batch["l"][0].is_pinned()
    assert batch["l"][1] == "text"
    assert batch["t"][0].is_pinned()
    assert isinstance(batch["p"], Pair)
    assert batch["p"].left.is_pinned()
    again = pin_batch(batch)
    assert again["x"] is batch["x"]
    assert again["r"] is batch["r"]
