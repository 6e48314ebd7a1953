"""Durations that were measured, read from a file."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

from stoker._diagnostics.latency import Recorded
from stoker._trace.recording import read_values
from stoker.errors import ConfigError

__all__ = ["read_durations"]

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
