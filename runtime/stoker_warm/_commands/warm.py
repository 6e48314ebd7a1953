"""``stoker warm``: runs, watches, measures and stops a tier in the memory of functions."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import signal
import sys
import time
import warnings
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from stoker._base.checksum import crc32c
from stoker._base.sizes import format_bytes
from stoker._base.task_group import for_each
from stoker._cache.keeper import name_of
from stoker.abc import ObjectRef
from stoker.cli.flags import number_from, positive, size_from
from stoker.cli.output import counted, json_text, printable, table
from stoker.errors import ConfigError, DeadlineError
from stoker_warm._auth import Certificate, Secret
from stoker_warm._config import Fleet, WarmLocation
from stoker_warm._frames import MAX_SHARD_BYTES
from stoker_warm._opening import FleetProxy, open_backend, secret_of_environment
from stoker_warm._tier import ManagedBackend


async def run_proxy(args: Namespace, location: WarmLocation, secret: Secret) -> int:
    """Serve until SIGINT, SIGTERM or a client's ``down``; return the exit code.

    Raises:
        StokerError: it cannot listen, or functions cannot be called.
    """
    if args.removed:
        text = "--data has no effect: what nodes lose is written again when it is read; leave it out"
        warnings.warn(text, DeprecationWarning, stacklevel=1)
    fleet = _fleet(args, location)
    proxy = FleetProxy(fleet, secret)
    await proxy.start()
    is_over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, is_over.set)
    try:
        listener = proxy.listener
        fingerprint = f"?fingerprint={listener.fingerprint}" if listener.fingerprint else ""
        print(f"warm://{listener.address}{fingerprint}", flush=True)
        while not is_over.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(args.every):
                    await is_over.wait()
            print(f"stoker: {_line(await proxy.status())}", file=sys.stderr)
    finally:
        await proxy.close()
    return 0


def _fleet(args: Namespace, location: WarmLocation) -> Fleet:
    if location.fleet is None:
        raise ConfigError("a proxy is run for functions: give a URL such as warm+lambda://stoker?listen=10.0.0.5:7411")
    if (args.certificate is None) != (args.key is None):
        raise ConfigError("--certificate and --key go together")
    if args.certificate is None:
        return location.fleet
    return dataclasses.replace(location.fleet, certificate=Certificate(chain=args.certificate, key=args.key))


def _line(status: Mapping[str, Any]) -> str:
    held = f"{counted(status['objects'], 'object')}, {format_bytes(status['held_bytes'])}"
    reads = f"{status['hits']:,} hits, {status['misses']:,} misses, {status['losses']:,} lost"
    return f"{states_of(status)}; {held}; {reads}; {dollars_of(status['bill']['dollars'])}"


_STATES = {"awake": "awake", "sleeping": "asleep", "maybe": "in doubt", "gone": "gone"}
_PARTS = (("serve", "serve"), ("warm", "keep warm"))
_HOUR_SECONDS = 3600.0


def rows_of_status(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of a table.

    Args:
        status: as :meth:`stoker_warm._proxy.Proxy.status` returns it.
    """
    bill, reads = status["bill"], status["hits"] + status["misses"] + status["losses"]
    rate = f" ({status['hits'] / reads:.1%} hits)" if reads else ""
    used, free = format_bytes(status["held_bytes"]), format_bytes(status["limit_bytes"])
    return [
        ("nodes", f"{states_of(status)}; objects cut {status['code']}"),
        ("held", f"{counted(status['objects'], 'object')}, {used} with parity, of {free}"),
        ("reads", f"{status['hits']:,} hits, {status['misses']:,} misses, {status['losses']:,} lost{rate}"),
        ("shards", _shards(status)),
        ("writes", _writes(status)),
        ("bill", f"{bill['gb_seconds']:,.1f} GB-s in {counted(bill['requests'], 'request')}, in {_time(bill)}"),
        ("", _dollars(bill)),
        ("bucket", f"{counted(bill['reads'], 'read')} would be {dollars_of(bill['bucket_dollars'])}"),
        ("pays", _pays(bill)),
    ]


def states_of(status: Mapping[str, Any]) -> str:
    """Return how many nodes are in which state."""
    nodes = status["nodes"]
    states = ", ".join(f"{nodes[state]:,} {word}" for state, word in _STATES.items() if nodes.get(state))
    return f"{counted(sum(nodes.values()), 'node')}: {states}"


def dollars_of(dollars: float) -> str:
    """Return an amount, of which small ones matter, too."""
    return f"${dollars:,.2f}" if dollars >= 100 else f"${dollars:.6f}"


def _shards(status: Mapping[str, Any]) -> str:
    restored, late = f"{status['restored']:,} reads restored from parity", f"{status['late']:,} not waited for"
    return f"{restored}, {late}, {status['corrupt']:,} corrupt, {status['rebuilt']:,} rebuilt"


def _writes(status: Mapping[str, Any]) -> str:
    done = f"{status['stored']:,} stored, {status['declined']:,} declined, {status['evicted']:,} evicted"
    return f"{done}, {format_bytes(status['pending_bytes'])} pending"


def _time(bill: Mapping[str, Any]) -> str:
    hours = bill["seconds"] / _HOUR_SECONDS
    return f"{hours:,.1f} h" if hours >= 1 else f"{bill['seconds']:,.0f} s"


def _dollars(bill: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{dollars_of(bill[f'{name}_dollars'])} to {what}" for name, what in _PARTS)
    lost = f"; {counted(bill['unanswered'], 'call')} without a bill" if bill["unanswered"] else ""
    return f"{dollars_of(bill['dollars'])}: {parts}{lost}"


def _pays(bill: Mapping[str, Any]) -> str:
    if not bill["reads"]:
        return "unknown before anything was read"
    reads = bill["break_even_reads_per_hour"]
    if reads is None:
        return "never in money: a read costs no less here than a GET of the bucket"
    return f"in money from {reads:,.0f} reads an hour on"


_LOOK_SECONDS = 0.005
_BATCH_BYTES = 64 << 20
"""Offered at a time: of more, a proxy would decline some."""
_PATIENCE_SECONDS = 120.0


async def measured(backend: ManagedBackend, *, objects: int, size_bytes: int, at_once: int) -> dict[str, Any]:
    """Write objects that were never there, and read them back.

    Args:
        backend: of the tier.
        objects: how many. They differ by their keys only, so that they take no more memory here than one.
        size_bytes: of each.
        at_once: reads under way at a time; writes are as many as the proxy is set to.

    Returns:
        The figures, as JSON values; ``written`` and ``read`` may be fewer than ``objects``.

    Raises:
        StoreError: the proxy cannot be asked, or does not get rid of what it was offered.
    """
    data, run = secrets.token_bytes(size_bytes), secrets.token_hex(8)
    checksum = crc32c(data)
    refs = (ObjectRef(key=f"bench/{run}/{row}", size_bytes=size_bytes, crc32c=checksum) for row in range(objects))
    names = [name_of(ref) for ref in refs]
    before = await backend.status(wakes=True)
    write_seconds = await _written(backend, names, memoryview(data))
    after = await backend.status()
    begun = time.perf_counter()
    seconds = await _read(backend, names, checksum, size_bytes, at_once)
    read_seconds = time.perf_counter() - begun
    return {
        "objects": objects,
        "size_bytes": size_bytes,
        "at_once": at_once,
        "written": after["stored"] - before["stored"],
        "write_seconds": write_seconds,
        "write_bytes_per_second": (after["stored"] - before["stored"]) * size_bytes / write_seconds,
        "read": len(seconds),
        "read_seconds": read_seconds,
        "read_bytes_per_second": len(seconds) * size_bytes / read_seconds,
        "read_p50_seconds": float(np.quantile(seconds, 0.5)) if seconds else None,
        "read_p99_seconds": float(np.quantile(seconds, 0.99)) if seconds else None,
    }


def rows_of_bench(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of a table."""
    each = format_bytes(found["size_bytes"])
    rates = {name: f"{found[f'{name}_bytes_per_second'] / 1e6:,.0f} MB/s" for name in ("read", "write")}
    late = ""
    if found["read"]:
        late = f"; p50 {found['read_p50_seconds'] * 1e3:,.1f} ms, p99 {found['read_p99_seconds'] * 1e3:,.1f} ms"
    return [
        ("written", f"{found['written']:,} of {found['objects']:,} objects of {each}: {rates['write']}"),
        ("read", f"{found['read']:,} of {found['objects']:,}, {found['at_once']:,} at once: {rates['read']}{late}"),
    ]


async def _written(backend: ManagedBackend, names: Sequence[str], data: memoryview) -> float:
    """Offer objects, and return how many seconds it took until nothing waited any more."""
    batch = max(1, _BATCH_BYTES // max(1, len(data)))
    begun = time.perf_counter()
    for start in range(0, len(names), batch):
        for name in names[start : start + batch]:
            backend.offer(name, data)
        await _settled(backend)
    return time.perf_counter() - begun


async def _settled(backend: ManagedBackend) -> None:
    loop = asyncio.get_running_loop()
    end_seconds = loop.time() + _PATIENCE_SECONDS
    await asyncio.sleep(0)
    while (await backend.status())["pending_bytes"]:
        if loop.time() > end_seconds:
            raise DeadlineError(f"the warm tier has not put away within {_PATIENCE_SECONDS:g} s what it was offered")
        await asyncio.sleep(_LOOK_SECONDS)


async def _read(
    backend: ManagedBackend, names: Sequence[str], checksum: int, size_bytes: int, at_once: int
) -> list[float]:
    """Read objects, and return the seconds of those reads that brought the right bytes."""
    seconds, buffers = list[float](), [memoryview(bytearray(size_bytes)) for _ in range(at_once)]

    async def read(name: str) -> None:
        into = buffers.pop()
        try:
            begun = time.perf_counter()
            if await backend.read(name, into):
                taken = time.perf_counter() - begun
                seconds.extend([taken] if crc32c(into) == checksum else [])
        finally:
            buffers.append(into)

    await for_each(names, read, concurrency=at_once)
    return seconds


_MAX_EVERY_SECONDS = 86_400.0
_FUNCTIONS = "warm+lambda://PREFIX?listen=HOST:PORT&…, or warm+gcf://…"
_REMOVED_FLAGS = ("", "-endpoint-url", "-region", "-prices", "-user-project", "-auth")
_REMOVED_SWITCHES = ("-anonymous", "-requester-pays")
"""What ``--data`` and a group of options for it of earlier releases end with; they are accepted with a warning."""
_EPILOG = "Settings in a URL, and the secret in STOKER_WARM_SECRET: docs/tiers.md."


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", title="actions", metavar="ACTION", required=True)

    def add(
        name: str, help_: str, url: str = f"warm://HOST:PORT of a proxy that runs, or {_FUNCTIONS}"
    ) -> ArgumentParser:
        action = actions.add_parser(name, help=help_, description=help_, epilog=_EPILOG)
        if url:
            action.add_argument("url", metavar="URL", help=url)
        return action

    add("secret", "make a secret for proxy, nodes and trainers, and print it", url="")
    add("up", "call all nodes, and say how much they can hold; exits with 1 if some do not come")
    proxy = add("proxy", "run a proxy that trainers share, until Ctrl-C; prints the URL for them", url=_FUNCTIONS)
    proxy.add_argument("--certificate", type=Path, metavar="FILE", help="PEM; a must off private networks")
    proxy.add_argument("--key", type=Path, metavar="FILE", help="PEM, of the certificate, without a passphrase")
    for flag in _REMOVED_FLAGS:
        proxy.add_argument(f"--data{flag}", action="append", dest="removed", help=SUPPRESS)
    for flag in _REMOVED_SWITCHES:
        proxy.add_argument(f"--data{flag}", action="append_const", const=flag, dest="removed", help=SUPPRESS)
    every = number_from(0.1, _MAX_EVERY_SECONDS)
    proxy.add_argument("--every", type=every, default=60.0, metavar="SECONDS", help="between lines (default: 60)")
    status = add("status", "say what the tier holds, does and costs")
    bench = add("bench", "write and read objects, which stay there until others take their place")
    bench.add_argument("--objects", type=positive, default=32, metavar="N", help="how many (default: 32)")
    size = size_from(0, MAX_SHARD_BYTES)
    bench.add_argument("--size", type=size, default=8 << 20, metavar="SIZE", help="of each (default: 8MiB)")
    bench.add_argument("--at-once", type=positive, default=4, metavar="N", help="reads at once (default: 4)")
    for action in (status, bench):
        action.add_argument("--json", action="store_true", help="write JSON")
    down = add("down", "have nodes return, and the proxy end")
    down.add_argument("--forget", action="store_true", help="have nodes drop what they hold before")


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    if args.action == "secret":
        print(Secret.generate().reveal())
        return 0
    location = WarmLocation.parse(args.url)
    if args.action == "proxy":
        return asyncio.run(run_proxy(args, location, secret_of_environment()))
    return asyncio.run(_ACTIONS[args.action](args, location))


async def _up(args: Namespace, location: WarmLocation) -> int:
    async with _opened(location) as backend:
        status = await backend.status(wakes=True)
    nodes, absent = sum(status["nodes"].values()), status["absent"]
    print(f"{nodes - absent:,} of {counted(nodes, 'node')} came, and can hold {format_bytes(status['limit_bytes'])}")
    _tell_problems(status)
    return 1 if absent else 0


async def _status(args: Namespace, location: WarmLocation) -> int:
    async with _opened(location) as backend:
        # A proxy that begins here knows nothing before its nodes have said what they hold.
        status = await backend.status(wakes=location.fleet is not None)
    if args.json:
        print(json_text(status))
    else:
        print(table(rows_of_status(status), indent=""))
        _tell_problems(status)
    return 0


def _tell_problems(status: Mapping[str, Any]) -> None:
    """Say why nodes did not come, and of those with the same reason, but for their names, only once."""
    alike = dict[str, tuple[list[str], str]]()
    for problem in status["problems"]:
        name, _, why = problem.partition(": ")
        names, _ = alike.setdefault(why.replace(name, ""), ([], why))
        names.append(name)
    for names, why in alike.values():
        print(printable(f"{', '.join(names)}: {why}"))
    if status["absent"] > len(status["problems"]):
        print(f"and {status['absent'] - len(status['problems']):,} more")


async def _bench(args: Namespace, location: WarmLocation) -> int:
    async with _opened(location) as backend:
        found = await measured(backend, objects=args.objects, size_bytes=args.size, at_once=args.at_once)
    print(json_text(found) if args.json else table(rows_of_bench(found), indent=""))
    return 0 if found["read"] == args.objects else 1


async def _down(args: Namespace, location: WarmLocation) -> int:
    if location.fleet is not None and not args.forget:
        raise ConfigError(
            "nodes return by themselves when nobody asks; give --forget for them to drop what they hold, or the "
            "warm:// URL of the proxy that is to end"
        )
    async with _opened(location) as backend:
        problems = await backend.down(forgets=args.forget)
    for problem in problems:
        print(printable(problem))
    return 1 if problems else 0


_ACTIONS = {"up": _up, "status": _status, "bench": _bench, "down": _down}


@asynccontextmanager
async def _opened(location: WarmLocation) -> AsyncIterator[ManagedBackend]:
    backend = await open_backend(location, secret_of_environment())
    try:
        yield backend
    finally:
        await backend.close()
