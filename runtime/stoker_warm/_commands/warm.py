"""``stoker warm``: runs, watches, measures and stops a tier in the memory of functions."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import sys
import time
import warnings
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stoker._base.checksum import crc32c
from stoker._base.sizes import format_bytes, format_dollars
from stoker._base.task_group import for_each
from stoker._format.identity import sha256_128
from stoker._format.supersample import MAX_OBJECT_BYTES
from stoker._shared.client import ServerAddress, SharedTier
from stoker._shared.secret import TierSecret
from stoker._shared.serving import serve_tier
from stoker.abc import ObjectRef, Tier
from stoker.cli.flags import number_from, positive, size_from
from stoker.cli.output import format_count, json_text, make_printable, table
from stoker.cli.tier import add_endpoint, create_stop_event, parse_endpoint, raise_file_limit
from stoker.errors import DeadlineError
from stoker_warm._auth import WarmSecret
from stoker_warm._config import WarmDeployment
from stoker_warm._proxy import Proxy
from stoker_warm._shard import ShardMac
from stoker_warm._tier import InProcessProxy, WarmTier, parse_server_url, read_tier_secret, read_warm_secret
from stoker_warm._tier_server import WarmServer, read_status

_STATES = {"awake": "awake", "sleeping": "asleep", "maybe": "in doubt", "gone": "gone"}
_READS = "{hits:,} hits, {misses:,} misses, {losses:,} lost"
_SHARDS = "{restored:,} reads restored from parity, {late:,} not waited for, {corrupt:,} corrupt, {rebuilt:,} rebuilt"
_WRITES = "{stored:,} stored, {declined:,} declined, {evicted:,} evicted"
_HOUR_SECONDS = 3600.0


def _format_states(status: Mapping[str, Any]) -> str:
    """Return how many nodes are in which state."""
    nodes = status["nodes"]
    states = ", ".join(f"{nodes[state]:,} {word}" for state, word in _STATES.items() if nodes.get(state))
    return f"{format_count(sum(nodes.values()), 'node')}: {states}"


def _format_line(status: Mapping[str, Any]) -> str:
    held = f"{format_count(status['objects'], 'object')}, {format_bytes(status['held_bytes'])}"
    return f"{_format_states(status)}; {held}; {_READS.format_map(status)}; {format_dollars(status['bill']['dollars'])}"


def _status_rows(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of a table; ``status`` is as :meth:`stoker_warm._proxy.Proxy.status` returns it."""
    bill, reads = status["bill"], status["hits"] + status["misses"] + status["losses"]
    rate = f" ({status['hits'] / reads:.1%} hits)" if reads else ""
    used, free, pending = (format_bytes(status[f"{name}_bytes"]) for name in ("held", "limit", "pending"))
    seconds, lost = bill["seconds"], bill["unanswered"]
    time = f"{seconds / _HOUR_SECONDS:,.1f} h" if seconds >= _HOUR_SECONDS else f"{seconds:,.0f} s"
    all_, serve, warm, bucket = (format_dollars(bill[f"{name}dollars"]) for name in ("", "serve_", "warm_", "bucket_"))
    unbilled = f"; {format_count(lost, 'call')} without a bill" if lost else ""
    return [
        ("nodes", f"{_format_states(status)}; objects cut {status['code']}"),
        ("held", f"{format_count(status['objects'], 'object')}, {used} with parity, of {free}"),
        ("reads", f"{_READS.format_map(status)}{rate}"),
        ("shards", _SHARDS.format_map(status)),
        ("writes", f"{_WRITES.format_map(status)}, {pending} pending"),
        ("bill", f"{bill['gb_seconds']:,.1f} GB-s in {format_count(bill['requests'], 'request')}, in {time}"),
        ("", f"{all_}: {serve} to serve, {warm} to keep warm{unbilled}"),
        ("bucket", f"{format_count(bill['reads'], 'read')} would be {bucket}"),
        ("pays", _format_break_even(bill)),
    ]


def _format_break_even(bill: Mapping[str, Any]) -> str:
    if not bill["reads"]:
        return "unknown before anything was read"
    reads = bill["break_even_reads_per_hour"]
    if reads is None:
        return "never in money: a read costs no less here than a GET of the bucket"
    return f"in money from {reads:,.0f} reads an hour on"


_ROW_BYTES = 8
_POLL_SECONDS = 0.005
_BATCH_BYTES = 64 << 20
"""Offered at a time: of more, a proxy would decline some."""
_WRITE_TIMEOUT_SECONDS = 120.0


class BenchTarget(NamedTuple):
    """A tier, what tells how it does, and what waits for its offers and counts those that it has accepted in all."""

    tier: Tier
    status: Callable[[], Awaitable[Mapping[str, Any]]]
    flush: Callable[[], Awaitable[int]]


async def run_bench(bench: BenchTarget, *, objects: int, size_bytes: int, concurrency: int) -> dict[str, Any]:
    """Write objects that were never there, and read them back.

    Args:
        bench: the tier.
        objects: how many. They differ in their first bytes only, so that they take no more memory here than one.
        size_bytes: of each.
        concurrency: reads under way at a time; writes are as many as the proxy is set to.

    Returns:
        The figures, as JSON values; ``written`` and ``read`` may be fewer than ``objects``.

    Raises:
        StoreError: the proxy cannot be asked, or does not get rid of what it was offered.
    """
    data = memoryview(bytearray(secrets.token_bytes(size_bytes)))
    refs = [_write_object(data, row) for row in range(objects)]
    written, write_seconds = await _offer_all(bench, refs, data)
    begun = time.perf_counter()
    seconds = await _read_all(bench.tier, refs, concurrency)
    read_seconds = time.perf_counter() - begun
    return {
        "objects": objects,
        "size_bytes": size_bytes,
        "at_once": concurrency,
        "written": written,
        "write_seconds": write_seconds,
        "write_bytes_per_second": written * size_bytes / write_seconds,
        "read": len(seconds),
        "read_seconds": read_seconds,
        "read_bytes_per_second": len(seconds) * size_bytes / read_seconds,
        "read_p50_seconds": float(np.quantile(seconds, 0.5)) if seconds else None,
        "read_p99_seconds": float(np.quantile(seconds, 0.99)) if seconds else None,
    }


def _bench_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of a table."""
    each = format_bytes(result["size_bytes"])
    rates = {name: f"{result[f'{name}_bytes_per_second'] / 1e6:,.0f} MB/s" for name in ("read", "write")}
    late = ""
    if result["read"]:
        late = f"; p50 {result['read_p50_seconds'] * 1e3:,.1f} ms, p99 {result['read_p99_seconds'] * 1e3:,.1f} ms"
    return [
        ("written", f"{result['written']:,} of {result['objects']:,} objects of {each}: {rates['write']}"),
        ("read", f"{result['read']:,} of {result['objects']:,}, {result['at_once']:,} at once: {rates['read']}{late}"),
    ]


def _write_object(data: memoryview, row: int) -> ObjectRef:
    """Write an object over the one before, and return what tells it from all others."""
    number = row.to_bytes(_ROW_BYTES, "big")[-len(data) :]
    data[: len(number)] = number
    return ObjectRef(key=f"bench/{row}", size_bytes=len(data), crc32c=crc32c(data), sha256_128=sha256_128(data))


async def _offer_all(bench: BenchTarget, refs: Sequence[ObjectRef], data: memoryview) -> tuple[int, float]:
    """Offer objects; return how many were accepted, and how many seconds it took until none of them was pending."""
    batch = max(1, _BATCH_BYTES // max(1, len(data)))
    before, begun = await bench.flush(), time.perf_counter()
    for start in range(0, len(refs), batch):
        decided = _count_decided(await bench.status())
        offered, accepted = refs[start : start + batch], await bench.flush()
        for row, ref in enumerate(offered, start):
            _write_object(data, row)
            bench.tier.offer(ref, data)
        try:
            async with asyncio.timeout(_WRITE_TIMEOUT_SECONDS):
                decided += await bench.flush() - accepted
                while (status := await bench.status())["pending_bytes"] and _count_decided(status) < decided:  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            text = f"the warm tier has not put away within {_WRITE_TIMEOUT_SECONDS:g} s what it was offered"
            raise DeadlineError(text) from None
    return await bench.flush() - before, time.perf_counter() - begun


def _count_decided(status: Mapping[str, Any]) -> int:
    """Return of how many objects it is known whether nodes took them, those that others have offered included."""
    return int(status["stored"] + status["declined"])


async def _read_all(tier: Tier, refs: Sequence[ObjectRef], concurrency: int) -> list[float]:
    """Read objects, and return the seconds of those reads that brought the right bytes."""
    seconds, buffers = list[float](), [memoryview(bytearray(refs[0].size_bytes)) for _ in range(concurrency)]

    async def read(ref: ObjectRef) -> None:
        into = buffers.pop()
        try:
            begun = time.perf_counter()
            if await tier.read(ref, into):
                taken = time.perf_counter() - begun
                seconds.extend([taken] if crc32c(into) == ref.crc32c else [])
        finally:
            buffers.append(into)

    await for_each(refs, read, concurrency=concurrency)
    return seconds


_MAX_INTERVAL_SECONDS = 86_400.0
_DEPLOYMENT_URL_HELP = "warm+lambda://PREFIX?listen=HOST:PORT&…, or warm+gcf://…"
_REMOVED_FLAGS = ("", "-endpoint-url", "-region", "-prices", "-user-project", "-auth")
_REMOVED_SWITCHES = ("-anonymous", "-requester-pays")
"""What ``--data`` and a group of options for it of earlier releases end with; they are accepted with a warning."""
_TIER_URL_HELP = f"{_DEPLOYMENT_URL_HELP}; or https://HOST:PORT?fingerprint=… of a proxy that runs"
_EPILOG = "Settings in a URL, and the secrets in STOKER_WARM_SECRET and STOKER_TIER_SECRET: docs/tiers.md."


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", title="actions", metavar="ACTION", required=True)

    def add(name: str, help_: str, url: str = _DEPLOYMENT_URL_HELP) -> ArgumentParser:
        action = actions.add_parser(name, help=help_, description=help_, epilog=_EPILOG)
        if url:
            action.add_argument("url", metavar="URL", help=url)
        return action

    add("secret", "make a secret for proxy and nodes, and print it", url="")
    add("up", "call all nodes, and say how much they can hold; exits with 1 if some do not come")
    proxy = add("proxy", "run a proxy that trainers share, until Ctrl-C; prints the URL for them")
    add_endpoint(proxy)
    for flag in _REMOVED_FLAGS:
        proxy.add_argument(f"--data{flag}", action="append", dest="removed", help=SUPPRESS)
    for flag in _REMOVED_SWITCHES:
        proxy.add_argument(f"--data{flag}", action="append_const", const=flag, dest="removed", help=SUPPRESS)
    every = number_from(0.1, _MAX_INTERVAL_SECONDS)
    proxy.add_argument("--every", type=every, default=60.0, metavar="SECONDS", help="between lines (default: 60)")
    status = add("status", "say what the tier holds, does and costs", _TIER_URL_HELP)
    bench = add("bench", "write and read objects, which stay there until others take their place", _TIER_URL_HELP)
    bench.add_argument("--objects", type=positive, default=32, metavar="N", help="how many (default: 32)")
    size = size_from(1, MAX_OBJECT_BYTES)
    bench.add_argument("--size", type=size, default=8 << 20, metavar="SIZE", help="of each (default: 8MiB)")
    bench.add_argument("--at-once", type=positive, default=4, metavar="N", help="reads at once (default: 4)")
    for action in (status, bench):
        action.add_argument("--json", action="store_true", help="write JSON")
    down = add("down", "have nodes drop what they hold, and return")
    down.add_argument("--forget", action="store_true", required=True, help="what nodes hold")


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    if args.action == "secret":
        print(WarmSecret.generate().reveal())
        return 0
    return asyncio.run(_ACTIONS[args.action](args))


async def _proxy(args: Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    fleet = WarmDeployment.parse(args.url)
    if args.removed:
        text = "--data has no effect: what nodes lose is written again when it is read; leave it out"
        warnings.warn(text, DeprecationWarning, stacklevel=1)
    tenants, endpoint = TierSecret.parse_all(os.environ), parse_endpoint(args)
    raise_file_limit()
    if args.key is not None:
        fleet = dataclasses.replace(fleet, certificate=(args.certificate, args.key))
    async with _run_proxy(fleet, tenants[0]) as proxy, serve_tier(WarmServer(tenants, proxy), endpoint) as url:
        ended = create_stop_event()
        print(url, flush=True)
        while not ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(args.every):
                    await ended.wait()
            print(f"stoker: {_format_line(await proxy.status())}", file=sys.stderr)
    return 0


async def _up(args: Namespace) -> int:
    async with _run_proxy(WarmDeployment.parse(args.url), read_tier_secret()) as proxy:
        status = await proxy.status(wake_nodes=True)
    nodes, absent = sum(status["nodes"].values()), status["absent"]
    print(
        f"{nodes - absent:,} of {format_count(nodes, 'node')} came, and can hold {format_bytes(status['limit_bytes'])}"
    )
    _print_problems(status)
    return 1 if absent else 0


async def _status(args: Namespace) -> int:
    async with _open_bench(args.url) as bench:
        status = await bench.status()
    if args.json:
        print(json_text(status))
    else:
        print(table(_status_rows(status), indent=""))
        _print_problems(status)
    return 0


def _print_problems(status: Mapping[str, Any]) -> None:
    """Say why nodes did not come, and of those with the same reason, but for their names, only once."""
    alike = dict[str, tuple[list[str], str]]()
    for problem in status["problems"]:
        name, _, why = problem.partition(": ")
        names, _ = alike.setdefault(why.replace(name, ""), ([], why))
        names.append(name)
    for names, why in alike.values():
        print(make_printable(f"{', '.join(names)}: {why}"))
    if status["absent"] > len(status["problems"]):
        print(f"and {status['absent'] - len(status['problems']):,} more")


async def _bench(args: Namespace) -> int:
    async with _open_bench(args.url) as bench:
        found = await run_bench(bench, objects=args.objects, size_bytes=args.size, concurrency=args.at_once)
    print(json_text(found) if args.json else table(_bench_rows(found), indent=""))
    return 0 if found["read"] == args.objects else 1


async def _down(args: Namespace) -> int:
    async with _run_proxy(WarmDeployment.parse(args.url), read_tier_secret()) as proxy:
        problems = await proxy.delete_all()
    for problem in problems:
        print(make_printable(problem))
    return 1 if problems else 0


_ACTIONS = {"up": _up, "proxy": _proxy, "status": _status, "bench": _bench, "down": _down}


@asynccontextmanager
async def _run_proxy(fleet: WarmDeployment, tenant: TierSecret) -> AsyncIterator[Proxy]:
    """Run a proxy in this process, which takes the nodes from one that runs elsewhere."""
    proxy = await InProcessProxy(fleet, read_warm_secret(), ShardMac(tenant.shards_key)).start()
    try:
        yield proxy
    finally:
        await proxy.close()


@asynccontextmanager
async def _open_bench(url: str) -> AsyncIterator[BenchTarget]:
    """Yield the tier of a proxy in this process, whose nodes were called, or of one elsewhere."""
    if not url.startswith(("http://", "https://", "warm://")):
        tenant = read_tier_secret()
        async with _run_proxy(WarmDeployment.parse(url), tenant) as proxy:
            await proxy.status(wake_nodes=True)
            yield BenchTarget(WarmTier.from_proxy(proxy, tenant), proxy.status, partial(flush_proxy, proxy))
        return
    (secret, *_), server = TierSecret.parse_all(os.environ), ServerAddress.parse(parse_server_url(url))
    tier = SharedTier([server], secret)
    try:
        yield BenchTarget(tier, partial(read_status, server, secret), tier.flush)
    finally:
        await tier.close()


async def flush_proxy(proxy: Proxy) -> int:
    """Wait until nothing waits to be written to nodes; return how many objects were."""
    while proxy.statistics().pending_bytes:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(_POLL_SECONDS)
    return proxy.statistics().stored
