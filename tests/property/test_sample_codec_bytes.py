"""Samples of every kind survive encoding; bytes of any kind decode to a sample or a typed error, in bounded memory."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from stoker.errors import FormatError
from stoker_torch._disk_cache import decode_sample, encode_sample
from support.memory import memory_of
from support.same import same

ARRAYS = st_numpy.arrays(
    st.one_of(
        st_numpy.boolean_dtypes(),
        st_numpy.integer_dtypes(endianness="?"),
        st_numpy.floating_dtypes(endianness="?"),
        st_numpy.complex_number_dtypes(),
        st_numpy.unicode_string_dtypes(max_len=5),
        st_numpy.byte_string_dtypes(max_len=5),
        st_numpy.datetime64_dtypes(),
        st_numpy.timedelta64_dtypes(),
    ),
    st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)
TENSORS = st_numpy.arrays(
    st.sampled_from(["u1", "i8", "f2", "f4", "c8", "?"]), st_numpy.array_shapes(min_dims=0, min_side=0, max_side=3)
).map(torch.from_numpy)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), ARRAYS, TENSORS)
SAMPLES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(SAMPLES)
def test_every_sample_comes_back_as_it_was(sample: Any) -> None:
    assert same(decode_sample(encode_sample(sample)), sample)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_format_error(data: bytes) -> None:
    try:
        decode_sample(data)
    except FormatError:
        return
    raise AssertionError("random bytes were taken for a sample")


SEED = {
    "image": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "mask": np.array([[True], [False]]),
    "name": np.array(["a", "bcd"]),
    "raw": b"0123456789",
    "boxes": [(1, 2.5), (None, "x")],
    "when": np.datetime64("2020-01-01"),
}
MAX_BYTES = 1 << 20
HOSTILE: list[Any] = [
    -1,
    0,
    1,
    2**31,
    2**47,
    2**48,
    2**63,
    2**64,
    10**40,
    1.5,
    True,
    None,
    [],
    {},
    "",
    "list",
    "float32",
    "<U9999999",
]


def mutated_json(value: Any, rng: random.Random) -> Any:
    """Return a structure with one hostile change somewhere in it."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return rng.choice(HOSTILE)
    copied: Any = value.copy()
    if isinstance(copied, dict):
        key = rng.choice(list(copied))
        copied[key] = mutated_json(copied[key], rng)
    elif rng.random() < 0.2:
        copied.pop(rng.randrange(len(copied)))
    else:
        place = rng.randrange(len(copied))
        copied[place] = mutated_json(copied[place], rng)
    return copied


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return an encoded sample with one hostile change: of a byte, of its length, or of its structure."""
    kind = rng.randrange(4)
    changed = bytearray(data)
    if kind == 0:
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del changed[rng.randrange(len(changed)) :]
    elif kind == 2:
        changed += rng.randbytes(rng.randrange(1, 20))
    else:
        (length,) = struct.unpack_from("<I", data, 8)
        text = json.dumps(mutated_json(json.loads(data[24 : 24 + length]), rng)).encode()
        body = text + bytes(-len(text) % 8) + data[24 + length + -length % 8 :]
        changed = bytearray(struct.pack("<4sHxxIxxxxQ", b"SKSM", 1, len(text), 24 + len(body)) + body)
    if kind in (1, 2) and len(changed) >= 24 and rng.random() < 0.5:
        struct.pack_into("<Q", changed, 16, len(changed))  # a length that is right
    return bytes(changed)


def test_ten_thousand_mutated_samples_decode_or_are_a_format_error_and_take_little_memory() -> None:
    data = bytes(encode_sample(SEED))
    outcomes: Counter[str] = Counter()
    longest = 0

    def work() -> None:
        nonlocal longest
        rng = random.Random(7)
        outcomes.clear()
        for _ in range(10_000):
            try:
                decode_sample(mutated(data, rng))
                outcomes["decoded"] += 1
            except FormatError as error:
                outcomes["refused"] += 1
                longest = max(longest, len(str(error)))

    assert memory_of(work, enough_bytes=MAX_BYTES).peak_bytes < MAX_BYTES
    assert outcomes["refused"] > 5000
    assert outcomes["decoded"] > 500  # changed values are values: they are the checksum's to find
    assert longest < 500
