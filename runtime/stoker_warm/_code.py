"""An erasure code over byte buffers: an object is cut into ``data`` shards, and ``parity`` more restore lost ones.

The code is systematic: data shards are the object's own bytes, views of its memory, and only parity is computed. With
one or two parity shards that is done in NumPy (:mod:`stoker_warm._parity`); with more it is Reed-Solomon by zfec, whose
generator is a Vandermonde matrix made systematic (L. Rizzo, "Effective Erasure Codes for Reliable Computer
Communication Protocols", ACM CCR 27(2), 1997, sections 2 and 3). Any ``data`` of the shards restore the object.

Shards are as long as the first; the last ones of an object whose size does not divide are shorter or empty. They count
as ended by zeros, which are in no copy of the object: nothing is padded in memory or on the wire. An empty shard is
never lost, so of a small object fewer than ``data`` shards may be enough.

NumPy and zfec release the interpreter lock while they compute.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from stoker.errors import ConfigError, LostShardsError, MissingExtraError
from stoker_warm._parity import Bytes, write_lost, write_p, write_p_and_q

__all__ = ["Code", "encode", "require_codec", "restore"]

_MOST_SHARDS = 256
"""Elements of GF(2^8), each the place of one shard."""
_TEXT = re.compile(r"([1-9]\d{0,2})\+(0|[1-9]\d{0,2})", re.ASCII)
_PIECE_BYTES = 128 << 10
"""Of each shard that zfec is given at once: it returns memory of its own, so this bounds that. Its speed is the same
from 16 KiB on; fewer pieces take the interpreter lock less often."""
_ZEROS = bytes(_PIECE_BYTES)


@dataclass(frozen=True, slots=True)
class Code:
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
        if self.data < 1 or self.parity < 0 or self.shards > _MOST_SHARDS:
            raise ConfigError(
                f"a code has at least 1 data shard, no negative number of others, and {_MOST_SHARDS} in all at most,"
                f" not {self}"
            )

    def __str__(self) -> str:
        return f"{self.data}+{self.parity}"

    @classmethod
    def parse(cls, text: str) -> Code:
        """Return the code of a text such as ``10+2``.

        Raises:
            ConfigError: it is none.
        """
        match = _TEXT.fullmatch(text)
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

    def cuts(self, size_bytes: int) -> list[tuple[int, int]]:
        """Return the half-open ranges of an object that are its data shards; the last ones may be short, or empty."""
        shard_bytes = self.shard_bytes(size_bytes)
        ends = [min(shard_bytes * count, size_bytes) for count in range(self.data + 1)]
        return list(pairwise(ends))


def require_codec(code: Code) -> None:
    """Load what computes a code's parity, so that what is not installed is known before the first object.

    Raises:
        MissingExtraError: the code has more than two parity shards, and zfec is not installed.
    """
    if code.parity > 2:
        _zfec(code, "Encoder")


def encode(data: memoryview, code: Code, out: Sequence[memoryview]) -> None:
    """Write an object's parity shards.

    Args:
        data: the object, contiguous bytes. Its data shards are its :meth:`Code.cuts`.
        code: how it is cut.
        out: one writable view for each parity shard, :meth:`Code.shard_bytes` long; what was in it is overwritten.

    Raises:
        ConfigError: ``out`` does not fit the code and the object's size.
        MissingExtraError: as for :func:`require_codec`.
    """
    shard_bytes = code.shard_bytes(len(data))
    if [len(each) for each in out] != [shard_bytes] * code.parity:
        raise ConfigError(f"{code} of {len(data)} bytes has {code.parity} parity shards of {shard_bytes} bytes")
    shards = [data[start:end] for start, end in code.cuts(len(data))]
    if code.parity == 1:
        write_p(_arrays(shards), *_arrays(out))
    elif code.parity == 2:
        write_p_and_q(_arrays(shards), *_arrays(out))
    elif code.parity:
        encoder, wanted = _zfec(code, "Encoder"), tuple(range(code.data, code.shards))
        for start, end in _pieces(shards):
            computed = encoder.encode(tuple(_piece(shard, start, end) for shard in shards), wanted)
            for shard, piece in zip(out, computed, strict=True):
                shard[start:end] = piece


def restore(
    code: Code, size_bytes: int, into: memoryview, parity: Mapping[int, memoryview], missing: Collection[int]
) -> None:
    """Write the data shards of an object that are missing where they belong, and touch no other byte.

    Args:
        code: how the object was cut.
        size_bytes: of the object.
        into: at least so long; the data shards that are not missing are in their :meth:`Code.cuts` of it.
        parity: position (from ``code.data``) → parity shard, :meth:`Code.shard_bytes` long: those that came.
        missing: positions (below ``code.data``) of data shards that did not come.

    Raises:
        LostShardsError: more are missing than there is parity.
        ConfigError: a position or a length does not fit the code and the object's size.
        MissingExtraError: as for :func:`require_codec`.
    """
    _check(code, size_bytes, into, parity, missing)
    shards = [into[start:end] for start, end in code.cuts(size_bytes)]
    lost = sorted(position for position in set(missing) if len(shards[position]))
    if len(lost) > len(parity):
        raise LostShardsError(
            f"{len(lost)} data shards of {size_bytes} bytes in {code} are missing, and {len(parity)} parity shards are"
            " there; read the object from the bucket"
        )
    if lost and code.parity > 2:
        _decode(code, shards, sorted(parity.items()), lost)
    elif lost:
        by_number = {position - code.data: np.frombuffer(shard, np.uint8) for position, shard in parity.items()}
        write_lost(_arrays(shards), lost, by_number)


def _check(
    code: Code, size_bytes: int, into: memoryview, parity: Mapping[int, memoryview], missing: Collection[int]
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


def _arrays(shards: Iterable[memoryview]) -> list[Bytes]:
    return [np.frombuffer(shard, np.uint8) for shard in shards]


def _decode(
    code: Code, shards: Sequence[memoryview], parity: Sequence[tuple[int, memoryview]], lost: Sequence[int]
) -> None:
    """Write lost data shards, piece by piece, from all others and as many parity shards as are needed."""
    decoder = _zfec(code, "Decoder")
    for start, end in _pieces(shards):
        # What is behind a shard's end is known to be zero: nothing is lost there.
        wanted = [position for position in lost if len(shards[position]) > start]
        stand_ins = dict(zip(wanted, parity, strict=False))
        if not stand_ins:
            continue
        known = [stand_ins.get(position, (position, shard)) for position, shard in enumerate(shards)]
        pieces = decoder.decode(
            tuple(_piece(shard, start, end) for _, shard in known), tuple(position for position, _ in known)
        )
        for position in wanted:
            shards[position][start:end] = pieces[position]


def _pieces(shards: Sequence[memoryview]) -> Iterator[tuple[int, int]]:
    """Yield ranges of the longest shard: every shard has all of a range, or nothing of it."""
    for begin, end in pairwise(sorted({0, *map(len, shards)})):
        for start in range(begin, end, _PIECE_BYTES):
            yield start, min(start + _PIECE_BYTES, end)


def _piece(shard: memoryview, start: int, end: int) -> memoryview | bytes:
    """Return a range of a shard, or zeros if it ends before. zfec reads by the last length that it is given."""
    return shard[start:end] if len(shard) > start else _ZEROS[: end - start]


@lru_cache(maxsize=32)
def _zfec(code: Code, kind: str) -> Any:
    """Return zfec's tables for a code. They are read only, by any number of threads."""
    try:
        import zfec
    except ImportError:
        raise MissingExtraError(
            f"the code {code} needs zfec; pip install 'stoker[warm]', or use two parity shards at most"
        ) from None
    return getattr(zfec, kind)(code.data, code.shards)
