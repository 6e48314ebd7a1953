"""An erasure code over byte buffers: an object is cut into ``data`` shards, and ``parity`` more restore lost ones.

The code is systematic: data shards are the object's own bytes, views of its memory, and only parity is computed.
With one or two parity shards that is done in NumPy as below; with more it is Reed-Solomon by zfec, whose generator
is a Vandermonde matrix made systematic (L. Rizzo, "Effective Erasure Codes for Reliable Computer Communication
Protocols", ACM CCR 27(2), 1997, sections 2 and 3). Any ``data`` of the shards restore the object.

Shards are as long as the first; the last ones of an object whose size does not divide are shorter or empty. They
count as ended by zeros, which are in no copy of the object: nothing is padded in memory or on the wire. An empty
shard is never lost, so of a small object fewer than ``data`` shards may be enough.

NumPy and zfec release the interpreter lock while they compute.

Of data shards d_0, d_1, … one parity shard is P = d_0 + d_1 + …, and the second is Q = d_0 + g·d_1 + g²·d_2 + …, in
GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1, with g = 2: the Reed-Solomon code of RAID-6 (H. P. Anvin, "The mathematics
of RAID-6", 2004, sections 1 to 4). Q comes by Horner's rule, so nothing is multiplied but by g, which is four vector
instructions: 10+2 is encoded at 7 GB/s and restored at 4 GB/s, where a table of products, as zfec has it, allows
1.4. And what most reads lack is one data shard, which P restores at the speed of XOR, 20 to 45 GB/s.

There, shards are ``uint8 [bytes]``, none longer than those before it; where one has ended it counts as zeros.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker._base.plugins import require_extra
from stoker.errors import ConfigError, LostShardsError

Bytes = NDArray[np.uint8]

_CHUNK_BYTES = 128 << 10
"""Of each shard at once: what is added up stays in a processor's second cache."""
_REDUCER = 0x1D  # x^8 modulo the polynomial
_POWERS = [1]
"""Of g: all elements but zero."""
while len(_POWERS) < 255:
    _POWERS.append(_POWERS[-1] << 1 & 0xFF ^ (_REDUCER if _POWERS[-1] > 0x7F else 0))
_LOGS = {power: exponent for exponent, power in enumerate(_POWERS)}


def write_p(shards: Sequence[Bytes], p: Bytes) -> None:
    """Write the sum of shards over ``p``, which ends no later than the first of them, and they with it.

    A single shard that is lost is the sum of P and all others.
    """
    first, *others = (shard[: len(p)] for shard in shards)
    p[:] = first
    for other in others:
        _add(p, other)


def write_p_and_q(shards: Sequence[Bytes], p: Bytes, q: Bytes) -> None:
    """Write both parity shards over ``p`` and ``q``, which are as long as the first shard."""
    scratch = np.empty(min(_CHUNK_BYTES, len(p)), np.uint8)
    for start in range(0, len(p), _CHUNK_BYTES):
        piece = slice(start, start + _CHUNK_BYTES)
        _write_sums([shard[piece] for shard in shards], p[piece], q[piece], scratch)


def write_lost(shards: Sequence[Bytes], lost: Sequence[int], parity: Mapping[int, Bytes]) -> None:
    """Write one or two lost data shards where they belong among the others.

    Without the others' part, P is d_x + d_y and Q is g^x·d_x + g^y·d_y, so d_x is (g^y·P + Q) / (g^x + g^y). Where only
    d_x is lost, it is P, or Q / g^x.

    Args:
        shards: all data shards. What is in the lost ones does not matter.
        lost: their positions, in order.
        parity: P under 0 and Q under 1, as long as the first shard; at least as many as are lost.
    """
    x, y = lost[0], lost[-1]
    if x == y and 0 in parity:
        write_p([parity[0], *shards[:x], *shards[x + 1 :]], shards[x])
        return
    divisor = x if x == y else _LOGS[_POWERS[x] ^ _POWERS[y]]
    weights = (0 if x == y else _POWERS[(y - divisor) % 255], _POWERS[-divisor % 255])
    memory = np.empty((3, min(_CHUNK_BYTES, len(parity[1]))), np.uint8)
    for start in range(0, len(parity[1]), _CHUNK_BYTES):
        pieces = [shard[start : start + _CHUNK_BYTES] for shard in shards]
        sums, scratch = memory[:2, : len(pieces[0])], memory[2]
        _write_sums(
            [piece[: 0 if each in lost else None] for each, piece in enumerate(pieces)], sums[0], sums[1], scratch
        )
        for which, shard in parity.items():
            _add(sums[which], shard[start : start + _CHUNK_BYTES])
        _write_weighted(weights, sums, pieces[x], scratch)
        if x != y:
            write_p([sums[0], pieces[x]], pieces[y])


def _write_sums(shards: Sequence[Bytes], p: Bytes, q: Bytes, scratch: Bytes) -> None:
    """Write the sum of shards over ``p`` and that with weights over ``q``; any shard may be shorter or empty."""
    p[:] = q[:] = 0
    for shard in reversed(shards):
        _double(q, scratch)
        _add(p, shard)
        _add(q, shard)


def _write_weighted(weights: Iterable[int], terms: Iterable[Bytes], out: Bytes, scratch: Bytes) -> None:
    """Write the sum of terms, times constants, over ``out``: Horner's rule over the bits of all constants at once."""
    out[:] = 0
    for bit in reversed(range(8)):
        _double(out, scratch)
        for weight, term in zip(weights, terms, strict=True):
            if weight >> bit & 1:
                _add(out, term[: len(out)])


def _add(total: Bytes, term: Bytes) -> None:
    """Add a term, which may end before the total does."""
    part = total[: len(term)]
    np.bitwise_xor(part, term, out=part)


def _double(total: Bytes, scratch: Bytes) -> None:
    """Multiply by g: shift each byte to the left, and reduce those whose highest bit falls out."""
    reduction = scratch[: len(total)]
    np.right_shift(total.view(np.int8), 7, out=reduction.view(np.int8))  # all ones where the highest bit is set
    np.bitwise_and(reduction, _REDUCER, out=reduction)
    np.add(total, total, out=total)
    np.bitwise_xor(total, reduction, out=total)


_MAX_SHARDS = 256
"""Elements of GF(2^8), each the place of one shard."""
_CODE_TEXT = re.compile(r"([1-9]\d{0,2})\+(0|[1-9]\d{0,2})", re.ASCII)
_ZEROS = bytes(_CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class ErasureCode:
    """How objects are cut.

    Attributes:
        data: shards that restore an object.
        parity: shards besides: as many may be lost.

    Raises:
        ConfigError: there is no data shard, a negative number of parity shards, or more than 256 shards.
    """

    data: int = 10
    parity: int = 2

    def __post_init__(self) -> None:
        if self.data < 1 or self.parity < 0 or self.shards > _MAX_SHARDS:
            raise ConfigError(
                f"a code has at least 1 data shard, no negative number of others, and {_MAX_SHARDS} in all at most,"
                f" not {self}"
            )

    def __str__(self) -> str:
        return f"{self.data}+{self.parity}"

    @classmethod
    def parse(cls, text: str) -> ErasureCode:
        """Return the code of a text such as ``10+2``.

        Raises:
            ConfigError: it is none.
        """
        match = _CODE_TEXT.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r:.40} is not a code; write data+parity shards, for example 10+2")
        return cls(int(match[1]), int(match[2]))

    @property
    def shards(self) -> int:
        """Of an object."""
        return self.data + self.parity

    def shard_bytes(self, size_bytes: int) -> int:
        """Return the length of an object's parity shards, and of its longest data shard: the first."""
        if size_bytes < 0:
            raise ConfigError(f"an object cannot have {size_bytes} bytes")
        return -(-size_bytes // self.data)

    def data_ranges(self, size_bytes: int) -> list[tuple[int, int]]:
        """Return the half-open ranges of an object that are its data shards; the last ones may be short, or empty."""
        shard_bytes = self.shard_bytes(size_bytes)
        ends = [min(shard_bytes * count, size_bytes) for count in range(self.data + 1)]
        return list(pairwise(ends))

    def data_views(self, data: memoryview) -> list[memoryview]:
        """Return the data shards of an object, in its own memory."""
        return [data[start:end] for start, end in self.data_ranges(len(data))]


def require_codec(code: ErasureCode) -> None:
    """Load what computes a code's parity, so that what is not installed is known before the first object.

    Raises:
        MissingExtraError: the code has more than two parity shards, and zfec is not installed.
    """
    if code.parity > 2:
        _create_zfec(code, "Encoder")


def encode(data: memoryview, code: ErasureCode, out: Sequence[memoryview]) -> None:
    """Write an object's parity shards.

    Args:
        data: the object, contiguous bytes. Its data shards are its :meth:`ErasureCode.data_ranges`.
        code: how it is cut.
        out: one writable view for each parity shard, :meth:`ErasureCode.shard_bytes` long; what was in it is
            overwritten.

    Raises:
        ConfigError: ``out`` does not fit the code and the object's size.
        MissingExtraError: as for :func:`require_codec`.
    """
    shard_bytes = code.shard_bytes(len(data))
    if [len(each) for each in out] != [shard_bytes] * code.parity:
        raise ConfigError(f"{code} of {len(data)} bytes has {code.parity} parity shards of {shard_bytes} bytes")
    shards = code.data_views(data)
    if code.parity == 1:
        write_p(_create_arrays(shards), *_create_arrays(out))
    elif code.parity == 2:
        write_p_and_q(_create_arrays(shards), *_create_arrays(out))
    elif code.parity:
        encoder, wanted = _create_zfec(code, "Encoder"), tuple(range(code.data, code.shards))
        for start, end in _split_ranges(shards):
            computed = encoder.encode(tuple(_slice_or_zeros(shard, start, end) for shard in shards), wanted)
            for shard, piece in zip(out, computed, strict=True):
                shard[start:end] = piece


def restore(
    code: ErasureCode, size_bytes: int, into: memoryview, parity: Mapping[int, memoryview], missing: Collection[int]
) -> None:
    """Write the data shards of an object that are missing where they belong, and touch no other byte.

    Args:
        code: how the object was cut.
        size_bytes: of the object.
        into: at least that long; the data shards that are not missing are in their :meth:`ErasureCode.data_ranges` of
            it.
        parity: position (from ``code.data``) → parity shard, :meth:`ErasureCode.shard_bytes` long: those that came.
        missing: positions (below ``code.data``) of data shards that did not come.

    Raises:
        LostShardsError: more are missing than there is parity.
        ConfigError: a position or a length does not fit the code and the object's size.
        MissingExtraError: as for :func:`require_codec`.
    """
    _check_arguments(code, size_bytes, into, parity, missing)
    shards = code.data_views(into[:size_bytes])
    lost = sorted(position for position in set(missing) if len(shards[position]))
    if len(lost) > len(parity):
        raise LostShardsError(
            f"{len(lost)} data shards of {size_bytes} bytes in {code} are missing, and {len(parity)} parity shards are"
            " there; read the object from the bucket"
        )
    if lost and code.parity > 2:
        _restore_by_zfec(code, shards, sorted(parity.items()), lost)
    elif lost:
        by_number = {position - code.data: np.frombuffer(shard, np.uint8) for position, shard in parity.items()}
        write_lost(_create_arrays(shards), lost, by_number)


def _check_arguments(
    code: ErasureCode, size_bytes: int, into: memoryview, parity: Mapping[int, memoryview], missing: Collection[int]
) -> None:
    shard_bytes = code.shard_bytes(size_bytes)
    if len(into) < size_bytes:
        raise ConfigError(f"an object of {size_bytes} bytes does not fit in {len(into)}")
    if not all(0 <= position < code.data for position in missing):
        raise ConfigError(f"data shards of {code} are 0 to {code.data - 1}, not {sorted(missing)}")
    if not all(code.data <= position < code.shards for position in parity):
        raise ConfigError(f"parity shards of {code} are {code.data} to {code.shards - 1}, not {sorted(parity)}")
    if wrong := {position: len(shard) for position, shard in parity.items() if len(shard) != shard_bytes}:
        raise ConfigError(f"parity shards have {shard_bytes} bytes in {code} of {size_bytes}, not {wrong}")


def _create_arrays(shards: Iterable[memoryview]) -> list[Bytes]:
    return [np.frombuffer(shard, np.uint8) for shard in shards]


def _restore_by_zfec(
    code: ErasureCode, shards: Sequence[memoryview], parity: Sequence[tuple[int, memoryview]], lost: Sequence[int]
) -> None:
    """Write lost data shards, piece by piece, from all others and as many parity shards as are needed."""
    decoder = _create_zfec(code, "Decoder")
    for start, end in _split_ranges(shards):
        # What is behind a shard's end is known to be zero: nothing is lost there.
        wanted = [position for position in lost if len(shards[position]) > start]
        stand_ins = dict(zip(wanted, parity, strict=False))
        if not stand_ins:
            continue
        known = [stand_ins.get(position, (position, shard)) for position, shard in enumerate(shards)]
        pieces = decoder.decode(
            tuple(_slice_or_zeros(shard, start, end) for _, shard in known), tuple(position for position, _ in known)
        )
        for position in wanted:
            shards[position][start:end] = pieces[position]


def _split_ranges(shards: Sequence[memoryview]) -> Iterator[tuple[int, int]]:
    """Yield ranges of the longest shard: every shard has all of a range, or nothing of it."""
    for begin, end in pairwise(sorted({0, *map(len, shards)})):
        for start in range(begin, end, _CHUNK_BYTES):
            yield start, min(start + _CHUNK_BYTES, end)


def _slice_or_zeros(shard: memoryview, start: int, end: int) -> memoryview | bytes:
    """Return a range of a shard, or zeros if it ends before. zfec reads by the last length that it is given."""
    return shard[start:end] if len(shard) > start else _ZEROS[: end - start]


@lru_cache(maxsize=32)
def _create_zfec(code: ErasureCode, class_name: str) -> Any:
    """Return zfec's tables for a code. They are read only, by any number of threads."""
    with require_extra(f"a code of more than two parity shards, such as {code},", "warm"):
        import zfec
    return getattr(zfec, class_name)(code.data, code.shards)
