"""``python -m stoker_local``: the local bucket and the local function cloud as programs.

The function cloud's dependencies are imported only for it: a bucket starts in half the time without aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

from stoker._stores.options import is_loopback
from stoker.errors import MissingExtraError
from stoker_local._bucket import WELL_KNOWN_KEY, BucketConfig, LocalBucket
from stoker_local._host import create_stop_event
from stoker_local._network import PROFILES
from stoker_local._s3.model import BucketSpec
from stoker_local._s3.signature import KeyPair

if TYPE_CHECKING:
    from stoker_local.functions import FunctionCloudConfig, FunctionSpec

_MEMORY_ROOT = "memory"
_MEMORY_MB, _TIMEOUT_SECONDS = 512, 60.0
_FLAGS_BY_OPTION = {
    name: f"--{name.replace('_', '-')}"
    for name in ("function", "task_root", "memory_mb", "timeout", "environment", "url_auth", "port")
}
"""Option name → flag; these settings are part of a ``--config`` file, so the flags cannot be combined with it."""
_HELP = "serve S3 from memory until interrupted"
_FUNCTIONS_HELP = "run Lambda and Google functions, and a bucket, until interrupted"
_FUNCTIONS_DESCRIPTION = (
    f"{_FUNCTIONS_HELP}; prints an export command that points a shell's clients to them; "
    "the functions' output goes to standard error"
)


def main(arguments: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        watched = options.config == "-"
        if options.command == "functions":
            asyncio.run(_serve_functions(_cloud_config(options), options.bucket, watch_stdin=watched))
        else:
            config = BucketConfig.from_json(sys.stdin.readline()) if watched else _bucket_config(options)
            asyncio.run(_serve_bucket(config, root=options.root, watch_stdin=watched))
    except (OSError, ValueError, MissingExtraError) as error:
        print(f"stoker_local: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stoker_local", description="A cloud on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_functions(commands)
    bucket = commands.add_parser(
        "bucket", help=_HELP, description=f"{_HELP}; prints an export command that points a shell's clients to it"
    )
    bucket.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    bucket.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    bucket.add_argument(
        "--root",
        default=_MEMORY_ROOT,
        help="'memory' (default) starts empty; a folder: each sub-folder is loaded into memory as a bucket",
    )
    bucket.add_argument("--profile", choices=sorted(PROFILES), default="none", help="network to simulate")
    bucket.add_argument("--bucket", action="append", metavar="NAME", help="bucket to create (default: stoker)")
    bucket.add_argument("--anonymous", action="store_true", help="allow unsigned requests to read the buckets")
    bucket.add_argument("--seed", type=int, default=0, help="seed of the random delays (default: 0)")
    bucket.add_argument("--config", choices=["-"], help="read the whole configuration from standard input, as JSON")
    return parser


def _add_functions(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("functions", help=_FUNCTIONS_HELP, description=_FUNCTIONS_DESCRIPTION)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="configuration file in JSON; '-' reads one line of standard input, and stops when standard input ends",
    )
    parser.add_argument("--bucket", action="append", metavar="NAME", help="bucket to create (default: stoker)")
    own = parser.add_argument_group("settings without --config")
    own.add_argument("--function", action="append", metavar="NAME=MODULE.HANDLER", help="Lambda function; repeatable")
    own.add_argument("--task-root", metavar="FOLDER", help="folder of the functions' code (default: current folder)")
    own.add_argument("--memory-mb", type=int, metavar="N", help="memory of each function in MiB (default: 512)")
    own.add_argument("--timeout", type=float, metavar="SECONDS", help="time limit of an invocation (default: 60)")
    own.add_argument("--environment", action="append", metavar="NAME=VALUE", help="variable of every function")
    own.add_argument("--url-auth", choices=["AWS_IAM", "NONE"], help="give each function a URL with this access check")
    own.add_argument("--port", type=int, help="port of the Lambda endpoint (default: a free one)")


def _bucket_config(options: argparse.Namespace) -> BucketConfig:
    names = list(dict.fromkeys([*(options.bucket or ["stoker"]), *(p.name for p in _bucket_folders(options.root))]))
    # The well-known key is public, so a bucket that other machines can reach gets a random secret.
    key = WELL_KNOWN_KEY if is_loopback(options.host) else KeyPair(access_key="stoker", secret_key=token_hex(32))
    return BucketConfig(
        host=options.host,
        keys=(key,),
        port=options.port,
        buckets=tuple(BucketSpec(name=name, anonymous=options.anonymous) for name in names),
        shape=dataclasses.replace(PROFILES[options.profile], seed=options.seed),
    )


def _bucket_folders(root: str) -> list[Path]:
    return [] if root == _MEMORY_ROOT else sorted(path for path in Path(root).iterdir() if path.is_dir())


async def _serve_bucket(config: BucketConfig, *, root: str, watch_stdin: bool) -> None:
    """Serve until SIGINT, SIGTERM or, with ``watch_stdin``, the end of standard input."""
    stop = create_stop_event(watch_stdin=watch_stdin)
    async with LocalBucket(config) as bucket:
        for folder in _bucket_folders(root):
            for path in (path for path in folder.rglob("*") if path.is_file()):
                bucket.put(folder.name, path.relative_to(folder).as_posix(), path.read_bytes())
        _print_export(bucket.environment())
        await stop.wait()


def _print_export(variables: Mapping[str, str]) -> None:
    print("export " + " ".join(f"{name}={value}" for name, value in variables.items()), flush=True)


def _cloud_config(options: argparse.Namespace) -> FunctionCloudConfig:
    from stoker_local.functions import FunctionCloudConfig

    own = [flag for name, flag in _FLAGS_BY_OPTION.items() if getattr(options, name) is not None]
    if options.config is not None:
        if own:
            raise ValueError(f"{own[0]} cannot be combined with --config; put the setting into the configuration file")
        try:
            text = sys.stdin.readline() if options.config == "-" else Path(options.config).read_text("utf-8")
            return FunctionCloudConfig.from_json(text)
        except ValueError as error:
            raise ValueError(f"{'standard input' if options.config == '-' else options.config}: {error}") from error
    if not options.function:
        raise ValueError("there is no function to run; give --function NAME=MODULE.HANDLER or --config FILE")
    return FunctionCloudConfig(functions=tuple(_function_specs(options)), port=options.port or 0)


def _function_specs(options: argparse.Namespace) -> list[FunctionSpec]:
    from stoker_local.functions import FunctionSpec

    environment = dict(_parse_pair(text) for text in options.environment or ())
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
        for name, handler in map(_parse_pair, options.function)
    ]


def _parse_pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise ValueError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


async def _serve_functions(config: FunctionCloudConfig, buckets: list[str] | None, *, watch_stdin: bool) -> None:
    """Serve until SIGINT, SIGTERM or, with ``watch_stdin``, the end of standard input; then print what it cost."""
    from stoker_local._gcs import GcsConfig, LocalGcs
    from stoker_local.functions import function_cloud, sum_statistics

    names = buckets or sorted({"stoker", *(each.bucket for each in config.notifications)})
    s3 = BucketConfig(region=config.region, keys=config.keys, buckets=tuple(BucketSpec(name=n) for n in names))
    google = GcsConfig(buckets=tuple(sorted({"stoker", *(each.bucket for each in config.finalized)})))
    stop = create_stop_event(watch_stdin=watch_stdin)
    async with AsyncExitStack() as stack:
        bucket = await stack.enter_async_context(LocalBucket(s3))
        gcs = await stack.enter_async_context(LocalGcs(google)) if config.google else None
        running = function_cloud(config, bucket=bucket, gcs=gcs, echo=sys.stderr.write)
        cloud = await stack.enter_async_context(running)
        _print_export({**bucket.environment(), **(gcs.environment() if gcs else {}), **cloud.environment()})
        for name, url in {**cloud.function_urls, **cloud.google_urls}.items():
            print(f"# {name}: {url}")
        if cloud.google_url:
            print(f"# all Google functions, each at /NAME: {cloud.google_url}")
        sys.stdout.flush()
        await stop.wait()
        figures = cloud.statistics()
        for name, each in (*figures.items(), ("total", sum_statistics(figures))):
            line = (
                f"{name}: {each.invocations} invocations, {each.cold_starts} cold starts, {each.errors} errors, "
                f"{each.gb_seconds:.3f} GB-s, ${each.dollars:.6f}"
            )
            print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
