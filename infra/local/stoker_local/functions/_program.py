"""``python -m stoker_local functions``: the function cloud as a program, with a local bucket beside it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from stoker_local._bucket import LocalBucket
from stoker_local._config import BucketConfig
from stoker_local._gcs import GcsConfig, LocalGcs
from stoker_local._host import stopping
from stoker_local._s3.model import BucketSpec
from stoker_local.functions._cloud import FunctionCloud, function_cloud
from stoker_local.functions._config import FunctionCloudConfig, FunctionSpec
from stoker_local.functions._statistics import total

__all__ = ["run"]

_MEMORY_MB, _TIMEOUT_SECONDS = 512, 60.0
_OWN_FLAGS = {
    name: f"--{name.replace('_', '-')}"
    for name in ("function", "task_root", "memory_mb", "timeout", "environment", "url_auth", "port")
}
"""What a file of ``--config`` says itself, by the name of the option."""


def run(options: argparse.Namespace) -> None:
    """Run until SIGINT, SIGTERM or, with ``--config -``, the end of standard input.

    Raises:
        ValueError: an option or the configuration is not valid.
        OSError: the configuration cannot be read, or a port is taken.
        MissingExtraError: what functions run in is not installed.
    """
    own = [flag for name, flag in _OWN_FLAGS.items() if getattr(options, name) is not None]
    if options.config is not None and own:
        raise ValueError(f"{own[0]} does not go with --config, whose file has it all")
    watched = options.config == "-"
    if options.config is not None:
        config = _configured(options.config)
    elif options.function:
        config = FunctionCloudConfig(functions=tuple(_functions(options)), port=options.port or 0)
    else:
        raise ValueError("there is no function; give --function NAME=MODULE.HANDLER, or --config FILE")
    names = options.bucket or sorted({"stoker", *(each.bucket for each in config.notifications)})
    buckets = BucketConfig(region=config.region, keys=config.keys, buckets=tuple(BucketSpec(name=n) for n in names))
    asyncio.run(_serve(config, buckets, watch_stdin=watched))


def _configured(source: str) -> FunctionCloudConfig:
    try:
        text = sys.stdin.readline() if source == "-" else Path(source).read_text("utf-8")
        return FunctionCloudConfig.from_json(text)
    except ValueError as error:
        raise ValueError(f"{'standard input' if source == '-' else source}: {error}") from error


def _functions(options: argparse.Namespace) -> list[FunctionSpec]:
    environment = dict(_pair(text) for text in options.environment or ())
    return [
        FunctionSpec(
            name=name,
            handler=handler,
            task_root=options.task_root or ".",
            memory_mb=_MEMORY_MB if options.memory_mb is None else options.memory_mb,
            timeout_seconds=_TIMEOUT_SECONDS if options.timeout is None else options.timeout,
            environment=environment,
            url_auth=options.url_auth or "",
        )
        for name, handler in map(_pair, options.function)
    ]


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise ValueError(f"{text!r} is not like NAME=VALUE")
    return name, value


async def _serve(config: FunctionCloudConfig, buckets: BucketConfig, *, watch_stdin: bool) -> None:
    stop = stopping(watch_stdin=watch_stdin)
    async with AsyncExitStack() as stack:
        bucket = await stack.enter_async_context(LocalBucket(buckets))
        gcs = await stack.enter_async_context(LocalGcs(_gcs_of(config))) if config.google else None
        running = function_cloud(config, bucket=bucket, gcs=gcs, echo=sys.stderr.write)
        cloud = await stack.enter_async_context(running)
        variables = {**bucket.environment(), **(gcs.environment() if gcs else {}), **cloud.environment()}
        print("export " + " ".join(f"{name}={value}" for name, value in variables.items()))
        for name, url in {**cloud.function_urls, **cloud.google_urls}.items():
            print(f"# {name}: {url}")
        if cloud.google_url:
            print(f"# all of Google's, below their names: {cloud.google_url}")
        sys.stdout.flush()
        await stop.wait()
        _write_bill(cloud)


def _gcs_of(config: FunctionCloudConfig) -> GcsConfig:
    return GcsConfig(buckets=tuple(sorted({"stoker", *(each.bucket for each in config.finalized)})))


def _write_bill(cloud: FunctionCloud) -> None:
    figures = cloud.statistics()
    for name, each in (*figures.items(), ("in all", total(figures))):
        line = (
            f"{name}: {each.invocations} invocations, {each.cold_starts} cold starts, {each.errors} errors, "
            f"{each.gb_seconds:.3f} GB-s, ${each.dollars:.6f}"
        )
        print(line, file=sys.stderr)
