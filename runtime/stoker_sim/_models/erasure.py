"""Objects cut into shards, any ``data`` of which restore them: what is lost, and how long reading takes.

A Reed-Solomon code of ``data`` + ``parity`` shards, each in a function of its own (A. Wang et al., "InfiniCache" (FAST
2020), section 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker_warm._code import Code

__all__ = ["first_arrivals", "kept_hours", "lost_between_reads", "placed"]

_HOUR_SECONDS = 3600.0


def placed(code: Code, objects: int, functions: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return ``int64 [objects, shards]``, the function that holds each shard; those of an object differ.

    Raises:
        ConfigError: there are fewer functions than an object has shards.
    """
    if functions < code.shards:
        raise ConfigError(f"{code} needs {code.shards} functions, there are {functions}")
    return np.stack([rng.choice(functions, code.shards, replace=False) for _ in range(objects)])


def kept_hours(code: Code, places: NDArray[np.int64], lost: Sequence[Iterable[float]], hours: int) -> NDArray[np.bool_]:
    """Return ``bool [hours, objects]``: whether an object, whole when an hour began, could be restored at its end.

    Shards that are lost are made again by the next hour, by whoever reads the object.

    Args:
        code: of the objects.
        places: ``int64 [objects, shards]``, the function that holds each shard.
        lost: of each function, when it loses its memory, in seconds.
        hours: that are looked at.
    """
    is_lost = np.zeros((hours, len(lost)), np.bool_)
    for function, times in enumerate(lost):
        for seconds in times:
            if seconds < hours * _HOUR_SECONDS:
                is_lost[int(seconds // _HOUR_SECONDS), function] = True
    kept: NDArray[np.bool_] = is_lost[:, places].sum(axis=2) <= code.parity
    return kept


def lost_between_reads(
    code: Code, lost: Sequence[Iterable[float]], hours: int, read_seconds: float
) -> NDArray[np.float64]:
    """Return ``float64 [hours]``: what part of all objects is lost in each hour if a read puts lost shards back.

    Objects are on random functions, so the part follows from how many functions lose their memory between two reads:
    nothing is drawn, and the hours of any number of objects follow: of n, none is lost with (1 - part) ** n.

    Args:
        code: of the objects.
        lost: of each function, when it loses its memory, in seconds.
        hours: that are looked at.
        read_seconds: every object is read so often; an hour is a multiple of it.

    Raises:
        ConfigError: it is not.
    """
    reads = round(_HOUR_SECONDS / read_seconds)
    if not reads or abs(reads * read_seconds - _HOUR_SECONDS) > 1e-6:
        raise ConfigError(f"an hour must be a multiple of read_seconds, not of {read_seconds}")
    is_lost = np.zeros((hours * reads, len(lost)), np.bool_)
    for function, times in enumerate(lost):
        for seconds in times:
            if seconds < hours * _HOUR_SECONDS:
                is_lost[int(seconds // read_seconds), function] = True
    gone = np.array([_too_many(code, len(lost), down) for down in range(len(lost) + 1)])
    kept: NDArray[np.float64] = (1.0 - gone[is_lost.sum(axis=1)]).reshape(hours, reads).prod(axis=1)
    return 1.0 - kept


def _too_many(code: Code, functions: int, down: int) -> float:
    """Return the probability that an object has more of its shards on so many functions than it has parity."""
    many = sum(comb(down, n) * comb(functions - down, code.shards - n) for n in range(code.parity + 1, code.shards + 1))
    return many / comb(functions, code.shards)


def first_arrivals(code: Code, shard_seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``float64 [reads]``, when each read has enough shards: all are asked for at once, the last are dropped.

    Args:
        code: of the objects.
        shard_seconds: ``float64 [reads, shards]``, when each shard arrives.
    """
    arrived: NDArray[np.float64] = np.partition(shard_seconds, code.data - 1, axis=1)[:, code.data - 1]
    return arrived
