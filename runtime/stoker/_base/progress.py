"""How far a long command has come: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
import shutil
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from stoker._base.sizes import format_bytes

_BAR_SECONDS, _LINE_SECONDS = 0.2, 5.0
_WINDOW_SECONDS = 20.0
_MAX_BAR_COLUMNS = 40
_ECHO_COLUMNS = 3  # the terminal's echo of ^C must not wrap, or the line could not be erased
_BLOCKS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much of something.

    Attributes:
        count: how many; None if that is not known.
        size_bytes: of all of them.
    """

    count: int | None
    size_bytes: int


class Progress:
    """Tells how far a task has come, with its rate of late and the time to its end; ``async with`` around the task.

    Args:
        verb: what happens, such as ``packing``.
        unit: what is counted, such as ``samples``.
        total: how much there is; without a count, its bytes tell the end only roughly.
        stream: where to write to.
        quiet: write nothing.
    """

    def __init__(self, verb: str, unit: str, total: Amount, stream: TextIO, *, quiet: bool = False) -> None:
        self._verb, self._unit, self._total = verb, unit, total
        self._stream, self._quiet = stream, quiet
        self._is_bar = stream.isatty()
        self._blocks = _BLOCKS if (stream.encoding or "").lower().startswith("utf") else " #"
        self._done = Amount(count=0, size_bytes=0)
        self._past: deque[tuple[float, Amount]] = deque()
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Progress:
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

    def start(self, done: Amount) -> None:
        """Say that so much was done before, which counts in how far it has come and not in the rate."""
        self._done = done
        self._past.clear()
        self._past.append((asyncio.get_running_loop().time(), done))

    def update(self, done: Amount) -> None:
        """Say how much is done."""
        self._done = done

    def add(self, size_bytes: int) -> None:
        """Say that one more is done, of so many bytes."""
        self._done = Amount(count=(self._done.count or 0) + 1, size_bytes=self._done.size_bytes + size_bytes)

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
        """Return what is known now, with a bar if there is room for one within ``columns``."""
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

    def _fraction(self, done: Amount) -> float:
        if self._total.count is not None:
            return min(1.0, (done.count or 0) / max(1, self._total.count))
        return min(1.0, done.size_bytes / max(1, self._total.size_bytes))

    def _bar(self, fraction: float, width: int) -> str:
        steps = len(self._blocks) - 1
        full, part = divmod(int(fraction * width * steps), steps)
        return (self._blocks[-1] * full + (self._blocks[part] if part else "")).ljust(width, "·" if steps > 1 else ".")


def format_seconds(seconds: float) -> str:
    """Return a duration as ``m:ss`` or ``h:mm:ss``."""
    minutes, whole = divmod(round(min(seconds, 999 * 3600)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"
