"""``stoker pack --on``: the parts of a source packed by functions, many at once, and committed as one version."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from stoker.cli.flags import positive, size
from stoker.cli.output import counted, printable
from stoker.errors import ConfigError
from stoker.fanout import Driver, Executor, ExecutorOptions, FanoutConfig, open_executor
from stoker.fanout.job import JobConfig, plan_job
from stoker.progress import Amount, Progress
from stoker.sources.protocol import Source
from stoker.store import Store
from stoker.store.location import Location, parse_url

__all__ = ["add_fanout_options", "check_fanout_options", "pack_on"]

_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL_S3", "gs": "STORAGE_EMULATOR_HOST"}
_ONLY_WITH_ON = (
    "part_bytes",
    "workers",
    "function_prefix",
    "function_region",
    "function_project",
    "function_url",
    "function_account",
)
_NOT_FOR_FUNCTIONS = ("anonymous", "requester_pays", "user_project")


def add_fanout_options(parser: ArgumentParser) -> None:
    """Add where functions run, and how they are found."""
    group = parser.add_argument_group("packing in many functions at once", "see docs/fan-out.md")
    group.add_argument("--on", metavar="WHERE", help="local (processes of this machine), lambda, gcf, ray, or another")
    group.add_argument("--part-bytes", type=size, metavar="SIZE", help="of a part, raw (default: 256MiB)")
    group.add_argument("--workers", type=positive, metavar="N", help="functions at once, at most")
    group.add_argument("--function-prefix", metavar="NAME", help="functions are called NAME-pack and so on (stoker)")
    group.add_argument("--function-region", metavar="NAME", help="where they are deployed (lambda, gcf)")
    group.add_argument("--function-project", metavar="ID", help="where they are deployed (gcf)")
    group.add_argument("--function-url", metavar="URL", help="of an emulator, of functions elsewhere, of a Ray cluster")
    group.add_argument("--function-account", metavar="EMAIL", help="service account to call them as (gcf)")


def check_fanout_options(args: Namespace) -> None:
    """Raise ConfigError for options that do not go together."""
    needless = [name for name in _ONLY_WITH_ON if getattr(args, name) is not None]
    if needless and not args.on:
        raise ConfigError(f"--{needless[0].replace('_', '-')} goes with --on, which says where functions run")
    if args.on and args.concurrency is not None:
        raise ConfigError("--concurrency is for packing in this process; functions upload as their memory allows")


async def pack_on(args: Namespace, source: Source, store: Store) -> None:
    """Plan the job, let functions carry it out, and commit it.

    Raises:
        FanoutError: some parts failed; nothing is committed, and the same command goes on with what is missing.
        StokerError: the job cannot be planned, or functions cannot be called.
    """
    src, dst = parse_url(args.source), parse_url(args.url)
    executor = open_executor(args.on, _options(args, src, dst, source))
    _check_reach(executor, src, dst)
    job = await plan_job(source, store, _job_config(args, dst))
    _say(
        args,
        f"packing {args.source} as {source.kind} on {executor.name}: {counted(len(job.tasks), 'part')}",
        *source.notes,
    )
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
    _say(args, f"{args.url}: version {committed['version']} has {counted(committed['samples'], 'sample')}")


def _options(args: Namespace, src: Location, dst: Location, source: Source) -> ExecutorOptions:
    """Return how functions are found and, for those that are started for this, what they may touch."""
    given = {
        "prefix": args.function_prefix,
        "region": args.function_region,
        "project": args.function_project,
        "endpoint_url": args.function_url,
        "service_account": args.function_account,
        "concurrency": args.workers,
    }
    touched = {
        "STOKER_DATASETS": f"data={_url_for_functions(dst)}",
        "STOKER_SOURCES": _url_for_functions(parse_url(source.root)),
    }
    environment = {**_reached(args, src, "source_"), **_reached(args, dst, ""), **touched}
    return ExecutorOptions(environment=environment, **{name: value for name, value in given.items() if value})


def _reached(args: Namespace, location: Location, prefix: str) -> dict[str, str]:
    """Return the environment variables that say what the options say of how to reach a bucket.

    Raises:
        ConfigError: there is no variable for an option, or source and data set would need different ones.
    """
    if location.scheme not in _ENDPOINTS:
        return {}
    given = {name: getattr(args, prefix + name) or getattr(args, name) for name in ("endpoint_url", "region")}
    refused = [name for name in _NOT_FOR_FUNCTIONS if getattr(args, prefix + name)]
    others = [name for name in given if prefix and getattr(args, prefix + name) not in (None, getattr(args, name))]
    same_scheme = parse_url(args.url).scheme == location.scheme
    if refused or (others and same_scheme):
        flag = f"--{prefix}{(refused or others)[0]}".replace("_", "-")
        raise ConfigError(f"{flag} cannot be passed on to functions; leave it out, or pack without --on")
    names = {"endpoint_url": _ENDPOINTS[location.scheme], "region": "AWS_REGION"}
    return {names[name]: value for name, value in given.items() if value}


def _url_for_functions(location: Location) -> str:
    """Return the URL of a place wherever a function runs: without blanks, which separate URLs in a setting."""
    return Path(location.bucket).as_uri() if location.scheme == "file" else location.url


def _check_reach(executor: Executor, *locations: Location) -> None:
    for location in locations:
        if location.scheme == "memory":
            raise ConfigError(f"{location.url} is in the memory of this process; functions cannot reach it")
        if location.scheme == "file" and not executor.sees_files:
            raise ConfigError(
                f"functions of the executor {executor.name} cannot reach {location.url} on this machine; use a bucket, "
                "or --on local"
            )


def _job_config(args: Namespace, dst: Location) -> JobConfig:
    given = {"super_sample_bytes": args.super_sample_bytes, "part_bytes": args.part_bytes}
    sizes = {name: value for name, value in given.items() if value is not None}
    return JobConfig(dataset=_url_for_functions(dst), append=args.append, **sizes)


def _say(args: Namespace, *lines: str) -> None:
    if not args.quiet:
        for line in lines:
            print(printable(line), file=sys.stderr)
