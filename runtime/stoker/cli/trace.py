"""``stoker trace``: shows what a run waited for, from the trace that its loader wrote."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker._base.recorder import WORST_WAITS
from stoker._base.sizes import format_bytes
from stoker._trace.picture import TraceSection, TraceSummary, draw_trace
from stoker._trace.recording import TraceEvent, read_trace
from stoker.cli.flags import add_actions, add_json, positive
from stoker.cli.output import format_count, json_text, make_printable, table
from stoker.errors import ConfigError

_TRACE_HELP = "a trace, plain or .gz, written by Loader(url, trace=FILE) or stoker simulate --trace FILE"


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = add_actions(parser)
    text = "print the time waited by phase, and the worst waits with object and phase"
    view = add("view", text, example="stoker trace view run.trace.gz")
    view.add_argument("--worst", type=positive, default=WORST_WAITS, metavar="N", help="number of waits (default: 10)")
    add_json(view)
    text = "draw batches, the ring's fill level and fetches over time"
    picture = add("picture", text, example="stoker trace picture run.trace.gz --out run.html")
    for each in (view, picture):
        each.add_argument("trace", metavar="FILE", type=Path, help=_TRACE_HELP)
    picture.add_argument("--out", required=True, type=Path, metavar="FILE", help="picture to write: .png or .html")
    begin = "first second to show (default: the start of the trace; for a long trace, near its worst wait)"
    picture.add_argument("--begin", type=float, metavar="SECOND", help=begin)
    picture.add_argument("--seconds", type=float, metavar="N", help="seconds to show (default: all, or ~500 fetches)")
    rank = "rank of a simulated run, from 0 (default: the one with the worst wait)"
    picture.add_argument("--rank", type=int, metavar="N", help=rank)


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    return _draw_picture(args) if args.action == "picture" else _view(args)


def _view(args: Namespace) -> int:
    summary = TraceSummary.of(read_trace(args.trace), args.worst)
    if args.json:
        print(json_text(_summary_document(args.trace, summary)))
        return 0
    print(f"{make_printable(str(args.trace))}: {_describe_summary(summary)}")
    if summary.batches:
        print(table(_phase_rows(summary)))
        print("worst waits")
        print(table(_worst_wait_rows(summary)))
    if summary.requests:
        print(_describe_requests(summary))
    if summary.is_full:
        print("the trace reached its limit: later events are not in it")
    return 0


def _summary_document(path: Path, summary: TraceSummary) -> dict[str, Any]:
    first_bytes, rates = summary.first_bytes, summary.rates
    return {
        "trace": str(path),
        "processes": list(summary.names.values()),
        "seconds": summary.seconds,
        "batches": summary.batches,
        "waited_seconds": summary.waited_seconds,
        "phases": {
            str(phase): {"seconds": seconds, "batches": batches} for phase, (seconds, batches) in summary.phases.items()
        },
        "worst": [
            {
                "process": summary.names.get(process, ""),
                "epoch": wait.epoch,
                "batch": wait.batch,
                "begin_seconds": wait.spans[0].begin_seconds,
                "seconds": wait.seconds,
                "causes": [
                    {"phase": str(phase), "object": key, "seconds": seconds}
                    for (phase, key), seconds in wait.by_cause().items()
                ],
            }
            for process, wait in summary.worst()
        ],
        "requests": summary.requests,
        "lost_requests": summary.lost,
        "first_byte_p50_seconds": first_bytes.quantile(0.5) if first_bytes.count else None,
        "first_byte_p99_seconds": first_bytes.quantile(0.99) if first_bytes.count else None,
        "bytes_per_second_p50": rates.quantile(0.5) if rates.count else None,
        "is_truncated": summary.is_full,
    }


def _describe_summary(summary: TraceSummary) -> str:
    total_seconds = summary.seconds * max(1, len(summary.names))
    share = summary.waited_seconds / total_seconds if total_seconds else 0.0
    batches = format_count(summary.batches, "batch", "batches")
    ranks = f" on {len(summary.names)} ranks" if len(summary.names) > 1 else ""
    waited = f"{summary.waited_seconds:.3f} s ({share:.1%})"
    return f"{batches}{ranks} in {summary.seconds:.3f} s, of which {waited} were waited"


def _phase_rows(summary: TraceSummary) -> list[tuple[str, ...]]:
    total_seconds = summary.waited_seconds or 1.0
    rows: list[tuple[str, ...]] = [("phase", "seconds", "share", "batches")]
    for phase, (seconds, batches) in sorted(summary.phases.items(), key=lambda each: -each[1][0]):
        rows.append((str(phase), f"{seconds:.3f}", f"{seconds / total_seconds:.1%}", f"{batches:,}"))
    return rows


def _worst_wait_rows(summary: TraceSummary) -> list[tuple[str, ...]]:
    has_ranks = len(summary.names) > 1
    rows: list[tuple[str, ...]] = [("at", "batch", "waited", "most of it", "", "object", "rank"[: 4 * has_ranks])]
    for process, wait in summary.worst():
        (phase, key), seconds = next(iter(wait.by_cause().items()))
        at, batch = f"{wait.spans[0].begin_seconds:.3f} s", f"{wait.epoch}/{wait.batch}"
        share = f"{seconds / wait.seconds:.0%}"
        rank = make_printable(summary.names.get(process, "")) if has_ranks else ""
        rows.append((at, batch, f"{wait.seconds:.4f} s", str(phase), share, make_printable(key), rank))
    return rows


def _describe_requests(summary: TraceSummary) -> str:
    text = f"{format_count(summary.requests, 'request')}"
    first_bytes, rates = summary.first_bytes, summary.rates
    if first_bytes.count:
        median, late = first_bytes.quantile(0.5) * 1e3, first_bytes.quantile(0.99) * 1e3
        text += f"; first byte after {median:.1f} ms (median), {late:.1f} ms (99%)"
    if rates.count:
        text += f"; {format_bytes(rates.quantile(0.5))}/s in each (median)"
    return text + (f"; {summary.lost:,} failed or were overtaken by a hedge" if summary.lost else "")


def _draw_picture(args: Namespace) -> int:
    if not args.trace.is_file():
        raise ConfigError(f"the trace {args.trace} is not a file; a picture reads it twice, so save it to a file")
    summary = TraceSummary.of(read_trace(args.trace))
    process = None
    name = make_printable(args.trace.name)
    if len(summary.names) > 1 or args.rank is not None:
        process = _find_process(summary, args.rank)
        name += f", {make_printable(summary.names[process])}"
        summary = TraceSummary.of(_read_events(args.trace, process))
    section = TraceSection.of(summary, args.begin, args.seconds)
    draw_trace(
        section.select(_read_events(args.trace, process)), args.out, section, f"{name}: {_describe_summary(summary)}"
    )
    section_text = f"seconds {section.begin_seconds:.3f} to {section.end_seconds:.3f}"
    print(f"{make_printable(str(args.out))}: {section_text} of {make_printable(str(args.trace))}")
    return 0


def _find_process(summary: TraceSummary, rank: int | None) -> int:
    """Return the process of a rank, by default the process with the worst wait."""
    if rank is None:
        worst = summary.worst()
        return worst[0][0] if worst else next(iter(summary.names))
    for process, name in summary.names.items():
        if name == f"rank {rank}":
            return process
    raise ConfigError(f"the trace has no rank {rank}; it has {', '.join(map(make_printable, summary.names.values()))}")


def _read_events(path: Path, process: int | None) -> Iterator[TraceEvent]:
    return (event for event in read_trace(path) if process is None or event.process == process)
