"""``stoker warm``: runs, watches, measures and stops a tier in the memory of functions."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from stoker._base.sizes import format_bytes
from stoker.cli.flags import add_store_options, number_from, positive, size_from
from stoker.cli.output import counted, json_text, printable, table
from stoker.errors import ConfigError
from stoker_warm._commands.bench import measured, rows_of_bench
from stoker_warm._commands.proxy import run_proxy
from stoker_warm._commands.status import rows_of_status
from stoker_warm._handshake import Secret
from stoker_warm._location import WarmLocation
from stoker_warm._opening import WarmKeeper, open_keeper, secret_of_environment
from stoker_warm._wire import MAX_BODY_BYTES

__all__ = ["configure", "run"]

_MOST_EVERY_SECONDS = 86_400.0
_FUNCTIONS = "warm+lambda://PREFIX?listen=HOST:PORT&…, or warm+gcf://…"
_EPILOG = "Settings in a URL, and the secret in STOKER_WARM_SECRET: docs/warm-tier.md."


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
    data = "of a data set from which lost shards are put back, for a URL with put_back=; may be given several times"
    proxy.add_argument("--data", action="append", default=[], metavar="URL", help=data)
    add_store_options(proxy, prefix="data-", of="the data sets' bucket")
    every = number_from(0.1, _MOST_EVERY_SECONDS)
    proxy.add_argument("--every", type=every, default=60.0, metavar="SECONDS", help="between lines (default: 60)")
    status = add("status", "say what the tier holds, does and costs")
    bench = add("bench", "write and read objects, which stay there until others take their place")
    bench.add_argument("--objects", type=positive, default=32, metavar="N", help="how many (default: 32)")
    size = size_from(0, MAX_BODY_BYTES)
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
    async with _opened(location) as keeper:
        told = await keeper.status(wakes=True)
    nodes, absent = sum(told["nodes"].values()), told["absent"]
    print(f"{nodes - absent:,} of {counted(nodes, 'node')} came, and can hold {format_bytes(told['limit_bytes'])}")
    _tell_problems(told)
    return 1 if absent else 0


async def _status(args: Namespace, location: WarmLocation) -> int:
    async with _opened(location) as keeper:
        # A proxy that begins here knows nothing before its nodes have told what they hold.
        told = await keeper.status(wakes=location.fleet is not None)
    if args.json:
        print(json_text(told))
    else:
        print(table(rows_of_status(told), indent=""))
        _tell_problems(told)
    return 0


def _tell_problems(told: Mapping[str, Any]) -> None:
    """Say why nodes did not come, and of those with the same reason, but for their names, only once."""
    alike = dict[str, tuple[list[str], str]]()
    for problem in told["problems"]:
        name, _, why = problem.partition(": ")
        names, _ = alike.setdefault(why.replace(name, ""), ([], why))
        names.append(name)
    for names, why in alike.values():
        print(printable(f"{', '.join(names)}: {why}"))
    if told["absent"] > len(told["problems"]):
        print(f"and {told['absent'] - len(told['problems']):,} more")


async def _bench(args: Namespace, location: WarmLocation) -> int:
    async with _opened(location) as keeper:
        found = await measured(keeper, objects=args.objects, size_bytes=args.size, at_once=args.at_once)
    print(json_text(found) if args.json else table(rows_of_bench(found), indent=""))
    return 0 if found["read"] == args.objects else 1


async def _down(args: Namespace, location: WarmLocation) -> int:
    if location.fleet is not None and not args.forget:
        raise ConfigError(
            "nodes return by themselves when nobody asks; give --forget for them to drop what they hold, or the "
            "warm:// URL of the proxy that is to end"
        )
    async with _opened(location) as keeper:
        problems = await keeper.down(forgets=args.forget)
    for problem in problems:
        print(printable(problem))
    return 1 if problems else 0


_ACTIONS = {"up": _up, "status": _status, "bench": _bench, "down": _down}


@asynccontextmanager
async def _opened(location: WarmLocation) -> AsyncIterator[WarmKeeper]:
    keeper = await open_keeper(location, secret_of_environment())
    try:
        yield keeper
    finally:
        await keeper.close()
