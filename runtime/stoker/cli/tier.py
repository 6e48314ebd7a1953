"""``stoker tier``: runs a server of a shared tier, and makes what it and its clients need."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import signal
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

from stoker._base.sizes import format_bytes
from stoker._cache.tiers import CacheSpec
from stoker._shared.address import Address
from stoker._shared.certificate import given_tls
from stoker._shared.client import ServerAddress, read_metrics
from stoker._shared.folder import ObjectFolder
from stoker._shared.objects import ObjectMemory
from stoker._shared.read_through import ReadThrough, is_sound
from stoker._shared.secret import VARIABLE, TierSecret
from stoker._shared.server import TierServer
from stoker._shared.serving import Endpoint, listening
from stoker.cli.flags import add_store_options, opened, size_from
from stoker.cli.output import counted, json_text, table
from stoker.errors import ConfigError

_PORT = 7412
_HOST = re.compile(r"[\w.-]*|[0-9A-Fa-f:.]+", re.ASCII)
"""A name or an address; empty for none."""
_EPILOG = f"The secret stands in the variable {VARIABLE}; several tenants' secrets are separated by commas."


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", title="actions", metavar="ACTION", required=True)
    actions.add_parser("secret", help=f"make a secret for {VARIABLE}, and print it")
    token = actions.add_parser("token", help="print the bearer token of requests, for nginx, curl or Prometheus")
    token.add_argument("--metrics", action="store_true", help="the one that is good for GET /metrics alone")
    status = actions.add_parser("status", help="say what a server holds, and what it was asked", epilog=_EPILOG)
    status.add_argument("url", metavar="URL", help="of the server, as it was printed when it began")
    status.add_argument("--json", action="store_true", help="write JSON")
    text = "hold super-samples in memory for trainers on other machines, until SIGTERM or Ctrl-C"
    serve = actions.add_parser("serve", help=text, description=f"{text}. Prints the URL for trainers.", epilog=_EPILOG)
    serve.add_argument("--memory", type=size_from(1), required=True, metavar="SIZE", help="for objects, such as 32GB")
    add_endpoint(serve)
    disk = "for what has no room in memory: FOLDER?limit=SIZE; kept for the next server"
    serve.add_argument("--disk", metavar="SPEC", help=disk)
    data = "data set from which to read what trainers ask for and nobody has offered; may be given several times"
    serve.add_argument("--read-through", action="append", default=[], metavar="URL", help=data)
    add_store_options(serve, of="the data sets' bucket")


def add_endpoint(parser: ArgumentParser) -> None:
    """Add where a server listens for trainers."""
    listen = f"where trainers connect (default: 127.0.0.1:{_PORT}); off loopback with TLS"
    parser.add_argument("--listen", default=f"127.0.0.1:{_PORT}", metavar="HOST:PORT", help=listen)
    advertise = "by which trainers reach it, if that is not the HOST of --listen"
    parser.add_argument("--advertise", default="", metavar="HOST", help=advertise)
    chain = "PEM (default: one that is made for this process, known by its fingerprint in the URL)"
    parser.add_argument("--certificate", type=Path, metavar="FILE", help=chain)
    parser.add_argument("--key", type=Path, metavar="FILE", help="PEM, of the certificate, without a passphrase")


async def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    if args.action == "secret":
        print(TierSecret.generate().reveal())
    elif args.action == "token":
        (secret, *_) = TierSecret.parse_all(os.environ)
        print(secret.metrics_token if args.metrics else secret.token)
    elif args.action == "status":
        (secret, *_) = TierSecret.parse_all(os.environ)
        counts = await read_metrics(ServerAddress.parse(args.url), secret)
        print(json_text(counts) if args.json else table(_rows_of(counts), indent=""))
    else:
        await _serve(args)
    return 0


def _rows_of(counts: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the rows of a table."""

    def of(name: str, place: str = "") -> int:
        return int(counts.get(f'place_{name}{{place="{place}"}}' if place else f"{name}_total", 0))

    rows = []
    for place in ("memory", "disk", "functions"):
        if of("limit_bytes", place):
            used, limit = (format_bytes(of(name, place)) for name in ("used_bytes", "limit_bytes"))
            left = f"{of('evicted_total', place):,} left for others, {of('declined_total', place):,} had no room"
            rows.append((place, f"{counted(of('objects', place), 'object')}, {used} of {limit}; {left}"))
    hits = sum(of("hits_total", place) for place in ("memory", "disk", "functions"))
    fetched = f"; {of('fetched'):,} read through, {of('fetch_failures'):,} of them in vain" if of("fetched") else ""
    return [
        *rows,
        ("reads", f"{hits:,} hits, {of('misses'):,} misses, {format_bytes(of('sent_bytes'))} sent{fetched}"),
        ("offers", f"{format_bytes(of('received_bytes'))} received, {of('refused'):,} refused for wrong bytes"),
        ("refused", f"{counted(of('unauthorized'), 'request')} without a valid token"),
    ]


async def _serve(args: Namespace) -> None:
    """Serve until a signal comes.

    Raises:
        ConfigError: an argument is not right, or the address or the folder cannot be used.
        StoreError: a data set that is to be read through cannot be read.
    """
    secrets, endpoint = TierSecret.parse_all(os.environ), endpoint_of(args)
    lift_file_limit()
    async with AsyncExitStack() as stack:
        sources = []
        for url in args.read_through:
            sources.append(ReadThrough(await stack.enter_async_context(opened(args, url)), secrets))
            await sources[-1].refresh()
        server = TierServer(secrets, ObjectMemory(args.memory), _folder(args.disk, secrets, sources), sources)
        url = await stack.enter_async_context(listening(server, endpoint))
        ended = end_signal()
        print(f"{url}\nholds up to {format_bytes(args.memory)} for Loader(tier=...) with this URL", flush=True)
        await ended.wait()
    logging.getLogger("stoker.tier.server").info("the tier server has ended")


def lift_file_limit() -> None:
    """Let this process open as many files as the system allows: each trainer has up to 32 connections."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # where the system takes less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))


def end_signal() -> asyncio.Event:
    """Return an event that SIGINT or SIGTERM sets from here on."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    return ended


def endpoint_of(args: Namespace) -> Endpoint:
    """Return where a server is to listen for trainers.

    Raises:
        ConfigError: an argument is not right.
    """
    try:
        address = Address.parse(args.listen)
    except ConfigError as error:
        raise ConfigError(f"--listen: {error}") from None
    if (args.certificate is None) != (args.key is None):
        raise ConfigError("--certificate and --key go together")
    if not _HOST.fullmatch(args.advertise):
        raise ConfigError(f"--advertise is a name or an address, such as tier.internal, not {args.advertise!r:.80}")
    tls = None if args.key is None else given_tls(args.certificate, args.key)
    return Endpoint(address=address, advertised=args.advertise, tls=tls)


def _folder(spec: str | None, secrets: Sequence[TierSecret], sources: Sequence[ReadThrough]) -> ObjectFolder | None:
    """Return what a text ``FOLDER?limit=SIZE`` says; None if there is none."""
    if spec is None:
        return None
    try:
        disk = CacheSpec.parse(f"disk:{spec}")
        if "policy=" in spec.partition("?")[2]:
            raise ConfigError("a server has no policy=")
    except ConfigError as error:
        raise ConfigError(
            f"--disk is FOLDER?limit=SIZE, such as /mnt/nvme/tier?limit=200GB, not {spec!r:.200}: {error}"
        ) from None
    assert disk.path is not None  # noqa: S101 - it is a disk
    return ObjectFolder(disk.path, disk.limit_bytes, partial(is_sound, secrets, sources))
