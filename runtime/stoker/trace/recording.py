"""Reads a trace back: what the training loop waited for, what was fetched when, and how requests were answered."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stoker.errors import ConfigError, FormatError
from stoker.trace.chrome import SLOT_ROWS
from stoker.trace.phases import Phase, Span
from stoker.trace.recorder import Wait

__all__ = ["Answer", "Held", "Recording", "read_trace"]

_MOST_BYTES = 1 << 30


class Held(NamedTuple):
    """A time in which a slot of the ring had something in it.

    Attributes:
        slot: of the ring.
        object: the key that it was being filled with; empty while it was ready.
        begin_seconds: since the trace began.
        end_seconds: since the trace began.
        spans: what was done to fill it; empty while it was ready.
    """

    slot: int
    object: str
    begin_seconds: float
    end_seconds: float
    spans: tuple[Span, ...] = ()


class Answer(NamedTuple):
    """How a request was answered.

    Attributes:
        sent_seconds: when it was sent, since the trace began.
        first_byte_seconds: until the answer began; where it never did, until the request was given up.
        transfer_seconds: from there to its end; 0 if it never began.
        size_bytes: that were asked for.
        is_begun: whether the answer began.
        is_whole: whether all of it came.
    """

    sent_seconds: float
    first_byte_seconds: float
    transfer_seconds: float
    size_bytes: int
    is_begun: bool
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A trace, in seconds since it began, each list in the order of the file.

    Attributes:
        waits: one a batch; those of a file that was cut off in the middle of one lack some of its spans.
        fetches: slots being filled.
        held: slots that were ready.
        answers: to requests.
        is_full: whether the trace reached its limit before the run ended.
    """

    waits: tuple[Wait, ...]
    fetches: tuple[Held, ...]
    held: tuple[Held, ...]
    answers: tuple[Answer, ...]
    is_full: bool

    @property
    def begin_seconds(self) -> float:
        """When the first thing that was recorded began."""
        begins = [each.begin_seconds for each in self.fetches]
        return min([*begins, *(wait.spans[0].begin_seconds for wait in self.waits)], default=0.0)

    @property
    def end_seconds(self) -> float:
        """When the last thing that was recorded ended."""
        ends = [each.end_seconds for each in (*self.fetches, *self.held)]
        return max([*ends, *(wait.spans[-1].end_seconds for wait in self.waits)], default=0.0)

    @property
    def seconds(self) -> float:
        """From the one to the other."""
        return self.end_seconds - self.begin_seconds

    def by_phase(self) -> dict[Phase, float]:
        """Return the seconds that were waited, by phase, the longest first."""
        seconds: defaultdict[Phase, float] = defaultdict(float)
        for wait in self.waits:
            for span in wait.spans:
                seconds[span.phase] += span.seconds
        return dict(sorted(seconds.items(), key=lambda each: -each[1]))


def read_trace(path: Path) -> Recording:
    """Read what a :class:`~stoker.trace.chrome.ChromeTrace` has written, to the end or not.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
        FormatError: it is not such a trace.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"the trace {path} is larger than {_MOST_BYTES >> 30} GiB")
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FormatError(f"{path} is not a trace: it is not text") from None
    try:
        return _recording(_events(text))
    except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise FormatError(f"{path} is not a trace that stoker wrote: {type(error).__name__}: {error}") from None


def _events(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the events of a list; the last line of one without an end may be cut off."""
    lines = text.splitlines()
    if not text.startswith("["):
        raise ValueError("it is not a list of events")
    try:
        yield from json.loads(text)
        return
    except json.JSONDecodeError:
        if lines[0] != "[":
            raise
    for number, line in enumerate(lines[1:], 2):
        try:
            yield json.loads(line.removesuffix(","))
        except json.JSONDecodeError:
            if number != len(lines):
                raise


def _recording(events: Iterator[Mapping[str, Any]]) -> Recording:
    batches: dict[int, tuple[int, list[Span]]] = {}
    fetches: list[Held] = []
    held: list[Held] = []
    answers: list[Answer] = []
    begun: dict[int, tuple[float, float]] = {}
    is_full = False
    for event in events:
        is_full |= event["ph"] == "i"
        if event["ph"] != "X":
            continue
        begin, end, args = *_times(event), event["args"]
        match event["cat"]:
            case "batch":
                batches[_whole(args["batch"])] = _whole(args["epoch"]), []
            case "wait":
                span = Span(Phase(args["phase"]), begin, end, _text(args["object"]))
                batches[args["batch"]][1].append(span)
            case "fetch":
                slot, key = _whole(event["tid"]) - SLOT_ROWS, _text(event["name"])
                fetches.append(Held(slot, key, begin, end, tuple(_spans(args["spans"], begin, key))))
            case "held":
                held.append(Held(_whole(event["tid"]) - SLOT_ROWS, "", begin, end))
            case "request":
                _enter(answers, begun, event, begin, end - begin)
    waits = (Wait(batch=batch, epoch=epoch, spans=tuple(spans)) for batch, (epoch, spans) in batches.items() if spans)
    return Recording(
        waits=tuple(waits), fetches=tuple(fetches), held=tuple(held), answers=tuple(answers), is_full=is_full
    )


def _enter(
    answers: list[Answer], begun: dict[int, tuple[float, float]], event: Mapping[str, Any], at: float, seconds: float
) -> None:
    """Enter an answer when its last event comes; its first byte's, if it has one, comes before it in the same row."""
    row, args = _whole(event["tid"]), event["args"]
    size_bytes, is_whole = _whole(args["bytes"]), bool(args["whole"])
    match event["name"]:
        case "first_byte":
            begun[row] = at, seconds
        case "transfer":
            first_byte = begun.pop(row, None)
            if first_byte is not None:  # else the store did not tell
                answers.append(Answer(*first_byte, seconds, size_bytes, is_begun=True, is_whole=is_whole))
        case "no_answer":
            answers.append(Answer(at, seconds, 0.0, size_bytes, is_begun=False, is_whole=False))


def _spans(told: Any, begin: float, key: str) -> Iterator[Span]:
    for phase, after_ms, took_ms in told:
        start = begin + _number(after_ms) / 1e3
        yield Span(Phase(phase), start, start + _number(took_ms) / 1e3, key)


def _times(event: Mapping[str, Any]) -> tuple[float, float]:
    begin, seconds = _number(event["ts"]) / 1e6, _number(event["dur"]) / 1e6
    if seconds < 0:
        raise ValueError(f"an event takes {seconds} s")
    return begin, begin + seconds


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.40} is not a number")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r:.40} is not a whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not text")
    return value
