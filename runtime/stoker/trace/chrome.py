"""Writes a trace as a timeline that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is the JSON Array Format of the Trace Event Format (Chromium project), an open one: a list of events, whose
closing bracket may be missing. So what a killed run has written is a trace. Times are microseconds.

Rows: the training loop with every wait and what it was for; the slots of the ring with what they are filled with and
how long it is held; the requests, as many rows as were under way at once.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from stoker.errors import ConfigError
from stoker.sizes import format_bytes, parse_bytes
from stoker.trace.fetches import Fetch, Request
from stoker.trace.recorder import Wait

__all__ = ["LOOP_ROW", "REQUEST_ROWS", "SLOT_ROWS", "ChromeTrace"]

LOOP_ROW, SLOT_ROWS, REQUEST_ROWS = 1, 1_000, 1_000_000
"""The row of the training loop, and the first of slots and requests."""

_log = logging.getLogger("stoker")
_BUFFER_BYTES = 64 << 10
_FLUSH_SECONDS = 1.0
_END = b"\n]\n"
_FULL_BYTES = 4096
"""Kept for the last words of a trace that has reached its limit."""


class ChromeTrace:
    """A :class:`~stoker.trace.recorder.Sink` that is a file; thread-safe, and silent in a forked child.

    At most a second's events are in memory. A file that cannot be written to any more ends the trace, with a warning,
    and nothing else.

    Args:
        path: of the file, which is written anew; another trace that is being written under this name loses the name,
            and goes on in the file that it has.
        limit: the most that is written, bytes or ``"64MB"``; what comes behind is left out, and the trace says so.
        name: of the process in the timeline.
        clock: seconds, the one that waits are measured with.

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
        self.path = Path(path)
        limit_bytes = parse_bytes(limit)
        if limit_bytes < 4 * _FULL_BYTES:
            raise ConfigError(f"a trace needs limit={4 * _FULL_BYTES} bytes at least, not {limit_bytes}")
        try:
            file = _opened_anew(self.path)
        except OSError as error:
            raise ConfigError(f"the trace {self.path} cannot be written to: {error.strerror}; name another") from None
        self._lines = _Lines(self.path, file, limit_bytes)
        self._finalizer = weakref.finalize(self, self._lines.close)
        self._clock, self._origin = clock, clock()
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._rows: set[int] = set()
        self._lanes: list[float] = []
        self._ready = 0
        self._describe(0, "process_name", "name", name)
        self._describe(0, "process_labels", "labels", f"begun {datetime.now(UTC).isoformat(timespec='milliseconds')}")

    # What the recorder tells.

    def fetched(self, fetch: Fetch, offset_seconds: float) -> None:
        """Write an item's fetch, and the requests for it."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            row = self._slot_row(fetch)
            issued = fetch.issued_seconds
            spans = ",".join(
                f'["{span.phase}",{(span.begin_seconds - issued) * 1e3:.4f},{span.seconds * 1e3:.4f}]'
                for span in fetch.path()
            )
            args = f'"item":{fetch.item},"step":{fetch.step},"idle_ms":{fetch.idle_seconds * 1e3:.4f},"spans":[{spans}]'
            begin, end = issued + offset_seconds, fetch.ready_seconds + offset_seconds
            self._complete(row, "fetch", json.dumps(fetch.object), begin, end, args)
            for request in fetch.requests:
                self._request(request, offset_seconds)
            self._ready += 1
            self._count_ready(end)

    def released(self, fetch: Fetch, now_seconds: float, offset_seconds: float) -> None:
        """Write how long an item was held."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            begin, end = fetch.ready_seconds + offset_seconds, now_seconds + offset_seconds
            self._complete(self._slot_row(fetch), "held", '"held"', begin, end, f'"item":{fetch.item}')
            self._ready -= 1
            self._count_ready(end)

    def waited(self, wait: Wait) -> None:
        """Write what was waited for a batch."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            row = self._row(LOOP_ROW, "training loop")
            begin, end = wait.spans[0].begin_seconds, wait.spans[-1].end_seconds
            batch = f'"batch":{wait.batch}'
            self._complete(row, "batch", f'"batch {wait.batch}"', begin, end, f'{batch},"epoch":{wait.epoch}')
            for phase, begin, end, key in wait.spans:
                args = f'{batch},"phase":"{phase}","object":{json.dumps(key)}'
                self._complete(row, "wait", f'"waits for {phase}"', begin, end, args)

    def flush(self) -> None:
        """Write what is in memory."""
        if os.getpid() == self._pid:
            with self._lock:
                self._lines.flush()

    def close(self) -> None:
        """Write what is in memory, and end the list. Idempotent; what is told later goes on behind it."""
        if os.getpid() == self._pid:
            with self._lock:
                self._lines.close()

    def __enter__(self) -> ChromeTrace:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Events. They are formatted by hand, which takes a fifth of the time that a dictionary and its encoder do.

    def _request(self, request: Request, offset: float) -> None:
        sent, ended = request.sent_seconds + offset, request.ended_seconds + offset
        place = next((place for place, free in enumerate(self._lanes) if free <= sent), len(self._lanes))
        self._lanes[place : place + 1] = [ended]
        row = self._row(REQUEST_ROWS + place, f"request {place + 1}")
        whole = "true" if request.is_whole else "false"
        args = f'"object":{json.dumps(request.object)},"bytes":{request.size_bytes},"whole":{whole}'
        if request.begun_seconds is None:
            name = '"transfer"' if request.is_whole else '"no_answer"'
            self._complete(row, "request", name, sent, ended, args)
        else:
            begun = request.begun_seconds + offset
            self._complete(row, "request", '"first_byte"', sent, begun, args)
            self._complete(row, "request", '"transfer"', begun, ended, args)

    def _slot_row(self, fetch: Fetch) -> int:
        assert fetch.slot is not None  # noqa: S101 - sinks are told of what is in the ring
        return self._row(SLOT_ROWS + fetch.slot, f"slot {fetch.slot}")

    def _row(self, row: int, name: str) -> int:
        """Name a row of the timeline, the first time."""
        if row not in self._rows:
            self._rows.add(row)
            self._describe(row, "thread_name", "name", name)
            self._describe(row, "thread_sort_index", "sort_index", row)
        return row

    def _describe(self, row: int, what: str, key: str, value: str | int) -> None:
        self._write(
            f'{{"name":"{what}","ph":"M","pid":{self._pid},"tid":{row},"args":{{"{key}":{json.dumps(value)}}}}}'
        )

    def _count_ready(self, at_seconds: float) -> None:
        at = (at_seconds - self._origin) * 1e6
        self._write(
            f'{{"name":"ready","cat":"ring","ph":"C","pid":{self._pid},"tid":0,"ts":{at:.3f},'
            f'"args":{{"items":{max(0, self._ready)}}}}}'
        )

    def _complete(self, row: int, category: str, name: str, begin: float, end: float, args: str) -> None:
        """Write something that took time; ``name`` and what is between the braces of ``args`` are JSON."""
        # Moments are rounded, not durations: so what ends with what it lies in ends with it here, too.
        begin_ns, end_ns = round((begin - self._origin) * 1e9), round((end - self._origin) * 1e9)
        self._write(
            f'{{"name":{name},"cat":"{category}","ph":"X","pid":{self._pid},"tid":{row},'
            f'"ts":{begin_ns / 1e3:.3f},"dur":{max(0, end_ns - begin_ns) / 1e3:.3f},"args":{{{args}}}}}'
        )

    def _write(self, event: str) -> None:
        self._lines.add(event, self._clock())


class _Lines:
    """A JSON list in a file, a line an element: begun, gone on with, ended, and never more than so many bytes."""

    def __init__(self, path: Path, file: BinaryIO, limit_bytes: int) -> None:
        self._path, self._file, self._limit_bytes = path, file, limit_bytes
        self._pid = os.getpid()
        self._waiting: list[str] = []
        self._waiting_bytes = self._size_bytes = self._whole_bytes = 0
        self._flushed_seconds = 0.0
        self._is_over = False

    def add(self, line: str, now_seconds: float) -> None:
        if self._is_over:
            return
        if self._size_bytes + len(line) + 2 > self._limit_bytes - _FULL_BYTES:
            size = format_bytes(self._limit_bytes)
            _log.warning("the trace %s is full: what comes behind its %s is left out", self._path, size)
            self._put(f'{{"name":"the trace is full: {size}","ph":"i","s":"g","ts":0,"pid":0,"tid":0}}')
            self._is_over = True
            self.flush()
            return
        self._put(line)
        if self._waiting_bytes >= _BUFFER_BYTES or now_seconds - self._flushed_seconds >= _FLUSH_SECONDS:
            self._flushed_seconds = now_seconds
            self.flush()

    def _put(self, line: str) -> None:
        whole = (",\n" if self._size_bytes else "[\n") + line  # ASCII, so that characters are bytes
        self._size_bytes += len(whole)
        self._waiting_bytes += len(whole)
        self._waiting.append(whole)

    def flush(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting, self._waiting_bytes = "".join(self._waiting).encode("ascii"), [], 0
        try:
            if self._file.closed:
                self._open_again()
            self._write(waiting)
        except OSError as error:
            self._give_up(error)
        else:
            self._whole_bytes += len(waiting)

    def _open_again(self) -> None:
        file = self._path.open("r+b", buffering=0)
        if file.seek(0, os.SEEK_END) != self._whole_bytes + len(_END):
            file.close()
            raise FileExistsError(errno.EEXIST, "another file is in its place")
        self._file = file
        self._file.seek(self._whole_bytes)

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        self.flush()
        if not self._file.closed:
            try:
                self._write(_END)
            except OSError as error:
                self._give_up(error)
            self._file.close()

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def _give_up(self, error: OSError) -> None:
        """Leave whole lines behind, if that much is possible yet."""
        self._is_over = True
        _log.warning("the trace %s ends here: %s", self._path, error.strerror)
        if not self._file.closed:
            with suppress(OSError):
                self._file.truncate(self._whole_bytes)


def _opened_anew(path: Path) -> BinaryIO:
    """Open a new file, so that two who write under one name, whom nobody told their ranks, do not mix their lines."""
    for _ in range(3):  # others may do the same at this moment
        if path.is_file() and not path.is_symlink():
            with suppress(OSError):
                path.unlink()
        with suppress(FileExistsError):
            return path.open("xb", buffering=0)
    return path.open("wb", buffering=0)
