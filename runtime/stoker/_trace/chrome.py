"""Writes traces as timelines that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is the JSON Array Format of the Trace Event Format (Chromium project): a list of events, whose closing
bracket may be missing, so the file of a killed run is a valid trace. Times are in microseconds.

Rows: the training loop, with every wait and its cause; the copies of batches to a device; the slots of the ring, with
the object in each slot and how long it is held; the requests, in as many rows as were in flight at once.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import BinaryIO

from stoker._base.closeable import Closeable
from stoker._base.fetch_record import DeviceCopy, Fetch, Request
from stoker._base.recorder import Wait
from stoker._base.sizes import format_bytes, parse_bytes
from stoker.abc import TraceSink
from stoker.errors import ConfigError

_log = logging.getLogger("stoker")
_BUFFER_BYTES = 64 << 10
_FLUSH_SECONDS = 1.0
_END = b"\n]\n"
_RESERVED_BYTES = 4096
"""Reserved for the last events of a trace that reaches its limit."""


class EventFile:
    """A trace file; after every write it is valid JSON, but for the closing bracket.

    At most one second of events is buffered in memory. If the file can no longer be written to, the trace ends with a
    warning. A forked child writes nothing.

    Args:
        path: path of the file, which is replaced; another trace that is being written there continues in the unlinked
            file.
        limit: maximum size, in bytes or as ``"64MB"``; later events are left out, and the last event says so.
        clock: returns a monotonic time in seconds.

    Attributes:
        lock: lock that callers hold while they add events.

    Raises:
        ConfigError: the file cannot be written to, or the limit is too small.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, limit: int | str = "64MB", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.path, self.lock = Path(path), threading.Lock()
        self._limit_bytes = parse_bytes(limit)
        if self._limit_bytes < 4 * _RESERVED_BYTES:
            raise ConfigError(
                f"limit={self._limit_bytes} is too small: a trace needs at least {4 * _RESERVED_BYTES} bytes"
            )
        try:
            self._file = _open_new(self.path)
        except OSError as error:
            raise ConfigError(
                f"the trace {self.path} cannot be written to: {error.strerror}; choose another path"
            ) from None
        self._clock = clock
        self._pid = os.getpid()
        self._buffer: list[str] = []
        self._buffered_bytes = self._written_bytes = 0
        self._flushed_seconds = 0.0
        self._is_ended = False

    @property
    def is_own_process(self) -> bool:
        """Whether this process created it, rather than inherited it by a fork."""
        return os.getpid() == self._pid

    def add(self, events: str) -> None:
        """Write events: ASCII lines, separated by a comma and a line feed, so that one character is one byte."""
        if self._is_ended:
            return
        if self._written_bytes + self._buffered_bytes + len(events) + 2 > self._limit_bytes - _RESERVED_BYTES:
            size = format_bytes(self._limit_bytes)
            _log.warning("the trace %s is full: everything after the first %s is left out", self.path, size)
            self._append(f'{{"name":"the trace is full: {size}","ph":"i","s":"g","ts":0,"pid":0,"tid":0}}')
            self._is_ended = True
            self._write_buffer()
            return
        self._append(events)
        now_seconds = self._clock()
        if self._buffered_bytes >= _BUFFER_BYTES or now_seconds - self._flushed_seconds >= _FLUSH_SECONDS:
            self._flushed_seconds = now_seconds
            self._write_buffer()

    def flush(self) -> None:
        """Write the buffered events."""
        if self.is_own_process:
            with self.lock:
                self._write_buffer()

    def close(self) -> None:
        """Write the buffered events and end the list. Idempotent; events added later continue the list."""
        if not self.is_own_process:
            return
        with self.lock:
            self._write_buffer()
            if self._file.closed:
                return
            try:
                self._write(_END)
            except OSError as error:
                self._abort(error)
            self._file.close()

    def _append(self, events: str) -> None:
        self._buffered_bytes += len(events) + 2
        self._buffer.append(events)

    def _write_buffer(self) -> None:
        if not self._buffer:
            return
        text = (",\n" if self._written_bytes else "[\n") + ",\n".join(self._buffer)
        self._buffer.clear()
        self._buffered_bytes = 0
        try:
            if self._file.closed:
                self._reopen()
            self._write(text.encode("ascii"))
        except OSError as error:
            self._abort(error)
        else:
            self._written_bytes += len(text)

    def _reopen(self) -> None:
        file = self.path.open("r+b", buffering=0)
        if file.seek(0, os.SEEK_END) != self._written_bytes + len(_END):
            file.close()
            raise FileExistsError(errno.EEXIST, "another file has replaced it")
        self._file = file
        self._file.seek(self._written_bytes)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def _abort(self, error: OSError) -> None:
        """End the trace after an error; cut the file behind the last complete line, if possible."""
        self._is_ended = True
        _log.warning("the trace %s ends here: %s", self.path, error.strerror)
        if not self._file.closed:
            with suppress(OSError):
                self._file.truncate(self._written_bytes)


def _open_new(path: Path) -> BinaryIO:
    """Open a new file, so that two processes that trace to the same path do not mix their lines."""
    for _ in range(3):  # another process may do the same at this moment
        if path.is_file() and not path.is_symlink():
            with suppress(OSError):
                path.unlink()
        with suppress(FileExistsError):
            return path.open("xb", buffering=0)
    return path.open("wb", buffering=0)


LOOP_ROW, COPY_ROW, SLOT_ROWS, REQUEST_ROWS = 1, 2, 1_000, 1_000_000
"""Row number of the training loop, of copies to a device, of the first slot and of the first request."""
MAX_RANKS = 16
"""Maximum number of ranks of a simulation to trace: more would fill the file with their first seconds."""


class ProcessTrace:
    """A :class:`~stoker.abc.TraceSink` that writes the rows of one process into a file, which it does not close.

    Thread-safe. A forked child writes nothing.

    Args:
        file: file of the events.
        process: number of the process in the timeline.
        name: name of the process in the timeline.
        origin_seconds: time 0 of the trace, on the clock of the waits.
        label: additional label of the process; default none.
    """

    def __init__(self, file: EventFile, process: int, name: str, origin_seconds: float, label: str = "") -> None:
        self._file, self._process, self._origin = file, process, origin_seconds
        self._rows: set[int] = set()
        self._row_free_seconds: list[float] = []
        self._ready = 0
        with file.lock:
            file.add(self._metadata_event(0, "process_name", "name", quoted(name)))
            if label:
                file.add(self._metadata_event(0, "process_labels", "labels", quoted(label)))

    def fetched(self, fetch: Fetch, offset_seconds: float) -> None:
        """Write an item's fetch, and the requests for it."""
        if not self._file.is_own_process:
            return
        with self._file.lock:
            shift = offset_seconds - self._origin
            issued = fetch.issued_seconds
            path = fetch.path()
            spans = ",".join(
                [f'["{phase}",{(begin - issued) * 1e3:.4f},{(end - begin) * 1e3:.4f}]' for phase, begin, end, _ in path]
            )
            args = f'"item":{fetch.item},"step":{fetch.step},"idle_ms":{fetch.idle_seconds * 1e3:.4f},"spans":[{spans}]'
            if fetch.tiers:
                args += f',"tiers":[{",".join(f"[{quoted(name)},{quoted(outcome)}]" for name, outcome in fetch.tiers)}]'
            events: list[str] = []
            row = self._slot_row(fetch, events)
            begin = issued + shift
            end = fetch.ready_seconds + shift
            events.append(self._duration_event(row, "fetch", quoted(fetch.object), begin, end, args))
            for request in fetch.requests:
                self._request(request, shift, events)
            self._ready += 1
            events.append(self._counter_event(end))
            self._file.add(",\n".join(events))

    def released(self, fetch: Fetch, now_seconds: float, offset_seconds: float) -> None:
        """Write how long a slot held an item."""
        if not self._file.is_own_process:
            return
        with self._file.lock:
            shift, events = offset_seconds - self._origin, list[str]()
            row = self._slot_row(fetch, events)
            begin = fetch.ready_seconds + shift
            end = now_seconds + shift
            events.append(self._duration_event(row, "held", '"held"', begin, end, f'"item":{fetch.item}'))
            self._ready = max(0, self._ready - 1)
            events.append(self._counter_event(end))
            self._file.add(",\n".join(events))

    def waited(self, wait: Wait) -> None:
        """Write the wait for a batch, and its causes."""
        if not self._file.is_own_process:
            return
        with self._file.lock:
            origin, events = self._origin, list[str]()
            row = self._row(LOOP_ROW, "training loop", events)
            begin = wait.spans[0].begin_seconds - origin
            end = wait.spans[-1].end_seconds - origin
            batch = f'"batch":{wait.batch}'
            events.append(
                self._duration_event(row, "batch", f'"batch {wait.batch}"', begin, end, f'{batch},"epoch":{wait.epoch}')
            )
            for phase, begin, end, key in wait.spans:
                args = f'{batch},"phase":"{phase}","object":{quoted(key)}'
                events.append(
                    self._duration_event(row, "wait", f'"waits for {phase}"', begin - origin, end - origin, args)
                )
            self._file.add(",\n".join(events))

    def copied(self, copy: DeviceCopy) -> None:
        """Write the copy of a batch to a device."""
        if not self._file.is_own_process:
            return
        with self._file.lock:
            events = list[str]()
            row = self._row(COPY_ROW, f"copies to {copy.device}", events)
            begin, end = copy.begin_seconds - self._origin, copy.end_seconds - self._origin
            events.append(self._duration_event(row, "copy", '"copy"', begin, end, f'"bytes":{copy.size_bytes}'))
            self._file.add(",\n".join(events))

    def flush(self) -> None:
        """Write the buffered events."""
        self._file.flush()

    # Events. Formatting them by hand takes a fifth of the time of a dictionary and a JSON encoder.

    def _request(self, request: Request, shift: float, events: list[str]) -> None:
        sent, ended = request.sent_seconds + shift, request.ended_seconds + shift
        for candidate, free in enumerate(self._row_free_seconds):
            if free <= sent:
                self._row_free_seconds[candidate] = ended
                break
        else:
            candidate = len(self._row_free_seconds)
            self._row_free_seconds.append(ended)
        row = self._row(REQUEST_ROWS + candidate, f"request {candidate + 1}", events)
        whole = "true" if request.is_whole else "false"
        args = f'"object":{quoted(request.object)},"bytes":{request.size_bytes},"whole":{whole}'
        if request.begun_seconds is None:
            name = '"transfer"' if request.is_whole else '"no_answer"'
            events.append(self._duration_event(row, "request", name, sent, ended, args))
        else:
            first_byte = request.begun_seconds + shift
            events.append(self._duration_event(row, "request", '"first_byte"', sent, first_byte, args))
            events.append(self._duration_event(row, "request", '"transfer"', first_byte, ended, args))

    def _slot_row(self, fetch: Fetch, events: list[str]) -> int:
        assert fetch.slot is not None  # noqa: S101 - sinks get fetches of items in the ring
        return self._row(SLOT_ROWS + fetch.slot, f"slot {fetch.slot}", events)

    def _row(self, row: int, name: str, events: list[str]) -> int:
        """Return a row of the timeline; name it when it is first used."""
        if row not in self._rows:
            self._rows.add(row)
            events.append(self._metadata_event(row, "thread_name", "name", quoted(name)))
            events.append(self._metadata_event(row, "thread_sort_index", "sort_index", str(row)))
        return row

    def _metadata_event(self, row: int, what: str, key: str, value: str) -> str:
        return f'{{"name":"{what}","ph":"M","pid":{self._process},"tid":{row},"args":{{"{key}":{value}}}}}'

    def _counter_event(self, at_seconds: float) -> str:
        """Return a counter event with the number of ready items."""
        return (
            f'{{"name":"ready","cat":"ring","ph":"C","pid":{self._process},"tid":0,"ts":{at_seconds * 1e6:.3f},'
            f'"args":{{"items":{self._ready}}}}}'
        )

    def _duration_event(self, row: int, category: str, name: str, begin: float, end: float, args: str) -> str:
        """Return an event with a duration; ``name`` is JSON, ``args`` the members of a JSON object."""
        # Round times, not durations, so that an event that ends with its parent still does.
        begin_ns, end_ns = round(begin * 1e9), round(end * 1e9)
        return (
            f'{{"name":{name},"cat":"{category}","ph":"X","pid":{self._process},"tid":{row},'
            f'"ts":{begin_ns / 1e3:.3f},"dur":{max(0, end_ns - begin_ns) / 1e3:.3f},"args":{{{args}}}}}'
        )


class ChromeTrace(ProcessTrace, Closeable):
    """A trace of this process in a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

    At most one second of events is buffered in memory. If the file can no longer be written to, the trace ends with a
    warning.

    Example:
        >>> from stoker_torch import Loader
        >>> with ChromeTrace("trace.json") as trace, Loader("s3://bucket/train", batch_size=32, trace=trace) as loader:
        ...     for batch in loader:
        ...         train_step(batch["image"], batch["label"])

    Args:
        path: path of the file, which is replaced; another trace that is being written there continues in the unlinked
            file.
        limit: maximum size, in bytes or as ``"64MB"``; later events are left out, and the trace says so.
        name: name of the process in the timeline.
        clock: returns a time in seconds; must be the clock that measures the waits.

    Raises:
        ConfigError: the file cannot be written to, or the limit is too small.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        limit: int | str = "64MB",
        name: str = "stoker",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        file = EventFile(path, limit=limit, clock=clock)
        self._finalizer = weakref.finalize(self, file.close)
        started_text = f"begun {datetime.now(UTC).isoformat(timespec='milliseconds')}"
        super().__init__(file, os.getpid(), name, clock(), started_text)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._file.path

    def close(self) -> None:
        """Write the buffered events and end the list. Idempotent; later events continue the list."""
        self._file.close()


@contextmanager
def rank_traces(
    path: str | os.PathLike[str], *, limit: int | str = "64MB"
) -> Iterator[Callable[[int], Sequence[TraceSink]]]:
    """Trace the first :data:`MAX_RANKS` ranks of a simulation in one file, each as a process.

    Yields a function that returns the sinks of a rank, none for later ranks. Times are virtual, from the run's start.

    Args:
        path: path of the file, which is replaced.
        limit: maximum size, in bytes or as ``"64MB"``; later events are left out, and the trace says so.

    Raises:
        ConfigError: the file cannot be written to, or the limit is too small.
    """
    file = EventFile(path, limit=limit)
    try:
        yield lambda rank: [ProcessTrace(file, rank + 1, f"rank {rank}", 0.0)] if rank < MAX_RANKS else []
    finally:
        file.close()
