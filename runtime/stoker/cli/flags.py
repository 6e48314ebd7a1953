"""Arguments that several commands share: how to reach a store, which version, how many bytes, a number in bounds."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar, get_args

from stoker._base.sizes import MOST_BYTES, format_bytes, parse_bytes, parse_rate
from stoker._format.supersample import MAX_SUPER_SAMPLE_BYTES
from stoker._stores import GcsOptions, S3Options, ServedOptions, Store, open_store
from stoker._stores.location import parse_url
from stoker._stores.options import Auth, StoreOptions
from stoker.cli import BUCKET_TITLE
from stoker.errors import ConfigError

__all__ = [
    "add_dataset",
    "add_store_options",
    "add_version",
    "add_written_dataset",
    "number_from",
    "opened",
    "positive",
    "rate_from",
    "size",
    "size_from",
    "store_options",
    "super_sample_size",
    "writable",
]

Number = TypeVar("Number", int, float)
_MOST_DIGITS = 18


def add_written_dataset(parser: ArgumentParser) -> None:
    """Add the URL of a data set that the command writes to."""
    parser.add_argument("url", type=writable, metavar="URL", help="of the data set: a path, or an s3:// or gs:// URL")


def add_dataset(parser: ArgumentParser) -> None:
    """Add the URL of a data set, its version, and how to reach it."""
    parser.add_argument("url", metavar="URL", help="of the data set: a path, or an s3://, gs:// or stoker+https:// URL")
    add_version(parser)
    add_store_options(parser)


def add_version(parser: ArgumentParser) -> None:
    """Add which version of a data set."""
    parser.add_argument("--at", type=positive, metavar="N", help="version of the data set (default: the newest)")


def add_store_options(parser: ArgumentParser, *, prefix: str = "", of: str = "") -> None:
    """Add how to reach a bucket; what is left out comes from the standard environment variables and files."""
    title = f"{BUCKET_TITLE} {of or 'the bucket'}"
    group = parser.add_argument_group(title, "otherwise as AWS_* or GOOGLE_* variables and configuration files say")
    name = f"--{prefix}"
    group.add_argument(f"{name}endpoint-url", metavar="URL", help="of an S3- or GCS-compatible service")
    group.add_argument(f"{name}region", metavar="NAME", help="of the bucket, or the function (s3, stoker+https)")
    group.add_argument(f"{name}anonymous", action="store_true", help="send no credentials")
    group.add_argument(f"{name}requester-pays", action="store_true", help="agree to pay for the requests (s3)")
    prices = "of a store in the price file, for this bucket (default: by its endpoint, else s3 or gs)"
    group.add_argument(f"{name}prices", metavar="NAME", help=prices)
    group.add_argument(f"{name}user-project", metavar="ID", help="project that pays for the requests (gs)")
    kinds = get_args(Auth)
    group.add_argument(f"{name}auth", choices=kinds, help="whose identity the function is shown (stoker+https)")


def store_options(args: Namespace, url: str, *, prefix: str = "") -> StoreOptions | None:
    """Return the options for the store at ``url``, None if it takes none or none were given.

    Raises:
        ConfigError: an option is given that this kind of store does not have.
    """
    names = ("endpoint_url", "region", "anonymous", "requester_pays", "prices", "user_project", "auth")
    given = {name: value for name in names if (value := getattr(args, prefix + name, None))}
    kinds: dict[str, type[StoreOptions]] = {
        "s3": S3Options,
        "gs": GcsOptions,
        "stoker+https": ServedOptions,
        "stoker+http": ServedOptions,
    }
    kind = kinds.get(parse_url(url).scheme)
    if kind is None or not given:
        return None
    unknown = [name for name in given if name not in kind.__slots__]
    if unknown:
        flag = f"--{prefix}{unknown[0]}".replace("_", "-")
        remedy = "; use --user-project" if unknown == ["requester_pays"] else ""
        raise ConfigError(f"{url} takes no {flag}{remedy}")
    return kind(**given)


@asynccontextmanager
async def opened(args: Namespace, url: str = "", *, prefix: str = "") -> AsyncIterator[Store]:
    """Open the store at a URL, by default ``args.url``, and close it at the end."""
    url = url or args.url
    store = open_store(url, options=store_options(args, url, prefix=prefix))
    try:
        yield store
    finally:
        await store.close()


def size_from(least_bytes: int, most_bytes: int = MOST_BYTES) -> Callable[[str], int]:
    """Return what reads a number of bytes from ``least_bytes`` to ``most_bytes``, for ``add_argument(type=...)``."""
    return _bounded(parse_bytes, least_bytes, most_bytes, format_bytes)


def rate_from(least: float) -> Callable[[str], float]:
    """Return what reads at least so many bytes a second, in bytes or in bits, for ``add_argument(type=...)``."""
    return _bounded(parse_rate, least, float(MOST_BYTES), lambda rate: f"{rate:,.4g} B/s")


def number_from(least: float, most: float) -> Callable[[str], float]:
    """Return what reads a number from ``least`` to ``most``, for ``add_argument(type=...)``."""
    return _bounded(_number, least, most, lambda number: f"{number:,.15g}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r:.40} is not a number") from None


def _bounded(
    read: Callable[[str], Number], least: Number, most: Number, show: Callable[[Number], str]
) -> Callable[[str], Number]:
    def bounded(text: str) -> Number:
        try:
            number = read(text)
        except ConfigError as error:
            raise ArgumentTypeError(str(error)) from None
        if not least <= number <= most:
            raise ArgumentTypeError(f"{text!r:.40} is not from {show(least)} to {show(most)}")
        return number

    return bounded


size = size_from(0)
"""Reads any number of bytes, for ``add_argument(type=...)``."""
super_sample_size = size_from(1, MAX_SUPER_SAMPLE_BYTES)
"""Reads how large a super-sample may be, for ``add_argument(type=...)``."""


def writable(text: str) -> str:
    """Return the URL of a data set to write to, for ``add_argument(type=...)``."""
    if text.startswith("stoker+"):
        raise ArgumentTypeError(f"what a function serves is read-only: {text}; write to the bucket behind it")
    return text


def positive(text: str) -> int:
    """Return a positive integer, for ``add_argument(type=...)``."""
    if not text.isascii() or not text.isdecimal() or not text.strip("0"):
        raise ArgumentTypeError(f"{text!r:.40} is not a positive whole number")
    if len(text) > _MOST_DIGITS:
        raise ArgumentTypeError(f"{text:.40} has more than {_MOST_DIGITS} digits")
    return int(text)
