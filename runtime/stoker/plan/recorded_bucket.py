"""A model of a bucket from a trace of a run that read from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stoker.errors import ConfigError
from stoker.plan.bucket import BucketModel
from stoker.plan.latency import Recorded
from stoker.trace.recording import Answer, Recording

__all__ = ["recorded_bucket", "recorded_latency"]

_CONNECTION_QUANTILE, _TOTAL_QUANTILE = 0.9, 0.95


def recorded_latency(recording: Recording) -> Recorded:
    """Return the first bytes' times of a trace's requests.

    A request that was overtaken by its hedge counts with the time after which it was given up: it would have taken
    longer, nobody knows how much. So the tail of a run with hedges is told too short where the latest are.

    Raises:
        ConfigError: the trace has no request whose answer began.
    """
    if not any(answer.is_begun for answer in recording.answers):
        raise ConfigError("the trace has no first bytes: its store does not tell when an answer begins, or it is empty")
    return Recorded(tuple(answer.first_byte_seconds for answer in recording.answers))


def recorded_bucket(recording: Recording) -> BucketModel:
    """Return a bucket that answers as a trace's did: first bytes, a connection's rate and that of all together.

    A connection's rate is that of the fastest tenth, which shared the link with the fewest others. The whole rate is
    what all transfers together reached, but for the fastest twentieth of the time; a run that never filled its link
    does not tell what more would have gone through.

    Raises:
        ConfigError: the trace has no transfers.
    """
    whole = [each for each in recording.answers if each.is_whole and each.transfer_seconds > 0]
    if not whole:
        raise ConfigError("the trace has no transfer that took time, so it does not tell how fast the bucket was")
    rates = [each.size_bytes / each.transfer_seconds for each in whole]
    return BucketModel(
        first_byte=recorded_latency(recording),
        connection_bytes_per_second=float(np.quantile(rates, _CONNECTION_QUANTILE)),
        total_bytes_per_second=_total_rate(whole),
    )


def _total_rate(answers: Sequence[Answer]) -> float:
    """Return a quantile over time of the bytes a second that all transfers moved, each at its own mean rate."""
    begins = np.array([each.sent_seconds + each.first_byte_seconds for each in answers])
    ends = begins + [each.transfer_seconds for each in answers]
    rates = np.array([each.size_bytes / each.transfer_seconds for each in answers])
    moments = np.concatenate([begins, ends])
    order = np.argsort(moments, kind="stable")
    together = np.cumsum(np.concatenate([rates, -rates])[order])[:-1]
    lasted = np.diff(moments[order])
    busy = (lasted > 0) & (together > rates.min() / 2)  # what is left of sums that should be zero is no transfer
    by_rate = np.argsort(together[busy], kind="stable")
    share = np.cumsum(lasted[busy][by_rate]) / math.fsum(lasted[busy])
    return float(together[busy][by_rate][int(np.searchsorted(share, _TOTAL_QUANTILE))])
