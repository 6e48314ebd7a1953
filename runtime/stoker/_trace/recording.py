"""Reads a trace file: waits of the training loop, fetches, and responses to requests.

:func:`read_trace` reads a trace as a stream of events, from the stream of JSON values that :func:`read_values` yields.
A :class:`Recording` holds all of a trace, or a section, in memory.
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

_MAX_PROCESSES, _MAX_ROWS, _MAX_SPANS = 1_000, 10_000, 100_000
"""Maximum numbers per file, process and batch, which bound memory; traces that stoker writes have fewer."""
_MAX_NAME_CHARACTERS = 100
_MAX_BYTES = (1 << 62) - 1
_MAX_MICROSECONDS = 1e15
"""Maximum time, in microseconds: about 30 years."""


class SlotFill(NamedTuple):
    """An interval in which a slot of the ring was filled.

    Attributes:
        slot: number of the slot.
        object: key of the object.
        begin_seconds: start, in seconds since the trace began.
        end_seconds: end, in seconds since the trace began.
        spans: phases of the fetch.
    """

    slot: int
    object: str
    begin_seconds: float
    end_seconds: float
    spans: tuple[Span, ...]


class SlotHold(NamedTuple):
    """An interval in which a slot of the ring was ready or in use.

    Attributes:
        slot: number of the slot.
        begin_seconds: start, in seconds since the trace began.
        end_seconds: end, in seconds since the trace began.
    """

    slot: int
    begin_seconds: float
    end_seconds: float


class TracedCopy(NamedTuple):
    """An interval in which a batch was copied to a device.

    Attributes:
        begin_seconds: start, in seconds since the trace began.
        end_seconds: end, in seconds since the trace began.
    """

    begin_seconds: float
    end_seconds: float


class TracedResponse(NamedTuple):
    """The response to a request.

    Attributes:
        sent_seconds: time at which the request was sent, in seconds since the trace began.
        first_byte_seconds: time until the response began, or until the request ended without one, in seconds.
        transfer_seconds: time from the first byte to the end, in seconds; 0 without a response.
        size_bytes: number of bytes requested.
        is_begun: whether the response began.
        is_whole: whether the response was complete.
    """

    sent_seconds: float
    first_byte_seconds: float
    transfer_seconds: float
    size_bytes: int
    is_begun: bool
    is_whole: bool


class ProcessName(NamedTuple):
    """The name of a process; the first event of the process.

    Attributes:
        name: name of the process.
    """

    name: str


class Truncated(NamedTuple):
    """Event: the trace reached its size limit before the run ended."""


class TraceEvent(NamedTuple):
    """An event of a trace.

    Attributes:
        process: number of the process: a loader's file has one process, a simulation's one per rank.
        event: the event. A wait is yielded once its batch is complete; in a truncated file the last may lack spans.
    """

    process: int
    event: Wait | SlotFill | SlotHold | TracedCopy | TracedResponse | ProcessName | Truncated


@dataclass(slots=True)
class Recording:
    """A trace, or a section of it, in memory, in the order of the file.

    Attributes:
        waits: waits of the training loop, one per batch.
        fetches: intervals in which slots were filled.
        held: intervals in which slots were ready or in use.
        copies: intervals in which batches were copied to a device.
        responses: responses to requests.
        is_full: whether the trace reached its size limit.
    """

    waits: list[Wait] = field(default_factory=list)
    fetches: list[SlotFill] = field(default_factory=list)
    held: list[SlotHold] = field(default_factory=list)
    copies: list[TracedCopy] = field(default_factory=list)
    responses: list[TracedResponse] = field(default_factory=list)
    is_full: bool = False

    @classmethod
    def of(cls, events: Iterable[TraceEvent]) -> Recording:
        """Return a recording of all events, which takes several times the size of the file in memory."""
        recording = cls()
        lists: dict[type, list[Any]] = {Wait: recording.waits, SlotFill: recording.fetches, SlotHold: recording.held}
        lists |= {TracedCopy: recording.copies, TracedResponse: recording.responses}
        for _, event in events:
            lists.get(type(event), []).append(event)
            recording.is_full |= isinstance(event, Truncated)
        return recording


def read_trace(path: Path) -> Iterator[TraceEvent]:
    """Yield the events of a file that a :class:`~stoker.trace.ChromeTrace` has written, in the file's order.

    Memory use does not grow with the file, which may be compressed with gzip, truncated, or a pipe.

    Args:
        path: file to read.

    Example:
        >>> from pathlib import Path
        >>> from stoker_torch import Loader
        >>> with ChromeTrace("trace.json") as trace, Loader("data", batch_size=32, trace=trace) as loader:
        ...     batches = len(list(loader))
        >>> waits = [each.event for each in read_trace(Path("trace.json")) if isinstance(each.event, Wait)]
        >>> longest = max(waits, key=lambda wait: wait.seconds)

    Raises:
        ConfigError: the file cannot be read, or is not such a trace.
    """
    processes: dict[int, _ProcessParser] = {}
    try:
        for event in read_values(path):
            number = _parse_integer(event["pid"])
            process = processes.setdefault(number, _ProcessParser())
            _check_count(processes, _MAX_PROCESSES, "processes")
            for record in process.parse(event):
                yield TraceEvent(number, record)
    except ConfigError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a trace that stoker wrote: {type(error).__name__}: {error}") from None
    if not processes:
        raise ConfigError(f"{path} is not a trace: it has no events")
    for number, process in processes.items():
        for record in process.flush():
            yield TraceEvent(number, record)


class _ProcessParser:
    """Combines the events of one process: a wait has several, and so has a request."""

    __slots__ = ("_batch", "_begun", "_epoch", "_spans")

    def __init__(self) -> None:
        self._batch = self._epoch = -1
        self._spans: list[Span] = []
        self._begun: dict[int, tuple[float, float]] = {}

    def parse(
        self, event: Mapping[str, Any]
    ) -> Iterator[Wait | SlotFill | SlotHold | TracedCopy | TracedResponse | ProcessName | Truncated]:
        """Yield the records that an event completes."""
        match event["ph"]:
            case "X":
                yield from self._parse_duration_event(event)
            case "i":
                yield Truncated()
            case "M" if event["name"] == "process_name":
                yield ProcessName(_parse_text(event["args"]["name"])[:_MAX_NAME_CHARACTERS])

    def flush(self) -> Iterator[Wait]:
        """Yield the current wait, which no later event extends."""
        if self._spans:
            yield Wait(batch=self._batch, epoch=self._epoch, spans=tuple(self._spans))
            self._spans.clear()

    def _parse_duration_event(
        self, event: Mapping[str, Any]
    ) -> Iterator[Wait | SlotFill | SlotHold | TracedCopy | TracedResponse]:
        match _parse_text(event["cat"]):
            case "batch":
                yield from self.flush()
                _parse_interval(event)
                self._batch = _parse_integer(event["args"]["batch"])
                self._epoch = _parse_integer(event["args"]["epoch"])
            case "wait":
                args = event["args"]
                if args["batch"] != self._batch:
                    raise ValueError("a wait belongs to another batch than the batch event before it")
                self._spans.append(Span(Phase(args["phase"]), *_parse_interval(event), _parse_text(args["object"])))
                _check_count(self._spans, _MAX_SPANS, "spans of a batch")
            case "fetch":
                (begin, end), key = _parse_interval(event), _parse_text(event["name"])
                spans = tuple(_parse_spans(event["args"]["spans"], begin, key))
                yield SlotFill(_parse_integer(event["tid"]) - SLOT_ROWS, key, begin, end, spans)
            case "held":
                yield SlotHold(_parse_integer(event["tid"]) - SLOT_ROWS, *_parse_interval(event))
            case "copy":
                yield TracedCopy(*_parse_interval(event))
            case "request":
                yield from self._parse_request(event)

    def _parse_request(self, event: Mapping[str, Any]) -> Iterator[TracedResponse]:
        """Yield a response with its last event; the event of its first byte, if any, precedes it in the same row."""
        (begin, end), row, args = _parse_interval(event), _parse_integer(event["tid"]), event["args"]
        size_bytes = _parse_integer(args["bytes"], 0, _MAX_BYTES)
        is_whole = bool(args["whole"])
        match event["name"]:
            case "first_byte":
                self._begun[row] = begin, end - begin
                _check_count(self._begun, _MAX_ROWS, "rows of requests")
            case "transfer" if row in self._begun:  # otherwise the store does not report first bytes
                yield TracedResponse(*self._begun.pop(row), end - begin, size_bytes, is_begun=True, is_whole=is_whole)
            case "no_answer":
                yield TracedResponse(begin, end - begin, 0.0, size_bytes, is_begun=False, is_whole=False)


def _parse_spans(spans: Any, begin: float, key: str) -> Iterator[Span]:
    for phase, after_ms, took_ms in spans:
        start = begin + _parse_time(after_ms) / 1e3
        yield Span(Phase(phase), start, start + _parse_time(took_ms) / 1e3, key)


def _parse_interval(event: Mapping[str, Any]) -> tuple[float, float]:
    begin, seconds = _parse_time(event["ts"]) / 1e6, _parse_time(event["dur"]) / 1e6
    if seconds < 0:
        raise ValueError(f"an event has a negative duration, {seconds} s")
    return begin, begin + seconds


def _parse_time(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_MICROSECONDS:
        raise ValueError(f"{value!r:.40} is not a time")
    return float(value)


def _parse_integer(value: Any, minimum: float = -math.inf, maximum: float = math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ValueError(f"{value!r:.40} is not an integer, or out of range")
    return value


def _parse_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not text")
    return value


def _check_count(held: Any, max_count: int, what: str) -> None:
    if len(held) > max_count:
        raise ValueError(f"it has more than {max_count:,} {what}")


_CHUNK_BYTES = 64 << 10
_MAX_CHARACTERS = 1 << 20
"""Maximum length of a value, 30 times that of the longest that stoker writes, a fetch with hundreds of spans."""
_GZIP = b"\x1f\x8b"
_SEPARATORS = re.compile(r"[\s,]*")
_LIST_OF_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_MAX_CUT_CHARACTERS = len("u00e9")
"""Maximum length of an escape sequence or literal, which the end of the text may cut."""


def read_values(path: Path) -> Iterator[Any]:
    """Yield the values of a JSON list; of a truncated file, all complete values.

    The list is a JSON array, the member ``traceEvents`` of an object, or a sequence of values, such as one per line.
    Anything behind its end is ignored. The file may be compressed with gzip, and may be a pipe: it is read once, in
    order.

    Raises:
        ConfigError: the file cannot be read, or does not contain such a list.
    """
    try:
        with path.open("rb") as file:
            yield from _parse_values(_open_text(file))
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error):
        raise ConfigError(f"{path} is not text, so neither JSON nor a list of numbers") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a list in JSON: {error}") from None


def _open_text(file: BufferedReader) -> Callable[[], str]:
    """Return a function that reads the next part of the text, which is empty only at the end."""
    source = gzip.GzipFile(fileobj=file) if file.peek(2).startswith(_GZIP) else file
    decoder = codecs.getincrementaldecoder("utf-8")()

    def read() -> str:
        text = ""
        while not text:
            try:
                data = source.read1(_CHUNK_BYTES)
            except EOFError:  # a truncated gzip file
                break
            if not data:
                break
            text = decoder.decode(data)
        return text

    return read


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


_decode = json.JSONDecoder(parse_constant=_refuse).raw_decode


def _parse_values(read: Callable[[], str]) -> Iterator[Any]:
    text, at = _find_list(read)
    while True:
        if between := _SEPARATORS.match(text, at):
            at = between.end()
        if text.startswith("]", at):
            return
        value, end = None, len(text)
        is_whole = False
        try:
            value, end = _decode(text, at)
            is_whole = True
        except json.JSONDecodeError as error:
            if not _is_truncated(text, error):
                raise
        if end < len(text):
            yield value
            at = end
            continue
        more = _read_more(read, len(text) - at)  # a value that ends with the text may continue in the next part
        if not more:
            if is_whole:
                yield value
            return
        text, at = text[at:] + more, 0


def _find_list(read: Callable[[], str]) -> tuple[str, int]:
    """Return the start of the text, and the position of the first value in it."""
    text = read().lstrip()
    while text.startswith("{") and len(text) < _MAX_CHARACTERS:
        if match := _LIST_OF_EVENTS.search(text):
            return text, match.end()
        if not (more := read()):
            break
        text += more
    return text, int(text.startswith("["))


def _read_more(read: Callable[[], str], kept_characters: int) -> str:
    """Return the next parts, at least as long as the kept text, so that a long value is not parsed too often."""
    if kept_characters > _MAX_CHARACTERS:
        raise ValueError(f"a value has more than {_MAX_CHARACTERS:,} characters")
    parts = [read()]
    while parts[-1] and sum(map(len, parts)) < kept_characters:
        parts.append(read())
    return "".join(parts)


def _is_truncated(text: str, error: json.JSONDecodeError) -> bool:
    """Return whether a value failed to parse only because the text ends within it."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - _MAX_CUT_CHARACTERS
