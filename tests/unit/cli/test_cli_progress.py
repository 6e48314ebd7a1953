from __future__ import annotations

import asyncio
import io

import pytest

from stoker._base.progress import ProgressReporter, WorkAmount, format_seconds
from stoker.testing import run_virtual
from support.terminal import Terminal


@pytest.fixture(autouse=True)
def _xterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def progress_output(stream: io.StringIO, *, total: WorkAmount, resumed: int = 0, quiet: bool = False) -> str:
    """Return what is written while 100 samples of 10 bytes a second are done for 12 s."""

    async def task() -> None:
        async with ProgressReporter("packing", "samples", total, stream, quiet=quiet) as progress:
            if resumed:
                progress.start(WorkAmount(count=resumed, size_bytes=resumed * 10))
            for second in range(1, 13):
                await asyncio.sleep(1)
                progress.update(WorkAmount(count=resumed + 100 * second, size_bytes=(resumed + 100 * second) * 10))

    run_virtual(task())
    return stream.getvalue()


def test_without_a_terminal_a_plain_line_comes_every_few_seconds() -> None:
    lines = progress_output(io.StringIO(), total=WorkAmount(count=2000, size_bytes=0)).splitlines()
    assert lines == [
        "packing  20% 400/2,000 samples · 3.91 KiB · 800 B/s · ETA 0:20",
        "packing  45% 900/2,000 samples · 8.79 KiB · 900 B/s · ETA 0:12",
    ]


def test_on_a_terminal_one_line_is_redrawn_and_erased_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = progress_output(Terminal(), total=WorkAmount(count=2000, size_bytes=0))
    assert "\n" not in text
    assert text.endswith("\r\x1b[K")
    frames = [frame.removesuffix("\x1b[K") for frame in text.split("\r")[1:-1]]
    assert frames[0].startswith("packing   0% ·")
    assert "█" in frames[-1]
    assert max(map(len, frames)) < 100


def test_a_narrow_terminal_shows_no_bar_and_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    frames = progress_output(Terminal(), total=WorkAmount(count=2000, size_bytes=0)).split("\r")
    assert max(len(frame.removesuffix("\x1b[K")) for frame in frames) < 40


def test_a_stream_that_is_not_unicode_gets_an_ascii_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    class Old(Terminal):
        encoding = "ascii"

    assert "#" in progress_output(Old(), total=WorkAmount(count=2000, size_bytes=0))


def test_what_was_done_before_does_not_count_in_the_rate() -> None:
    lines = progress_output(io.StringIO(), total=WorkAmount(count=2000, size_bytes=0), resumed=500).splitlines()
    assert lines[-1] == "packing  70% 1,400/2,000 samples · 13.7 KiB · 900 B/s · ETA 0:07"


def test_without_a_count_bytes_tell_the_end() -> None:
    lines = progress_output(io.StringIO(), total=WorkAmount(count=None, size_bytes=20_000)).splitlines()
    assert lines[-1] == "packing  45% 900 samples · 8.79 KiB · 900 B/s · ETA 0:12"


def test_quiet_writes_nothing() -> None:
    assert progress_output(Terminal(), total=WorkAmount(count=1, size_bytes=0), quiet=True) == ""


def test_an_error_in_the_task_passes_and_the_bar_is_erased() -> None:
    terminal = Terminal()

    async def task() -> None:
        async with ProgressReporter("packing", "samples", WorkAmount(count=1, size_bytes=1), terminal):
            await asyncio.sleep(1)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_virtual(task())
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (1e12, "999:00:00")]
)
def test_durations_are_minutes_or_hours(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_terminal_that_cannot_redraw_shows_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    total = WorkAmount(count=2000, size_bytes=0)
    monkeypatch.setenv("TERM", "dumb")
    assert progress_output(Terminal(), total=total) == progress_output(io.StringIO(), total=total)
