"""A file of events that grows with a run: a JSON list, a line an element, and never more than so many bytes."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from stoker._base.sizes import format_bytes, parse_bytes
from stoker.errors import ConfigError

__all__ = ["EventFile"]

_log = logging.getLogger("stoker")
_BUFFER_BYTES = 64 << 10
_FLUSH_SECONDS = 1.0
_END = b"\n]\n"
_FULL_BYTES = 4096
"""Kept for the last words of a trace that has reached its limit."""


class EventFile:
    """Is begun, gone on with, and ended; what it holds is JSON after each, but for the bracket at its end.

    At most a second's events are in memory. A file that cannot be written to any more ends the trace, with a warning,
    and nothing else. A forked child writes nothing.

    Args:
        path: of the file, which is written anew; another trace that is being written under this name loses the name,
            and goes on in the file that it has.
        limit: the most that is written, bytes or ``"64MB"``; what comes behind is left out, and the last event says so.
        clock: seconds, of any kind that go on.

    Attributes:
        lock: to be held by whoever adds events.

    Raises:
        ConfigError: the file cannot be written to, or the limit is too small.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, limit: int | str = "64MB", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.path, self.lock = Path(path), threading.Lock()
        self._limit_bytes = parse_bytes(limit)
        if self._limit_bytes < 4 * _FULL_BYTES:
            raise ConfigError(f"a trace needs limit={4 * _FULL_BYTES} bytes at least, not {self._limit_bytes}")
        try:
            self._file = _opened_anew(self.path)
        except OSError as error:
            raise ConfigError(f"the trace {self.path} cannot be written to: {error.strerror}; name another") from None
        self._clock = clock
        self._pid = os.getpid()
        self._waiting: list[str] = []
        self._waiting_bytes = self._size_bytes = self._whole_bytes = 0
        self._flushed_seconds = 0.0
        self._is_over = False

    @property
    def is_ours(self) -> bool:
        """Whether this process made it, and did not come of a fork since."""
        return os.getpid() == self._pid

    def add(self, events: str) -> None:
        """Write events, lines with a comma and a line's end between them: ASCII, so that characters are bytes."""
        if self._is_over:
            return
        if self._size_bytes + len(events) + 2 > self._limit_bytes - _FULL_BYTES:
            size = format_bytes(self._limit_bytes)
            _log.warning("the trace %s is full: what comes behind its %s is left out", self.path, size)
            self._put(f'{{"name":"the trace is full: {size}","ph":"i","s":"g","ts":0,"pid":0,"tid":0}}')
            self._is_over = True
            self._write_waiting()
            return
        self._put(events)
        now_seconds = self._clock()
        if self._waiting_bytes >= _BUFFER_BYTES or now_seconds - self._flushed_seconds >= _FLUSH_SECONDS:
            self._flushed_seconds = now_seconds
            self._write_waiting()

    def flush(self) -> None:
        """Write what is in memory."""
        if self.is_ours:
            with self.lock:
                self._write_waiting()

    def close(self) -> None:
        """Write what is in memory, and end the list. Idempotent; what is added later goes on behind it."""
        if not self.is_ours:
            return
        with self.lock:
            self._write_waiting()
            if self._file.closed:
                return
            try:
                self._write(_END)
            except OSError as error:
                self._give_up(error)
            self._file.close()

    def _put(self, events: str) -> None:
        size_bytes = len(events) + 2
        self._size_bytes += size_bytes
        self._waiting_bytes += size_bytes
        self._waiting.append(events)

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        text = (",\n" if self._whole_bytes else "[\n") + ",\n".join(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        try:
            if self._file.closed:
                self._open_again()
            self._write(text.encode("ascii"))
        except OSError as error:
            self._give_up(error)
        else:
            self._whole_bytes += len(text)

    def _open_again(self) -> None:
        file = self.path.open("r+b", buffering=0)
        if file.seek(0, os.SEEK_END) != self._whole_bytes + len(_END):
            file.close()
            raise FileExistsError(errno.EEXIST, "another file is in its place")
        self._file = file
        self._file.seek(self._whole_bytes)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def _give_up(self, error: OSError) -> None:
        """Leave whole lines behind, if that much is possible yet."""
        self._is_over = True
        _log.warning("the trace %s ends here: %s", self.path, error.strerror)
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
