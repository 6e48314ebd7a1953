"""Gathering rows: every dtype, any address, ragged values with and without elements, and nothing beyond the memory."""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import stoker
from stoker import Column, Schema
from stoker._fetch.gather import (
    BatchArrays,
    Columns,
    RaggedValues,
    RowLocations,
    ValueLocations,
    concatenate,
    gather,
    gather_rows,
)
from stoker._fetch.super_samples import locate_values
from stoker._format.supersample import Head
from stoker._format.tensorfile import DTYPES
from support.cases import for_each
from support.packed_objects import value_at
from support.supersamples import EVERY_KIND, built, every_dtype, samples_of


def locate_rows(
    schema: Schema, bodies: Sequence[bytes], picks: Sequence[tuple[int, int]], gap_bytes: int = 0
) -> RowLocations:
    """Rows of super-samples that lie behind one another, each ``gap_bytes`` from the last: aligned to nothing."""
    starts = [0, *accumulate(len(body) + gap_bytes for body in bodies)]
    which, rows = (np.array([pick[part] for pick in picks], np.int64) for part in (0, 1))
    memory = memoryview(bytearray().join(body + bytes(gap_bytes) for body in bodies))
    heads = [Head.parse(memoryview(body), len(body)) for body in bodies]
    return RowLocations(
        which,
        rows,
        locate_values(schema, memory, [head.starts for head in heads], np.array(starts[:-1], np.int64), which, rows),
    )


def plain(column: Column, value: Any) -> Any:
    """A sample's value as :func:`value_at` gives it."""
    return value if isinstance(value, bytes | str) else np.asarray(value, column.dtype.holder).tolist()


def assert_same(columns: Columns, schema: Schema, wanted: Sequence[dict[str, Any]]) -> None:
    assert list(columns) == list(schema)
    for name, column in schema.items():
        assert len(columns[name]) == len(wanted)
        got = [value_at(columns[name], place) for place in range(len(wanted))]
        assert got == [plain(column, sample[name]) for sample in wanted]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # random bits are also signalling NaNs
@pytest.mark.parametrize("gap_bytes", [0, 1, 3, 7])
@pytest.mark.parametrize("schema", [EVERY_KIND, every_dtype()], ids=["every kind", "every dtype"])
def test_rows_of_any_super_samples_come_in_the_order_requested(schema: Schema, gap_bytes: int) -> None:
    counts = [5, 1, 9]
    samples = [samples_of(schema, count, seed) for seed, count in enumerate(counts)]
    bodies = [built(schema, part)[0] for part in samples]
    everything = [(which, row) for which, count in enumerate(counts) for row in range(count)]
    picks = random.Random(1).sample(everything, len(everything)) + everything[3:5]
    columns = gather(locate_rows(schema, bodies, picks, gap_bytes), schema)
    for name, column in schema.items():
        for place, (which, row) in enumerate(picks):
            value, wanted = columns[name][place], samples[which][row][name]
            if column.kind in ("bytes", "text"):
                assert value == wanted
            else:
                assert value.tobytes() == np.asarray(wanted, column.dtype.holder).tobytes()
                assert value.dtype == column.dtype.holder


def test_hundreds_of_super_samples_are_gathered_from_at_once() -> None:
    schema = Schema({"x": stoker.Array("int32"), "t": stoker.Text()})
    samples = [[{"x": which * 10 + row, "t": f"{which}/{row}"} for row in range(3)] for which in range(300)]
    bodies = [built(schema, part)[0] for part in samples]
    picks = [(which, which % 3) for which in range(299, -1, -1)]
    columns = gather(locate_rows(schema, bodies, picks), schema)
    assert_same(columns, schema, [samples[which][row] for which, row in picks])


@pytest.mark.parametrize(
    "lengths", [[0, 0, 0], [0, 5, 0], [1, 0, 0, 2], [0]], ids=["none", "in between", "behind", "one"]
)
def test_ragged_values_without_elements_are_empty(lengths: list[int]) -> None:
    schema = Schema({"r": stoker.Ragged("float32", (2,)), "b": stoker.Bytes()})
    samples = [{"r": np.full((length, 2), length, np.float32), "b": b"b" * length} for length in lengths]
    columns = gather(
        locate_rows(schema, [built(schema, samples)[0]], [(0, row) for row in range(len(lengths))]), schema
    )
    assert_same(columns, schema, samples)
    ragged = columns["r"]
    assert isinstance(ragged, RaggedValues)
    assert ragged.offsets.tolist() == [0, *accumulate(lengths)]
    assert ragged.elements.shape == (sum(lengths), 2)


def test_no_row_gives_empty_columns() -> None:
    columns = gather(locate_rows(EVERY_KIND, [built(EVERY_KIND, samples_of(EVERY_KIND, 2))[0]], []), EVERY_KIND)
    assert {len(values) for values in columns.values()} == {0}


def test_what_was_gathered_does_not_change_with_the_memory() -> None:
    schema = Schema({"x": stoker.Array("uint8", (4,)), "b": stoker.Bytes()})
    samples = [{"x": [row] * 4, "b": bytes([row]) * row} for row in range(1, 6)]
    picked = locate_rows(schema, [built(schema, samples)[0]], [(0, row) for row in range(5)])
    columns = gather(picked, schema)
    memory = picked.values["x"].memory
    memory[:] = bytes(len(memory))
    assert_same(columns, schema, samples)


@pytest.mark.parametrize("row_bytes", [1, 2, 3, 8, 100, 256])
def test_rows_are_copied_from_every_address_up_to_the_last(row_bytes: int) -> None:
    memory = memoryview(bytearray(range(256)))
    addresses = np.arange(256 - row_bytes + 1)
    rows = gather_rows(memory, addresses, row_bytes)
    assert rows.dtype == np.uint8
    assert [row.tobytes() for row in rows] == [memory[start : start + row_bytes].tobytes() for start in addresses]


@pytest.mark.parametrize(("address", "row_bytes"), [(249, 8), (256, 1), (0, 257), (10**12, 1)])
def test_a_row_beyond_the_memory_is_an_index_error(address: int, row_bytes: int) -> None:
    with pytest.raises(IndexError):
        gather_rows(memoryview(bytearray(256)), np.array([address]), row_bytes)


def test_the_values_of_every_column_are_in_arrays_of_the_pool() -> None:
    schema = Schema({"x": stoker.Array("int16"), "y": stoker.Array("float64", (2,)), "t": stoker.Text()})
    asked: list[int] = []

    class Arrays(BatchArrays):
        def gather_rows(self, memory: memoryview, addresses: NDArray[np.int64], row_bytes: int) -> NDArray[np.uint8]:
            asked.append(row_bytes)
            return gather_rows(memory, addresses, row_bytes)

        def empty(self, size_bytes: int) -> NDArray[np.uint8]:
            asked.append(size_bytes)
            return np.empty(size_bytes, np.uint8)

    samples = [{"x": 1, "y": [1.0, 2.0], "t": "a"}, {"x": 2, "y": [3.0, 4.0], "t": "bcd"}]
    columns = gather(locate_rows(schema, [built(schema, samples)[0]], [(0, 1), (0, 0)]), schema, Arrays())
    assert_same(columns, schema, samples[::-1])
    assert sorted(asked) == [2, 16, 8 + 3 * 8]  # the text's bytes with its offsets


LARGE = 1 << 20


@pytest.mark.parametrize(
    "hold", [lambda array: array, lambda array: array[5:].view("u1"), lambda array: array.data, torch.from_numpy]
)
def test_a_large_array_is_used_again_only_after_nothing_refers_to_it(hold: Callable[[NDArray[Any]], Any]) -> None:
    arrays = BatchArrays()
    first = arrays.empty(LARGE)
    place, held = first.ctypes.data, hold(first)
    del first
    second = arrays.empty(LARGE)
    assert second.ctypes.data != place
    del held
    assert arrays.empty(LARGE + LARGE // 5).ctypes.data == place


def test_only_the_memory_of_the_last_large_arrays_is_kept() -> None:
    arrays = BatchArrays(reused=2)
    held = [arrays.empty(LARGE) for _ in range(5)]
    kept = {array.ctypes.data for array in held[-2:]}
    forgotten = [weakref.ref(array.base) for array in held[:3] if array.base is not None]
    del held
    assert [each() for each in forgotten] == [None] * 3
    again = [arrays.empty(LARGE), arrays.empty(LARGE)]
    assert {array.ctypes.data for array in again} == kept


@pytest.mark.parametrize("size_bytes", [LARGE, 4 * LARGE])
def test_an_array_is_not_used_again_for_a_much_smaller_or_a_larger_one(size_bytes: int) -> None:
    arrays = BatchArrays()
    kept = arrays.empty(3 * LARGE).base
    assert arrays.empty(size_bytes).base is not kept


def test_parts_of_a_batch_are_joined_in_order_and_one_alone_is_kept() -> None:
    schema = Schema({"x": stoker.Array("int16", (2,)), "t": stoker.Text(), "r": stoker.Ragged("uint8")})
    samples = samples_of(schema, 7)
    body = built(schema, samples)[0]
    cuts = (range(3), range(0), range(3, 7))
    parts = [gather(locate_rows(schema, [body], [(0, row) for row in rows]), schema) for rows in cuts]
    assert_same(concatenate(parts), schema, samples)
    assert concatenate(parts[:1]) is parts[0]


@pytest.mark.parametrize("index", [-1, 2])
def test_a_ragged_value_that_is_not_there_is_an_index_error(index: int) -> None:
    values = RaggedValues(stoker.Bytes(), np.zeros(3, np.uint8), np.array([0, 1, 3]))
    with pytest.raises(IndexError, match=f"value {index} of a batch of 2"):
        values[index]


@for_each("name", DTYPES)
def test_elements_have_the_holders_dtype(name: str) -> None:
    column = stoker.Ragged(name, (2,))
    values = RaggedValues(column, np.zeros(6 * column.dtype.size_bytes, np.uint8), np.array([0, 1, 3]))
    assert values.elements.shape == (3, 2)
    assert values.elements.dtype == column.dtype.holder
    assert values[1].shape == (2, 2)


@for_each("row_bytes", [1, 2, 3, 4, 8, 16])
@for_each("shift", [0, 1])
def test_rows_are_copied_from_any_address(row_bytes: int, shift: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    addresses = np.array([5, 0, 17, 5]) * row_bytes + shift
    rows = gather_rows(data.data, addresses, row_bytes)
    assert rows.tolist() == [data[start : start + row_bytes].tolist() for start in addresses.tolist()]
    with pytest.raises(IndexError):
        gather_rows(data.data, np.array([1000 // row_bytes * row_bytes + shift]), row_bytes)


@pytest.mark.parametrize("row_bytes", [65_536, 65_537, 3072, 3 * 257, 999, 24_576])
@pytest.mark.parametrize("rows", [1, 3, 85, 256, 501])
def test_large_rows_are_copied_however_they_can_be_cut(row_bytes: int, rows: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 2 * row_bytes + 3, np.uint8)
    addresses = np.random.default_rng(1).integers(0, row_bytes + 3, rows)
    addresses[-1] = row_bytes + 3
    gathered = gather_rows(data.data, addresses, row_bytes)
    wanted = [data[start : start + row_bytes] for start in addresses.tolist()]
    assert np.array_equal(gathered, wanted)
    with pytest.raises(IndexError):
        gather_rows(data.data, addresses + 1, row_bytes)


@pytest.mark.parametrize("mean_bytes", [20, 8_000, 40_000])
def test_ragged_values_of_any_size_are_joined(mean_bytes: int) -> None:
    rng = np.random.default_rng(0)
    schema = Schema({"b": stoker.Bytes(), "r": stoker.Ragged("int16", (3,))})
    lengths = rng.integers(0, 2 * mean_bytes, 9)
    lengths[4] = 0
    samples = [{"b": rng.bytes(length), "r": rng.integers(0, 99, (length // 6, 3), np.int16)} for length in lengths]
    picks = [(0, row) for row in rng.permutation(9).tolist()]
    columns = gather(locate_rows(schema, [built(schema, samples)[0]], picks, gap_bytes=3), schema)
    assert_same(columns, schema, [samples[row] for _, row in picks])


@pytest.mark.parametrize("kind", ["fixed", "ragged"])
def test_other_threads_run_while_many_bytes_are_gathered(kind: str) -> None:
    size_bytes, interval_seconds = 1 << 20, sys.getswitchinterval()
    memory, starts = memoryview(bytearray(size_bytes)), np.zeros(16, np.int64)
    column = stoker.Array("uint8", (size_bytes,)) if kind == "fixed" else stoker.Bytes()
    values = ValueLocations(memory, starts, None if kind == "fixed" else starts + size_bytes)
    located, may_run, has_run = RowLocations(starts, starts, {"x": values}), threading.Lock(), []

    def run() -> None:
        with may_run:
            has_run.append(True)

    other = threading.Thread(target=run)
    with may_run:
        other.start()
        sys.setswitchinterval(1e3)  # seconds: a thread that runs loses the interpreter lock only if it releases it
    try:
        gathers = 0
        while not has_run and gathers < 100:
            gather(located, {"x": column})
            gathers += 1
        assert has_run
    finally:
        sys.setswitchinterval(interval_seconds)
        other.join()
