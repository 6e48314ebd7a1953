"""The HTTP/1.1 server of a shared tier, run by ``stoker tier serve``.

``GET /objects/<name>`` returns an object or a range of it, and ``POST /objects`` ranges of many objects (see
:mod:`stoker._shared.protocol`); ``PUT`` offers an object, ``DELETE`` removes it. A request carries a tenant's token,
and each tenant sees its own objects only. The server rejects a PUT whose bytes do not match the name, so no client can
corrupt an object, not even its own.

``GET /metrics`` returns counters in Prometheus's text format, and needs the metrics token; ``GET /health`` needs none.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from stoker._base.breaker import Permit, ReadOutcome
from stoker._base.task_group import end_tasks
from stoker._base.threads import run_in_thread
from stoker._cache.index import is_name, size_of
from stoker._format.supersample import MAX_OBJECT_BYTES
from stoker._shared.folder_storage import FolderStorage
from stoker._shared.protocol import (
    BATCH_PATH,
    GROUP_HEADER,
    LENGTH,
    MAX_REQUEST_BYTES,
    METRIC_PREFIX,
    METRICS_PATH,
    MISSING_LENGTH,
    OBJECTS_PATH,
    ObjectRange,
    parse_request,
)
from stoker._shared.read_through import ReadThrough
from stoker._shared.secret import TierSecret
from stoker._shared.storage import StorageStatistics, create_buffer
from stoker.abc import ObjectRef
from stoker.errors import ChecksumError, NotFoundError, ObjectChangedError, StokerError

_BEARER = re.compile(r"[Bb]earer +([0-9a-f]{64})", re.ASCII)
_GROUP = re.compile(r"[0-9a-f]{16}", re.ASCII)
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="stoker tier"'}
_SLICE_BYTES = 256 << 10  # buffered per reader that stalls, in addition to the object
_TRANSFER_SECONDS, _MIN_BYTES_PER_SECOND = 30.0, 1 << 20
_FETCH_SECONDS = 0.05
"""How long a request waits for an object that the server reads from its bucket. After that the client is faster if it
reads the bucket itself; the server completes the read for later requests."""
_LOG_PAUSE_SECONDS = 5.0
"""Minimum time between two log messages about failed reads from buckets, of which each request may cause one."""
_FETCH_TIMEOUT_SECONDS = 5.0
"""Time limit of a read from a bucket, plus a second per MiB; after three late reads the circuit breaker opens."""

_log = logging.getLogger("stoker.tier.server")


class Storage(Protocol):
    """Storage of a server's objects; see :class:`~stoker._shared.storage.BoundedStorage`.

    Attributes:
        name: Name of the storage in metrics.
    """

    name: str

    def __contains__(self, key: str) -> bool: ...
    def reserve(self, key: str, size_bytes: int, group: str) -> bool: ...
    async def store(self, key: str, data: memoryview) -> None: ...
    def cancel_reservation(self, key: str) -> None: ...
    def drop(self, key: str) -> None: ...
    def pin(self, key: str) -> AbstractAsyncContextManager[memoryview | Path | None]: ...
    def statistics(self) -> StorageStatistics: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class ServerStatistics:
    """Counters of one server.

    Attributes:
        requests: Number of requests for objects with a valid token.
        misses: Number of reads of objects that were neither here nor read from a bucket in time.
        sent_bytes: Bytes of objects sent.
        received_bytes: Bytes of objects received.
        refused: Number of offers whose bytes did not match the name.
        unauthorized: Number of requests without a valid token.
        fetched: Number of objects read from a bucket.
        fetch_failures: Number of objects that could not be read from a bucket.
    """

    requests: int = 0
    misses: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    refused: int = 0
    unauthorized: int = 0
    fetched: int = 0
    fetch_failures: int = 0


class TierServer:
    """Handles the HTTP requests of a tier server. Used by one event loop.

    Args:
        secrets: The tenants' secrets.
        memory: First storage of objects.
        folder: Storage of objects that do not fit into ``memory``; None for no such storage.
        sources: Data sets to read missing objects from.

    Attributes:
        stats: Counters so far.
        on_authenticated: Called with the protocol of each connection that has sent a valid token.
    """

    def __init__(
        self,
        secrets: Sequence[TierSecret],
        memory: Storage,
        folder: FolderStorage | None = None,
        sources: Sequence[ReadThrough] = (),
    ) -> None:
        self._secrets, self._sources = tuple(secrets), tuple(sources)
        storages = (memory, folder)
        self._storages: dict[str, Storage] = {each.name: each for each in storages if each is not None}
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._next_log_seconds = float("-inf")
        self.stats = ServerStatistics()
        self.on_authenticated: Callable[[Any], object] = lambda _: None

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[_end_broken_transfers])
        path = OBJECTS_PATH + "{name}"
        app.router.add_get(path, self._get)
        app.router.add_put(path, self._put, expect_handler=self._expect)
        app.router.add_delete(path, self._delete)
        app.router.add_post(BATCH_PATH, self._get_batch)
        app.router.add_get(METRICS_PATH, self._metrics)
        app.router.add_get("/health", self._health)
        return app

    async def close(self) -> None:
        """Cancel the reads from buckets, and release all objects. Idempotent."""
        await end_tasks(self._fetches.values())
        for source in self._sources:
            await source.close()
        for storage in self._storages.values():
            storage.close()

    # Reads.

    async def _get(self, request: web.Request) -> web.StreamResponse:
        secret, key = self._parse_request(request)
        response = await self._respond(request, key)
        if response is None and await self._wait_for_fetch(secret, key):
            response = await self._respond(request, key)
        if response is None:
            self.stats.misses += 1
            raise web.HTTPNotFound(text="this server does not have the object\n")
        return response

    async def _respond(self, request: web.Request, key: str) -> web.StreamResponse | None:
        """Send an object from the storage that holds it; None if none does."""
        for storage in self._storages.values():
            async with storage.pin(key) as content:
                if isinstance(content, Path):
                    return await self._send_file(request, content)
                if content is not None:
                    return await self._send(request, content)
        return None

    async def _send_file(self, request: web.Request, file: Path) -> web.StreamResponse:
        response = _FileResponse(file)
        async with asyncio.timeout(_transfer_seconds(size_of(request.match_info["name"]))):
            await response.prepare(request)
        if request.method != "HEAD" and response.status in (200, 206):
            self.stats.sent_bytes += response.content_length or 0
        return response

    async def _send(self, request: web.Request, data: memoryview) -> web.StreamResponse:
        try:
            start, end, _ = request.http_range.indices(len(data))
        except ValueError:
            start = end = 0
        if start >= end:
            raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{len(data)}"})
        response = web.StreamResponse(headers={"Accept-Ranges": "bytes"})
        if "Range" in request.headers:
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        response.content_type = "application/octet-stream"
        response.content_length = end - start
        async with asyncio.timeout(_transfer_seconds(end - start)):
            await response.prepare(request)
            if request.method != "HEAD":
                for offset in range(start, end, _SLICE_BYTES):
                    await response.write(data[offset : min(end, offset + _SLICE_BYTES)])
                self.stats.sent_bytes += end - start
            await response.write_eof()
        return response

    async def _get_batch(self, request: web.Request) -> web.StreamResponse:
        secret = self._authenticate(request, lambda each: each.token)
        self.stats.requests += 1
        if (size_bytes := request.content_length or 0) > MAX_REQUEST_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_REQUEST_BYTES, size_bytes)
        async with asyncio.timeout(_TRANSFER_SECONDS):
            body = await request.read()  # if its length is unknown, at most 1 MiB, aiohttp's default
        try:
            parts = parse_request(body)
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from None
        response = web.StreamResponse()
        response.content_type = "application/octet-stream"
        async with asyncio.timeout(_transfer_seconds(sum(part.end - part.start for part in parts))):
            await response.prepare(request)
            for part in parts:
                await self._send_part(response, secret, part)
            await response.write_eof()
        return response

    async def _send_part(self, response: web.StreamResponse, secret: TierSecret, part: ObjectRange) -> None:
        """Send a range of a batch, or a miss; a missing object is read from its bucket for later requests."""
        key = f"{secret.tenant}/{part.name}"
        for storage in self._storages.values():
            async with storage.pin(key) as content:
                if content is not None:
                    head = LENGTH.pack(part.end - part.start)
                    async for piece in _read_slices(content, part):
                        await response.write(head + piece if head else piece)
                        head = b""
                    self.stats.sent_bytes += part.end - part.start
                    return
        self.stats.misses += 1
        if key not in self._fetches:
            self._begin_fetch(secret, key)
        await response.write(LENGTH.pack(MISSING_LENGTH))

    async def _wait_for_fetch(self, secret: TierSecret, key: str) -> bool:
        """Read an object from its bucket, if that is known; return whether the read has ended in time."""
        fetch = self._fetches.get(key) or self._begin_fetch(secret, key)
        if fetch is None:
            return False
        await asyncio.wait([fetch], timeout=_FETCH_SECONDS)
        return fetch.done()

    def _begin_fetch(self, secret: TierSecret, key: str) -> asyncio.Task[None] | None:
        """Start to read an object from its bucket; None if that is not known, or its circuit breaker is open."""
        name, loop = key.rpartition("/")[2], asyncio.get_running_loop()
        candidates = ((source, ref) for source in self._sources if (ref := source.find(secret, name)) is not None)
        source, ref = next(candidates, (None, None))
        if source is None or ref is None:
            for each in self._sources:
                each.start_refresh()
            return None
        permit = source.breaker.permit(loop.time())
        if permit is None:
            return None
        fetch = self._fetches[key] = loop.create_task(self._fetch(source, permit, ref, secret, key))
        fetch.add_done_callback(lambda _: self._fetches.pop(key))
        return fetch

    async def _fetch(self, source: ReadThrough, permit: Permit, ref: ObjectRef, secret: TierSecret, key: str) -> None:
        """Read an object from its bucket, once for all concurrent requests."""
        outcome = ReadOutcome.UNDECIDED
        try:
            async with self._reserve(key, ref.size_bytes, f"{secret.tenant}/{source.group(secret)}") as storage:
                if storage is not None:
                    data = await create_buffer(ref.size_bytes)
                    outcome = ReadOutcome.FAILED
                    async with asyncio.timeout(_FETCH_TIMEOUT_SECONDS + ref.size_bytes / _MIN_BYTES_PER_SECOND):
                        await source.read(ref, data)
                    outcome = ReadOutcome.DELIVERED
                    await storage.store(key, data)
                    self.stats.fetched += 1
        except (NotFoundError, ObjectChangedError, ChecksumError) as error:
            outcome = ReadOutcome.UNDECIDED  # the bucket itself responds
            self._fetch_failed(ref, error)
        except (StokerError, OSError, MemoryError) as error:
            self._fetch_failed(ref, error)
        finally:
            source.breaker.report(permit, outcome, asyncio.get_running_loop().time())

    def _fetch_failed(self, ref: ObjectRef, error: Exception) -> None:
        self.stats.fetch_failures += 1
        now_seconds = asyncio.get_running_loop().time()
        if now_seconds >= self._next_log_seconds:
            self._next_log_seconds = now_seconds + _LOG_PAUSE_SECONDS
            _log.warning("%s could not be read from its bucket: %s", ref.key, error or "the read took too long")

    # Offers.

    async def _expect(self, _: web.Request) -> None:
        """Do nothing: the handler sends ``100 Continue`` once there is room for the body."""

    def _parse_offer(self, request: web.Request) -> tuple[TierSecret, str, int]:
        """Return the tenant's secret, the key and the size of an offered object.

        Raises:
            HTTPException: The offer is invalid, or the server has the object.
        """
        secret, key = self._parse_request(request)
        size_bytes = request.content_length
        if size_bytes is None:
            raise web.HTTPLengthRequired(text="the header Content-Length is required\n")
        if not 0 < size_bytes <= MAX_OBJECT_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_OBJECT_BYTES, size_bytes)
        if size_bytes != size_of(request.match_info["name"]):
            raise self._mismatch_error()
        if self._holds(key):
            raise web.HTTPOk(text="the server has the object\n")
        return secret, key, size_bytes

    async def _put(self, request: web.Request) -> web.Response:
        is_held_back = "Expect" in request.headers
        try:
            secret, key, size_bytes = self._parse_offer(request)
            group = request.headers.get(GROUP_HEADER, "")
            group = f"{secret.tenant}/{group if _GROUP.fullmatch(group) else ''}"
            async with self._reserve(key, size_bytes, group) as storage, asyncio.timeout(_transfer_seconds(size_bytes)):
                if storage is None:
                    raise web.HTTPInsufficientStorage(text="there is no room for the object\n")
                data = await self._buffer(size_bytes)
                if is_held_back:
                    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    request.writer.output_size = 0  # counts the final response, which has not begun
                    is_held_back = False
                await self._receive(request, data)
                if not await run_in_thread(lambda _: secret.is_name_of(key.rpartition("/")[2], data)):
                    raise self._mismatch_error()
                await self._keep(storage, key, data)
        except web.HTTPException as refusal:
            if is_held_back:
                refusal.force_close()  # the client may send the body anyway, which would be parsed as a request
            raise
        return web.Response(status=201, text="the object was stored\n")

    async def _buffer(self, size_bytes: int) -> memoryview:
        try:
            return await create_buffer(size_bytes)
        except MemoryError as error:
            _log.warning("%s", error)
            raise web.HTTPInsufficientStorage(text="there is no memory for the object\n") from None

    async def _keep(self, storage: Storage, key: str, data: memoryview) -> None:
        try:
            await storage.store(key, data)
        except OSError as error:
            _log.warning("an object could not be written to disk: %s", error)
            raise web.HTTPInsufficientStorage(text="the object could not be written to disk\n") from None

    def _holds(self, key: str) -> bool:
        """Return whether an object is here, or is being received."""
        return any(key in storage for storage in self._storages.values())

    def _mismatch_error(self) -> web.HTTPException:
        self.stats.refused += 1
        return web.HTTPUnprocessableEntity(text="the bytes do not match the name\n")

    @asynccontextmanager
    async def _reserve(self, key: str, size_bytes: int, group: str) -> AsyncIterator[Storage | None]:
        """Reserve room for an object, and yield its storage; None if there is no room, or the object is here already.

        The room is given back on exit if the object was not kept.
        """
        storage = None
        if not self._holds(key):
            storage = next((each for each in self._storages.values() if each.reserve(key, size_bytes, group)), None)
        try:
            yield storage
        finally:
            if storage is not None:
                storage.cancel_reservation(key)

    async def _receive(self, request: web.Request, data: memoryview) -> None:
        done = 0
        async for chunk in request.content.iter_any():
            data[done : done + len(chunk)] = chunk  # the parser ensures that no more than announced arrives
            done += len(chunk)
        if done < len(data):
            raise web.HTTPBadRequest(text="the body is shorter than announced\n")
        self.stats.received_bytes += done

    async def _delete(self, request: web.Request) -> web.Response:
        _, key = self._parse_request(request)
        for storage in self._storages.values():
            storage.drop(key)
        return web.Response(status=204)

    # Authorization and metrics.

    def _parse_request(self, request: web.Request) -> tuple[TierSecret, str]:
        """Return the tenant's secret, and the key of the requested object.

        Raises:
            HTTPUnauthorized: The request has no valid token.
            HTTPNotFound: The path does not end with the name of an object.
        """
        secret = self._authenticate(request, lambda each: each.token)
        self.stats.requests += 1
        name = request.match_info["name"]
        if not is_name(name):
            raise web.HTTPNotFound(text="this is not the name of an object\n")
        return secret, f"{secret.tenant}/{name}"

    def _authenticate(self, request: web.Request, token_of: Callable[[TierSecret], str]) -> TierSecret:
        """Return the secret of the tenant whose token a request carries.

        Raises:
            HTTPUnauthorized: The request has no valid token.
        """
        match = _BEARER.fullmatch(request.headers.get("Authorization", ""))
        token = match[1] if match else ""
        # Compares all, each in constant time, so the duration reveals nothing.
        matches = [secret for secret in self._secrets if hmac.compare_digest(token_of(secret), token)]
        if not matches:
            self.stats.unauthorized += 1
            raise web.HTTPUnauthorized(text="a valid token is required\n", headers=_CHALLENGE)
        self.on_authenticated(request.protocol)
        return matches[0]

    async def _metrics(self, request: web.Request) -> web.Response:
        self._authenticate(request, lambda each: each.metrics_token)
        return web.Response(text="\n".join([*self._metric_lines(), ""]))

    def statistics(self) -> dict[str, StorageStatistics]:
        """Return a snapshot of each storage, by its name."""
        return {name: storage.statistics() for name, storage in self._storages.items()}

    def _metric_lines(self) -> Iterator[str]:
        for name, value in asdict(self.stats).items():
            yield f"# TYPE {METRIC_PREFIX}{name}_total counter\n{METRIC_PREFIX}{name}_total {value}"
        for name in StorageStatistics.__slots__:
            is_gauge = name in ("objects", "used_bytes", "limit_bytes")
            metric = f"{METRIC_PREFIX}place_{name}" + ("" if is_gauge else "_total")
            yield f"# TYPE {metric} {'gauge' if is_gauge else 'counter'}"
            for place, statistics in self.statistics().items():
                yield f'{metric}{{place="{place}"}} {getattr(statistics, name)}'

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")


async def _read_slices(content: memoryview | Path, part: ObjectRange) -> AsyncIterator[memoryview]:
    """Yield the bytes of a range from the storage of its object.

    Raises:
        ConnectionAbortedError: The file was damaged or removed meanwhile, so the response cannot continue.
    """
    for start in range(part.start, part.end, _SLICE_BYTES):
        end = min(part.end, start + _SLICE_BYTES)
        if isinstance(content, Path):
            yield await asyncio.to_thread(_read_file, content, start, end)
        else:
            yield content[start:end]


def _read_file(file: Path, start: int, end: int) -> memoryview:
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            data = stream.read(end - start)
    except OSError as error:
        raise ConnectionAbortedError(f"{file}: {error}") from None
    if len(data) < end - start:
        raise ConnectionAbortedError(f"{file} is shorter than its name says")
    return memoryview(data)


class _FileResponse(web.FileResponse):
    """A file response that the handler can prepare itself; aiohttp would prepare it a second time."""

    async def prepare(self, request: web.BaseRequest) -> Any:
        return None if self.prepared else await super().prepare(request)


@web.middleware
async def _end_broken_transfers(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Close the connection of a transfer that times out or that the peer aborts, since no response can follow."""
    try:
        return await handler(request)
    except (ConnectionError, TimeoutError):
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=408)


def _transfer_seconds(size_bytes: int) -> float:
    """Return the time limit of a transfer, so that a stalled peer does not hold memory."""
    return _TRANSFER_SECONDS + size_bytes / _MIN_BYTES_PER_SECOND
