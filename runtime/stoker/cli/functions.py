"""Options of commands whose work functions do: where they run, how they are found, and what they have to reach."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

from stoker._stores.location import Location, parse_url
from stoker.abc import Executor
from stoker.cli.flags import positive
from stoker.errors import ConfigError
from stoker.fanout import ExecutorOptions, open_executor

__all__ = [
    "add_function_options",
    "check_function_options",
    "check_reach",
    "chosen_executor",
    "reached",
    "url_for_functions",
]

_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL_S3", "gs": "STORAGE_EMULATOR_HOST"}
_NOT_FOR_FUNCTIONS = ("anonymous", "requester_pays", "user_project")
_OPTIONS = {
    "function_prefix": "prefix",
    "function_region": "region",
    "function_project": "project",
    "function_url": "endpoint_url",
    "function_account": "service_account",
    "workers": "concurrency",
}
"""Options of commands → those of executors."""


def add_function_options(add: Callable[..., object], name: str) -> None:
    """Add where functions run, and how they are found.

    Args:
        add: ``add_argument`` of a group.
        name: of the function that the command calls most.
    """
    add("--on", metavar="WHERE", help="local (processes of this machine), lambda, gcf, ray, or another")
    add("--workers", type=positive, metavar="N", help="functions at once, at most (default: what WHERE can take)")
    add("--function-prefix", metavar="NAME", help=f"functions are called NAME-{name} and so on (default: stoker)")
    add("--function-region", metavar="NAME", help="where they are deployed (lambda, gcf)")
    add("--function-project", metavar="ID", help="where they are deployed (gcf)")
    add("--function-url", metavar="URL", help="of an emulator, of functions elsewhere, of a Ray cluster")
    add("--function-account", metavar="EMAIL", help="service account to call them as (gcf)")


def check_function_options(args: Namespace, *more: str) -> None:
    """Raise ConfigError if options of functions, or ``more``, are given and nothing says where functions run."""
    needless = [name for name in (*more, *_OPTIONS) if getattr(args, name) is not None]
    if needless and not args.on:
        raise ConfigError(f"--{needless[0].replace('_', '-')} goes with --on, which says where functions run")


def chosen_executor(args: Namespace, environment: Mapping[str, str]) -> Executor:
    """Return the executor that ``--on`` names; ``environment`` is of functions that are started for this.

    Raises:
        ConfigError: there is none of the name, or the options are not enough for it, or mean nothing to it.
        MissingExtraError: what it needs is not installed.
    """
    given = {option: value for name, option in _OPTIONS.items() if (value := getattr(args, name))}
    executor = open_executor(args.on, ExecutorOptions(environment=environment, **given))
    for name, option in _OPTIONS.items():
        if option in given.keys() - {"concurrency"} - executor.heeds:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} means nothing to --on {args.on}; leave it out, or name another place")
    return executor


def reached(args: Namespace, location: Location, prefix: str = "") -> dict[str, str]:
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
        raise ConfigError(f"{flag} cannot be passed on to functions; leave it out, or do without --on")
    names = {"endpoint_url": _ENDPOINTS[location.scheme], "region": "AWS_REGION"}
    return {names[name]: value for name, value in given.items() if value}


def url_for_functions(location: Location) -> str:
    """Return the URL of a place wherever a function runs: without blanks, which separate URLs in a setting."""
    return Path(location.bucket).as_uri() if location.scheme == "file" else location.url


def check_reach(executor: Executor, *locations: Location) -> None:
    """Raise ConfigError if functions cannot reach a place."""
    for location in locations:
        if location.scheme == "memory":
            raise ConfigError(f"{location.url} is in the memory of this process; functions cannot reach it")
        if location.scheme == "file" and not executor.sees_files:
            raise ConfigError(
                f"functions of the executor {executor.name} cannot reach {location.url} on this machine; use a bucket, "
                "or --on local"
            )
