"""``stoker warm``: runs, inspects, measures and stops a tier in the memory of functions."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import sys
import time
import warnings
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stoker._base.checksum import crc32c
from stoker._base.machine import raise_file_limit
from stoker._base.sizes import format_bytes, format_dollars
from stoker._base.task_group import for_each
from stoker._format.identity import sha256_128
from stoker._format.supersample import MAX_OBJECT_BYTES
from stoker._shared.client import ServerAddress, SharedTier
from stoker._shared.secret import TierSecret
from stoker._shared.serving import serve_tier
from stoker.abc import ObjectRef, Tier
from stoker.cli.flags import add_actions, add_json, number_from, positive, size_from
from stoker.cli.output import format_count, json_text, make_printable, table
from stoker.cli.tier import add_endpoint, create_stop_event, parse_endpoint
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
    """Format the number of nodes in each state."""
    nodes = status["nodes"]
    states = ", ".join(f"{nodes[state]:,} {word}" for state, word in _STATES.items() if nodes.get(state))
    return f"{format_count(sum(nodes.values()), 'node')}: {states}"


def _format_line(status: Mapping[str, Any]) -> str:
    held = f"{format_count(status['objects'], 'object')}, {format_bytes(status['held_bytes'])}"
    return f"{_format_states(status)}; {held}; {_READS.format_map(status)}; {format_dollars(status['bill']['dollars'])}"


def _status_rows(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the table rows of a status, from :meth:`stoker_warm._proxy.Proxy.status`."""
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
"""Bytes of objects offered at a time; a proxy would decline some of a larger batch."""
_WRITE_TIMEOUT_SECONDS = 120.0


class BenchTarget(NamedTuple):
    """A tier, a function for its status, and one that waits for its offers and returns the number accepted so far."""

    tier: Tier
    status: Callable[[], Awaitable[Mapping[str, Any]]]
    flush: Callable[[], Awaitable[int]]


async def run_bench(bench: BenchTarget, *, objects: int, size_bytes: int, concurrency: int) -> dict[str, Any]:
    """Write new objects to a tier, read them back, and measure both.

    Args:
        bench: Tier to measure.
        objects: Number of objects. They differ only in their first bytes, so one buffer holds them all.
        size_bytes: Size of each object, in bytes.
        concurrency: Number of concurrent reads; the proxy's settings limit concurrent writes.

    Returns:
        The results as JSON values; ``written`` and ``read`` may be less than ``objects``.

    Raises:
        StoreError: The proxy cannot be reached, or does not complete its writes in time.
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
    """Return the table rows of a measurement."""
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
    """Overwrite the buffer with the object of a row, and return its reference."""
    number = row.to_bytes(_ROW_BYTES, "big")[-len(data) :]
    data[: len(number)] = number
    return ObjectRef(key=f"bench/{row}", size_bytes=len(data), crc32c=crc32c(data), sha256_128=sha256_128(data))


async def _offer_all(bench: BenchTarget, refs: Sequence[ObjectRef], data: memoryview) -> tuple[int, float]:
    """Offer objects; return the number accepted, and the time until none of them was pending, in seconds."""
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
                while (status := await bench.status())["pending_bytes"] and _count_decided(status) < decided:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            text = f"the warm tier has not written the offered objects within {_WRITE_TIMEOUT_SECONDS:g} s"
            raise DeadlineError(text) from None
    return await bench.flush() - before, time.perf_counter() - begun


def _count_decided(status: Mapping[str, Any]) -> int:
    """Return the number of objects that were stored or declined, including those of other clients."""
    return int(status["stored"] + status["declined"])


async def _read_all(tier: Tier, refs: Sequence[ObjectRef], concurrency: int) -> list[float]:
    """Read objects, and return the durations of the reads that returned the right bytes, in seconds."""
    seconds = list[float]()
    buffers = [memoryview(bytearray(refs[0].size_bytes)) for _ in range(concurrency)]

    async def read(ref: ObjectRef) -> None:
        into = buffers.pop()
        try:
            begun = time.perf_counter()
            if await tier.read(ref, into):
                duration = time.perf_counter() - begun
                seconds.extend([duration] if crc32c(into) == ref.crc32c else [])
        finally:
            buffers.append(into)

    await for_each(refs, read, concurrency=concurrency)
    return seconds


_MAX_INTERVAL_SECONDS = 86_400.0
_DEPLOYMENT_URL_HELP = "warm+lambda://PREFIX?listen=HOST:PORT&…, or warm+gcf://…"
_REMOVED_FLAGS = ("", "-endpoint-url", "-region", "-prices", "-user-project", "-auth")
_REMOVED_SWITCHES = ("-anonymous", "-requester-pays")
"""Suffixes of ``--data`` and related options of earlier releases, which are accepted with a warning."""
_TIER_URL_HELP = f"{_DEPLOYMENT_URL_HELP}; or https://HOST:PORT?fingerprint=… of a running proxy"
_EPILOG = "For the settings in a URL, and the secrets in STOKER_WARM_SECRET and STOKER_TIER_SECRET, see docs/tiers.md."


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_action = add_actions(parser, _EPILOG)

    def add(name: str, text: str, url: str = _DEPLOYMENT_URL_HELP, flags: str = "") -> ArgumentParser:
        example = f"stoker warm {name}" + (f" 'warm+lambda://stoker?listen=10.0.0.5:7412'{flags}" if url else "")
        action = add_action(name, text, example=example)
        if url:
            action.add_argument("url", metavar="URL", help=url)
        return action

    add("secret", "create a secret for the proxy and its nodes, and print it", url="")
    up = add("up", "call all nodes, and print how much they can hold; exits with 1 if some do not connect")
    proxy = add("proxy", "run a proxy that trainers share, until Ctrl-C; prints its URL")
    add_endpoint(proxy)
    for flag in _REMOVED_FLAGS:
        proxy.add_argument(f"--data{flag}", action="append", dest="removed", help=SUPPRESS)
    for flag in _REMOVED_SWITCHES:
        proxy.add_argument(f"--data{flag}", action="append_const", const=flag, dest="removed", help=SUPPRESS)
    every = number_from(0.1, _MAX_INTERVAL_SECONDS)
    proxy.add_argument("--every", type=every, default=60.0, metavar="SECONDS", help="status interval (default: 60)")
    status = add("status", "print the tier's contents, activity and costs", _TIER_URL_HELP)
    bench = add("bench", "measure writes and reads of new objects, which stay until evicted", _TIER_URL_HELP)
    bench.add_argument("--objects", type=positive, default=32, metavar="N", help="number of objects (default: 32)")
    size = size_from(1, MAX_OBJECT_BYTES)
    bench.add_argument("--size", type=size, default=8 << 20, metavar="SIZE", help="object size (default: 8MiB)")
    concurrent = "concurrent reads (default: 4)"
    bench.add_argument("--concurrency", "--at-once", type=positive, default=4, metavar="N", help=concurrent)
    down = add("down", "delete all objects on the nodes, and stop the nodes", flags=" --yes")
    down.add_argument("--yes", "--forget", action="store_true", required=True, help="confirm the deletion")
    for action in (up, status, bench, down):
        add_json(action)


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
        text = "--data has no effect: lost shards are written again when their object is read; leave it out"
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
    summary = f"{nodes - absent:,} of {format_count(nodes, 'node')} joined, and can hold "
    _print(args, status, summary + format_bytes(status["limit_bytes"]), *_describe_problems(status))
    return 1 if absent else 0


async def _status(args: Namespace) -> int:
    async with _open_bench(args.url) as bench:
        status = await bench.status()
    _print(args, status, table(_status_rows(status), indent=""), *_describe_problems(status))
    return 0


async def _bench(args: Namespace) -> int:
    async with _open_bench(args.url) as bench:
        result = await run_bench(bench, objects=args.objects, size_bytes=args.size, concurrency=args.concurrency)
    _print(args, result, table(_bench_rows(result), indent=""))
    return 0 if result["read"] == args.objects else 1


async def _down(args: Namespace) -> int:
    async with _run_proxy(WarmDeployment.parse(args.url), read_tier_secret()) as proxy:
        problems = await proxy.delete_all()
    _print(args, {"problems": problems}, *map(make_printable, problems))
    return 1 if problems else 0


def _print(args: Namespace, document: Mapping[str, Any], *lines: str) -> None:
    """Print a result as JSON or as lines."""
    for line in [json_text(document)] if args.json else lines:
        print(line)


def _describe_problems(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield why nodes did not connect; a reason that several nodes have, apart from their names, comes once."""
    alike = dict[str, tuple[list[str], str]]()
    for problem in status["problems"]:
        name, _, reason = problem.partition(": ")
        names, _ = alike.setdefault(reason.replace(name, ""), ([], reason))
        names.append(name)
    yield from (make_printable(f"{', '.join(names)}: {reason}") for names, reason in alike.values())
    if status["absent"] > len(status["problems"]):
        yield f"and {status['absent'] - len(status['problems']):,} more"


_ACTIONS = {"up": _up, "proxy": _proxy, "status": _status, "bench": _bench, "down": _down}


@asynccontextmanager
async def _run_proxy(fleet: WarmDeployment, tenant: TierSecret) -> AsyncIterator[Proxy]:
    """Run a proxy in this process; the nodes leave a proxy that runs elsewhere."""
    proxy = await InProcessProxy(fleet, read_warm_secret(), ShardMac(tenant.shards_key)).start()
    try:
        yield proxy
    finally:
        await proxy.close()


@asynccontextmanager
async def _open_bench(url: str) -> AsyncIterator[BenchTarget]:
    """Yield the tier of a proxy in this process, after waking its nodes, or of a proxy elsewhere."""
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
    """Wait until no write to nodes is pending; return the number of objects stored so far."""
    while proxy.statistics().pending_bytes:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(_POLL_SECONDS)
    return proxy.statistics().stored
