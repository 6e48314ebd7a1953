"""``stoker trace``: what a run waited for, from the trace that its loader wrote."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np

from stoker.cli.command import Command
from stoker.cli.flags import positive
from stoker.cli.output import counted, printable, table
from stoker.sizes import format_bytes
from stoker.trace.picture import Section, draw
from stoker.trace.recorder import WORST_WAITS
from stoker.trace.recording import Recording, read_trace

__all__ = ["command"]


def _configure(parser: ArgumentParser) -> None:
    what = parser.add_subparsers(title="what to do", metavar="WHAT", required=True, dest="what")
    view = what.add_parser("view", help="print what was waited for, and the worst waits with object and phase")
    view.add_argument("trace", metavar="FILE", type=Path, help="a trace, from Loader(url, trace=FILE)")
    view.add_argument("--worst", type=positive, default=WORST_WAITS, metavar="N", help="how many waits (default: 10)")
    picture = what.add_parser("picture", help="draw batches, the fill of the ring, and fetches over time")
    picture.add_argument("trace", metavar="FILE", type=Path, help="a trace, from Loader(url, trace=FILE)")
    picture.add_argument("--out", required=True, type=Path, metavar="FILE", help="a picture: .png or .html")
    begin = "first second of the trace to show (default: its beginning, or around the worst wait of a long one)"
    picture.add_argument("--begin", type=float, metavar="SECOND", help=begin)
    picture.add_argument("--seconds", type=float, metavar="N", help="how many (default: all, or the first 500 fetches)")


def _run(args: Namespace) -> int:
    recording = read_trace(args.trace)
    if args.what == "picture":
        shown = draw(recording, args.out, Section.of(recording, args.begin, args.seconds), args.trace.name)
        print(f"{args.out}: seconds {shown.begin_seconds:.3f} to {shown.end_seconds:.3f} of {args.trace}")
        return 0
    print(f"{printable(str(args.trace))}: {_summary(recording)}")
    if recording.waits:
        print(table(_phases(recording)))
        print("worst waits")
        print(table(_worst(recording, args.worst)))
    if recording.answers:
        print(_requests(recording))
    if recording.is_full:
        print("the trace reached its limit: what came later is not in it")
    return 0


def _summary(recording: Recording) -> str:
    waited = sum(wait.seconds for wait in recording.waits)
    share = waited / recording.seconds if recording.seconds else 0.0
    batches = f"{len(recording.waits):,} {'batch' if len(recording.waits) == 1 else 'batches'}"
    return f"{batches} in {recording.seconds:.3f} s, of which {waited:.3f} s ({share:.1%}) were waited"


def _phases(recording: Recording) -> list[tuple[str, ...]]:
    whole = sum(wait.seconds for wait in recording.waits) or 1.0
    rows: list[tuple[str, ...]] = [("phase", "seconds", "share", "batches")]
    for phase, seconds in recording.by_phase().items():
        batches = sum(any(span.phase is phase for span in wait.spans) for wait in recording.waits)
        rows.append((str(phase), f"{seconds:.3f}", f"{seconds / whole:.1%}", f"{batches:,}"))
    return rows


def _worst(recording: Recording, count: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("at", "batch", "waited", "most of it", "", "object")]
    for wait in sorted((wait for wait in recording.waits if wait.seconds), key=lambda wait: -wait.seconds)[:count]:
        (phase, key), seconds = next(iter(wait.by_cause().items()))
        at, batch = f"{wait.spans[0].begin_seconds:.3f} s", f"{wait.epoch}/{wait.batch}"
        rows.append((at, batch, f"{wait.seconds:.4f} s", str(phase), f"{seconds / wait.seconds:.0%}", printable(key)))
    return rows


def _requests(recording: Recording) -> str:
    answers = recording.answers
    begun = [answer.first_byte_seconds for answer in answers if answer.is_begun]
    text = f"{counted(len(answers), 'request')}"
    if begun:
        median, late = np.percentile(begun, [50, 99])
        text += f"; first byte after {median * 1e3:.1f} ms (median), {late * 1e3:.1f} ms (99%)"
    rates = [each.size_bytes / each.transfer_seconds for each in answers if each.is_whole and each.transfer_seconds]
    if rates:
        text += f"; {format_bytes(float(np.median(rates)))}/s in each (median)"
    lost = len(answers) - sum(answer.is_whole for answer in answers)
    return text + (f"; {lost:,} failed or were overtaken by a hedge" if lost else "")


command = Command(name="trace", help="say what a run waited for, from its trace", configure=_configure, run=_run)
