"""Reads a trace back: what the training loop waited for, what was fetched when, and how requests were answered.

A trace is read as a stream (:func:`read_trace`), value by value (:func:`read_values`); whoever wants all of it, or a
stretch, puts it into a :class:`Recording`.
"""

from __future__ import annotations

import codecs
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from stoker._base.fetch_record import Phase, Span
from stoker._base.recorder import Wait
from stoker._trace.chrome import SLOT_ROWS
from stoker.errors import ConfigError

_MOST_PROCESSES, _MOST_ROWS, _MOST_SPANS = 1_000, 10_000, 100_000
"""Of a file, of a process, and of a batch: more has none that stoker wrote, and they are held while it is read."""
_NAME_CHARACTERS = 100
_MOST_BYTES = (1 << 62) - 1
_LONGEST = 1e15
"""Of times, in microseconds: thirty years."""


class Filled(NamedTuple):
    """A time in which a slot of the ring was being filled.

    Attributes:
        slot: of the ring.
        object: the key that it was filled with.
        begin_seconds: since the trace began.
        end_seconds: since the trace began.
        spans: what was done.
    """

    slot: int
    object: str
    begin_seconds: float
    end_seconds: float
    spans: tuple[Span, ...]


class Held(NamedTuple):
    """A time in which a slot of the ring was ready, or in use.

    Attributes:
        slot: of the ring.
        begin_seconds: since the trace began.
        end_seconds: since the trace began.
    """

    slot: int
    begin_seconds: float
    end_seconds: float


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


class Named(NamedTuple):
    """What a process is called, before anything else is told of it."""

    name: str


class Full(NamedTuple):
    """The trace reached its limit before the run ended."""


class Told(NamedTuple):
    """Something that a trace tells.

    Attributes:
        process: that did it: a loader's file has one, that of a simulation one a rank.
        what: it is. A wait comes when its batch is complete; that of a file that is cut off may lack some of its spans.
    """

    process: int
    what: Wait | Filled | Held | Answer | Named | Full


@dataclass(slots=True)
class Recording:
    """What a trace tells, or a part of it, in the order of the file.

    Attributes:
        waits: one a batch.
        fetches: slots being filled.
        held: slots that were ready.
        answers: to requests.
        is_full: whether the trace reached its limit.
    """

    waits: list[Wait] = field(default_factory=list)
    fetches: list[Filled] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    is_full: bool = False

    @classmethod
    def of(cls, told: Iterable[Told]) -> Recording:
        """Keep all that is told. That takes several times the memory of the file."""
        recording = cls()
        kept: dict[type, list[Any]] = {Wait: recording.waits, Filled: recording.fetches, Held: recording.held}
        kept[Answer] = recording.answers
        for _, what in told:
            kept.get(type(what), []).append(what)
            recording.is_full |= isinstance(what, Full)
        return recording


def read_trace(path: Path) -> Iterator[Told]:
    """Yield what a :class:`~stoker.trace.ChromeTrace` has written, to the end or not, in the file's order.

    Memory does not grow with the file, which may be compressed with gzip, be cut off at its end, or be a pipe.

    Raises:
        ConfigError: the file cannot be read, or is not such a trace.
    """
    processes: dict[int, _Process] = {}
    try:
        for event in read_values(path):
            number = _whole(event["pid"])
            process = processes.setdefault(number, _Process())
            _bounded(processes, _MOST_PROCESSES, "processes")
            for what in process.told(event):
                yield Told(number, what)
    except ConfigError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a trace that stoker wrote: {type(error).__name__}: {error}") from None
    if not processes:
        raise ConfigError(f"{path} is not a trace: there is nothing in it")
    for number, process in processes.items():
        for what in process.ended():
            yield Told(number, what)


class _Process:
    """Puts the events of one process together: a wait has several, and so has a request."""

    __slots__ = ("_batch", "_begun", "_epoch", "_spans")

    def __init__(self) -> None:
        self._batch = self._epoch = -1
        self._spans: list[Span] = []
        self._begun: dict[int, tuple[float, float]] = {}

    def told(self, event: Mapping[str, Any]) -> Iterator[Wait | Filled | Held | Answer | Named | Full]:
        """Yield what is complete with an event."""
        match event["ph"]:
            case "X":
                yield from self._lasting(event)
            case "i":
                yield Full()
            case "M" if event["name"] == "process_name":
                yield Named(_text(event["args"]["name"])[:_NAME_CHARACTERS])

    def ended(self) -> Iterator[Wait]:
        """Yield the wait that is complete, since no more of it comes."""
        if self._spans:
            yield Wait(batch=self._batch, epoch=self._epoch, spans=tuple(self._spans))
            self._spans.clear()

    def _lasting(self, event: Mapping[str, Any]) -> Iterator[Wait | Filled | Held | Answer]:
        match _text(event["cat"]):
            case "batch":
                yield from self.ended()
                _times(event)
                self._batch, self._epoch = _whole(event["args"]["batch"]), _whole(event["args"]["epoch"])
            case "wait":
                args = event["args"]
                if args["batch"] != self._batch:
                    raise ValueError("a wait is for another batch than the last one")
                self._spans.append(Span(Phase(args["phase"]), *_times(event), _text(args["object"])))
                _bounded(self._spans, _MOST_SPANS, "spans of a batch")
            case "fetch":
                (begin, end), key = _times(event), _text(event["name"])
                spans = tuple(_spans(event["args"]["spans"], begin, key))
                yield Filled(_whole(event["tid"]) - SLOT_ROWS, key, begin, end, spans)
            case "held":
                yield Held(_whole(event["tid"]) - SLOT_ROWS, *_times(event))
            case "request":
                yield from self._request(event)

    def _request(self, event: Mapping[str, Any]) -> Iterator[Answer]:
        """Yield an answer with its last event; its first byte's, if it has one, comes before it in the same row."""
        (begin, end), row, args = _times(event), _whole(event["tid"]), event["args"]
        size_bytes, is_whole = _whole(args["bytes"], 0, _MOST_BYTES), bool(args["whole"])
        match event["name"]:
            case "first_byte":
                self._begun[row] = begin, end - begin
                _bounded(self._begun, _MOST_ROWS, "rows of requests")
            case "transfer" if row in self._begun:  # else the store did not tell
                yield Answer(*self._begun.pop(row), end - begin, size_bytes, is_begun=True, is_whole=is_whole)
            case "no_answer":
                yield Answer(begin, end - begin, 0.0, size_bytes, is_begun=False, is_whole=False)


def _spans(told: Any, begin: float, key: str) -> Iterator[Span]:
    for phase, after_ms, took_ms in told:
        start = begin + _time(after_ms) / 1e3
        yield Span(Phase(phase), start, start + _time(took_ms) / 1e3, key)


def _times(event: Mapping[str, Any]) -> tuple[float, float]:
    begin, seconds = _time(event["ts"]) / 1e6, _time(event["dur"]) / 1e6
    if seconds < 0:
        raise ValueError(f"an event takes {seconds} s")
    return begin, begin + seconds


def _time(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LONGEST:
        raise ValueError(f"{value!r:.40} is not a time")
    return float(value)


def _whole(value: Any, least: float = -math.inf, most: float = math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is not a whole number that can be")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not text")
    return value


def _bounded(held: Any, most: int, what: str) -> None:
    if len(held) > most:
        raise ValueError(f"it has more than {most:,} {what}")


_CHUNK_BYTES = 64 << 10
_MOST_CHARACTERS = 1 << 20
"""Of a value. The largest that stoker writes, a fetch whose path has hundreds of spans, has a thirtieth of it."""
_GZIP = b"\x1f\x8b"
_BETWEEN = re.compile(r"[\s,]*")
_LIST_OF_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_LONGEST_PART = len("u00e9")
"""Of an escape, or a word, that may be cut off."""


def read_values(path: Path) -> Iterator[Any]:
    """Yield the values of a list: of a file that is cut off in the middle of one, those before it.

    The list is a JSON array, the one that an object has as ``traceEvents``, or values that stand one behind the other,
    one a line for example. What follows its end is not looked at. The file may be compressed with gzip, and may be a
    pipe: it is read once, in order.

    Raises:
        ConfigError: the file cannot be read, or has something else in it.
    """
    try:
        with path.open("rb") as file:
            yield from _values(_reader(file))
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error):
        raise ConfigError(f"{path} is not text, so neither JSON nor a list of numbers") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a list in JSON: {error}") from None


def _reader(file: BufferedReader) -> Callable[[], str]:
    """Return what reads the next part of a text, which is empty at its end alone."""
    source = gzip.GzipFile(fileobj=file) if file.peek(2).startswith(_GZIP) else file
    decoder = codecs.getincrementaldecoder("utf-8")()

    def read() -> str:
        text = ""
        while not text:
            try:
                data = source.read1(_CHUNK_BYTES)
            except EOFError:  # a compressed file that is cut off
                break
            if not data:
                break
            text = decoder.decode(data)
        return text

    return read


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


_decode = json.JSONDecoder(parse_constant=_refuse).raw_decode


def _values(read: Callable[[], str]) -> Iterator[Any]:
    text, at = _begun(read)
    while True:
        if between := _BETWEEN.match(text, at):
            at = between.end()
        if text.startswith("]", at):
            return
        value, end = None, len(text)
        is_whole = False
        try:
            value, end = _decode(text, at)
            is_whole = True
        except json.JSONDecodeError as error:
            if not _is_cut(text, error):
                raise
        if end < len(text):
            yield value
            at = end
            continue
        more = _more(read, len(text) - at)  # what ends where the text does may go on in what follows
        if not more:
            if is_whole:
                yield value
            return
        text, at = text[at:] + more, 0


def _begun(read: Callable[[], str]) -> tuple[str, int]:
    """Return the begin of a text, and where in it the first value may be."""
    text = read().lstrip()
    while text.startswith("{") and len(text) < _MOST_CHARACTERS:
        if found := _LIST_OF_EVENTS.search(text):
            return text, found.end()
        if not (more := read()):
            break
        text += more
    return text, int(text.startswith("["))


def _more(read: Callable[[], str], kept_characters: int) -> str:
    """Return what follows: as much again as is kept, so that a long value is not begun too often."""
    if kept_characters > _MOST_CHARACTERS:
        raise ValueError(f"a value has more than {_MOST_CHARACTERS:,} characters")
    parts = [read()]
    while parts[-1] and sum(map(len, parts)) < kept_characters:
        parts.append(read())
    return "".join(parts)


def _is_cut(text: str, error: json.JSONDecodeError) -> bool:
    """Return whether what was not understood is the begin of a value that goes on behind the text."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - _LONGEST_PART
