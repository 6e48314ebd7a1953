"""Samples as bytes: what comes back is what went in, to the bit and the type, or a typed error says why it cannot."""

from __future__ import annotations

import collections
import enum
import math
import pickle
import struct
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from stoker.errors import FormatError, SampleError
from stoker_torch._disk_cache import MAX_DEPTH, decode_sample, encode_sample
from support.cases import for_each
from support.same import same

RANDOM = torch.Generator().manual_seed(3)  # test names hold the values: they are the same in every process
TENSORS = [
    torch.tensor(3),
    torch.arange(6).reshape(2, 3),
    torch.rand(2, 0, 3, generator=RANDOM),
    torch.rand(4, 4, generator=RANDOM).t(),
    torch.rand(8, generator=RANDOM)[::2],
    torch.as_strided(torch.rand(3, generator=RANDOM), (1,), (0,)),
    torch.from_numpy(np.zeros(0, np.int64)),
    torch.tensor([True, False]),
    torch.rand(3, generator=RANDOM).to(torch.bfloat16),
    torch.rand(3, generator=RANDOM).to(torch.float8_e4m3fn),
    torch.rand(3, generator=RANDOM).to(torch.float8_e5m2),
    torch.tensor([1, 2], dtype=torch.uint16),
    torch.view_as_complex(torch.rand(3, 2, generator=RANDOM)).conj(),
    torch.view_as_complex(torch.rand(3, 2, generator=RANDOM)).conj().imag,
    torch.tensor([math.nan, math.inf, -0.0]),
]
ARRAYS = [
    np.array(3),
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(9)[::-2],
    np.zeros((3, 0), np.float16),
    np.array([1 + 2j, 3], np.complex64),
    np.array(["a", "längst"]),
    np.array([b"a", b"bc"]),
    np.array(["2020-01-01", "NaT"], "M8[ns]"),
    np.array([3, 4], "m8"),
    np.array([True, False]),
    np.float32(1.5),
    np.float64(1.5),
    np.str_("hé"),
    np.bytes_(b"x"),
    np.bool_(True),
    np.datetime64("2020-01-01T00:00"),
]
PLAIN: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    10**300,
    1.5,
    -0.0,
    math.nan,
    math.inf,
    "",
    "é\0\ud800",
    b"",
    b"\0\xff",
    (),
    [],
    {},
]
NESTED = [
    (torch.zeros(3), 7),
    {"image": np.zeros((2, 2), np.uint8), "text": "x", "": [], "list": [1, (2.0, None), {"é": b"abc"}]},
    ["list", "bytes", ("tensor", "<f4"), ["dict", {"dict": "dict"}]],
]


@for_each("sample", [*TENSORS, *ARRAYS, *PLAIN, *NESTED], ids=lambda sample: repr(sample)[:40])
def test_a_sample_comes_back_with_its_types_and_bits(sample: Any) -> None:
    assert same(decode_sample(encode_sample(sample)), sample)


def test_numbers_of_many_kinds_lie_side_by_side_without_disturbing_each_other() -> None:
    sample = [b"x", torch.rand(3), b"yy", np.float64(2), np.arange(5, dtype=np.uint8), torch.tensor(1j)]
    assert same(decode_sample(encode_sample(sample)), sample)


def test_a_slice_of_a_mapped_file_comes_back_as_a_plain_array(tmp_path: Path) -> None:
    np.arange(10).tofile(tmp_path / "numbers")
    mapped = np.memmap(tmp_path / "numbers", np.int64)
    assert same(decode_sample(encode_sample(mapped[2:5])), np.arange(2, 5))


@pytest.mark.parametrize("wrap", [bytes, bytearray])
def test_what_is_decoded_may_be_written_to_and_changes_no_other(wrap: type[bytes] | type[bytearray]) -> None:
    encoded = wrap(encode_sample({"a": torch.zeros(3), "b": np.zeros(3)}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = decode_sample(encoded)
        first["a"] += 1
        first["b"] += 1
    assert torch.equal(first["a"], torch.ones(3))
    again = decode_sample(encode_sample({"a": torch.zeros(3), "b": np.zeros(3)}))
    assert torch.equal(again["a"], torch.zeros(3))


def test_a_small_piece_of_a_large_tensor_takes_only_its_own_bytes() -> None:
    assert len(encode_sample(torch.zeros(1_000_000)[3:5])) < 200


class Point(NamedTuple):
    x: int


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


UNSUPPORTED = {
    "builtins.object": object(),
    "builtins.set": {1},
    "bytearray": bytearray(b"x"),
    "builtins.complex": 1j,
    "Point": Point(1),
    "Colour": Colour.RED,
    "Text": Text("x"),
    "OrderedDict": collections.OrderedDict(a=1),
    "PosixPath": Path("x"),
    "Parameter": torch.nn.Parameter(torch.zeros(1)),
    "requires_grad=True": torch.zeros(1, requires_grad=True),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.zeros(1, device="meta"),
    "dtype object": np.array([object()]),
    "MaskedArray": np.ma.masked_array([1]),
    r"dtype \[\('a'": np.zeros(1, [("a", "i4")]),
    "the key 3 of sample": {3: "x"},
    "digits": 10**5000,
}


@for_each(("named", "sample"), UNSUPPORTED.items(), ids=UNSUPPORTED)
def test_anything_else_is_an_error_that_names_it(named: str, sample: Any) -> None:
    with pytest.raises(SampleError, match=named):
        encode_sample(sample)


def test_the_error_says_where_in_the_sample_and_what_to_do() -> None:
    with pytest.raises(SampleError, match=r"sample\['boxes'\]\[1\] is a builtins.set.*encode= and decode="):
        encode_sample({"boxes": [1, {2}]})


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_nesting_is_limited_so_that_a_sample_that_contains_itself_is_an_error() -> None:
    assert decode_sample(encode_sample(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    with pytest.raises(SampleError, match="deep"):
        encode_sample(nested(MAX_DEPTH + 1))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SampleError, match="contains itself"):
        encode_sample(endless)


def crafted(structure: str, values: bytes = b"") -> bytes:
    """An encoded sample whose frame is right, whatever its structure."""
    text = structure.encode()
    body = text + b"\0" * (-len(text) % 8) + values
    return struct.pack("<4sHxxIxxxxQ", b"SKSM", 1, len(text), 24 + len(body)) + body


@for_each(
    "structure",
    [
        "",
        "{}",
        "[]",
        "[1]",
        '["set",1]',
        '["dict"]',
        '["dict",[]]',
        '["dict",{"a":1,"a":2}]',
        '["bytes"]',
        '["bytes",-8]',
        '["bytes",true]',
        '["bytes",8.0]',
        '["bytes",9]',
        '["bytes",281474976710656]',
        '["bytes",99999999999999999999]',
        '["tensor","float32",[3]]',
        '["tensor","float32",[-2]]',
        '["tensor","float32",2]',
        '["tensor","load",[2]]',
        '["tensor",["float32"],[2]]',
        '["tensor","float32",[0,281474976710655,281474976710655]]',
        '["array","O",[1]]',
        '["array","|O",[1]]',
        '["array","<f7",[1]]',
        '["array","<M8[xx]",[1]]',
        '["array","|V8",[1]]',
        '["array","<i4,<i4",[1]]',
        '["array","<U999999999",[1]]',
        '["array","<f4",[' + ",".join("1" * 70) + "]]",
        '["scalar","<f4",[2]]',
        '["list",' * 40 + "1" + "]" * 40,
        "[" * 100_000,
        "9" * 5000,
        "1",
    ],
    ids=lambda text: text[:40],
)
def test_a_structure_that_is_none_or_does_not_fit_the_values_is_a_format_error(structure: str) -> None:
    with pytest.raises(FormatError):
        decode_sample(crafted(structure, bytes(8)))


def test_the_crafted_frame_is_one_that_is_read() -> None:
    assert decode_sample(crafted('["bytes",8]', b"abcdefgh")) == b"abcdefgh"
    assert decode_sample(crafted("1")) == 1


def test_a_pickle_is_not_run() -> None:
    with pytest.raises(FormatError):
        decode_sample(pickle.dumps(print))
