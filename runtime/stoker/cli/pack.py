"""``stoker pack``: packs a source into a data set, in this process or with ``--on`` in many functions at once."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from stoker._base.progress import ProgressReporter, WorkAmount
from stoker._base.retry import RetryingStore
from stoker._base.sizes import format_bytes
from stoker._fanout.job import JobConfig, plan_job, plan_permutation
from stoker._pack.packer import AsyncPacker, PackConfig, PackProgress
from stoker._pack.shuffle import delete_work_folder, publish_staged
from stoker._pack.stored_samples import usable_bytes
from stoker._sources import KINDS, ObjectSource, open_source
from stoker._sources.webdataset import WebDataset
from stoker._stores.location import Location, parse_url
from stoker.abc import Executor, Store
from stoker.cli import flags
from stoker.cli.output import RequestCosts, format_count, format_sample, json_text, make_printable, say
from stoker.errors import ConfigError, StokerError
from stoker.fanout import Driver, FanoutConfig, Task

_OWN_FOLDERS = ("data", "epochs", "manifests", "packs")
_LOCAL_ONLY_OPTIONS = {
    "concurrency": "functions upload as their memory allows",
    "json": "with --on, the summary is text",
    "memory": "functions use the memory that they have",
    "overwrite": "functions create a data set or append to one",
    "single_writer": "functions need conditional writes",
}
"""Option that has no effect with ``--on`` → reason."""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    parser.set_defaults(example="stoker pack ./images s3://bucket/dataset --shuffle 7")
    add(
        "source",
        metavar="SRC",
        help="the raw data: a folder (of images in class folders, of files, of .tar files), an .npy, .npz or .tar "
        "file, or several WebDataset tars as 'train-{000..099}.tar'; a path, or an s3:// or gs:// URL",
    )
    add("url", type=flags.writable, metavar="DST", help="the data set to write: a path, or an s3:// or gs:// URL")
    add("--kind", choices=KINDS, help="kind of SRC (default: detected from the file names)")
    add("--strict", action="store_true", help="fail on a tar without an end marker, which may be truncated")
    links = "follow symbolic links that lead out of a local SRC (default: such links are an error)"
    add("--follow-links", action="store_true", help=links)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--append", action="store_true", help="add the samples to the existing data set")
    replaced = "replace the existing data set; its earlier versions stay readable"
    modes.add_argument("--overwrite", action="store_true", help=replaced)
    limit = "maximum size of a super-sample with several samples, at most a quarter of --memory (default: 8MiB)"
    add("--super-sample-bytes", type=flags.super_sample_size, metavar="SIZE", help=limit)
    add("--concurrency", type=flags.positive, metavar="N", help="concurrent uploads (default: 8)")
    seed = "write the samples in a uniform permutation of all of them, which this seed fixes (default: SRC's order)"
    add("--shuffle", type=flags.whole_number_to((1 << 64) - 1), metavar="SEED", help=seed)
    memory = "memory of this process for permuting, and four times that of uploads (default: 1GiB)"
    add("--memory", type=flags.size, metavar="SIZE", help=memory)
    alone = "nothing else writes to DST meanwhile: permit a store without conditional writes"
    add("--single-writer", action="store_true", help=alone)
    add("--quiet", action="store_true", help="show no progress and no summary")
    flags.add_json(parser)
    group = parser.add_argument_group("packing in many functions at once", "see docs/fan-out.md")
    flags.add_function_options(group.add_argument, "pack")
    group.add_argument("--part-bytes", type=flags.size, metavar="SIZE", help="raw data per call (default: 256MiB)")
    flags.add_store_options(parser, store_name="DST, and SRC unless --source-… says otherwise")
    flags.add_store_options(parser, prefix="source-", store_name="SRC")
    parser.set_defaults(when_interrupted="interrupted; packed samples stay: resume by running the same command again")


async def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    _check_no_overlap(args.source, args.url)
    _check_fanout_options(args)
    say(args, f"opening {args.source}")
    options = flags.store_options(args, args.source, prefix="source_") or flags.store_options(args, args.source)
    bill = RequestCosts()
    source = await open_source(
        args.source, args.kind, options, strict=args.strict, follow_links=args.follow_links, wrap=bill.add_store
    )
    try:
        async with flags.open_store_from_args(args) as store:
            if args.on:
                await _pack_in_functions(args, source, store)
            else:
                await _pack_here(args, source, bill.add_store(store), bill)
    finally:
        await source.close()
    return 0


async def _pack_here(args: Namespace, source: ObjectSource, store: Store, costs: RequestCosts) -> None:
    started_seconds = asyncio.get_running_loop().time()
    notes = source.notes
    say(args, f"packing {args.source} as {source.kind}")
    _print_notes(notes, quiet=args.quiet)
    report_progress = partial(
        ProgressReporter,
        unit="samples",
        total=WorkAmount(count=source.samples, size_bytes=source.size_bytes),
        stream=sys.stderr,
        quiet=args.quiet,
    )
    progress = report_progress("packing")
    done = PackProgress()

    def show(now: PackProgress) -> None:
        nonlocal done
        done = now
        progress.update(_progress_amount(done))

    async with AsyncPacker(store, _config(args, source), on_progress=show) as packer:
        if durable := packer.durable_samples:
            packer.skip(durable)
        async with aclosing(source.read(durable)) as samples:
            current = await anext(samples, None)
            say(args, *format_sample(source, durable, current))
            async with progress:
                progress.start(_progress_amount(done))
                while current is not None:
                    where, sample = current
                    await packer.write(sample, where)
                    current = await anext(samples, None)
                await packer.complete_source()
        progress = progress if args.shuffle is None else report_progress("permuting")
        async with progress:
            manifest = await packer.commit()
    _print_notes([note for note in source.notes if note not in notes], quiet=args.quiet)
    seconds = asyncio.get_running_loop().time() - started_seconds
    if args.json:
        figures = {"url": args.url, "version": manifest.version, "samples": done.samples, "resumed_samples": durable}
        figures |= {"super_samples": done.objects, "size_bytes": done.size_bytes, "shuffle": args.shuffle}
        figures["seconds"] = seconds
        print(json_text({**figures, **costs.to_dict()}))
    rest = f" (there already: {format_count(durable, 'sample')})" if durable else ""
    summary = f"{format_count(done.samples, 'sample')} into {format_count(done.objects, 'super-sample')}"
    rate = f"{(done.samples - durable) / max(seconds, 1e-3):,.0f} samples/s"
    took = f"packed {summary}, {format_bytes(done.size_bytes)}, in {seconds:.1f} s ({rate})"
    say(args, costs.summary(), f"{took}: {store.url}, version {manifest.version}{rest}")


def _config(args: Namespace, source: ObjectSource) -> PackConfig:
    mode: Any = "append" if args.append else "overwrite" if args.overwrite else "create"
    sizes = _select_options(args, "super_sample_bytes", "concurrency")
    if args.memory is not None:
        sizes["memory_bytes"] = args.memory if args.shuffle is None else usable_bytes(args.memory)
    single, shuffle = args.single_writer, args.shuffle
    return PackConfig(
        schema=source.schema, source=source.fingerprint, mode=mode, single_writer=single, shuffle=shuffle, **sizes
    )


def _select_options(args: Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _progress_amount(done: PackProgress) -> WorkAmount:
    return WorkAmount(count=done.samples, size_bytes=done.size_bytes)


def _check_no_overlap(source: str, destination: str) -> None:
    """Raise ConfigError for a data set inside its own source, or a source inside the data set's own folders."""
    src, dst = parse_url(source).canonical_url, parse_url(destination).canonical_url
    if dst.startswith(src):
        raise ConfigError(f"DST {destination} lies inside SRC {source}, which would change while it is packed; move it")
    if any(src.startswith(f"{dst}{folder}/") for folder in _OWN_FOLDERS):
        raise ConfigError(f"SRC {source} lies where DST {destination} keeps its own objects; choose another DST")


def _check_fanout_options(args: Namespace) -> None:
    """Raise ConfigError for missing or conflicting options, before the source is listed, which may take minutes."""
    flags.check_function_options(args, "part_bytes")
    if not args.on:
        return
    for name, remedy in _LOCAL_ONLY_OPTIONS.items():
        if getattr(args, name) not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')} is for packing in this process; {remedy}")
    src, dst = parse_url(args.source), parse_url(args.url)
    _job_config(args, dst)
    flags.create_executor(args, dst, src)


async def _pack_in_functions(args: Namespace, source: ObjectSource, store: Store) -> None:
    """Plan the job, run it in functions and commit it.

    Raises:
        FanoutError: some parts failed; nothing is committed, and the same command packs the missing parts.
        StokerError: the job cannot be planned, or functions cannot be called.
    """
    dst = parse_url(args.url)
    executor = flags.create_executor(args, dst, parse_url(source.root))
    if isinstance(source, WebDataset):
        await source.check_ends()
    config = _job_config(args, dst)
    job = await plan_job(source, store, config)
    say(args, f"packing {args.source} as {source.kind} on {executor.name}: {format_count(len(job.tasks), 'part')}")
    _print_notes(source.notes, quiet=args.quiet)
    async with aclosing(source.read()) as preview:
        say(args, *format_sample(source, 0, await anext(preview, None)))
    async with executor:
        if args.shuffle is None or job.is_committed:
            committed = await _run_phases(args, executor, {"packing": job.tasks, "committing": (job.commit,)})
        else:
            await _run_phases(args, executor, {"packing": job.tasks})
            staged = await publish_staged(store, job.id, job.runs)
            committed = await _run_phases(args, executor, plan_permutation(job, staged, config))
            await delete_work_folder(RetryingStore(store), job.id)
    match committed:
        case {"version": int(version), "samples": int(samples)}:
            say(args, f"{args.url}: version {version} has {format_count(samples, 'sample')}")
        case _:
            raise StokerError(
                f"the functions on {executor.name} are of another release of stoker: their commit returned no version; "
                "deploy those of this release"
            )


async def _run_phases(args: Namespace, executor: Executor, phases: Mapping[str, Sequence[Task]]) -> Mapping[str, Any]:
    """Run tasks in phases, each of which must be complete before the next one begins; print what they cost.

    Args:
        args: options of the command.
        executor: executor of the functions.
        phases: activity, for the progress → its tasks.

    Returns:
        The result of the last task.
    """
    progress: ProgressReporter | None = None

    def show(done: WorkAmount) -> None:
        if progress is not None:
            progress.update(done)

    driver = Driver(executor, FanoutConfig(max_concurrency=args.workers), on_progress=show)
    results: Sequence[Mapping[str, Any]] = ()
    try:
        for verb, tasks in phases.items():
            total = WorkAmount(count=len(tasks), size_bytes=sum(task.size_bytes for task in tasks))
            async with ProgressReporter(verb, "parts", total, sys.stderr, quiet=args.quiet) as progress:
                results = await driver.run(tasks)
    finally:
        say(args, *driver.report.lines())
    return results[-1]


def _print_notes(notes: Sequence[str], *, quiet: bool) -> None:
    """Print the notes of a source; with ``quiet`` only the warnings."""
    for note in notes:
        if not quiet or note.startswith("warning:"):
            print(make_printable(note), file=sys.stderr)


def _job_config(args: Namespace, dst: Location) -> JobConfig:
    sizes = _select_options(args, "super_sample_bytes", "part_bytes")
    return JobConfig(dataset=flags.url_for_functions(dst), append=args.append, shuffle=args.shuffle, **sizes)
