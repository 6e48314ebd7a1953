"""Arguments that several commands share: options of a store, versions, sizes, and numbers within bounds.

Commands that run their work in functions share the options of where the functions run and how to find them.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar, get_args

from stoker._base.sizes import MAX_BYTES, format_bytes, parse_bytes, parse_rate
from stoker._cluster.spec import ClusterSpec
from stoker._format.supersample import MAX_SAMPLE_BYTES, MAX_TARGET_BYTES
from stoker._stores import ADAPTERS, open_store
from stoker._stores.location import Location, parse_url
from stoker._stores.options import Auth, StoreOptions
from stoker.abc import Executor, Store
from stoker.cli import BUCKET_TITLE
from stoker.errors import ConfigError

Number = TypeVar("Number", int, float)
_MAX_POSITIVE_DIGITS = 18
_MAX_DIGITS = 20  # of 2**64
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL_S3", "gs": "STORAGE_EMULATOR_HOST"}
_NOT_FOR_FUNCTIONS = ("anonymous", "requester_pays", "user_project")
_EXECUTOR_OPTIONS = {
    "function_prefix": "prefix",
    "function_region": "region",
    "function_project": "project",
    "function_url": "endpoint_url",
    "function_account": "service_account",
    "workers": "concurrency",
}
"""Option of a command → option of an executor."""


def add_written_dataset(parser: ArgumentParser) -> None:
    """Add the URL of a data set that the command writes to."""
    parser.add_argument("url", type=writable, metavar="URL", help="the data set: a path, or an s3:// or gs:// URL")


def add_dataset(parser: ArgumentParser) -> None:
    """Add the URL of a data set, its version, and the options of its store."""
    parser.add_argument("url", metavar="URL", help="the data set: a path, or an s3://, gs:// or stoker+https:// URL")
    add_version(parser)
    add_store_options(parser)


def add_json(parser: ArgumentParser) -> None:
    """Add ``--json``: the command writes its result as one JSON document to standard output."""
    parser.add_argument("--json", action="store_true", help="write the result as JSON")


def add_actions(parser: ArgumentParser, epilog: str = "") -> Callable[..., ArgumentParser]:
    """Let a command have actions, in ``args.action``; return a function that adds one.

    Args:
        parser: parser of the command.
        epilog: text at the end of the help of the command and of its actions.
    """
    parser.epilog = epilog
    actions = parser.add_subparsers(dest="action", title="actions", metavar="ACTION", required=True)

    def add_action(name: str, text: str, *, example: str = "", description: str = "") -> ArgumentParser:
        action: ArgumentParser = actions.add_parser(name, help=text, description=description or text, epilog=epilog)
        action.set_defaults(example=example)
        return action

    return add_action


def add_version(parser: ArgumentParser) -> None:
    """Add the version of a data set."""
    parser.add_argument("--at", type=positive, metavar="N", help="version of the data set (default: the newest)")


def add_store_options(parser: ArgumentParser, *, prefix: str = "", store_name: str = "") -> None:
    """Add the options of a store; the defaults come from the standard environment variables and files.

    Args:
        parser: parser of the command.
        prefix: start of the options' names, such as ``source-``.
        store_name: name of the store in the title of the group (default: ``the bucket``).
    """
    title = f"{BUCKET_TITLE} {store_name or 'the bucket'}"
    group = parser.add_argument_group(title, "defaults: the AWS_* or GOOGLE_* variables and configuration files")
    name = f"--{prefix}"
    group.add_argument(f"{name}endpoint-url", metavar="URL", help="endpoint of an S3- or GCS-compatible service")
    group.add_argument(f"{name}region", metavar="NAME", help="region of the bucket or the function (s3, stoker+https)")
    group.add_argument(f"{name}anonymous", action="store_true", help="send no credentials")
    group.add_argument(f"{name}requester-pays", action="store_true", help="agree to pay for the requests (s3)")
    prices = "store in the price file whose prices apply (default: by the endpoint, else s3 or gs)"
    group.add_argument(f"{name}prices", metavar="NAME", help=prices)
    group.add_argument(f"{name}user-project", metavar="ID", help="project that pays for the requests (gs)")
    kinds = get_args(Auth)
    group.add_argument(f"{name}auth", choices=kinds, help="kind of credentials for the function (stoker+https)")


def store_options(args: Namespace, url: str, *, prefix: str = "") -> StoreOptions | None:
    """Return the options for the store at ``url``, None if it takes none or none were given.

    Args:
        args: parsed arguments of the command.
        url: URL of the store.
        prefix: start of the options' names in ``args``, such as ``source_``.

    Raises:
        ConfigError: an option is given that this kind of store does not have.
    """
    names = ("endpoint_url", "region", "anonymous", "requester_pays", "prices", "user_project", "auth")
    given = {name: value for name in names if (value := getattr(args, prefix + name, None))}
    scheme = parse_url(url).scheme
    kind = ADAPTERS[scheme][2] if scheme in ADAPTERS else None
    if kind is None or not given:
        return None
    unknown = [name for name in given if name not in kind.__slots__]
    if unknown:
        flag = f"--{prefix}{unknown[0]}".replace("_", "-")
        remedy = "; use --user-project" if unknown == ["requester_pays"] else ""
        raise ConfigError(f"{url} takes no {flag}{remedy}")
    return kind(**given)


@asynccontextmanager
async def open_store_from_args(args: Namespace, url: str = "", *, prefix: str = "") -> AsyncIterator[Store]:
    """Open the store at a URL, by default ``args.url``, and close it at the end."""
    url = url or args.url
    store = open_store(url, options=store_options(args, url, prefix=prefix))
    try:
        yield store
    finally:
        await store.close()


def size_from(min_bytes: int, max_bytes: int = MAX_BYTES) -> Callable[[str], int]:
    """Return a parser of sizes from ``min_bytes`` to ``max_bytes``, for ``add_argument(type=...)``."""
    return _bounded_parser(parse_bytes, min_bytes, max_bytes, format_bytes)


def rate_from(min_bytes_per_second: float) -> Callable[[str], float]:
    """Return a parser of rates of at least ``min_bytes_per_second``, in bytes or bits, for ``add_argument(type=)``."""
    return _bounded_parser(parse_rate, min_bytes_per_second, float(MAX_BYTES), lambda rate: f"{rate:,.4g} B/s")


def number_from(minimum: float, maximum: float) -> Callable[[str], float]:
    """Return a parser of numbers from ``minimum`` to ``maximum``, for ``add_argument(type=...)``."""
    return _bounded_parser(_parse_number, minimum, maximum, lambda number: f"{number:,.15g}")


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r:.40} is not a number") from None


def _bounded_parser(
    read: Callable[[str], Number], minimum: Number, maximum: Number, show: Callable[[Number], str]
) -> Callable[[str], Number]:
    def bounded(text: str) -> Number:
        try:
            number = read(text)
        except ConfigError as error:
            raise ArgumentTypeError(str(error)) from None
        if not minimum <= number <= maximum:
            raise ArgumentTypeError(f"{text!r:.40} is not from {show(minimum)} to {show(maximum)}")
        return number

    return bounded


size = size_from(0)
"""Parses a size in bytes, for ``add_argument(type=...)``."""
super_sample_size = size_from(1, MAX_SAMPLE_BYTES)
"""Parses the maximum size of a super-sample, for ``add_argument(type=...)``."""
target_size = size_from(1, MAX_TARGET_BYTES)
"""Parses the size of super-samples that small ones are packed into, for ``add_argument(type=...)``."""


def cluster_spec(text: str) -> ClusterSpec:
    """Parse the setting ``cluster=`` of a loader, for ``add_argument(type=...)``."""
    try:
        return ClusterSpec.parse(text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from None


def writable(text: str) -> str:
    """Return the URL of a data set to write to, for ``add_argument(type=...)``."""
    if text.startswith("stoker+"):
        raise ArgumentTypeError(f"a function serves this data set read-only: {text}; write to the bucket behind it")
    return text


def positive(text: str) -> int:
    """Return a positive integer, for ``add_argument(type=...)``."""
    if not text.isascii() or not text.isdecimal() or not text.strip("0"):
        raise ArgumentTypeError(f"{text!r:.40} is not a positive whole number")
    if len(text) > _MAX_POSITIVE_DIGITS:
        raise ArgumentTypeError(f"{text:.40} has more than {_MAX_POSITIVE_DIGITS} digits")
    return int(text)


def whole_number_to(maximum: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from 0 to ``maximum``, for ``add_argument(type=...)``."""
    return _bounded_parser(_parse_whole_number, 0, maximum, str)


def _parse_whole_number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise ConfigError(f"{text!r:.40} is not a whole number of at most {_MAX_DIGITS} digits")
    return int(text)


def add_function_options(add: Callable[..., object], name: str) -> None:
    """Add the options of where functions run and how to find them.

    Args:
        add: ``add_argument`` of a group.
        name: name of the function that the command calls most.
    """
    add("--on", metavar="WHERE", help="platform: local (processes of this machine), lambda, gcf, ray or a plug-in's")
    add("--workers", type=positive, metavar="N", help="maximum of concurrent calls (default: what WHERE permits)")
    add("--function-prefix", metavar="NAME", help=f"start of the functions' names: NAME-{name}, … (default: stoker)")
    add("--function-region", metavar="NAME", help="region of the functions (lambda, gcf)")
    add("--function-project", metavar="ID", help="project of the functions (gcf)")
    add("--function-url", metavar="URL", help="endpoint of an emulator, of other functions or of a Ray cluster")
    add("--function-account", metavar="EMAIL", help="service account that calls the functions (gcf)")


def check_function_options(args: Namespace, *more: str) -> None:
    """Raise ConfigError if options of functions, or those in ``more``, are given without ``--on``."""
    needless = [name for name in (*more, *_EXECUTOR_OPTIONS) if getattr(args, name) is not None]
    if needless and not args.on:
        raise ConfigError(f"--{needless[0].replace('_', '-')} needs --on, the platform that runs the functions")


def create_executor(args: Namespace, dataset: Location, source: Location | None = None) -> Executor:
    """Return the executor that ``--on`` names, for functions that write a data set and read a source.

    Raises:
        ConfigError: there is no such executor, its options are missing or not applicable, or its functions cannot reach
            the data set or the source.
        MissingExtraError: a library that it needs is not installed.
    """
    from stoker.fanout import ExecutorOptions, open_executor  # other commands do not need it

    environment = {"STOKER_DATASETS": f"data={url_for_functions(dataset)}", **_function_environment(args, dataset)}
    if source is not None:
        environment |= {"STOKER_SOURCES": url_for_functions(source), **_function_environment(args, source, "source_")}
    given = {option: value for name, option in _EXECUTOR_OPTIONS.items() if (value := getattr(args, name))}
    executor = open_executor(args.on, ExecutorOptions(environment=environment, **given))
    for name, option in _EXECUTOR_OPTIONS.items():
        if option in given.keys() - {"concurrency"} - executor.heeds:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} has no effect with --on {args.on}; leave it out, or choose another platform")
    for location in filter(None, (source, dataset)):
        _check_reach(executor, location)
    return executor


def _function_environment(args: Namespace, location: Location, prefix: str = "") -> dict[str, str]:
    """Return the environment variables that pass the options of a bucket on to functions.

    Raises:
        ConfigError: there is no variable for an option, or source and data set need different values of one.
    """
    if location.scheme not in _ENDPOINTS:
        return {}
    given = {name: getattr(args, prefix + name) or getattr(args, name) for name in ("endpoint_url", "region")}
    rejected = [name for name in _NOT_FOR_FUNCTIONS if getattr(args, prefix + name)]
    others = [name for name in given if prefix and getattr(args, prefix + name) not in (None, getattr(args, name))]
    same_scheme = parse_url(args.url).scheme == location.scheme
    if rejected or (others and same_scheme):
        flag = f"--{prefix}{(rejected or others)[0]}".replace("_", "-")
        raise ConfigError(f"{flag} cannot be passed on to functions; leave it out, or do without --on")
    names = {"endpoint_url": _ENDPOINTS[location.scheme], "region": "AWS_REGION"}
    return {names[name]: value for name, value in given.items() if value}


def url_for_functions(location: Location) -> str:
    """Return the URL of a location for a function: without blanks, which separate URLs in a setting."""
    return Path(location.bucket).as_uri() if location.scheme == "file" else location.url


def _check_reach(executor: Executor, location: Location) -> None:
    """Raise ConfigError if functions cannot reach a location."""
    if location.scheme == "memory":
        raise ConfigError(f"{location.url} is in the memory of this process; functions cannot reach it")
    if location.scheme == "file" and not executor.sees_files:
        raise ConfigError(
            f"functions of the executor {executor.name} cannot reach {location.url} on this machine; use a bucket, "
            "or --on local"
        )
