"""A proxy in virtual time that clients share, and clients of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker import Prices
from stoker._base.checksum import crc32c
from stoker._cache.keeper import name_of, size_of
from stoker.abc import Answer, ObjectRef
from stoker.errors import ConnectionLostError, ServerError
from stoker_warm._auth import Address, Secret
from stoker_warm._billing import Tariff
from stoker_warm._client import ClientConfig, WarmClient
from stoker_warm._config import WarmConfig
from stoker_warm._connection import Connection
from stoker_warm._proxy import Proxy
from stoker_warm._server import ProxyServer, ServerConfig
from support.warm_platform import ADDRESS, MAC, SECRET, MemoryListener, Tier
from support.warm_wires import End

__all__ = ["SharedTier", "loaded", "objects", "until_stored"]


def objects(count: int, size_bytes: int = 100_000, *, seed: int = 0) -> dict[str, bytes]:
    """Return objects by their names."""
    rng = random.Random(seed)
    bodies = [rng.randbytes(size_bytes) for _ in range(count)]
    refs = [
        ObjectRef(key=f"{seed}/{row}", size_bytes=size_bytes, crc32c=crc32c(data)) for row, data in enumerate(bodies)
    ]
    return {name_of(ref): data for ref, data in zip(refs, bodies, strict=True)}


class SharedTier(Tier):
    """A proxy that answers clients; ``async with``.

    Attributes:
        server: of the proxy that runs now.
        ends: of the connections that clients made.
        broken: names of functions that cannot be called.
    """

    def __init__(self, config: WarmConfig | None = None, *, server: ServerConfig | None = None, **options: Any) -> None:
        self._server_config = server
        self.ends: list[End] = []
        self.broken: set[str] = set()
        self._clients: list[WarmClient] = []
        super().__init__(config, **options)

    def new_proxy(self) -> Proxy:
        """Return a proxy that knows nothing of what nodes hold, and has a server of its own."""
        prices = Prices.load()
        tariff = Tariff(functions=prices.function("lambda"), store=prices.store("s3"))
        listener = MemoryListener(self.network)
        proxy = Proxy(self.config, SECRET, self._invoke, listener, mac=MAC, tariff=tariff, rng=self.rng)
        self.server = ProxyServer(proxy, self._server_config)
        proxy.serve(self.server)
        return proxy

    async def _invoke(self, name: str, event: Mapping[str, Any]) -> Answer:
        if name in self.broken:
            raise ServerError(f"{name} is not deployed")
        return await self.platform.invoke(name, event)

    async def replace_proxy(self) -> None:
        """Put a proxy in the place of this one that knows nothing of what nodes hold, once they have returned."""
        await self.proxy.close()
        await asyncio.sleep(1.0)
        self.proxy = self.new_proxy()
        await self.proxy.start()

    async def dial(self, make: Callable[[], Connection]) -> Connection:
        """Connect to the proxy."""
        try:
            end, connection = await self.network.dial(ADDRESS, make, name="client")
        except ConnectionRefusedError as error:
            raise ConnectionLostError(str(error)) from None
        self.ends.append(end)
        return connection

    def client(self, config: ClientConfig | None = None, *, secret: Secret = SECRET) -> WarmClient:
        """Return a client, which is closed with the tier."""
        address = Address.parse(ADDRESS)
        made = WarmClient(address, secret, config=config, connect=self.dial, rng=random.Random(len(self._clients)))
        self._clients.append(made)
        return made

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.close()
        await super().__aexit__()


async def until_stored(proxy: Proxy) -> None:
    """Wait until nothing waits to be written to nodes."""
    while proxy.statistics().pending_bytes:  # noqa: ASYNC110 - tests ask as everybody can
        await asyncio.sleep(0.05)


async def loaded(client: WarmClient, names: Sequence[str]) -> dict[str, bytes | None]:
    """Return objects by their names, read at once."""

    async def read(name: str) -> bytes | None:
        into = bytearray(size_of(name))
        return bytes(into) if await client.read(name, memoryview(into)) else None

    return dict(zip(names, await asyncio.gather(*map(read, names)), strict=True))
