from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save

from stoker._format import tensorfile
from stoker._format.tensorfile import DTYPES, dtype_of
from stoker.errors import SchemaError
from support.cases import for_each


@for_each("name", list(DTYPES))
def test_every_dtype_is_one_of_torch_with_the_same_size_and_safetensors_spells_it_so(name: str) -> None:
    dtype = DTYPES[name]
    tensor = torch.zeros(3, dtype=getattr(torch, name))
    assert tensor.element_size() == dtype.size_bytes
    (written,) = tensorfile.parse_header(file := save({"x": tensor}), len(file)).tensors
    assert written.dtype is dtype


@for_each("name", list(DTYPES))
def test_a_dtype_is_found_by_its_name_its_torch_dtype_and_itself(name: str) -> None:
    dtype = DTYPES[name]
    assert dtype_of(name) is dtype
    assert dtype_of(f"torch.{name}") is dtype
    assert dtype_of(getattr(torch, name)) is dtype
    assert dtype_of(dtype) is dtype


@for_each("name", [name for name, dtype in DTYPES.items() if not dtype.is_bits])
def test_a_dtype_that_numpy_has_is_found_by_its_numpy_dtype_of_either_byte_order(name: str) -> None:
    assert dtype_of(np.dtype(name)) is DTYPES[name]
    assert dtype_of(np.dtype(name).newbyteorder(">")) is DTYPES[name]
    assert dtype_of(np.dtype(name).type) is DTYPES[name]


@for_each("name", list(DTYPES))
def test_bits_are_held_in_little_endian(name: str) -> None:
    assert DTYPES[name].holder.str[0] in "<|"


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_what_numpy_lacks_is_held_as_bits(name: str) -> None:
    assert DTYPES[name].is_bits
    assert DTYPES[name].holder.kind == "u"


@for_each(
    "name",
    [
        "complex64", "f4", "<f4", "float", "", "(,f4", "(2,", "f4,f4", "10000000000000000000000f4", "\0", "a", "U9",
        None, 3, ..., (1, 2), {"names": 1}, complex, str, object, np.complex64, np.dtype("M8[s]"), np.dtype("U3"),
        torch.complex64, torch.quint8,
    ],
    ids=repr,
)  # fmt: skip
def test_anything_else_is_refused_with_the_list_of_what_may_be_used(name: object) -> None:
    with pytest.raises(SchemaError, match=r"cannot be stored; use one of bool, uint8, .*float8_e5m2"):
        dtype_of(name)
