"""``stoker warm proxy``: a proxy that several trainers share, as a program."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from stoker._base.sizes import format_bytes
from stoker.cli.flags import opened
from stoker.cli.output import counted
from stoker.errors import ConfigError
from stoker_warm._commands.status import dollars_of, states_of
from stoker_warm._handshake import Secret
from stoker_warm._location import Fleet, WarmLocation
from stoker_warm._opening import OwnProxy
from stoker_warm._put_back import BucketOrigin, Origin
from stoker_warm._server import ProxyServer, Tariff
from stoker_warm._sockets import Certificate

__all__ = ["run_proxy"]


async def run_proxy(args: Namespace, location: WarmLocation, secret: Secret) -> int:
    """Serve until SIGINT, SIGTERM or a client's ``down``; return the exit code.

    Raises:
        StokerError: it cannot listen, or functions cannot be called.
    """
    fleet = _fleet(args, location)
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(opened(args, url, prefix="data_")) for url in args.data]
        return await _serve(args, fleet, secret, [BucketOrigin(store) for store in stores])


async def _serve(args: Namespace, fleet: Fleet, secret: Secret, origins: Sequence[Origin]) -> int:
    servers = list[ProxyServer]()

    def serves(tariff: Tariff) -> ProxyServer:
        servers.append(ProxyServer(tariff))
        return servers[0]

    own = await OwnProxy.open(fleet, secret, serves=serves, origins=origins)
    is_over = servers[0].is_down
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, is_over.set)
    try:
        door = own.proxy.door
        print(f"warm://{door.address}" + (f"?fingerprint={door.fingerprint}" if door.fingerprint else ""), flush=True)
        while not is_over.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(args.every):
                    await is_over.wait()
            print(f"stoker: {_line(await own.status())}", file=sys.stderr)
    finally:
        await own.close()
    return 0


def _fleet(args: Namespace, location: WarmLocation) -> Fleet:
    if location.fleet is None:
        raise ConfigError("a proxy is run for functions: give a URL such as warm+lambda://stoker?listen=10.0.0.5:7411")
    if (args.certificate is None) != (args.key is None):
        raise ConfigError("--certificate and --key go together")
    if bool(args.data) != bool(location.fleet.config.put_back):
        raise ConfigError(
            "--data and put_back= in the URL go together: the data sets from which lost shards are put back, and how "
            "many objects at a time"
        )
    if args.certificate is None:
        return location.fleet
    return dataclasses.replace(location.fleet, certificate=Certificate(chain=args.certificate, key=args.key))


def _line(told: Mapping[str, Any]) -> str:
    held = f"{counted(told['objects'], 'object')}, {format_bytes(told['held_bytes'])}"
    reads = f"{told['hits']:,} hits, {told['misses']:,} misses, {told['losses']:,} lost"
    return f"{states_of(told)}; {held}; {reads}; {dollars_of(told['bill']['dollars'])}"
