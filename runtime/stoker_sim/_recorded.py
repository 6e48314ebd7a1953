"""What was recorded, as a model: durations of a file, and the bucket that a trace shows."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker._diagnostics.latency import BucketModel, Recorded
from stoker._trace.recording import Answer, Told, read_values
from stoker.errors import ConfigError

__all__ = [
    "read_durations",
    "recorded_bucket",
    "recorded_latency",
]

_MICROSECONDS = 1e-6


def read_durations(path: Path, event: str = "first_byte") -> Recorded:
    """Return the durations in a file: those of the events of one name in a trace, or a list of seconds.

    Args:
        path: a Chrome trace (``{"traceEvents": [...]}`` or its list), a JSON list of seconds, or a text with a number
            of seconds on each line; of one that is cut off, what is before that. The numbers are held in memory.
        event: name of the trace's events.

    Raises:
        ConfigError: the file cannot be read, or has no such durations.
    """
    told = f"{path} has no list of seconds, and no trace's events {event!r}"
    try:
        seconds = tuple(array("d", _durations(path, event)))
    except (AttributeError, OverflowError, TypeError) as error:
        raise ConfigError(f"{told}: {error}") from None
    try:
        return Recorded(seconds)
    except ConfigError as error:
        raise ConfigError(f"{told}: {error}") from None


def _durations(path: Path, event: str) -> Iterator[float]:
    kinds: set[bool] = set()
    for value in read_values(path):
        is_number = isinstance(value, int | float)
        kinds.add(is_number)
        if len(kinds) > 1:
            raise TypeError("it has both numbers and events")
        if is_number:
            yield value
        elif value.get("name") == event and "dur" in value:
            yield value["dur"] * _MICROSECONDS


_CONNECTION_QUANTILE, _TOTAL_QUANTILE = 0.9, 0.95


def recorded_latency(told: Iterable[Told]) -> Recorded:
    """Return the first bytes' times of a trace's requests.

    A request that was overtaken by its hedge counts with the time after which it was given up: it would have taken
    longer, nobody knows how much. So the tail of a run with hedges is told too short where the latest are.

    Raises:
        ConfigError: the trace has no request whose answer began, or cannot be read.
    """
    return _latency(_answers(told))


def recorded_bucket(told: Iterable[Told]) -> BucketModel:
    """Return a bucket that answers as a trace's did: first bytes, a connection's rate and that of all together.

    A connection's rate is that of the fastest tenth, which shared the link with the fewest others. The whole rate is
    what all transfers together reached, but for the fastest twentieth of the time; a run that never filled its link
    does not tell what more would have gone through. Of the trace, some 40 bytes a request are held in memory.

    Raises:
        ConfigError: the trace has no transfers, or cannot be read.
    """
    answers = _answers(told)
    whole = answers[answers["is_whole"] & (answers["transfer_seconds"] > 0)]
    if not len(whole):
        raise ConfigError("the trace has no transfer that took time, so it does not tell how fast the bucket was")
    return BucketModel(
        first_byte=_latency(answers),
        connection_bytes_per_second=float(np.quantile(_rates(whole), _CONNECTION_QUANTILE)),
        total_bytes_per_second=_total_rate(whole),
    )


def _answers(told: Iterable[Told]) -> NDArray[np.void]:
    """Return answers as rows of an array, whose fields are theirs."""
    fields = [*zip(Answer._fields, ("f8", "f8", "f8", "i8", "?", "?"), strict=True)]
    return np.fromiter((each.what for each in told if isinstance(each.what, Answer)), fields)


def _latency(answers: NDArray[np.void]) -> Recorded:
    if not answers["is_begun"].any():
        raise ConfigError("the trace has no first bytes: its store does not tell when an answer begins, or it is empty")
    return Recorded(tuple(answers["first_byte_seconds"].tolist()))


def _rates(answers: NDArray[np.void]) -> NDArray[np.float64]:
    rates: NDArray[np.float64] = answers["size_bytes"] / answers["transfer_seconds"]
    return rates


def _total_rate(answers: NDArray[np.void]) -> float:
    """Return a quantile over time of the bytes a second that all transfers moved, each at its own mean rate."""
    begins = answers["sent_seconds"] + answers["first_byte_seconds"]
    ends, rates = begins + answers["transfer_seconds"], _rates(answers)
    moments = np.concatenate([begins, ends])
    order = np.argsort(moments, kind="stable")
    together = np.cumsum(np.concatenate([rates, -rates])[order])[:-1]
    lasted = np.diff(moments[order])
    busy = (lasted > 0) & (together > rates.min() / 2)  # what is left of sums that should be zero is no transfer
    by_rate = np.argsort(together[busy], kind="stable")
    share = np.cumsum(lasted[busy][by_rate]) / math.fsum(lasted[busy])
    return float(together[busy][by_rate][int(np.searchsorted(share, _TOTAL_QUANTILE))])
