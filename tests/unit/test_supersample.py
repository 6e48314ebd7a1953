from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from stoker import Array, Bytes, Ragged, Schema, Text
from stoker._base.checksum import crc32c
from stoker._format import tensorfile
from stoker._format.supersample import MAX_OBJECT_BYTES, Head, PackOrigin, SuperSample, SuperSampleBuilder
from stoker._format.tensorfile import DTYPES
from stoker.errors import ChecksumError, FormatError, SchemaError
from support.cases import for_each
from support.supersamples import EVERY_KIND, ORIGIN, built, every_dtype, samples_of

SCHEMAS = {"every kind": EVERY_KIND, "every dtype": every_dtype(), "one column": Schema({"x": Array("uint8")})}


def raw(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value) if isinstance(value, bytes) else value.tobytes()


def rewritten(data: bytes, change: Callable[[dict[str, str]], None]) -> bytes:
    """Return the super-sample with its metadata changed and nothing else."""
    header = tensorfile.parse_header(data, len(data))
    metadata = dict(header.metadata)
    change(metadata)
    return tensorfile.encode_header(metadata, header.tensors) + data[header.header_bytes :]


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
@pytest.mark.parametrize("count", [1, 2, 9])
def test_every_sample_comes_back_as_it_was_packed(schema: Schema, count: int) -> None:
    samples = samples_of(schema, count)
    opened = SuperSample(built(schema, samples)[0])
    opened.verify()
    assert len(opened) == count
    for row, sample in enumerate(samples):
        assert {name: raw(value) for name, value in opened[row].items()} == {n: raw(v) for n, v in sample.items()}
    assert {name: raw(value) for name, value in opened[-1].items()} == {n: raw(v) for n, v in samples[-1].items()}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
@pytest.mark.parametrize("count", [1, 9])
def test_safetensors_reads_every_column_as_a_tensor_of_its_own_dtype(schema: Schema, count: int) -> None:
    samples = samples_of(schema, count)
    data, _ = built(schema, samples)
    tensors = safetensors.torch.load(data)
    ragged = [name for name, column in schema.items() if not column.is_fixed]
    assert set(tensors) == {*schema, "__crc32c__", *(f"{name}.offsets" for name in ragged)}
    for index, (name, column) in enumerate(schema.items()):
        values = [column.encode(sample[name]) for sample in samples]
        assert tensors[name].dtype == getattr(torch, column.dtype.name)
        assert tensors[name].shape[1:] == column.shape
        assert bytes(tensors[name].reshape(-1).view(torch.uint8).tolist()) == b"".join(values)
        assert tensors["__crc32c__"][:, index].tolist() == [crc32c(value) for value in values]
        if name in ragged:
            ends = np.cumsum([0, *(len(value) // column.element_bytes for value in values)])
            assert tensors[f"{name}.offsets"].tolist() == ends.tolist()


@for_each("name", [name for name, dtype in DTYPES.items() if not dtype.is_bits])
def test_a_column_is_the_array_that_safetensors_gives(name: str) -> None:
    schema = Schema({"x": Array(name, (3,)), "y": Ragged(name)})
    data, _ = built(schema, samples_of(schema, 6))
    arrays, opened = safetensors.numpy.load(data), SuperSample(data)
    for column in schema:
        assert opened.column(column).dtype == arrays[column].dtype
        assert np.array_equal(opened.column(column).view("u1"), arrays[column].view("u1"))


def test_columns_are_views_of_the_buffer() -> None:
    data = bytearray(built(EVERY_KIND, samples_of(EVERY_KIND, 4))[0])
    opened = SuperSample(data)
    for name in EVERY_KIND:
        start, end = opened.head.row_range(name, 0, 4)
        data[start:end] = b"\0" * (end - start)
        assert not opened.column(name).any()


def test_a_sample_owns_its_memory() -> None:
    data = bytearray(built(EVERY_KIND, samples_of(EVERY_KIND, 2))[0])
    sample = SuperSample(data)[1]
    before = {name: raw(value) for name, value in sample.items()}
    data[:] = bytes(len(data))
    assert {name: raw(value) for name, value in sample.items()} == before


def test_the_same_samples_give_the_same_bytes_and_the_builder_starts_anew() -> None:
    builder = SuperSampleBuilder(EVERY_KIND)
    made = []
    for _ in range(2):
        for sample in samples_of(EVERY_KIND, 5):
            builder.add(EVERY_KIND.encode(sample))
        made.append(builder.finish(ORIGIN))
        assert len(builder) == 0
    assert made[0] == made[1]


def test_the_manifest_entry_describes_the_object() -> None:
    data, packed = built(EVERY_KIND, samples_of(EVERY_KIND, 5))
    head = Head.parse(data, len(data))
    assert (packed.ordinal, packed.samples, packed.size_bytes, packed.tag) == (3, 5, len(data), "")
    assert packed.head_bytes == head.head_bytes
    assert packed.head_crc32c == crc32c(data[: head.head_bytes])
    assert packed.crc32c == crc32c(data)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_the_builder_knows_its_size_before_and_after_a_sample(schema: Schema) -> None:
    builder = SuperSampleBuilder(schema)
    for sample in samples_of(schema, 7):
        values = schema.encode(sample)
        promised = builder.size_with(values)
        builder.add(values)
        assert builder.size_bytes == promised
    data, _ = builder.finish(ORIGIN)
    assert len(data) == promised + Head.parse(data, len(data)).header_bytes


def test_a_super_sample_needs_a_sample() -> None:
    with pytest.raises(SchemaError, match="at least one sample"):
        SuperSampleBuilder(EVERY_KIND).finish(ORIGIN)


def test_the_head_alone_opens_an_object_and_says_where_every_value_is() -> None:
    samples = samples_of(EVERY_KIND, 6)
    data, packed = built(EVERY_KIND, samples)
    head = Head.parse(data[: packed.head_bytes], len(data))
    assert (head.samples, head.origin, head.schema) == (6, ORIGIN, EVERY_KIND)
    assert head.data_crc32c == crc32c(data[head.header_bytes :])
    for name, column in EVERY_KIND.items():
        start, end = head.row_range(name, 2, 5)
        assert data[start:end] == b"".join(column.encode(sample[name]) for sample in samples[2:5])
        assert head.is_in_head(name) == (head.row_range(name, 0, 6)[1] <= head.head_bytes)


def test_the_ranges_of_any_rows_are_those_of_each() -> None:
    body, _ = built(EVERY_KIND, samples_of(EVERY_KIND, 6))
    head = Head.parse(body, len(body))
    rows = np.array([5, 0, 3, 3])
    for name in EVERY_KIND:
        starts, ends = head.row_ranges(name, rows)
        assert list(zip(starts, ends, strict=True)) == [head.row_range(name, row, row + 1) for row in rows.tolist()]
    assert all(len(found) == 0 for found in head.row_ranges("jpeg", rows[:0]))


def test_small_columns_are_in_the_head_and_large_ones_behind_it() -> None:
    schema = Schema({"a": Array("uint8", 65), "b": Array("uint8", 64), "c": Array("int64"), "d": Bytes(), "e": Text()})
    data, _ = built(schema, samples_of(schema, 3))
    head = Head.parse(data, len(data))
    assert [name for name in schema if head.is_in_head(name)] == ["b", "c"]
    names = [tensor.name for tensor in tensorfile.parse_header(data, len(data)).tensors]
    assert names == ["d.offsets", "e.offsets", "c", "__crc32c__", "b", "a", "d", "e"]


def test_one_byte_less_than_the_head_is_not_enough() -> None:
    data, packed = built(EVERY_KIND, samples_of(EVERY_KIND, 6))
    with pytest.raises(FormatError, match="is cut off after"):
        Head.parse(data[: packed.head_bytes - 1], len(data))


@pytest.mark.parametrize("name", list(EVERY_KIND))
def test_a_damaged_value_is_found_by_its_own_checksum_and_named(name: str) -> None:
    column = EVERY_KIND[name]
    samples = [sample for sample in samples_of(EVERY_KIND, 60) if raw(sample[name])][:6]
    data, _ = built(EVERY_KIND, samples)
    head = Head.parse(data, len(data))
    start, end = head.row_range(name, 1, 5)
    good = bytearray(data[start:end])
    head.verify_rows(name, 1, memoryview(good))
    good[head.row_range(name, 3, 4)[0] - start] ^= 1
    with pytest.raises(ChecksumError, match=f"column '{name}' of row 3 "):
        head.verify_rows(name, 1, memoryview(good))
    assert column.element_bytes


def test_any_flipped_bit_of_the_data_is_found_by_verify() -> None:
    data = bytearray(built(Schema({"x": Text()}), [{"x": "abc"}, {"x": ""}])[0])
    start = Head.parse(data, len(data)).header_bytes
    for bit in range(start * 8, len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises((ChecksumError, FormatError)):
            SuperSample(data).verify()
        data[bit // 8] ^= 1 << bit % 8


def test_a_row_that_is_not_there_is_an_index_error() -> None:
    opened = SuperSample(built(EVERY_KIND, samples_of(EVERY_KIND, 2))[0])
    for row in (2, -3):
        with pytest.raises(IndexError, match="out of range: the super-sample has 2 rows"):
            opened[row]


@for_each(
    ("key", "value", "problem"),
    [
        ("stoker", None, "not a super-sample"),
        ("stoker", "2", "use a newer stoker"),
        ("dataset", None, "no 'dataset'"),
        ("run", None, "no 'run'"),
        ("run", "../../../secret", "'../../../secret'"),
        ("run", "0123456789ABCDEF", "'0123456789ABCDEF'"),
        ("ordinal", None, "no 'ordinal'"),
        ("ordinal", "-1", "'-1'"),
        ("ordinal", "1_0", "'1_0'"),
        ("ordinal", "٣", "'٣'"),
        ("ordinal", "9" * 5000, "'999"),
        ("crc32c", None, "no 'crc32c'"),
        ("crc32c", "-0000001", "'-0000001'"),
        ("schema", None, "no 'schema'"),
        ("schema", "[]", "at least one column"),
        ("schema", "[" * 100_000, "not valid JSON"),
        ("schema", Schema({"y": Array("uint8")}).to_json(), "not those of the schema"),
        ("schema", Schema({"x": Array("int8")}).to_json(), "not those of the schema"),
        ("schema", Schema({"x": Bytes()}).to_json(), "not those of the schema"),
        ("schema", Schema({"x": Array("uint8", 1)}).to_json(), "not those of the schema"),
        ("schema", Schema({"x": Array("uint8"), "y": Array("uint8")}).to_json(), "not those of the schema"),
    ],
)
def test_missing_or_wrong_metadata_is_a_format_error(key: str, value: str | None, problem: str) -> None:
    def change(metadata: dict[str, str]) -> None:
        metadata.pop(key) if value is None else metadata.update({key: value})

    data, _ = built(Schema({"x": Array("uint8")}), [{"x": 1}, {"x": 2}])
    with pytest.raises(FormatError, match=problem):
        SuperSample(rewritten(data, change))


@pytest.mark.parametrize("offsets", [[1, 2, 3], [0, 4, 3], [0, -1, 3], [0, 1, 2], [0, 1, 4], [0, 1 << 62, 3]])
def test_offsets_that_do_not_rise_to_the_end_are_a_format_error(offsets: list[int]) -> None:
    data, _ = built(Schema({"x": Text()}), [{"x": "a"}, {"x": "bc"}])
    start = Head.parse(data, len(data)).starts["x.offsets"]
    with pytest.raises(FormatError, match="offsets of column 'x' do not rise from 0 to 3"):
        SuperSample(data[:start] + struct.pack("<3q", *offsets) + data[start + 24 :])


def test_a_plain_safetensors_file_is_not_a_super_sample() -> None:
    with pytest.raises(FormatError, match="this is not a super-sample"):
        SuperSample(safetensors.numpy.save({"x": np.zeros(3, np.uint8)}))


def test_a_super_sample_without_samples_is_a_format_error() -> None:
    data, _ = built(Schema({"x": Array("uint8")}), [{"x": 1}])
    metadata = tensorfile.parse_header(data, len(data)).metadata
    tensors = tensorfile.lay_out([("__crc32c__", DTYPES["uint32"], (0, 1)), ("x", DTYPES["uint8"], (0,))])
    with pytest.raises(FormatError, match=r"no __crc32c__ of shape \[samples, columns\]"):
        SuperSample(tensorfile.encode_header(metadata, tensors))


def test_tensors_in_another_order_are_a_format_error() -> None:
    data, _ = built(Schema({"x": Array("uint8"), "y": Array("uint8")}), [{"x": 1, "y": 2}])
    header = tensorfile.parse_header(data, len(data))
    first, x, y = header.tensors
    swapped = tensorfile.lay_out((t.name, t.dtype, t.shape) for t in (first, y, x))
    with pytest.raises(FormatError, match="not in the format's order"):
        SuperSample(tensorfile.encode_header(header.metadata, swapped) + data[header.header_bytes :])


def test_the_origin_is_read_back() -> None:
    origin = PackOrigin(dataset='a "quoted" dätaset', run="f" * 16, ordinal=123_456_789)
    data, _ = built(EVERY_KIND, samples_of(EVERY_KIND, 1), origin)
    assert Head.parse(data, len(data)).origin == origin


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_everything_in_the_head_is_aligned(count: int) -> None:
    schema = every_dtype()
    opened = SuperSample(built(schema, samples_of(schema, count))[0])
    views = {name: opened.column(name) for name in schema if opened.head.is_in_head(name)}
    assert len(views) == 2 * len(DTYPES)
    for name, view in (views | dict(opened.head.offsets) | {"__crc32c__": opened.head.checksums}).items():
        assert view.ctypes.data % view.itemsize == 0, name


def test_an_object_larger_than_any_super_sample_is_refused_by_its_size_alone() -> None:
    data, _ = built(EVERY_KIND, samples_of(EVERY_KIND, 1))
    with pytest.raises(FormatError, match="larger than any super-sample"):
        Head.parse(data, MAX_OBJECT_BYTES + 1)
