"""``stoker pack --on``: the parts of a source packed by functions, many at once, and committed as one version."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import aclosing

from stoker._base.progress import Amount, Progress
from stoker._fanout.job import JobConfig, plan_job
from stoker._sources.webdataset import WebDataset
from stoker._stores import Store
from stoker._stores.location import Location, parse_url
from stoker.abc import Source
from stoker.cli.flags import size
from stoker.cli.functions import (
    add_function_options,
    check_function_options,
    check_reach,
    chosen_executor,
    reached,
    url_for_functions,
)
from stoker.cli.output import counted, printable, sample_lines
from stoker.errors import ConfigError, FunctionError
from stoker.fanout import Driver, FanoutConfig

__all__ = ["add_fanout_options", "check_fanout_options", "pack_on", "say_notes"]


def add_fanout_options(parser: ArgumentParser) -> None:
    """Add where functions run, and how they are found."""
    group = parser.add_argument_group("packing in many functions at once", "see docs/fan-out.md")
    add_function_options(group.add_argument, "pack")
    group.add_argument("--part-bytes", type=size, metavar="SIZE", help="of a part, raw (default: 256MiB)")


def check_fanout_options(args: Namespace) -> None:
    """Raise for options that do not go together, or are not enough: a source may take minutes to be listed."""
    check_function_options(args, "part_bytes")
    if not args.on:
        return
    if args.concurrency is not None:
        raise ConfigError("--concurrency is for packing in this process; functions upload as their memory allows")
    if args.json:
        raise ConfigError("--json is for packing in this process; with --on, the account is a text")
    if args.overwrite:
        raise ConfigError("--overwrite is for packing in this process; functions create a data set or append to one")
    if args.single_writer:
        raise ConfigError("--single-writer is for packing in this process; functions need conditional writes")
    src, dst = parse_url(args.source), parse_url(args.url)
    _job_config(args, dst)
    check_reach(chosen_executor(args, _ways(args, src, dst)), src, dst)


async def pack_on(args: Namespace, source: Source, store: Store) -> None:
    """Plan the job, let functions carry it out, and commit it.

    Raises:
        FanoutError: some parts failed; nothing is committed, and the same command goes on with what is missing.
        StokerError: the job cannot be planned, or functions cannot be called.
    """
    src, dst = parse_url(args.source), parse_url(args.url)
    executor = chosen_executor(args, {**_ways(args, src, dst), **_touched(dst, source)})
    if isinstance(source, WebDataset):
        await source.check_ends()
    job = await plan_job(source, store, _job_config(args, dst))
    _say(args, f"packing {args.source} as {source.kind} on {executor.name}: {counted(len(job.tasks), 'part')}")
    say_notes(source.notes, quiet=args.quiet)
    async with aclosing(source.read()) as found:
        _say(args, *sample_lines(source, 0, await anext(found, None)))
    total = Amount(count=len(job.tasks), size_bytes=sum(task.size_bytes for task in job.tasks))
    progress = Progress("packing", "parts", total, sys.stderr, quiet=args.quiet)
    async with executor:
        driver = Driver(executor, FanoutConfig(most=args.workers), on_progress=progress.update)
        try:
            async with progress:
                await driver.run(job.tasks)
            (committed,) = await driver.run([job.commit])
        finally:
            _say(args, *driver.report.lines())
    match committed:
        case {"version": int(version), "samples": int(samples)}:
            _say(args, f"{args.url}: version {version} has {counted(samples, 'sample')}")
        case _:
            raise FunctionError("commit", "TypeError", "it tells no version; deploy the functions of this stoker")


def say_notes(notes: Sequence[str], *, quiet: bool) -> None:
    """Print what is to be known of a source; with ``quiet`` only the warnings."""
    for note in notes:
        if not quiet or note.startswith("warning:"):
            print(printable(note), file=sys.stderr)


def _ways(args: Namespace, src: Location, dst: Location) -> dict[str, str]:
    """Return how functions that are started for this reach source and data set."""
    return {**reached(args, src, "source_"), **reached(args, dst)}


def _touched(dst: Location, source: Source) -> dict[str, str]:
    """Return what functions that are started for this may touch."""
    return {
        "STOKER_DATASETS": f"data={url_for_functions(dst)}",
        "STOKER_SOURCES": url_for_functions(parse_url(source.root)),
    }


def _job_config(args: Namespace, dst: Location) -> JobConfig:
    given = {"super_sample_bytes": args.super_sample_bytes, "part_bytes": args.part_bytes}
    sizes = {name: value for name, value in given.items() if value is not None}
    return JobConfig(dataset=url_for_functions(dst), append=args.append, **sizes)


def _say(args: Namespace, *lines: str) -> None:
    if not args.quiet:
        for line in lines:
            print(printable(line), file=sys.stderr)
