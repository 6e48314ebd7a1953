"""Durations that were measured, read from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError
from stoker.plan.latency import Recorded
from stoker.text_file import read_text

__all__ = ["read_durations"]

_MICROSECONDS = 1e-6
_MOST_BYTES = 256 << 20


def read_durations(path: Path, event: str = "first_byte") -> Recorded:
    """Return the durations in a file: those of the events of one name in a trace, or a list of seconds.

    Args:
        path: a Chrome trace (``{"traceEvents": [...]}`` or its list), a JSON list of seconds, or a text with a number
            of seconds on each line.
        event: name of the trace's events.

    Raises:
        ConfigError: the file cannot be read, or has no such durations.
    """
    try:
        text = read_text(path, most_bytes=_MOST_BYTES)
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is neither JSON nor a text with a number of seconds on each line") from None
    try:
        found = _from_json(json.loads(text), event) if text.lstrip()[:1] in ("[", "{") else _from_lines(text)
        return Recorded(tuple(found))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} has no list of seconds, and no trace's events {event!r}: {error}") from None


def _from_json(document: Any, event: str) -> list[float]:
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise TypeError("it is neither a list nor has a list 'traceEvents'")
    if all(isinstance(each, int | float) for each in events):
        return [float(each) for each in events]
    if not all(isinstance(each, dict) for each in events):
        raise TypeError("not all of its entries are events")
    return [float(each["dur"]) * _MICROSECONDS for each in events if each.get("name") == event and "dur" in each]


def _from_lines(text: str) -> list[float]:
    return [float(line) for line in text.splitlines() if line.strip()]
