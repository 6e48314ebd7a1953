"""``stoker tier``: runs a server of a shared tier, and creates the secrets and tokens that it needs."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from stoker._base.machine import raise_file_limit
from stoker._base.sizes import format_bytes
from stoker._cache.tiers import CacheSpec
from stoker._shared.address import Address
from stoker._shared.certificate import load_tls
from stoker._shared.client import ServerAddress, read_metrics
from stoker._shared.folder_storage import FolderStorage
from stoker._shared.read_through import ReadThrough, is_valid_object
from stoker._shared.secret import SECRET_VARIABLE, TierSecret
from stoker._shared.server import TierServer
from stoker._shared.serving import ListenAddress, serve_tier
from stoker._shared.storage import MemoryStorage
from stoker.cli.flags import add_actions, add_json, add_store_options, open_store_from_args, size_from
from stoker.cli.output import format_count, json_text, table
from stoker.errors import ConfigError

_PORT = 7412
_HOST_PATTERN = re.compile(r"[\w.-]*|[0-9A-Fa-f:.]+", re.ASCII)
"""A host name or an address; may be empty."""
_EPILOG = f"The secret is read from the variable {SECRET_VARIABLE}; commas separate the secrets of several tenants."


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = add_actions(parser, _EPILOG)
    add("secret", f"create a secret for {SECRET_VARIABLE} and print it", example="stoker tier secret")
    text = "print the bearer token of requests, for nginx, curl or Prometheus"
    token = add("token", text, example="stoker tier token --metrics")
    token.add_argument("--metrics", action="store_true", help="print the token that permits GET /metrics only")
    text, url = "show what a server holds and its counters", "'https://10.0.0.5:7412?fingerprint=…'"
    status = add("status", text, example=f"stoker tier status {url}")
    status.add_argument("url", metavar="URL", help="URL of the server, as it printed it at its start")
    add_json(status)
    text = "keep super-samples in memory for trainers on other machines, until SIGTERM or Ctrl-C"
    example = "stoker tier serve --memory 32GB --listen 0.0.0.0:7412 --advertise 10.0.0.5"
    serve = add("serve", text, description=f"{text}. Prints the URL for trainers.", example=example)
    serve.add_argument("--memory", type=size_from(1), required=True, metavar="SIZE", help="memory for objects: 32GB, …")
    add_endpoint(serve)
    disk = "disk for objects that do not fit into memory: FOLDER?limit=SIZE; the next server reuses it"
    serve.add_argument("--disk", metavar="SPEC", help=disk)
    data = "data set from which to read objects that trainers request and none has offered; may be repeated"
    serve.add_argument("--read-through", action="append", default=[], metavar="URL", help=data)
    add_store_options(serve, store_name="the data sets' bucket")


def add_endpoint(parser: ArgumentParser) -> None:
    """Add the options of the address on which a server listens."""
    listen = f"address to listen on (default: 127.0.0.1:{_PORT}); with TLS unless it is a loopback address"
    parser.add_argument("--listen", default=f"127.0.0.1:{_PORT}", metavar="HOST:PORT", help=listen)
    advertise = "host for the URL of the server (default: the HOST of --listen)"
    parser.add_argument("--advertise", default="", metavar="HOST", help=advertise)
    chain = "PEM file (default: a new certificate, verified by its fingerprint in the URL)"
    parser.add_argument("--certificate", type=Path, metavar="FILE", help=chain)
    parser.add_argument("--key", type=Path, metavar="FILE", help="PEM file of the certificate's key, unencrypted")


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
        print(json_text(counts) if args.json else table(_format_counts(counts), indent=""))
    else:
        await _serve(args)
    return 0


def _format_counts(counts: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the rows of the table of a server's counters."""

    def of(name: str, place: str = "") -> int:
        return int(counts.get(f'place_{name}{{place="{place}"}}' if place else f"{name}_total", 0))

    rows = []
    for place in ("memory", "disk", "functions"):
        if of("limit_bytes", place):
            used, limit = (format_bytes(of(name, place)) for name in ("used_bytes", "limit_bytes"))
            left = f"{of('evicted_total', place):,} evicted, {of('declined_total', place):,} declined (no room)"
            rows.append((place, f"{format_count(of('objects', place), 'object')}, {used} of {limit}; {left}"))
    hits = sum(of("hits_total", place) for place in ("memory", "disk", "functions"))
    fetched = f"; {of('fetched'):,} read through, {of('fetch_failures'):,} of them failed" if of("fetched") else ""
    return [
        *rows,
        ("reads", f"{hits:,} hits, {of('misses'):,} misses, {format_bytes(of('sent_bytes'))} sent{fetched}"),
        ("offers", f"{format_bytes(of('received_bytes'))} received, {of('refused'):,} refused for wrong bytes"),
        ("refused", f"{format_count(of('unauthorized'), 'request')} without a valid token"),
    ]


async def _serve(args: Namespace) -> None:
    """Serve until a signal arrives.

    Raises:
        ConfigError: an argument is invalid, or the address or the folder cannot be used.
        StoreError: a data set of ``--read-through`` cannot be read.
    """
    secrets, endpoint = TierSecret.parse_all(os.environ), parse_endpoint(args)
    raise_file_limit()
    async with AsyncExitStack() as stack:
        sources = []
        for url in args.read_through:
            sources.append(ReadThrough(await stack.enter_async_context(open_store_from_args(args, url)), secrets))
            await sources[-1].refresh()
        server = TierServer(
            secrets, MemoryStorage(args.memory), _open_disk_folder(args.disk, secrets, sources), sources
        )
        url = await stack.enter_async_context(serve_tier(server, endpoint))
        ended = create_stop_event()
        print(f"{url}\nkeeps up to {format_bytes(args.memory)}; use it as Loader(tier=URL)", flush=True)
        await ended.wait()
    logging.getLogger("stoker.tier.server").info("the tier server has ended")


def create_stop_event() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set from now on."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    return ended


def parse_endpoint(args: Namespace) -> ListenAddress:
    """Return the endpoint of a server from the arguments of :func:`add_endpoint`.

    Raises:
        ConfigError: an argument is invalid.
    """
    try:
        address = Address.parse(args.listen)
    except ConfigError as error:
        raise ConfigError(f"--listen: {error}") from None
    if (args.certificate is None) != (args.key is None):
        raise ConfigError("--certificate and --key go together; give both or neither")
    if not _HOST_PATTERN.fullmatch(args.advertise):
        raise ConfigError(f"--advertise must be a host, such as tier.internal, not {args.advertise!r:.80}")
    tls = None if args.key is None else load_tls(args.certificate, args.key)
    return ListenAddress(address=address, advertised=args.advertise, tls=tls)


def _open_disk_folder(
    spec: str | None, secrets: Sequence[TierSecret], sources: Sequence[ReadThrough]
) -> FolderStorage | None:
    """Return the disk folder for a spec ``FOLDER?limit=SIZE``, None if there is no spec."""
    if spec is None:
        return None
    try:
        disk = CacheSpec.parse(f"disk:{spec}")
        if "policy=" in spec.partition("?")[2]:
            raise ConfigError("a server takes no policy=")
    except ConfigError as error:
        raise ConfigError(
            f"--disk must be FOLDER?limit=SIZE, such as /mnt/nvme/tier?limit=200GB, not {spec!r:.200}: {error}"
        ) from None
    assert disk.path is not None  # noqa: S101 - it is a disk
    return FolderStorage(disk.path, disk.limit_bytes, partial(is_valid_object, secrets, sources))
