"""Storage of a tier server on the nodes of a proxy, so that trainers on other machines read the objects over HTTP.

Memory is bounded for any number of trainers: an object that several request is read from the nodes once, into memory
that is released when the last of them has received it; a request waits while all of this memory is in use.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any

from aiohttp import web

from stoker._base.sizes import format_bytes
from stoker._cache.index import size_of
from stoker._memory.budget import ByteBudget
from stoker._shared.client import ServerAddress, get_with_metrics_token
from stoker._shared.protocol import METRIC_PREFIX
from stoker._shared.secret import TierSecret
from stoker._shared.server import TierServer
from stoker._shared.storage import StorageStatistics, create_buffer
from stoker.errors import UnexpectedAnswerError
from stoker_warm._proxy import Proxy

STATUS_PATH = "/status"

_log = logging.getLogger("stoker.warm.proxy")


def create_object_name(key: str) -> str:
    """Return the name of a tenant's object on the nodes: 32 hexadecimal digits, which include its size.

    Equal names of different tenants, by chance or by guessing, give different results.

    Args:
        key: ``<tenant>/<name>``, from :class:`~stoker._shared.secret.TierSecret`.
    """
    digest = sha256(key.encode()).hexdigest()
    return f"{digest[:8]}{key[-24:-16]}{digest[8:24]}"


@dataclass(slots=True, eq=False)
class _SharedRead:
    """Read of an object from the nodes, shared by the requests for it.

    Attributes:
        data: Bytes of the object; None if it cannot be read from the nodes.
        task: Task that reads the object, and holds its memory until it is cancelled.
        readers: Number of requests that wait for the object or are sending it.
    """

    data: asyncio.Future[memoryview | None]
    task: asyncio.Task[None]
    readers: int = 0


class WarmStorage:
    """Storage of a :class:`~stoker._shared.server.TierServer` on nodes; see :class:`~stoker._shared.server.Storage`.

    Args:
        proxy: Proxy of the nodes; the caller starts and closes it.
        max_read_bytes: Maximum bytes of objects that are being read and sent; a larger object counts as missing.
    """

    name = "functions"

    def __init__(self, proxy: Proxy, *, max_read_bytes: int = 256 << 20) -> None:
        self._proxy, self._budget = proxy, ByteBudget(max_read_bytes)
        self._reads: dict[str, _SharedRead] = {}
        self._reserved: dict[str, int] = {}
        self._has_logged_size = False

    def __contains__(self, key: str) -> bool:
        return key in self._reserved or self._proxy.objects.has(create_object_name(key))

    def reserve(self, key: str, size_bytes: int, group: str) -> bool:
        """Reserve room in the queue of writes; see :class:`~stoker._shared.storage.BoundedStorage`."""
        most_bytes = self._proxy.config.max_object_bytes
        if size_bytes > most_bytes and not self._has_logged_size:
            self._has_logged_size = True
            _log.warning(
                "an object of %s was declined, and so are all objects larger than %s; use a code with more data "
                "shards, or pack smaller super-samples",
                *map(format_bytes, (size_bytes, most_bytes)),
            )
        has_room = self._proxy.objects.has_room(size_bytes)
        if has_room:
            self._reserved[key] = size_bytes
            self._proxy.objects.counters.pending_bytes += size_bytes
        return has_room

    async def store(self, key: str, data: memoryview) -> None:
        """Queue an object for writing to the nodes."""
        self.cancel_reservation(key)
        self._proxy.objects.offer(create_object_name(key), data, must_copy=False)

    def cancel_reservation(self, key: str) -> None:
        """Cancel the reservation of an object that will not be stored."""
        self._proxy.objects.counters.pending_bytes -= self._reserved.pop(key, 0)

    def drop(self, key: str) -> None:
        """Remove an object."""
        self._proxy.objects.remove(create_object_name(key))

    @asynccontextmanager
    async def pin(self, key: str) -> AsyncIterator[memoryview | None]:
        """Yield an object's bytes; None if the nodes do not have it, or too few shards arrive in time."""
        read = self._reads.get(key)
        is_first = read is None
        if read is None:
            name = create_object_name(key)
            if self._proxy.objects.find(name) is None or size_of(name) > self._budget.limit:
                yield None
                return
            read = self._reads[key] = self._start_read(name)
        read.readers += 1
        try:
            data = await asyncio.shield(read.data)
            if data is not None and not is_first:
                self._proxy.objects.count_hit(len(data))
            yield data
        finally:
            read.readers -= 1
            if not read.readers:
                del self._reads[key]
                read.task.cancel()

    def _start_read(self, name: str) -> _SharedRead:
        loop = asyncio.get_running_loop()
        shard: asyncio.Future[memoryview | None] = loop.create_future()
        return _SharedRead(shard, loop.create_task(self._read_and_hold(name, shard)))

    async def _read_and_hold(self, name: str, shard: asyncio.Future[memoryview | None]) -> None:
        async with self._budget.reserve(size_of(name)):
            try:
                data = await create_buffer(size_of(name))
                shard.set_result(data if await self._proxy.objects.read(name, data) else None)
            except Exception as error:  # noqa: BLE001 - raised in the requests that wait for it
                shard.set_exception(error)
            await asyncio.get_running_loop().create_future()

    def statistics(self) -> StorageStatistics:
        """Return a snapshot."""
        statistics = self._proxy.statistics()
        return StorageStatistics(
            hits=statistics.hits,
            added=statistics.stored,
            declined=statistics.declined,
            evicted=statistics.evicted,
            objects=statistics.objects,
            used_bytes=statistics.held_bytes,
            limit_bytes=statistics.limit_bytes,
        )

    def close(self) -> None:
        """Do nothing: reads end with their requests, and the caller closes the proxy."""


async def read_status(server: ServerAddress, secret: TierSecret) -> dict[str, Any]:
    """Request the status of a proxy that runs elsewhere; see :meth:`stoker_warm._proxy.Proxy.status`.

    Raises:
        StoreError: The server cannot be reached, or is not a proxy of a warm tier.
    """
    answer = await get_with_metrics_token(server, secret, STATUS_PATH)
    with suppress(ValueError):
        status = json.loads(answer)
        if isinstance(status, dict):
            return status
    raise UnexpectedAnswerError(f"{server.origin}{STATUS_PATH} is not of a warm tier; check the URL")


class WarmServer(TierServer):
    """A tier server whose storage is the nodes of a proxy; ``GET /status`` returns the proxy's status as JSON.

    Args:
        secrets: Secrets of the tenants.
        proxy: Proxy of the nodes; the caller starts and closes it.
    """

    def __init__(self, secrets: Sequence[TierSecret], proxy: Proxy) -> None:
        super().__init__(secrets, WarmStorage(proxy))
        self._proxy = proxy

    def application(self) -> web.Application:
        """Return the application for a web server."""
        app = super().application()
        app.router.add_get(STATUS_PATH, self._status)
        return app

    async def _status(self, request: web.Request) -> web.Response:
        self._authenticate(request, lambda each: each.metrics_token)
        return web.json_response(await self._proxy.status())

    def _metric_lines(self) -> Iterator[str]:
        yield from super()._metric_lines()
        statistics = self._proxy.statistics()
        for each in fields(statistics):
            if each.name != "nodes":
                yield f"{METRIC_PREFIX}warm_{each.name} {getattr(statistics, each.name)}"
        for state, count in statistics.nodes.items():
            yield f'{METRIC_PREFIX}warm_nodes{{state="{state}"}} {count}'
        yield f"{METRIC_PREFIX}warm_dollars {self._proxy.bill.dollars()}"
