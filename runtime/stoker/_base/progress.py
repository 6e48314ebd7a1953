"""Progress of a long command: a bar on a terminal, and otherwise a line every few seconds."""

from __future__ import annotations

import asyncio
import shutil
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from stoker._base.sizes import format_bytes
from stoker._base.terminal import can_redraw

_BAR_SECONDS, _LINE_SECONDS = 0.2, 5.0
_WINDOW_SECONDS = 20.0
_MAX_BAR_COLUMNS = 40
_ECHO_COLUMNS = 3  # reserved for the terminal's echo of ^C, which must not wrap the line
_BLOCKS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkAmount:
    """An amount of work.

    Attributes:
        count: number of items; None if unknown.
        size_bytes: total size of the items.
    """

    count: int | None
    size_bytes: int


class ProgressReporter:
    """Writes the progress, recent rate and remaining time of the task in an ``async with`` block.

    Args:
        verb: name of the activity, such as ``packing``.
        unit: name of the items, such as ``samples``.
        total: total amount; without a count, the progress is estimated from the bytes.
        stream: stream to write to.
        quiet: whether to write nothing; default False.
    """

    def __init__(self, verb: str, unit: str, total: WorkAmount, stream: TextIO, *, quiet: bool = False) -> None:
        self._verb, self._unit, self._total = verb, unit, total
        self._stream, self._quiet = stream, quiet
        self._is_bar = can_redraw(stream)
        self._blocks = _BLOCKS if (stream.encoding or "").lower().startswith("utf") else " #"
        self._done = WorkAmount(count=0, size_bytes=0)
        self._past: deque[tuple[float, WorkAmount]] = deque()
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ProgressReporter:
        self.start(self._done)
        if not self._quiet:
            self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._ticker is None:
            return
        self._ticker.cancel()
        with suppress(asyncio.CancelledError):
            await self._ticker
        if self._is_bar:
            self._write("\r\x1b[K")

    def start(self, done: WorkAmount) -> None:
        """Set the amount that was done before, which counts for the progress but not for the rate."""
        self._done = done
        self._past.clear()
        self._past.append((asyncio.get_running_loop().time(), done))

    def update(self, done: WorkAmount) -> None:
        """Set the amount that is done."""
        self._done = done

    def add(self, size_bytes: int) -> None:
        """Add one item of ``size_bytes`` bytes to the amount that is done."""
        self._done = WorkAmount(count=(self._done.count or 0) + 1, size_bytes=self._done.size_bytes + size_bytes)

    async def _tick(self) -> None:
        while True:
            if self._is_bar:
                columns = shutil.get_terminal_size().columns - _ECHO_COLUMNS
                self._write(f"\r{self._line(columns)[:columns]}\x1b[K")
            await asyncio.sleep(_BAR_SECONDS if self._is_bar else _LINE_SECONDS)
            if not self._is_bar:
                self._write(f"{self._line(0)}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _line(self, columns: int) -> str:
        """Return the current line, with a bar if it fits within ``columns``."""
        now = asyncio.get_running_loop().time()
        self._past.append((now, self._done))
        while now - self._past[0][0] > _WINDOW_SECONDS and len(self._past) > 2:
            self._past.popleft()
        past_seconds, past = self._past[0]
        seconds = now - past_seconds
        rate = (self._done.size_bytes - past.size_bytes) / seconds if seconds > 0 else 0.0
        fraction = self._fraction(self._done)
        speed = (fraction - self._fraction(past)) / seconds if seconds > 0 else 0.0
        count = f"{self._done.count:,}" + (f"/{self._total.count:,}" if self._total.count is not None else "")
        parts = [
            f"{count} {self._unit}",
            format_bytes(self._done.size_bytes),
            f"{format_bytes(rate)}/s",
            f"ETA {format_seconds((1 - fraction) / speed) if speed > 0 else '--:--'}",
        ]
        head, tail = f"{self._verb} {fraction:4.0%} ", " · ".join(parts)
        width = min(columns // 4, _MAX_BAR_COLUMNS)
        bar = f"{self._bar(fraction, width)} " if len(head) + width + 1 + len(tail) <= columns else ""
        return head + bar + tail

    def _fraction(self, done: WorkAmount) -> float:
        if self._total.count is not None:
            return min(1.0, (done.count or 0) / max(1, self._total.count))
        return min(1.0, done.size_bytes / max(1, self._total.size_bytes))

    def _bar(self, fraction: float, width: int) -> str:
        steps = len(self._blocks) - 1
        full, part = divmod(int(fraction * width * steps), steps)
        return (self._blocks[-1] * full + (self._blocks[part] if part else "")).ljust(width, "·" if steps > 1 else ".")


def format_seconds(seconds: float) -> str:
    """Return a duration as ``m:ss`` or ``h:mm:ss``."""
    minutes, seconds_left = divmod(round(min(seconds, 999 * 3600)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"
