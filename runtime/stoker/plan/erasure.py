"""Objects cut into shards, any ``data`` of which restore them: what is lost, and how long reading takes.

A Reed-Solomon code of ``data`` + ``parity`` shards, each in a function of its own (A. Wang et al., "InfiniCache" (FAST
2020), section 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.warm.code import Code

__all__ = ["first_arrivals", "kept_hours", "placed"]

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


def first_arrivals(code: Code, shard_seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``float64 [reads]``, when each read has enough shards: all are asked for at once, the last are dropped.

    Args:
        code: of the objects.
        shard_seconds: ``float64 [reads, shards]``, when each shard arrives.
    """
    arrived: NDArray[np.float64] = np.partition(shard_seconds, code.data - 1, axis=1)[:, code.data - 1]
    return arrived
